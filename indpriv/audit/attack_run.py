"""Attacks on a run, or on the models of a study, without an audit. Sensitive."""

from collections.abc import Collection
from pathlib import Path

from indpriv._checks import check_choice
from indpriv._files import first_at
from indpriv.accountant.per_example import table_for
from indpriv.analysis.attacks.attributes import AttributeFindings
from indpriv.analysis.attacks.membership import (
    attribute_attacks,
    materials,
    scored_attacks,
    tried,
)
from indpriv.analysis.recorded_run import (
    RecordedRun,
    knowledge_of,
    read_references,
    recorded_run,
    unchecked_facts,
)
from indpriv.analysis.summary import Audit
from indpriv.attacks import ATTACKS
from indpriv.audit.method_of_run import method_of_run
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import ATTRIBUTES, ATTRIBUTES_NON_DP, EXAMPLES
from indpriv.norm_log.schema import read_run_json


def attributes_of_run(run_dir: Path) -> tuple[AttributeFindings, ...]:
    """Attacks on the attributes that a run names, and on its baseline; empty if it names none."""
    run = RecordedRun(
        attributes=knowledge_of(run_dir / ATTRIBUTES),
        baseline_attributes=knowledge_of(run_dir / ATTRIBUTES_NON_DP),
    )
    return attribute_attacks(materials(run))


def results_of_run(run_dir: Path, signals: Path | None, names: Collection[str] = ()) -> Audit:
    """Attacks on a finished run, without an audit of it.

    Args:
        run_dir: the run.
        signals: of references for it; None for attacks without references.
        names: attacks of the registry; default all whose needs are met.

    Raises:
        InputError: an unknown attack, one whose needs are not met, or signals of something else.
    """
    examples = ExampleTable.from_parquet(run_dir / EXAMPLES)
    run = RecordedRun(
        examples=examples,
        references={} if signals is None else read_references(signals, run_dir, examples),
        attributes=knowledge_of(run_dir / ATTRIBUTES),
    )
    material = materials(run)["dp"]
    for name in names:
        check_choice("attack", name, ATTACKS)
        lacking = ATTACKS[name].lacks(material)
        if lacking is not None:
            raise InputError(
                f"{name} needs {lacking}, which this run and its signals do not have"
                + "; indpriv.attacks.train_references takes them, for --signals"
                * bool(ATTACKS[name].references)
            )
    record = read_run_json(run_dir)
    epsilon, delta = (first_at(record, ("guarantee", key)) for key in ("epsilon", "delta"))
    if epsilon is None or delta is None:  # of a loop of somebody's own
        opened = open_run(run_dir, unreadable="worst_case")
        recorded = recorded_run(opened, "worst_case")
        account = table_for(opened.log, method_of_run(opened.log, recorded, run_dir, {})[0])
        epsilon, delta = account.worst_case_epsilon, account.account.delta
    found = tried(scored_attacks(run, names), (float(epsilon), float(delta)), 0)
    return found.replace(unchecked=tuple(dict.fromkeys(unchecked_facts(run_dir, run.references))))
