"""Full and batch norms together, compared with a reference that looks at one step of one example at a time."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from indpriv import NormLog, account
from indpriv.accountant import steps as steps_module
from indpriv.accountant.rdp import renyi_divergences
from indpriv.accountant.steps import Steps

ORDERS = np.array([1.5, 3.0, 8.0, 40.0])
RULES = ("last", "closest")


def draw_run(seed, *, moving=False, n_rates=1, n_examples=5):
    """Full rows, their steps, free entries (also at recorded steps), and settings of a short run."""
    rng = np.random.default_rng(seed)
    total_steps = int(rng.integers(1, 25))
    recorded = np.flatnonzero(rng.random(total_steps) < rng.choice([0.0, 0.1, 0.4]))
    steps, positions = np.nonzero(
        rng.random((total_steps, n_examples)) < rng.choice([0.05, 0.3, 0.8])
    )
    # Norms on the levels of 1 / 16, so that rounding changes nothing where max_grad_norm stays at 0.5.
    norms, free = (
        np.ceil(np.exp(rng.normal(-0.9, 0.8, shape)) * 32) / 32
        for shape in ((len(recorded), 5), len(steps))
    )
    rate = rng.uniform(0.02, 0.3, n_rates)[rng.integers(0, n_rates, total_steps)]
    run = {
        "total_steps": total_steps,
        "noise_multiplier": rng.choice([0.7, 1.1], total_steps),
        "max_grad_norm": rng.choice([0.3, 0.5, 0.9], total_steps)
        if moving
        else np.full(total_steps, 0.5),
        "sample_rate": rate,
    }
    return norms, recorded, (steps, positions, free), run


def entries_of(batch_norms):
    return {(int(i), int(step)): norm for step, i, norm in zip(*batch_norms, strict=True)}


def rdp_of(log, between_records):
    counted, block = Steps.of(log, between_records), log.part(0, log.n_examples)
    counts, table = counted.counts(block), counted.laws.divergences(ORDERS)
    totals = counts @ table.T
    below = Steps.of(log, between_records, down=True)
    for whole in (counted, below):
        steps = by_law(whole, block)
        np.testing.assert_array_equal(steps, np.round(steps))
        np.testing.assert_array_equal(steps.sum(axis=1), log.total_steps)
    low = below.counts(block) @ below.laws.divergences(ORDERS).T
    assert np.all(low <= totals * (1 + 1e-12))
    if counted.exact:
        np.testing.assert_allclose(low, totals, rtol=1e-12)
    return totals


def by_law(steps, block):
    return (steps.counts(block) @ steps.laws.steps).toarray()


def one_step_at_a_time(patch):
    """Read each step of each example, as for very many settings."""
    patch.setattr(steps_module, "MOST_DENSE", 0)


def truth_of(norms, recorded, batch_norms, run, between_records):
    relative = oracles.governing_norms_with_free(
        norms,
        recorded,
        entries_of(batch_norms),
        run["total_steps"],
        run["max_grad_norm"],
        between_records,
    )
    total = np.zeros((relative.shape[1], len(ORDERS)))
    for step, row in enumerate(relative):
        rate = np.full(len(row), run["sample_rate"][step])
        total += renyi_divergences(row / run["noise_multiplier"][step], rate, ORDERS)
    return total


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), between_records=st.sampled_from(RULES), unrolled=st.booleans())
def test_few_settings_equal_the_step_by_step_sum(seed, between_records, unrolled):
    norms, recorded, batch_norms, run = draw_run(seed)
    log = NormLog.from_arrays(norms, recorded, rounding=1 / 16, batch_norms=batch_norms, **run)
    with pytest.MonkeyPatch.context() as patch:
        if unrolled:
            one_step_at_a_time(patch)
        ours = rdp_of(log, between_records)
    np.testing.assert_allclose(
        ours, truth_of(norms, recorded, batch_norms, run, between_records), rtol=1e-12
    )


@settings(max_examples=12)
@given(
    seed=st.integers(0, 2**32),
    between_records=st.sampled_from(RULES),
    rounding=st.sampled_from([0.0, 0.1]),
)
def test_a_moving_clipping_norm_never_lowers_a_contribution(seed, between_records, rounding):
    norms, recorded, batch_norms, run = draw_run(seed, moving=True, n_rates=3)
    log = NormLog.from_arrays(norms, recorded, rounding=rounding, batch_norms=batch_norms, **run)
    truth = truth_of(norms, recorded, batch_norms, run, between_records)
    ours = rdp_of(log, between_records)
    assert np.all(ours >= truth * (1 - 1e-9))
    if rounding == 0:
        assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 5e-3))


@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), between_records=st.sampled_from(RULES))
def test_many_settings_are_slightly_above_the_step_by_step_sum(seed, between_records):
    norms, recorded, batch_norms, run = draw_run(seed, n_rates=25)
    log = NormLog.from_arrays(norms, recorded, rounding=1 / 512, batch_norms=batch_norms, **run)
    truth = truth_of(norms, recorded, batch_norms, run, between_records)
    with pytest.MonkeyPatch.context() as patch:
        one_step_at_a_time(patch)
        for limit in ("_MOST_EXACT", "_FEW_SHIFTS", "_FEW_RATES"):
            patch.setattr(steps_module, limit, 0)
        ours = rdp_of(log, between_records)
    assert np.all(ours >= truth * (1 - 1e-9))
    assert np.all(ours[:, ORDERS <= 3] <= truth[:, ORDERS <= 3] * (1 + 5e-3))


def test_a_moving_clipping_norm_by_hand():
    log = NormLog.from_arrays(
        np.zeros((0, 2)),
        [],
        rounding=0.1,
        total_steps=4,
        noise_multiplier=1.0,
        sample_rate=0.1,
        max_grad_norm=np.array([1.0, 2.0, 0.5, 1.0]),
        batch_norms=([1, 1, 3], [0, 1, 1], [0.5, 1.0, 0.32]),
    )
    # Example 0: C, then a norm of 0.6 (its code under 2 is 0.3). Example 1: C, 1.0, the larger of 1.0
    # and 0.4 half-way, 0.4.
    norms = Steps.of(log, "closest").norms
    values = norms.codes.relative(norms.read(log.part(0, 2)), np.ones((4, 1)))
    np.testing.assert_allclose(values, [[1.0, 1.0], [0.6, 1.0], [0.6, 1.0], [0.6, 0.4]])


def test_records_by_hand():
    log = NormLog.from_arrays(
        [[0.2, 0.2], [0.8, 0.8]],
        [1, 9],
        rounding=0.1,
        total_steps=11,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        batch_norms=([5, 9], [0, 0], [0.4, 0.9]),
    )
    # Example 0, closest: step 0 at C; 1, 2 | tie 3 | 4 to 6 | tie 7 | 8 to 10 at the full record, not the free one.
    counts = by_law(Steps.of(log, "closest"), log.part(0, 2))
    assert [dict(zip(np.flatnonzero(row), row[row > 0], strict=True)) for row in counts] == [
        {2: 2, 4: 4, 8: 4, 10: 1},
        {2: 4, 8: 6, 10: 1},
    ]
    counts = by_law(Steps.of(log, "last"), log.part(0, 2))
    assert [dict(zip(np.flatnonzero(row), row[row > 0], strict=True)) for row in counts] == [
        {2: 4, 4: 4, 8: 2, 10: 1},
        {2: 8, 8: 2, 10: 1},
    ]


def small_log(**changes):
    rng = np.random.default_rng(0)
    steps, positions = np.nonzero(rng.random((60, 7)) < 0.2)
    norms = rng.exponential(0.3, (3, 7))
    norms[:, 0], norms[:, 1] = 5.0, 0.0
    free = np.where(
        positions == 0, 5.0, np.where(positions == 1, 0.0, rng.exponential(0.3, len(steps)))
    )
    options = {
        "total_steps": 60,
        "noise_multiplier": 1.0,
        "max_grad_norm": 1.0,
        "sample_rate": 0.2,
        **changes,
    }
    return NormLog.from_arrays(norms, [0, 20, 40], batch_norms=(steps, positions, free), **options)


@pytest.mark.parametrize(("accountant", "rounding"), [("rdp", 0.01), ("pld", 0.01), ("rdp", 0.0)])
@pytest.mark.parametrize("rule", RULES)
def test_always_clipped_is_the_worst_case_and_never_touched_is_free(accountant, rounding, rule):
    table = account(
        small_log(rounding=rounding), delta=1e-5, accountant=accountant, between_records=rule
    )
    assert table.epsilon[0] == table.worst_case_epsilon
    assert table.epsilon[1] == 0
    assert np.all(table.epsilon[2:] < table.worst_case_epsilon)
    assert table.claim == "estimate"
    assert "batch norm" in table.claim_reason


def test_one_step_below_the_clipping_norm_is_not_always_clipped():
    log = small_log()
    entries = log.batch_norms.read(0, log.n_examples)
    steps, positions, norms = entries.step, entries.position, entries.norm
    norms = np.where((positions == 0) & (steps == steps[positions == 0][3]), 99, norms)
    changed = NormLog.from_arrays(
        np.full((1, 7), 5.0), [0], total_steps=60, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.2,
        batch_norms=(steps, positions, np.where(norms > 100, 5.0, norms / 100)),
    )  # fmt: skip
    table = account(changed, delta=1e-5, between_records="closest")
    assert table.epsilon[0] < table.worst_case_epsilon


def test_what_free_records_must_not_change():
    log = small_log()
    bare = NormLog.from_arrays(
        log.levels.norms(log.read(), 1.0), [0, 20, 40], total_steps=60, noise_multiplier=1.0, max_grad_norm=1.0,
        sample_rate=0.2,
    )  # fmt: skip
    counted_at_c = account(log, delta=1e-5, between_records="worst_case")
    assert counted_at_c.claim == "exact"
    assert np.array_equal(
        counted_at_c.epsilon, account(bare, delta=1e-5, between_records="worst_case").epsilon
    )
    clipped = small_log(individually_clipped=True)
    at_levels = account(clipped, delta=1e-5, between_records="last")
    assert at_levels.claim == "exact"
    assert np.array_equal(
        at_levels.epsilon, account(bare, delta=1e-5, between_records="last").epsilon
    )
    assert not np.array_equal(account(log, delta=1e-5).epsilon, account(bare, delta=1e-5).epsilon)


def test_blocks_and_threads_change_nothing(monkeypatch):
    log = small_log()
    whole = account(log, delta=1e-5, between_records="closest", workers=1).epsilon
    monkeypatch.setattr("indpriv.accountant.blocks._BLOCK_BYTES", 1)
    monkeypatch.setattr("indpriv.accountant.blocks._READ_BYTES", 1000)
    assert np.array_equal(
        account(log, delta=1e-5, between_records="closest", workers=3).epsilon, whole
    )
