"""Does individual epsilon say who is attacked? Effects of membership over many models. Sensitive.

The effect of an example is how far being trained on moves its signal, in standard deviations of the
signal between models (Hedges 1981). A single example's effect is mostly noise; means over examples
of like epsilon are not. Coins decided the memberships, so that redrawing them, with all signals
fixed, gives exact tests of "no effect at all" (Fisher 1935; Phipson and Smyth 2010).
"""

from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from indpriv._checks import check_positive_int
from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.analysis.attacks.membership import epsilon_edges
from indpriv.analysis.guarantee import mu_of
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.statistics import CONFIDENCE, Interval, student_quantile
from indpriv.analysis.summary import Finding, record
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import Effects, Moments, effects
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

EffectBin: Any = record("effect_bin")
VulnerabilityBy: Any = record("vulnerability_by")
MembershipEffects: Any = record("membership_effects")
LEAST_MODELS = 8  # with fewer, effects are too large by a quarter to a third
_LEAST = 20  # examples
_RESAMPLES = 400
_HALVINGS = 20  # of the models, for errors of shares
MOST_VULNERABLE, LOOKED_AT = 0.05, 0.2  # share that is to be found among the share looked at
_PURPOSE = 2  # keeps redrawn coins apart from coins that were drawn with the same seed


def membership_effects(
    signals: AttackSignals,
    table: EpsilonTable,
    *,
    examples: ExampleTable | None = None,
    bins: int = 8,
    redraws: int = 999,
    seed: int = 0,
) -> MembershipEffects:
    """Effects of membership in bins of individual epsilon, the worst case included.

    Signals are of at least eight models with memberships by coins; an audited row is left out. The
    epsilons are of a run of the same audit, best of another run than these, and so are the losses
    in `examples`. InputError for too few models, memberships that no coins decided, or no example
    in common.
    """
    check_positive_int("redraws", redraws)
    check_positive_int("bins", bins, minimum=2)
    values, member, rows, units = _taken(signals, table)
    rng = np.random.default_rng([seed, _PURPOSE])
    epsilon, mu = table.epsilon[rows], mu_of(table)[rows]
    found = _effects(values, member)
    if (n := int(np.isfinite(found.effect).sum())) < _LEAST:
        raise refused("refusal.signals", "few_examples", n=n, least=_LEAST)
    edges = epsilon_edges(table.take(rows), bins - 1)  # the worst case is a bin of its own
    codes = np.unique(np.searchsorted(edges[1:], epsilon), return_inverse=True)[1]
    actual, null = _statistics(found, codes, mu), np.empty((redraws, int(codes.max()) + 3))
    for draw in range(redraws):
        coins = rng.random((len(values), len(rows) if units is None else int(units.max()) + 1))
        inside = coins < signals.share if units is None else (coins < signals.share)[:, units]
        null[draw] = _statistics(_effects(values, inside), codes, mu)
    largest = np.abs(null[:, 2:]).max(axis=1)
    each = []
    for code, z in enumerate(actual[2:]):
        inside = (codes == code) & np.isfinite(found.effect)
        if not inside.any():  # every model has them, or none
            continue
        effect, weight = found.effect[inside], 1 / found.error[inside]
        mean = float(effect @ weight / weight.sum())
        error = float(np.sqrt(((weight * (effect - mean)) ** 2).sum()) / weight.sum())  # sandwich
        of_bin = float(epsilon[inside].mean()), float(mu[inside].mean()), int(inside.sum())
        each.append(EffectBin(*of_bin, mean, error, _p_value(largest, abs(float(z)))))
    order = rng.permutation(len(values))
    halves = [order[: len(order) // 2], order[len(order) // 2 :]]
    split = [_effects(values[half], member[half]).effect for half in halves]
    return MembershipEffects(
        n_models=len(values),
        n_examples=len(rows),
        bins=tuple(each),
        p_value=_p_value(null[:, 0], float(actual[0])),
        trend_p_value=_p_value(null[:, 1], float(actual[1])),
        redraws=redraws,
        **_correlations(rng, epsilon, found.effect, split),
        vulnerability=vulnerable(signals, table, examples=examples, seed=seed),
    )


def _taken(
    signals: AttackSignals, table: EpsilonTable
) -> tuple[FloatArray, BoolArray, IntArray, IntArray | None]:
    """Centred signals and memberships of the examples in common, their rows and their units."""
    if not signals.coins:
        raise InputError("effects need memberships that independent coins decided (coins=True)")
    rows = pd.Index(table.example_ids).get_indexer(signals.example_ids)
    if signals.audited is not None:
        rows = np.where(signals.member[signals.audited], rows, -1)  # test examples share ids
    models = [model for model in range(signals.n_models) if model != signals.audited]
    if len(models) < LEAST_MODELS:
        raise refused("refusal.signals", "few_for_effects", n=len(models), least=LEAST_MODELS)
    values = np.stack([signals.finite(model) for model in models])
    used = (rows >= 0) & ~np.isnan(values).any(axis=0)
    if not used.any():
        raise InputError("no example has both an epsilon and a signal of every model")
    values = values[:, used]
    member = signals.member[models][:, used]
    units = None if signals.unit_ids is None else pd.factorize(signals.unit_ids[used])[0]
    return values - values.mean(axis=0), member, rows[used], units


def _effects(values: FloatArray, member: BoolArray) -> Effects:
    """Effects from signals centred by example, which keeps the sums of squares exact."""
    n_in, total_in = member.sum(axis=0), np.einsum("mn,mn->n", values, member)
    count = np.stack([n_in, len(member) - n_in])
    means = np.stack([total_in, values.sum(axis=0) - total_in]) / np.maximum(count, 1)
    squares = np.einsum("mn,mn->n", values, values)
    for between in count * means**2:
        squares = squares - between
    return effects(Moments(count, means, np.stack([np.maximum(squares, 0.0), 0.0 * squares])))


def _statistics(found: Effects, codes: IntArray, mu: FloatArray) -> FloatArray:
    """Mean effect, slope over mu, and the z of each bin; effects that are unknown count nothing."""
    known = np.isfinite(found.effect)
    weight = np.where(known, 1 / found.error, 0.0)
    effect = np.where(known, found.effect, 0.0)
    total = max(float(weight.sum()), 1e-300)
    centred = mu - weight @ mu / total
    slope = (weight * centred) @ effect / max(float((weight * centred) @ centred), 1e-300)
    of_bins = np.maximum(np.bincount(codes, weight), 1e-300)
    z = np.bincount(codes, weight * effect) / np.sqrt(of_bins)
    return np.concatenate([[weight @ effect / total, slope], z])


def _p_value(null: FloatArray, actual: float) -> float:
    return float((1 + (null >= actual).sum()) / (1 + len(null)))


def _pearson(rows: FloatArray) -> FloatArray:
    """Correlations of all rows; 0 with a row that is constant."""
    with np.errstate(invalid="ignore"):
        return np.nan_to_num(np.atleast_2d(np.corrcoef(rows)))


def _correlations(
    rng: np.random.Generator, epsilon: FloatArray, effect: FloatArray, halves: list[FloatArray]
) -> dict[str, Any]:
    """Raw r, reliability, and r corrected for it, with intervals; see `MembershipEffects`."""
    known = np.isfinite(np.stack([effect, *halves])).all(axis=0)
    table = np.stack([epsilon, effect, *halves])[:, known]

    def measured(rows: FloatArray) -> tuple[float, float]:
        r = _pearson(rows)
        reliability = 2 * r[2, 3] / max(1 + r[2, 3], 1e-12)
        return reliability, r[0, 1] / np.sqrt(max(reliability, 1e-12))

    reliability, corrected = measured(table)
    n = table.shape[1]
    draws = np.array([measured(table[:, rng.integers(0, n, n)]) for _ in range(_RESAMPLES)])
    ends = np.quantile(draws, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    of_reliability, of_corrected = (Interval(float(low), float(high)) for low, high in ends.T)
    sure = of_reliability.low > 0
    return {
        "correlation": float(_pearson(table)[0, 1]),
        "reliability": float(reliability),
        "reliability_interval": of_reliability,
        "corrected": float(corrected) if sure else None,
        "corrected_interval": of_corrected if sure else None,
    }


def vulnerable(
    signals: AttackSignals,
    table: EpsilonTable,
    *,
    examples: ExampleTable | None = None,
    model: str = "dp",
    seed: int = 0,
) -> tuple[VulnerabilityBy, ...]:
    """How well epsilon, and the losses in `examples`, tell on whom membership has an effect.

    Signals and InputErrors are as of `membership_effects`; model: as of `VulnerabilityBy`. Examples
    of unknown losses are left out.
    """
    values, member, rows, _ = _taken(signals, table)
    figures = {"epsilon": table.epsilon[rows]}
    if examples is not None:
        losses = examples.train.set_index("example_id")["loss"]
        figures["loss"] = to_floats(losses.reindex(table.example_ids[rows]))
    figures = {name: of for name, of in figures.items() if np.isfinite(of).any()}
    known = np.isfinite(np.stack(list(figures.values()))).all(axis=0)
    figures = {name: of[known] for name, of in figures.items() if len(np.unique(of[known])) > 1}
    effect = _effects(values, member).effect[known]
    if "epsilon" not in figures or np.isfinite(effect).sum() < _LEAST:
        return ()
    values, member, n = values[:, known], member[:, known], len(values)

    def measured(models: IntArray) -> FloatArray:
        of_models = values[models]
        effect = _effects(of_models - of_models.mean(axis=0), member[models]).effect
        return _ranked(np.stack(list(figures.values())), effect)

    rng = np.random.default_rng([seed, _PURPOSE])
    every, actual = np.arange(n), measured(np.arange(n))
    without_one = np.stack([measured(np.delete(every, model)) for model in every])
    halves = [part for _ in range(_HALVINGS) for part in np.array_split(rng.permutation(n), 2)]
    in_halves = np.stack([measured(half) for half in halves])
    # Shares are steps of their models, at which a jackknife doubles the error; halves do not.
    error = np.sqrt((n - 1) * without_one.var(axis=0))
    error[2] = in_halves[:, 2].std(axis=0)
    width = student_quantile(n - 1) * error
    least = np.array([-1.0, -1.0, 0.0])[:, None]
    low, high = np.maximum(actual - width, least), np.minimum(actual + width, 1.0)
    found = []
    for place, name in enumerate(figures):
        ends = np.stack([actual, low, high], 2)[:, place].tolist()
        pairs = ((r, Interval(*own)) if not np.isnan(r) else (None, None) for r, *own in ends)
        found.append(VulnerabilityBy(name, *chain.from_iterable(pairs), model=model))
    return tuple(found)


def _ranked(figures: FloatArray, effect: FloatArray) -> FloatArray:
    """(3, n_figures): rank correlations with the effects, partial ones, shares that are found."""
    known = np.isfinite(effect)
    figures, effect = figures[:, known], effect[known]
    r = _pearson(stats.rankdata(np.vstack([figures, effect]), axis=1))
    own, between = r[:-1, -1], r[0, -2]
    given = np.full(len(own), np.nan)  # without another figure, or where it says the same
    if len(own) == 2 and abs(between) < 1 - 1e-9:
        given = (own - own[::-1] * between) / np.sqrt((1 - own[::-1] ** 2) * (1 - between**2))
    vulnerable = np.argsort(-effect, kind="stable")[: max(1, int(MOST_VULNERABLE * len(effect)))]
    room = LOOKED_AT * len(effect)
    last = -np.sort(-figures, axis=1)[:, max(0, int(room) - 1), None]
    above, ties = figures > last, figures == last
    among = above + ties * (room - above.sum(axis=1, keepdims=True)) / ties.sum(axis=1)[:, None]
    return np.stack([own, given, among[:, vulnerable].mean(axis=1)])


def _find(run: AuditedRun) -> dict[str, Any]:
    """By the references of the run and of its baseline, if there are enough of either."""
    recorded, found = run.recorded, list[VulnerabilityBy]()
    more: dict[str, Any] = {"examples": recorded.examples, "seed": run.seed}
    for model, known in recorded.models.items():
        signals = known.confidence
        if signals is None or not signals.coins or signals.n_models <= LEAST_MODELS:
            continue
        table = run.attacked_epsilons  # all of it is in memory, as there are references
        if (table.account.rows_per_unit or 1) == 1:
            found += vulnerable(signals, table, model=model, **more)
    return {"vulnerability": tuple(found)}


FINDING = Finding("vulnerability", _find)
