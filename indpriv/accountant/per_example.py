"""`account`: the epsilon of every example of a log, in blocks of examples. Sensitive."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from indpriv._checks import warn_caller
from indpriv._progress import Progress
from indpriv.accountant.blocks import Workers, one_blas_thread, workers_of
from indpriv.accountant.claims import ESTIMATE, claim_of
from indpriv.accountant.engine import Engine, Epsilons, joined
from indpriv.accountant.engines import ENGINES
from indpriv.accountant.method import Method
from indpriv.accountant.prepared import (
    account_of,
    as_yu2023,
    check_coins,
    checked,
    epsilon_blocks,
    warn_of_delta,
)
from indpriv.accountant.privacy_filter import under_filter
from indpriv.accountant.relations.clipping_norm import with_clipping_norm
from indpriv.accountant.relations.fixed_size import fixed_size_table
from indpriv.accountant.relations.known import known_table
from indpriv.accountant.relations.pairs import PairsEngine, rare_truncations
from indpriv.accountant.units import Units, several_rows, worst_cases
from indpriv.epsilon_table import EpsilonParts, EpsilonTable
from indpriv.epsilon_table.parts import PartsWriter
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.validation import is_covered

Part = tuple[int, int, int]  # number, and range of rows


def account(
    log: NormLog,
    *,
    delta: float,
    accountant: str = "rdp",
    conversion: str = "canonne2020",
    between_records: str = "last",
    orders: ArrayLike | None = None,
    preset: str | None = None,
    participation: str = "secret",
    neighbouring: str | None = None,
    tolerance: float = 1e-4,
    progress: Progress | None = None,
    engine: str = "local",
    workers: int | None = None,
) -> EpsilonTable:
    """The epsilon of every example along the trajectory that the log recorded.

    Args:
        log: the norm log of the run.
        delta: of the bound, in (0, 1); choose it well below 1 / n_examples.
        accountant: "rdp" (an upper bound) or "pld" (tight; in some relations only the worst case).
        conversion: RDP to (epsilon, delta): "canonne2020" (tighter) or "mironov2017" (the paper's).
        between_records: norms between records: "last", "closest" (larger of two) or "worst_case".
        orders: Rényi orders; by default a grid from 1.0001 to 10^5, refined for each example.
        preset: "yu2023", the paper's: nearest rounding to 0.01, 2017 conversion, last norm.
        participation: "secret" if an attacker does not know who took part in which step; "known"
            accounts for the norms of batches, with any sampler, and claims no amplification.
        neighbouring: "add_remove", "zero_out" or "replace_one"; default the log's, or "zero_out".
        tolerance: relative width in (0, 0.1] of brackets by "pld", whose upper end is reported.
        progress: called with (examples done, all examples), by any thread, one at a time.
        engine: "local" threads, or "ray": tasks on a cluster, which read the log themselves.
        workers: how many at once, by default one for each core; they do not change the result.

    Returns:
        the table, a row per example or unit; see `indpriv.EpsilonTable` for what rounding adds.

    Raises:
        InputError: a bad argument, or a log that does not fit the preset or the relation.

    Warns:
        PrivacyWarning: delta is at least 1 / n_examples, or rows of unit "example" share units.

    >>> log = NormLog.from_arrays([[0.1, 2.0]], [0], total_steps=3660, noise_multiplier=3.0,
    ...                           max_grad_norm=1.0, sample_rate=4096 / 50000)
    >>> account(log, delta=1e-5).epsilon.round(3)
    array([0.647, 8.881])
    """
    method = Method(
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        orders=orders,
        preset=preset,
        participation=participation,
        neighbouring=neighbouring,
        tolerance=tolerance,
    )
    return table_for(log, method, progress=progress, workers=workers_of(engine, workers))


@one_blas_thread
def table_for(
    log: NormLog, method: Method, *, progress: Progress | None = None, workers: Workers = None
) -> EpsilonTable:
    """The account of a log, by example or by unit; as `indpriv.account`."""
    return with_clipping_norm(_of_steps(log, method, progress, workers), log)


def _of_steps(
    log: NormLog, method: Method, progress: Progress | None, workers: Workers
) -> EpsilonTable:
    """The same without what a private clipping norm costs."""
    if method.participation == "known":
        return known_table(log, method, progress=progress, workers=workers)
    if log.truncation is not None and (rare := rare_truncations(log)) < method.delta / 10:
        plain, rest = replace(log, truncation=None), replace(method, delta=method.delta - rare)
        table = _of_steps(plain, rest, progress, workers)
        cap = log.truncation.max_batch_size
        details = {k: v for k, v in table.details.items() if k != "true_positive_limit"}
        account = replace(table.account, delta=method.delta, max_batch_size=cap)
        return replace(table, account=account, details=details)
    if uses_pairs(log, method):
        log = _as_pairs(log, method)
        if log.sampler == "fixed_size":
            return fixed_size_table(log, method)
    if log.unit_ids is None or log.unit == "example":
        return under_filter(table_of(log, method, progress=progress, workers=workers), log)
    units = Units.of(log.unit_ids)
    if len(units) == log.n_examples:
        rows = replace(log, example_ids=units.ids, unit_ids=None)
        table = under_filter(table_of(rows, method, progress=progress, workers=workers), rows)
        return replace(table, account=replace(table.account, rows_per_unit=1))
    return under_filter(_of_units(log, units, method, progress, workers), log, units)


def uses_pairs(log: NormLog, method: Method) -> bool:
    """Whether a step is another pair of laws than that of adding an example to a Poisson sample."""
    return method.relation_of(log.neighbouring) == "replace_one" or log.truncation is not None


def _as_pairs(log: NormLog, method: Method) -> NormLog:
    """The log without its filter, whose charges are of add/remove with Poisson sampling.

    InputError where no account is proven.
    """
    relation = method.relation_of(log.neighbouring)
    if log.sampler != "other" and not is_covered(log.sampler, relation):
        raise InputError(
            f'neighbouring="replace_one" with secret participation is proven for Poisson sampling, '
            f'and batches were drawn by a {log.sampler} sampler; pass participation="known"'
        )
    return replace(log, filtered=None)


def table_of(
    log: NormLog, method: Method, *, progress: Progress | None = None, workers: Workers = None
) -> EpsilonTable:
    """The account of single rows: norm log -> histogram -> divergences -> epsilon."""
    account = _RowAccount.of(log, method)
    blocks = epsilon_blocks(account.log, account.engine, workers=workers, progress=progress)
    return account.table(log.example_ids, list(blocks))


@dataclass(frozen=True)
class _RowAccount:
    """What the rows of a log share in their account; log: as the engine reads it."""

    log: NormLog
    method: Method
    engine: Engine

    @classmethod
    def of(cls, log: NormLog, method: Method) -> _RowAccount:
        log = checked(log, method)
        kind = PairsEngine if uses_pairs(log, method) else ENGINES[method.accountant]
        return cls(log, method, kind.prepare(log, method))

    def table(self, ids: NDArray[np.generic], blocks: Sequence[Epsilons]) -> EpsilonTable:
        """The table of the rows with these ids, whose epsilons are those of some blocks."""
        rows = joined(blocks)
        claim, reason = claim_of(self.log, self.method.between_records)
        return EpsilonTable(
            example_ids=ids,
            epsilon=rows.epsilon,
            epsilon_lower=rows.epsilon_lower,
            epsilon_upper=rows.epsilon,
            worst_case_epsilon=float(self.engine.worst_case.epsilon[0]),
            claim=claim,
            claim_reason=reason,
            account=account_of(self.log, self.method),
            details=rows.details,
        )


@one_blas_thread
def account_parts(
    log: NormLog,
    method: Method,
    folder: Path,
    belongs_to: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    workers: Workers = None,
) -> EpsilonParts:
    """The account of a log in a folder, as parts; those that lie there already are kept.

    Memory does not grow with the number of rows, and each part is on disk once it is done, where
    rows are accounted one by one. Accounts of units with several rows, with known participation, of
    truncated batches, of a replaced example and under a privacy filter are written when they end.

    Args:
        log: the norm log of the run.
        method: how to account.
        folder: see `PartsWriter`.
        belongs_to: what makes this account differ from others, as JSON.
        progress: called with (examples done, all examples).
        workers: threads or a pool.

    Warns:
        PrivacyWarning: parts of another account lay in the folder, and were removed.
    """
    one_by_one = not (
        method.participation == "known"
        or uses_pairs(log, method)
        or log.filtered is not None
        or (log.unit_ids is not None and log.unit != "example")
    )
    table = None if one_by_one else table_for(log, method, progress=progress, workers=workers)
    writer = PartsWriter(folder, log.n_examples if table is None else len(table), belongs_to)
    if writer.discarded:
        warn_caller(
            f"{folder}: {writer.discarded} parts of another account, which was stopped, do not "
            "belong to this one and were removed"
        )
    missing = writer.missing()
    if table is not None:
        for number, start, stop in missing:
            writer.write(number, table.take(slice(start, stop)))
    elif missing:
        account = _RowAccount.of(log, method)
        for run in _consecutive(missing):
            _write_run(account, writer, run, progress, workers)
    return EpsilonParts.open(folder)


def _consecutive(missing: Sequence[Part]) -> Iterator[list[Part]]:
    """Runs of parts that follow each other."""
    for _, run in groupby(enumerate(missing), lambda place: place[1][0] - place[0]):
        yield [part for _, part in run]


def _write_run(
    account: _RowAccount,
    writer: PartsWriter,
    run: Sequence[Part],
    progress: Progress | None,
    workers: Workers,
) -> None:
    """Compute and write consecutive parts, whose blocks run ahead from one to the next."""
    first, last = run[0][1], run[-1][2]
    told = progress and (lambda done, total: progress(min(first + done, total), total))
    blocks = epsilon_blocks(
        account.log, account.engine, start=first, stop=last, workers=workers, progress=told
    )
    for number, start, stop in run:
        found, n_rows = [], 0
        while n_rows < stop - start:
            found.append(next(blocks))
            n_rows += len(found[-1].epsilon)
        table = account.table(account.log.example_ids[start:stop], found)
        writer.write(number, with_clipping_norm(table, account.log))


def _of_units(
    log: NormLog, units: Units, method: Method, progress: Progress | None, workers: Workers
) -> EpsilonTable:
    """The account of units, some of several rows; those of one row are examples like any other."""
    if uses_pairs(log, method):
        what = "truncated batches" if log.truncation else 'neighbouring="replace_one"'
        raise InputError(
            f"{what}: there is no account of several rows of one {log.unit} with secret "
            'participation; pass participation="known"'
        )
    check_coins(log)
    warn_of_delta(log, method)
    log = as_yu2023(log) if method.preset == "yu2023" else log
    one = units.n_rows == 1
    single = replace(
        log.take(units.positions[np.repeat(one, units.n_rows)]),
        example_ids=units.ids[one],
        unit_ids=None,
    )
    alone = table_of(single, method, workers=workers) if one.any() else None
    n_rows, size = np.unique(units.n_rows, return_inverse=True)
    worst = worst_cases(log, method, n_rows)[size]
    found = several_rows(log, units.take(~one), method, progress=progress, workers=workers)
    epsilon, lower = np.empty((2, len(units)))
    # The divergence grows with every norm, so the worst case of its number of rows bounds a unit.
    epsilon[~one], lower[~one] = np.minimum(found.epsilon, worst[~one]), 0.0
    details = {name: np.empty(len(units), value.dtype) for name, value in found.details.items()}
    for name, values in details.items():
        values[~one] = found.details[name]
    if alone is not None:
        worst[one] = alone.worst_case_epsilon
        epsilon[one], lower[one] = alone.epsilon, alone.epsilon_lower
        for name, values in details.items():
            values[one] = alone.details[name]
    claim, reason = claim_of(replace(log, batch_norms=None), method.between_records)
    if alone is not None and alone.claim == ESTIMATE:
        claim, reason = alone.claim, alone.claim_reason
    return EpsilonTable(
        example_ids=units.ids,
        epsilon=epsilon,
        epsilon_lower=lower,
        epsilon_upper=epsilon,
        worst_case_epsilon=float(worst.max()),
        claim=claim,
        claim_reason=reason,
        account=replace(account_of(log, method), rows_per_unit=int(n_rows[-1])),
        details={"n_rows": units.n_rows, "unit_worst_case": worst, **details},
    )
