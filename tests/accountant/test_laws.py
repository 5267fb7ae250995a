"""One-step laws: their masses, weights and losses bound the exact ones; what libraries round."""

import mpmath as mp
import numpy as np
import pytest
from scipy import integrate
from scipy.special import ndtr, ndtri

from indpriv.accountant import tight
from indpriv.accountant.laws import TILTS, Cells, Mixture, U, cells_of, tail_of
from indpriv.errors import InputError
from tight_oracles import (
    DIRECTIONS,
    OURS,
    Inverted,
    gaussian_delta,
    losses_of,
    one_step_delta,
    pair,
    sampled,
)


@pytest.mark.parametrize("delta", [0.0, 1e-290, 1e-320, 1.0, 2.0, -1e-5, np.nan, np.inf])
def test_deltas_that_are_refused(delta):
    with pytest.raises(InputError, match="delta="):
        tail_of(delta, 10.0)


@pytest.mark.parametrize("delta", [1e-289, 1e-100, 1e-12, 0.5, 1 - 1e-12])
@pytest.mark.parametrize("steps", [0.0, 1.0, 1e9])
def test_tails_are_a_share_of_delta(delta, steps):
    assert 0 < tail_of(delta, steps) * max(steps, 1) <= 1e-6 * delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("n", "rate"),
    [(20, 0.05), (17, 1 - 2.0**-53), (60, 0.9999), (900, 0.5), (5000, 0.12), (10**6, 6e-4)],
)
def test_weights_of_equal_rows(n, rate):
    mixture = Mixture.of_rows(np.full((1, n), 0.001), np.array([rate]), 1e-15)
    numbers = np.rint(mixture.mean[0] / 0.001).astype(int)
    np.testing.assert_allclose(mixture.mean[0], numbers * 0.001, rtol=1e-12)
    kept = range(0, len(numbers), max(len(numbers) // 60, 1))
    with mp.workdps(40):
        q = mp.mpf(rate)
        for i in kept:
            k = int(numbers[i])
            exact = mp.binomial(n, k) * q**k * (1 - q) ** (n - k)
            assert abs(mixture.weight[0, i] / exact - 1) < mixture.slack
    assert mixture.weight.sum() + mixture.beyond[0] == pytest.approx(1, abs=1e-10)
    assert mixture.slack < 1e-10


@pytest.mark.parametrize("n", [12, 200])
def test_sums_of_unequal_rows_are_rounded_up(n):
    shifts = np.random.default_rng(1).uniform(0.01, 1, n)
    mixture = Mixture.of_rows(shifts[None], np.array([0.1]), 1e-15)
    mean = float(mixture.mean[0] @ mixture.weight[0])
    assert shifts.sum() * 0.1 * (1 - 1e-12) <= mean <= shifts.sum() * 0.1 * (1.01 + 0.003)
    draws = np.random.default_rng(2).random((4000, n)) < 0.1
    for t in np.linspace(-3, shifts.sum() * 0.2 + 3, 20):
        some = ndtr(draws @ shifts - t)
        assert mixture.weight[0] @ ndtr(mixture.mean[0] - t) > some.mean() - some.std() / 14


@pytest.mark.parametrize(
    ("shifts", "rate"),
    [([0.31, 0.17, 0.6, 0.05, 0.6], 0.1), ([3.0, 0.2, 0.011], 0.4), ([0.7] * 4 + [0.69], 0.9)],
)
def test_sums_of_rows_are_above_t_more_often_but_hardly(shifts, rate):
    tail = 1e-13
    mixture = Mixture.of_rows(np.array([shifts, shifts[::-1]]), np.array([rate, rate / 2]), tail)
    for step, q in enumerate((rate, rate / 2)):
        sums, odds = np.zeros(1), np.ones(1)
        for shift in shifts:
            sums, odds = np.append(sums, sums + shift), np.append(odds * (1 - q), odds * q)
        for t in np.linspace(ndtri(tail), sum(shifts) + 6, 200):
            exact = float(odds @ ndtr(sums - t))
            found = float(mixture.weight[step] @ ndtr(mixture.mean[0] - t)) + mixture.beyond[step]
            assert exact * (1 - 1e-13) <= found <= exact * 1.05 + 2.1 * tail
            if t < 0:  # where little is left to be above t
                below = float(odds @ ndtr(t - sums)) - float(
                    mixture.weight[step] @ ndtr(t - mixture.mean[0])
                )
                assert below >= -3 * tail


def test_rows_that_nobody_can_weigh_are_all_missed():
    assert Mixture.of_rows(np.full((1, 2000), 0.1), np.array([0.9]), 1e-12).beyond[0] == 1
    rare = Mixture.of_rows(np.array([[0.5, 0.3]]), np.array([1e-17]), 1e-12)
    assert rare.beyond[0] < 3e-12
    nothing = Mixture.of_rows(np.zeros((1, 3)), np.array([0.5]), 1e-12)
    assert nothing.mean.tolist() == [[0.0]]


def between(a, b):
    """Normal mass, from the side on which it is small."""
    return mp.ncdf(b) - mp.ncdf(a) if b < 0 else mp.ncdf(-a) - mp.ncdf(-b)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "law", [sampled(1.0, 0.1), sampled(1e-6, 0.5), sampled(300.0, 1e-7), sampled(3.0, 1 - 1e-13)]
)
def test_cells_bound_masses_and_losses(law, direction):
    first, second = pair(OURS, law, direction)
    with mp.workdps(40):
        z = np.sort(np.random.default_rng(3).uniform(-30, first.mean.max() + 30, 60))
        for mixture in (first, second):
            means, odds = mixture.mean[0].tolist(), mixture.weight[0].tolist()
            least, most = mixture.masses(z[None])
            log_ratio, error = mixture.log_ratio(z[None])
            for i in range(59):
                mass = mp.fsum(
                    w * between(mp.mpf(z[i]) - m, mp.mpf(z[i + 1]) - m)
                    for w, m in zip(odds, means, strict=True)
                )
                assert least[0, i] <= mass <= most[0, i] + 1e-300
                terms = [w * mp.exp(m * mp.mpf(z[i]) - mp.mpf(m) ** 2 / 2)
                         for w, m in zip(odds, means, strict=True)]  # fmt: skip
                assert abs(log_ratio[0, i] - mp.log(mp.fsum(terms))) <= error[0, 0]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "law", [sampled(1.0, 0.1), sampled(0.02, 0.9), ([0, 0.5, 2], [0.5, 0.4, 0.1], 1)]
)
def test_moments_are_above_and_near(law, direction):
    cells = cells_of(*pair(OURS, law, direction), 1e-60)
    some = (TILTS >= 0.01) & (TILTS < 3)
    exact = [
        Inverted([law], direction).log_moments(np.array([t + 0j]))[0].real for t in TILTS[some]
    ]
    gap = cells.moments()[0, some] - exact
    assert (gap > -1e-12).all()
    assert (gap < 0.02 * (1e-6 + np.array(exact))).all()


def both_ways(epsilon, law):
    """Delta of the symmetric law at any epsilon: at those below 0 it follows from those above."""
    if epsilon >= 0:
        return float(one_step_delta(law[0], law[1], epsilon, "remove"))
    return 1 - np.exp(epsilon) + np.exp(epsilon) * both_ways(-epsilon, law)


def test_symmetric_law_of_a_gaussian_step_is_the_step():
    cells = cells_of(*pair(OURS, sampled(0.5, 1 - 1e-15), "remove"), 1e-14).symmetric()
    for count in (1, 4, 100):
        losses, mu = losses_of(OURS, cells), 0.5 * np.sqrt(count)
        met = tight.Met.of([[float(count)]])
        (epsilon,) = tight.epsilons(losses, met, 1e-5)
        assert 0 <= np.log(1e-5 / float(gaussian_delta(mu, epsilon))) < 0.01


@pytest.mark.parametrize("law", [sampled(1.0, 0.1), sampled(2.0, 0.02), sampled(0.5, 0.8)])
def test_symmetric_law_against_quadrature(law):
    """Two steps: the first one's loss is l or, under the other law, -l, else 0."""
    (_, shift), (_, rate), _ = law
    losses = losses_of(OURS, cells_of(*pair(OURS, law, "remove"), 1e-14).symmetric())
    met = tight.Met.of([[1.0], [2.0]])

    def loss(z):
        return np.log1p(rate * np.expm1(shift * z - shift**2 / 2))

    def density(z, mean=0.0):
        return np.exp(-((z - mean) ** 2) / 2) / np.sqrt(2 * np.pi)

    nothing = 1 - ndtr(-shift / 2) - (1 - rate) * ndtr(-shift / 2) - rate * ndtr(shift / 2)
    for epsilon in (-0.3, 0.5, 2.0):

        def integrand(z, epsilon=epsilon):
            with_ = (1 - rate) * density(z) + rate * density(z, shift)
            return with_ * both_ways(epsilon - loss(z), law) + density(z) * both_ways(
                epsilon + loss(z), law
            )

        z = np.linspace(shift / 2, shift + 8, 201)
        two = integrate.simpson([integrand(x) for x in z], x=z) + nothing * both_ways(epsilon, law)
        found = tight.deltas(losses, met, np.full(2, epsilon))
        for bound, exact in zip(found, (both_ways(epsilon, law), two), strict=True):
            assert exact * (1 - 1e-5) <= bound <= exact * 1.03


def test_mixed_steps_against_their_mixture():
    """A step with either of two shifts, and a mark which: over the steps, numbers are binomial."""
    laws = [cells_of(*pair(OURS, sampled(s, 1 - 1e-15), "remove"), 1e-14) for s in (0.3, 1.2)]
    losses = losses_of(OURS, Cells.mixed([0.75, 0.25], laws))
    for epsilon in (0.1, 1.0, 3.0):
        odds = [0.75**3, 3 * 0.75**2 * 0.25, 3 * 0.75 * 0.25**2, 0.25**3]
        mus = [np.sqrt((3 - k) * 0.3**2 + k * 1.2**2) for k in range(4)]
        exact = sum(w * float(gaussian_delta(mu, epsilon)) for w, mu in zip(odds, mus, strict=True))
        (found,) = tight.deltas(losses, tight.Met.of([[3.0]]), np.array([epsilon]))
        assert exact <= found <= exact * 1.01


def test_ndtr_is_as_exact_as_its_masses_need():
    rng = np.random.default_rng(6)
    with mp.workdps(50):
        for z in np.append(rng.uniform(-37, 37, 1000), rng.normal(size=200)):
            exact = mp.ncdf(mp.mpf(z))
            assert abs(ndtr(z) - exact) <= 32 * U * (1 + z**2) * exact / 4


@pytest.mark.parametrize("name", ["exp", "log", "sin", "cos"])
def test_functions_of_numpy_err_by_less_than_four_units(name):
    rng = np.random.default_rng(7)
    ends = {"exp": (-700, 700), "log": (1e-9, 1e6)}.get(name, (-1e4, 1e4))
    x = rng.uniform(*ends, 2000)
    x = np.append(x, 10.0 ** rng.uniform(-300, 300, 500)) if name == "log" else x
    with mp.workdps(40):
        for at, found in zip(x.tolist(), getattr(np, name)(x).tolist(), strict=True):
            exact = getattr(mp, name)(mp.mpf(at))
            size = abs(exact) if name in ("exp", "log") else 1  # a modulus of 1 has both parts
            assert abs(found - exact) <= 4 * 2 * U * size


ROUGH = {  # losses and their masses
    "a step": lambda rng: cells_of(*pair(OURS, sampled(1.0, 0.1), "remove"), 1e-14),
    "two points": lambda rng: law_of(np.array([0.0, 0.7]), np.array([0.5, 0.5])),
    "a lattice": lambda rng: law_of(np.arange(64) / 8, rng.dirichlet(np.ones(64))),
    "nearly one point": lambda rng: law_of(np.append(0.3, np.sort(rng.uniform(1, 9, 200))),
                                           np.append(1.0, rng.exponential(size=200) * 1e-9)),
    "scattered": lambda rng: law_of(np.sort(rng.standard_cauchy(300)), rng.dirichlet(np.ones(300))),
    "in disorder": lambda rng: law_of(rng.normal(size=300), rng.dirichlet(np.ones(300))),
}  # fmt: skip


def law_of(loss, mass):
    return Cells(loss[None], mass[None] / mass.sum(), np.zeros(1))


@pytest.mark.parametrize("name", ROUGH)
def test_transforms_err_by_less_than_their_bound_and_blocks_are_bounded(name):
    rng = np.random.default_rng(8)
    for period, column in ((1.7, 12), (40.0, 24), (0.2, 30)):
        cells = ROUGH[name](rng)
        line = losses_of(OURS, cells).line(column, period)
        masses, loss = line.at.masses[0].astype(np.longdouble), cells.loss[0]
        omega = 8 * np.arctan(np.longdouble(1)) / np.longdouble(period)

        def transform(number, loss=loss, masses=masses, omega=omega):
            phase = np.outer(number.astype(np.longdouble) * omega, loss.astype(np.longdouble))
            return np.cos(phase) @ masses - 1j * (np.sin(phase) @ masses)

        table = line.table(256)
        share = line.at.share.data[0]  # 1, but for what the moment is raised
        found = np.exp(table.log_modulus[0] + 1j * table.angle[0]) / share
        assert (np.abs(found - transform(np.arange(256))) < table.error[0] / 4).all()
        ends = np.append(tight._EDGES[1:], 2 * tight._EDGES[-2])
        for start, end, top in zip(tight._EDGES, ends, line.top[0], strict=True):
            largest = np.abs(transform(rng.uniform(start, end, 40))).max()
            assert np.log(largest) <= top - np.log(share)
        if name == "a step" and period > 1:  # and they tell something
            assert line.top.min() < -0.5
