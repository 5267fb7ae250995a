import socket
import warnings
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader

from indpriv import EvidenceError, InputError
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.gradients import ClippingWatch, clip_excess
from indpriv.recording.opacus.run import OpacusRun, Ranks
from indpriv.recording.training_data import Examples
from indpriv.recording.watch import Watch
from runs import LOADING, PER_EXAMPLE, blobs, make_run

MODES = ["hooks", "functorch", "ew", "ghost"]


def parameters_of(run):
    return [p.detach().double().clone() for p in run.model.parameters()]


def gradients_of(run, parameters, positions):
    """(n, n_parameters) gradients of these examples, by autograd on a plain float64 model."""
    copy = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    for mine, value in zip(copy.parameters(), parameters, strict=True):
        mine.data = value
    inputs, targets = run.dataset.tensors
    gradients = []
    for i in positions.tolist():
        copy.zero_grad()
        PER_EXAMPLE(copy(inputs[i : i + 1].double()), targets[i : i + 1]).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in copy.parameters()]))
    return torch.stack(gradients)


def watched(run, on_step, thresholds=None):
    """Attach as a Recorder does; on_step gets the TrainedBatch of each step.

    Returns the Watch, and a function that ends it.
    """
    opacus_run = OpacusRun(run.model, run.optimizer, run.loader, len(run.dataset))
    examples = Examples(run.dataset, run.loader.collate_fn, torch.device("cpu"))
    norm_pass = NormPass(opacus_run.module, PER_EXAMPLE, *next(examples.batches(8)))
    watch = Watch(opacus_run, examples, PER_EXAMPLE, Ranks(run.optimizer), norm_pass)
    stack = ExitStack()
    stack.enter_context(
        watch.watching(lambda _, batch: on_step(batch), lambda _: None, thresholds=thresholds)
    )
    return watch, stack.close


@pytest.mark.parametrize(("workers", "physical"), LOADING)
@pytest.mark.parametrize("mode", MODES)
def test_norms_and_positions_are_those_of_the_batch(mode, physical, workers):
    run = make_run(mode=mode, workers=workers)
    batches, seen = [], []
    _, unwatch = watched(run, batches.append)
    run.model.train()

    def loop(loader):
        micro_batches, expected = [], 0
        for inputs, targets in loader:
            micro_batches.append(inputs)
            before = parameters_of(run)
            run.step(inputs, targets)
            if len(batches) > expected:  # a logical step
                expected = len(batches)
                seen.append((torch.cat(micro_batches), before))
                micro_batches = []

    if physical is None:
        loop(run.loader)
    else:
        with BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
        ) as small:
            loop(small)
    unwatch()
    assert len(seen) == len(batches) == 10
    for batch, (inputs, parameters) in zip(batches, seen, strict=True):
        assert torch.equal(inputs, run.dataset.tensors[0][batch.positions])
        norms = gradients_of(run, parameters, batch.positions).norm(dim=1)
        np.testing.assert_allclose(batch.norms, norms, rtol=1e-5)


@pytest.mark.parametrize(
    "mode", ["hooks", "functorch", "ghost"]
)  # ew itself fails on empty batches
@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_batches(mode, workers):
    run = make_run(blobs(30), mode=mode, batch_size=1, workers=workers)
    torch.manual_seed(2**40 + 1)
    sizes, batches = [], []
    watch, unwatch = watched(run, batches.append)
    for inputs, targets in run.loader:
        sizes.append(len(inputs))
        run.step(inputs, targets)
    unwatch()
    assert 0 in sizes
    assert (
        [len(batch.norms) for batch in batches]
        == [len(batch.positions) for batch in batches]
        == sizes
    )
    assert watch.tally.counts.unmatched_steps == 0


@pytest.mark.parametrize("physical", [120, 5])
@pytest.mark.parametrize("mode", MODES)
def test_each_example_is_clipped_at_its_own_threshold(mode, physical):
    run = make_run(mode=mode)
    levels = torch.rand(120, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    batches, sums = [], []

    def on_step(batch):
        batches.append(batch)
        noisy = torch.cat([p.summed_grad.flatten() for p in run.optimizer.params])
        sums.append(noisy.clone())

    _, unwatch = watched(run, on_step, lambda positions, _: levels[positions])
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=physical, optimizer=run.optimizer
    ) as small:
        expected = []
        parameters = parameters_of(run)
        for inputs, targets in small:
            run.step(inputs, targets)
            if len(batches) > len(expected):
                chosen = batches[-1].positions
                gradients = gradients_of(run, parameters, chosen)
                factors = (levels[chosen] / (gradients.norm(dim=1) + 1e-6)).clamp(max=1)
                expected.append(factors @ gradients)
                parameters = parameters_of(run)
    unwatch()
    torch.testing.assert_close(
        torch.stack(sums).double(), torch.stack(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("mode", MODES)
def test_watching_changes_no_bit_of_training(mode):
    def train(watch):
        torch.manual_seed(2**40 + 7)
        run = make_run(mode=mode)
        unwatch = watched(run, lambda _: None)[1] if watch else lambda: None
        run.train(1)
        unwatch()
        assert "clip_and_accumulate" not in vars(run.optimizer)
        assert "get_clipping_coef" not in vars(run.model)
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    assert torch.equal(train(True), train(False))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_batch_of_another_size_has_no_positions_and_no_thresholds(mode):
    run = make_run(mode=mode)
    batches = []
    watch, unwatch = watched(run, batches.append)
    draws = iter(run.loader)
    next(draws)
    run.step(*(tensor[:50] for tensor in run.dataset.tensors))
    unwatch()
    assert batches == [None]
    assert watch.tally.counts.unmatched_steps == 1

    run = make_run(mode=mode)
    _, unwatch = watched(run, batches.append, lambda positions, _: torch.ones(len(positions)))
    draws = iter(run.loader)
    next(draws)
    with pytest.raises(EvidenceError, match="a batch of 50 examples is not the one that was drawn"):
        run.step(*(tensor[:50] for tensor in run.dataset.tensors))
    assert run.optimizer.max_grad_norm == 1.0


def test_an_opacus_that_clips_otherwise_is_refused():
    run = make_run()
    run.optimizer.clip_and_accumulate = lambda: None
    watch = ClippingWatch(run.model, run.model, run.optimizer, lambda _: None, lambda _: None)
    with watch.watching(), pytest.raises(EvidenceError, match="without dividing by their norms"):
        run.step(*(tensor[:5] for tensor in run.dataset.tensors))


def test_a_repeated_backward_pass_in_ghost_mode_counts_once():
    run = make_run(mode="ghost")
    batches = []
    _, unwatch = watched(run, batches.append)
    for inputs, targets in run.loader:
        for _ in range(2):  # a closure may evaluate twice before the step
            run.optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
        run.optimizer.step()
    unwatch()
    assert all(len(batch.norms) == len(batch.positions) for batch in batches)


@pytest.mark.parametrize(("width", "least", "most"), [(1000, 0.0, 1e-4), (3200, 3e-4, 1e-2)])
def test_by_how_much_opacus_clips_too_little_is_measured(width, least, most):
    """float32 sums on a CPU underestimate long gradients, which then exceed max_grad_norm."""
    model = GradSampleModule(nn.Linear(width, width, bias=False))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = DPOptimizer(sgd, noise_multiplier=1.0, max_grad_norm=1e-3, expected_batch_size=1)
    (model(torch.randn(1, width)) * torch.randn(1, width)).sum().backward()
    optimizer.clip_and_accumulate()
    excess = float(next(model.parameters()).summed_grad.double().norm()) / 1e-3 - 1
    assert least <= clip_excess(optimizer) <= most
    assert clip_excess(optimizer) == pytest.approx(excess, rel=0.5, abs=1e-4)


def _scale(run):
    for parameter in run.model.parameters():
        parameter.grad *= 50


def _add_another_loss(run):
    inputs, targets = (tensor[:5] for tensor in run.dataset.tensors)
    (100 * nn.functional.cross_entropy(run.model(inputs), targets)).backward()


def _clip_the_sum(run):
    nn.utils.clip_grad_norm_(run.model.parameters(), 0.1)


def _freeze(run):
    next(run.model.parameters()).requires_grad_(False)


def _replace(run):
    for parameter in run.model.parameters():
        parameter.grad = 50 * parameter.grad


@pytest.mark.parametrize("change", [_scale, _add_another_loss, _clip_the_sum, _freeze, _replace])
def test_gradients_changed_once_ghost_mode_has_clipped_them_are_refused(change):
    run = make_run(mode="ghost")
    before = [parameter.detach().clone() for parameter in run.model.parameters()]
    _, unwatch = watched(run, lambda _: None)
    inputs, targets = next(iter(run.loader))
    run.criterion(run.model(inputs), targets).backward()
    change(run)
    with pytest.raises(InputError, match=r"gradients were changed between|were frozen during"):
        run.optimizer.step()
    assert all(map(torch.equal, run.model.parameters(), before))
    unwatch()
    assert "enable_hooks" not in vars(run.model)


def _one_rank(rank, port, folder):
    """One of two ranks: a step on its half of the data, each example at its own threshold."""
    warnings.simplefilter("ignore")
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    try:
        torch.manual_seed(2**40 + 0)
        module = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        model = DifferentiallyPrivateDistributedDataParallel(module)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loader = DataLoader(blobs(40), batch_size=40)
        model, optimizer, _ = PrivacyEngine().make_private(
            module=model,
            optimizer=optimizer,
            data_loader=loader,
            noise_multiplier=0.0,
            max_grad_norm=1.0,
            poisson_sampling=False,
        )
        batches, half = [], np.arange(20) + 20 * rank
        thresholds = torch.linspace(0.1, 1, 40, dtype=torch.float64)
        parameters = [p.detach().clone() for p in model.parameters()]
        inputs, targets = (tensor[half] for tensor in blobs(40).tensors)
        watch = ClippingWatch(
            model,
            model,
            optimizer,
            positions_of=lambda size: half[:size],
            on_batch=batches.append,
            thresholds=lambda positions, _: thresholds[positions],
        )
        with watch.watching():
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        torch.save(
            (
                type(optimizer).__name__,
                batches[0],
                parameters,
                [p.grad for p in model.parameters()],
            ),
            folder / str(rank),
        )
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_each_rank_clips_its_own_examples(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(_one_rank, (port, tmp_path), nprocs=2)
    run = make_run(blobs(40))
    total = 0
    for rank in range(2):
        name, batch, parameters, gradients = torch.load(tmp_path / str(rank), weights_only=False)
        assert name == "DistributedDPOptimizer"
        found = gradients_of(run, [p.double() for p in parameters], batch.positions)
        assert batch.positions.tolist() == list(range(20 * rank, 20 * rank + 20))
        np.testing.assert_allclose(batch.norms, found.norm(dim=1), rtol=1e-5)
        levels = torch.linspace(0.1, 1, 40, dtype=torch.float64)[batch.positions]
        total = total + (levels / (found.norm(dim=1) + 1e-6)).clamp(max=1) @ found
    scale = 40 if run.optimizer.loss_reduction == "mean" else 1
    torch.testing.assert_close(
        torch.cat([g.flatten() for g in gradients]).double(), total / scale, rtol=1e-4, atol=1e-6
    )
