"""Runs with individual clipping, and their clipped sums by autograd, one example after the other."""

from contextlib import contextmanager

import numpy as np
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager

from indpriv.recording import Recorder
from runs import PER_EXAMPLE, mlp

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
    plain = run.optimizer.step_hook

    def hook(optimizer):  # the sum without noise is still there
        sums.append(
            torch.cat([p.summed_grad.flatten() for p in run.optimizer.params]).double().clone()
        )
        plain(optimizer)

    run.optimizer.attach_step_hook(hook)
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
        elif not log.levels.rounding:
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
