"""Tight epsilons: never below the truth in either direction, lower ends never above it, both near.

Each check is run on the files as they are, and on copies with a mistake, which it must find.
"""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.special import ndtr, ndtri

from indpriv.accountant import tight
from indpriv.accountant.laws import TILTS, Cells, Mixture, tail_of
from tight_oracles import (
    DIRECTIONS,
    OURS,
    SHARP,
    Inverted,
    composed,
    copied,
    gaussian_delta,
    losses_of,
    one_step_delta,
    pair,
    peer,
    run_of,
    sampled,
    true_positive_rate,
)

RUNS = [  # smooth enough to invert
    [sampled(1.0, 1 - 1e-12, 10)],
    [sampled(0.5, 0.05, 300)],
    [sampled(1 / 0.7, 0.02, 800), sampled(0.3, 0.02, 200)],
    [sampled(2.0, 0.3, 30), sampled(1e-3, 0.3, 100)],
    [([0, 0.3, 0.6], [0.81, 0.18, 0.01], 100)],
    [([0, 0.2, 0.5, 0.7], [0.72, 0.18, 0.08, 0.02], 60), sampled(0.5, 0.9, 4)],
]
DELTAS = [0.1, 1e-9]


def log_gap(most, truth):
    """Of a bound of delta over the truth: below 0 if it is none."""
    return np.inf if truth <= 0 else float(np.log(np.float64(most)) - np.log(np.float64(truth)))


def one_step_at(shift, rate, delta, direction, files=OURS):
    """One step: epsilon, delta and lower end against 60 digits."""
    steps, law = [sampled(shift, rate)], sampled(shift, rate)[:2]
    losses, met = composed(files, steps, delta, direction)
    (epsilon,) = files.tight.epsilons(losses, met, delta)
    assert one_step_delta(*law, epsilon, direction) <= delta * (1 + 1e-12)
    for at in (-0.3 * shift, 0.0, epsilon / 2, epsilon):
        truth = one_step_delta(*law, at, direction)
        assert files.tight.deltas(losses, met, np.array([at]))[0] >= truth * (1 - 1e-12)
    below, met = composed(files, steps, delta, direction, below=True)
    (lower,) = files.tight.lower_epsilons(below, met, delta, np.array([epsilon]))
    assert lower == 0 or one_step_delta(*law, lower, direction) >= delta * (1 - 1e-12)


def one_step(files, direction):
    for shift, rate in ((1.0, 0.1), (0.3, 0.7), (0.05, 0.01), (30.0, 0.3)):
        for delta in (0.1, 1e-5, 1e-30, 1e-100):
            one_step_at(shift, rate, delta, direction, files)


def coarse_tails(files, direction):
    """What cells leave out is counted: here a good part of delta."""
    losses, met = composed(files, [sampled(1.0, 0.5)], 0.1, direction)
    for at in (-5.0, 0.5, 1.0):
        truth = one_step_delta([0, 1.0], [0.5, 0.5], at, direction)
        assert files.tight.deltas(losses, met, np.array([at]))[0] >= truth * (1 - 1e-12)


def any_line(files, direction, seed=0, trials=60):
    """Whatever the tilt, the period, the smoothing and the frequencies: a bound of delta."""
    rng, near = np.random.default_rng(seed), 0
    for _ in range(trials):
        shift, count = rng.choice([0.05, 0.3, 1.0, 2.0]), int(rng.choice([1, 4, 25, 400]))
        mu = shift * np.sqrt(count)
        epsilon = np.array([mu**2 / 2 + mu * rng.uniform(-1, 6)])
        losses, met = composed(files, [sampled(shift, 1 - 1e-12, count)], 1e-12, direction)
        if direction == "add" and epsilon > 27 * count:
            continue
        best = np.searchsorted(TILTS, max(epsilon[0] / mu**2 - 0.5, 0.02))
        column = int(np.clip(best + rng.choice([-6, -2, 0, 0, 1, 3]), 0, len(TILTS) - 1))
        smooth = mu**2 * rng.choice([1e-8, 1e-5, 1e-4], p=[0.1, 0.6, 0.3], size=1)
        line = losses.line(column, float(mu * rng.choice([3, 10, 16])))
        target = np.array([rng.choice([-30.0, -30.0, 5.0])])  # with the last one few terms are kept
        for bound, _ in files.tight.OnLine.tabled(line, met, smooth, target, epsilon):
            for rows, terms in bound.chunks():
                log_delta = bound.log_delta(rows, terms, rows, epsilon)[0][0]
        missed = float((met.counts @ losses.miss)[0])
        gap = np.logaddexp(log_delta, np.log(missed)) - float(
            np.log(np.float64(gaussian_delta(mu, epsilon[0])))
        )
        assert gap > -1e-9
        near += gap < 1e-2
    return near


def upper(files, direction, nearest=np.inf):
    """Composed steps against inverted transforms."""
    for steps, delta in itertools.product(RUNS, DELTAS):
        losses, met = composed(files, steps, delta, direction)
        (epsilon,) = files.tight.epsilons(losses, met, delta)
        exact = Inverted(steps, direction)
        if epsilon == 0:
            assert exact.delta(1e-9) <= delta * (1 + 1e-6)
            continue
        assert -1e-9 < log_gap(delta, exact.delta(epsilon)) < nearest
        found = files.tight.deltas(losses, met, np.array([epsilon / 2]))
        assert -1e-9 < log_gap(found[0], exact.delta(epsilon / 2)) < 2 * nearest


def lower(files, direction, nearest=np.inf):
    """Lower ends of composed steps against inverted transforms."""
    for steps, delta in itertools.product(RUNS, DELTAS):
        above, met = composed(files, steps, delta, direction)
        epsilon = files.tight.epsilons(above, met, delta)
        losses, met = composed(files, steps, delta, direction, below=True)
        (found,) = files.tight.lower_epsilons(losses, met, delta, epsilon)
        assert found <= epsilon[0]
        if found > 0:
            gap = log_gap(Inverted(steps, direction).delta(found), delta)
            assert -1e-9 < gap < nearest
        assert nearest == np.inf or delta > 0.01 or found > 0.99 * epsilon[0]


def gaussian(files, direction):
    """Gaussian steps alone: the closed form, in both directions the same."""
    for mu, delta in itertools.product(
        [1e-6, 1e-3, 0.3, 1.0, 8.0, 40.0], [0.1, 1e-5, 1e-30, 1e-100]
    ):
        losses, met = run_of(files, [pair(files, sampled(1.0, 0.0), direction)], [[3.0]], delta)
        losses = losses_of(files, losses.cells, squares=mu**2 / 3)
        (epsilon,) = files.tight.epsilons(losses, met, delta)
        gap = log_gap(delta, gaussian_delta(mu, epsilon)) if epsilon else 0.0
        assert gap > -1e-9
        assert gap < 5e-3 or gaussian_delta(mu, epsilon * (1 - 1e-3) - 1e-12) > delta


def short_lower(files, direction):
    """One or a few steps, where the cells of the lower end are the whole of its error."""
    for shift, count in ((1.0, 1), (2.0, 4), (0.3, 25)):
        mu = shift * np.sqrt(count)
        losses, met = composed(
            files, [sampled(shift, 1 - 1e-12, count)], 1e-5, direction, below=True
        )
        (found,) = files.tight.lower_epsilons(losses, met, 1e-5, np.array([mu**2 / 2 + 4.5 * mu]))
        assert found > 0
        assert log_gap(gaussian_delta(mu, found), 1e-5) > -1e-9


def spreads(files, direction):
    """No transform is above the bound of its block."""
    losses, _ = composed(files, [sampled(0.5, 0.3)], 1e-5, direction)
    line, rng = losses.line(24, 40.0), np.random.default_rng(0)
    for start, top in zip(files.tight._EDGES[:24], line.top[0], strict=False):
        omega = 2 * np.pi / 40 * rng.uniform(start, start * 8 / 7, 40)
        found = np.exp(1j * np.outer(omega, losses.cells.loss[0])) @ line.at.masses[0]
        assert np.log(np.abs(found)).max() <= top + 1e-9


# Constants with which one of the terms of a bound is large
COARSE = [("laws", "_TAIL = 1e-6", "_TAIL = 0.3")]
WIDE = [("laws", "_CELL = 1 / 40", "_CELL = 1 / 2")]
SMOOTH = [("tight", "BELOW = 2e-5, 14.0", "BELOW = 0.1, 14.0")]
WRAPPED = [("tight", "BELOW = 2e-5, 14.0", "BELOW = 2e-5, 2.0")]
CUT = [("tight", "_CUT = 1e-5", "_CUT = 0.3")]
HOLDS = {  # checks, with which constants, and how near log delta is to come
    "one step": (one_step, [], {}),
    "any line": (any_line, [], {}),
    "gaussian": (gaussian, [], {}),
    "spreads": (spreads, [], {}),
    "usual": (upper, [], {"nearest": 5e-3}),
    "sharp": (upper, SHARP, {"nearest": 4e-4}),
    "cut": (upper, CUT, {}),
    "coarse": (coarse_tails, COARSE, {}),
    "lower": (lower, [], {"nearest": 0.1}),
    "short": (short_lower, [], {}),
    "wide": (short_lower, WIDE, {}),
    "smooth": (lower, SMOOTH, {}),
    "wrapped": (lower, WRAPPED, {}),
    "cut below": (lower, CUT, {}),
}


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", HOLDS)
def test_holds(name, direction, monkeypatch):
    check, changes, near = HOLDS[name]
    check(copied(monkeypatch, changes) if changes else OURS, direction, **near)


def test_any_line_comes_near_the_truth():
    assert sum(any_line(OURS, direction) for direction in DIRECTIONS) > 5  # or it sees nothing


TAIL = "self.tail = tails[np.arange(len(need)), need]"
POINTS, LOWER = (
    "return Cells(high, ",
    'return Cells(np.pad(high, ((0, 0), (1, 0)), "edge")[:, :-1], ',
)
SPREAD = "less = _FLAT"
SHARE = "np.where(gap > 0, np.clip(share, 0.0, mass), mass)"
MISSED = "(first.mirrored().below(-z[:, -1]) + first.beyond) * 1.001"
MOVED = "first.below(z[:, 0])"
OTHER = "_cells(pairs[1].mirrored(), pairs[0].mirrored(), z, below)"
LEFT = "lost += np.exp(size - base) / np.expm1(tilt * period)"
AWAY = "more / 2 + tilt * more + _BEYOND * np.sqrt(more)"
LOST = "lost = self.tail[rows] + self.rounding[rows]"
MISTAKES = {
    "no tail": ("any line", "tight", TAIL, TAIL + " * 0"),
    "no tail in a search": ("cut", "tight", TAIL, TAIL + " * 0"),
    "half of the terms": ("any line", "tight", "np.where(z.imag > 0, 2, 1)", "1"),
    "terms of later blocks left out": (
        "cut",
        "tight",
        TAIL,
        TAIL.replace("need]", "np.minimum(need + 3, last)]"),
    ),
    "more spread than there is": ("spreads", "tight", SPREAD, SPREAD.replace("_", "3 * _")),
    "points a cell too low": ("any line", "laws", POINTS, LOWER),
    "all at lower ends": ("sharp", "laws", SHARE, "mass * 0"),
    "half at each end": ("sharp", "laws", SHARE, "np.where(gap > 0, mass / 2, mass)"),
    "other direction": ("one step", "laws", "_cells(*pairs, z, below)", OTHER),
    "nothing missed": ("coarse", "laws", MISSED, "np.zeros(len(z))"),
    "nothing moved up": ("coarse", "laws", MOVED, f"0 * {MOVED}"),
    "no Gaussian steps": ("gaussian", "tight", "@ losses.squares", "@ (0 * losses.squares)"),
    "upper cells below": ("wide", "laws", "if below:", "if False:"),
    "no shift below": ("smooth", "tight", AWAY, f"0 * ({AWAY})"),
    "wraps from the left": ("wrapped", "tight", LEFT, "lost = 1 * lost"),
    "tail added below": ("cut below", "tight", LOST, LOST.replace("= self", "= -self")),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_found(mistake, monkeypatch):
    name, *change = MISTAKES[mistake]
    check, changes, _ = HOLDS[name]
    files = copied(monkeypatch, [*changes, change])
    with pytest.raises(AssertionError):
        for direction in DIRECTIONS:
            check(files, direction)


def epsilon_of(steps, delta):
    """Of both directions, each as the account asks for it, and the lower end."""
    found, low = None, 0.0
    for direction in DIRECTIONS:
        losses, met = composed(OURS, steps, delta, direction)
        found = tight.epsilons(losses, met, delta, found)
        below, met = composed(OURS, steps, delta, direction, below=True)
        low = max(low, tight.lower_epsilons(below, met, delta, found)[0])
    return found[0], low


PEERS = [
    ([sampled(1 / 0.5, 1e-3, 500)], 1e-5, 1e-3),
    ([sampled(1 / 0.6, 1e-3, 1000)], 1e-5, 1e-3),
    ([sampled(1 / 0.55, 5e-3, 200)], 1e-6, 1e-3),
    ([sampled(1 / 0.7, 1e-2, 100)], 1e-6, 1e-3),
    ([sampled(1 / 0.8, 1 / 75, 600)], 1e-6, 2e-3),
    ([sampled(1 / 1.4, 1 / 34, 400), sampled(0.3, 1 / 34, 280)], 1e-5, 2e-3),
]


@pytest.mark.parametrize(("steps", "delta", "near"), PEERS)
def test_agrees_with_dp_accounting(steps, delta, near):
    found, low = epsilon_of(steps, delta)
    optimistic = peer(steps, pessimistic=False).get_epsilon_for_delta(delta)
    pessimistic = peer(steps, pessimistic=True).get_epsilon_for_delta(delta)
    assert optimistic <= found <= pessimistic * (1 + near)
    assert found * 0.98 < low <= pessimistic


def rows_of(shifts, rate, counts, delta, direction, below=False):
    """One kind of step of a unit with these rows."""
    tail = tail_of(delta, float(np.max(counts)))
    mixture = Mixture.of_rows(np.asarray(shifts)[None], np.array([rate]), tail)
    centred = Mixture.centred(1)
    ways = {"remove": (mixture, centred), "add": (centred, mixture.mirrored())}
    return run_of(OURS, [ways[direction]], counts, delta, below=below)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    ("shifts", "rate"), [([0.7] * 4, 0.2), ([0.1, 0.5, 0.5, 2.0], 0.03), ([1e-3] * 5, 1 - 1e-13)]
)
def test_one_step_of_a_unit(shifts, rate, direction):
    sums, odds = [0.0], [1.0]
    for shift in shifts:
        sums += [one + shift for one in sums]
        odds = [w * p for p in (1 - rate, rate) for w in odds]
    for delta in (0.1, 1e-5, 1e-30):
        losses, met = rows_of(shifts, rate, [[1.0]], delta, direction)
        epsilon = tight.epsilons(losses, met, delta)
        assert one_step_delta(sums, odds, epsilon[0], direction) <= delta * (1 + 1e-10)
        if epsilon[0] > 1e-3:
            nearer = one_step_delta(sums, odds, epsilon[0] * 0.999, direction)
            assert nearer > delta or epsilon[0] > -np.log1p(-rate) * len(shifts)  # the most it is
        if len(set(shifts)) > 1:  # the law of their sums is a larger one
            continue
        losses, met = rows_of(shifts, rate, [[1.0]], delta, direction, below=True)
        (low,) = tight.lower_epsilons(losses, met, delta, epsilon)
        assert low == 0 or one_step_delta(sums, odds, low, direction) >= delta * (1 - 1e-10)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_rows_over_many_steps_are_a_gaussian_mechanism(direction):
    rows, rate, steps = 1_000_011, 1e-4, 1e6
    shift = 9.999890001209986e-06  # mean of a step 1e-3, so that mu is 1; the excess is 1e-5 of it
    losses, met = rows_of(np.full(rows, shift), rate, [[steps]], 1e-5, direction)
    (epsilon,) = tight.epsilons(losses, met, 1e-5)
    assert 4.37717 < epsilon < 4.39


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_true_positive_rates(direction):
    for shift, rate in ((1.0, 0.1), (0.3, 0.7), (30.0, 0.3)):
        losses, met = composed(OURS, [sampled(shift, rate)], 1e-5, direction)
        for false_positives in (1e-4, 0.01, 0.5):
            # Neyman and Pearson: beyond the z that leaves as many of the second law
            if direction == "remove":
                z = -ndtri(false_positives)
                exact = (1 - rate) * false_positives + rate * ndtr(shift - z)
            else:  # of the mixture as many are below z
                low, high = -40.0, shift + 40.0
                for _ in range(80):
                    z = (low + high) / 2
                    many = (1 - rate) * ndtr(z) + rate * ndtr(z - shift) > false_positives
                    low, high = (low, z) if many else (z, high)
                exact = ndtr(z)
            (found,) = tight.true_positive_rates(losses, met, false_positives)
            assert exact * (1 - 1e-9) <= found <= 1
    for steps in RUNS[:3]:
        losses, met = composed(OURS, steps, 1e-5, direction)
        exact = true_positive_rate(Inverted(steps, direction).delta, 0.01)
        assert 1 - 1e-6 < tight.true_positive_rates(losses, met, 0.01)[0] / exact < 1.01


def test_gaussian_steps_alone_need_no_law():
    no_cells = Cells(np.zeros((0, 1)), np.zeros((0, 1)), np.zeros(0))
    losses = tight.Losses(
        no_cells, sparse.csr_array((0, 0)), np.array([0.25]), sparse.csr_array((1, 0))
    )
    met = tight.Met.of(sparse.csr_array([[4.0], [0.0]]), np.array([0.0, 1.0]))
    for epsilon in tight.epsilons(losses, met, 1e-5):
        assert 0 <= log_gap(1e-5, gaussian_delta(1.0, epsilon)) < 5e-3


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_examples_with_no_steps_and_laws_without_a_shift(direction):
    shifts = [sampled(x, 0.3) for x in (1.0, 0.0, 1e-170, 1e-300)]
    counts = [[5, 0, 0, 0], [0, 0, 0, 0], [0, 9, 9, 9], [5, 9, 9, 9]]
    losses, met = run_of(OURS, [pair(OURS, s, direction) for s in shifts], counts, 1e-5)
    first, nothing, still, both = tight.epsilons(losses, met, 1e-5)
    assert nothing == 0
    assert 0 <= still < 1e-6
    assert first > 0.5
    assert both == pytest.approx(first, rel=2e-3)
    assert (tight.deltas(losses, met, np.full(4, 0.1))[[1, 2]] < 1e-9).all()
    assert (tight.true_positive_rates(losses, met, 0.01)[[1, 2]] < 0.0101).all()
    empty = tight.Met.of(sparse.csr_array((2, 4)))
    assert (tight.epsilons(losses, empty, 1e-5) == 0).all()


@pytest.mark.parametrize("counts", [[[0.5]], [[-1.0]], [[np.nan]], [[np.inf]]])
def test_steps_are_whole_numbers(counts):
    with pytest.raises(ValueError, match="whole"):
        tight.Met.of(sparse.csr_array(counts))


@pytest.mark.parametrize(
    ("shift", "epsilon", "delta"), [(300, 49748.858, 1e-30), (30, 900, 1e-5), (1, 1000, 1e-5)]
)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_delta_is_a_number_far_out(shift, epsilon, delta, direction):
    law = sampled(shift, 0.5 if shift > 1 else 0.01)
    losses, met = composed(OURS, [law], delta, direction)
    (found,) = tight.deltas(losses, met, np.array([float(epsilon)]))
    assert float(one_step_delta(*law[:2], epsilon, direction)) <= found <= 1


@pytest.mark.slow
def test_an_epsilon_depends_on_nobody_else():
    rng = np.random.default_rng(5)
    laws = [sampled(0.05 * k, 0.02 * (1 + k % 3)) for k in range(1, 31)]
    counts = np.array([rng.multinomial(rng.integers(1, 600), rng.dirichlet(np.full(30, 0.1)))
                       for _ in range(300)])  # fmt: skip
    for direction, below in itertools.product(DIRECTIONS, [False, True]):
        pairs = [pair(OURS, law, direction) for law in laws]
        losses, met = run_of(OURS, pairs, counts, 1e-6, below=below)
        most = np.full(300, 20.0)

        def ask(losses, met, most, below=below):
            if below:
                return tight.lower_epsilons(losses, met, 1e-6, most[: len(met)])
            return tight.epsilons(losses, met, 1e-6)

        together = ask(losses, met, most)
        for i in (0, 17, 150, 299):
            alone = ask(losses_of(OURS, losses.cells), met.take([i]), most)
            assert alone[0] == pytest.approx(together[i], rel=1e-9)


@pytest.mark.slow
@settings(max_examples=12)
@given(
    shift=st.floats(-9, 2).map(lambda x: 10**x),
    rate=st.floats(-9, -1e-9).map(lambda x: 10**x) | st.floats(-13, -1).map(lambda x: 1 - 10**x),
    delta=st.floats(-100, -0.01).map(lambda x: 10**x),
    direction=st.sampled_from(DIRECTIONS),
)
def test_any_step(shift, rate, delta, direction):
    one_step_at(shift, rate, delta, direction)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_many_more_steps_and_lines(direction):
    rng = np.random.default_rng()
    for _ in range(50):
        rate = rng.choice([10 ** rng.uniform(-9, 0), 1 - 10 ** rng.uniform(-13, 0)])
        one_step_at(10 ** rng.uniform(-9, 4), rate, 10 ** rng.uniform(-100, 0), direction)
    for seed in rng.integers(2**32, size=10):
        any_line(OURS, direction, seed)
