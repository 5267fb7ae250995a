"""Which layer keeps examples from having gradients of their own, why, and what to change."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleFastGradientClipping
from opacus.layers.dp_rnn import DPRNNBase
from torch import Tensor, nn

from indpriv.recording.norms.batches import Batch, Keywords, call
from indpriv.recording.norms.shadow_model import make_shadow, standard_module
from indpriv.recording.random_states import kept_random_state


def named(name: str, part: nn.Module) -> str:
    """A layer as messages call it: its class, and its name in the model."""
    return f"{type(part).__name__} {name!r}" if name else type(part).__name__


def hindrance(model: nn.Module, batch: Batch) -> str:
    """Which layer keeps Opacus from per-example gradients, why, and what to change; "" if unknown.

    Args:
        model: as it is trained, wrapped by Opacus or not.
        batch: a few examples.
    """
    seen = _Seen(model, batch)
    if bags := seen.trained(lambda name, part: isinstance(part, nn.EmbeddingBag)):
        return (
            f"Opacus takes no per-example gradients of {bags[0]}, whose texts lie one after "
            "another; use nn.Embedding and the mean over positions, embedding(tokens).mean(1)"
        )
    if fault := known_fault(model, batch):
        return fault
    if changed := seen.changed():
        in_place = [named(*each) for each in seen.parts if getattr(each[1], "inplace", False)]
        if in_place:
            return (
                f"{in_place[0]} changes the output of {changed[0]} in place, which Opacus's hooks "
                "cannot follow; switch it over: for part in model.modules(): "
                'if hasattr(part, "inplace"): part.inplace = False'
            )
        return (
            f"the output of {changed[0]} is changed in place, which Opacus's hooks cannot follow; "
            "in the model's forward, write out = out + x for out += x"
        )
    if turned := [named(*each) for each in seen.parts if each[0] in seen.turned]:
        return (
            f"the model gives {turned[0]} images that are not stored row by row, of which Opacus "
            "takes wrong gradients; call .contiguous() on them in the model's forward, or train "
            'with grad_sample_mode="functorch"'
        )
    if hidden := seen.trained(seen.is_hidden):
        return (
            f"{hidden[0]} has trained parameters that the model uses otherwise than by calling it "
            "on tensors, so Opacus sees no gradient of single examples; use another kind of "
            "adapter (plain LoRA instead of DoRA, IA3 or prompts), or freeze it"
        )
    tied = seen.trained(lambda name, part: seen.calls[name] > 1 or seen.is_tied(part))
    if tied and isinstance(model, GradSampleModuleFastGradientClipping):
        return (
            f"{' and '.join(tied)}: a parameter is used several times, whose gradients ghost "
            'clipping cannot add up; train with grad_sample_mode="hooks", or untie it (Hugging '
            "Face: tie_word_embeddings=False)"
        )
    return ""


def known_fault(model: nn.Module, batch: Batch) -> str:
    """What Opacus gets wrong, also where no error says so, and what to change; "" if nothing.

    Of an Embedding that looks up the same for all examples, it takes each position for an example.
    """
    sizes = batch, batch.repeated(len(batch) + 1)  # a length may be one batch size by chance
    for seen in (_Seen(model, each) for each in sizes):
        if shared := [named(*each) for each in seen.parts if each[0] in seen.shared]:
            return (
                f"{shared[0]} looks up the same positions for all examples, so that none has a "
                "gradient of its own; give each batch ids of shape (batch, length) by keyword, "
                "e.g. position_ids=torch.arange(length).repeat(batch, 1), and for BERT "
                "token_type_ids, or freeze the layer"
            )
        if seen.faults:
            return seen.faults[0]
    return ""


def how_to_call(module: nn.Module, inputs: Any) -> str:
    """What to pass as unpack= where a model does not take the inputs as they are."""
    names = list(inspect.signature(module.forward).parameters)
    remedy = f"(batch[0].to({next(module.parameters()).dtype}), batch[1])"
    if isinstance(inputs, Keywords):
        known = ", ".join(f'"{name}": batch["{name}"]' for name in inputs if name in names)
        *_, last = [name for name in inputs if name not in names] or inputs
        given = f"{{{known}}}" if known else f'batch["{next(iter(inputs))}"]'
        remedy = f'({given}, batch["{last}"])'
    elif not isinstance(inputs, Tensor):
        remedy = f"({'dict' if isinstance(inputs, Mapping) else 'tuple'}(batch[0]), batch[1])"
    return f"it takes ({', '.join(names)}); say how: unpack=lambda batch: {remedy}"


class _Seen:
    """What the layers of a model do in one forward pass.

    Attributes:
        parts: all of them, by name.
        calls: the number of calls of each.
        keywords: names of those that are given tensors or layers by keyword.
        shared: names of trained Embeddings whose input has no dimension for the batch.
        turned: names of trained convolutions of images in another order than Opacus assumes.
        faults: what Opacus gets wrong of other layers.
    """

    def __init__(self, model: nn.Module, batch: Batch) -> None:
        module = standard_module(model)
        of_autograd = isinstance(model, GradSampleModuleFastGradientClipping) or getattr(
            model, "force_functorch", False
        )
        self._pads = isinstance(model, AbstractGradSampleModule) and not of_autograd
        self.parts = list(module.named_modules())
        self.calls: Counter[str] = Counter()
        self.keywords: set[str] = set()
        self.shared: set[str] = set()
        self.turned: set[str] = set()
        self.faults: list[str] = []
        self._outputs: list[tuple[str, Tensor, int]] = []
        self._uses = Counter(id(p) for _, part in self.parts for p in _own(part))
        shadow = make_shadow(module)
        for name, part in shadow.named_modules():
            part.register_forward_hook(partial(self._after, name, len(batch)), with_kwargs=True)
        with kept_random_state(), torch.no_grad():
            call(shadow, batch.inputs)

    def _after(
        self,
        name: str,
        size: int,
        part: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        output: Any,
    ) -> None:
        self.calls[name] += 1
        if kwargs and not all(
            value is None or isinstance(value, bool) for value in kwargs.values()
        ):
            self.keywords.add(name)
        if isinstance(output, Tensor):
            self._outputs.append((name, output, output._version))
        if isinstance(part, nn.Embedding) and _own(part) and args and size not in args[0].shape[:2]:
            self.shared.add(name)
        packed = getattr(args[0], "sorted_indices", None) if args else None
        if isinstance(part, DPRNNBase) and packed is not None:
            self.faults.append(
                f"{named(name, part)} gets a packed batch sorted by length (enforce_sorted=False): "
                "Opacus adds up its gradients of one example and other layers' of another; give it "
                "the padded batch, and take outputs[torch.arange(len(lengths)), lengths - 1]"
            )
        if (
            self._pads
            and type(part) is nn.Embedding
            and part.padding_idx is not None
            and _own(part)
        ):
            self.faults.append(
                "in hooks and ew mode, Opacus ignores padding_idx of the Embedding "
                f"{name!r}: it trains the row of padding, with gradients that autograd does not "
                'give it; train with grad_sample_mode="functorch", or make the Embedding without '
                "padding_idx"
            )
        if _own(part) and _in_checkpoint():
            self.faults.append(
                f"{named(name, part)} runs in a checkpoint that is not reentrant: Opacus takes its "
                "second forward pass for another use; call checkpoint(..., use_reentrant=True)"
            )
        if type(part) is nn.Conv2d and _own(part) and not args[0].is_contiguous():
            self.turned.add(name)

    def trained(self, which: Callable[[str, nn.Module], bool]) -> list[str]:
        """Those among the layers with trained parameters of their own, each as it is named."""
        return [named(*each) for each in self.parts if _own(each[1]) and which(*each)]

    def changed(self) -> list[str]:
        """Layers whose output was changed in place after they returned it."""
        names = dict(self.parts)
        return [
            named(n, names[n]) for n, output, before in self._outputs if output._version != before
        ]

    def is_hidden(self, name: str, part: nn.Module) -> bool:
        """Whether parameters of this layer reach outputs in a way that no hook sees."""
        uncalled = self.calls[name] == 0 and not self.is_tied(part)
        return uncalled or name in self.keywords

    def is_tied(self, part: nn.Module) -> bool:
        """Whether another layer has a parameter of this one."""
        return any(self._uses[id(p)] > 1 for p in _own(part))


def _own(part: nn.Module) -> list[nn.Parameter]:
    return [p for p in part.parameters(recurse=False) if p.requires_grad]


def _in_checkpoint() -> bool:
    """Whether this is called inside a torch.utils.checkpoint that is not reentrant."""
    return any(
        each.frame.f_globals.get("__name__") == "torch.utils.checkpoint"
        and each.frame.f_locals.get("use_reentrant") is False
        for each in inspect.stack(0)
    )
