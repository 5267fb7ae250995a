"""Trainers over Hugging Face's that make their own Opacus optimizer, recorded with one line.

Such trainers count physical batches as steps, end epochs inside a batch, draw noise and batches by
the Trainer's seed 42, sum several draws in a step that is accounted as one, or shuffle where they
account Poisson samples. In the block of `attach_dptrainer` they do none of it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from inspect import signature
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from opacus.accountants import RDPAccountant
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from indpriv._facts import refused
from indpriv.recording.norms.batches import CausalLMLoss, map_tensors
from indpriv.recording.recorder import Recorder
from indpriv.recording.training_data import CollateFn, plain_collate


@contextmanager
def attach_dptrainer(recorder: Recorder, trainer: Any) -> Iterator[Recorder]:
    """Record trainer.train() of a DPTrainer, an OpacusDPTrainer or another of their kind.

    In the block a step is one Poisson sample of per_device_train_batch_size *
    gradient_accumulation_steps examples on average, which is what such trainers account, trained in
    parts of per_device_train_batch_size; epochs end between steps, noise and batches are drawn
    privately, and batches have position ids. If loss_fn of the Recorder is a `CausalLMLoss`, its
    mean is trained; else the trainer's own loss, which is compared with it.

    Args:
        recorder: a `Recorder` of the trainer's train_dataset.
        trainer: made and not trained yet; in hooks mode, on one device. Add the callback of
            `indpriv.integrations.callbacks` to it for figures, and to resume from checkpoints.

    Raises:
        InputError: a trainer that has trained before, ghost mode, packed texts, NEFTune, authors
            with several texts, and what `Recorder.attach` refuses.
    """
    optimizer, settings = trainer.optimizer or trainer.create_optimizer(), trainer.args
    if not isinstance(optimizer, DPOptimizer):  # Accelerate's, after a first train()
        names = {"optimizer": type(optimizer).__name__, "trainer": type(trainer).__name__}
        raise refused("refusal.attached", "no_dp_trainer", **names)
    kind = type(optimizer)
    if [name for name in vars(kind) if not name.startswith("__")] == ["param_groups"]:
        optimizer.__class__ = kind.__base__  # a subclass that only passes them on
    if isinstance(optimizer, DPOptimizerFastGradientClipping):
        raise refused("refusal.attached", "trainer_in_ghost_mode")
    if getattr(settings, "packing", False):
        raise refused("refusal.attached", "packing")
    if getattr(settings, "neftune_noise_alpha", None):
        raise refused("refusal.attached", "neftune")
    given, part = trainer.get_train_dataloader(), settings.per_device_train_batch_size
    n = len(given.dataset)
    for name in ("author_mapping", "entity_mapping"):
        if (n_authors := len(getattr(trainer, name, None) or given.dataset)) != n:
            raise refused("refusal.attached", "authors", name=name, n_authors=n_authors, n=n)
    rate = min(1.0, part * settings.gradient_accumulation_steps / n)
    model = getattr(trainer.model, "_module", trainer.model)
    model = model.get_base_model() if hasattr(model, "get_base_model") else model  # of peft
    positions = "position_ids" in signature(type(model).forward).parameters
    loader = DataLoader(
        given.dataset,
        batch_sampler=UniformWithReplacementSampler(num_samples=n, sample_rate=rate),
        collate_fn=partial(_collated, plain_collate(given.collate_fn), positions),
        num_workers=given.num_workers,
    )
    if optimizer.step_hook is None:  # of a trainer that counts by itself
        optimizer.attach_step_hook(RDPAccountant().get_optimizer_hook_fn(rate))
    methods: dict[str, Any] = {
        "create_optimizer": lambda *_, **__: optimizer,
        "get_train_dataloader": lambda: loader,
        "training_step": partial(_step_in_parts, trainer.training_step, optimizer, part),
    }
    own: dict[str, Any] = {}
    if isinstance(recorder.loss_fn, CausalLMLoss):
        methods["compute_loss"] = partial(_mean_loss, recorder.loss_fn)
        if "forward" in vars(model):  # TRL's, which computes losses past the layers
            own["forward"] = partial(type(model).forward, model)
    in_block: dict[str, Any] = {"gradient_accumulation_steps": 1, "ignore_data_skip": True}
    recorder.draw_privately()
    with (
        patch.multiple(trainer, **methods),
        patch.multiple(settings, **in_block),
        patch.multiple(model, **own) if own else nullcontext(),
        recorder.attach(trainer.model, optimizer, loader),
    ):
        yield recorder


def _step_in_parts(
    step: Callable[..., Any], optimizer: Any, size: int, model: Any, inputs: Any, *others: Any
) -> Any:
    """Forward and backward passes of one logical batch; the trainer then updates."""
    n = len(inputs["input_ids"])
    total = torch.zeros((), device=optimizer.params[0].device)
    optimizer._step_skip_queue.clear()  # where callbacks tell it of physical batches
    optimizer.zero_grad()  # the Trainer does not clear what Opacus sums
    if not n:  # few models take an empty batch
        for p in optimizer.params:
            p.grad_sample = p.new_zeros((0, *p.shape))
    for start in range(0, n, size):
        if start:
            optimizer.step()
            optimizer.zero_grad()
        optimizer.signal_skip_step(do_skip=start + size < n)
        few = map_tensors(dict(inputs), itemgetter(slice(start, start + size)))
        total += len(few["input_ids"]) / n * step(model, few, *others).detach()
    return total


def _mean_loss(
    loss_fn: CausalLMLoss, model: Any, inputs: Any, return_outputs: bool = False, **_: Any
) -> Any:
    outputs = model(**inputs)
    loss = loss_fn(outputs, inputs).mean()
    return (loss, outputs) if return_outputs else loss


def with_position_ids(collate_fn: CollateFn) -> CollateFn:
    """A collate function that gives each text position ids of its own, as Opacus needs them.

    Models with learned positions, such as GPT-2, otherwise look up one row of them for all texts.
    """
    return partial(_collated, collate_fn, True)


def _collated(collate_fn: CollateFn, positions: bool, rows: list[Any]) -> dict[str, Any]:
    if not rows:
        return {"input_ids": torch.zeros((0, 1), dtype=torch.long)}
    batch = collate_fn(rows)
    n, length = batch["input_ids"].shape
    return {"position_ids": torch.arange(length).repeat(n, 1), **batch} if positions else batch
