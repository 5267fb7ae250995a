import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from opacus.optimizers import optimizer, optimizer_fast_gradient_clipping

from clipped_runs import MODES, SETTINGS, check_sums, clipped_run, levels_in_the_log
from indpriv import EvidenceError, InputError, NormLog
from indpriv.accountant.steps import GoverningNorms
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.records import Levels
from indpriv.recording import Recorder, RecordingPolicy
from indpriv.recording.clipping import ClipThresholds
from runs import PER_EXAMPLE, blobs, failed, make_run

STEP = 2**-148  # two of float32 where it is finest, below its normal range


# What is clipped.


@pytest.mark.parametrize("physical", [pytest.param(None, marks=pytest.mark.slow), 5])
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


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", ["hooks", "ghost"])  # ew itself fails on empty batches
def test_empty_batches_are_clipped_as_steps(mode, workers, tmp_path):
    run = make_run(blobs(30), mode=mode, batch_size=1, workers=workers, **SETTINGS)
    torch.manual_seed(2**40 + 1)
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
    levels = Levels(rounding, "up")
    clip = ClipThresholds(5, headroom=headroom, levels=levels)
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
    ("given", "meant"),
    [
        pytest.param({}, 0.1, marks=pytest.mark.slow),
        ({"clip_headroom": 0.3}, 0.3),
        pytest.param({"clip_headroom": 0}, 0, marks=pytest.mark.slow),
    ],
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


# Resuming.


@pytest.mark.parametrize("resume_at", [pytest.param(10, marks=pytest.mark.slow), 6, 8])
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
