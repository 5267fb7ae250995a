"""Steps that are shared between the nodes of a lattice: brackets contain those of the exact laws."""

import numpy as np
import pytest

from indpriv import NormLog, account
from indpriv.accountant.histogram.lattice import Lattice
from indpriv.accountant.histogram.mechanisms import Mechanisms
from indpriv.accountant.pld.brackets import pld_epsilon
from indpriv.accountant.pld.chords import SharedDivergences, chord_terms, features
from indpriv.accountant.pld.decay import decay_between
from indpriv.accountant.pld.loss_sum import DIRECTIONS, Cells, StepLaws
from indpriv.accountant.pld.transform import contour_table, log_transforms


def random_run(rng, *, many_rates, many_shifts=True):
    """Shifts, rates and numbers of steps of a few laws, and a lattice that they lie in.

    Without many shifts those of the laws are nodes of the lattice.
    """
    n_laws, largest = int(rng.integers(1, 9)), rng.uniform(0.05, 1.5)
    shift = largest * np.exp(-rng.exponential(1.0, n_laws))
    rate = np.full(n_laws, np.exp(rng.uniform(np.log(1e-3), np.log(0.4))))
    rates = rate
    if many_rates:
        rate = rate * np.exp(rng.uniform(0, 0.4, n_laws))
        rates = np.concatenate([rate, np.linspace(rate.min(), rate.max(), 9)])
    others = np.geomspace(1e-4 * largest, largest, 999) if many_shifts else [largest]
    lattice = Lattice.of_chords(np.append(shift, others), rates, 0.0)
    assert lattice.chord_shifts == many_shifts
    return shift, rate, rng.integers(20, 1500, n_laws).astype(float), lattice


def shared(lattice, shift, rate, steps):
    counts = np.zeros(len(lattice.shifts) * len(lattice.rates))
    for node, share in lattice.locate(shift[:, None], rate):
        np.add.at(counts, node[:, 0], np.broadcast_to(share, (len(steps), 1))[:, 0] * steps)
    return counts


def relative_width(found):
    return (found.epsilon_upper[0] - found.epsilon_lower[0]) / max(found.epsilon_upper[0], 1e-300)


def check_runs(seed, n_runs, many_rates, many_shifts):
    rng, infinite, widths = np.random.default_rng(seed), np.array([np.inf]), []
    for _ in range(n_runs):
        shift, rate, steps, lattice = random_run(
            rng, many_rates=many_rates, many_shifts=many_shifts
        )
        delta = 10.0 ** -rng.integers(3, 9)
        laws = Mechanisms(np.ones(len(shift)), 1 / shift, rate).participations(steps[None])
        exact = pld_epsilon(laws, delta=delta, rdp_upper=infinite)
        nodes = lattice.mechanisms.participations(shared(lattice, shift, rate, steps)[None])
        found = pld_epsilon(nodes, delta=delta, rdp_upper=infinite, tolerance=1e-4, lattice=lattice)
        assert found.epsilon_lower[0] <= exact.epsilon_upper[0] * (1 + 1e-12)
        assert found.epsilon_upper[0] >= exact.epsilon_lower[0] * (1 - 1e-12)
        widths.append(relative_width(found) if np.isfinite(found.epsilon_upper[0]) else 1.0)
    assert np.median(widths) <= 2e-3


@pytest.mark.slow
@pytest.mark.parametrize("many_shifts", [False, True])
@pytest.mark.parametrize("many_rates", [False, True])
def test_brackets_by_shared_steps_contain_exact_ones(many_rates, many_shifts):
    check_runs(1, 200, many_rates, many_shifts)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tilt", [0.5, 4.0, 40.0])
def test_the_bound_of_a_chord_contains_its_error_along_a_contour(tilt, direction):
    rng, seen = np.random.default_rng(7), 0.0
    frequencies = np.linspace(0, 2 * tilt + 10, 33)
    w = tilt + 1j * frequencies
    for many_rates, many_shifts in ((False, True), (True, True), (True, False)):
        shift, rate, _, lattice = random_run(rng, many_rates=many_rates, many_shifts=many_shifts)
        mechanisms = lattice.mechanisms
        kept = mechanisms.shifts > 0
        nodes = StepLaws(mechanisms.shifts[kept], mechanisms.sample_rate[kept])
        cells = Cells.of(nodes, 0.0, lattice.chord_rates, lattice.chord_shifts)

        def cumulants(laws):
            """(n_laws, n_frequencies) K, and its change from that at the tilt."""
            change = contour_table(laws, tilt, direction, frequencies).logarithm
            return change + log_transforms(laws, tilt, direction)[:, None], change

        at_nodes, change = cumulants(nodes)
        terms = chord_terms(cells, tilt, direction)
        a = w + 1 if direction == "remove" else -w
        ratio = np.exp(change.real.min(axis=0)) - np.abs(a * (a - 1)) * terms[:, 5].max()
        bound = features(w, direction, ratio)[ratio > 0] @ terms[:, :5].T
        for own in range(len(shift)):
            one = slice(own, own + 1)
            share = shared(lattice, shift[one], rate[one], np.ones(1))[kept]
            exact, _ = cumulants(StepLaws(shift[one], rate[one]))
            error = np.abs(exact[0] - share @ at_nodes)[ratio > 0]
            assert np.all(error <= bound @ share + 1e-13)
            if lattice.chord_shifts or lattice.chord_rates:
                seen = max(seen, float((error / (bound @ share)).max(initial=0.0)))
    if tilt < 40:
        assert seen > 0.02  # the bound is not vacuous


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("tilt", [0.5, 4.0, 150.0])
@pytest.mark.parametrize("many_shifts", [False, True])
def test_laws_around_a_node_decay_as_fast_as_its_bound_says(many_shifts, tilt, direction):
    rng, frequencies = np.random.default_rng(11), tilt * np.exp2(np.arange(-3.0, 25.0))
    for _ in range(2):
        shift, rate, _, lattice = random_run(rng, many_rates=True)
        shift = np.minimum(shift, 3 / tilt)
        others = np.geomspace(1e-4, 1.0, 999) if many_shifts else np.ones(1)
        every = np.append(shift, shift.max() * others)
        lattice = Lattice.of_chords(every, lattice.rates, 0.0)
        kept = lattice.mechanisms.shifts > 0.01 * shift.max()
        nodes = StepLaws(lattice.mechanisms.shifts[kept], lattice.mechanisms.sample_rate[kept])
        bound = decay_between(Cells.of(nodes, 0.0, True, many_shifts), tilt, direction, frequencies)
        for own in np.flatnonzero(shift > 0.02 * shift.max()):
            one, places = slice(own, own + 1), 2 ** np.arange(7)
            share = shared(lattice, shift[one], rate[one], np.ones(1))[kept]
            table = contour_table(
                StepLaws(shift[one], rate[one]), tilt, direction, frequencies[0] * np.arange(65)
            )
            exact, found = table.logarithm[0, places].real, share @ bound[:, :7]
            assert np.all(exact <= found + 1e-12)
            # Rates that are 4 % apart differ by e^6 in f^150, but only at a z that nothing reaches
            assert found[2] <= exact[2] / 8


def test_renyi_bounds_of_nodes_are_never_below_those_of_the_run():
    rng = np.random.default_rng(3)
    orders = np.array([1.5, 4.0, 32.0])
    for many_rates in (False, True):
        shift, rate, steps, lattice = random_run(rng, many_rates=many_rates)
        exact = Mechanisms(np.ones(len(shift)), 1 / shift, rate).divergences(orders) @ steps
        counts = shared(lattice, shift, rate, steps)
        found = SharedDivergences(lattice.mechanisms, lattice).divergences(orders) @ counts
        assert np.all(found >= exact * (1 - 1e-12))
        assert np.all(found[:2] <= exact[:2] * 1.06)


def test_few_shifts_and_rates_are_nodes_and_nothing_is_shared():
    rng = np.random.default_rng(2)
    shift, rate, steps, lattice = random_run(rng, many_rates=False, many_shifts=False)
    counts = shared(lattice, shift, rate, steps)
    assert sorted(counts[counts > 0]) == sorted(steps)
    orders = np.array([1.5, 4.0, 32.0])
    exact = Mechanisms(np.ones(len(shift)), 1 / shift, rate).divergences(orders) @ steps
    found = SharedDivergences(lattice.mechanisms, lattice).divergences(orders) @ counts
    assert np.all(np.abs(found / exact - 1) <= 1e-12)


@pytest.mark.slow
def test_a_log_without_rounding_is_accounted_within_a_thousandth_of_exact_laws():
    norms = np.random.default_rng(5).uniform(0, 1.1, (3, 12))
    settings = {
        "total_steps": 300,
        "max_grad_norm": 1.0,
        "noise_multiplier": 2.0,
        "sample_rate": 0.1,
    }
    log = NormLog.from_arrays(norms, [0, 100, 200], rounding=0, **settings)
    found = account(log, delta=1e-5, accountant="pld")
    shares = np.minimum(norms, 1.0).T
    for example, own in enumerate(shares):
        laws = Mechanisms(own, np.full(3, 2.0), np.full(3, 0.1)).participations(
            np.full((1, 3), 100.0)
        )
        exact = pld_epsilon(laws, delta=1e-5, rdp_upper=np.array([np.inf]))
        assert found.epsilon_lower[example] <= exact.epsilon_upper[0] * (1 + 1e-9)
        assert found.epsilon[example] >= exact.epsilon_lower[0] * (1 - 1e-9)
        width = found.epsilon[example] - found.epsilon_lower[example]
        assert width <= 1e-3 * found.epsilon[example]


def log_of_many_rates(n_examples):
    """A rounded log of 300 steps, each at a rate of its own: a few shifts under many rates."""
    norms = np.random.default_rng(6).uniform(0, 1.1, (3, n_examples)).round(1)
    rates = np.random.default_rng(7).uniform(0.05, 0.1, 300)
    settings = {"max_grad_norm": 1.0, "noise_multiplier": 2.0, "sample_rate": rates}
    log = NormLog.from_arrays(norms, [0, 100, 200], total_steps=300, rounding=0.1, **settings)
    return log, np.minimum(norms, 1.0).repeat(100, axis=0), rates


@pytest.mark.slow
def test_a_log_under_many_rates_is_accounted_within_a_thousandth_of_exact_laws():
    log, norms, rates = log_of_many_rates(4)
    found = account(log, delta=1e-5, accountant="pld")
    for example, own in enumerate(norms.T):
        laws = Mechanisms(own, np.full(300, 2.0), rates).participations(np.ones((1, 300)))
        exact = pld_epsilon(laws, delta=1e-5, rdp_upper=np.array([np.inf]), tolerance=1e-5)
        assert found.epsilon_lower[example] <= exact.epsilon_upper[0] * (1 + 1e-9)
        assert found.epsilon[example] >= exact.epsilon_lower[0] * (1 - 1e-9)
        width = found.epsilon[example] - found.epsilon_lower[example]
        assert width <= 1e-3 * found.epsilon[example]


def exact_bracket(norms, noise, rate, steps, delta):
    laws = Mechanisms(norms, np.full(len(norms), noise), np.full(len(norms), rate))
    found = pld_epsilon(
        laws.participations(np.full((1, len(norms)), steps)),
        delta=delta,
        rdp_upper=np.array([np.inf]),
    )
    return found.epsilon_lower[0], found.epsilon_upper[0]


def test_without_sampling_squared_shifts_add_up():
    norms = np.random.default_rng(8).uniform(0, 1, (3, 4))
    settings = {"total_steps": 6, "max_grad_norm": 1.0, "noise_multiplier": 4.0, "sample_rate": 1.0}
    log = NormLog.from_arrays(norms, [0, 2, 4], rounding=0, **settings)
    found = account(log, delta=1e-5, accountant="pld")
    for example, own in enumerate(norms.T):
        lower, upper = exact_bracket(own, 4.0, 1.0, 2.0, 1e-5)
        assert lower * (1 - 1e-9) <= found.epsilon[example] <= upper * (1 + 1e-4)
        assert found.epsilon_lower[example] <= upper * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("norm", [5e-5, 1.5e-4])
def test_norms_near_zero_are_not_free(norm):
    settings = {"total_steps": 9, "max_grad_norm": 1.0, "noise_multiplier": 1.0, "sample_rate": 0.5}
    norms = np.full((3, 1), norm)
    delta = 4.5 * norm / np.sqrt(8 * np.pi)  # half of the steps' total variation
    log = NormLog.from_arrays(norms, [0, 3, 6], rounding=0, **settings)
    found = account(log, delta=delta / 4, accountant="pld")
    lower, upper = exact_bracket(norms[:, 0], 1.0, 0.5, 3.0, delta / 4)
    assert lower > 0
    assert found.epsilon[0] >= lower
    assert found.epsilon_lower[0] <= upper


def unrounded_log():
    norms = np.random.default_rng(9).uniform(0, 1.1, (3, 24))
    settings = {"total_steps": 300, "max_grad_norm": 1.0, "noise_multiplier": 3.0}
    return NormLog.from_arrays(norms, [0, 100, 200], rounding=0, sample_rate=0.1, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("rates", ["one", "many"])
def test_threads_that_share_a_table_give_the_same_bits(monkeypatch, rates):
    log = unrounded_log() if rates == "one" else log_of_many_rates(40)[0]
    monkeypatch.setattr("indpriv.accountant.blocks._BLOCK_BYTES", 1 << 15)
    one, three = (account(log, delta=1e-5, accountant="pld", workers=n) for n in (1, 3))
    assert np.array_equal(one.epsilon, three.epsilon)
    assert np.array_equal(one.epsilon_lower, three.epsilon_lower)
