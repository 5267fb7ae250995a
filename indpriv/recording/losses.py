"""Losses of single examples that PyTorch does not have, or not in a form that serves here."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from indpriv._checks import check_choice
from indpriv._facts import refused


@dataclass
class CausalLMLoss:
    """Loss (batch,) of each sequence: cross-entropy of each token given the ones before it.

    The loss that Hugging Face's models return is the mean over all tokens of a batch. Where
    sequences have different numbers of labels, the gradient of one of them then depends on the
    others, so that no per-example gradient exists: train on the mean of this loss instead.

    Attributes:
        over_tokens: of a sequence: "mean" gives a long text the weight of a short one; "sum" gives
            each token the same weight, and long texts large gradients.
        ignore_index: the label of tokens that do not count, such as padding.

    Raises:
        InputError: another choice; when called, no logits or no labels.

    >>> import torch
    >>> labels = torch.tensor([[1, 2, 0], [1, -100, -100]])
    >>> CausalLMLoss()({"logits": torch.zeros(2, 3, 4)}, {"labels": labels})
    tensor([1.3863, 0.0000])
    """

    over_tokens: str = "mean"
    ignore_index: int = -100

    def __post_init__(self) -> None:
        check_choice("over_tokens", self.over_tokens, ("mean", "sum"))

    def __call__(self, outputs: Any, batch: Any) -> Tensor:
        """Losses (batch,) from logits (batch, length, vocabulary) and labels (batch, length)."""
        try:
            logits, labels = outputs["logits"], batch["labels"]
        except (KeyError, TypeError, IndexError) as error:
            raise refused("refusal.arguments", "causal_lm") from error
        losses = F.cross_entropy(
            logits[:, :-1].transpose(1, 2),
            labels[:, 1:],
            reduction="none",
            ignore_index=self.ignore_index,
        ).sum(1)
        if self.over_tokens == "sum":
            return losses
        return losses / (labels[:, 1:] != self.ignore_index).sum(1).clamp(min=1)


def with_targets(loss_fn: Callable[..., Tensor]) -> Callable[[Any, Any], Tensor]:
    """The loss as a function of (outputs, targets), also where it takes outputs alone."""
    try:
        inspect.signature(loss_fn).bind(None, None)
    except TypeError:
        return partial(_of_outputs, loss_fn)
    except ValueError:  # a built-in function has no signature
        pass
    return loss_fn


def _of_outputs(loss_fn: Callable[[Any], Tensor], outputs: Any, _: Any) -> Tensor:
    return loss_fn(outputs)


def described_loss(loss_fn: Any) -> str:
    """What the header of a log says of a loss, e.g. CausalLMLoss(over_tokens='mean', ...)."""
    given = loss_fn.args[0] if getattr(loss_fn, "func", None) is _of_outputs else loss_fn
    return str(getattr(given, "__qualname__", given))
