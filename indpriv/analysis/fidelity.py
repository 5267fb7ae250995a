"""How far estimated epsilons lie from exact ones, and how much depends on choices. Sensitive.

Two accounts of the same examples are compared to see how far estimates lie from exact epsilons
(fidelity), how far epsilons move under another choice, such as the rounding of norms or fewer
records (sensitivity), and what the tight accountant would have said (tightness).

What batch norms prove about an estimate costs nothing more. Which steps sample an example is
decided by coins that its norm does not depend on. Two things follow.

* Left out, a batch norm is a fair test of what the account would have used in its place: its error
  has the distribution of the errors at steps that did not sample the example.
* Weighted by 1 / sample_rate (Horvitz and Thompson 1952), the batch norms add up to an estimate
  without bias, over the coins, of the mean RDP at an order fixed beforehand. At a fixed order,
  epsilon is RDP plus a constant, so that its mean is estimated without bias too; the mean of
  epsilons at each example's own best order is not.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from indpriv._columns import grouping_of, known_columns, rows_at
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.account import table_for, worst_case
from indpriv.accountant.blocks import block_size, in_blocks
from indpriv.accountant.method import Method, uses_batch_norms
from indpriv.accountant.rdp import renyi_divergences
from indpriv.accountant.steps import GoverningNorms, Steps
from indpriv.analysis import statistics, summary
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import Finding, record
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog, coarser

GroupFidelity: Any = record("group_fidelity")
Fidelity: Any = record("fidelity")
Tightness: Any = record("tightness")
BatchNormFidelity: Any = record("batch_norm_fidelity")
FIDELITY_EPOCHS = (1 / 3, 1.0, 2.0)  # the range of the paper's Figure 4
BY_GROUP_EPOCHS = 1.0  # the K whose fidelity is also given by group: the paper's own
COARSER = (0.02, 0.05, 0.1)  # roundings to try, where the log's is finer
RULES = ("last", "closest", "worst_case")
MOST_COMPARED = 20_000  # other choices are accounted for at most this many random examples
Coded = tuple[tuple[str, ...], IntArray]  # names of groups, and the group of each example
COMPARING = "comparing with larger K"
CHOOSING = "accounting under other choices"
RECORDS = "records"  # the choice of leaving out every second one
_DRAWN = 100  # examples of which a tight epsilon is computed
_BRACKETED = 4  # of them with a lower end, which costs more


def differences(estimate: FloatArray, reference: FloatArray) -> dict[str, Any]:
    """The figures of `Fidelity` of two arrays (n_examples,) in the same order."""
    difference = estimate - reference
    size = np.abs(difference)
    return {
        "n": len(difference),
        "pearson": statistics.pearson(estimate, reference),
        "signed_bias": float(difference.mean()),
        "mean_absolute": float(size.mean()),
        "p95_absolute": float(np.quantile(size, 0.95, method="higher")),
        "largest_absolute": float(size.max()),
        "share_under": float((difference < 0).mean()),
        "share_under_1_percent": float((estimate < 0.99 * reference).mean()),
    }


def sensitivity_to(
    choice: str, here: Any, instead: Any, table: EpsilonTable, then: EpsilonTable
) -> dict[str, Any]:
    """A row of `SENSITIVITY`: two accounts of the same examples that differ in this choice."""
    found = differences(then.epsilon, table.epsilon)
    shifts = {"mean_shift": found["signed_bias"], "share_smaller": found["share_under"]}
    return {"choice": choice, "here": str(here), "instead": str(instead), **found, **shifts}


def compare_with_exact(
    estimated: EpsilonTable,
    exact: EpsilonTable,
    *,
    source: str,
    every: int,
    epochs: float,
    is_this_log: bool = False,
    groups: Mapping[str, Coded] | None = None,
) -> Fidelity:
    """Compare an estimate with exact epsilons of some of its examples, matched by id.

    source: where the exact values come from; every, epochs: steps, and epochs, between records of
    the estimate; is_this_log: it is the account of the log itself; groups: partitions of the exact
    table's examples, in its order, by column. InputError if an example is missing, or if the tables
    answer different questions (delta, unit, neighbouring relation, accountant or conversion).
    """
    whose = ("in the estimate", "in the exact table; use the same in both")
    check_same_meaning(estimated, exact, whose, "total_steps")
    wanted = pd.Index(exact.example_ids)
    positions = pd.Index(estimated.example_ids).get_indexer(wanted)
    if len(missing := wanted[positions < 0].tolist()):
        raise refused("refusal.compared", "no_estimate", n=len(missing), example=missing[0])
    estimate = estimated.epsilon[positions]
    return Fidelity(
        source=source,
        is_this_log=is_this_log,
        every=every,
        epochs=epochs,
        between_records=estimated.account.between_records,
        median_exact=float(np.median(exact.epsilon)),
        **differences(estimate, exact.epsilon),
        groups=tuple(_by_group(groups or {}, estimate, exact.epsilon)),
    )


def _by_group(
    groups: Mapping[str, Coded], estimate: FloatArray, exact: FloatArray
) -> Iterator[GroupFidelity]:
    same = ("n", "signed_bias", "mean_absolute", "largest_absolute", "share_under_1_percent")
    for by, (names, codes) in groups.items():
        rows = []
        for code in np.unique(codes).tolist():
            mine = codes == code
            found, mean = differences(estimate[mine], exact[mine]), float(exact[mine].mean())
            own = {"by": by, "name": names[code], "too_small": found["n"] < MIN_GROUP}
            own |= {name: found[name] for name in same}
            rows.append(GroupFidelity(**own, mean_exact=mean))
        yield from sorted(rows, key=lambda row: (-row.mean_exact, row.name))


def check_same_meaning(
    first: EpsilonTable, second: EpsilonTable, whose: tuple[str, str], *more: str
) -> None:
    """Raise InputError if two tables answer different questions; more: what shall agree too."""
    names = ("delta", "unit", "neighbouring", "participation", "accountant", "conversion")
    for name in (*names, *more):
        ours, theirs = getattr(first.account, name), getattr(second.account, name)
        if ours != theirs:
            raise InputError(f"{name} is {ours!r} {whose[0]} and {theirs!r} {whose[1]}")


def compared_positions(log: NormLog) -> IntArray | None:
    """Increasing positions of the examples that `fidelity_against_k` compares; None if all."""
    return log.reference_positions if log.coverage < 1 else _drawn(log, statistics.MOST_EXACT)


def _compared_groups(run: AuditedRun) -> dict[str, Coded]:
    """Groups by each column of the examples at `compared_positions`; none of units."""
    if (rows := run.rows) is None or run.log.unit_ids is not None:
        return {}
    positions, found = compared_positions(run.log), {}
    every = np.arange(len(rows)) if positions is None else positions
    for column in run.grouping[0]:
        groups = grouping_of(rows, None, column)
        frame = rows_at(rows, every, known_columns(rows, groups.columns))
        found[column] = groups.names, groups.codes(frame)
    return found


def other_accounts(run: AuditedRun) -> Method | None:
    """How to account for the run in other ways; None if nothing is assumed between records."""
    known = run.method is not None and run.method.participation == "known"
    return None if known else run.method


def fidelity_against_k(run: AuditedRun) -> tuple[Fidelity, ...]:
    """Compare what larger K would have given with epsilons from norms known at every step.

    Exact values come from the whole log if it has every step, else from its reference examples,
    where the log's own K is compared too. Empty if there are neither, if no norms are assumed, and
    if training clipped individually (any K is exact). Fidelity by group is given for the log's own
    K, else for K = one epoch. Of more than a million examples, a random 20,000 are compared.
    """
    log, epsilons, method = run.log, run.epsilons, other_accounts(run)
    if method is None or log.individually_clipped:
        return ()
    groups, comparisons = dict[str, Coded](), list[Fidelity]()
    if log.coverage == 1:
        exact_log, exact = _compared(log, epsilons, statistics.MOST_EXACT)
        some = f" {len(exact):,} random examples of" * (len(exact) < len(epsilons))
        source = f"norms at every step of{some} this log"
        groups = _compared_groups(run)
    else:
        found = log.reference_examples()
        if found is None or epsilons.account.rows_per_unit is not None:
            return ()  # reference examples are not whole units
        exact_log, exact = found, table_for(found, method)
        source = f"norms at every step of {found.n_examples:,} examples"
        positions, gaps = log.reference_positions, np.diff(log.recorded_steps)
        own = epsilons.table() if positions is None else epsilons.take(np.sort(positions))
        every = round(float(gaps.mean())) if len(gaps) else log.total_steps
        epochs = every * float(log.settings.sample_rate.mean())
        of_own: dict[str, Any] = {"every": every, "epochs": epochs, "is_this_log": True}
        of_own["groups"] = _compared_groups(run)
        comparisons = [compare_with_exact(own, exact, source=source, **of_own)]
    rate = float(exact_log.settings.sample_rate.mean())
    rules = (method.between_records,) if method.preset else ("last", "closest")
    steps = sorted({round(epochs / rate) for epochs in FIDELITY_EPOCHS})
    cases = [(every, rule) for every in steps if 1 < every < log.total_steps for rule in rules]
    by_group = min(
        cases if groups else [],
        key=lambda case: (abs(case[0] * rate - BY_GROUP_EPOCHS), case[1] != method.between_records),
        default=None,
    )
    for number, (every, rule) in enumerate(cases, 1):
        estimate = table_for(exact_log.thin(every), replace(method, between_records=rule))
        at_k: dict[str, Any] = {"every": every, "epochs": every * rate}
        at_k |= {"groups": groups} if (every, rule) == by_group else {}
        comparisons.append(compare_with_exact(estimate, exact, source=source, **at_k))
        run.tell(COMPARING, number, len(cases))
    return tuple(comparisons)


def sensitivity(run: AuditedRun) -> pd.DataFrame:
    """How far epsilons move with coarser rounding, other rules between records and fewer records.

    Every second record is left out where norms are carried between records and no exact values tell
    how far an estimate is off.
    """
    method = other_accounts(run)
    if method is None or run.log.filtered is not None:
        return summary.SENSITIVITY.of_rows()  # a filter's account is its cap under any choice
    log, table = _compared(run.log, run.epsilons, MOST_COMPARED)
    finest, n = log.levels.rounding, log.n_records
    carried = n < log.total_steps and not log.individually_clipped
    assumed, cases = table.account.between_records, list[tuple[str, Any, Any, NormLog, Method]]()
    if method.preset is None:  # which makes these choices itself
        cases += [
            ("rounding", finest, rounding, coarser(log, rounding), method)
            for rounding in COARSER
            # Batch norms in full precision are not rounded.
            if rounding > finest and (finest or log.batch_norms is None)
        ]
        cases += [
            ("between_records", assumed, rule, log, replace(method, between_records=rule))
            for rule in RULES
            if carried and rule != assumed
        ]
    if carried and n >= 3 and assumed != "worst_case" and not run.audit.fidelity:
        fewer = log.only(slice(None, None, 2))
        cases.append((RECORDS, n, fewer.n_records, fewer, method))
    found = []
    for number, (choice, here, instead, log_then, method_then) in enumerate(cases, 1):
        then = table_for(log_then, method_then)
        found.append(sensitivity_to(choice, here, instead, table, then))
        run.tell(CHOOSING, number, len(cases))
    return summary.SENSITIVITY.of_rows(found)


def _compared(log: NormLog, epsilons: EpsilonTable, most: int) -> tuple[NormLog, EpsilonTable]:
    """Log and epsilons, of a random `MOST_COMPARED` examples if there are more than `most`."""
    positions = _drawn(log, most)
    if positions is not None:
        return log.take(positions), epsilons.take(positions)
    return log, epsilons.table(epsilons.details)


def _drawn(log: NormLog, most: int) -> IntArray | None:
    """Increasing positions of random `MOST_COMPARED` examples; None if there are at most `most`."""
    if log.n_examples <= most or log.unit_ids is not None:
        return None
    return statistics.sample(log.n_examples, MOST_COMPARED, np.random.default_rng(0))


def tightness(run: AuditedRun) -> Tightness | None:
    """What the tight accountant says of random examples; None of units and known participation."""
    account, method = run.epsilons.account, run.method
    alone = account.rows_per_unit is None and len(run.epsilons) == run.log.n_examples
    covered = account.neighbouring != "replace_one" and run.log.truncation is None
    if method is None or account.participation != "secret" or not (alone and covered):
        return None
    rng = np.random.default_rng(run.seed)
    n = len(run.epsilons)
    drawn = np.sort(rng.choice(n, min(n, _DRAWN), replace=False))
    options = {key: getattr(account, key) for key in ("delta", "neighbouring", "between_records")}
    tight = Method(accountant="pld", **options)
    plain = replace(run.log, unit_ids=None, unit="example")
    told, worst = run.epsilons.take(drawn).epsilon, run.epsilons.worst_case_epsilon
    found = Tightness(worst, len(drawn), *[float(np.median(told))] * 2)
    if account.accountant != "pld":
        table = table_for(plain.take(drawn), tight, workers=1)
        median = float(np.median(np.minimum(table.epsilon, told)))
        return replace(found, worst_case=min(table.worst_case_epsilon, worst), median=median)
    few = np.sort(rng.choice(drawn, min(n, _BRACKETED), replace=False))
    ends = table_for(plain.take(few), replace(tight, brackets=True), workers=1)
    known = ends.epsilon_lower > 0
    above = float((ends.epsilon[known] / ends.epsilon_lower[known] - 1).max(initial=0.0))
    return replace(found, n_bracketed=int(known.sum()), above=above)


# --- batch norms

_BIN = 1e-3  # of relative norms: the 95th percentile is rounded up to a multiple
_NORM_BYTES = 200  # that one norm takes while it is looked at
_GRID = 200  # relative norms between which divergences are interpolated; whole hundredths are on it


def free_fidelity(run: AuditedRun) -> BatchNormFidelity | None:
    """Compare the batch norms of a run with its account; only RDP at one order is looked at.

    None where the account uses none or is of units, where there are none to test, and where batches
    were not drawn by Poisson sampling, since then the coins are not what the weights assume.
    """
    log, method = run.log, other_accounts(run)
    several = run.epsilons.account.rows_per_unit is not None
    if method is None or method.preset is not None or several or log.sampler != "poisson":
        return None
    if not uses_batch_norms(log, method.between_records):
        return None
    # The best order for the worst case: a choice that looks at no norm.
    by_orders = replace(method, accountant="rdp")
    order = float(worst_case(log, by_orders)["best_order"][0])
    cost, norms = _step_costs(log, order), GoverningNorms.of(log, method.between_records)
    each = log.n_records + 1 + int(log.settings.sample_rate.sum())
    size = block_size(_NORM_BYTES * each)
    blocks = in_blocks(log, lambda block: _look(norms, block, cost), size=size)
    histograms, sums, largest = zip(*blocks, strict=True)
    histogram, n = sum(histograms), log.n_examples
    entries = int(histogram.sum())
    if not entries:
        return None
    bias, absolute, under, under_1_percent = (sum(sums)[:4] / entries).tolist()
    excess, excess_variance, unbiased, variance = sum(sums)[4:].tolist()
    known = np.zeros(log.total_steps, bool)
    known[log.recorded_steps] = True
    if log.batch_norms is not None:
        known[log.batch_norms.steps] = True
    return BatchNormFidelity(
        between_records=method.between_records,
        n_entries=entries,
        signed_bias=bias,
        mean_absolute=absolute,
        p95_absolute=float(np.searchsorted(np.cumsum(histogram), 0.95 * entries)) * _BIN,
        largest_absolute=max(largest),
        share_under=under,
        share_under_1_percent=under_1_percent,
        order=order,
        mean_rdp=_mean_rdp(log, method, order),
        rdp_bias=excess / n,
        rdp_bias_error=excess_variance**0.5 / n,
        unbiased_mean_rdp=unbiased / n if known.all() else None,
        standard_error=variance**0.5 / n if known.all() else None,
    )


def _step_costs(
    log: NormLog, order: float
) -> Callable[[FloatArray, NDArray[np.integer]], FloatArray]:
    """Gives the RDP of single steps at one order, of relative norms and steps of one shape."""
    pairs = np.stack([log.settings.noise_multiplier, log.settings.sample_rate], axis=1)
    distinct, setting = np.unique(pairs, axis=0, return_inverse=True)
    norms, setting = np.linspace(0.0, 1.0, _GRID + 1), setting.ravel()
    shifts, rates = (norms / distinct[:, :1]).ravel(), np.repeat(distinct[:, 1], len(norms))
    value = renyi_divergences(shifts, rates, np.array([order])).reshape(len(distinct), -1)

    def cost(relative: FloatArray, step: NDArray[np.integer]) -> FloatArray:
        place, row = relative * _GRID, setting[step]
        lower = np.minimum(place.astype(np.int64), _GRID - 1)
        below, above = value[row, lower], value[row, lower + 1]
        return np.asarray(below + (place - lower) * (above - below))

    return cost


def _mean_rdp(log: NormLog, method: Method, order: float) -> float:
    """Mean over all examples of the account's RDP at one order."""
    steps = Steps.of(log, method.between_records)
    table = steps.laws.per_count(np.array([order]))

    def work(block: NormLog) -> float:
        return float((steps.counts(block) @ table.T).sum())

    return sum(in_blocks(log, work, size=steps.block_size)) / log.n_examples


def _look(
    norms: GoverningNorms,
    block: NormLog,
    cost: Callable[[FloatArray, NDArray[np.integer]], FloatArray],
) -> tuple[IntArray, FloatArray, float]:
    """Counts of absolute errors of left-out norms in bins of _BIN, sums, and the largest error.

    Sums are of errors, their absolute values, those that are too small, at all and by over 1 %, and
    of the bias of each example, its variance, the unbiased estimate and its variance.
    """
    log, known = norms.log, norms.known(block)
    entry, other = known.batch_norms, known.in_place_of_batch_norms(norms.between_records)
    step = known.step[entry]
    max_grad_norm, rate = log.settings.max_grad_norm, log.settings.sample_rate[step]
    exact, estimate = (
        norms.codes.relative(known.norm[index], max_grad_norm[step]) for index in (entry, other)
    )
    recorded = max_grad_norm[log.recorded_steps][:, None]
    rows = norms.codes.relative(norms.full(block), recorded)
    exact_cost = cost(exact, step)
    excess = cost(estimate, step) - exact_cost
    full_cost = cost(rows, np.broadcast_to(log.recorded_steps[:, None], rows.shape))
    error, size = estimate - exact, np.abs(estimate - exact)
    sums = (
        error.sum(),
        size.sum(),
        (error < 0).sum(),
        (estimate < 0.99 * exact).sum(),
        np.sum(excess * (1 - rate) / rate),
        np.sum(excess**2 * (1 - rate) / rate**2),
        np.sum(full_cost) + np.sum(exact_cost / rate),
        np.sum(exact_cost**2 * (1 - rate) / rate**2),
    )
    bins = np.ceil(size / _BIN - 1e-6).astype(np.int64)
    histogram = np.bincount(bins, minlength=round(1 / _BIN) + 1)
    return histogram, np.array(sums), float(size.max(initial=0.0))


FINDINGS = (
    Finding("fidelity", lambda run: {"fidelity": fidelity_against_k(run)}),
    Finding("sensitivity", lambda run: {"sensitivity": sensitivity(run)}),
    Finding("tightness", lambda run: {"tightness": tightness(run)}),
    Finding("batch_norms", lambda run: {"batch_norms": free_fidelity(run)}),
)
