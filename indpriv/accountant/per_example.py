"""`account`: the epsilon of every example of a log, in blocks of examples. Sensitive."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import ArrayLike

from indpriv._checks import warn_caller
from indpriv._progress import Progress
from indpriv.accountant.block_accounts.account import BlockAccount
from indpriv.accountant.block_accounts.examples import example_blocks
from indpriv.accountant.block_accounts.several_rows import unit_blocks
from indpriv.accountant.blocks import Workers, one_blas_thread, workers_of
from indpriv.accountant.method import Method
from indpriv.accountant.pld.engine import labelled
from indpriv.accountant.prepared import owners_of, warn_of_delta
from indpriv.accountant.privacy_filter import under_filter
from indpriv.accountant.relations.clipping_norm import with_clipping_norm
from indpriv.accountant.relations.fixed_size import fixed_size_blocks
from indpriv.accountant.relations.known import known_blocks
from indpriv.accountant.relations.pairs import rare_truncations, uses_pairs
from indpriv.accountant.units import Units
from indpriv.epsilon_table import EpsilonParts, EpsilonTable
from indpriv.epsilon_table.parts import PartsWriter, ranges
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.validation import is_covered


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
        accountant: "rdp" (an upper bound) or "pld" (a bracket, tight unless `EpsilonTable.wide`).
        conversion: RDP to (epsilon, delta): "canonne2020" (tighter) or "mironov2017" (the paper's).
        between_records: norms between records: "last", "closest" (larger of two) or "worst_case".
        orders: Rényi orders; by default a grid from 1.0001 to 10^5, refined for each example.
        preset: "yu2023", the paper's: nearest rounding to 0.01, 2017 conversion, last norm.
        participation: "secret" if an attacker does not know who took part in which step; "known"
            accounts for the norms of batches, with any sampler, and claims no amplification.
        neighbouring: "add_remove", "zero_out" or "replace_one"; default the log's, or "zero_out".
        tolerance: relative width in (0, 0.1] that brackets by "pld" aim at; not all reach it.
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
    found = block_account(log, method)
    tables = found.tables(ranges(len(found)), workers=workers, progress=progress)
    return EpsilonTable.joined(list(tables))


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

    Memory does not grow with the number of rows, unless rows of one unit are not neighbours in the
    log. Each part is on disk once it is done.

    Args:
        log: the norm log of the run.
        method: how to account.
        folder: see `PartsWriter`.
        belongs_to: what makes this account differ from others, as JSON.
        progress: called with (examples or units done, all of them).
        workers: threads or a pool.

    Warns:
        PrivacyWarning: parts of another account lay in the folder, and were removed.
    """
    owners = owners_of(log)
    n = log.n_examples if owners is None else len(pd.unique(owners))
    writer = PartsWriter(folder, n, belongs_to)
    if writer.discarded:
        warn_caller(
            f"{folder}: {writer.discarded} parts of another account, which was stopped, do not "
            "belong to this one and were removed"
        )
    missing = writer.missing()
    if missing:
        wanted = [(start, stop) for _, start, stop in missing]
        tables = block_account(log, method).tables(wanted, workers=workers, progress=progress)
        for (number, _, _), table in zip(missing, tables, strict=True):
            writer.write(number, table)
    if method.participation == "known":  # the most exposed unit may lie in any part
        writer.share_worst_case()
    return EpsilonParts.open(folder)


def block_account(log: NormLog, method: Method) -> BlockAccount[Any]:
    """The account of a log in blocks, whatever its relation, unit and filter.

    Raises and warns as `indpriv.account` does.
    """
    return _of_steps(log, method).then(lambda table: labelled(with_clipping_norm(table, log)))


def _of_steps(log: NormLog, method: Method) -> BlockAccount[Any]:
    """The same without what a private clipping norm costs."""
    owners = owners_of(log)
    if method.participation == "known":
        warn_of_delta(log, method)
        return known_blocks(log, method, None if owners is None else Units.of(owners))
    if log.truncation is not None and (rare := rare_truncations(log)) < method.delta / 10:
        return _with_rare_truncations(log, method, rare)
    if uses_pairs(log, method):
        log = _as_pairs(log, method)
        if log.sampler == "fixed_size":
            return fixed_size_blocks(log, method)
    if owners is None:
        return under_filter(example_blocks(log, method), method)
    units = Units.of(owners)
    if len(units) < log.n_examples:
        return under_filter(unit_blocks(log, units, method), method)
    rows = replace(log, example_ids=units.ids, unit_ids=None)
    found = under_filter(example_blocks(rows, method), method)
    return found.then(lambda table: replace(table, account=replace(table.account, rows_per_unit=1)))


def _with_rare_truncations(log: NormLog, method: Method, rare: float) -> BlockAccount[Any]:
    """The account as if no batch were ever truncated, of which delta holds the odds (`rare`)."""

    def change(table: EpsilonTable) -> EpsilonTable:
        details = {k: v for k, v in table.details.items() if k != "true_positive_limit"}
        account = replace(table.account, delta=method.delta, max_batch_size=cap)
        return replace(table, account=account, details=details)

    cap = None if log.truncation is None else log.truncation.max_batch_size
    plain, rest = replace(log, truncation=None), replace(method, delta=method.delta - rare)
    return _of_steps(plain, rest).then(change)


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
