"""Analysing the artifacts of one run: from its epsilons and examples to a summary. Sensitive.

Epsilons in memory are analysed at once. Epsilons in parts are read part by part, several times,
each part with the rows of its examples, so that memory does not grow with their number.
"""

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np

from indpriv._columns import MISSING, Rows, frames_of
from indpriv.accountant.risk import has_risk_curve
from indpriv.analysis.disclosures import disclosures
from indpriv.analysis.distribution import describe, unit_sizes
from indpriv.analysis.divisor import Divisor, divisor_of
from indpriv.analysis.duplicates import undeclared_people
from indpriv.analysis.exactness import Exactness, exactness_of
from indpriv.analysis.federated.views import views_of
from indpriv.analysis.groups import GroupTable, group_tables
from indpriv.analysis.guarantee import (
    Guarantee,
    Membership,
    guarantee_of,
    membership_if_known,
    worst_case_membership,
)
from indpriv.analysis.hazards import hazards
from indpriv.analysis.loss import LossRelation, relate_to_loss
from indpriv.analysis.norms_over_training import describe_drivers
from indpriv.analysis.run_facts import run_facts
from indpriv.analysis.schedule import schedule_of
from indpriv.analysis.summary import NO_EXACT_VALUES, Audit, has_exact_values
from indpriv.audit.attack_table import ScoredAttack
from indpriv.audit.groups import choose_groups
from indpriv.audit.run_attacks import BY_GROUP, run_attacks
from indpriv.audit.run_directory import RecordedRun, in_rows_of
from indpriv.audit.variants import MOST_COMPARED
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import EXAMPLES, EXAMPLES_NON_DP

_LIBRARIES = ("indpriv", "numpy", "scipy", "pandas", "pyarrow")


def summarise(
    log: NormLog,
    epsilons: Epsilons,
    recorded: RecordedRun,
    *,
    name: str,
    by: Sequence[str] = (),
    fidelity: Mapping[str, Any] | None = None,
    holdout: EpsilonTable | None = None,
    members: EpsilonTable | None = None,
    scored: Sequence[ScoredAttack] | None = None,
    seed: int = 0,
    command: str = "",
) -> Audit:
    """Analyse the artifacts of one run.

    Args:
        log: what the epsilons were made of.
        epsilons: of all its examples; in parts only if rows were accounted one by one, and the
            example table has them in the log's order.
        recorded: what else is known about the run.
        name: of the run.
        by: columns to group by; see `audit`.
        fidelity: how far the epsilons can lie from exact ones: fidelity, batch_norms, sensitivity
            and spacing of an audit.
        holdout: epsilons that the test examples would have had on the same trajectory.
        members: epsilons to compare with those of the hold-out, as far as these are not `epsilons`.
        scored: attacks on `recorded.for_attacks(seed)`; default all whose needs are met.
        seed: of the random choices of attacks and group tables.
        command: reproduces the audit.

    Raises:
        InputError: a column that does not exist, or groups without an example table.
    """
    tried = Audit(**(fidelity or {}))
    found = _of_examples(log, epsilons, recorded, by, seed, tried)
    attacks = _attacks(log, epsilons, recorded, found.groups, scored, (members, holdout), seed)
    run = run_facts(log, recorded.examples, recorded.recorder, recorded.declared)
    account, guarantee = epsilons.account, _guarantee(log, epsilons, recorded)
    versions = {name: _version(name) for name in _LIBRARIES} | {"python": platform.python_version()}
    brackets, by_group = _brackets(epsilons), attacks["attacks"]["attack"].eq(BY_GROUP)
    caveats = attacks["attacks"].loc[by_group & bool(attacks["roc"]), "caveat"].unique()
    checks = tuple(recorded.checks)
    return Audit(
        name=name,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        versions=versions,
        command=command,
        account=account,
        claim=epsilons.claim,
        claim_reason=epsilons.claim_reason,
        guarantee=guarantee,
        run=run,
        individual=describe(epsilons),
        unit_sizes=unit_sizes(log, epsilons),
        drivers=describe_drivers(log, epsilons, found.rows),
        loss=found.loss,
        groups=found.groups,
        **attacks,
        **(fidelity or {}),
        checks=checks,
        disclosures=disclosures(run, account, guarantee, checks, versions, brackets),
        hazards=hazards(run, account, guarantee, checks, caveats=caveats),
        missing=tuple(found.missing),
        schedule=schedule_of(log, account.delta, recorded.curve),
        views=views_of(log, epsilons, recorded.recorder, recorded.declared.content),
        exactness=_exactness(epsilons, found.loss, recorded, seed, tried),
    )


def _attacks(
    log: NormLog,
    epsilons: Epsilons,
    recorded: RecordedRun,
    groups: Sequence[GroupTable],
    scored: Sequence[ScoredAttack] | None,
    others: tuple[EpsilonTable | None, EpsilonTable | None],
    seed: int,
) -> dict[str, Any]:
    """What the attacks found, on all members or on some; others: epsilons as in `summarise`."""
    attacked, (members, holdout) = recorded.for_attacks(seed), others
    if isinstance(epsilons, EpsilonTable):
        table = epsilons
    elif (positions := recorded.attacked(seed)) is not None:
        table = epsilons.take(positions)
    else:
        table = epsilons.table(epsilons.details)
    return run_attacks(
        attacked, log, table, groups, scored, members=members, holdout=holdout, seed=seed
    )


def _exactness(
    epsilons: Epsilons,
    loss: LossRelation | None,
    recorded: RecordedRun,
    seed: int,
    fidelity: Audit,
) -> Exactness | None:
    """How exact the figures are."""
    attacked = (recorded.attacked(seed), recorded.attacked_others(seed))
    members, others = (None if found is None else len(found) for found in attacked)
    tried = fidelity.sensitivity or fidelity.spacing or fidelity.fidelity
    some = len(epsilons) > MOST_COMPARED and epsilons.account.rows_per_unit is None
    return exactness_of(
        len(epsilons),
        loss,
        members,
        others,
        MOST_COMPARED if tried and some else None,
    )


class _OfExamples(NamedTuple):
    """What the example table adds, and what the audit lacks.

    rows: of the training examples, in the order of the log.
    """

    rows: Rows | None = None
    loss: LossRelation | None = None
    groups: tuple[GroupTable, ...] = ()
    missing: Sequence[str] = ()


def _of_examples(
    log: NormLog,
    epsilons: Epsilons,
    recorded: RecordedRun,
    by: Sequence[str],
    seed: int,
    fidelity: Audit,
) -> _OfExamples:
    examples, missing = recorded.examples, _missing(recorded, log, epsilons, fidelity)
    if examples is None and by:
        raise InputError(
            f"--by {by[0]}: this run has no {EXAMPLES}, which holds the groups; audit it without "
            "--by"
        )
    if examples is None:
        return _OfExamples(missing=missing)
    rows = examples.train_rows(log.example_ids)
    columns, left_out = choose_groups(rows, by, recorded.declared.groups)
    train = rows
    if isinstance(epsilons, EpsilonTable) and epsilons.account.rows_per_unit is not None:
        train = in_rows_of(epsilons, examples).train_rows(epsilons.example_ids)
    loss = relate_to_loss(epsilons, train)
    test = examples.test_rows()
    groups = group_tables(epsilons, train, test, columns, seed=seed)
    notes = _group_notes(epsilons, groups, test)
    missing += [*undeclared_people(log, rows), *left_out, *notes]
    return _OfExamples(rows, loss, groups, missing)


def _guarantee(log: NormLog, epsilons: Epsilons, recorded: RecordedRun) -> Guarantee:
    account = epsilons.account
    if account.participation == "known":
        membership: Membership | None = membership_if_known(epsilons)
    elif not has_risk_curve(account):
        membership = None
    else:
        membership = worst_case_membership(log, account.delta)
    divisor = divisor_of_run(log, epsilons, recorded.recorder)
    said = recorded.declared.of_lines
    return guarantee_of(epsilons, recorded.checks, recorded.recorder, membership, divisor, said)


def divisor_of_run(log: NormLog, epsilons: Epsilons, recorder: Mapping[str, Any]) -> Divisor | None:
    """Whether the divisor of a run tells how many examples there are; as `divisor_of`."""
    rows = epsilons.account.rows_per_unit or 1
    return divisor_of(log.n_examples, log.total_steps, recorder, rows=rows)


def _brackets(epsilons: Epsilons) -> Counter[str]:
    """How many examples have which kind of bracket; empty where there are no kinds."""
    if isinstance(epsilons, EpsilonTable):
        return Counter(epsilons.details.get("bracket", np.array([])).tolist())
    found: Counter[str] = Counter()
    if "bracket" in epsilons.details:
        for frame in epsilons.frames(["bracket"]):
            found.update(frame["bracket"].tolist())
    return found


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed (run from its source)"


def _missing(recorded: RecordedRun, log: NormLog, epsilons: Epsilons, fidelity: Audit) -> list[str]:
    """What the audit lacks, in sentences."""
    found = []
    if recorded.examples is None:
        why = (
            "a RoundRecorder knows no losses"
            if recorded.recorder.get("rounds")
            else "the run ended before the losses of the final model were taken"
        )
        found.append(
            f"{EXAMPLES} is absent: {why}. Epsilons cover all logged steps; loss, groups and "
            "attacks are not shown."
        )
    elif not len(recorded.examples.test_rows()):
        found.append(
            "There are no test examples: test accuracy and attacks are not shown. Pass test_set to "
            "the Recorder."
        )
    elif recorded.non_dp is None:
        found.append(
            f"There is no non-private baseline ({EXAMPLES_NON_DP}): the attack cannot be compared "
            "with one on a model trained without DP."
        )
    assumes_norms = not log.individually_clipped and epsilons.account.participation == "secret"
    if assumes_norms and not has_exact_values(fidelity):
        found.append(NO_EXACT_VALUES)
    return found


def _group_notes(epsilons: Epsilons, groups: Sequence[GroupTable], test: Rows) -> list[str]:
    """What a reader of the group tables must know about them."""
    notes = []
    if groups and (epsilons.account.rows_per_unit or 1) > 1:
        notes.append(
            f"A {epsilons.account.unit} whose rows differ in a column is in its group {MISSING}."
        )
    names = dict.fromkeys(name for found in groups for name in found.columns)
    lacking = [
        name
        for name in names
        if name not in test.columns
        or all(frame[name].isna().all() for frame in frames_of(test, [name]))
    ]
    if lacking and len(test):
        notes.append(
            f"Test examples have no {', '.join(lacking)}: test accuracy and attacks are not shown "
            "by these columns. Pass test_metadata together with metadata."
        )
    return notes
