"""Batch norms of real runs: entries are the drawn batch, with the norms that were clipped."""

import numpy as np
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

from indpriv import InputError, NormLog
from indpriv.norm_log import records
from indpriv.norm_log.fields import RecordingPolicy
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder
from runs import LOADING, PER_EXAMPLE, blobs, make_run

MODES = ["hooks", "functorch", "ew", "ghost"]


def record(run, run_dir, loop=None, **options):
    options = {"every": 1, "rounding": 0, "batch_norms": True, **options}
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        (loop or (lambda: run.train(1)))()
    return NormLog.open(run_dir)


def check_against_full_records(log):
    """Compare entries with full records of the same steps; return the size of each batch."""
    entries, full = log.batch_norms.read(0, log.n_examples), log.read()
    expected = full[np.searchsorted(log.recorded_steps, entries.step), entries.position]
    np.testing.assert_allclose(entries.norm, expected, rtol=1e-4, atol=1e-8)
    assert np.all(entries.norm >= expected * (1 - 1e-5) - 1e-12)  # float32 of norm + 1e-6
    return np.bincount(entries.step, minlength=log.total_steps).tolist()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("workers", "physical"), LOADING)
def test_entries_are_those_of_the_drawn_batch(mode, workers, physical, tmp_path):
    run = make_run(mode=mode, workers=workers)
    sizes = []

    def loop():
        run.model.train()
        if physical is None:
            for inputs, targets in run.loader:
                sizes.append(len(inputs))
                run.step(inputs, targets)
        else:
            with BatchMemoryManager(
                data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
            ) as small:
                run.train(1, small)

    log = record(run, tmp_path / "run", loop)
    assert log.batch_norms.steps.tolist() == list(range(10))
    drawn = check_against_full_records(log)
    assert physical or drawn == sizes
    assert not [check for check in verify(open_run(tmp_path / "run")) if check.status == "failed"]


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_have_no_entries(mode, workers, tmp_path):
    run = make_run(blobs(30), mode=mode, batch_size=1, workers=workers)
    torch.manual_seed(2**40 + 1)
    log = record(run, tmp_path / "run")
    drawn = check_against_full_records(log)
    assert 0 in drawn
    assert log.batch_norms.steps.tolist() == list(range(log.total_steps))


@pytest.mark.parametrize("workers", [0, 2])
def test_early_breaks_do_not_shift_entries(workers, tmp_path):
    run = make_run(workers=workers)

    def loop():
        for _ in range(3):
            for i, (inputs, targets) in enumerate(run.loader):
                if i == 4:
                    break
                run.step(inputs, targets)

    log = record(run, tmp_path / "run", loop)
    assert log.batch_norms.steps.tolist() == list(range(12))
    check_against_full_records(log)


def test_batches_that_are_not_the_drawn_ones_have_no_batch_norms(tmp_path):
    run = make_run()
    inputs, targets = run.dataset.tensors

    def loop():
        for i, batch in enumerate(run.loader):
            run.step(*((inputs[:50], targets[:50]) if i == 3 else batch))

    log = record(run, tmp_path / "run", loop)
    assert log.batch_norms.steps.tolist() == [0, 1, 2, 4, 5, 6, 7, 8, 9]
    check_against_full_records(log)


def test_codes_are_rounded_up_under_the_clipping_norm_of_their_step(tmp_path):
    run = make_run()

    def loop():
        for batch in run.loader:
            run.step(*batch)
            run.optimizer.max_grad_norm *= 0.9

    log = record(run, tmp_path / "run", loop, rounding=0.01)
    entries, full = log.batch_norms.read(0, log.n_examples), log.read()
    assert np.all(np.abs(entries.norm.astype(int) - full[entries.step, entries.position]) <= 1)


def test_a_resumed_run_goes_on(tmp_path):
    record(make_run(), tmp_path / "run", rounding=0.01)
    log = record(
        make_run(), tmp_path / "run", every=None, batch_norms=None, rounding=0.01, resume_at=7
    )
    assert log.batch_norms.steps.tolist() == list(range(17))
    assert log.batch_norms.read(0, log.n_examples).step.max() <= 16


def test_those_of_many_examples_lie_in_several_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_ROW_GROUP", 16)
    log = record(make_run(), tmp_path / "run", rounding=0.01)
    assert len(log.batch_norms.parts) > 1
    check_against_full_records(log)
    log = record(make_run(), tmp_path / "run", rounding=0.01, resume_at=7)
    assert log.batch_norms.steps.tolist() == list(range(17))
    check_against_full_records(log)
    assert not open_run(tmp_path / "run", hash_all=True).faults


def test_they_are_off_unless_asked_for(tmp_path):
    run = make_run()
    assert record(run, tmp_path / "run", batch_norms=None).batch_norms is None
    with pytest.raises(InputError, match="both batch_norms=True and a policy"):
        Recorder(
            tmp_path / "b",
            dataset=run.dataset,
            loss_fn=PER_EXAMPLE,
            policy=RecordingPolicy("epoch"),
            batch_norms=True,
        )


def test_a_nan_in_training_stops_with_the_example(tmp_path):
    run = make_run(max_grad_norm=5.0)
    before = [p.detach().clone() for p in run.model.parameters()]
    drawn = []
    run.criterion = lambda outputs, targets: nn.functional.cross_entropy(
        outputs * torch.where(torch.arange(len(outputs))[:, None] == 0, torch.nan, 1.0), targets
    )

    def loop():
        for inputs, targets in run.loader:
            drawn.append(inputs)
            run.step(inputs, targets)

    with pytest.raises(
        InputError, match=r"NaN gradient norms for 1 examples, e\.g\. ids \[\d+\]"
    ) as error:
        record(run, tmp_path / "run", loop)
    first = int(np.flatnonzero((run.dataset.tensors[0] == drawn[0][0]).all(dim=1))[0])
    assert f"[{first}]" in str(error.value)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))
