"""Per-example gradient norms before clipping, by the fastest exact backend that fits the model. Sensitive.

The norms are taken on a twin of the model that shares its parameters, so that the model in training keeps its hooks,
gradients and modes untouched.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import GradSampleModuleFastGradientClipping
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.micro_batches import (
    best_seconds,
    fastest,
    fastest_size,
    is_out_of_memory,
    largest_that_fits,
    saved_bytes,
)
from indpriv.recording.model_checks import check_padding, validate_module
from indpriv.recording.norm_backends import (
    BACKENDS,
    Backend,
    LossFn,
    check_losses,
    first_tensor,
    map_tensors,
    training_backend,
)

_PROBE = 8  # examples that every backend is checked on, one by one
_MANY = 256  # so many examples stand for a whole data set; batches larger than that are then tried as well
_LARGEST = 4096  # examples at once: no model gains by more
_COMPARED = 64  # examples on which both orders of images in memory are timed
_WORKSPACE = 3  # times what the backward pass keeps: gradients and the patches of convolutions come on top
# Backends and the reference run the same float32 arithmetic in another order; anything further apart is another gradient.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_UNFIT = (NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError, KeyError)  # of a model's kind
_KEEP_GRADIENTS = ("hooks", "functorch")  # backends that hold every example's gradient


def per_example_gradient_norms(
    model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto"
) -> Tensor:
    """Gradient norms of a batch, before clipping, of all trainable parameters together.

    Args:
        model: plain, or wrapped by Opacus; it is left as it was.
        loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,), e.g. CrossEntropyLoss(reduction="none").
        inputs: what the model takes, first dimension the batch.
        targets: what the loss takes, first dimension the batch.
        backend: "layerwise" (ours), "ghost", "hooks" (Opacus's), "functorch", or "auto": the fastest that fits, checked
            one example at a time.

    Returns:
        (batch,) float64 norms, never below the true ones by more than `NormPass.slack` (which is already added).

    Raises:
        InputError: a model whose per-example gradients do not exist (BatchNorm), or a loss that is not per example.
    """
    if not len(first_tensor(inputs)):
        return torch.zeros(0, dtype=torch.float64)
    with NormPass(model, loss_fn, inputs, targets, backend=backend) as norm_pass:
        return norm_pass(inputs, targets)[0]


class NormPass:
    """Norms of many batches of one model in training; follows the model's parameters as they change.

    Where it is made under `torch.autocast`, every call runs under that, wherever it is called: make it as training computes.

    Attributes:
        backend: what takes the norms.
        fallback: why it is not "layerwise" where "auto" might have been; otherwise empty.
        batch_size: examples worked on at once: the fastest size found that fits into a quarter of the free memory; halved
            where memory runs out after all. Norms do not depend on it beyond `slack`.
        slack: relative amount added to every norm, eps (40 + 4 sqrt(parameters)): above the errors measured where positions
            cancel and where float32 sums are long. float32: 5e-6 for small models, 1.5e-3 for 10^7 parameters. Parameters
            in half precision, or autocast to it: sums are float32 all the same, and 4 eps of the half precision are added
            (bfloat16: 3.1e-2), since training rounds there what this pass may round otherwise.
        caveats: reasons why these norms make an account an estimate.
    """

    def __init__(self, model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto") -> None:
        """Choose and check a backend on some examples.

        Args:
            model: plain, or wrapped by Opacus.
            loss_fn: per-example losses, see per_example_gradient_norms.
            inputs: some real examples.
            targets: their targets.
            backend: a name, or "auto".
        """
        self._closed = False
        self._source = standard_module(model)
        self._loss_fn = loss_fn
        validate_module(self._source)
        self._trainable = _trainable_names(self._source)
        if not self._trainable:
            raise InputError("the model has no trainable parameter; there is no gradient to record")
        dtype = next(p.dtype for p in self._source.parameters() if p.requires_grad)
        device = next(self._source.parameters()).device.type
        autocast = torch.is_autocast_enabled(device)
        # The cast weights are not cached: they would outlive a step of training inside the user's own context.
        self._precision = torch.autocast(
            device, dtype=torch.get_autocast_dtype(device), enabled=autocast, cache_enabled=False
        )
        self._compute_dtype = torch.get_autocast_dtype(device) if autocast else dtype
        self._parameters = sum(p.numel() for p in self._source.parameters() if p.requires_grad)
        self.slack = _slack(dtype, self._compute_dtype, self._parameters)
        with kept_random_state():
            few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
            self._expected = self._one_by_one(*few)
            self.caveats = self._stochastic_caveats(*few)
            best = self._choose(backend, inputs, targets)
        self.backend, self._twin, self._norms = best.name, best.twin, best.norms
        self.fallback = best.reason
        self.batch_size, self._channels_last = best.batch_size, best.channels_last

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """(norms, losses) of a batch at the model's current parameters, both (batch,); slack is added to the norms.

        Raises:
            InputError: not even one example fits into memory; or the pass was closed.
        """
        if self._closed:
            raise InputError("this NormPass was closed; make a new one")
        self._follow(self._twin, channels_last=self._channels_last)
        size, done = len(first_tensor(targets)), 0
        parts: list[tuple[Tensor, Tensor]] = []
        while done < size or not parts:
            pieces = -(-(size - done) // self.batch_size)
            stop = done + -(-(size - done) // max(1, pieces))  # even pieces
            try:
                parts.append(self._piece(_rows(inputs, done, stop), _rows(targets, done, stop)))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if stop - done == 1:
                    raise InputError(
                        "the gradient norm of one example does not fit into memory; free some, or record on a larger device"
                    ) from error
                self.batch_size = (stop - done) // 2
                continue
            done = stop
        norms, losses = (torch.cat(side) for side in zip(*parts, strict=True))
        return norms * (1 + self.slack), losses

    def _piece(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        inputs = map_tensors(inputs, _to_channels_last) if self._channels_last else inputs
        return self._run(self._norms, inputs, targets)

    def _run(self, norms: Backend, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), self._precision, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # of Opacus's hooks on a first layer
            return norms(inputs, targets)

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """A twin of the model in eval mode at its current parameters."""
        twin = self._make_twin().eval()
        self._follow(twin, modes=False)
        with torch.no_grad(), self._precision:
            yield twin

    def check_training(self, model: nn.Module, inputs: Any, targets: Any) -> None:
        """Hold the norms that Opacus clips by in training against these, on a few examples.

        Opacus has formulas of its own for each kind of layer. Where one is not the gradient, an example contributes
        something else to a step than the norm that is recorded of it, and perhaps more.

        Args:
            model: as PrivacyEngine.make_private returned it; it is left as it was.
            inputs: some real examples.
            targets: their targets.

        Raises:
            InputError: Opacus takes other gradients, or in ghost mode too small norms.
        """
        if self.caveats or not isinstance(model, AbstractGradSampleModule):
            return
        check_padding(model, self._source)
        inputs, targets = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
        twin = self._make_twin()
        self._follow(twin)
        with kept_random_state():
            try:
                theirs = self._run(training_backend(model, twin, self._loss_fn), inputs, targets)[0]
            except _UNFIT as error:
                raise InputError(
                    f"Opacus cannot take per-example gradients of this model as it is wrapped ({type(error).__name__}: "
                    f'{error}); train with grad_sample_mode="functorch"'
                ) from error
            ours = self(inputs, targets)[0] / (1 + self.slack)
        tolerance = _AGREEMENT[self._compute_dtype]
        wrong = theirs < ours * (1 - tolerance) - 1e-12
        if not isinstance(model, GradSampleModuleFastGradientClipping):  # there, too large a norm only clips too much
            wrong |= theirs > ours * (1 + tolerance) + 1e-12
        if bool(wrong.any()):
            i = int(wrong.int().argmax())
            raise InputError(
                f"Opacus takes other per-example gradients of this model than autograd: in training example {i} would have "
                f'norm {float(theirs[i]):.6g}, by autograd it has {float(ours[i]):.6g}; train with grad_sample_mode="functorch"'
            )

    def close(self) -> None:
        """Let go of the twin."""
        self._closed = True
        self._norms.close()

    def __enter__(self) -> NormPass:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_twin(self) -> nn.Module:
        """A copy in the modes that training uses: the model's own, or train() where it is still in eval()."""
        with without_hooks(self._source):
            twin = copy.deepcopy(self._source)
        return twin if twin.training else twin.train()

    def _follow(self, twin: nn.Module, *, modes: bool = True, channels_last: bool = False) -> None:
        names = _trainable_names(self._source)
        if names != self._trainable:
            changed = sorted(names ^ self._trainable)
            raise InputError(
                f"the trainable parameters changed during recording ({', '.join(changed[:5])}); norms before and after "
                "are of different gradients: freeze or add parameters before attaching"
            )
        for mine, theirs in zip(twin.parameters(), self._source.parameters(), strict=True):
            mine.data = _to_channels_last(theirs.data) if channels_last else theirs.data
        for copied, buffer in zip(twin.buffers(), self._source.buffers(), strict=True):
            copied.data = buffer.data
        if modes and self._source.training:
            for module, original in zip(twin.modules(), self._source.modules(), strict=False):
                module.training = original.training

    def _one_by_one(self, inputs: Any, targets: Any) -> Tensor:
        """Norms one example at a time by autograd: slow and obvious."""
        twin = self._make_twin()
        self._follow(twin)
        trainable = [p for p in twin.parameters() if p.requires_grad]
        norms = []
        with torch.enable_grad():
            with self._precision:
                check_losses(self._loss_fn(twin(inputs), targets), targets)
            for i in range(len(first_tensor(inputs))):
                example, target = _rows(inputs, i, i + 1), _rows(targets, i, i + 1)
                with self._precision:
                    loss = check_losses(self._loss_fn(twin(example), target), target).sum()
                gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
                norms.append(sum(g.double().square().sum() for g in gradients if g is not None) ** 0.5)
        return torch.stack([torch.as_tensor(norm) for norm in norms])

    def _stochastic_caveats(self, inputs: Any, targets: Any) -> tuple[str, ...]:
        if torch.allclose(self._expected, self._one_by_one(inputs, targets), rtol=1e-6, equal_nan=True):
            return ()
        return ("the model's forward pass is random (dropout?): the norms are of another draw than the one trained on",)

    def _choose(self, backend: str, inputs: Any, targets: Any) -> _Candidate:
        if backend not in ("auto", *BACKENDS):
            raise InputError(
                f"backend={backend!r} is not known; choose one of 'auto', {', '.join(map(repr, BACKENDS))}"
            )
        if backend == "auto":  # ours is the fastest where it fits; among Opacus's modes that depends on the model
            candidates = [self._try("layerwise", inputs, targets)]
            if candidates[0].norms is None:
                candidates += [self._try(name, inputs, targets) for name in BACKENDS if name != "layerwise"]
        else:
            candidates = [self._try(backend, inputs, targets)]
        working = [candidate for candidate in candidates if candidate.norms is not None]
        if not working:
            reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in candidates)
            raise InputError(f"no backend takes this model's per-example gradient norms ({reasons})")
        best = min(working, key=lambda candidate: candidate.seconds)
        for candidate in working:
            if candidate is not best:
                candidate.norms.close()
        best.reason = candidates[0].reason
        return best

    def _try(self, name: str, inputs: Any, targets: Any) -> _Candidate:
        candidate = _Candidate(name, self._make_twin())
        try:
            norms = BACKENDS[name](candidate.twin, self._loss_fn)
            self._follow(candidate.twin)
            few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
            # Another size first: a dimension that is the batch follows it, one that has its length by chance does not.
            self._run(norms, *(_repeated(side, len(first_tensor(few[1])) + 1) for side in few))
            candidate.reason = self._disagreement(self._run(norms, *few)[0])
            if not candidate.reason:
                candidate.norms = norms
                self._pace(candidate, inputs, targets)
            if candidate.reason:
                candidate.norms = None
        except InputError:
            raise
        except _UNFIT as error:
            candidate.norms, candidate.reason = None, f"{type(error).__name__}: {error}"
        return candidate

    def _pace(self, candidate: _Candidate, inputs: Any, targets: Any) -> None:
        """Find the batch size, and the order of images in memory, that a backend is fastest with."""
        available = len(first_tensor(targets))
        bytes_per_example = _WORKSPACE * self._bytes_per_example(inputs, targets)
        if candidate.name in _KEEP_GRADIENTS:
            bytes_per_example += 2 * self._parameters * torch.finfo(self._compute_dtype).bits // 8
        device = first_tensor(targets).device
        at_most = _LARGEST if available >= _MANY else available
        largest = largest_that_fits(bytes_per_example, device, at_most=at_most)
        candidate.batch_size = largest

        def batch(size: int) -> tuple[Any, Any]:
            return _repeated(inputs, size), _repeated(targets, size)

        def trial(size: int, channels_last: bool) -> Callable[[], object]:
            return partial(self._trial, candidate, *batch(size), channels_last)

        few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
        size = min(largest, _COMPARED)
        if _has_images(self._source, inputs) and self._takes_channels_last(candidate, *few):
            candidate.channels_last = bool(fastest([trial(size, False), trial(size, True)], device))
        if largest > _PROBE:
            candidate.batch_size, candidate.seconds = fastest_size(
                lambda size: best_seconds(trial(size, candidate.channels_last), device), largest
            )
            # The forms of layers are chosen by the size of the batch: check those that will be used.
            norms = self._trial(candidate, *batch(candidate.batch_size), candidate.channels_last)
            candidate.reason = self._disagreement(norms[:_PROBE])

    def _trial(self, candidate: _Candidate, inputs: Any, targets: Any, channels_last: bool) -> Tensor:
        self._follow(candidate.twin, channels_last=channels_last)
        images = map_tensors(inputs, _to_channels_last) if channels_last else inputs
        return self._run(candidate.norms, images, targets)[0]

    def _takes_channels_last(self, candidate: _Candidate, inputs: Any, targets: Any) -> bool:
        """Opacus's hooks of convolutions give other norms there, and a model may view images in another shape."""
        try:
            norms = self._trial(candidate, inputs, targets, True)
        except RuntimeError:
            return False
        return not self._disagreement(norms)

    def _bytes_per_example(self, inputs: Any, targets: Any) -> int:
        """What the backward pass keeps of one example."""
        twin = self._make_twin()
        self._follow(twin)

        def of(size: int) -> int:
            batch = tuple(_repeated(side, size) for side in (inputs, targets))
            with torch.enable_grad(), self._precision:
                return saved_bytes(lambda: self._loss_fn(twin(batch[0]), batch[1]))

        return max(1, (of(2 * _PROBE) - of(_PROBE)) // _PROBE)

    def _disagreement(self, norms: Tensor) -> str:
        """How the norms of the first examples differ from those taken one by one; empty where they do not."""
        expected = self._expected
        if self.caveats or torch.allclose(
            norms, expected, rtol=_AGREEMENT[self._compute_dtype], atol=1e-12, equal_nan=True
        ):
            return ""
        worst = int((norms - expected).abs().argmax())
        return (
            f"example {worst} has norm {norms[worst]:.6g} within its batch and {expected[worst]:.6g} on its own; does "
            "the model or the loss mix examples?"
        )


@dataclass
class _Candidate:
    name: str
    twin: nn.Module
    norms: Any = None
    seconds: float = 0.0  # per example; 0 where there are too few to time
    batch_size: int = 1
    channels_last: bool = False
    reason: str = ""


def _slack(dtype: torch.dtype, compute_dtype: torch.dtype, parameters: int) -> float:
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    half = torch.finfo(compute_dtype).eps if compute_dtype in (torch.float16, torch.bfloat16) else 0.0
    return torch.finfo(wide).eps * (40 + 4 * parameters**0.5) + 4 * half


def standard_module(model: nn.Module) -> nn.Module:
    """The user's own module inside any Opacus wrapper."""
    inner: nn.Module = model
    while True:
        if isinstance(inner, AbstractGradSampleModule):
            inner = inner._module
        elif isinstance(inner, DifferentiallyPrivateDistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "OptimizedModule":  # of torch.compile, whose own module is slow to import
            inner = inner._orig_mod  # type: ignore[assignment]
        else:
            return inner


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Leave torch's random generators as they were, so that recording does not change training."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices=devices):
        yield


@contextmanager
def without_hooks(module: nn.Module) -> Iterator[None]:
    """Run with Opacus's per-example hooks taken off a module, and put them back."""
    hooked = [m for m in module.modules() if m._forward_hooks or m._backward_hooks]
    kept = [(m, m._forward_hooks, m._backward_hooks, m._backward_pre_hooks) for m in hooked]
    handles = module.__dict__.pop("autograd_grad_sample_hooks", None)
    try:
        for m, forward, backward, pre in kept:
            m._forward_hooks = _plain_hooks(forward)
            m._backward_hooks = _plain_hooks(backward)
            m._backward_pre_hooks = _plain_hooks(pre)
        yield
    finally:
        for m, forward, backward, pre in kept:
            m._forward_hooks, m._backward_hooks, m._backward_pre_hooks = forward, backward, pre
        if handles is not None:
            module.autograd_grad_sample_hooks = handles


def _plain_hooks(hooks: Any) -> Any:
    return type(hooks)((key, hook) for key, hook in hooks.items() if not _is_opacus(hook))


def _is_opacus(hook: Any) -> bool:
    function = getattr(hook, "func", hook)  # Opacus wraps its backward hook in functools.partial
    owner = getattr(function, "__self__", None)
    return type(owner).__module__.startswith("opacus.")


def _trainable_names(module: nn.Module) -> frozenset[str]:
    return frozenset(name for name, parameter in module.named_parameters() if parameter.requires_grad)


def _has_images(module: nn.Module, inputs: Any) -> bool:
    """Whether the order of (batch, channels, height, width) in memory could matter."""
    return isinstance(inputs, Tensor) and inputs.ndim == 4 and any(isinstance(m, nn.Conv2d) for m in module.modules())


def _to_channels_last(value: Tensor) -> Tensor:
    """The same values with channels last in memory, where there are four dimensions."""
    if value.ndim != 4:
        return value
    channels, height, width = value.shape[1:]
    if channels == 1:  # the values lie in both orders; only the strides say which
        return value.contiguous().as_strided(value.shape, (height * width, 1, width, 1))
    return value.contiguous(memory_format=torch.channels_last)


def _repeated(value: Any, size: int) -> Any:
    """The first `size` rows, from the start again where there are fewer."""
    return map_tensors(value, lambda tensor: tensor[torch.arange(size, device=tensor.device) % len(tensor)])


def _rows(value: Any, start: int, stop: int) -> Any:
    return map_tensors(value, lambda tensor: tensor[start:stop])
