"""How an audit accounts a log, and what other accounts of the same run would have said.

Sensitive.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
import pandas as pd

from indpriv._arrays import IntArray
from indpriv._columns import Partition, grouping_of, known_columns, rows_at
from indpriv._progress import StageProgress, silent
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.divisor import divisor_of
from indpriv.analysis.fidelity import (
    SENSITIVITY,
    BatchNormFidelity,
    Fidelity,
    Spacing,
    compare_with_exact,
    free_fidelity,
    sensitivity_to,
    spacing_of,
)
from indpriv.analysis.statistics import weighted
from indpriv.analysis.summary import Finding
from indpriv.epsilon_table import Epsilons, EpsilonTable
from indpriv.norm_log.norm_log import NormLog, coarser

FIDELITY_EPOCHS = (1 / 3, 1.0, 2.0)  # the range of the paper's Figure 4
BY_GROUP_EPOCHS = 1.0  # the K whose fidelity is also given by group: the paper's own
COARSER = (0.02, 0.05, 0.1)  # roundings to try, where the log's is finer
RULES = ("last", "closest", "worst_case")
MOST_COMPARED = 20_000  # other choices are accounted for at most this many random examples
COMPARING = "comparing with larger K"
CHOOSING = "accounting under other choices"
SPACING = "leaving out every second record"


def compared_positions(log: NormLog) -> IntArray | None:
    """Increasing positions of the examples that `fidelity_against_k` compares; None if all."""
    return log.reference_positions if log.coverage < 1 else _drawn(log, weighted.MOST_EXACT)


def compared_groups(run: AuditedRun) -> dict[str, Partition]:
    """Groups by each column of the examples whose estimates are compared with exact values.

    None without exact values, and for units of several rows.
    """
    log, rows = run.log, run.rows
    exact = log.coverage == 1 or log.reference_positions is not None
    if not exact or rows is None or log.unit_ids is not None:
        return {}
    nobody, positions, found = rows.read(0, 0), compared_positions(log), {}
    for column in run.grouping[0]:
        groups = grouping_of(rows, nobody, column)
        read = known_columns(rows, groups.columns)
        every = np.arange(len(rows)) if positions is None else positions
        frame = rows_at(rows, every, read)
        found[column] = Partition(
            groups.columns, groups.names, groups.codes(frame), groups.codes(nobody)
        )
    return found


def fidelity_against_k(
    log: NormLog,
    method: Method,
    epsilons: Epsilons,
    progress: StageProgress | None = None,
    groups: Mapping[str, Partition] | None = None,
) -> tuple[Fidelity, ...]:
    """Compare what larger K would have given with epsilons from norms known at every step.

    Exact values come from the whole log if it has every step, else from its reference examples,
    where the log's own K is compared too. Empty if there are neither, and if training clipped
    individually (any K is exact). `epsilons` are the account of the log by `method`, and `groups`
    are partitions of the examples at `compared_positions`; fidelity by group is given for the log's
    own K, else for K = one epoch. Of more than a million examples, a random 20,000 are compared.
    """
    if log.individually_clipped or (
        log.coverage < 1 and epsilons.account.rows_per_unit is not None
    ):
        return ()  # reference examples are not whole units
    groups, comparisons = groups or {}, list[Fidelity]()
    if log.coverage == 1:
        exact_log, exact = _compared(log, epsilons, weighted.MOST_EXACT)
        some = f" {len(exact):,} random examples of" * (len(exact) < len(epsilons))
        source = f"norms at every step of{some} this log"
    else:
        found = log.reference_examples()
        if found is None:
            return ()
        exact_log, exact = found, table_for(found, method)
        source = f"norms at every step of {found.n_examples:,} examples"
        positions, gaps = log.reference_positions, np.diff(log.recorded_steps)
        own = epsilons.table() if positions is None else epsilons.take(np.sort(positions))
        every = round(float(gaps.mean())) if len(gaps) else log.total_steps
        epochs = every * float(log.settings.sample_rate.mean())
        comparisons = [
            compare_with_exact(
                own,
                exact,
                source=source,
                every=every,
                epochs=epochs,
                is_this_log=True,
                groups=groups,
            )
        ]
    rate = float(exact_log.settings.sample_rate.mean())
    rules = (method.between_records,) if method.preset else ("last", "closest")
    steps = sorted({round(epochs / rate) for epochs in FIDELITY_EPOCHS})
    cases = [(every, rule) for every in steps if 1 < every < log.total_steps for rule in rules]
    by_group = min(
        [] if comparisons else cases,
        key=lambda case: (abs(case[0] * rate - BY_GROUP_EPOCHS), case[1] != method.between_records),
        default=None,
    )
    for number, (every, rule) in enumerate(cases, 1):
        estimate = table_for(exact_log.thin(every), replace(method, between_records=rule))
        told, epochs = groups if (every, rule) == by_group else None, every * rate
        comparisons.append(
            compare_with_exact(
                estimate, exact, source=source, every=every, epochs=epochs, groups=told
            )
        )
        (progress or silent)(COMPARING, number, len(cases))
    return tuple(comparisons)


def effect_of_spacing(
    log: NormLog, method: Method, epsilons: Epsilons, progress: StageProgress | None = None
) -> Spacing | None:
    """How far an estimate moves without every second record; None if it assumes no norms.

    Of more than a million examples, a random 20,000 are compared.
    """
    carried = epsilons.account.between_records != "worst_case" and log.n_records < log.total_steps
    if not carried or log.individually_clipped or log.n_records < 3:
        return None
    tell = progress or silent
    log, table = _compared(log, epsilons, weighted.MOST_EXACT)
    sparser = replace(log, recorded_steps=log.recorded_steps[::2], rows=log.rows[::2])
    kept = table_for(sparser, method, progress=lambda done, total: tell(SPACING, done, total))
    return spacing_of(
        table,
        kept,
        n_records=log.n_records,
        n_kept=sparser.n_records,
        every=int(np.median(np.diff(log.recorded_steps))),
    )


def sensitivity(
    log: NormLog, method: Method, epsilons: Epsilons, progress: StageProgress | None = None
) -> pd.DataFrame:
    """How far epsilons move with coarser rounding and with other rules between records."""
    if log.filtered is not None or method.preset is not None:
        # A filter's account is its cap under any choice; a preset makes both choices itself.
        return SENSITIVITY.frame({}, 0)
    log, table = _compared(log, epsilons, MOST_COMPARED)
    finest = 0.0 if log.levels is None else log.levels.rounding
    carried = log.n_records < log.total_steps and not log.individually_clipped
    cases = [
        ("rounding", coarser(log, rounding), method)
        for rounding in COARSER
        # Batch norms in full precision are not rounded.
        if rounding > finest and (log.levels is not None or log.batch_norms is None)
    ]
    cases += [
        ("between_records", log, replace(method, between_records=rule))
        for rule in RULES
        if carried and rule != table.account.between_records
    ]
    found = []
    for number, (choice, log_then, method_then) in enumerate(cases, 1):
        found.append(sensitivity_to(choice, table, table_for(log_then, method_then)))
        (progress or silent)(CHOOSING, number, len(cases))
    columns = {name: [row[name] for row in found] for name in SENSITIVITY.kinds}
    return SENSITIVITY.frame(columns, len(found))


def _compared(log: NormLog, epsilons: Epsilons, most: int) -> tuple[NormLog, EpsilonTable]:
    """Log and epsilons, of a random `MOST_COMPARED` examples if there are more than `most`."""
    positions = _drawn(log, most)
    if positions is not None:
        return log.take(positions), epsilons.take(positions)
    return log, epsilons.table(epsilons.details)


def _drawn(log: NormLog, most: int) -> IntArray | None:
    """Increasing positions of random `MOST_COMPARED` examples; None if there are at most `most`."""
    if log.n_examples <= max(most, MOST_COMPARED) or log.unit_ids is not None:
        return None
    rng = np.random.default_rng(0)
    return np.sort(rng.choice(log.n_examples, MOST_COMPARED, replace=False))


def usual_participation(log: NormLog, preset: str | None) -> str:
    """Secret, unless that gives no guarantee and the log says who took part."""
    some = log.batch_norms is not None or log.most_participations is not None
    amplifies = log.sampler in ("poisson", "truncated_poisson")
    return "known" if not amplifies and some and preset is None else "secret"


def usual_relation(log: NormLog, recorder: Mapping[str, Any]) -> str | None:
    """Zero-out where updates tell the number of examples, so that add/remove does not hold."""
    rows = 1
    if log.unit != "example" and log.unit_ids is not None:
        rows = int(np.unique(log.unit_ids, return_counts=True)[1].max())
    divisor = divisor_of(log.n_examples, log.total_steps, recorder, rows=rows)
    told = divisor is not None and divisor.tells_n and log.neighbouring == "add_remove"
    return "zero_out" if told else None


def _other_accounts(run: AuditedRun) -> Method | None:
    """How to account for the run in other ways; None if nothing is assumed between records."""
    known = run.method is not None and run.method.participation == "known"
    return None if known else run.method


def _fidelity(run: AuditedRun) -> dict[str, Any]:
    if (method := _other_accounts(run)) is None:
        return {}
    log, epsilons, groups = run.log, run.epsilons, compared_groups(run)
    against_k = fidelity_against_k(log, method, epsilons, run.tell, groups)
    spacing = None if against_k else effect_of_spacing(log, method, epsilons, run.tell)
    return {"fidelity": against_k, "spacing": spacing}


def _batch_norms(run: AuditedRun) -> dict[str, Any]:
    method, one_row = _other_accounts(run), run.epsilons.account.rows_per_unit is None
    return {} if method is None or not one_row else {"batch_norms": free_fidelity(run.log, method)}


def _sensitivity(run: AuditedRun) -> dict[str, Any]:
    if (method := _other_accounts(run)) is None:
        return {}
    return {"sensitivity": sensitivity(run.log, method, run.epsilons, run.tell)}


FINDINGS = (
    Finding(
        "fidelity",
        80,
        _fidelity,
        fidelity=(
            tuple[Fidelity, ...],
            "What larger K would have given, where exact values exist.",
        ),
        spacing=(
            Spacing | None,
            "How far the estimate still moves with the spacing of records, where no exact values "
            "exist.",
        ),
    ),
    Finding(
        "batch_norms",
        82,
        _batch_norms,
        batch_norms=(
            BatchNormFidelity | None,
            "What batch norms prove about the estimate; null where the account uses none.",
        ),
    ),
    Finding(
        "sensitivity",
        84,
        _sensitivity,
        sensitivity=(
            Annotated[pd.DataFrame, SENSITIVITY],
            "How far epsilons move with the rounding of norms and with what is assumed between "
            "records.",
        ),
    ),
)
