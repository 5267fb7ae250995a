"""Per-example gradient norms before clipping, of any model that has them. Sensitive."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule, GradSampleModuleNoOp
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from indpriv._facts import refused, text
from indpriv.errors import InputError
from indpriv.recording.norms import batches, model_checks
from indpriv.recording.norms.batches import FAULTS, Batch, LossFn, first_tensor
from indpriv.recording.norms.layerwise import GROUP_NORMS, LayerwiseNorms
from indpriv.recording.norms.shadow_model import ModelInTraining, without_checkpoints
from indpriv.recording.random_states import Still, has_drawn, kept_random_state, random_state

BACKENDS = ("layerwise", "functorch")  # in the order in which they are tried
_RANDOM, _MIXED = text("sentence.claim", "dropout"), text("sentence.claim", "mixed")
_MEMORY_SHARE = 4  # of the free memory, one part: training and other programs need the rest
_WORKSPACE = 3  # times the bytes that a forward pass keeps: gradients and patches add to them
_CACHE = 96 * 2**20  # bytes at once: on a CPU, larger batches leave its caches
_FEW, _MANY = 64, 32_768  # examples at once: with fewer, calls cost most; of more, no model gains
_ROOM = 2**29  # bytes at once on a CPU, at most
AT_ONCE = 1 << 24  # values of gradients that are held together where they are wanted themselves
_OUT_OF_MEMORY = ("out of memory", "allocate memory", "alloc_cpu")  # in PyTorch's messages
N_CHECKED = 8  # examples on which norms are compared
_TWICE = 2  # of these are differentiated again; the losses of all are computed again
_NEAR, _LAST_DIGITS = 4, 1e-6  # models near the one that is checked, and how far, relatively
# Each way to norms does the same float32 arithmetic in another order. Norms that are further apart
# than this belong to different gradients.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def norms_by_autograd(
    model: ModelInTraining, batch: Batch, shadow: nn.Module | None = None, *, apart: bool = True
) -> Tensor:
    """(batch,) float64 norms, one example at a time: slow, but others are checked by it.

    Of a shadow model, by default a new one; apart: each example passes forward on its own.
    """
    shadow = model.shadow() if shadow is None else shadow
    trainable = [p for p in shadow.parameters() if p.requires_grad]
    limits = model.limits or [math.inf] * len(trainable)
    norms = []
    with torch.enable_grad():
        together = model.losses(shadow, batch)  # a reduced loss passes as per-example on one
        for i in range(len(batch)):
            shadow.zero_grad()
            loss = model.losses(shadow, batch.rows(i, i + 1)).sum() if apart else together[i]
            if not loss.requires_grad:
                said = "losses have no gradient; leave out detach() and no_grad()"
                raise InputError(model_checks.hindrance(model.module, batch, ("early",)) or said)
            loss.backward(retain_graph=not apart)  # autograd.grad fails on reentrant checkpoints
            squares = [
                p.grad.double().square().sum().clamp(max=limit**2)
                for p, limit in zip(trainable, limits, strict=True)
                if p.grad is not None
            ]
            norms.append(torch.as_tensor(sum(squares) ** 0.5))
    return torch.stack(norms)


class AutogradCheck:
    """Norms of a few examples by autograd, with which others are compared."""

    def __init__(self, model: ModelInTraining, batch: Batch) -> None:
        """Differentiate the first examples of a batch one by one, some of them twice."""
        self.few, self._model, state = batch.rows(0, N_CHECKED), model, random_state()
        self._norms = norms_by_autograd(model, self.few)
        again = norms_by_autograd(model, self.few.rows(0, _TWICE))
        shadow = model.shadow()
        with torch.enable_grad():  # as in training: a counter may count such passes alone
            losses, others = (model.losses(shadow, self.few).detach() for _ in range(2))
        # Where the forward pass is random, norms cannot be compared. Few coins may come up alike.
        self.is_random = has_drawn(state) or not (
            torch.allclose(self._norms[:_TWICE], again, rtol=1e-6, equal_nan=True)
            and torch.allclose(losses, others, rtol=1e-6, equal_nan=True)
        )
        # Relative, of what rounding may cause.
        self.tolerance = math.inf if self.is_random else _TOLERANCE[model.compute_dtype]

    def explains(self, off: Tensor) -> bool:
        """Whether rounding explains how far norms (n,) are off, beyond the tolerance.

        So far autograd's own move at another size of a batch, or at parameters that differ in the
        last digits: where ReLUs open or close.
        """
        return bool((off <= 2 * self._moved).all())

    @cached_property
    def _moved(self) -> Tensor:
        model, others = self._model, [self._norms]
        with suppress(*FAULTS):
            others.append(norms_by_autograd(model, self.few, apart=False))
            for seed in range(_NEAR):
                near, generator = model.shadow(), torch.Generator().manual_seed(seed)
                for p in near.parameters():
                    noise = torch.randn(p.shape, generator=generator).to(p)
                    p.data = p.data * (1 + _LAST_DIGITS * noise)
                others.append(norms_by_autograd(model, self.few, near))
        return (torch.stack(others) - self._norms).abs().amax(0)

    def of(self, norms: Any, exact: Callable[[], object]) -> str:
        """How these norms of the few examples differ from autograd's; "" if they do not."""
        norms.update()
        # Another batch size first: a dimension whose length follows it is the batch.
        norms(self.few.repeated(len(self.few) + 1))
        return self.disagreement(norms(self.few)[0], exact)

    def disagreement(self, norms: Tensor, exact: Callable[[], object]) -> str:
        """How the norms of the first examples differ from autograd's; "" if they do not.

        exact: whether norms in float64 agree. Differences in float32 that rounding explains are
        then no others.
        """
        ours, expected = norms[: len(self._norms)], self._norms
        if self.is_random or torch.allclose(
            ours, expected, rtol=self.tolerance, atol=model_checks.TINY, equal_nan=True
        ):
            return ""
        off = (ours - expected).abs()
        if self.explains(off - self.tolerance * expected) and exact():
            return ""
        worst = int(off.argmax())
        values = {"example": worst, "norm": ours[worst], "alone": expected[worst]}
        return text("refusal.norms", "other_norm", **values)


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
        self._model, self.shadow = model, model.shadow()

    def update(self) -> None:
        """Take the model's current parameters."""
        self._model.update(self.shadow)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(norms float64, losses) of a batch, both (batch,)."""
        gradients, losses = self.gradients(batch)
        squares = [self._squares(g, index) for index, g in enumerate(gradients)]
        return torch.stack(squares).sum(0).sqrt(), losses

    def gradients(self, batch: Batch) -> tuple[list[Tensor], Tensor]:
        """Gradients of each trainable tensor of parameters, (batch, ...), and losses (batch,)."""
        model, shadow = self._model, self.shadow
        named = dict(shadow.named_parameters())
        trained = {name: p.detach() for name, p in named.items() if p.requires_grad}
        fixed: dict[str, Tensor] = {n: p for n, p in named.items() if not p.requires_grad}
        fixed |= dict(shadow.named_buffers())
        names = _first_names(shadow)

        def loss_of_one(parameters: dict[str, Tensor], example: Any, target: Any) -> Tensor:
            inputs, targets = batches.map_tensors((example, target), lambda t: t.unsqueeze(0))

            def of_one(*args: Any, **kwargs: Any) -> Any:
                tensors = parameters | fixed
                tied = {name: tensors[first] for name, first in names.items()}
                return functional_call(shadow, tied, args, kwargs, tie_weights=False)

            return batches.check_losses(
                model.loss_fn(batches.call(of_one, inputs), targets), targets
            )[0]

        compute = vmap(grad_and_value(loss_of_one), in_dims=(None, 0, 0), randomness="different")
        with torch.enable_grad(), model.precision(), without_checkpoints():
            gradients, losses = compute(trained, batch.inputs, batch.targets)
        return list(gradients.values()), losses.detach()

    def flat_gradients(self, batch: Batch) -> Tensor:
        """Gradients (batch, parameters) of all trainable parameters in one row each."""
        return torch.cat([g.flatten(1) for g in self.gradients(batch)[0]], dim=1)

    def _squares(self, gradients: Tensor, index: int) -> Tensor:
        """(batch,) squared norms of the gradients of one tensor of parameters, as clipped."""
        if self._model.transforms:
            centre, factor = self._model.transforms[index]
            gradients = (gradients - centre) * factor
        limit = self._model.limits[index] if self._model.limits else math.inf
        flat = gradients.reshape(len(gradients), -1).double()
        return flat.square().sum(1).clamp(max=limit**2)


Norms = LayerwiseNorms | FunctorchNorms


def per_example_gradient_norms(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto"
) -> Tensor:
    """Gradient norms of one batch, before clipping, over all trainable parameters together.

    Each call checks anew how norms are computed, on 8 examples, one at a time. In a loop, make one
    `NormPass` for all batches.

    Args:
        model: plain, or wrapped by Opacus; it is not changed.
        loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,), e.g.
            CrossEntropyLoss(reduction="none").
        inputs: inputs of the model; the first dimension is the batch.
        targets: targets of the loss; the first dimension is the batch.
        backend: "layerwise", "functorch", or "auto": the first of these that fits the model. Its
            norms are compared with autograd on 8 examples.

    Returns:
        (batch,) float64 norms. `NormPass.slack` is already added to them; it covers rounding, so
        that they are never below the true norms.

    Raises:
        InputError: per-example gradients do not exist (BatchNorm), or the loss is not per example.
    """
    if not len(first_tensor(inputs)):
        return torch.zeros(0, dtype=torch.float64)
    with NormPass(model, loss_fn, inputs, targets, backend=backend) as norm_pass:
        return norm_pass(inputs, targets)[0]


class NormPass(AbstractContextManager["NormPass"]):
    """Per-example gradient norms in a loop: of many batches of one model, which may be in training.

    The way to norms is chosen and checked once, when the pass is made. Each call computes the norms
    of one batch before clipping, over all trainable parameters together, at the model's current
    parameters. The model keeps its gradients, hooks, modes and buffers; only a random forward pass
    (dropout) draws from the generators that training uses. Under `torch.autocast`, construct it as
    training computes. Norms are as sensitive as the data.

    Attributes:
        backend: "layerwise" or "functorch".
        fallback: why the backend is not "layerwise" although "auto" was asked for; otherwise "".
        batch_size: largest number of examples worked on at once: what fits into a quarter of a
            GPU's free memory, and on a CPU about into its caches; halved whenever memory runs
            out. Norms do not depend on it beyond `slack`.
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
    >>> batch = torch.randn(32, 3), torch.randint(0, 2, (32,))
    >>> with NormPass(model, loss_fn, *batch) as norm_pass:
    ...     norms, losses = norm_pass(*batch)  # at the current parameters
    >>> norms.shape, norms.dtype, losses.shape, norm_pass.backend
    (torch.Size([32]), torch.float64, torch.Size([32]), 'layerwise')
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto"
    ) -> None:
        """Choose a backend and check it on some real examples.

        Arguments are those of `per_example_gradient_norms`, with at least one example.

        Raises:
            InputError: as `per_example_gradient_norms`.
        """
        if backend not in ("auto", *BACKENDS):
            raise refused("refusal.norms", "backend", backend=backend)
        self._model = ModelInTraining(model, loss_fn)
        model_checks.validate_module(self._model.module)
        self.slack, batch = self._model.slack, Batch(inputs, targets)
        with kept_random_state():
            self._model.check_writes(inputs)
        with kept_random_state():  # with the generators that were found
            model_checks.check_each_alone(self._model, batch)
            self._check = AutogradCheck(self._model, batch)
            self._exact = dict[str, NormPass | None]()  # by backend, where it was asked for
            self.fallback = self._choose(batch, BACKENDS if backend == "auto" else (backend,))
            self.batch_size = examples_at_once(self._bytes_of_one(batch), batch.device)
            self._check_many(batch)
        self.caveats = (_RANDOM,) if self._check.is_random else ()

    def _choose(self, batch: Batch, backends: Sequence[str]) -> str:
        """Take the first way that agrees with autograd, and return why it is not the first backend.

        Raises InputError if there is none.
        """
        ways: list[tuple[str, Any]] = [("layerwise", LayerwiseNorms), ("functorch", FunctorchNorms)]
        if _gains_by_channels_last(self._model.module, batch.inputs):
            ways.insert(0, ("layerwise", partial(LayerwiseNorms, channels_last=True)))
        reasons, few = dict[str, str](), self._check.few
        for name, make in ways:
            if name not in backends:
                continue
            self.backend = name
            try:
                self._norms: Norms | None = make(self._model)
                reasons[name] = self._check.of(self._norms, partial(self._in_float64, batch))
            except InputError:
                raise
            except FAULTS as error:
                where = model_checks.where_failed(error)
                reasons[name] = f"{where}{type(error).__name__}: {error}"
            if not reasons[name]:
                return next(iter(reasons.values()))
        name, reason = list(reasons.items())[-1]
        said = model_checks.hindrance(self._model.module, few) if len(reasons) > 1 else ""
        raise InputError(said or text("refusal.attached", "no_norms", reason=reason, name=name))

    def _check_many(self, batch: Batch) -> None:
        """Raise InputError if as many examples at once as later have other norms or losses."""
        many = batch.rows(0, self.batch_size)
        try:
            norms, losses = self(many.inputs, many.targets)
            with torch.no_grad():  # torch.func takes each example for itself, unlike training
                plain = self._model.losses(self._model.shadow(), many)
        except InputError:
            raise
        except FAULTS as error:
            raise refused("refusal.norms", "many", n=self.batch_size, error=error) from error
        exact = partial(self._in_float64, batch)
        difference = self._check.disagreement(norms / (1 + self.slack), exact)
        if not self._check.is_random and not torch.allclose(
            losses, plain, self._check.tolerance, self._check.tolerance, equal_nan=True
        ):
            difference = difference or ("" if exact() else _MIXED)
        if difference:
            raise InputError(difference)

    def _in_float64(self, batch: Batch) -> "NormPass | None":
        """The same pass in float64; None if it is refused, or if training is not in float32.

        Rounding varies with the size of a batch, and where it opens or closes a ReLU near 0, norms
        differ in float32 alone.
        """
        if self.backend not in self._exact:
            self._exact[self.backend] = None
            with suppress(*FAULTS):
                if self._model.compute_dtype is torch.float32:
                    made = self._model.shadow().double()
                    of_batch = self._model.loss_fn, *batches.as_real((batch.inputs, batch.targets))
                    one = NormPass(made, *of_batch, backend=self.backend)
                    self._exact[self.backend] = one
        return self._exact[self.backend]

    def _bytes_of_one(self, batch: Batch) -> int:
        """Bytes that one example takes while its norm is computed."""
        model, shadow = self._model, self._model.shadow()

        def saved(size: int) -> int:
            with torch.enable_grad(), without_checkpoints():
                return saved_bytes(partial(model.losses, shadow, batch.repeated(size)))

        needed = _WORKSPACE * (saved(2 * N_CHECKED) - saved(N_CHECKED)) // N_CHECKED
        if self.backend == "functorch":
            needed += 2 * model.n_parameters * torch.finfo(model.compute_dtype).bits // 8
        return max(1, needed)

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Norms and losses of a batch at the model's current parameters.

        Returns:
            norms (batch,) float64 with `slack` added, and losses (batch,).

        Raises:
            InputError: not even one example fits into memory; other parameters are trainable than
                before; or the pass was closed.
        """
        if self._norms is None:
            raise InputError("this NormPass was closed; make a new one")
        self._norms.update()
        batch = Batch(inputs, targets)
        if not len(batch):
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0)
        parts: list[tuple[Tensor, Tensor]] = []
        done = 0
        while done < len(batch):
            n_batches = -(-(len(batch) - done) // self.batch_size)
            stop = done + -(-(len(batch) - done) // n_batches)
            try:
                parts.append(self._norms(batch.rows(done, stop)))
            except RuntimeError as error:
                of_memory = any(words in str(error) for words in _OUT_OF_MEMORY)  # of the machine
                if not (of_memory or isinstance(error, torch.OutOfMemoryError)):  # of a GPU
                    raise
                if stop - done == 1:
                    raise refused("refusal.norms", "no_memory") from error
                self.batch_size = (stop - done) // 2
                continue
            done = stop
        norms, losses = (torch.cat(side) for side in zip(*parts, strict=True))
        return norms * (1 + self.slack), losses

    def clip_each(
        self, limits: Sequence[float] = (), transforms: Sequence[tuple[Tensor, Tensor]] = ()
    ) -> None:
        """From now on, give norms of what clipping each tensor of parameters leaves.

        Args:
            limits: clipping norm of each trainable one, in the order of `model.parameters()`.
            transforms: (centre, factor) of each; norms are those of (gradient - centre) * factor.
                Only the backend "functorch" has gradients to transform.
        """
        if transforms and self.backend != "functorch":
            raise InputError(f"the backend {self.backend} has no gradients to transform")
        self._model.limits, self._model.transforms = limits, transforms

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

    def held_still(self) -> list[float]:
        """Losses of few examples, and how long their gradient is, without randomness, if known."""
        with suppress(*FAULTS), kept_random_state(), torch.enable_grad(), Still():
            losses = self._model.losses(shadow := self._model.shadow(), self._check.few)
            losses.sum().backward()
            given = [p.grad.double().norm() for p in shadow.parameters() if p.grad is not None]
            found = [*losses.tolist(), math.hypot(*given)]
            return found if all(map(math.isfinite, found)) else []
        return []

    def check_training(self, model: nn.Module, views: int = 1) -> None:
        """Compare the norms that Opacus clips by in training with these, on a few examples.

        Opacus has its own formula for each kind of layer. InputError if one is wrong: an example
        would contribute something else to a step than its recorded norm says.
        """
        if not isinstance(model, AbstractGradSampleModule) or isinstance(
            model, GradSampleModuleNoOp
        ):  # with the latter, the loop computes gradients itself
            return
        with kept_random_state():
            model_checks.check_opacus_norms(model, self._check.few, self._expected(), views)
        self._exact.clear()

    def _expected(self) -> Iterator[model_checks.Expected]:
        """What training's norms are compared with; where they differ, in float64, too."""
        one: NormPass | None = self
        while one is not None:
            check, few = one._check, one._check.few
            ours = one(few.inputs, few.targets)[0] / (1 + one.slack)
            yield one._model, few, ours, check
            one = self._in_float64(few) if one is self else None

    def close(self) -> None:
        """Release the shadow models; no norms can be computed afterwards."""
        self._norms = None

    def __exit__(self, *error: object) -> None:
        self.close()


def _gains_by_channels_last(module: nn.Module, inputs: Any) -> bool:
    """Whether PyTorch is faster on (batch, channels, height, width) with channels last in memory.

    It is on most layers, but not on group norms, nor are ours.
    """
    parts = list(module.modules())
    return (
        isinstance(inputs, Tensor)
        and inputs.ndim == 4
        and any(isinstance(part, nn.Conv2d) for part in parts)
        and not any(isinstance(part, GROUP_NORMS) for part in parts)
    )


def examples_at_once(bytes_of_one: int, device: torch.device) -> int:
    """How many examples to work on at once, at least one, if each takes so many bytes.

    On a GPU they fit into a quarter of the free memory, on a CPU about into its caches.
    """
    if device.type == "cuda":
        fit = torch.cuda.mem_get_info(device)[0] // _MEMORY_SHARE // bytes_of_one
    else:
        fit = max(_CACHE // bytes_of_one, min(_FEW, _ROOM // bytes_of_one))
    return max(1, min(_MANY, fit))


def saved_bytes(forward: Callable[[], Tensor]) -> int:
    """Bytes that a forward pass keeps for its backward pass, parameters included."""
    kept: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return value

    with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
        forward()
    return sum(kept.values())
