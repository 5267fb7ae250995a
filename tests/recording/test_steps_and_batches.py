"""Steps and batches that do not match, and hooks that do not run."""

import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

from indpriv import InputError, NormLog
from indpriv.errors import EvidenceWarning
from indpriv.norm_log.journal_state import read_state
from indpriv.recording import Recorder, per_example_gradient_norms
from runs import PER_EXAMPLE, blobs, failed, make_run, record


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
@pytest.mark.parametrize("workers", [0, 2])
def test_several_draws_in_one_step_are_refused(mode, workers, tmp_path):
    """As trainers do that accumulate: each draw is clipped, and one step's noise is added to all."""
    run = make_run(workers=workers, mode=mode)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)

    def train():
        with recorder.attach(run.model, run.optimizer, run.loader):
            for i, batch in enumerate(run.loader):
                run.optimizer.signal_skip_step(do_skip=i % 3 < 2)
                run.step(*batch)

    with pytest.raises(InputError, match="3 batches were accumulated into one step"):
        train()


@pytest.mark.parametrize("every", [1, 5])
def test_several_steps_on_one_batch_are_found(every, tmp_path):
    run = make_run(mode="ghost")
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=every)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            run.step(*batch)
            run.step(*batch)
    assert "a batch for every step" in failed(tmp_path / "run")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_break_inside_a_logical_batch_is_found(workers, tmp_path):
    run = make_run(batch_size=40, workers=workers)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(3):
            with BatchMemoryManager(
                data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
            ) as small:
                for i, batch in enumerate(small):
                    run.step(*batch)
                    if i == 2:
                        break
            run.optimizer.zero_grad()
    if read_state(tmp_path / "run").total_steps:
        assert "whole batches" in failed(tmp_path / "run")


def test_steps_before_recording_are_found(tmp_path):
    run = make_run()
    run.train(1)
    record(run, tmp_path / "run", epochs=1)
    assert any(
        "had counted 10 steps before" in caveat for caveat in NormLog.open(tmp_path / "run").caveats
    )


def test_a_recorder_is_attached_once(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=3)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    with (
        pytest.raises(InputError, match="was attached before"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
    assert NormLog.open(tmp_path / "run").total_steps == 10


def test_a_recorder_whose_block_is_not_entered_says_that_it_records_nothing(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=3)
    with pytest.warns(EvidenceWarning, match="records nothing: .* was not entered"):
        recorder.attach(run.model, run.optimizer, run.loader)
    block = recorder.attach(run.model, run.optimizer, run.loader)
    run.train(1)
    with pytest.warns(EvidenceWarning, match="records nothing: .* was not entered"):
        del block


def test_a_test_set_that_does_not_fit_is_refused_before_training(tmp_path):
    run = make_run()
    with pytest.raises(InputError, match="do not accept the test set"):
        record(run, tmp_path / "run", test_set=blobs(10, features=3))
    with pytest.raises(InputError, match="test_set is of type int, which has no length"):
        Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, test_set=5)


def test_a_hook_that_chains_opacus_is_fine_and_one_that_replaces_it_is_found(tmp_path):
    run = make_run()
    opacus_hook = run.optimizer.step_hook

    def chained(optimizer):
        opacus_hook(optimizer)

    run.optimizer.attach_step_hook(chained)
    record(run, tmp_path / "chained")
    assert failed(tmp_path / "chained") == set()
    run = make_run()
    run.optimizer.attach_step_hook(lambda optimizer: None)
    record(run, tmp_path / "replaced")
    assert "Opacus's accountant" in failed(tmp_path / "replaced")


def test_a_compiled_model_is_recorded(tmp_path):
    run = make_run()
    run.model._module = torch.compile(run.model._module, backend="eager")
    norms = per_example_gradient_norms(run.model, PER_EXAMPLE, *run.dataset.tensors)
    assert norms.shape == (120,)


def test_a_model_without_the_hooks_of_ghost_mode_is_refused(tmp_path):
    run = make_run(mode="ghost")
    run.model = run.model.to_standard_module()
    with pytest.raises(InputError, match="clips in ghost mode, but the model is a plain"):
        record(run, tmp_path / "run")


def test_an_object_that_is_no_model_is_refused(tmp_path):
    run = make_run()
    run.model = iter([])
    with pytest.raises(InputError, match="the model is a list_iterator; attach what"):
        record(run, tmp_path / "run")


def test_rate_93_where_opacus_rounds_the_steps(tmp_path):
    run = make_run(blobs(93), batch_size=1)
    log = record(run, tmp_path / "run", epochs=1, every=50)
    assert log.settings.sample_rate[0] == pytest.approx(1 / 93)
    assert log.total_steps == 92
    assert "Opacus's accountant" not in failed(tmp_path / "run")
