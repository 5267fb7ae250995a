from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from opacus.optimizers import DPOptimizer, optimizer, optimizer_fast_gradient_clipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import indpriv
from indpriv import EvidenceError, InputError, NormLog
from indpriv.accountant.histogram.governing_norms import GoverningNorms
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, RecordingPolicy
from indpriv.recording.clipping.individual import ClipLevels
from indpriv.recording.opacus.watch import Watch
from oracles import rdp_epsilon
from runs import PER_EXAMPLE, blobs, failed, make_run, mlp

STEP = 2**-148  # two of float32 where it is finest, below its normal range
MODES = ["hooks", "functorch", "ew", "ghost"]
# Few examples reach max_grad_norm, and noise moves their norms up and down between records.
SETTINGS = {"max_grad_norm": 2.0, "learning_rate": 0.5, "noise_multiplier": 0.7}


def gradients_of(run):
    """(n_examples, n_parameters) gradients of all examples, by autograd on a float64 model."""
    with torch.random.fork_rng():  # mlp seeds
        copy = mlp().double()
    for mine, theirs in zip(copy.parameters(), run.model.parameters(), strict=True):
        mine.data = theirs.detach().double().clone()
    inputs, targets = run.dataset.tensors
    losses = PER_EXAMPLE(copy(inputs.double()), targets)
    each = torch.eye(len(losses), dtype=torch.float64)  # one loss after the other
    gradients = torch.autograd.grad(losses, list(copy.parameters()), each, is_grads_batched=True)
    return torch.cat([gradient.flatten(1) for gradient in gradients], dim=1)


@contextmanager
def no_limit(run, physical):
    if physical is None:
        yield run.loader
    else:
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
        ) as batches:
            yield batches


def clipped_run(run, run_dir, epochs=1, physical=None, on_batch=lambda: None, **options):
    """Train with individual clipping.

    Returns for each step the inputs of its batch, the gradients of all examples, and Opacus's
    clipped sum without noise.
    """
    options = {"clip_headroom": 0.0} | options
    recorder = Recorder(
        run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, individual_clipping=True, **options
    )
    steps, micro_batches, sums = [], [], []
    plain = run.optimizer.add_noise

    def add_noise():
        sums.append(
            torch.cat([p.summed_grad.flatten() for p in run.optimizer.params]).double().clone()
        )
        plain()

    run.optimizer.add_noise = add_noise
    run.model.train()
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(epochs):
            with no_limit(run, physical) as batches:
                gradients = gradients_of(run)
                for inputs, targets in batches:
                    micro_batches.append(inputs)
                    on_batch()
                    run.step(inputs, targets)
                    if len(sums) > len(steps):
                        steps.append((torch.cat(micro_batches), gradients, sums[-1]))
                        micro_batches, gradients = [], gradients_of(run)
    return steps


def levels_in_the_log(log):
    """(total_steps, n_examples) clip levels by the log: the last record at or before each step."""
    records, recorded_at = log.read(), log.settings.max_grad_norm[log.recorded_steps]
    found = np.empty((log.total_steps, log.n_examples))
    for step in range(log.total_steps):
        row = max(
            (i for i, recorded in enumerate(log.recorded_steps) if recorded <= step), default=None
        )
        now = log.settings.max_grad_norm[step]
        if row is None:
            found[step] = now
        elif log.levels is None:
            found[step] = np.minimum(records[row], now)
        else:
            inside = np.minimum(records[row] * log.levels.rounding, 1) * recorded_at[row]
            found[step] = np.where(records[row] > log.levels.top, now, np.minimum(inside, now))
    return torch.as_tensor(found)


def expected_sum(inputs, gradients, levels, dataset):
    """One example after the other: its gradient, scaled down to its level."""
    total = torch.zeros_like(gradients[0])
    for row in inputs:
        index = int((dataset.tensors[0] == row).all(1).nonzero())
        norm = gradients[index].norm()
        total += gradients[index] * min(1.0, float(levels[index] / (norm + 1e-6)))
    return total


def check_sums(steps, log, dataset, first=0, share=0.1):
    levels = levels_in_the_log(log)
    binding = 0
    for step, (inputs, gradients, clipped) in enumerate(steps, first):
        individual = levels[step] < 0.99 * log.settings.max_grad_norm[step]
        binding += int((individual & (gradients.norm(dim=1) > levels[step] * 1.01)).sum())
        expected = expected_sum(inputs, gradients, levels[step], dataset)
        torch.testing.assert_close(clipped, expected, rtol=2e-4, atol=2e-6)
    assert binding > len(dataset) * len(steps) * share  # levels below max_grad_norm did clip


# What is clipped.


@pytest.mark.parametrize("physical", [None, 5])
@pytest.mark.parametrize("mode", MODES)
def test_clipped_sums_are_those_of_an_autograd_loop(mode, physical, tmp_path):
    run = make_run(mode=mode, batch_size=30, **SETTINGS)
    steps = clipped_run(run, tmp_path / "run", epochs=2, physical=physical, every=3)
    log = NormLog.open(tmp_path / "run")
    assert log.individually_clipped
    assert log.recorded_steps.tolist() == [0, 3, 6]
    check_sums(steps, log, run.dataset)
    assert failed(tmp_path / "run") == set()
    counted = read_state(tmp_path / "run").sessions[-1].training
    assert (
        counted.gradients_at_levels
        == counted.gradients
        == sum(len(inputs) for inputs, _, _ in steps)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])  # ew itself fails on empty batches
def test_empty_batches_are_clipped_as_steps(mode, workers, tmp_path):
    run = make_run(blobs(30), mode=mode, batch_size=1, workers=workers, **SETTINGS)
    torch.manual_seed(1)
    steps = clipped_run(run, tmp_path / "run", every=7)
    sizes = [len(inputs) for inputs, _, _ in steps]
    assert 0 in sizes
    check_sums(steps, NormLog.open(tmp_path / "run"), run.dataset)
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize(
    "options",
    [
        {"rounding": 0},
        {"rounding": 0.25},
        {"policy": RecordingPolicy(1, 2.0)},
        {"policy": RecordingPolicy(5, first=1)},
    ],
)
def test_any_rounding_and_policy(options, tmp_path):
    run = make_run(batch_size=30, **SETTINGS)
    steps = clipped_run(
        run,
        tmp_path / "run",
        epochs=3,
        **{"every": 5} | options if "policy" not in options else options,
    )
    check_sums(steps, NormLog.open(tmp_path / "run"), run.dataset)
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_clipping_norm_that_moves_between_records(mode, tmp_path):
    run = make_run(mode=mode, batch_size=30, **SETTINGS)

    def schedule():
        value = run.optimizer.max_grad_norm * 0.93
        run.optimizer.max_grad_norm = value
        if mode == "ghost":
            run.model.max_grad_norm = value

    steps = clipped_run(run, tmp_path / "run", epochs=2, every=4, on_batch=schedule)
    log = NormLog.open(tmp_path / "run")
    assert log.settings.max_grad_norm[-1] < 0.6 * SETTINGS["max_grad_norm"]
    check_sums(steps, log, run.dataset)
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_the_noise_stays_at_max_grad_norm(mode, tmp_path, monkeypatch):
    used = []
    for module in (optimizer, optimizer_fast_gradient_clipping):

        def noise(std, reference, **_):
            used.append(std)
            return torch.zeros_like(reference)

        monkeypatch.setattr(module, "_generate_noise", noise)
    clipped_run(make_run(mode=mode, **SETTINGS), tmp_path / "run", every=3)
    assert set(used) == {0.7 * 2.0}


@given(
    arrays(np.float64, 5, elements=st.floats(0, 30)),
    st.floats(0.01, 10),
    st.floats(0.01, 10),
    st.sampled_from([0.0, 0.01, 0.07, 0.5]),
    st.sampled_from([0.0, 0.1, 0.333, 1.0]),
)
@example(np.full(5, 2.13527029e-40), 1.0, 1.0, 0.0, 0.0)
def test_what_training_clips_at_is_what_accounting_charges(
    norms, recorded_at, now, rounding, headroom
):
    levels = Levels(rounding, "up") if rounding else None
    clip = ClipLevels(levels, headroom)
    all_examples = np.arange(5)
    np.testing.assert_allclose(
        clip.thresholds(all_examples, now), now, rtol=2e-7
    )  # before the first record
    clip.begin_record(norms)
    during = clip.thresholds(all_examples, recorded_at).numpy()
    clip.end_record(recorded_at)
    after = clip.thresholds(all_examples, now).numpy()

    settings = {"noise_multiplier": 1.0, "max_grad_norm": [recorded_at, now], "sample_rate": 0.1}
    asked = norms + headroom * recorded_at
    log = NormLog.from_arrays(asked[None], [0], total_steps=2, rounding=rounding, **settings)
    governing = GoverningNorms.of(log, "last")
    values = governing.read(log)[0]
    for step, (clip_norm, thresholds) in enumerate(((recorded_at, during), (now, after))):
        charged = governing.codes.relative(values, np.full(5, clip_norm)) * clip_norm
        assert np.all(thresholds.astype(np.float32) <= charged * (1 + 1e-12)), (
            step
        )  # also as training holds them
        np.testing.assert_allclose(thresholds, charged, rtol=3e-7, atol=STEP)
    assert np.all(during >= np.minimum(asked, recorded_at) * (1 - 2e-7) - STEP)


@pytest.mark.parametrize("rounding", [0.01, 0])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_headroom_is_above_the_norms_at_the_record(mode, rounding, tmp_path):
    """Levels come from autograd's own norms here, not from the log."""
    run = make_run(mode=mode, batch_size=30, **SETTINGS)
    steps = clipped_run(
        run, tmp_path / "run", epochs=2, every=4, rounding=rounding, clip_headroom=0.1
    )
    log, clip_norm = NormLog.open(tmp_path / "run"), SETTINGS["max_grad_norm"]
    check_sums(steps, log, run.dataset, share=0.02)
    assert failed(tmp_path / "run") == set()
    levels = levels_in_the_log(log).numpy()
    for step in log.recorded_steps:
        expected = steps[step][1].norm(dim=1).numpy() + 0.1 * clip_norm
        unit = rounding * clip_norm
        assert np.all(levels[step] >= np.minimum(expected, clip_norm))
        assert np.all(levels[step] <= np.minimum(expected * (1 + 1e-4) + unit, clip_norm))
        assert (levels[step] < 0.99 * clip_norm).any()


@pytest.mark.parametrize(
    ("given", "meant"), [({}, 0.1), ({"clip_headroom": 0.3}, 0.3), ({"clip_headroom": 0}, 0)]
)
def test_headroom_goes_on_where_a_run_is_resumed(given, meant, tmp_path):
    run = make_run(**SETTINGS)

    def record(**options):
        recorder = Recorder(
            tmp_path / "run",
            dataset=run.dataset,
            loss_fn=PER_EXAMPLE,
            every=4,
            individual_clipping=True,
            **options,
        )
        with recorder.attach(run.model, run.optimizer, run.loader):
            run.train(1)

    record(**given)
    record(resume_at=10)
    record(resume_at=20, **given)
    assert read_state(tmp_path / "run").header["run"]["clip_headroom"] == meant
    log = NormLog.open(tmp_path / "run")
    assert log.recorded_steps.tolist() == list(range(0, 30, 4))
    assert log.read().min() >= 100 * meant
    with pytest.raises(InputError, match=r"clip_headroom=0\.2, but the log to continue has"):
        record(resume_at=30, clip_headroom=0.2)


@pytest.mark.parametrize("headroom", [-0.1, 1.5, float("nan"), "0.1", True])
def test_headroom_out_of_range_is_refused(headroom, tmp_path):
    with pytest.raises(InputError, match=r"clip_headroom=.* is not in \[0, 1\]"):
        clipped_run(make_run(), tmp_path / "run", clip_headroom=headroom)


def test_headroom_is_for_individual_clipping(tmp_path):
    with pytest.raises(InputError, match=r"clip_headroom=0\.1 is for individual clipping"):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, clip_headroom=0.1)


def test_the_hold_out_has_the_same_headroom(tmp_path):
    """Otherwise it would tell members from non-members."""
    run = make_run(**SETTINGS)
    clipped_run(
        run,
        tmp_path / "run",
        every=4,
        clip_headroom=0.25,
        test_set=run.dataset,
        record_holdout=True,
    )
    members, others = (NormLog.open(tmp_path / "run" / folder) for folder in (".", "holdout"))
    assert members.read().min() >= 25
    np.testing.assert_array_equal(members.read(), others.read())


# What it is worth.


@pytest.mark.parametrize("headroom", [0.0, 0.1])
def test_the_account_is_the_brute_force_account_of_realised_clip_levels(
    headroom, tmp_path, monkeypatch
):
    """Thresholds of all examples are caught at each step, on their way into Opacus."""
    realised = []
    plain = ClipLevels.thresholds

    def caught(self, positions, max_grad_norm):
        realised.append(plain(self, np.arange(120), max_grad_norm).numpy() / max_grad_norm)
        return plain(self, positions, max_grad_norm)

    monkeypatch.setattr(ClipLevels, "thresholds", caught)
    clipped_run(
        make_run(**SETTINGS),
        tmp_path / "run",
        epochs=2,
        policy=RecordingPolicy(2, 1.5, 5),
        clip_headroom=headroom,
    )
    log = NormLog.open(tmp_path / "run")
    orders = np.array([1.5, 2, 4, 8, 16, 32])
    table = indpriv.account(log, delta=1e-4, orders=orders)
    assert table.claim == "exact"
    assert table.claim_reason.startswith("Training clipped each example at its last recorded level")
    levels = np.stack(realised)
    assert levels.shape == (20, 120)
    assert len(np.unique(levels, axis=0)) == log.n_records == 6
    for index in range(0, 120, 29):
        expected = rdp_epsilon(levels[:, index], 0.7, 0.1, 1e-4, orders)
        assert expected <= table.epsilon[index] == pytest.approx(expected, rel=1e-5)
    assert table.epsilon.min() < 0.7 * table.worst_case_epsilon


def test_the_claim_needs_the_last_record(tmp_path):
    clipped_run(make_run(**SETTINGS), tmp_path / "run", every=4)
    log = NormLog.open(tmp_path / "run")
    claims = {
        rule: indpriv.account(log, delta=1e-5, between_records=rule).claim
        for rule in ("last", "closest")
    }
    assert claims == {"last": "exact", "closest": "estimate"}
    assert log.thin(8).individually_clipped is False


def test_ordinary_runs_are_not_individually_clipped(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=4)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    log = NormLog.open(tmp_path / "run")
    assert not log.individually_clipped
    assert indpriv.account(log, delta=1e-5).claim == "estimate"
    assert "individual clipping" not in {check.title for check in verify(tmp_path / "run")}


# What breaks the claim.


def claim_of(run_dir):
    table = indpriv.account(NormLog.open(run_dir), delta=1e-5)
    return table.claim, table.claim_reason


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_clipping_norm_changed_inside_a_step_makes_it_an_estimate(mode, tmp_path):
    run = make_run(mode=mode, batch_size=30, **SETTINGS)
    calls = iter(range(10**6))

    def fiddle():
        value = 2.0 if next(calls) % 2 else 1.5
        run.optimizer.max_grad_norm = value
        if mode == "ghost":
            run.model.max_grad_norm = value

    clipped_run(run, tmp_path / "run", physical=5, every=2, on_batch=fiddle)
    assert {"clipping", "individual clipping"} <= failed(tmp_path / "run")
    claim, reason = claim_of(tmp_path / "run")
    assert claim == "estimate"
    assert "gradients were clipped at the recorded level" in reason


def test_a_clipping_method_put_back_is_found(tmp_path):
    run = make_run(**SETTINGS)

    def undo():
        run.optimizer.clip_and_accumulate = DPOptimizer.clip_and_accumulate.__get__(run.optimizer)

    clipped_run(run, tmp_path / "run", every=2, on_batch=undo)
    assert "a batch for every step" in failed(tmp_path / "run")
    assert claim_of(tmp_path / "run")[0] == "estimate"


def test_batches_of_other_examples_are_found(tmp_path):
    """They have the drawn sizes, so that there are thresholds, but those of other examples."""
    run = make_run(max_grad_norm=5.0)
    inputs, targets = run.dataset.tensors
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every=1,
        individual_clipping=True,
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch, _ in run.loader:
            run.step(inputs[: len(batch)], targets[: len(batch)])
    assert "norms in training" in failed(tmp_path / "run")
    assert claim_of(tmp_path / "run")[0] == "estimate"


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_that_was_not_drawn_stops_training(mode, tmp_path):
    run = make_run(mode=mode, **SETTINGS)
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every=2,
        individual_clipping=True,
    )
    with (
        pytest.raises(EvidenceError, match="a batch of 120 examples is not the one that was drawn"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
        run.step(*run.dataset.tensors)
    assert read_state(tmp_path / "run").total_steps == 10
    assert claim_of(tmp_path / "run")[0] == "estimate"


def test_gradients_clipped_at_other_levels_make_an_estimate(tmp_path, monkeypatch):
    plain = Watch.counts

    def counts(self):
        draws, training = plain(self)
        return draws, replace(training, gradients_at_levels=training.gradients_at_levels // 2)

    monkeypatch.setattr(Watch, "counts", counts)
    clipped_run(make_run(**SETTINGS), tmp_path / "run", every=2)
    assert failed(tmp_path / "run") == {"individual clipping"}
    assert claim_of(tmp_path / "run")[0] == "estimate"


def test_norms_coarser_than_float32_are_refused(tmp_path):
    run = make_run(model=mlp().bfloat16(), **SETTINGS)
    run.dataset.tensors = (run.dataset.tensors[0].bfloat16(), run.dataset.tensors[1])
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every=2,
        individual_clipping=True,
    )
    with (
        pytest.raises(EvidenceError, match=r"torch.bfloat16, which is too coarse"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)


def test_rounding_to_nearest_is_refused(tmp_path):
    with pytest.raises(InputError, match="rounding_mode='nearest' with individual_clipping"):
        Recorder(
            tmp_path / "run",
            dataset=blobs(),
            loss_fn=PER_EXAMPLE,
            individual_clipping=True,
            rounding_mode="nearest",
        )


def test_per_layer_clipping_is_refused_here_too(tmp_path):
    run = make_run(clipping="per_layer", max_grad_norm=[1.0] * 4)
    with pytest.raises(InputError, match="DPPerLayerOptimizer is not supported"):
        clipped_run(run, tmp_path / "run", every=2)


# Resuming.


@pytest.mark.parametrize("resume_at", [10, 6, 8])
def test_resuming_restores_the_levels_from_the_log(resume_at, tmp_path):
    run = make_run(**SETTINGS)
    clipped_run(run, tmp_path / "run", every=4)
    steps = clipped_run(run, tmp_path / "run", resume_at=resume_at)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == resume_at + 10
    assert log.recorded_steps.tolist() == list(range(0, resume_at + 10, 4))
    check_sums(steps, log, run.dataset, first=resume_at)
    assert failed(tmp_path / "run") - {"Opacus's accountant"} == (
        set()
        if resume_at == 10
        else {"no voided steps"}  # the test's engine goes on counting where it was
    )


def test_a_run_is_resumed_as_it_was_clipped(tmp_path):
    run = make_run(**SETTINGS)
    clipped_run(run, tmp_path / "run", every=4)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, resume_at=10)
    with (
        pytest.raises(EvidenceError, match="individually_clipped=True, this run has False"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        pass


def test_dropout_keeps_its_caveat(tmp_path):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    run = make_run(model=model)
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every=4,
        individual_clipping=True,
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    assert "dropout" in claim_of(tmp_path / "run")[1]
