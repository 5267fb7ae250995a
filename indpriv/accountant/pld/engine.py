"""The accountant "pld": epsilons in a bracket, mostly tight, from loss distributions. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import cast

import numpy as np

from indpriv._arrays import FloatArray
from indpriv._progress import Advance, unheard
from indpriv.accountant.blocks import Epsilons
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.histogram import Histogram, whole_histograms
from indpriv.accountant.histogram.lattice import Lattice
from indpriv.accountant.histogram.mechanisms import Participations
from indpriv.accountant.method import Method
from indpriv.accountant.pld.brackets import FALLBACK, pld_epsilon
from indpriv.accountant.pld.chords import SharedDivergences
from indpriv.accountant.pld.unit_losses import UPPER
from indpriv.accountant.rdp_orders import RdpAccountant
from indpriv.accountant.worst_case import worst_case_participations, worst_case_rdp
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.step_settings import StepSettings

# Of Renyi bounds, which matter only where nothing better is found: about 10 % in the order, which
# costs 1e-3 of epsilon and is five times as fast
_ORDERS_APART = 1024
_FINE = 1e-6  # tolerance up to which the Renyi bound is the best there is


_MOST_LAWS = 256  # beyond which steps are shared between the nodes of a lattice
# Relative width of a bracket by shared steps up to which whole numbers of steps are not tried: that
# of theirs where every law is exact, and where laws are rounded, too
_WIDEST, _WIDEST_IF_ROUNDED = 1e-3, 6e-3
_MOST_CLIPPING_NORMS = 512  # beyond which norm_codes.py rounds them


@dataclass(frozen=True)
class WholeSteps:
    """A log's histograms with whole numbers of steps, made when they are first needed."""

    log: NormLog
    between_records: str

    @cached_property
    def histograms(self) -> tuple[Histogram, Histogram]:
        """Rounded up, and rounded down; one and the same if nothing is rounded."""
        return whole_histograms(self.log, self.between_records)


@dataclass(frozen=True)
class PldEngine:
    """See Engine.

    Attributes:
        method: delta and tolerance of the account.
        rdp: gives upper bounds, which the tight ones never exceed.
        counted: what these are of.
        rdp_worst: that of the worst case.
        histogram: of the norms and settings; shared between the nodes of a lattice if many.
        whole: the same with whole numbers of steps.
        shared_rdp: upper bounds where steps are shared; None where they are not.
        worst_case: of the run.
    """

    method: Method
    rdp: RdpAccountant
    counted: Histogram
    rdp_worst: FloatArray
    histogram: Histogram
    whole: WholeSteps
    shared_rdp: RdpAccountant | None
    worst_case: Epsilons

    @classmethod
    def prepare(cls, log: NormLog, method: Method) -> PldEngine:
        """See Engine."""
        finest = _ORDERS_APART if method.tolerance > _FINE else 1
        counted = Histogram.of(log, method.between_records)
        rdp, rdp_worst = RdpAccountant(counted, method, finest), worst_case_rdp(log, method).epsilon
        whole = WholeSteps(log, method.between_records)
        many = len(counted.mechanisms) > _MOST_LAWS and method.tolerance > _FINE
        if many and can_share(log.settings):
            histogram = Histogram.of(log, method.between_records, "chord")
            divergences = SharedDivergences(histogram.mechanisms, cast(Lattice, histogram.lattice))
            shared_rdp = RdpAccountant(divergences, method, _ORDERS_APART)
        else:
            histogram, shared_rdp = whole.histograms[1], None
        worst = bracketed(*worst_case_participations(log), method.delta, rdp_worst)
        return cls(method, rdp, counted, rdp_worst, histogram, whole, shared_rdp, worst)

    @property
    def bytes_per_example(self) -> int:
        """See Engine."""
        # Half of it: in larger blocks more examples share a contour
        return self.counted.bytes_per_example // 2 + 2048 + 8 * len(self.histogram.mechanisms)

    def block(self, block: NormLog) -> Epsilons:
        """See Engine."""
        found = self._whole(block) if self.shared_rdp is None else self._shared(block)
        epsilon = np.minimum(found.epsilon, self.worst_case.epsilon)
        return Epsilons(epsilon, np.minimum(found.epsilon_lower, epsilon), found.details)

    def _whole(self, block: NormLog) -> Epsilons:
        above, below = self.whole.histograms
        upper = above.participations(block)
        lower = upper if below is above else below.participations(block)
        rdp, tolerance = self.rdp.epsilons(self.counted.counts(block)), self.method.tolerance
        most = np.minimum(rdp.epsilon, self.rdp_worst)
        found = bracketed(upper, lower, self.method.delta, most, tolerance)
        limit = {"true_positive_limit": rdp.true_positive_limit}
        return Epsilons(found.epsilon, found.epsilon_lower, {**found.details, **limit})

    def _shared(self, block: NormLog) -> Epsilons:
        """By contours; where these are not tight, by whole numbers of steps as well."""
        delta, tolerance = self.method.delta, self.method.tolerance
        shared, lattice = self.histogram.participations(block), self.histogram.lattice
        by_orders = cast(RdpAccountant, self.shared_rdp).epsilons(DenseCounts(shared.counts))
        rdp, limit = by_orders.epsilon, by_orders.true_positive_limit
        rdp = np.minimum(rdp, self.rdp_worst)
        result = pld_epsilon(
            shared,
            delta=delta,
            rdp_upper=rdp,
            tolerance=tolerance,
            lattice=lattice,
        )
        upper, lower, bracket = result.epsilon, result.epsilon_lower, result.bracket
        widest = _WIDEST if self.counted.exact else _WIDEST_IF_ROUNDED
        open_ = np.flatnonzero(upper - lower > max(widest, tolerance) * upper)
        if len(open_):
            found = self._whole(block.take(open_))
            bracket[open_] = np.where(
                bracket[open_] == FALLBACK, found.details["bracket"], bracket[open_]
            )
            upper[open_] = np.minimum(upper[open_], found.epsilon)
            lower[open_] = np.maximum(lower[open_], found.epsilon_lower)
            for own, name in ((rdp, "rdp_epsilon"), (limit, "true_positive_limit")):
                own[open_] = np.minimum(own[open_], found.details[name])
        details = {"bracket": bracket, "rdp_epsilon": rdp, "true_positive_limit": limit}
        return Epsilons(upper, lower, details)


def can_share(settings: StepSettings) -> bool:
    """Whether steps under these settings may be shared between the nodes of a lattice.

    Very many clipping norms are rounded, and what a chord between a rate and 1 errs by is unknown.
    """
    rates = np.unique(settings.sample_rate)
    few = len(np.unique(settings.max_grad_norm)) <= _MOST_CLIPPING_NORMS
    return few and (float(rates[-1]) < 1 or len(rates) == 1)


def labelled(table: EpsilonTable) -> EpsilonTable:
    """The table, in which no bracket that is wide is called "certified" or "checked"."""
    if (label := table.details.get("bracket")) is None:
        return table
    label = np.where(table.wide & (label != FALLBACK), UPPER, label)
    return replace(table, details={**table.details, "bracket": label})


def bracketed(
    upper: Participations,
    lower: Participations,
    delta: float,
    rdp: FloatArray,
    tolerance: float = 0.0,
    advance: Advance = unheard,
) -> Epsilons:
    """The upper end from steps rounded up, the lower end from steps rounded down.

    rdp: (n_examples,) upper bounds, which are never exceeded.
    """
    bracket = partial(pld_epsilon, delta=delta, tolerance=tolerance)
    if lower is upper:
        high = low = bracket(upper, rdp_upper=rdp, advance=advance)
    else:

        def half(more: float) -> None:
            advance(more / 2)

        # Of the steps themselves, which may cost far less than those that are rounded up
        high = bracket(upper, rdp_upper=np.full_like(rdp, np.inf), advance=half)
        low = bracket(lower, rdp_upper=rdp, advance=half)
    unproven = (low.epsilon_lower <= 0) & (high.epsilon >= rdp) & (rdp > 0)
    label = np.where(unproven, FALLBACK, high.bracket)
    details = {"bracket": label, "rdp_epsilon": rdp}
    return Epsilons(np.minimum(high.epsilon, rdp), low.epsilon_lower, details)
