"""A privacy filter: a guarantee set before training, from Rényi divergence at one fixed order.

An example, or a unit with all its rows, takes part only while the sum of its divergences, the next
step included, stays within a cap, which then holds for the whole run by [9.9] of
docs/explanation/proofs.md. Which examples were left out, and when, is sensitive.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import cast

import numpy as np

from indpriv import _checks
from indpriv._facts import damaged, refused, text
from indpriv._types import ArrayLike, FloatArray, IntArray
from indpriv.accountant.blocks import BlockAccount
from indpriv.accountant.method import Method, owners_of
from indpriv.accountant.rdp import FLOAT_SLACK, Columns, compute_rdp, epsilon_offsets
from indpriv.accountant.steps import NormCodes, StepKinds
from indpriv.accountant.units import MOST_ROWS, Units, first_rows
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import Filtered, NormLog

_ORDERS = 1 + np.exp(np.linspace(np.log(0.05), np.log(1000), 200))  # choices of for_epsilon
_SUMMED = 1 + 1e-9  # sums of the same charges in another order differ by less


@dataclass(frozen=True)
class PrivacyFilter:
    """A cap on each example's Rényi divergence at one order, summed over the run.

    Attributes:
        order: fixed before training, above 1; public.
        rdp_cap: in nats, above 0; public.

    Raises:
        InputError: a value out of range.

    >>> budget = PrivacyFilter(order=8.0, rdp_cap=0.5)
    >>> round(budget.epsilon(delta=1e-5), 3)
    1.714
    """

    order: float
    rdp_cap: float

    def __post_init__(self) -> None:
        _checks.check_number("order", self.order, "(1, inf)")
        _checks.check_number("rdp_cap", self.rdp_cap, "(0, inf)", "see for_epsilon")

    @classmethod
    def for_epsilon(
        cls,
        epsilon: float,
        *,
        delta: float,
        noise_multiplier: float,
        sample_rate: float,
        conversion: str = "canonne2020",
    ) -> "PrivacyFilter":
        """The filter that guarantees (epsilon, delta) and lets an example take part the most.

        Its order is the one at which the largest number of steps at max_grad_norm fits.

        Args:
            epsilon: to guarantee to every example, above 0.
            delta: of the guarantee, in (0, 1).
            noise_multiplier: planned for training; used only to choose the order.
            sample_rate: likewise.
            conversion: see `indpriv.account`.

        Raises:
            InputError: no order gives a cap above 0. PrivacyWarning: one too small for a step.
        """
        delta = _checks.check_delta(delta)
        epsilon = _checks.check_number("epsilon", epsilon, "(0, inf)")
        caps = epsilon - epsilon_offsets(_ORDERS, delta, conversion)
        step = compute_rdp(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            relative_norms=[1.0],
            orders=_ORDERS,
        )[0]
        best = int(np.argmax(caps / step))
        if caps[best] <= 0:
            raise refused("refusal.filter", "nothing_left", epsilon=epsilon, delta=delta)
        if caps[best] < step[best]:
            _checks.warn_caller(text("sentence.warnings", "no_step", epsilon=epsilon))
        return cls(float(_ORDERS[best]), float(caps[best]))

    def epsilon(self, *, delta: float, conversion: str = "canonne2020") -> float:
        """Epsilon that the cap guarantees at this order; InputError for delta outside (0, 1)."""
        offset = epsilon_offsets(np.array([self.order]), _checks.check_delta(delta), conversion)
        return max(0.0, self.rdp_cap + float(offset[0]))

    def charges(
        self,
        relative_norms: ArrayLike,
        *,
        noise_multiplier: float,
        sample_rate: float,
        units: ArrayLike | None = None,
    ) -> FloatArray:
        """(n,) divergence of one step, rounded up; InputError for settings out of range.

        relative_norms: (n,) clip thresholds as fractions of max_grad_norm. units: (n,) number, from
        0, of the unit that each row belongs to: each row is then charged for all rows of its unit.
        """
        norms = np.asarray(relative_norms, dtype=np.float64)
        distinct, inverse = np.unique(norms, return_inverse=True)
        rdp = compute_rdp(
            sample_rate=sample_rate,
            noise_multiplier=noise_multiplier,
            relative_norms=distinct,
            orders=[self.order],
        )
        if units is not None:
            owners = np.asarray(units).astype(np.intp, casting="safe")  # True and False are 1 and 0
            return self._charges_of_units(norms, owners, noise_multiplier, sample_rate)[owners]
        return np.asarray((rdp[:, 0] * (1 + FLOAT_SLACK))[inverse])

    def _charges_of_units(
        self, norms: FloatArray, units: IntArray, noise_multiplier: float, sample_rate: float
    ) -> FloatArray:
        """(n_units,) charges; a step is shared between numbers of equal rows [8.3]."""
        total = np.bincount(units, norms) * _SUMMED
        largest = np.zeros(len(total))
        np.maximum.at(largest, units, norms)
        norm = np.maximum(largest, total / MOST_ROWS)
        rows = np.divide(total, norm, out=np.ones(len(norm)), where=norm > 0)
        fewer = np.clip(np.floor(rows), 1, MOST_ROWS)
        rest = np.clip(rows - fewer, 0.0, 1.0)
        wanted = np.stack([np.tile(norm, 2), np.append(fewer, np.minimum(fewer + 1, MOST_ROWS))])
        (shift, k), place = np.unique(wanted, axis=1, return_inverse=True)
        rate, order = np.full(len(k), sample_rate), np.full(len(k), self.order)
        cells = StepKinds(shift / noise_multiplier, rate, k.astype(np.int64))
        low, high = cells.divergences_at(np.arange(len(k)), order)[place.reshape(2, -1)]
        rdp = (1 - rest) * low + np.where(rest > 0, rest * high, 0.0)
        return np.asarray(rdp * (1 + FLOAT_SLACK))

    def spent(self, log: NormLog, left_out_at: IntArray) -> FloatArray:
        """(n_examples,) divergence that each example, or its unit, spent according to the log.

        left_out_at: (n_examples,) the first step without the example, if any.
        """
        n, owned, settings = log.n_examples, Units.of(log), log.settings
        units = None if owned is None else owned.numbers
        codes, clips = NormCodes.of(log), settings.max_grad_norm[log.recorded_steps]
        recorded = log.recorded_steps.tolist() if log.individually_clipped else []
        total = np.zeros(n)
        for record, (begin, end) in enumerate(pairwise([0, *recorded, log.total_steps]), start=-1):
            for start, stop in settings.spans(begin, end):
                at, norms = settings.at(start), np.ones(n)
                if record >= 0:
                    kept = codes.read(log.records[[record]].read(0, n), clips[[record]])
                    norms = codes.relative(kept[0], norms * at.max_grad_norm)
                step = {"noise_multiplier": at.noise_multiplier, "sample_rate": at.sample_rate}
                charge = self.charges(norms, units=units, **step)
                total += charge * np.clip(left_out_at - start, 0, stop - start)
        return total


def _bounds(
    steps: Callable[[NormLog], Columns], policy: PrivacyFilter, method: Method, block: NormLog
) -> Columns:
    """Bounds by the steps, the cap, and what each unit spent, which is no more: EvidenceError."""
    found, left_out_at = steps(block), cast(Filtered, block.filtered).left_out_at
    starts = first_rows(block)
    spent = np.maximum.reduceat(policy.spent(block, left_out_at), starts)
    beyond = np.flatnonzero(spent > policy.rdp_cap * _SUMMED)
    if len(beyond):
        owners = owners_of(block)
        ids = block.example_ids if owners is None else owners
        who, most = ids[starts[beyond]].tolist()[0], spent[beyond[0]]
        said = {"unit": block.unit, "who": who, "spent": most, "cap": policy.rdp_cap}
        raise damaged("refusal.filter", "spent", **said)
    left_out_at = np.maximum.reduceat(left_out_at, starts)
    left = left_out_at < block.total_steps
    guaranteed = policy.epsilon(delta=method.delta, conversion=method.conversion)
    offset = epsilon_offsets(np.array([policy.order]), method.delta, method.conversion)
    by_filter = np.minimum(np.maximum(spent + offset, 0.0), guaranteed)
    found["epsilon"] = np.minimum(found["epsilon"], by_filter)
    lower = np.minimum(found["epsilon_lower"], found["epsilon"])
    found["epsilon_lower"] = np.where(left, 0.0, lower)
    if "unit_worst_case" in found:
        found["unit_worst_case"] = np.minimum(found["unit_worst_case"], guaranteed)
    return found | {"left_out_at": np.where(left, left_out_at, -1)}


def under_filter(account: BlockAccount, method: Method) -> BlockAccount:
    """The account of a filtered run: bounded by the cap, and for each unit by what it spent."""
    log = account.log
    if log.filtered is None:
        return account
    policy = PrivacyFilter(log.filtered.order, log.filtered.rdp_cap)
    guaranteed = policy.epsilon(delta=method.delta, conversion=method.conversion)
    left_out_at = log.filtered.left_out_at
    if account.first_row is not None:
        left_out_at = np.maximum.reduceat(left_out_at, account.first_row[:-1])
    left = left_out_at < log.total_steps
    when = f", the first at step {int(left_out_at.min())}" if left.any() else ""
    count = f"{int(left.sum())} of {len(left)} {log.unit}s{when}"
    said = f"privacy filter: Rényi order {policy.order:.4g} capped at {policy.rdp_cap:.4g}"

    def change(table: EpsilonTable) -> EpsilonTable:
        worst = min(table.worst_case_epsilon, guaranteed)
        filtered = said if worst < table.worst_case_epsilon else ""
        return replace(
            table,
            worst_case_epsilon=worst,
            claim_reason=f"{table.claim_reason} The privacy filter left out {count}.",
            account=replace(table.account, privacy_filter=filtered),
        )

    return replace(account, work=partial(_bounds, account.work, policy, method)).then(change)
