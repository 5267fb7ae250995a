"""Settings of every step: constant, or moved by a law that reads no data."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from indpriv._facts import text
from indpriv.norm_log.fields import StepSetting
from indpriv.recording.clipping.rules import ClippingRule
from indpriv.recording.compared.state import held_in

PublicSettings = Callable[[int], Mapping[str, Any]]
"""Step -> settings that the user's public law gives there, e.g. {"lr": 0.1}."""
_OF_SCHEDULERS = frozenset(["initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum"])
_AHEAD = 512  # numbers of steps or epochs at which a law is asked before training gets there
# What the steps of a scheduler move; its parts are asked for themselves.
_OF_STEPS = frozenset(["last_epoch", "_last_lr", "_step_count", "T_cur", "T_i", "_schedulers"])
_OF_STEPS |= {"_get_lr_called_within_step", "_is_initial", "verbose", "_scale_fn_ref"}
_FUNCTIONS = ("lr_lambdas", "noise_lambda", "scheduler_function")  # of torch and Opacus
_CYCLED = frozenset(["momentum", "betas"])


class Settings:
    """Settings of the last step, and whether a law explains those of the next one."""

    def __init__(self, optimizer: Any, public: PublicSettings | None) -> None:
        self._optimizer = optimizer
        self._public = None if public is None else _Law(public)
        self._last: dict[str, Any] | None = None
        self._laws: dict[int, _Law] = {}  # of schedulers that have functions of the user's
        self._schedulers: list[_Followed] | None = None  # that were there at the first step

    def moved(self, step: int, setting: StepSetting) -> str:
        """What moved by no law since the last step, or is not what the law says; "" if nothing."""
        now = {
            "noise_multiplier": setting.noise_multiplier,
            "max_grad_norm": setting.max_grad_norm,
            "sample_rate": setting.sample_rate,
            "expected_batch_size": self._optimizer.expected_batch_size,
            "loss_reduction": self._optimizer.loss_reduction,
        }
        groups = self._optimizer.param_groups
        for name in dict.fromkeys(name for group in groups for name in group if name != "params"):
            now[name] = [_plain(group.get(name)) for group in groups]
        if self._schedulers is None:
            self._schedulers = [_Followed(one) for one in self._found_schedulers()]
        last, self._last = self._last or now, now
        said, is_law = ({}, True) if self._public is None else self._public.at(step)
        if not is_law:
            return text("check.settings", "no_law", step=step)
        if unknown := sorted(set(said) - set(now)):
            return text("check.settings", "no_setting", name=unknown[0])
        for name, value in said.items():
            values = now[name] if isinstance(now[name], list) else [now[name]]
            if any(one != _plain(value) for one in values):
                return text(
                    "check.settings", "not_said", name=name, is_=values[0], step=step, said=value
                )
        for one in self._schedulers:
            one.follow(step)
        if late := [one.kind for one in self._schedulers if one.has_stopped(step) and not said]:
            return text("check.settings", "stopped", kind=late[0], step=step)
        changed = [name for name, value in now.items() if name not in said]
        changed = [name for name in changed if last.get(name, now[name]) != now[name]]
        unexplained = [n for n in changed if not self._by_law(n, now[n], last.get(n))]
        if not unexplained:
            return ""
        kinds = ", ".join(dict.fromkeys(one.kind for one in self._schedulers))
        moved = text("check.settings", "moved", names=", ".join(unexplained), step=step)
        return f"{moved} {text('check.settings', 'uneven', kinds=kinds)}" if kinds else moved

    def _by_law(self, name: str, now: Any, last: Any) -> bool:
        if name == "max_grad_norm" and isinstance(self._optimizer, ClippingRule):
            return True  # the rule's own private release
        laws = self._schedulers or []
        if name in ("noise_multiplier", "max_grad_norm"):
            kind = "Noise" if name == "noise_multiplier" else "GradClip"
            laws = [one for one in laws if _is_of_opacus(one.scheduler) and kind in one.kind]
            return any(_gives(one.scheduler, last, now) and self._is_steady(one) for one in laws)
        laws = [one for one in laws if not _is_of_opacus(one.scheduler)]
        if not laws or any(one.kind == "ReduceLROnPlateau" for one in laws):
            return False
        if name == "lr":
            mine = [one for one in laws if [_plain(v) for v in one.scheduler._last_lr] == now]
            return any(map(self._is_steady, mine))
        cycles = any(one.kind in ("CyclicLR", "OneCycleLR") for one in laws)
        return name in _OF_SCHEDULERS or (cycles and name in _CYCLED)

    def _is_steady(self, one: _Followed) -> bool:
        """Whether it steps at one pace from the start, as it was made, by functions that repeat."""
        same = one.made == _made(one.scheduler)
        return same and one.has_one_pace and self._repeats(one.scheduler)

    def _repeats(self, scheduler: Any) -> bool:
        """Whether functions of the user's give what they gave when they were asked ahead."""
        functions = _flat(getattr(scheduler, name, None) for name in _FUNCTIONS)
        parts = getattr(scheduler, "_schedulers", ())
        if not functions:
            return all(map(self._repeats, parts))
        law = self._laws.setdefault(
            id(scheduler), _Law(lambda epoch: [f(epoch) for f in functions])
        )
        return law.at(scheduler.last_epoch)[1]

    def _found_schedulers(self) -> list[Any]:
        """Schedulers of torch and Opacus that move this optimizer; the user keeps them."""
        groups, objects = self._optimizer.original_optimizer.param_groups, gc.get_objects()
        kinds = set(filter(_is_scheduler, set(map(type, objects))))
        mine = [
            one
            for one in objects
            if type(one) in kinds
            if (found := getattr(getattr(one, "optimizer", None), "param_groups", None))
            if found[0] is groups[0]
        ]
        parts = {id(part) for one in mine for part in getattr(one, "_schedulers", ())}
        return [one for one in mine if id(one) not in parts]  # which their whole answers for


class _Followed:
    """A scheduler, and the pace at which it takes its steps.

    Attributes:
        kind: name of its class.
        made: what it was made with.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.kind, self.made = scheduler, type(scheduler).__name__, _made(scheduler)
        self._last: tuple[int, Any] | None = None  # step and epoch of its last move
        # Steps and epochs up to its first move, then, each once, those between later ones.
        self._paces: list[tuple[int, Any]] = []

    def follow(self, step: int) -> None:
        """Note whether it moved since the last step."""
        epoch = getattr(self.scheduler, "last_epoch", None)  # a chained one has none
        if self._last is not None and epoch == self._last[1]:
            return
        if self._last is not None:
            pace = step - self._last[0], epoch - self._last[1]
            self._paces += [pace] if pace not in self._paces[1:] else []
        self._last = step, epoch

    def has_stopped(self, step: int) -> bool:
        """Whether it should have moved by now, by the pace that it had."""
        if self._last is None or len(self._paces) < 2:
            return False
        return step - self._last[0] > max(steps for steps, _ in self._paces)

    @property
    def has_one_pace(self) -> bool:
        """Whether all its moves are alike; the first may come after the first step of an epoch."""
        if len(self._paces) < 2:
            return True
        first, pace, *others = self._paces
        return not others and (first == pace or first[0] == pace[0] + 1)


class _Law:
    """A function of the number of a step or epoch, asked ahead, which what training sees cannot be.

    It may end: a list of learning rates does.
    """

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function, self._known = function, dict[int, str]()
        self._next = 0.0  # from where on it is to be asked; infinite if it ends before

    def at(self, number: int) -> tuple[Any, bool]:
        """What it gives there, and whether it gave the same when it was asked ahead."""
        value = self._function(number)
        if number >= self._next:
            self._next = math.inf
            with suppress(Exception):
                for ahead in range(number, number + _AHEAD):
                    self._known[ahead] = repr(_plain(self._function(ahead)))
                self._next = number + _AHEAD
        return value, self._known.get(number) == repr(_plain(value))


def _made(scheduler: Any) -> str:
    """What a scheduler was made with, its parts too."""
    own = {k: v for k, v in vars(scheduler).items() if k not in _OF_STEPS and not callable(v)}
    return repr(held_in({k: v for k, v in own.items() if k != "optimizer"}))


def _is_scheduler(kind: type) -> bool:
    """Whether torch or Opacus wrote the class itself; a subclass may read anything."""
    module = str(kind.__module__)
    if module.startswith("opacus.schedulers"):
        return True
    return module.startswith("torch.optim.") and (
        issubclass(kind, torch.optim.lr_scheduler.LRScheduler)
        or kind is torch.optim.lr_scheduler.ReduceLROnPlateau
    )


def _gives(one: Any, last: float, now: float) -> bool:
    """Whether a scheduler of Opacus makes this value of the last one."""
    function = getattr(one, "noise_lambda", None) or getattr(one, "scheduler_function", None)
    if function is None:
        return math.isclose(now, last * getattr(one, "gamma", math.nan), rel_tol=1e-9)
    base = getattr(one, "base_noise_multiplier", None) or getattr(one, "base_max_grad_norm", 0.0)
    return math.isclose(now, base * function(one.last_epoch), rel_tol=1e-9)


def _is_of_opacus(one: Any) -> bool:
    return type(one).__module__.startswith("opacus.")


def _flat(functions: Any) -> list[Any]:
    each = [f if isinstance(f, list) else [f] for f in functions]
    return [f for several in each for f in several if callable(f)]


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
