"""Requirements on model, optimizer and loader: checked once, before anything is changed."""

from __future__ import annotations

import inspect
from typing import Any

from opacus.accountants.accountant import IAccountant
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import (
    AdaClipDPOptimizer,
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    FSDPOptimizerFastGradientClipping,
    SimpleDistributedPerLayerOptimizer,
)
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
    UniformWithReplacementSampler,
)
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from indpriv.errors import InputError
from indpriv.recording.clipping.rules import AdaClip, LargestNormNoise, QuantileClipping
from indpriv.recording.opacus.ranks import DISTRIBUTED, check_distributed_sampler
from indpriv.recording.opacus.truncated import TruncatedPoissonSampler
from indpriv.recording.opacus.whole_model import GHOST_MODELS

_ACCOUNTED = (
    DPOptimizer,
    DPOptimizerFastGradientClipping,
    DPPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
    QuantileClipping,
    AdaClip,
    LargestNormNoise,
    *DISTRIBUTED,
)
NOT_AS_PROVEN = (
    "Opacus's adaptive clipping is not supported: it does not centre the number of unclipped "
    "gradients, so its noise is too little for the theorem, and it divides by the number of "
    "sampled examples, which is data; use indpriv.recording.QuantileClipping.of(optimizer)"
)


def check_optimizer(optimizer: Any, model: nn.Module) -> None:
    """Raise InputError if the optimizer cannot be accounted, or does not belong to the model."""
    if not isinstance(optimizer, DPOptimizer):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, not an Opacus DPOptimizer; attach the "
            "one that PrivacyEngine.make_private returned"
        )
    if type(optimizer) is AdaClipDPOptimizer:
        raise InputError(NOT_AS_PROVEN)
    if type(optimizer) not in _ACCOUNTED:
        raise InputError(
            f"{type(optimizer).__name__} is not supported: flat clipping is accounted, and per "
            "layer (not automatic or sharded); use "
            'make_private(clipping="flat")'
        )
    if isinstance(optimizer, DISTRIBUTED):
        _check_distributed_model(_wrapped(model), optimizer)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, as make_private(wrap_model=False) returns; "
            "attach the module that it was made for"
        )
    if isinstance(model, AbstractGradSampleModule) and not model.batch_first:
        raise InputError(
            "make_private(batch_first=False) takes the second dimension of every layer's input for "
            "the examples; leave it out, and give all layers inputs with the examples first"
        )
    if optimizer.step_hook is None:
        raise InputError(
            "the optimizer has no step hook: Opacus's accountant is not attached and would report "
            "epsilon 0; attach the optimizer that PrivacyEngine.make_private returned"
        )
    if isinstance(optimizer, DPOptimizerFastGradientClipping) and not isinstance(
        model, GHOST_MODELS
    ):
        raise InputError(
            f"the optimizer clips in ghost mode, but the model is a plain {type(model).__name__}, "
            "whose clipping norm cannot be read; attach the model that make_private returned"
        )
    if optimizer.loss_reduction not in ("mean", "sum"):
        raise InputError(f"loss_reduction={optimizer.loss_reduction!r} is not known")


def _check_distributed_model(wrapped: nn.Module, optimizer: Any) -> None:
    """Raise InputError unless a model of several ranks is one that its optimizer is for."""
    needed, remedy = (
        (FSDPModule, "opacus.utils.fsdp_utils.FSDP2Wrapper(model)")
        if isinstance(optimizer, FSDPOptimizerFastGradientClipping)
        else (
            DifferentiallyPrivateDistributedDataParallel,
            "opacus.distributed.DifferentiallyPrivateDistributedDataParallel(model)",
        )
    )
    if not isinstance(wrapped, needed):
        raise InputError(
            "the optimizer adds up the gradients of several ranks, but the model is a "
            f"{type(wrapped).__name__}; pass {remedy} to make_private"
        )


def _wrapped(model: nn.Module) -> nn.Module:
    """The module that was passed to make_private."""
    return model._module if isinstance(model, AbstractGradSampleModule) else model


def sampler_kind(batch_sampler: Any, optimizer: Any) -> str:
    """How batches are drawn: one of the samplers of a NormLog; "other" if nothing is known of it.

    Raises:
        InputError: several ranks do not fit together.
    """
    shards = type(batch_sampler) is DistributedUniformWithReplacementSampler
    if shards != isinstance(optimizer, DISTRIBUTED):
        raise InputError(
            f"the optimizer is a {type(optimizer).__name__}, the batch sampler a "
            f"{type(batch_sampler).__name__}: several ranks can be accounted only if each draws "
            "from its own shard and gradients are added up; make model, optimizer and loader with "
            "one make_private call, with Poisson sampling"
        )
    if shards:
        check_distributed_sampler(batch_sampler, optimizer)
        return "poisson"
    if type(batch_sampler) is UniformWithReplacementSampler:  # a subclass may draw otherwise
        return "poisson"
    if type(batch_sampler) is TruncatedPoissonSampler:
        return "truncated_poisson"
    return _order_of_torch(batch_sampler) if type(batch_sampler) is BatchSampler else "other"


def _order_of_torch(batch_sampler: BatchSampler) -> str:
    """What torch's own batch sampler draws; "other" if what chooses examples is not torch's own.

    A WeightedRandomSampler, a SubsetRandomSampler or a list may have been made by looking at data.
    """
    sampler: Any = batch_sampler.sampler
    if type(sampler) is SequentialSampler:
        return "sequential"
    if type(sampler) is not RandomSampler:
        return "other"
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        return "with_replacement"
    one_batch = sampler.num_samples <= batch_sampler.batch_size
    return "fixed_size" if one_batch else "shuffled"


def check_loader(loader: DataLoader[Any], n_examples: int) -> None:
    """Raise InputError if batches would not match their draws, or the data set is another one."""
    if loader.batch_sampler is None:
        raise InputError(
            "the loader has no batch sampler (batch_size=None); pass the loader that make_private "
            "returned"
        )
    if not getattr(loader, "in_order", True):
        raise InputError(
            "the loader has in_order=False, so batches would not match their draws; use "
            "in_order=True"
        )
    sizes = {
        "the loader's data set": len(loader.dataset),  # type: ignore[arg-type]
        # With several ranks, num_samples is the size of a shard.
        "the loader's sampler": getattr(loader.batch_sampler, "total_size", None)
        or getattr(loader.batch_sampler, "num_samples", n_examples),
    }
    for name, size in sizes.items():
        if size != n_examples:
            raise InputError(
                f"the Recorder's dataset has {n_examples} examples, {name} has {size}; pass the "
                "training set to the Recorder"
            )


def check_parameters(module: nn.Module, optimizer: DPOptimizer) -> None:
    """Raise InputError unless the optimizer trains exactly the model's trainable parameters."""
    trained = {id(p) for p in optimizer.params}
    trainable = {id(p): name for name, p in module.named_parameters() if p.requires_grad}
    missing = [name for key, name in trainable.items() if key not in trained]
    foreign = len(trained - set(trainable))
    if missing or foreign:
        raise InputError(
            "the optimizer does not train exactly the model's trainable parameters (not trained: "
            f"{missing[:5]}; not in the model, or frozen: {foreign}), so norms would be those of "
            "another gradient; freeze the rest with requires_grad_(False)"
        )


def find_accountant(optimizer: DPOptimizer) -> tuple[IAccountant | None, float]:
    """The accountant behind the step hook, perhaps called by another hook, and the rate it counts.

    (None, 1) if there is none.
    """
    hooks = [optimizer.step_hook]
    for hook in hooks:  # the list grows while it is searched
        enclosed = inspect.getclosurevars(hook).nonlocals if inspect.isfunction(hook) else {}
        accountant = enclosed.get("self")
        if isinstance(accountant, IAccountant):
            return accountant, float(enclosed["sample_rate"])
        hooks += [
            value for value in enclosed.values() if inspect.isfunction(value) and value not in hooks
        ]
    return None, 1.0
