"""Norms by autograd: of one example at a time, as a check, and by torch.func. Sensitive."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from indpriv._facts import refused, text
from indpriv.errors import InputError
from indpriv.recording.norms.batches import Batch, call, check_losses, map_tensors
from indpriv.recording.norms.shadow_model import ModelInTraining

N_CHECKED = 8  # examples on which norms are compared
_TWICE = 2  # of these are differentiated again; the losses of all are computed again
# Each way to norms does the same float32 arithmetic in another order. Norms that are further apart
# than this belong to different gradients.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
TINY = 1e-12  # norms below it count as 0


class AutogradNorms:
    """One example at a time: slow, but for every model; the other ways are checked by it."""

    def __init__(self, model: ModelInTraining) -> None:
        self._model = model

    def update(self) -> None:
        """Each call takes the model's current parameters."""

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch, both (batch,), of examples that stand alone."""
        model, shadow = self._model, self._model.shadow()
        trainable = [p for p in shadow.parameters() if p.requires_grad]
        limits = model.limits or [math.inf] * len(trainable)
        norms, losses = [], []
        with torch.enable_grad():
            model.losses(shadow, batch)  # a reduced loss passes as per-example on one example
            for i in range(len(batch)):
                shadow.zero_grad()
                loss = model.losses(shadow, batch.rows(i, i + 1)).sum()
                if not loss.requires_grad:
                    raise InputError("losses have no gradient; leave out detach() and no_grad()")
                loss.backward()  # torch.autograd.grad fails on reentrant checkpoints
                squares = [
                    p.grad.double().square().sum().clamp(max=limit**2)
                    for p, limit in zip(trainable, limits, strict=True)
                    if p.grad is not None
                ]
                norms.append(torch.as_tensor(sum(squares) ** 0.5))
                losses.append(loss.detach())
        return torch.stack(norms), torch.stack(losses)


class AutogradCheck:
    """Norms of a few examples by autograd, with which others are compared."""

    def __init__(self, model: ModelInTraining, batch: Batch) -> None:
        """Differentiate the first examples of a batch one by one, some of them twice."""
        self.few = batch.rows(0, N_CHECKED)
        one_by_one = AutogradNorms(model)
        self._norms = one_by_one(self.few)[0]
        again = one_by_one(self.few.rows(0, _TWICE))[0]
        shadow = model.shadow()
        with torch.enable_grad():  # as in training: a counter may count such passes alone
            losses, others = (model.losses(shadow, self.few).detach() for _ in range(2))
        # Where the forward pass draws random numbers, norms cannot be compared.
        self.is_random = not (
            torch.allclose(self._norms[:_TWICE], again, rtol=1e-6, equal_nan=True)
            and torch.allclose(losses, others, rtol=1e-6, equal_nan=True)
        )
        self.tolerance = _TOLERANCE[model.compute_dtype]  # relative, of what rounding may cause
        self._model = model

    def of(self, norms: Any) -> str:
        """How these norms of the few examples differ from autograd's; "" if they do not."""
        norms.update()
        # Another batch size first: a dimension whose length follows it is the batch.
        norms(self.few.repeated(len(self.few) + 1))
        if isinstance(norms, AutogradNorms) and not self.is_random:
            self._check_sum()  # norms of examples alone do not see what a batch makes of them
        return self.disagreement(norms(self.few)[0])

    def _check_sum(self) -> None:
        """Raise InputError if the gradient of a batch is not the sum of those of its examples."""
        model, few, shadow = self._model, self.few, self._model.shadow()
        # Signs, and no other factors, at which a hook that clamps gradients would change its rows.
        weights = torch.randint(0, 2, (len(few),)).double() * 2 - 1
        trainable = [p for p in shadow.parameters() if p.requires_grad]
        off = [torch.zeros_like(p, dtype=torch.float64) for p in trainable]
        alone = [(few.rows(i, i + 1), -weights[i : i + 1]) for i in range(len(few))]
        for part, factors in [(few, weights), *alone]:
            shadow.zero_grad()
            with torch.enable_grad():
                losses = model.losses(shadow, part)
                (losses * factors.to(losses)).sum().backward()
            for total, p in zip(off, trainable, strict=True):
                total += 0.0 if p.grad is None else p.grad.double()
        error = math.sqrt(sum(float(total.square().sum()) for total in off))
        length = float((weights.to(self._norms) * self._norms).norm())
        if error > self.tolerance * length + TINY:
            raise refused("refusal.norms", "not_the_sum", error=error, length=length)

    def disagreement(self, norms: Tensor) -> str:
        """How the norms of the first examples differ from autograd's; "" if they do not."""
        ours, expected = norms[: len(self._norms)], self._norms
        if self.is_random or torch.allclose(
            ours, expected, rtol=self.tolerance, atol=TINY, equal_nan=True
        ):
            return ""
        worst = int((ours - expected).abs().argmax())
        values = {"example": worst, "norm": ours[worst], "alone": expected[worst]}
        return text("refusal.norms", "other_norm", **values)


def calls_python_functions(model: ModelInTraining, batch: Batch) -> bool:
    """Whether a forward pass calls a torch.autograd.Function written in Python.

    Reentrant checkpoints do, which torch.func cannot follow.
    """
    with torch.enable_grad():
        todo = [model.losses(model.shadow(), batch).grad_fn]
    seen = set()
    while todo:
        node = todo.pop()
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            return True
        if node is not None and node not in seen:
            seen.add(node)
            todo += [next_node for next_node, _ in node.next_functions]
    return False


def _first_names(module: nn.Module) -> dict[str, str]:
    """Name of each tensor of each module, once where the module has several, and its first name.

    functional_call itself does not put back what a module under two names had.
    """
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(tensor), name)
        for prefix, part in module.named_modules()
        for own, tensor in (*part._parameters.items(), *part._buffers.items())
        if tensor is not None
        for name in [f"{prefix}.{own}" if prefix else own]
    }


class FunctorchNorms:
    """torch.func: vmap over the gradient of one example's loss; fits almost every model.

    It holds the gradients of all examples of a batch in memory.
    """

    def __init__(self, model: ModelInTraining) -> None:
        self._model, self._shadow = model, model.shadow()

    def update(self) -> None:
        """Take the model's current parameters."""
        self._model.update(self._shadow)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch, both (batch,)."""
        model, shadow = self._model, self._shadow
        named = dict(shadow.named_parameters())
        trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
        fixed: dict[str, Tensor] = {n: p for n, p in named.items() if not p.requires_grad}
        fixed |= dict(shadow.named_buffers())
        names = _first_names(shadow)

        def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
            inputs, targets = (map_tensors(x, lambda t: t.unsqueeze(0)) for x in (example, target))

            def of_one(*args: Any, **kwargs: Any) -> Any:
                tensors = parameters | fixed
                tied = {name: tensors[first] for name, first in names.items()}
                return functional_call(shadow, tied, args, kwargs, tie_weights=False)

            return check_losses(model.loss_fn(call(of_one, inputs), targets), targets)[0]

        compute = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")
        with torch.enable_grad(), model.precision():
            gradients, losses = compute(trained, batch.inputs, batch.targets)
        squares = [self._squares(g, index) for index, g in enumerate(gradients.values())]
        return torch.stack(squares).sum(0).sqrt(), losses.detach()

    def _squares(self, gradients: Tensor, index: int) -> Tensor:
        """(batch,) squared norms of the gradients of one tensor of parameters, as clipped."""
        if self._model.transforms:
            centre, factor = self._model.transforms[index]
            gradients = (gradients - centre) * factor
        limit = self._model.limits[index] if self._model.limits else math.inf
        flat = gradients.reshape(len(gradients), -1).double()
        return flat.square().sum(1).clamp(max=limit**2)
