"""Per-example gradient norms before clipping, by a backend that fits the model. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleNoOp
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.norms.autograd_check import AutogradCheck
from indpriv.recording.norms.autotune import choose_variant
from indpriv.recording.norms.backends import KEEP_GRADIENTS
from indpriv.recording.norms.batches import Batch, LossFn, first_tensor
from indpriv.recording.norms.memory import in_micro_batches
from indpriv.recording.norms.model_checks import (
    check_each_alone,
    check_opacus_norms,
    validate_module,
)
from indpriv.recording.norms.shadow_model import ModelInTraining
from indpriv.recording.random_states import kept_random_state

_RANDOM = (
    "the model's forward pass is random (dropout?), so the recorded norms belong to another random "
    "draw than training's; batch norms and known participation make an exact account"
)


def per_example_gradient_norms(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto"
) -> Tensor:
    """Gradient norms of one batch, before clipping, over all trainable parameters together.

    Each call chooses a backend anew, and checks it on 8 examples, one at a time. In a loop, make
    one `NormPass` for all batches.

    Args:
        model: plain, or wrapped by Opacus; it is not changed.
        loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,), e.g.
            CrossEntropyLoss(reduction="none").
        inputs: inputs of the model; the first dimension is the batch.
        targets: targets of the loss; the first dimension is the batch.
        backend: "layerwise" (ours), "ghost", "hooks" (Opacus's), "functorch", or "auto": the first
            of these that fits the model. Its norms are compared with autograd on 8 examples.

    Returns:
        (batch,) float64 norms. `NormPass.slack` is already added to them; it covers rounding, so
        that they are never below the true norms.

    Raises:
        InputError: per-example gradients do not exist (BatchNorm), or the loss is not per example.
    """
    if not len(first_tensor(inputs)):
        return torch.zeros(0, dtype=torch.float64)
    with NormPass(model, loss_fn, inputs, targets, backend=backend, tune=False) as norm_pass:
        norms = norm_pass(inputs, targets)[0]
        if difference := norm_pass._check.disagreement(norms / (1 + norm_pass.slack)):
            raise InputError(difference)  # in a larger batch than those checked so far
        return norms


class NormPass:
    """Per-example gradient norms in a loop: of many batches of one model, which may be in training.

    The backend is chosen, checked and timed once, when the pass is made. Each call then computes
    the norms of one batch before clipping, over all trainable parameters together, at the model's
    current parameters. The model keeps its gradients, hooks, modes and buffers; only a random
    forward pass (dropout) draws from the generators that training uses. If constructed under
    `torch.autocast`, all calls use the same autocast settings: construct it as training computes.

    Norms depend on single examples, so they are as sensitive as the data. `Recorder` takes them for
    an account; use a NormPass to look at them in a loop of your own.

    Attributes:
        backend: name of the backend in use.
        fallback: why the backend is not "layerwise" although "auto" was asked for; otherwise "".
        batch_size: largest number of examples worked on at once. At first the fastest that fits
            into a quarter of the free memory; halved whenever memory runs out. Norms do not depend
            on it beyond `slack`.
        threads: number of threads that share a batch, each with copies of model and loss. There
            are several on a CPU, with the layerwise backend, if they are not slower and give the
            same norms.
        slack: relative amount added to every norm, eps (40 + 4 sqrt(parameters)): more than the
            measured errors where positions cancel and float32 sums are long. float32: 5e-6 for
            small models, 1.5e-3 for 10^7 parameters. For half precision, or autocast to it, sums
            are still in float32, and 4 eps of half precision are added (bfloat16: 3.1e-2), since
            training may round where this pass does not.
        caveats: reasons why an account from these norms is only an estimate.

    >>> import torch
    >>> from torch import nn
    >>> from indpriv.recording import NormPass
    >>> model, loss_fn = nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none")
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batches = [(torch.randn(32, 3), torch.randint(0, 2, (32,))) for _ in range(4)]
    >>> largest = []
    >>> with NormPass(model, loss_fn, *batches[0]) as norm_pass:
    ...     for inputs, targets in batches:
    ...         norms, losses = norm_pass(inputs, targets)  # at the current parameters
    ...         largest.append(norms.max())
    ...         optimizer.zero_grad()
    ...         loss_fn(model(inputs), targets).mean().backward()
    ...         optimizer.step()
    >>> norms.shape, norms.dtype, losses.shape, len(largest)
    (torch.Size([32]), torch.float64, torch.Size([32]), 4)
    >>> norm_pass.backend, norm_pass.fallback, norm_pass.caveats
    ('layerwise', '', ())
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: LossFn,
        inputs: Any,
        targets: Any,
        *,
        backend: str = "auto",
        tune: bool = True,
    ) -> None:
        """Choose a backend and check it on some real examples.

        Args:
            model: plain, or wrapped by Opacus; it is not changed.
            loss_fn: per-example losses, see `per_example_gradient_norms`.
            inputs: inputs of at least one example; from 256 on, larger batches are tried too.
            targets: their targets.
            backend: a name, or "auto": "layerwise" if it fits, else the fastest that fits.
            tune: time batch sizes, threads, memory order and variants of layers. False starts
                sooner and suits a few batches; "auto" then means the first backend that fits.

        Raises:
            InputError: as `per_example_gradient_norms`.
        """
        self._closed = False
        self._model = ModelInTraining(model, loss_fn)
        validate_module(self._model.module)
        batch = Batch(inputs, targets)
        with kept_random_state():
            self._model.check_writes(inputs)
        with kept_random_state():  # with the generators that were found
            check_each_alone(self._model, batch)
            check = AutogradCheck(self._model, batch)
            self._variant, self.fallback = choose_variant(
                self._model, check, batch, backend, tune=tune
            )
        self._check = check
        self.caveats = (_RANDOM,) if check.is_random else ()
        self.backend, self.batch_size = self._variant.name, self._variant.batch_size
        self.slack = self._model.slack

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Norms and losses of a batch at the model's current parameters.

        Returns:
            norms (batch,) float64 with `slack` added, and losses (batch,).

        Raises:
            InputError: not even one example fits into memory; other parameters are trainable than
                before; or the pass was closed.
        """
        if self._closed:
            raise InputError("this NormPass was closed; make a new one")
        self._variant.update()
        batch = Batch(inputs, targets)
        if not len(batch):
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0)
        parts, self.batch_size = in_micro_batches(
            lambda start, stop: self._variant(batch.rows(start, stop)), len(batch), self.batch_size
        )
        norms, losses = (torch.cat(side) for side in zip(*parts, strict=True))
        return norms * (1 + self.slack), losses

    @property
    def threads(self) -> int:
        """Number of threads that share a batch."""
        return len(self._variant.shadows)

    def clip_each(
        self, limits: Sequence[float] = (), transforms: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """From now on, give norms of what clipping each tensor of parameters leaves.

        Args:
            limits: clipping norm of each trainable one, in the order of `model.parameters()`.
            transforms: (centre, factor) of each; norms are those of (gradient - centre) * factor.
                Only the backends "hooks" and "functorch" have gradients to transform.
        """
        if transforms and self.backend not in KEEP_GRADIENTS:
            raise InputError(f"the backend {self.backend} has no gradients to transform")
        self._model.each.limits, self._model.each.transforms = limits, transforms

    def to_header(self, caveats: Iterable[str]) -> dict[str, Any]:
        """What the header of a log says of its norm pass, with all caveats known there."""
        return {
            "backend": self.backend,
            "fallback": self.fallback,
            "slack": self.slack,
            "caveats": list(caveats),
        }

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """A copy of the model in eval mode at its current parameters, without gradients."""
        shadow = self._model.shadow().eval()
        with torch.no_grad(), self._model.precision():
            yield shadow

    def check_training(self, model: nn.Module, inputs: Any, targets: Any) -> None:
        """Compare the norms that Opacus clips by in training with these, on a few examples.

        Opacus has its own formula for each kind of layer. If one is wrong, an example contributes
        something else to a step than its recorded norm says, and perhaps more.

        Args:
            model: as returned by PrivacyEngine.make_private; it is not changed.
            inputs: inputs of some real examples.
            targets: their targets.

        Raises:
            InputError: Opacus computes other gradients, or too small norms in ghost mode.
        """
        if not isinstance(model, AbstractGradSampleModule):
            return
        if isinstance(model, GradSampleModuleNoOp):
            return  # the loop computes gradients itself
        few = Batch(inputs, targets).rows(0, len(self._check.few))
        with kept_random_state():
            ours = self(few.inputs, few.targets)[0] / (1 + self.slack)
            tolerance = math.inf if self._check.is_random else self._check.tolerance
            check_opacus_norms(model, self._model, few, ours, tolerance)

    def close(self) -> None:
        """Release the shadow models; no norms can be computed afterwards."""
        self._closed = True
        self._variant.shadows = ()

    def __enter__(self) -> NormPass:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
