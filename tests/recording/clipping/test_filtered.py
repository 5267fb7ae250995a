import dataclasses
import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

import indpriv
from indpriv import EvidenceError, InputError, NormLog, PrivacyFilter
from indpriv.accountant.rdp import epsilon_offsets
from indpriv.errors import PrivacyWarning
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.journal_state import read_left_out
from indpriv.norm_log.norm_log import open_run
from indpriv.recording import Recorder
from indpriv.recording.clipping import ClipThresholds
from runs import PER_EXAMPLE, blobs, failed, make_run

SETTINGS = {"max_grad_norm": 2.0, "learning_rate": 0.5, "noise_multiplier": 0.7}
FILTER = PrivacyFilter(order=3.0, rdp_cap=1.0)


def rdp(level, noise_multiplier, sample_rate, order):
    """RDP of one step at an integer order: the sum of Mironov, Talwar and Zhang 2019, 3.3."""
    terms = (
        math.comb(int(order), k) * (1 - sample_rate) ** (order - k) * sample_rate**k
        * math.exp(k * (k - 1) * (level / noise_multiplier) ** 2 / 2)
        for k in range(int(order) + 1)
    )  # fmt: skip
    return math.log(sum(terms)) / (order - 1)


def record(run, run_dir, epochs=3, physical=None, loop=None, **options):
    """Train under the filter; return step, example and clip threshold of each gradient."""
    options = {"privacy_filter": FILTER, "individual_clipping": True, "every": 4} | options
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **options)
    seen = []
    plain = ClipThresholds.thresholds

    def spied(self, positions, max_grad_norm):
        found = plain(self, positions, max_grad_norm)
        seen.extend(
            zip(
                [self._charged[0]] * len(positions), positions.tolist(), found.tolist(), strict=True
            )
        )
        return found

    ClipThresholds.thresholds = spied
    try:
        run.model.train()
        with recorder.attach(run.model, run.optimizer, run.loader):
            for _ in range(epochs):
                small = (
                    nullcontext(run.loader)
                    if physical is None
                    else BatchMemoryManager(
                        data_loader=run.loader,
                        max_physical_batch_size=physical,
                        optimizer=run.optimizer,
                    )
                )
                with small as batches:
                    for batch in batches:
                        (loop or run.step)(*batch)
    finally:
        ClipThresholds.thresholds = plain
    return seen


def spent_by_brute_force(log, left_out_at, order):
    """(n_examples,) one example and one step after the other, from the log alone."""
    codes, settings = log.read(), log.settings
    total = np.zeros(log.n_examples)
    for step in range(log.total_steps):
        row = max(i for i, recorded in enumerate(log.recorded_steps) if recorded <= step)
        clip, recorded_at = (
            settings.max_grad_norm[step],
            settings.max_grad_norm[log.recorded_steps[row]],
        )
        for example in range(log.n_examples):
            if step >= left_out_at[example]:
                continue
            level = 1.0
            if log.individually_clipped and codes[row, example] <= log.levels.top:
                level = min(
                    1.0, min(codes[row, example] * log.levels.rounding, 1.0) * recorded_at / clip
                )
            total[example] += rdp(
                level, settings.noise_multiplier[step], settings.sample_rate[step], order
            )
    return total


@pytest.mark.parametrize("physical", [pytest.param(None, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_no_example_ever_exceeds_the_cap(mode, physical, tmp_path):
    run = make_run(mode=mode, batch_size=30, **SETTINGS)
    seen = record(run, tmp_path / "run", epochs=4, physical=physical)
    run = open_run(tmp_path / "run")
    log, left_out_at = run.log, read_left_out(run)
    spent = spent_by_brute_force(log, left_out_at, FILTER.order)
    assert spent.max() <= FILTER.rdp_cap
    left = left_out_at < log.total_steps
    assert 0 < left.sum() < 120  # some stay, and some do not
    # One step more would have been too much for those that were left out.
    more = spent_by_brute_force(log, np.minimum(left_out_at + 1, log.total_steps), FILTER.order)
    assert np.all(more[left] > FILTER.rdp_cap)
    assert len({step for step, _, _ in seen}) == log.total_steps
    for step, example, threshold in seen:
        assert (threshold == 0) == (step >= left_out_at[example])
    assert any(threshold == 0 for _, _, threshold in seen)
    assert failed(tmp_path / "run") == set()
    np.testing.assert_allclose(FILTER.spent(log, left_out_at), spent, rtol=1e-8)


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_a_left_out_example_adds_nothing_to_the_sum(tmp_path):
    """The sum of clipped gradients does not depend on examples that were left out."""
    sums = {}
    three_steps = PrivacyFilter(3.0, 3.5 * rdp(1.0, 0.7, 0.25, 3))
    for changed in (False, True):
        dataset = blobs()
        torch.manual_seed(2**40 + 3)
        run = make_run(dataset, batch_size=30, **SETTINGS)
        run.model.train()
        recorder = Recorder(
            tmp_path / f"run{changed}",
            dataset=dataset,
            loss_fn=PER_EXAMPLE,
            privacy_filter=three_steps,
            every=100,
        )
        with recorder.attach(run.model, run.optimizer, run.loader):
            for number, indices in enumerate(list(run.loader.batch_sampler)):
                inputs, targets = (tensor[indices] for tensor in dataset.tensors)
                if changed and number >= 3:  # a fourth step would be too much
                    inputs = inputs + 5
                sums[changed, number] = clipped_sum(run, inputs, targets)
    assert all(torch.equal(sums[False, number], sums[True, number]) for number in range(4))
    assert sums[False, 1].abs().max() > 0
    assert sums[False, 3].abs().max() == 0


def clipped_sum(run, inputs, targets):
    caught = []
    plain = run.optimizer.add_noise
    run.optimizer.add_noise = lambda: (
        caught.append(torch.cat([p.summed_grad.flatten().clone() for p in run.optimizer.params])),
        plain(),
    )
    run.step(inputs, targets)
    run.optimizer.add_noise = plain
    return caught[0]


def test_the_account_is_capped_and_says_so(tmp_path):
    record(make_run(batch_size=30, **SETTINGS), tmp_path / "run", epochs=4)
    log = NormLog.open(tmp_path / "run")
    table = indpriv.account(log, delta=1e-5)
    assert table.worst_case_epsilon == FILTER.epsilon(delta=1e-5)
    assert table.epsilon.max() <= table.worst_case_epsilon
    assert table.claim == "exact"
    left = int((log.filtered.left_out_at < log.total_steps).sum())
    assert (
        f"The privacy filter left out {left} of 120 examples, the first at step"
        in table.claim_reason
    )
    assert "order 3 capped at 1" in table.account.guaranteed_by
    assert np.array_equal(
        table.details["left_out_at"] >= 0, log.filtered.left_out_at < log.total_steps
    )
    assert np.all(table.epsilon_lower <= table.epsilon)
    paper = indpriv.account(log, delta=1e-5, conversion="mironov2017")
    assert paper.worst_case_epsilon == FILTER.epsilon(delta=1e-5, conversion="mironov2017")


def test_a_cap_that_no_example_reaches_changes_nothing(tmp_path):
    record(
        make_run(**SETTINGS),
        tmp_path / "run",
        epochs=1,
        privacy_filter=PrivacyFilter(order=3.0, rdp_cap=1e6),
    )
    table = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5)
    assert table.account.guaranteed_by == "RDP accountant"
    assert "left out 0 of 120" in table.claim_reason


def test_without_individual_clipping_all_examples_leave_at_once(tmp_path):
    three_steps = PrivacyFilter(3.0, 3.5 * rdp(1.0, 0.7, 0.25, 3))
    options = {"individual_clipping": False, "privacy_filter": three_steps}
    with pytest.warns(PrivacyWarning, match="has left out everyone at step 3"):
        record(make_run(batch_size=30, **SETTINGS), tmp_path / "run", **options)
    log = NormLog.open(tmp_path / "run")
    assert set(log.filtered.left_out_at) == {3}
    assert log.total_steps == 12
    spent = spent_by_brute_force(log, log.filtered.left_out_at, 3.0)
    np.testing.assert_allclose(spent, three_steps.rdp_cap * 3 / 3.5, rtol=1e-9)


def test_schedules_are_charged_as_they_move(tmp_path):
    run = make_run(batch_size=30, **SETTINGS)

    def loop(*batch):
        run.step(*batch)
        run.optimizer.noise_multiplier *= 1.1
        run.optimizer.max_grad_norm *= 0.95

    record(run, tmp_path / "run", loop=loop)
    log = NormLog.open(tmp_path / "run")
    assert spent_by_brute_force(log, log.filtered.left_out_at, FILTER.order).max() <= FILTER.rdp_cap
    assert failed(tmp_path / "run") == set()


def test_empty_batches_are_charged(tmp_path):
    run = make_run(blobs(30), batch_size=1, **SETTINGS)
    torch.manual_seed(2**40 + 1)
    record(run, tmp_path / "run", epochs=2, privacy_filter=PrivacyFilter(order=3.0, rdp_cap=0.1))
    log = NormLog.open(tmp_path / "run")
    spent = spent_by_brute_force(log, log.filtered.left_out_at, 3.0)
    assert 0 < spent.max() <= 0.1
    assert (log.filtered.left_out_at < log.total_steps).any()


@pytest.mark.parametrize("resume_at", [8, 12])
def test_resuming_goes_on_with_what_was_spent(resume_at, tmp_path):
    run = make_run(batch_size=30, **SETTINGS)
    record(run, tmp_path / "run", epochs=3)
    record(run, tmp_path / "run", epochs=3, every=None, resume_at=resume_at)
    run = open_run(tmp_path / "run")
    log, left_out_at = run.log, read_left_out(run)
    assert log.total_steps == resume_at + 12
    assert spent_by_brute_force(log, left_out_at, FILTER.order).max() <= FILTER.rdp_cap
    assert (left_out_at < resume_at).any()
    assert (left_out_at > resume_at).any()
    if resume_at == 8:  # four steps were run that no account holds
        assert log.filtered is None
        assert indpriv.account(log, delta=1e-5).account.guaranteed_by == "RDP accountant"


def test_resuming_under_another_filter_is_refused(tmp_path):
    run = make_run(**SETTINGS)
    record(run, tmp_path / "run", epochs=1)
    with pytest.raises(EvidenceError, match="the log to continue has privacy_filter="):
        record(
            run, tmp_path / "run", every=None, resume_at=10, privacy_filter=PrivacyFilter(3.0, 2.0)
        )


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_noise_lowered_after_the_charge_stops_training(mode, tmp_path):
    run = make_run(mode=mode, batch_size=30, **SETTINGS)
    before = [p.detach().clone() for p in run.model.parameters()]
    plain = run.optimizer.add_noise

    def cheat():
        run.optimizer.noise_multiplier = 0.1
        plain()

    run.optimizer.add_noise = cheat
    with pytest.raises(EvidenceError, match="the settings of step 0 changed"):
        record(run, tmp_path / "run")
    assert all(
        torch.equal(old, new) for old, new in zip(before, run.model.parameters(), strict=True)
    )


def test_gradients_that_were_clipped_otherwise_void_the_cap(tmp_path):
    run = make_run(batch_size=30, **SETTINGS)

    def loop(*batch):
        run.optimizer.clip_and_accumulate = type(run.optimizer).clip_and_accumulate.__get__(
            run.optimizer
        )
        run.step(*batch)

    record(run, tmp_path / "run", loop=loop)
    log = NormLog.open(tmp_path / "run")
    assert log.filtered is None
    assert indpriv.account(log, delta=1e-5).worst_case_epsilon > FILTER.epsilon(delta=1e-5)


def test_a_log_that_shows_more_than_the_cap_is_refused(tmp_path):
    record(make_run(batch_size=30, **SETTINGS), tmp_path / "run")
    log = NormLog.open(tmp_path / "run")
    all_stay = dataclasses.replace(log.filtered, left_out_at=np.full(120, log.total_steps))
    with pytest.raises(EvidenceError, match="spent more than the cap"):
        indpriv.account(dataclasses.replace(log, filtered=all_stay), delta=1e-5)


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_an_infinite_gradient_stops_training_before_it_reaches_the_parameters(tmp_path):
    run = make_run(batch_size=120, **SETTINGS)
    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, privacy_filter=FILTER, every=100
    )
    with (
        pytest.raises(EvidenceError, match="infinite or NaN"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for inputs, targets in run.loader:
            run.step(inputs * 1e30, targets)
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_the_settings_of_a_step_are_charged_once():
    clipping = ClipThresholds(4, policy=PrivacyFilter(3.0, 1.0))
    setting = StepSetting(1.0, 1.0, 0.1)
    for _ in range(3):
        clipping.charge(0, setting)
    once = clipping.spent.copy()
    clipping.charge(1, setting)
    np.testing.assert_allclose(clipping.spent, 2 * once)
    with pytest.raises(EvidenceError, match="the settings of step 1 changed"):
        clipping.charge(1, StepSetting(0.5, 1.0, 0.1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PrivacyFilter(order=1.0, rdp_cap=1.0), r"order=1\.0 is not in \(1, inf\)"),
        (lambda: PrivacyFilter(order="4", rdp_cap=1.0), "order='4'"),
        (lambda: PrivacyFilter(order=2.0, rdp_cap=0.0), "rdp_cap=0.0"),
        (lambda: PrivacyFilter(order=2.0, rdp_cap=float("nan")), "rdp_cap=nan"),
        (
            lambda: PrivacyFilter.for_epsilon(
                1e-3, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1
            ),
            "leaves no divergence to spend at any order",
        ),
    ],
)
def test_bad_filters_are_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize("units", [None, np.array([0, 0])])
@pytest.mark.parametrize(
    "odd", [{"sample_rate": 1.5}, {"noise_multiplier": -1.0}, {"norm": np.nan}]
)
def test_charges_for_impossible_steps_are_refused(units, odd):
    """Of units they were nan, which no cap is below, or those of other steps."""
    step = {"noise_multiplier": 1.0, "sample_rate": 0.1} | odd
    norms = [step.pop("norm", 0.5), 0.2]
    with pytest.raises(InputError):
        FILTER.charges(norms, units=units, **step)


@pytest.mark.parametrize("conversion", ["canonne2020", "mironov2017"])
def test_a_filter_for_an_epsilon_guarantees_it(conversion):
    options = {
        "delta": 1e-5,
        "noise_multiplier": 1.0,
        "sample_rate": 0.01,
        "conversion": conversion,
    }
    best = PrivacyFilter.for_epsilon(3.0, **options)
    assert best.epsilon(delta=1e-5, conversion=conversion) == pytest.approx(3.0)

    def steps(policy):
        return policy.rdp_cap / policy.charges([1.0], noise_multiplier=1.0, sample_rate=0.01)[0]

    orders = np.array([8.0, 12.0, 40.0])
    caps = 3.0 - epsilon_offsets(orders, 1e-5, conversion)
    others = map(PrivacyFilter, orders.tolist(), caps.tolist())
    assert all(steps(best) >= steps(other) for other in others)


def test_a_filter_that_not_one_step_fits_says_so():
    with pytest.warns(PrivacyWarning, match="no step at max_grad_norm fits .* epsilon=2"):
        PrivacyFilter.for_epsilon(2.0, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1)
    PrivacyFilter.for_epsilon(3.0, delta=1e-5, noise_multiplier=1.0, sample_rate=0.1)


def test_a_number_is_no_filter(tmp_path):
    with pytest.raises(InputError, match=r"privacy_filter=2\.0 is no filter"):
        record(make_run(), tmp_path / "run", privacy_filter=2.0)


def test_an_audit_quotes_the_cap_as_the_guarantee(tmp_path):
    from indpriv.audit import audit

    record(make_run(batch_size=30, **SETTINGS), tmp_path / "run", epochs=4)
    summary = audit(tmp_path / "run", tmp_path / "audit", delta=1e-5)
    assert summary.guarantee.status == "supported"
    assert summary.guarantee.worst_case_epsilon == FILTER.epsilon(delta=1e-5)
    assert "privacy filter: Rényi order 3 capped at 1" in summary.guarantee.statement
    assert (
        "privacy filter: Rényi order 3 capped at 1"
        in (tmp_path / "audit" / "report.html").read_text()
    )
    assert summary.individual.max <= summary.guarantee.worst_case_epsilon


def unit_rdp(levels, noise_multiplier, sample_rate, order):
    """RDP of one step of all rows of a unit at an integer order, over all sets of sampled rows.

    P is a mixture of Gaussians. E_Q (P/Q)^order is the mean, over `order` independent sums of
    levels, of exp(the sum of products of all pairs of them).
    """
    sums = [(0.0, 1.0)]
    for level in levels:
        sums = [(m + drawn * level / noise_multiplier, p * chance) for m, p in sums
                for drawn, chance in ((0, 1 - sample_rate), (1, sample_rate))]  # fmt: skip
    moment = 0.0
    for several in itertools.product(sums, repeat=int(order)):
        pairs = itertools.combinations([m for m, _ in several], 2)
        moment += math.prod(p for _, p in several) * math.exp(sum(a * b for a, b in pairs))
    return math.log(moment) / (order - 1)


@pytest.mark.parametrize("equal", [True, False])
def test_rows_of_a_unit_are_charged_what_they_are_worth_together(equal):
    levels, units = np.array([0.4, 0.9, 0.4, 0.2, 0.4, 0.0]), np.array([0, 1, 0, 1, 0, 2])
    levels[units == 1] = 0.9 if equal else levels[units == 1]
    charges = FILTER.charges(levels, noise_multiplier=0.7, sample_rate=0.25, units=units)
    for unit in range(3):
        exact = unit_rdp(levels[units == unit], 0.7, 0.25, FILTER.order)
        (charge,) = set(charges[units == unit].tolist())
        assert charge >= exact
        tight = 1 + 1e-6 if equal or unit != 1 else 2.0  # unequal rows, at so little noise
        assert charge <= tight * exact
    by_row = FILTER.charges(levels, noise_multiplier=0.7, sample_rate=0.25)
    assert charges[0] > by_row[units == 0].sum()  # which is why rows are not added up


def test_numbers_of_units_may_be_true_and_false():
    """They were taken for a mask, and rows were charged too little."""
    step = {"noise_multiplier": 0.7, "sample_rate": 0.25}
    for units in ([True, False, True], np.array([True, False, True])):
        found = FILTER.charges([0.4, 0.9, 0.4], units=units, **step)
        assert found.tolist() == FILTER.charges([0.4, 0.9, 0.4], units=[1, 0, 1], **step).tolist()


def test_no_unit_of_several_rows_exceeds_the_cap(tmp_path):
    """Pairs, and the last forty rows alone."""
    units = np.concatenate([np.arange(80) // 2, np.arange(40, 80)])
    policy = PrivacyFilter(order=3.0, rdp_cap=1.5)
    run = make_run(batch_size=30, **SETTINGS)
    record(
        run, tmp_path / "run", unit="user", unit_ids=units, privacy_filter=policy, clip_headroom=0.0
    )
    assert failed(tmp_path / "run") == set()
    run = open_run(tmp_path / "run")
    log, left_out_at = run.log, read_left_out(run)
    relative = np.minimum(log.read() * log.levels.rounding, 1.0)
    spent = np.zeros(80)
    for step in range(log.total_steps):
        row = np.searchsorted(log.recorded_steps, step, side="right") - 1
        for unit in range(80):
            rows = np.flatnonzero(units == unit)
            assert len(set(left_out_at[rows].tolist())) == 1  # they leave together
            if step < left_out_at[rows[0]]:
                spent[unit] += unit_rdp(relative[row, rows], 0.7, 0.25, policy.order)
    assert spent.max() <= policy.rdp_cap
    table = indpriv.account(log, delta=1e-5)
    assert table.example_ids.tolist() == list(range(80))
    assert table.worst_case_epsilon <= policy.epsilon(delta=1e-5)
    assert table.epsilon.max() <= policy.epsilon(delta=1e-5)
    left = table.details["left_out_at"] >= 0
    assert left[:40].sum() > 0
    assert f"left out {left.sum()} of 80 users" in table.claim_reason
    # A second session goes on with what was spent.
    resumed = ClipThresholds(120, policy=policy)
    resumed.restore(log, left_out_at)
    assert np.all(resumed.spent <= policy.rdp_cap)
    np.testing.assert_array_equal(resumed.present, left_out_at == log.total_steps)
