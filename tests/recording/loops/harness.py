"""Training loops, sound and broken, with the word that each must get.

A loop is a function of a `Scene`, in a file of its topic, under one of three decorators:

    @sound("hooks ghost functorch ew")      # DP-SGD: "supported", no line refuted
    @told("settings", "hooks ghost")        # sound, but somebody has to say so: that line is "declared"
    @broken("contribution", "hooks ghost")  # no DP-SGD: that line is refuted, or the run is refused

A Scene makes the private model, optimizer and loader and trains them: `s.train(...)` does all; a loop
that is odder calls `s.make(...)`, `with s.recorded(...)`, `s.batches()` and `s.step(x, y)` itself. What
is trained may differ from what the Recorder is told: `loss` is told, `trained` is trained. Noise and
batches come from `private_generator()` unless `private=False`. To add a loop, add a function: n is 400,
a batch 32, so 13 steps an epoch, 2 epochs; a loop takes less than a second. n must be such that one
example more or fewer changes neither Opacus's rate nor its divisor (a report refutes that by itself).
`python tests/recording/loops/table.py` prints what each loop gets.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

import indpriv
from indpriv.analysis.guarantee import divisor_of, guarantee_of
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, private_generator

LINES = ("batch", "contribution", "noise", "update", "settings", "source", "start")
MODES = ("hooks", "ghost", "functorch", "ew")
ce = nn.CrossEntropyLoss(reduction="none")


@dataclass(frozen=True)
class Loop:
    """A loop; `lines` are those of which one must be refuted (broken) or declared (told)."""

    name: str
    kind: str
    train: Callable[[Scene], None]
    modes: tuple[str, ...]
    lines: tuple[str, ...]
    expect: str
    participation: str
    rare: bool

    @property
    def topic(self) -> str:
        return Path(self.train.__code__.co_filename).stem

    @property
    def place(self) -> tuple[str, int]:
        return self.train.__code__.co_filename, self.train.__code__.co_firstlineno


LOOPS: dict[str, Loop] = {}


def _registered(
    kind: str,
    lines: str,
    modes: str,
    expect: str,
    *,
    name: str = "",
    participation: str = "secret",
    rare: bool = False,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    assert set(modes.split()) <= set(MODES), modes
    assert set(lines.split()) <= set(LINES), lines

    def keep(train: Callable[..., None]) -> Callable[..., None]:
        loop = Loop(
            name or train.__name__,
            kind,
            train,
            tuple(modes.split()),
            tuple(lines.split()),
            expect,
            participation,
            rare,
        )
        known = LOOPS.setdefault(loop.name, loop)  # a file may be imported under two names
        assert known.place == loop.place, f"two loops are called {loop.name}"
        return train

    return keep


def sound(modes: str = "hooks", **options: Any) -> Any:
    """Options of all three: name, participation of the account, rare (not in CI: much like another)."""
    return _registered("sound", "", modes, "supported", **options)


def told(lines: str, modes: str = "hooks", *, expect: str = "declared", **options: Any) -> Any:
    """`expect`: one of `lines` is "declared"; or, where a fault looks the same, as of `broken`."""
    assert expect in ("declared", "refused", "unsupported")
    return _registered("told", lines, modes, expect, **options)


def broken(lines: str, modes: str = "hooks", *, expect: str = "refuted", **options: Any) -> Any:
    """`expect`: one of `lines` is "refuted", or the run is "refused", or is at least "unsupported"."""
    assert expect in ("refuted", "refused", "unsupported")
    return _registered("broken", lines, modes, expect, **options)


@dataclass(frozen=True)
class Judged:
    """What is said of a recorded run: the claim, the guarantee's status, and each line's word."""

    claim: str
    status: str
    words: dict[str, str]
    details: dict[str, str]


def judged(run_dir: Path, delta: float = 1e-3, participation: str = "secret") -> Judged:
    """The verdict on a run; the one function here that knows how the package finds it."""
    opened = open_run(run_dir)
    table = indpriv.account(opened.log, delta=delta, participation=participation)
    about = json.loads((run_dir / "run.json").read_text("utf-8")).get("recorder", {})
    divisor = divisor_of(len(table), opened.log.total_steps, about)
    guarantee = guarantee_of(table, verify(opened), about, divisor=divisor)
    return Judged(
        table.claim,
        guarantee.status,
        {line.key: line.status for line in guarantee.lines},
        {line.key: line.detail for line in guarantee.lines},
    )


class PerExample(nn.Module):
    """The criterion of ghost mode, which Opacus asks for losses (batch,)."""

    def __init__(self, reduction: str) -> None:
        super().__init__()
        self.reduction = reduction
        self.trained: list[Callable[..., torch.Tensor]] = [ce]  # a list: it may be a module

    def forward(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self.trained[0](outputs, targets)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def blobs(n: int = 400, *shape: int) -> TensorDataset:
    """Inputs (n, *shape), 6 features if unsaid, of two classes; the same each time."""
    x = normal(n, *(shape or (6,)))
    return TensorDataset(x, (x.flatten(1)[:, :3].sum(1) > 0).long())


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _nothing(*_: Any) -> None:
    """What comes in between, if nothing does."""


@dataclass
class Scene:
    """One run of a loop, in one of Opacus's ways to compute gradients."""

    mode: str
    run_dir: Path
    steps: int = 0  # that were taken

    def make(
        self,
        data: Any = None,
        model: nn.Module | None = None,
        *,
        opt: Callable[[Any], torch.optim.Optimizer] = sgd,
        batch: int = 32,
        noise: float = 1.0,
        clip: Any = 1.0,
        drawn: Any = None,
        sampler: Any = None,
        collate: Any = None,
        workers: int = 0,
        poisson: bool = True,
        private: bool = True,
        **options: Any,
    ) -> Scene:
        """Model, optimizer and loader as `make_private` returns them; the loader draws from `drawn`."""
        self.data = blobs() if data is None else data
        self.plain = copy.deepcopy(model := mlp() if model is None else model)
        loader = DataLoader(
            self.data if drawn is None else drawn,
            batch_size=batch,
            shuffle=not poisson and sampler is None,
            sampler=sampler,
            collate_fn=collate,
            num_workers=workers,
            generator=private_generator() if private else None,
        )
        if private:
            options = {"noise_generator": private_generator()} | options
        if self.mode == "ghost":
            criterion = PerExample(options.get("loss_reduction", "mean"))
            options = {"criterion": criterion} | options
        made = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=opt(model.parameters()),
            data_loader=loader,
            noise_multiplier=noise,
            max_grad_norm=clip,
            poisson_sampling=poisson,
            grad_sample_mode=self.mode,
            **options,
        )
        self.model, self.optimizer, self.criterion, self.loader = (
            made if self.mode == "ghost" else (*made[:2], None, made[2])
        )
        self.inner = self.optimizer.original_optimizer
        return self

    @contextmanager
    def recorded(
        self, loss: Any = ce, *, autocast: bool = False, **options: Any
    ) -> Iterator[Recorder]:
        """Record while the block trains, the whole run dir a new one."""
        options = {"every": 1, "dataset": self.data} | options
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            recorder = Recorder(self.run_dir, loss_fn=loss, **options)
        with recorder.attach(self.model, self.optimizer, self.loader):
            yield recorder

    def batches(
        self,
        epochs: int = 2,
        micro: int | None = None,
        each: Callable[[Scene, int], Any] = _nothing,
    ) -> Iterator[Any]:
        """Batches of so many epochs, in parts of at most `micro` examples; `each` begins an epoch."""
        for epoch in range(epochs):
            each(self, epoch)
            if micro is None:
                yield from self.loader
                continue
            with BatchMemoryManager(
                data_loader=self.loader, max_physical_batch_size=micro, optimizer=self.optimizer
            ) as parts:
                yield from parts

    def step(self, x: Any, y: Any, trained: Any = ce, *, outputs: Any = None, between=None) -> None:
        """One step on the mean of the losses `trained(outputs, y)`; `between` comes before the update."""
        self.optimizer.zero_grad()
        self.backward(self.model(x) if outputs is None else outputs, y, trained)
        if between:
            between(self, x, y)
        self.optimizer.step()
        self.steps += 1

    def backward(self, outputs: Any, y: Any, trained: Any = ce) -> None:
        if self.criterion is None:
            trained(outputs, y).mean().backward()
            return
        self.criterion.criterion.trained[0] = trained
        self.criterion(outputs, y).backward()

    def train(
        self,
        data: Any = None,
        model: nn.Module | None = None,
        *,
        recorder: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """The ordinary loop, with options of `go`, of `make` and of the recorder."""
        mine = {name: options.pop(name) for name in list(options) if name in _OF_LOOPS}
        self.make(data, model, **options).go(**mine, **(recorder or {}))

    def go(
        self,
        loss: Any = ce,
        *,
        trained: Any = None,
        inputs: Callable[[Any], Any] = lambda x: x,
        rows: Callable[[Any, Any], Any] = lambda x, y: (x, y),
        before: Callable[[Scene, Any, Any], Any] = _nothing,
        between: Callable[[Scene, Any, Any], Any] | None = None,
        after: Callable[[Scene, Any, Any], Any] = _nothing,
        end: Callable[[Scene], Any] = _nothing,
        epoch: Callable[[Scene, int], Any] = _nothing,
        epochs: int = 2,
        micro: int | None = None,
        batches: Callable[[], Any] | None = None,
        **recorder: Any,
    ) -> None:
        """Record and train: `before` a step, `between` backward and update, `after` it, at the `end`.

        `inputs` or `rows` change the batches of the loader, or `batches` makes others in the block.
        """
        with self.recorded(loss, **recorder):
            for x, y in batches() if batches else self.batches(epochs, micro, epoch):
                before(self, x, y)
                self.step(*rows(inputs(x), y), trained or loss, between=between)
                after(self, x, y)
            end(self)

    def resumed(self, change: Callable[[], Any] = lambda: None, **options: Any) -> None:
        """Two epochs, each in a session of its own with the same `loss`, and a change in between."""
        saved = None
        for session in range(2):
            if session:
                change()
            with self.recorded(resume_at=saved, **options) as recorder:
                for x, y in self.batches(1):
                    self.step(x, y, options.get("loss", ce))
                saved = recorder.state_dict()

    def gradients(self, x: Any, y: Any) -> list[torch.Tensor]:
        """Plain gradients of the mean loss, without clipping or noise, in the order of parameters."""
        held = {
            name.removeprefix("_module."): p.detach().clone().requires_grad_()
            for name, p in self.model.named_parameters()
        }
        loss = ce(functional_call(self.plain, held, (x,)), y).mean()
        return list(torch.autograd.grad(loss, list(held.values())))

    def loss_of(self, x: Any, y: Any) -> float:
        """The mean loss of these rows now; nan if there are none."""
        held = {
            name.removeprefix("_module."): p.detach() for name, p in self.model.named_parameters()
        }
        return float(ce(functional_call(self.plain, held, (x,)), y).mean())


_OF_LOOPS = set(signature(Scene.go).parameters) - {"self", "recorder"}


def run(loop: Loop, mode: str, run_dir: Path) -> Judged | Exception:
    """Train a loop: what is said of its run, or the error that stopped it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a broken loop is warned of; Opacus warns by itself
        try:
            loop.train(Scene(mode, run_dir))
            return judged(run_dir, participation=loop.participation)
        except Exception as error:  # noqa: BLE001 - the test says which errors are right
            return error
