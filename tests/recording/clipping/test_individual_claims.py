"""What an account of an individually clipped run may claim, and what breaks the claim."""

import numpy as np
import pytest
from opacus.optimizers import DPOptimizer
from torch import nn

import indpriv
from clipped_runs import MODES, SETTINGS, clipped_run
from indpriv import EvidenceError, InputError, NormLog
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, RecordingPolicy
from indpriv.recording.clipping import ClipThresholds
from indpriv.recording.watch import Watch
from oracles import rdp_epsilon
from runs import PER_EXAMPLE, blobs, failed, make_run, mlp

# What it is worth.


@pytest.mark.parametrize("headroom", [0.0, 0.1])
def test_the_account_is_the_brute_force_account_of_realised_clip_levels(
    headroom, tmp_path, monkeypatch
):
    """Thresholds of all examples are caught at each step, on their way into Opacus."""
    realised = []
    plain = ClipThresholds.thresholds

    def caught(self, positions, max_grad_norm):
        realised.append(plain(self, np.arange(120), max_grad_norm).numpy() / max_grad_norm)
        return plain(self, positions, max_grad_norm)

    monkeypatch.setattr(ClipThresholds, "thresholds", caught)
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
    assert "individual clipping" not in {
        check.title for check in verify(open_run(tmp_path / "run"))
    }


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
        draws, training, noise = plain(self)
        training.gradients_at_levels //= 2
        return draws, training, noise

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
    with pytest.raises(InputError, match=r"ndividual clipping.*need flat clipping"):
        clipped_run(run, tmp_path / "run", every=2)


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
