import os
import re
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from opacus.layers import DPGRU
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler

import indpriv
from indpriv import EvidenceError, ExampleTable, InputError, NormLog
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.reader import read_state
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import Recorder, RecordingPolicy, per_example_gradient_norms
from processes import running
from runs import PER_EXAMPLE, blobs, make_run, mlp


def record(run, run_dir, epochs=2, loader=None, **options):
    options = {"every": 3, **options}
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(epochs, loader)
    return NormLog.open(run_dir)


def failed(run_dir):
    return {check.title for check in verify(run_dir) if check.status == "failed"}


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_norms_are_those_each_step_starts_from(mode, tmp_path):
    run = make_run(mode=mode)
    inputs, targets = run.dataset.tensors
    expected = []

    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, rounding=0
    )
    run.model.train()
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            expected.append(
                per_example_gradient_norms(run.model, PER_EXAMPLE, inputs, targets, backend="hooks")
            )
            run.step(*batch)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == len(expected) == 10
    np.testing.assert_allclose(log.read(), torch.stack(expected).numpy(), rtol=1e-4)
    assert log.caveats == ()
    assert failed(tmp_path / "run") == set()


def test_opacus_accountant_keeps_counting(tmp_path):
    run = make_run()
    log = record(run, tmp_path / "run")
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    assert log.settings.sample_rate[0] == 0.1
    assert run.engine.get_epsilon(1e-5) > 0


def test_hooks_and_sampler_are_restored(tmp_path):
    run = make_run()
    hook, sampler_class = run.optimizer.step_hook, type(run.loader.batch_sampler)
    record(run, tmp_path / "run")
    assert run.optimizer.step_hook is hook
    assert type(run.loader.batch_sampler) is sampler_class
    assert not run.optimizer.original_optimizer._optimizer_step_post_hooks


def test_recording_does_not_change_training(tmp_path):
    def train(recorded):
        torch.manual_seed(7)
        run = make_run()
        if recorded:
            record(run, tmp_path / "run", reference_examples=4)
        else:
            run.train()
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    assert torch.equal(train(True), train(False))


def test_batch_memory_manager_records_logical_steps(tmp_path):
    run = make_run(batch_size=40)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with (
        recorder.attach(run.model, run.optimizer, run.loader),
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer
        ) as small,
    ):
        run.train(3, small)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 9
    assert log.recorded_steps.tolist() == list(range(9))
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_steps(workers, tmp_path):
    dataset = blobs(30)
    run = make_run(dataset, batch_size=1, workers=workers)  # about a third of the batches are empty
    torch.manual_seed(1)
    log = record(run, tmp_path / "run", epochs=2, every=10)
    assert log.total_steps == 60
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_skips_empty_batches_is_an_estimate(workers, tmp_path):
    run = make_run(blobs(30), batch_size=1, workers=workers)
    torch.manual_seed(1)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=10)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(2):
            for inputs, targets in run.loader:
                if len(inputs):
                    run.step(inputs, targets)
    assert "a batch for every step" in failed(tmp_path / "run")
    assert any("never became a step" in caveat for caveat in NormLog.open(tmp_path / "run").caveats)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_early_break_is_no_fault(workers, tmp_path):
    run = make_run(workers=workers)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=2)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(3):
            for i, (inputs, targets) in enumerate(run.loader):
                if i == 4:
                    break
                run.step(inputs, targets)
    assert NormLog.open(tmp_path / "run").total_steps == 12
    assert failed(tmp_path / "run") == set()


def test_steps_on_another_loader_are_found(tmp_path):
    run = make_run()
    other = DataLoader(run.dataset, batch_size=12)
    record(run, tmp_path / "run", loader=other)
    assert "a batch for every step" in failed(tmp_path / "run")


def test_noise_scheduler_settings_are_those_of_each_step(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=4)
    sigmas = []
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            sigmas.append(run.optimizer.noise_multiplier)
            run.step(*batch)
            run.optimizer.noise_multiplier *= 1.1
            run.optimizer.max_grad_norm *= 0.9
    log = NormLog.open(tmp_path / "run")
    np.testing.assert_allclose(log.settings.noise_multiplier, sigmas)
    np.testing.assert_allclose(log.settings.max_grad_norm, 0.9 ** np.arange(10))
    assert failed(tmp_path / "run") == set()


def test_exact_examples_have_a_row_for_every_step(tmp_path):
    log = record(make_run(), tmp_path / "run", every=7, reference_examples=15)
    exact = log.reference_examples()
    assert exact.recorded_steps.tolist() == list(range(20))
    assert np.array_equal(exact.read()[::7], log.take(log.reference_positions).read())


def test_example_table_holds_losses_of_the_final_model(tmp_path):
    run = make_run()
    test_set = blobs(20)
    metadata = pd.DataFrame({"site": [f"s{i % 3}" for i in range(120)]})
    test_metadata = pd.DataFrame({"site": ["s1"] * 20})
    record(run, tmp_path / "run", test_set=test_set, metadata=metadata, test_metadata=test_metadata)
    table = ExampleTable.from_parquet(tmp_path / "run" / "examples.parquet")
    run.model.eval()
    with torch.no_grad():
        outputs = run.model._module(run.dataset.tensors[0])
    np.testing.assert_allclose(
        table.train["loss"], PER_EXAMPLE(outputs, run.dataset.tensors[1]), rtol=1e-5
    )
    assert table.train["correct"].tolist() == (outputs.argmax(1) == run.dataset.tensors[1]).tolist()
    assert table.train["site"].tolist() == metadata["site"].tolist()
    assert len(table.test) == 20


def test_everything_sensitive_is_private(tmp_path):
    record(make_run(), tmp_path / "run", reference_examples=2)
    for path in (tmp_path / "run").rglob("*.*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_seeded_run_says_so(tmp_path):
    assert record(make_run(), tmp_path / "run", seeded=True).caveats == (SEEDED,)


@pytest.mark.parametrize(
    ("reseed", "generator", "told"),
    [
        (lambda: torch.manual_seed(0), None, True),
        (lambda: torch.manual_seed(20261121), None, True),
        (lambda: torch.seed(), None, False),
        (lambda: torch.seed(), torch.Generator(), True),  # unseeded, it has torch's default seed
        (
            lambda: torch.manual_seed(0),
            torch.Generator().manual_seed(2**40),
            True,
        ),  # noise; the coins have the small one
    ],
)
def test_a_seed_that_can_be_guessed_is_told(reseed, generator, told, tmp_path):
    run = make_run(noise_generator=generator)
    reseed()
    record(run, tmp_path / "run", epochs=1)
    seeds = [check for check in verify(tmp_path / "run") if check.title == "seeds"]
    assert [check.status for check in seeds] == ["not checked"] * told


@pytest.mark.parametrize(
    ("reseed", "repeats"),
    [
        (lambda _: torch.manual_seed(2**40), True),  # for pictures of each epoch, say
        (lambda epoch: torch.manual_seed(2**40 + epoch), False),
    ],
)
def test_random_numbers_that_come_again_are_found(reseed, repeats, tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for epoch in range(3):
            reseed(epoch)
            run.train(1)
    assert failed(tmp_path / "run") == ({"random numbers"} if repeats else set())
    log = NormLog.open(tmp_path / "run")
    assert indpriv.account(log, delta=1e-5).claim == ("estimate" if repeats else "exact")
    assert read_state(tmp_path / "run").evidence[-1]["repeated_draws"] == (
        40 if repeats else 0
    )  # batches and noise


@pytest.mark.parametrize(("seed", "repeats"), [(2**40, True), (2**41, False)])
def test_a_resumed_run_that_is_seeded_as_before_is_found(seed, repeats, tmp_path):
    for number, options in ((2**40, {}), (seed, {"resume_at": 10})):
        run = make_run()
        torch.manual_seed(number)
        record(run, tmp_path / "run", epochs=1, **options)
    assert ("random numbers" in failed(tmp_path / "run")) == repeats


def test_shuffled_batches_are_an_estimate(tmp_path):
    run = make_run(poisson_sampling=False)
    log = record(run, tmp_path / "run")
    assert log.sampler in ("shuffled", "other")
    assert any("not from Poisson sampling" in caveat for caveat in log.caveats)


def test_weighted_sampling_without_poisson_is_an_estimate(tmp_path):
    dataset = blobs()
    weighted = DataLoader(
        dataset, batch_size=12, sampler=WeightedRandomSampler([1.0] * 119 + [50.0], 120)
    )
    run = make_run(dataset, data_loader=weighted, poisson_sampling=False)
    assert record(run, tmp_path / "run").sampler == "other"


def test_a_poisson_sampler_that_prefers_some_examples_is_found(tmp_path, monkeypatch):
    run = make_run()
    plain = UniformWithReplacementSampler.__iter__

    def greedy(self):
        for indices in plain(self):
            yield sorted({*indices, 5})

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", greedy)
    record(run, tmp_path / "run", epochs=3)
    assert failed(tmp_path / "run") == {"participation of each example"}


def test_a_poisson_sampler_that_shuffles_instead_is_found(tmp_path, monkeypatch):
    def shuffled(self):  # every example once an epoch
        order = torch.randperm(self.num_samples).tolist()
        size = self.num_samples // self.steps
        yield from (order[start : start + size] for start in range(0, self.num_samples, size))

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", shuffled)
    record(make_run(), tmp_path / "run", epochs=3)
    assert failed(tmp_path / "run") == {"participation of each example"}


def test_a_subclass_of_the_poisson_sampler_may_draw_otherwise(tmp_path):
    run = make_run()
    run.loader.batch_sampler.__class__ = type("Mine", (UniformWithReplacementSampler,), {})
    assert record(run, tmp_path / "run").sampler == "other"


# The recorder's norms against those that training clipped.


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("workers", [0, 2])
def test_norms_in_training_are_the_recorded_ones(mode, workers, tmp_path):
    record(make_run(mode=mode, workers=workers), tmp_path / "run", every=1)
    check = next(check for check in verify(tmp_path / "run") if check.title == "norms in training")
    assert check.status == "passed"
    assert int(check.detail.split()[0]) > 50


def larger(run, run_dir, loop=None, dataset=None, every=1):
    """Whether the recorder finds that training's norms were larger than its own."""
    recorder = Recorder(run_dir, dataset=dataset or run.dataset, loss_fn=PER_EXAMPLE, every=every)
    with recorder.attach(run.model, run.optimizer, run.loader):
        (loop or run.train)()
    caveats = NormLog.open(run_dir).caveats
    return "norms in training" in failed(run_dir) and any(
        "larger than recorded" in caveat for caveat in caveats
    )


def test_another_loss_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    run.criterion = lambda outputs, targets: 3 * nn.functional.cross_entropy(outputs, targets)
    assert larger(run, tmp_path / "run")


def test_another_reduction_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    run.criterion = nn.CrossEntropyLoss(reduction="sum")
    assert larger(run, tmp_path / "run")


def test_another_data_set_of_the_same_size_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    inputs, targets = run.dataset.tensors
    assert larger(run, tmp_path / "run", dataset=TensorDataset(0.1 * inputs, targets))


class Augmented(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        inputs, targets = blobs().tensors
        return inputs[index] + torch.randn(6), targets[index]


def test_augmentation_is_found(tmp_path):
    run = make_run(Augmented(), max_grad_norm=5.0)
    assert larger(run, tmp_path / "run")


def test_parameters_changed_between_steps_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)

    def loop():
        for batch in run.loader:
            run.step(*batch)
            with torch.no_grad():
                for p in run.model.parameters():
                    p.mul_(1.3)

    assert larger(run, tmp_path / "run", loop)


def test_lower_precision_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)

    def rounded(outputs, targets):  # as autocast rounds what passes through a layer
        return nn.functional.cross_entropy(
            outputs + (outputs.bfloat16() - outputs).detach(), targets
        )

    run.criterion = rounded
    assert larger(run, tmp_path / "run")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize(("attaching", "training"), [(False, True), (True, False), (True, True)])
def test_autocast_that_only_training_has_is_found(attaching, training, mode, tmp_path):
    """Attached under it, the norms have slack for half precision, which covers training in any."""
    run = make_run(mode=mode, max_grad_norm=5.0)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with ExitStack() as block:
        with torch.autocast("cpu", torch.bfloat16, enabled=attaching):
            block.enter_context(recorder.attach(run.model, run.optimizer, run.loader))
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=training):
                loss = run.criterion(run.model(inputs), targets)
            loss.backward()
            run.optimizer.step()
    found = training and not attaching
    assert ("norms in training" in failed(tmp_path / "run")) == found
    claim = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim
    assert claim == ("estimate" if found else "exact")


def test_why_norms_are_not_taken_the_fastest_way_is_told(tmp_path):
    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.memory, self.last = DPGRU(2, 4, batch_first=True), nn.Linear(4, 2)

        def forward(self, inputs):
            return self.last(self.memory(inputs.unflatten(1, (3, 2)))[0][:, -1])

    details = {}
    for name, model in (("plain", mlp()), ("memory", Memory())):
        run = make_run(model=model)
        recorder = Recorder(tmp_path / name, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=10)
        with recorder.attach(run.model, run.optimizer, run.loader):
            run.train(1)
        details[name] = next(
            check.detail for check in verify(tmp_path / name) if check.title == "norm pass"
        )
    assert details["plain"] == "layerwise, checked against one example at a time"
    assert "not layerwise, which is faster: " in details["memory"]
    assert "DPGRU does not map a tensor to a tensor" in details["memory"]


@pytest.mark.parametrize(
    ("factor", "max_grad_norm", "found"), [(0.5, 0.3, True), (0.5, 50.0, False), (1.0, 0.3, False)]
)
def test_norms_that_ghost_mode_takes_too_small_are_found(factor, max_grad_norm, found, tmp_path):
    """Gradients below max_grad_norm are not scaled, whatever their norm is taken for."""
    run = make_run(mode="ghost", max_grad_norm=max_grad_norm, noise_multiplier=0.01)
    plain = run.model.get_norm_sample
    run.model.get_norm_sample = lambda: factor * plain()
    record(run, tmp_path / "run")
    assert failed(tmp_path / "run") == ({"clipping"} if found else set())
    reason = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim_reason
    assert ("Ghost mode clipped" in reason) == found


def test_batches_of_another_size_than_drawn_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    other = DataLoader(run.dataset, batch_size=13)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _, batch in zip(run.loader, other, strict=False):
            run.step(*batch)
    assert "a batch for every step" in failed(tmp_path / "run")


def test_other_batches_of_the_size_drawn_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    inputs, targets = run.dataset.tensors

    def loop():
        for drawn, _ in run.loader:
            run.step(inputs[: len(drawn)], targets[: len(drawn)])

    assert larger(run, tmp_path / "run", loop)


# Steps and batches that do not match.


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_merged_batches_are_found(every, workers, tmp_path):
    run = make_run(workers=workers)

    def loop():
        for i, batch in enumerate(run.loader):
            run.optimizer.signal_skip_step(do_skip=i % 2 == 0)
            run.step(*batch)

    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=every)
    with recorder.attach(run.model, run.optimizer, run.loader):
        loop()
    assert "a batch for every step" in failed(tmp_path / "run")


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


def test_a_plain_module_in_ghost_mode_is_refused(tmp_path):
    run = make_run(mode="ghost")
    run.model = run.model._module
    with pytest.raises(InputError, match="clips in ghost mode, but the model is a plain"):
        record(run, tmp_path / "run")


def test_hooks_in_place_of_the_model_are_refused(tmp_path):
    run = make_run(wrap_model=False)
    with pytest.raises(InputError, match="the model is a GradSampleHooks"):
        record(run, tmp_path / "run")


def test_rate_93_where_opacus_rounds_the_steps(tmp_path):
    run = make_run(blobs(93), batch_size=1)
    log = record(run, tmp_path / "run", epochs=1, every=50)
    assert log.settings.sample_rate[0] == pytest.approx(1 / 93)
    assert log.total_steps == 92
    assert "Opacus's accountant" not in failed(tmp_path / "run")


# Bad input: one clear error, before anything is trained.


def test_nan_example_stops_with_its_id_before_the_model_is_lost(tmp_path):
    dataset = blobs()
    dataset.tensors[0][17] = float("nan")
    run = make_run(dataset)
    with pytest.raises(InputError, match=r"NaN gradient norms for 1 examples, e.g. ids \[17\]"):
        record(run, tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_replaced_step_hook_is_found_at_the_first_step(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=3)
    with (
        pytest.raises(EvidenceError, match="step hook did not run"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
        run.optimizer.attach_step_hook(lambda optimizer: None)
        run.train(1)
    assert read_state(tmp_path / "run").total_steps == 10  # nothing that was recorded is lost
    assert not read_state(tmp_path / "run").closed


def test_an_optimizer_without_the_accountants_hook_is_refused(tmp_path):
    run = make_run()
    run.optimizer.step_hook = None
    with pytest.raises(InputError, match="would report epsilon 0"):
        record(run, tmp_path / "run")


def test_a_plain_optimizer_is_refused(tmp_path):
    run = make_run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="not an Opacus DPOptimizer"):
        record(run, tmp_path / "run")


def test_per_layer_clipping_is_refused(tmp_path):
    run = make_run(clipping="per_layer", max_grad_norm=[1.0] * 4)
    with pytest.raises(InputError, match="DPPerLayerOptimizer is not supported"):
        record(run, tmp_path / "run")


def test_adaptive_clipping_is_refused_at_its_first_step(tmp_path):
    dataset, model = blobs(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, criterion, loader = PrivacyEngineAdaptiveClipping().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset, batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="ghost",
    )
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE)
    with (
        pytest.raises(InputError, match="adaptive clipping is not supported"),
        recorder.attach(model, optimizer, loader),
    ):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()


def test_the_sampler_of_a_shard_with_the_optimizer_of_one_process_is_refused(tmp_path):
    run = make_run()
    run.loader.batch_sampler.__class__ = DistributedUniformWithReplacementSampler
    with pytest.raises(
        InputError, match="each draws from its own shard and gradients are added up"
    ):
        record(run, tmp_path / "run")


def test_no_noise_is_refused(tmp_path):
    run = make_run(noise_multiplier=0.0)
    with pytest.raises(InputError, match=r"noise_multiplier=0\.0"):
        record(run, tmp_path / "run")


def test_different_clipping_norms_of_model_and_optimizer_are_refused(tmp_path):
    run = make_run(mode="ghost")
    run.optimizer.max_grad_norm = 0.5
    with pytest.raises(InputError, match="in ghost mode set both"):
        record(run, tmp_path / "run")


def test_an_accountant_that_counts_too_small_a_rate_is_refused(tmp_path):
    run = make_run()
    run.loader.batch_sampler.sample_rate = 0.2
    with pytest.raises(InputError, match="the accountant's epsilon is too small"):
        record(run, tmp_path / "run")


def test_another_data_set_than_the_loaders_is_refused(tmp_path):
    run = make_run()
    run.dataset = blobs(121)
    with pytest.raises(InputError, match="has 121 examples, the loader's data set has 120"):
        record(run, tmp_path / "run")


def test_an_empty_data_set_is_refused(tmp_path):
    with pytest.raises(InputError, match="no examples"):
        Recorder(tmp_path / "run", dataset=blobs(0), loss_fn=PER_EXAMPLE)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_data_set_without_length_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no length"):
        Recorder(tmp_path / "run", dataset=Stream(), loss_fn=PER_EXAMPLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "week"}, "every='week'"),
        ({"reference_examples": 121}, "reference_examples=121 is more"),
        ({"metadata": pd.DataFrame({"a": range(3)})}, "metadata lacks 117 of 120"),
        ({"metadata": pd.DataFrame({"loss": range(120)})}, "may not have the columns loss"),
        ({"metadata": pd.DataFrame({"a": range(120)}, index=[0] * 120)}, "duplicated index"),
        (
            {"metadata": pd.DataFrame({"a": ["x", *range(119)]})},
            "metadata cannot be kept in a file .*column a",
        ),
        (
            {"metadata": pd.DataFrame([[1, 2]] * 120, columns=["a", "a"])},
            "metadata cannot be kept in a file .*Duplicate",
        ),
        ({"example_ids": [1] * 120}, "119 duplicates"),
        ({"unit_ids": [1]}, "unit_ids has shape"),
        ({"unit": "client"}, 'unit="client" needs unit ids'),
        ({"rounding": 7}, "rounding=7"),
        ({"resume_at": 3}, "holds no journal"),
    ],
)
def test_bad_options_are_refused_before_training(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, **options)


def test_metadata_of_training_and_test_examples_must_fit_together(tmp_path):
    ages, texts = pd.DataFrame({"age": range(120)}), pd.DataFrame({"age": ["40 to 49"] * 120})
    with pytest.raises(InputError, match="the same for training and test examples"):
        Recorder(
            tmp_path / "run",
            dataset=blobs(),
            loss_fn=PER_EXAMPLE,
            test_set=blobs(),
            metadata=ages,
            test_metadata=texts,
        )


@pytest.mark.parametrize("name", ["unit_ids", "example_ids"])
def test_ids_that_are_texts_stand_beside_numbered_test_examples(name, tmp_path):
    ids = [f"p{number}" for number in range(120)]
    record(make_run(), tmp_path / "run", test_set=blobs(), **{name: ids})
    table = ExampleTable.from_parquet(tmp_path / "run/examples.parquet")
    assert table.train[name[:-1]].tolist() == ids
    assert table.test[name[:-1]].tolist() == [str(number) for number in range(120)]
    assert table.aligned(NormLog.open(tmp_path / "run").example_ids)["loss"].notna().all()


def test_a_run_directory_holds_one_run(tmp_path):
    record(make_run(), tmp_path / "run")
    with pytest.raises(InputError, match="already holds a recorded run"):
        record(make_run(), tmp_path / "run")


class Changeable(Dataset):
    """Changes under the recorder's feet, as a data set that is cached or filtered lazily does."""

    def __init__(self):
        self.inputs, self.targets = blobs().tensors

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def test_a_data_set_that_changes_its_order_is_found(tmp_path):
    dataset = Changeable()
    run = make_run(dataset)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE, every=3)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
        order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
        dataset.inputs, dataset.targets = dataset.inputs[order], dataset.targets[order]
        run.train(1)
    with pytest.raises(EvidenceError, match="changed its order or its labels between records"):
        NormLog.open(tmp_path / "run")


def test_a_data_set_that_shrinks_is_found(tmp_path):
    dataset = Changeable()
    run = make_run(dataset)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE, every=10)
    with (
        pytest.raises(InputError, match="has 119 examples now and had 120"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for i, batch in enumerate(run.loader):
            run.step(*batch)
            if i == 8:
                dataset.inputs, dataset.targets = dataset.inputs[:119], dataset.targets[:119]


# Resuming.


def test_resuming_continues_the_log(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    log = record(run, tmp_path / "run", epochs=1, resume_at=10)
    assert log.total_steps == 20
    assert log.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15, 18]
    assert failed(tmp_path / "run") == set()
    voided = next(check for check in verify(tmp_path / "run") if check.title == "no voided steps")
    assert "a process that was killed may have run up to 256 more" in voided.detail


def test_resuming_from_an_earlier_checkpoint_voids_what_came_after(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1, reference_examples=3)
    log = record(run, tmp_path / "run", epochs=1, resume_at=6, reference_examples=3)
    assert log.total_steps == 16
    assert log.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15]
    assert log.reference_examples().recorded_steps.tolist() == list(range(16))


def test_voided_steps_are_told(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    log = record(run, tmp_path / "run", epochs=1, resume_at=4)
    assert any("6 steps were run and declared void" in caveat for caveat in log.caveats)


def test_each_session_of_a_resumed_run_counts(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    log = record(make_run(), tmp_path / "run", epochs=1, resume_at=10, seeded=True)
    assert SEEDED in log.caveats
    shuffled = record(make_run(poisson_sampling=False), tmp_path / "run", epochs=1, resume_at=20)
    assert shuffled.sampler != "poisson"


def test_resuming_beyond_the_log_is_refused(tmp_path):
    record(make_run(), tmp_path / "run", epochs=1)
    with pytest.raises(InputError, match=r"resume_at=15, but the log.*proves only 10 steps"):
        record(make_run(), tmp_path / "run", resume_at=15)


def test_resuming_with_other_examples_is_refused(tmp_path):
    record(make_run(), tmp_path / "run", epochs=1)
    with pytest.raises(EvidenceError, match="n_examples"):
        record(make_run(blobs(60)), tmp_path / "run", resume_at=10)


# Policies.


def test_a_policy_is_recorded_and_told(tmp_path):
    policy = RecordingPolicy(every=2, growth=2.0, longest="epoch", reference_examples=3)
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, policy=policy)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(4)
    state = read_state(tmp_path / "run")
    assert state.policy == RecordingPolicy(every=2, growth=2.0, longest=10, reference_examples=3)
    assert [entry["step"] for entry in state.records] == [0, 2, 6, 14, 24, 34]
    assert state.pass_seconds > 0
    assert state.training_seconds > 0
    coverage = next(check.detail for check in verify(tmp_path / "run") if check.title == "coverage")
    assert coverage.startswith(
        "6 of 40 steps have a record of all 120 examples (full passes after 2 steps, each gap 2 times the last, at most "
        "10; 3 reference examples); "
    )
    assert re.search(r"[\d.]+ s of norm passes beside [\d.]+ s of training \(\d+ %\)", coverage)


@pytest.mark.parametrize("argument", [{"every": 3}, {"reference_examples": 0}])
def test_a_policy_and_what_it_says_itself_are_one_too_many(argument, tmp_path):
    with pytest.raises(InputError, match=f"both {next(iter(argument))}=. and a policy"):
        Recorder(
            tmp_path / "run",
            dataset=blobs(),
            loss_fn=PER_EXAMPLE,
            policy=RecordingPolicy("epoch"),
            **argument,
        )


def test_resuming_goes_on_with_the_logs_own_policy(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1, every=None, policy=RecordingPolicy(1, 3.0))
    log = record(run, tmp_path / "run", epochs=4, every=None, resume_at=10)
    assert log.recorded_steps.tolist() == [0, 1, 4, 13, 40]
    assert log.total_steps == 50


@pytest.mark.parametrize("stopped_at", [3, 10])
def test_a_late_first_pass_comes_when_the_policy_says_also_after_resuming(stopped_at, tmp_path):
    """A run that stopped before its first pass holds no record, and goes on to take it."""
    run = make_run()
    policy = RecordingPolicy("once", batch_norms=True, first=4)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, policy=policy)
    with recorder.attach(run.model, run.optimizer, run.loader):
        batches = iter(run.loader)
        for _ in range(stopped_at):
            run.step(*next(batches))
    before = NormLog.open(tmp_path / "run")
    assert before.recorded_steps.tolist() == [4][: stopped_at > 4]
    assert (
        indpriv.account(before, delta=1e-5).claim == "estimate"
    )  # batch norms alone prove nothing of the other steps
    assert indpriv.account(before, delta=1e-5, between_records="worst_case").claim == "exact"
    log = record(run, tmp_path / "run", epochs=1, every=None, resume_at=stopped_at)
    assert log.recorded_steps.tolist() == [4]
    assert log.batch_norms.steps.tolist() == list(range(stopped_at + 10))
    coverage = next(check.detail for check in verify(tmp_path / "run") if check.title == "coverage")
    assert "(one full pass before step 4; batch norms of sampled batches)" in coverage


def test_resuming_under_another_policy_is_refused(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", epochs=1)
    with pytest.raises(EvidenceError, match="the log to continue has policy="):
        record(run, tmp_path / "run", epochs=1, every=4, resume_at=10)
    assert NormLog.open(tmp_path / "run").total_steps == 10


# Interruptions.

TRAIN_FOREVER = """
import sys, warnings; warnings.simplefilter("ignore")
sys.path.insert(0, {tests!r})
from runs import *
from indpriv.recording import Recorder
run = make_run()
recorder = Recorder({run_dir!r}, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
with recorder.attach(run.model, run.optimizer, run.loader):
    run.train(100000)
"""


def interrupt(run_dir, number, after_records):
    tests = str(Path(__file__).parents[1])
    code = TRAIN_FOREVER.format(tests=tests, run_dir=str(run_dir))
    with running([sys.executable, "-c", code], stderr=subprocess.DEVNULL) as process:
        records = run_dir / "records"
        deadline = time.monotonic() + 240  # a busy machine takes a minute to import torch
        while time.monotonic() < deadline and process.poll() is None:
            if records.exists() and len(list(records.glob("0*.parquet"))) >= after_records:
                break
            time.sleep(0.005)
        assert process.poll() is None, "training ended before it could be interrupted"
        os.kill(process.pid, number)
        process.wait(30)


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_what_was_acknowledged_survives_an_interruption(number, tmp_path):
    run_dir = tmp_path / "run"
    interrupt(run_dir, number, after_records=7)
    state = read_state(run_dir)
    assert len(state.records) >= 6
    log = NormLog.open(run_dir)
    assert log.recorded_steps.tolist() == list(range(log.total_steps))
    assert any("not closed" in caveat for caveat in log.caveats)
    assert "log closed" in failed(run_dir)
    if number == signal.SIGINT:
        assert not list((run_dir / "records").glob(".*"))


@pytest.mark.usefixtures("hears_ctrl_c")
@pytest.mark.parametrize("moment", ["record", "steps"])
def test_an_interrupt_while_the_log_is_written_waits(moment, tmp_path, monkeypatch):
    """It arrives right after a line is on disk and before the writer knows."""
    run = make_run()
    original = getattr(NormLogWriter, moment)

    def interrupted(self, step, *arguments, **options):
        original(self, step, *arguments, **options)
        if step == 4:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(NormLogWriter, moment, interrupted)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with pytest.raises(KeyboardInterrupt), recorder.attach(run.model, run.optimizer, run.loader):
        run.train()
    log = NormLog.open(tmp_path / "run")
    assert log.recorded_steps.tolist() == list(range(5)) == list(range(log.total_steps))


def test_a_killed_run_is_resumed(tmp_path):
    run_dir = tmp_path / "run"
    interrupt(run_dir, signal.SIGKILL, after_records=4)
    steps = read_state(run_dir).total_steps
    log = record(make_run(), run_dir, epochs=1, every=1, resume_at=steps)
    assert log.total_steps == steps + 10
    assert log.coverage == 1
    assert not list((run_dir / "records").glob(".*"))
