"""`account`: the epsilon of every example or unit of a log, whatever its relation. Sensitive.

A log is checked, its rows are counted and bounded in blocks by the engine of an accountant, and the
rows of one unit are taken together (see units.py for the proofs).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv._checks import warn_caller
from indpriv._facts import refused, text
from indpriv._types import ArrayLike, FloatArray, IntArray, Progress
from indpriv.accountant import blocks
from indpriv.accountant import method as methods
from indpriv.accountant.blocks import BlockAccount, Workers, epsilon_table
from indpriv.accountant.known import known_blocks
from indpriv.accountant.method import Method
from indpriv.accountant.pairs import (
    Pairs,
    clipped_in_every_step,
    pair_laws,
    rare_truncations,
    tight_worst_case,
    uses_pairs,
)
from indpriv.accountant.privacy_filter import under_filter
from indpriv.accountant.rdp import Columns, Counts, RdpAccountant, joined, taken, tightened
from indpriv.accountant.steps import Law, StepKinds, Steps, clipped_steps, condensed
from indpriv.accountant.tight import Met
from indpriv.accountant.units import (
    UnitCells,
    Units,
    first_rows,
    rows_together,
    unit_epsilons,
    worst_cases,
)
from indpriv.epsilon_table import EpsilonTable, PartsWriter, ranges
from indpriv.norm_log.fields import is_covered
from indpriv.norm_log.norm_log import NormLog, recoded
from indpriv.norm_log.records import Levels

_CLOSE = 1e-3  # relative distance to the worst case within which an example may be always clipped


@dataclass(frozen=True)
class Bounds:
    """Turns counts over cells into epsilons. It can be pickled."""

    # by Rényi orders, each neighbouring direction that may be the larger one
    directions: Sequence[RdpAccountant]
    pairs: Pairs | None = None  # by losses; None where there are no tight bounds of each example

    @classmethod
    def of(cls, kinds: StepKinds, method: Method, most_steps: float) -> "Bounds":
        """Those of adding or removing an example, or a unit where kinds are of several rows."""
        pairs = None
        if method.accountant == "pld" and not np.any(kinds.rows > 1):
            pairs = Pairs(kinds, method.delta, most_steps)
        return cls([kinds.accountant(method)], pairs)

    def __call__(self, counts: Counts, gaussian: FloatArray | None = None) -> Columns:
        """Bounds of n examples; gaussian: (n,) squared mu of Gaussian mechanisms besides."""
        found = [accountant.epsilons(counts, gaussian) for accountant in self.directions]
        which = np.argmax([one["epsilon"] for one in found], axis=0)
        limit = np.max([one["true_positive_limit"] for one in found], axis=0)
        largest = taken(joined(found), which * len(which) + np.arange(len(which)))
        largest |= {"true_positive_limit": limit}
        if self.pairs is None:
            return largest
        return tightened(largest, self.pairs.epsilons(Met.of(counts, gaussian)))


@dataclass(frozen=True)
class Engine:
    """Bounds of the rows of one log, block by block; it can be pickled."""

    method: Method  # how to account
    # how norms are counted; they never say that an example is always clipped unless it is
    steps: Steps
    bounds: Bounds  # of these counts
    worst_case: Columns  # bounds of one example that is clipped in every step
    # where lower ends are computed, too, steps of which none costs more than its own, and what they
    # are
    below: tuple[Steps, Pairs] | None = None

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> "Engine":
        """Do what all blocks share; the log is as `checked` returns it."""
        of_pairs, worst = uses_pairs(log, method), worst_case(log, method)
        steps = Steps.of(log, method.between_records, clipped=of_pairs)
        if of_pairs:
            laws = pair_laws(log, method, steps.laws, steps.clipped)
            bounds = Bounds([steps.laws.accountant(method, law) for law in laws])
            return cls(method, steps, bounds, worst)
        most, below = float(log.total_steps), None
        bounds = Bounds.of(steps.laws, method, most)
        if method.accountant == "pld" and method.brackets:
            least = steps.below()
            below = least, Pairs(least.laws, method.delta, most)
        return cls(method, steps, bounds, worst, below)

    def __call__(self, block: NormLog) -> Columns:
        """Bounds of the rows of a block; one that is always clipped has the worst case, exactly."""
        block = as_read(block, self.method.preset)
        counts, worst = self.steps.counts(block), self.worst_case
        found = self.bounds(counts)
        if self.method.accountant == "pld":
            if self.bounds.pairs is None:
                found = tightened(found, worst["epsilon"])
            found["rdp_epsilon"] = np.minimum(found["rdp_epsilon"], worst["rdp_epsilon"])
        # The divergence grows with the norm, so the worst case bounds each example; its search may
        # have found a better order than an example's own.
        epsilon = found["epsilon"] = np.minimum(found["epsilon"], worst["epsilon"])
        lower = found["epsilon_lower"]
        if self.below is not None:
            met = Met.of(self.below[0].counts(block))
            lower = found["epsilon_lower"] = self.below[1].lower_epsilons(met, epsilon)
        close = np.flatnonzero(epsilon >= worst["epsilon"] * (1 - _CLOSE))
        if len(close):
            clipped = close[self.steps.norms.always_clipped(block.take(close))]
            epsilon[clipped], lower[clipped] = worst["epsilon"], worst["epsilon_lower"]
        return found


def worst_case(log: NormLog, method: Method) -> Columns:
    """Bounds of one example that is clipped in every step; InputError if they are infinite."""
    (kinds, steps), of_pairs = clipped_steps(log), uses_pairs(log, method)
    laws: Sequence[Law | None] = [None]
    if of_pairs:
        kinds, steps = condensed(kinds, steps)
        laws = pair_laws(log, method, kinds, kinds.shift)
    found = Bounds([kinds.accountant(method, law) for law in laws])(steps[None])
    if not np.isfinite(found["epsilon"][0]):
        raise refused("refusal.account", "no_noise", noise=1 / kinds.shift.max())
    if method.accountant != "pld":
        return found
    if of_pairs:
        tight = tight_worst_case(log, method, float(found["epsilon"][0]))
        return tightened(found, np.array([tight]))
    pairs, met = clipped_in_every_step(log, method.delta, down=False)
    found = tightened(found, pairs.epsilons(met))
    if method.brackets:
        pairs, met = clipped_in_every_step(log, method.delta, down=True)
        found["epsilon_lower"] = pairs.lower_epsilons(met, found["epsilon"])
    return found


def account(
    log: NormLog,
    *,
    delta: float,
    accountant: str = "rdp",
    conversion: str = "canonne2020",
    between_records: str = "last",
    orders: ArrayLike | None = None,
    preset: str | None = None,
    participation: str | None = None,
    neighbouring: str | None = None,
    brackets: bool = False,
    progress: Progress | None = None,
    engine: str = "local",
    workers: int | None = None,
) -> EpsilonTable:
    """The epsilon of every example along the trajectory that the log recorded.

    Args:
        log: the norm log of the run.
        delta: of the bound, in (0, 1); choose it well below 1 / n_examples.
        accountant: "rdp", or "pld", which is tighter; upper bounds for the norms as counted.
        conversion: RDP to (epsilon, delta): "canonne2020" (tighter) or "mironov2017" (the paper's).
        between_records: norms between records: "last", "closest" (larger of two) or "worst_case".
        orders: Rényi orders; by default, for each example, of a grid from 1.0001 to 1.5 * 10^5.
        preset: "yu2023", the paper's: nearest rounding to 0.01, 2017 conversion, last norm.
        participation: "secret", or "known" to an attacker: norms of batches by any sampler, in
            closed form (orders and accountant do nothing). By default known where secrecy proves
            nothing and the log says who took part.
        neighbouring: "add_remove", "zero_out" or "replace_one"; default the log's, or "zero_out".
        brackets: whether "pld" gives lower ends as well; they cost more than the epsilons.
        progress: called with (examples done, all examples) after each block.
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
    methods.check_logs(log)
    if participation is None:
        participation = methods.usual_participation(log, preset, neighbouring or log.neighbouring)
    method = Method(
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records,
        orders=orders,
        preset=preset,
        participation=participation,
        neighbouring=neighbouring,
        brackets=brackets,
    )
    table = table_for(log, method, progress=progress, workers=blocks.workers_of(engine, workers))
    methods.warn_of(log, method)
    return table


@blocks.one_blas_thread
def table_for(
    log: NormLog, method: Method, *, progress: Progress | None = None, workers: Workers = None
) -> EpsilonTable:
    """The account of a log, by example or by unit; as `indpriv.account`."""
    found = block_account(log, method)
    tables = found.tables(ranges(len(found)), workers=workers, progress=progress)
    return EpsilonTable.joined(list(tables))


@blocks.one_blas_thread
def account_parts(
    log: NormLog,
    method: Method,
    folder: Path,
    belongs_to: Mapping[str, Any],
    *,
    progress: Progress | None = None,
    workers: Workers = None,
) -> EpsilonTable:
    """The account of a log in a folder, as parts; those that lie there already are kept.

    Memory does not grow with the number of rows, unless rows of one unit are not neighbours in the
    log. PrivacyWarning if parts of another account lay in the folder (see `PartsWriter`), which are
    removed. progress: called with (examples or units done, all).
    """
    writer = PartsWriter(folder, len(Units.of(log) or log.example_ids), belongs_to)
    if writer.discarded:
        n = writer.discarded
        warn_caller(text("sentence.warnings", "other_parts", folder=folder, n=n))
    missing = writer.missing()
    if missing:
        wanted = list(missing.values())
        tables = block_account(log, method).tables(wanted, workers=workers, progress=progress)
        for part, table in zip(missing, tables, strict=True):
            table.to_parquet(part)
    if method.participation == "known":  # the most exposed unit may lie in any part
        writer.share_worst_case()
    return EpsilonTable.open(folder)


def block_account(log: NormLog, method: Method) -> BlockAccount:
    """The account of a log in blocks, whatever its relation; raises as `account` does."""
    return _of_steps(log, method).then(lambda table: methods.with_clipping_norm(table, log))


def _of_steps(log: NormLog, method: Method) -> BlockAccount:
    """The same without what a private clipping norm costs."""
    if method.participation == "known":
        return known_blocks(log, method)
    if log.truncation is not None and (rare := rare_truncations(log)) < method.delta / 10:
        return _with_rare_truncations(log, method, rare)
    units = Units.of(log)
    several = units is not None and len(units) < log.n_examples
    if uses_pairs(log, method):
        relation = method.relation_of(log.neighbouring)
        if log.sampler != "other" and not is_covered(log.sampler, relation):
            raise refused("refusal.account", "replaced", log=log)
        if several:
            what = "truncated batches" if log.truncation else 'neighbouring="replace_one"'
            what = "fixed-size batches" if log.sampler == "fixed_size" else what
            raise refused("refusal.account", "several_rows", what=what, log=log)
        log = replace(log, filtered=None)  # its charges are of add/remove with Poisson sampling
    if units is not None and several:
        return under_filter(unit_account(log, units, method), method)
    if units is not None:
        log = replace(log, example_ids=units.ids, unit_ids=None)
    rows_per_unit = None if units is None else 1
    return under_filter(row_account(log, method, rows_per_unit), method)


def _with_rare_truncations(log: NormLog, method: Method, rare: float) -> BlockAccount:
    """The account as if no batch were ever truncated, of which delta holds the odds (`rare`)."""

    def change(table: EpsilonTable) -> EpsilonTable:
        details = {k: v for k, v in table.details.items() if k != "true_positive_limit"}
        account = replace(table.account, delta=method.delta, max_batch_size=cap)
        return replace(table, account=account, details=details)

    cap = None if log.truncation is None else log.truncation.max_batch_size
    plain, rest = replace(log, truncation=None), replace(method, delta=method.delta - rare)
    return _of_steps(plain, rest).then(change)


def row_account(log: NormLog, method: Method, rows_per_unit: int | None = None) -> BlockAccount:
    """The account of each row of a log; raises and warns as `checked` does."""
    read = checked(log, method)
    claim, account = methods.claim_of(read, method), methods.account_of(read, method, rows_per_unit)
    if log.sampler == "fixed_size" and uses_pairs(log, method):  # whose norms do not count
        read = log = replace(read.only(slice(0)), batch_norms=None)
    engine = Engine.prepare(read, method)
    table = partial(epsilon_table, float(engine.worst_case["epsilon"][0]), claim, account)
    log = replace(log, batch_norms=read.batch_norms)
    return BlockAccount(log, log.example_ids, engine, table, engine.steps.block_size)


def unit_account(log: NormLog, units: Units, method: Method) -> BlockAccount:
    """The account of the units of a log, some of several rows.

    All records are read into memory if the rows of a unit are not neighbours in the log.
    """
    methods.check_coins(log)
    log, first_row = rows_together(log, units)
    read = as_read(log, method.preset)
    without_batches = replace(read, batch_norms=None)  # these are norms of single rows
    n_rows = np.unique(units.n_rows)
    most = int(n_rows[-1])
    worst = worst_cases(read, method, n_rows)
    claim = methods.claim_of(without_batches, method)
    cells = UnitCells.of(without_batches, method.between_records, most)
    size, engine, batch_norms = cells.block_size, None, None
    if n_rows[0] == 1:
        single = with_norms_it_uses(replace(read, unit_ids=None), method)
        engine, batch_norms = Engine.prepare(single, method), single.batch_norms
        worst[0] = engine.worst_case["epsilon"][0]
        size = min(size, engine.steps.block_size)
        of_single = methods.claim_of(single, method)
        claim = of_single if of_single[0] == methods.ESTIMATE else claim
    bounds = Bounds.of(cells.laws, method, float(log.total_steps))
    work = partial(_of_units, method, (cells, bounds), engine, (n_rows, worst))
    account = methods.account_of(read, method, most)
    table = partial(epsilon_table, float(worst.max()), claim, account)
    log = replace(log, batch_norms=batch_norms)
    return BlockAccount(log, units.ids, work, table, size, first_row)


def _of_units(
    method: Method,
    of_rows: tuple[UnitCells, Bounds],
    engine: Engine | None,
    worst_cases: tuple[IntArray, FloatArray],
    block: NormLog,
) -> Columns:
    """Bounds of each unit of a block; batch norms count for units of one row only.

    engine: of units of one row; worst_cases: of (n,) numbers of rows, ascending.
    """
    first_row = first_rows(block)
    n_rows = np.diff(np.append(first_row, block.n_examples))
    worst = worst_cases[1][np.searchsorted(worst_cases[0], n_rows)]
    one, parts = n_rows == 1, []
    if engine is not None and one.any():
        parts.append(engine(replace(block.take(first_row[one]), unit_ids=None)))
    if not one.all():
        rows, (cells, bounds) = replace(block, batch_norms=None), of_rows
        if one.any():
            rows = rows.take(np.flatnonzero(np.repeat(~one, n_rows)))
        rows = as_read(rows, method.preset)
        starts = first_rows(rows)
        found = bounds(cells.counts(rows, starts))
        if method.accountant == "pld":
            found = tightened(found, unit_epsilons(cells.norms, rows, starts, method.delta))
        # The divergence grows with every norm, so the worst case of as many rows is a bound.
        parts.append(found | {"epsilon": np.minimum(found["epsilon"], worst[~one])})
    place = np.argsort(np.append(np.flatnonzero(one), np.flatnonzero(~one)))
    return {"n_rows": n_rows, "unit_worst_case": worst} | taken(joined(parts), place)


def checked(log: NormLog, method: Method) -> NormLog:
    """The log as an account reads it: rounded as the preset needs it, with the norms that it uses.

    InputError if units have several rows.
    """
    log = as_read(log, method.preset)
    methods.check_coins(log)
    owners = methods.owners_of(log)
    if owners is not None and (n_units := len(pd.unique(owners))) < log.n_examples:
        raise refused("refusal.account", "rows", log=log, n_units=n_units)
    return with_norms_it_uses(log, method)


def with_norms_it_uses(log: NormLog, method: Method) -> NormLog:
    """The log without batch norms where its account does not use them."""
    used = methods.uses_batch_norms(log, method.between_records)
    return log if used else replace(log, batch_norms=None)


def as_read(log: NormLog, preset: str | None) -> NormLog:
    """The log as a preset reads it; InputError where its rounding is not the log's."""
    if preset is None:
        return log
    paper = Levels(0.01, "nearest")
    log = replace(log, batch_norms=None)  # the paper has full records only
    if log.levels == paper:
        return log
    if log.levels.rounding:
        raise refused("refusal.account", "preset", log=log)
    return recoded(log, paper)
