"""When a finding of the paper counts as reproduced: each rule once in words, which the page prints, and once in code."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from scipy import stats

from indpriv.analysis.statistics import holm
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED
from reports.yu2023.paper import LEAST_PEARSON

LEAST_FIDELITY = (
    0.99  # Pearson's r of estimates and exact values; the smallest in Figure 4 is 0.995
)
CLOSE_SPREAD, FAIR_SPREAD = 1.5, 3.0  # times the paper's smallest over largest epsilon
LARGEST_SPREAD = 0.5  # of that, where the paper prints no smallest epsilon
LARGEST_MEDIAN = 0.95  # of the largest epsilon
CLOSE_SHARE, FAIR_SHARE = 2.0, 4.0  # times the paper's share at the worst case, or less by as much
FAIR_PEARSON = 0.5
LARGEST_R_MISS = 0.05  # Figure 12, whose r are 0.89 and 0.9
LEAST_GAP = 0.5  # of the paper's per cent by which the worst served group lies above the best
ERROR_FACTOR, ROUNDING = 1.5, 0.005  # of errors that the paper prints with two decimals
SIGNIFICANCE = 0.05
LARGEST_WITH_DP = 53.0  # per cent of right guesses with DP; the largest in Figure 11 is 52.8
LARGEST_ERROR_RATE = 2.0  # per cent, of a private release; 1.13 and 0.91 in Table 2
POOR_ERROR_RATE = 10.0
LARGEST_ACCURACY_LOSS = 0.5  # points, of individual clipping; 0.1 in Table 3
POOR_ACCURACY_LOSS = 2.0
CLOSE_MEANS, FAIR_MEANS = (
    0.05,
    0.15,
)  # relative, of mean epsilons with and without individual clipping
LEAST_QUICKER = 1.5  # times the rise of the class Ship; 2.0 in appendix C
LEAST_STRATIFIED = 0.9  # share of the records in which the classes of Figure 3 lie in its order
LEAST_SAVING = 1000.0  # of rounding norms; about 9,000 in Table 1
LONGEST_ACCOUNT = 3.0  # seconds with rounding, in Table 1
LEAST_TAU = (
    0.8  # of the order of groups with and without individual clipping, where it is not the same
)

RULES = {
    "Spread (Figure 1)": "smallest over largest individual epsilon: reproduced where it is at most "
    f"{CLOSE_SPREAD:g} times the paper's, differs up to {FAIR_SPREAD:g} times. Where the paper prints no smallest epsilon: reproduced "
    f"where it is at most {LARGEST_SPREAD:g}. In both cases the median has to be at most {LARGEST_MEDIAN:g} of the largest, lest one "
    "example decide; differs where it is not. This condition was set after the results were seen",
    "Share at the worst case (Figure 1)": f"within a factor of {CLOSE_SHARE:g} of the paper's; differs within {FAIR_SHARE:g}. Easier tasks: "
    "fewer examples at the worst case on MNIST than on CIFAR-10. Both were set after the results were seen",
    "Order of groups (Figures 2, 6, 13, 14)": "Kendall's tau of the paper's order and our mean epsilons. Reproduced where it is above "
    f"0 with a one-sided exact p of at most {SIGNIFICANCE:g}, differs where it is above 0 without. Of four groups only the same "
    "order reaches that",
    "Worst served (Figures 2, 6)": "reproduced where the group of the lowest test accuracy has the largest mean epsilon, and it "
    "lies above that of the group of the highest test accuracy by at least half of the per cent that the paper prints, if it "
    "does; differs where it only lies above that",
    "Strata of norms (Figure 3)": "the medians of the three classes lie in the order of their mean epsilons in Figure 2 in at least "
    f"{LEAST_STRATIFIED:.0%} of the records after the first epoch; differs where they do in more than half",
    "Fidelity (Figures 4, 14)": "mean and largest absolute error of estimates: reproduced where at every gamma both are at most "
    f"{ERROR_FACTOR:g} times the paper's (read as {ROUNDING:g} larger, for it rounds), and Pearson's r is at least "
    f"{LEAST_FIDELITY:g}; differs where r is at least {LEAST_PEARSON:g} at every gamma",
    "Loss (Figures 5, 7)": f"Pearson's r of epsilon and log loss is above {LEAST_PEARSON:g}; differs where it is at least "
    f"{FAIR_PEARSON:g} and its interval above 0",
    "Membership (Figure 11)": "with DP the 95 % interval of the attack's success on all examples together ends at no more than "
    f"{LARGEST_WITH_DP:g} % (the largest that the paper prints is 52.8 %), and without DP the attack succeeds on all examples (its "
    "interval lies above 50 %) and more often on the group of the largest mean epsilon than on the others (one-sided test on all "
    f"scores, {SIGNIFICANCE:g}); differs where only one of the two holds. What a test of this size finds in 80 % of the cases stands "
    "beside; so do the area under the curve, which may differ from chance where the threshold's success does not, and the smallest p "
    "of a group (binomial, Holm's correction). The limit was set after the results were seen",
    "Clipping norms (Figures 9 and 10)": "epsilon: the smallest individual epsilon falls with every larger clipping norm, and fewer "
    "examples lie at the worst case at the largest than at the smallest; differs where only one of the two holds. Accuracy, and gap "
    "between classes: largest at one of the two middle norms, as in the paper; differs where it is largest at an end, but neither only "
    "rises nor only falls",
    "Loss at larger clipping norms (Figure 12)": f"Pearson's r of epsilon and log loss lies at most {LARGEST_R_MISS:g} below the "
    f"paper's at both norms; differs where both are at least {FAIR_PEARSON:g}",
    "Order under individual clipping (Figure 8)": "the order of groups with and without it is the same on every seed, or in the one pair of runs; differs "
    f"where Kendall's tau is above {LEAST_TAU:g} on average",
    "Cost (Table 1)": f"with rounding the account takes at most the paper's {LONGEST_ACCOUNT:g} s on one core, and without it at least "
    f"{LEAST_SAVING:,.0f} times as long by the paper's method; differs where only one of the two holds. One computation costs as much "
    "as another, so that the factor is one of numbers of computations; what is measured is what one costs",
    "Release (Table 2, footnote 3)": "the average of |private - non-private| / non-private is at most "
    f"{LARGEST_ERROR_RATE:g} %; differs up to {POOR_ERROR_RATE:g} %",
    "Closeness under individual clipping (Figure 8, appendix B.2)": "the mean epsilons of every group with and without it differ by "
    f"at most {CLOSE_MEANS:.0%}; differs up to {FAIR_MEANS:.0%}",
    "Accuracy under individual clipping (Table 3)": "the 95 % interval (Student's t) of the difference over pairs of runs with the "
    f"same seed lies within {LARGEST_ACCURACY_LOSS:g} points of zero; differs within {POOR_ACCURACY_LOSS:g}. One pair is not judged",
    "Underserved classes at smaller clipping norms (appendix C)": "from 1.5 to 0.5 of the median norm the mean epsilon of Cat rises by "
    f"at least {LEAST_QUICKER:g} times as much as that of Ship (the paper: 2.6 and 1.3); differs where it only rises by more",
}


@dataclass(frozen=True)
class Verdict:
    """One of the four words, and the figures that decided."""

    word: str
    why: str = ""

    def __str__(self) -> str:
        return f"**{self.word}**" + (f" ({self.why})" if self.why else "")


def _graded(good: bool, fair: bool, why: str = "") -> Verdict:
    return Verdict(REPRODUCED if good else DIFFERS if fair else NOT_REPRODUCED, why)


def spread(smallest: float, median: float, largest: float, printed: float | None = None) -> Verdict:
    """Figure 1: individual epsilons; printed: the paper's smallest over largest epsilon."""
    found, wide = smallest / largest, median <= LARGEST_MEDIAN * largest
    if printed is None:
        return _graded(found <= LARGEST_SPREAD and wide, found <= LARGEST_SPREAD)
    close, fair = (found <= factor * printed for factor in (CLOSE_SPREAD, FAIR_SPREAD))
    why = f"smallest over largest {found:.2f}; paper {printed:.2f}"
    return _graded(close and wide, fair, why)


def share_at_worst_case(found: float, printed: float) -> Verdict:
    """Figure 1: per cent of the examples at the worst case, ours and the paper's."""
    close, fair = (
        printed / factor <= found <= printed * factor for factor in (CLOSE_SHARE, FAIR_SHARE)
    )
    return _graded(close, fair, f"{found:.1f} %; paper {printed:g} %")


def easier(easy: float, hard: float) -> Verdict:
    """Figure 1: per cent of the examples at the worst case on an easy and on a hard data set."""
    return _graded(easy < hard, False, f"{easy:.1f} % on the easier, {hard:.1f} %")


def kendall(expected: Sequence[str], means: Mapping[str, float]) -> tuple[float, float]:
    """Kendall's tau of an expected order (lowest first) and mean epsilons by group, and its one-sided exact p-value."""
    found = stats.kendalltau(
        range(len(expected)),
        [means[name] for name in expected],
        method="auto",
        alternative="greater",
    )
    return float(found.statistic), float(found.pvalue)


def order(expected: Sequence[str], means: Mapping[str, float]) -> Verdict:
    """Figures 2, 6, 13 and 14."""
    if set(expected) != set(means):
        return Verdict(NOT_RUN, "other groups")
    tau, p_value = kendall(expected, means)
    return _graded(tau > 0 and p_value <= SIGNIFICANCE, tau > 0, f"tau {tau:.2f}, p {p_value:.2g}")


def worst_served(
    means: Mapping[str, float], accuracies: Mapping[str, float], printed: float | None = None
) -> Verdict:
    """Figures 2 and 6; printed: the paper's excess of the worst served over the best, per cent."""
    lowest, highest = (pick(accuracies, key=accuracies.__getitem__) for pick in (min, max))
    excess = 100 * (means[lowest] / means[highest] - 1)
    wide = printed is None or excess >= LEAST_GAP * printed
    why = "" if printed is None else f"{excess:.1f} %; paper {printed:g} %"
    return _graded(wide and means[lowest] == max(means.values()), excess > 0, why)


def stratified(
    medians: Mapping[str, Sequence[float | None]], expected: Sequence[str], first: int
) -> Verdict:
    """Figure 3: medians by class and record; records from the index `first` on count."""
    rows = list(zip(*(medians[name][first:] for name in expected), strict=True))
    known = [row for row in rows if None not in row]
    if not known:
        return Verdict(NOT_RUN, "no records")
    share = sum(all(low < high for low, high in pairwise(row)) for row in known) / len(known)
    return _graded(
        share >= LEAST_STRATIFIED, share > 0.5, f"in order in {share:.0%} of {len(known)} records"
    )


Errors = Mapping[float, tuple[float, float, float]]


def fidelity(by_gamma: Errors, printed: Errors) -> Verdict:
    """Figures 4 and 14: gamma -> Pearson's r, mean and largest absolute error, ours and the paper's."""
    missing = [f"{gamma:g}" for gamma in printed if gamma not in by_gamma]
    if missing:
        return Verdict(NOT_RUN, f"no errors at gamma {', '.join(missing)}")
    factors = [
        ours / (theirs + ROUNDING)
        for gamma in by_gamma
        for ours, theirs in zip(by_gamma[gamma][1:], printed[gamma][1:], strict=True)
    ]
    smallest = min(r for r, _, _ in by_gamma.values())
    return _graded(
        max(factors) <= ERROR_FACTOR and smallest >= LEAST_FIDELITY,
        smallest >= LEAST_PEARSON,
        f"errors up to {max(factors):.1f} times the paper's, smallest r {smallest:.4f}",
    )


def loss(pearson: float | None, low: float | None) -> Verdict:
    """Figures 5 and 7: Pearson's r and the lower end of its interval, None where there is none."""
    if pearson is None:
        return Verdict(NOT_REPRODUCED, "undefined")
    fair = pearson >= FAIR_PEARSON and (pearson if low is None else low) > 0
    return _graded(pearson > LEAST_PEARSON, fair)


def membership(with_dp: Mapping[str, Any], p_unequal: float, low: float) -> Verdict:
    """Figure 11.

    Args:
        with_dp: the attack on all examples of the model with DP (success_rate, low, high, trials).
        p_unequal: of the attack on the model without, that it succeeds no more often on the most exposed group.
        low: the lower end of its success on all examples.
    """
    hidden = 100 * with_dp["high"] <= LARGEST_WITH_DP
    unequal = low > 0.5 and p_unequal <= SIGNIFICANCE
    why = (
        f"with DP at most {100 * with_dp['high']:.1f} %, where {noticed(with_dp['trials']):.1f} % would be noticed; "
        f"without DP unequal by p {p_unequal:.2g}"
    )
    return _graded(hidden and unequal, hidden or unequal, why)


def noticed(trials: int) -> float:
    """The success in per cent that a one-sided test of so many guesses finds in 80 % of the cases."""
    ends = stats.norm.isf(SIGNIFICANCE) + stats.norm.ppf(0.8)
    return 50 + 50 * float(ends) / math.sqrt(trials)


def least_p_of_groups(rows: Sequence[Mapping[str, Any]]) -> float:
    """The smallest corrected p-value of the groups, that an attack is right in half of its guesses."""
    return min(
        holm(
            [
                float(stats.binomtest(row["successes"], row["trials"]).pvalue)
                for row in rows
                if not row["too_small"]
            ]
        )
    )


def falling_epsilon(smallest: Sequence[float], shares: Sequence[float]) -> Verdict:
    """Figures 9 and 10: the smallest epsilon and the share at the worst case at each clipping norm, the smallest norm first."""
    falls = all(low > high for low, high in pairwise(smallest))
    fewer = shares[-1] < shares[0]
    return _graded(falls and fewer, falls or fewer)


def largest_between(values: Sequence[float]) -> Verdict:
    """Figures 9 and 10: accuracies, or gaps, at each clipping norm, the smallest norm first."""
    place = values.index(max(values))
    steps = np.sign(np.diff(values))
    return _graded(0 < place < len(values) - 1, len(set(steps)) > 1)


def loss_at(found: Sequence[float], printed: Sequence[float]) -> Verdict:
    """Figure 12: Pearson's r at each clipping norm, ours and the paper's."""
    pairs = list(zip(found, printed, strict=True))
    close = all(ours >= theirs - LARGEST_R_MISS for ours, theirs in pairs)
    return _graded(close, all(ours >= FAIR_PEARSON for ours in found))


def same_order(pairs: Sequence[tuple[Sequence[str], Sequence[str]]]) -> Verdict:
    """Figure 8: for each seed the order of groups with and without individual clipping, lowest first."""
    taus = [
        kendall(ordinary, {name: float(place) for place, name in enumerate(individual)})[0]
        for individual, ordinary in pairs
    ]
    same = sum(list(individual) == list(ordinary) for individual, ordinary in pairs)
    return _graded(
        same == len(taus),
        float(np.mean(taus)) > LEAST_TAU,
        f"same in {same} of {len(taus)}, mean tau {np.mean(taus):.2f}",
    )


def cost(with_rounding: float, without_rounding: float) -> Verdict:
    """Table 1: seconds of the paper's method."""
    saving = without_rounding / with_rounding
    quick, saves = with_rounding <= LONGEST_ACCOUNT, saving >= LEAST_SAVING
    why = f"{with_rounding:.2f} s, {saving:,.0f} times"
    return _graded(quick and saves, quick or saves, why)


def error_rate(private: Sequence[float | None], non_private: Sequence[float]) -> float:
    """Average of |private - non-private| / non-private, in per cent; infinite where one was all noise and not given."""
    errors = [
        math.inf if value is None else abs(value - truth) / truth
        for value, truth in zip(private, non_private, strict=True)
    ]
    return 100 * statistics.fmean(errors)


def release(rate: float) -> Verdict:
    """Table 2 and footnote 3: an error rate in per cent."""
    why = f"average error rate {rate:.2f} %" if math.isfinite(rate) else "a statistic was all noise"
    return _graded(rate <= LARGEST_ERROR_RATE, rate <= POOR_ERROR_RATE, why)


def paired_accuracies(differences: Sequence[float]) -> Verdict:
    """Table 3: individual less ordinary test accuracy in points, of each pair of runs with one seed."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Verdict(NOT_RUN, f"one pair, {mean:+.2f} points")
    half = float(stats.t.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences)
    half /= math.sqrt(len(differences))
    furthest = max(abs(mean - half), abs(mean + half))
    return _graded(
        furthest <= LARGEST_ACCURACY_LOSS,
        furthest <= POOR_ACCURACY_LOSS,
        f"{mean:+.2f} points [{mean - half:+.2f}, {mean + half:+.2f}], {len(differences)} pairs",
    )


def close(largest: float) -> Verdict:
    """Appendix B.2: the largest relative difference of a group's mean epsilons with and without individual clipping."""
    return _graded(largest <= CLOSE_MEANS, largest <= FAIR_MEANS, f"at most {largest:.1%}")


def quicker(hard: tuple[float, float], easy: tuple[float, float]) -> Verdict:
    """Appendix C: mean epsilons of the underserved and of the best served class at the larger and the smaller clipping norm."""
    rise, other = hard[1] - hard[0], easy[1] - easy[0]
    return _graded(
        rise >= LEAST_QUICKER * max(other, 0.0) and rise > 0,
        rise > max(other, 0.0),
        f"{rise:+.2f} and {other:+.2f}",
    )
