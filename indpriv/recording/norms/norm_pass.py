"""Per-example gradient norms before clipping, by the fastest exact backend that fits the model. Sensitive.

The norms are taken on a twin of the model that shares its parameters, so that the model in training keeps its hooks,
gradients and modes untouched.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from opacus.grad_sample import AbstractGradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from torch import Tensor, nn

from indpriv.errors import InputError
from indpriv.recording.norms.autotune import (
    best_seconds,
    fastest,
    fastest_size,
    is_out_of_memory,
    largest_that_fits,
    saved_bytes,
)
from indpriv.recording.norms.backends import (
    BACKENDS,
    Backend,
    Layerwise,
    LossFn,
    check_losses,
    first_tensor,
    map_tensors,
    training_backend,
)
from indpriv.recording.norms.model_checks import check_padding, validate_module
from indpriv.recording.norms.shadow_model import (
    follow,
    make_twin,
    standard_module,
    to_channels_last,
    trainable_names,
)
from indpriv.recording.random_states import kept_random_state
from indpriv.recording.threads import side_by_side

_PROBE = 8  # examples that every backend is checked on, one by one
_MANY = 256  # so many examples stand for a whole data set; batches larger than that are then tried as well
_LARGEST = 32_768  # examples at once: no model gains by more
_COMPARED = 64  # examples on which both orders of images in memory are timed
_THREADS = 8  # at once; with more cores each has several, since Python itself runs in one of them at a time
_MARGIN = (
    0.15  # threads that wait for each other less often suffer less where other programs run besides
)
_WORKSPACE = (
    3  # times what the backward pass keeps: gradients and the patches of convolutions come on top
)
# Backends and the reference run the same float32 arithmetic in another order; anything further apart is another gradient.
_AGREEMENT = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
_UNFIT = (
    NotImplementedError,
    RuntimeError,
    ValueError,
    AttributeError,
    TypeError,
    KeyError,
)  # of a model's kind
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
        threads: among which they are divided, each with its share of PyTorch's threads and with copies of model and loss:
            several on a CPU, with the layerwise backend, where that is not slower and gives the same norms.
        slack: relative amount added to every norm, eps (40 + 4 sqrt(parameters)): above the errors measured where positions
            cancel and where float32 sums are long. float32: 5e-6 for small models, 1.5e-3 for 10^7 parameters. Parameters
            in half precision, or autocast to it: sums are float32 all the same, and 4 eps of the half precision are added
            (bfloat16: 3.1e-2), since training rounds there what this pass may round otherwise.
        caveats: reasons why these norms make an account an estimate.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFn, inputs: Any, targets: Any, *, backend: str = "auto"
    ) -> None:
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
        self._trainable = trainable_names(self._source)
        if not self._trainable:
            raise InputError("the model has no trainable parameter; there is no gradient to record")
        dtype = next(p.dtype for p in self._source.parameters() if p.requires_grad)
        device = next(self._source.parameters()).device.type
        autocast = torch.is_autocast_enabled(device)
        # The cast weights are not cached: they would outlive a step of training inside the user's own context.
        self._precision = partial(
            torch.autocast,
            device,
            dtype=torch.get_autocast_dtype(device),
            enabled=autocast,
            cache_enabled=False,
        )
        self._compute_dtype = torch.get_autocast_dtype(device) if autocast else dtype
        self._parameters = sum(p.numel() for p in self._source.parameters() if p.requires_grad)
        self.slack = _slack(dtype, self._compute_dtype, self._parameters)
        with kept_random_state():
            few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
            self._expected = self._one_by_one(*few)
            self.caveats = self._stochastic_caveats(*few)
            self._chosen = self._choose(backend, inputs, targets)
        self.backend, self.fallback = self._chosen.name, self._chosen.reason
        self.batch_size = self._chosen.batch_size

    def __call__(self, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """(norms, losses) of a batch at the model's current parameters, both (batch,); slack is added to the norms.

        Raises:
            InputError: not even one example fits into memory; or the pass was closed.
        """
        if self._closed:
            raise InputError("this NormPass was closed; make a new one")
        self._move(self._chosen)
        size, done = len(first_tensor(targets)), 0
        parts: list[tuple[Tensor, Tensor]] = []
        if not size:
            return torch.zeros(0, dtype=torch.float64), torch.zeros(0)
        while done < size:
            pieces = -(-(size - done) // self.batch_size)
            stop = done + -(-(size - done) // pieces)  # even pieces
            try:
                parts.append(
                    self._at_once(
                        self._chosen, _rows(inputs, done, stop), _rows(targets, done, stop)
                    )
                )
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

    def _move(self, candidate: _Candidate) -> None:
        """Bring a candidate to the model's current parameters."""
        for twin, _ in candidate.pairs:
            self._follow(twin, channels_last=candidate.channels_last)

    def _at_once(self, candidate: _Candidate, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Norms and losses of examples that memory holds at once, in even parts for the candidate's threads."""
        inputs = map_tensors(inputs, to_channels_last) if candidate.channels_last else inputs
        size = len(first_tensor(targets))
        pairs = candidate.pairs[:size]
        bounds = [size * i // len(pairs) for i in range(len(pairs) + 1)]
        parts = [
            partial(self._run, norms, _rows(inputs, start, stop), _rows(targets, start, stop))
            for (_, norms), start, stop in zip(pairs, bounds, bounds[1:], strict=False)
        ]
        norms, losses = zip(*side_by_side(parts), strict=True)
        return torch.cat(norms), torch.cat(losses)

    def _run(self, norms: Backend, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        with torch.enable_grad(), self._precision():
            return norms(inputs, targets)

    @property
    def threads(self) -> int:
        """Among how many the examples of a batch are divided."""
        return len(self._chosen.pairs)

    @contextmanager
    def evaluation(self) -> Iterator[nn.Module]:
        """A twin of the model in eval mode at its current parameters."""
        twin = make_twin(self._source).eval()
        self._follow(twin, modes=False)
        with torch.no_grad(), self._precision():
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
        twin = make_twin(self._source)
        with kept_random_state():
            try:
                trained = _Candidate("", ((twin, training_backend(model, twin, self._loss_fn)),))
                theirs = self._trial(trained, inputs, targets)
            except _UNFIT as error:
                raise InputError(
                    f"Opacus cannot take per-example gradients of this model as it is wrapped ({type(error).__name__}: "
                    f'{error}); train with grad_sample_mode="functorch"'
                ) from error
            ours = self(inputs, targets)[0] / (1 + self.slack)
        tolerance = _AGREEMENT[self._compute_dtype]
        wrong = theirs < ours * (1 - tolerance) - 1e-12
        if not isinstance(
            model, GradSampleModuleFastGradientClipping
        ):  # there, too large a norm only clips too much
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
        self._chosen.close()

    def __enter__(self) -> NormPass:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _follow(self, twin: nn.Module, *, modes: bool = True, channels_last: bool = False) -> None:
        names = trainable_names(self._source)
        if names != self._trainable:
            changed = sorted(names ^ self._trainable)
            raise InputError(
                f"the trainable parameters changed during recording ({', '.join(changed[:5])}); norms before and after "
                "are of different gradients: freeze or add parameters before attaching"
            )
        follow(twin, self._source, modes=modes, channels_last=channels_last)

    def _one_by_one(self, inputs: Any, targets: Any) -> Tensor:
        """Norms one example at a time by autograd: slow and obvious."""
        twin = make_twin(self._source)
        self._follow(twin)
        trainable = [p for p in twin.parameters() if p.requires_grad]
        norms = []
        with torch.enable_grad():
            with self._precision():
                check_losses(self._loss_fn(twin(inputs), targets), targets)
            for i in range(len(first_tensor(inputs))):
                example, target = _rows(inputs, i, i + 1), _rows(targets, i, i + 1)
                with self._precision():
                    loss = check_losses(self._loss_fn(twin(example), target), target).sum()
                gradients = torch.autograd.grad(loss, trainable, allow_unused=True)
                norms.append(
                    sum(g.double().square().sum() for g in gradients if g is not None) ** 0.5
                )
        return torch.stack([torch.as_tensor(norm) for norm in norms])

    def _stochastic_caveats(self, inputs: Any, targets: Any) -> tuple[str, ...]:
        if torch.allclose(
            self._expected, self._one_by_one(inputs, targets), rtol=1e-6, equal_nan=True
        ):
            return ()
        return (
            "the model's forward pass is random (dropout?): the norms are of another draw than the one trained on",
        )

    def _choose(self, backend: str, inputs: Any, targets: Any) -> _Candidate:
        if backend not in ("auto", *BACKENDS):
            raise InputError(
                f"backend={backend!r} is not known; choose one of 'auto', {', '.join(map(repr, BACKENDS))}"
            )
        if (
            backend == "auto"
        ):  # ours is the fastest where it fits; among Opacus's modes that depends on the model
            candidates = [self._try("layerwise", inputs, targets)]
            if candidates[0].reason:
                candidates += [
                    self._try(name, inputs, targets) for name in BACKENDS if name != "layerwise"
                ]
        else:
            candidates = [self._try(backend, inputs, targets)]
        working = [candidate for candidate in candidates if not candidate.reason]
        if not working:
            reasons = "; ".join(f"{candidate.name}: {candidate.reason}" for candidate in candidates)
            raise InputError(
                f"no backend takes this model's per-example gradient norms ({reasons})"
            )
        best = min(working, key=lambda candidate: candidate.seconds)
        for candidate in working:
            if candidate is not best:
                candidate.close()
        best.reason = candidates[0].reason
        return best

    def _try(self, name: str, inputs: Any, targets: Any) -> _Candidate:
        candidate = _Candidate(name)
        try:
            twin = make_twin(self._source)
            candidate.pairs = ((twin, BACKENDS[name](twin, self._loss_fn)),)
            candidate.reason = self._probe(candidate, inputs, targets)
            if not candidate.reason:
                self._pace(candidate, inputs, targets)
        except InputError:
            raise
        except _UNFIT as error:
            candidate.reason = f"{type(error).__name__}: {error}"
        if candidate.reason:
            candidate.close()
        return candidate

    def _probe(self, candidate: _Candidate, inputs: Any, targets: Any) -> str:
        """How the norms of a few examples differ from those taken one by one; empty where they do not."""
        few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
        # Another size first: a dimension that is the batch follows it, one that has its length by chance does not.
        self._trial(candidate, *(_repeated(side, len(first_tensor(few[1])) + 1) for side in few))
        return self._disagreement(self._trial(candidate, *few))

    def _pace(self, candidate: _Candidate, inputs: Any, targets: Any) -> None:
        """Find the batch size, the order of images in memory and the threads that a backend is fastest with."""
        available = len(first_tensor(targets))
        bytes_per_example = _WORKSPACE * self._bytes_per_example(inputs, targets)
        if candidate.name in _KEEP_GRADIENTS:
            bytes_per_example += 2 * self._parameters * torch.finfo(self._compute_dtype).bits // 8
        device = first_tensor(targets).device
        at_most = _LARGEST if available >= _MANY else available
        largest = largest_that_fits(bytes_per_example, device, at_most=at_most)
        candidate.batch_size = largest
        if largest <= _PROBE:
            return

        def trial(way: _Candidate, size: int) -> Callable[[], Tensor]:
            return partial(self._trial, way, _repeated(inputs, size), _repeated(targets, size))

        if (
            device.type == "cpu" and not self.caveats
        ):  # random numbers would come in another order each time
            candidate.pairs = *candidate.pairs, *self._more_threads(candidate, inputs, targets)
        few = _rows(inputs, 0, _PROBE), _rows(targets, 0, _PROBE)
        turned = replace(candidate, channels_last=True)
        if _has_images(self._source, inputs) and self._takes_channels_last(turned, *few):
            ways = [trial(way, min(largest, _COMPARED)) for way in (candidate, turned)]
            candidate.channels_last = bool(fastest(ways, device))

        def find_size() -> None:
            candidate.batch_size, candidate.seconds = fastest_size(
                lambda size: best_seconds(trial(candidate, size), device), largest
            )

        find_size()
        if len(candidate.pairs) > 1:
            alone = replace(candidate, pairs=candidate.pairs[:1])
            if not self._threads_help(
                *(trial(way, candidate.batch_size) for way in (candidate, alone))
            ):
                candidate.pairs = alone.pairs
                find_size()
        # The forms of layers are chosen by the size of the batch: check those that will be used.
        candidate.reason = self._disagreement(trial(candidate, candidate.batch_size)()[:_PROBE])

    def _more_threads(self, candidate: _Candidate, inputs: Any, targets: Any) -> tuple[_Pair, ...]:
        """Twins for threads that take norms beside the first; none where backend, model or loss are not made for that."""
        first = candidate.pairs[0][1]
        if not isinstance(first, Layerwise):
            return ()
        more: list[_Pair] = []
        try:
            for _ in range(1, min(torch.get_num_threads(), _THREADS)):
                twin, loss_fn = (
                    make_twin(self._source),
                    copy.deepcopy(self._loss_fn),
                )  # either may keep something
                more.append((twin, first.beside(twin, loss_fn)))
                if self._probe(replace(candidate, pairs=more[-1:]), inputs, targets):
                    return ()
            self._probe(replace(candidate, pairs=(*candidate.pairs, *more)), inputs, targets)
        except _UNFIT:
            return ()
        return tuple(more)

    def _threads_help(
        self, side_by_side: Callable[[], Tensor], alone: Callable[[], Tensor]
    ) -> bool:
        """Whether threads are not slower, and never give other norms, as they would where something has a global state."""
        shared: list[Tensor] = []
        own: list[Tensor] = []
        ways = [lambda: shared.append(side_by_side()), lambda: own.append(alone())]
        faster = fastest(ways, torch.device("cpu"), margin=_MARGIN) == 0
        tolerance = _AGREEMENT[self._compute_dtype]
        return faster and all(
            torch.allclose(norms, own[0], rtol=tolerance, atol=1e-12, equal_nan=True)
            for norms in shared
        )

    def _trial(self, candidate: _Candidate, inputs: Any, targets: Any) -> Tensor:
        self._move(candidate)
        return self._at_once(candidate, inputs, targets)[0]

    def _takes_channels_last(self, candidate: _Candidate, inputs: Any, targets: Any) -> bool:
        """Opacus's hooks of convolutions give other norms there, and a model may view images in another shape."""
        try:
            norms = self._trial(candidate, inputs, targets)
        except RuntimeError:
            return False
        return not self._disagreement(norms)

    def _bytes_per_example(self, inputs: Any, targets: Any) -> int:
        """What the backward pass keeps of one example."""
        twin = make_twin(self._source)
        self._follow(twin)

        def of(size: int) -> int:
            batch = tuple(_repeated(side, size) for side in (inputs, targets))
            with torch.enable_grad(), self._precision():
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


_Pair = tuple[nn.Module, Backend]


@dataclass
class _Candidate:
    """A backend, with a twin for each thread."""

    name: str
    pairs: Sequence[_Pair] = ()
    seconds: float = 0.0  # per example; 0 where there are too few to time
    batch_size: int = 1
    channels_last: bool = False
    reason: str = ""

    def close(self) -> None:
        for _, norms in self.pairs:
            norms.close()
        self.pairs = ()


def _slack(dtype: torch.dtype, compute_dtype: torch.dtype, parameters: int) -> float:
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    half = (
        torch.finfo(compute_dtype).eps if compute_dtype in (torch.float16, torch.bfloat16) else 0.0
    )
    return torch.finfo(wide).eps * (40 + 4 * parameters**0.5) + 4 * half


def _has_images(module: nn.Module, inputs: Any) -> bool:
    """Whether the order of (batch, channels, height, width) in memory could matter."""
    return (
        isinstance(inputs, Tensor)
        and inputs.ndim == 4
        and any(isinstance(m, nn.Conv2d) for m in module.modules())
    )


def _repeated(value: Any, size: int) -> Any:
    """The first `size` rows, from the start again where there are fewer."""
    return map_tensors(
        value, lambda tensor: tensor[torch.arange(size, device=tensor.device) % len(tensor)]
    )


def _rows(value: Any, start: int, stop: int) -> Any:
    return map_tensors(value, lambda tensor: tensor[start:stop])
