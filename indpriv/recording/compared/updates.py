"""What training publishes between steps, the update repeated, and the settings of every step.

Sensitive.
"""

import copy
import gc
import hashlib
import inspect
import math
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from indpriv.norm_log.fields import StepSetting
from indpriv.recording.checkpoints.safe_files import fingerprint_of
from indpriv.recording.clipping import ClippingRule
from indpriv.recording.compared.calls import relative, weighed
from indpriv.recording.compared.findings import Findings
from indpriv.recording.norms.batches import parts_of
from indpriv.recording.opacus.run import OpacusRun, local
from indpriv.recording.random_states import kept_random_state, random_state, set_random_state

PublicSettings = Callable[[int], Mapping[str, Any]]
"""Step -> settings that the user's public law gives there, e.g. {"lr": 0.1}."""
_DEEP, _MANY = 6, 4000  # levels of containers and objects that are looked into, and how many
_LEFT_OUT = type | FunctionType | ModuleType | torch.Generator | torch.optim.Optimizer
# Attributes of modules that torch and Opacus write.
_OF_TORCH = frozenset(["activations", "max_batch_len", "ddp_hooks", "_modules"])
_OF_TORCH |= {"_parameters", "_buffers", "_forward_counter"}
_SAME_STEP = 1e-6
_SMALL = 1 << 16  # entries of a tensor that is not looked at by itself
_AHEAD = 512  # numbers of steps or epochs, at least, that a law is asked ahead of training
# What the steps of a scheduler move; its parts are asked for themselves.
_OF_STEPS = frozenset(["last_epoch", "_last_lr", "_step_count", "T_cur", "T_i", "_schedulers"])
_OF_STEPS |= {"_get_lr_called_within_step", "_is_initial", "verbose", "_scale_fn_ref"}
_FUNCTIONS = ("lr_lambdas", "noise_lambda", "scheduler_function", "_scale_fn_custom")  # of users
# Settings that schedulers of torch and of Opacus move.
_OF_GROUPS, _OF_OPACUS = {"lr", "momentum", "betas"}, {"noise_multiplier", "max_grad_norm"}
_MADE = "groups and schedulers"  # as they were made, in the loop perhaps
_PLAIN = int, float, str, np.generic, Tensor, list
_GIVEN_ONCE = (Iterator, torch.Generator, np.random.Generator, np.random.RandomState, random.Random)


class PublishedState:
    """Parameters, buffers, extra state and the optimizer's state, as they were seen last."""

    def __init__(self, module: nn.Module, inner: Any, findings: Findings) -> None:
        self._module, self._inner, self._findings = module, inner, findings
        self._last: tuple[Any, ...] | None = None
        self._copy: Any = None  # of the inner optimizer, to repeat the step
        self._random: Any = None  # state when it was made

    def keep(self, *, known: bool = True) -> None:
        """What follows is compared with the state as it is now; with nothing, unless known."""
        self._last = None  # also where the print fails
        self._last = self._print() if known else None

    def compare(self, when: str, *, but_buffers: bool = False) -> bool:
        """Whether it is what it was; False too if that is not known."""
        last, self._last = self._last, self._print()
        if last is None:
            return False
        end = -1 if but_buffers else None  # the first pass of a step may write what is published
        same = bool(last[but_buffers:end] == self._last[but_buffers:end])
        self._findings.add("state", "" if same else "changed", when=when)
        return same

    @torch.no_grad()
    def _print(self) -> tuple[Any, ...]:
        """Fingerprints of buffers, parameters, the optimizer's state and extra state."""
        module = self._module
        leaves = torch.utils._pytree.tree_leaves([dict(one) for one in self._inner.state.values()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        prints = [print_of(part) for part in (module.buffers(), module.parameters(), tensors)]
        plain = repr([leaf for leaf in leaves if not isinstance(leaf, Tensor)])
        # What else a state dict publishes.
        more = [
            held_in(part.get_extra_state())
            for part in module.modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        ]
        return *prints, plain, more

    def fingerprint(self) -> str | None:
        """Of parameters and buffers, then of the optimizer's state; None if nobody holds them."""
        held = {name: x for name, x in self._module.state_dict().items() if isinstance(x, Tensor)}
        if any(local(one) is not one for one in held.values()):  # each rank has a shard
            return None
        params = (p for group in self._inner.param_groups for p in group["params"])
        moments = ((p, one) for p in params for one in self._inner.state.get(p, {}).values())
        # Of the types that load_state_dict gives them.
        own = (one.to(p.dtype) for p, one in moments if isinstance(one, Tensor))
        numbered = {f"{number:09d}": one for number, one in enumerate(own)}
        return f"{fingerprint_of(held)} {fingerprint_of(numbered)}"

    def compare_weights(self, logged: Mapping[str, Any], step: int) -> None:
        """Those that a resumed session begins with, beside those that the log had at the step."""
        before = logged.get("weights")
        if before is None or before != self.fingerprint():
            known = before is not None and " " in before  # older logs lack the optimizer's state
            self._findings.add("state", "other_weights" if known else "not_known", step=step)

    def copy_optimizer(self) -> None:
        """Prepare to repeat the coming step from its gradient."""
        self._copy, self._random = copy.deepcopy(self._inner), random_state()
        for mine, theirs in self._pairs():
            mine.grad = None if theirs.grad is None else theirs.grad.detach().clone()

    def _pairs(self) -> Iterator[tuple[Any, Any]]:
        groups = zip(self._copy.param_groups, self._inner.param_groups, strict=True)
        return (pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True))

    def repeat_step(self) -> None:
        """Compare what the copy, if there is one, makes of the gradient with what training made."""
        if self._copy is None:
            return
        step = type(self._copy).step
        try:
            with kept_random_state():
                set_random_state(self._random)
                getattr(step, "__wrapped__", step)(self._copy)  # without hooks
            pairs = [tuple(map(local, pair)) for pair in self._pairs()]
        finally:
            self._copy = None
        off = max(max(relative(a, b), relative(b, a)) for a, b in pairs)
        wrote = type(self._inner), step  # which may have been replaced in torch's class
        of_torch = all(f"{one.__module__}.".startswith("torch.optim.") for one in wrote)
        case = "library" if not of_torch else "other" if off > _SAME_STEP else ""
        self._findings.add("step", case)


def print_of(tensors: Iterable[Tensor]) -> list[int]:
    """Secret sums of their bits, by type and device; of a large tensor by itself."""
    small, rows = defaultdict[Any, list[Tensor]](list), list[Tensor]()
    for value in (part for tensor in tensors for part in parts_of(local(tensor.detach()))):
        if value.ndim > 1 and value.numel() > _SMALL:
            rows.append(weighed(value, "columns"))
        elif value.numel():  # these are looked at together
            small[value.device, value.dtype].append(value.reshape(-1))
    sums = [weighed(row[None], "rows") for row in (*map(torch.cat, small.values()), *rows)]
    found: list[int] = torch.cat([one.to(sums[0].device) for one in sums]).tolist() if sums else []
    return found


def attributes(module: nn.Module) -> list[Any]:
    """What its parts hold besides parameters and buffers, numbers and tensors of any depth."""
    seen = set(map(id, module.modules()))
    kept = [
        {k: v for k, v in vars(part).items() if k not in _OF_TORCH and "_hooks" not in k}
        for part in module.modules()
    ]
    try:
        return [held_in(one, _DEEP, seen) for one in kept]
    except Exception:  # noqa: BLE001  # of objects of the user's
        return [object()]  # equal to nothing


def held_in(value: Any, deep: int = _DEEP, seen: set[int] | None = None) -> Any:
    """Numbers, texts, tensors and arrays that a copy of a value has copies of, to be compared."""
    if isinstance(value, bool | int | float | str | bytes | None):
        return value
    if isinstance(value, np.generic | np.ndarray):
        content = np.ascontiguousarray(value)
        of_objects = content.dtype.hasobject
        return hashlib.blake2b(repr(value).encode() if of_objects else content.tobytes()).digest()
    if isinstance(value, Tensor):
        return print_of([value])
    seen = set() if seen is None else seen
    if not deep or id(value) in seen or len(seen) > _MANY or isinstance(value, _LEFT_OUT):
        return None
    seen.add(id(value))
    if not isinstance(value, Mapping | Sequence | set | frozenset):
        value = getattr(value, "__dict__", None) or gc.get_referents(value)
    # Names beside values: pairs made here would be gone, and their ids used again.
    names = [repr(name) for name in value] if isinstance(value, Mapping) else []
    parts = value.values() if isinstance(value, Mapping) else value
    return names, [held_in(part, deep - 1, seen) for part in islice(parts, _MANY)]


class Settings:
    """Settings of the last step, and whether a law explains those of the next one."""

    def __init__(
        self, run: OpacusRun, public: PublicSettings | None, last: dict[str, Any] | None
    ) -> None:
        """last: those of the last step of the session before, if known; else those of now hold."""
        self._optimizer = run.optimizer
        self._places = {id(p): place for place, p in enumerate(run.module.parameters())}
        described = re.sub(" at 0x[0-9a-f]+", "", repr(run.module))
        self._model = hashlib.sha256(described.encode()).hexdigest()
        self._released = run.optimizer.max_grad_norm  # that the optimizer's rule set itself
        self._public = None if public is None else _Law(public)
        self._schedulers: list[_Scheduler] | None = None  # that were there at the first step
        self._is_first = True  # this step, of the session
        # Of each setting, the orders of schedulers that explain all of its moves: found, reversed.
        self._orders: dict[str, list[int]] = defaultdict(lambda: [1, -1])
        self.last = last or {k: v for k, v in self._now(run.setting()).items() if k != _MADE}

    def case(self, step: int, setting: StepSetting) -> tuple[str, dict[str, Any]]:
        """What moved by no law since the last step, or is not what the law says; "" if nothing.

        With values of the case's text.
        """
        own = self._optimizer
        released, self._released = self._released, own.max_grad_norm
        self._is_first = self._schedulers is None
        if self._schedulers is None:
            self._schedulers = _schedulers_of(own)
        now = self._now(setting)
        last, self.last = self.last, now
        said, is_law = ({}, True) if self._public is None else self._public.at(step)
        if not is_law:
            return "no_law", {"step": step}
        if unknown := sorted(set(said) - set(now)):
            return "no_setting", {"name": unknown[0]}
        for name, value in said.items():
            if any(one != _plain(value) for one in now[name]):
                return "not_said", {"name": name, "is_": now[name][0], "step": step, "said": value}
        late = [one.kind for one in self._schedulers if one.follow(step)]
        if late and not said:
            return "stopped", {"kind": late[0], "step": step}
        if not (unexplained := self._unexplained(now, last, released, said)):
            return "", {}
        kinds = ", ".join(dict.fromkeys(one.kind for one in self._schedulers))
        values = {"names": ", ".join(unexplained), "step": step, "kinds": kinds}
        return "uneven" if kinds else "moved", values

    def _now(self, setting: StepSetting) -> dict[str, Any]:
        own, groups = self._optimizer, self._optimizer.param_groups
        held = {k: v for k, v in vars(own).items() if k[0] != "_" and isinstance(v, _PLAIN)}
        held |= vars(setting) | {"model": self._model}
        if each := getattr(own, "max_grad_norms", None):  # their shares, which a schedule keeps
            held["max_grad_norms"] = [round(float(c) / math.hypot(*each), 9) for c in each]
        held["class of the optimizer"] = type(own.original_optimizer).__name__
        now = {name: [_plain(value)] for name, value in held.items()}
        for name in dict.fromkeys(name for group in groups for name in group if name != "params"):
            now[name] = [_plain(group.get(name)) for group in groups]
        places = [[self._places.get(id(p)) for p in group["params"]] for group in groups]
        described = places, sorted({one.made for one in self._schedulers or ()})
        now[_MADE] = [hashlib.sha256(repr(described).encode()).hexdigest()]
        return now

    def moved_later(self, setting: StepSetting) -> list[str]:
        """Settings that were written after the last step, where no law may have moved them."""
        if self._public is not None or self._schedulers:
            return []
        return self._unexplained(self._now(setting), self.last, self._released)

    def _unexplained(self, now: Any, last: Any, released: Any, said: Any = ()) -> list[str]:
        # What a scheduler moves and the loop puts back was changed, too.
        moves = not self._is_first and any(one.leaves_moved for one in self._schedulers or ())
        lawful = (_OF_GROUPS | _OF_OPACUS) & last.keys()
        asked = lawful.copy() if moves else set()
        changed = [one for one in now if last.get(one, now[one]) != now[one] or one in asked]
        changed = [one for one in changed if one not in said]
        if isinstance(self._optimizer, ClippingRule):
            lawful -= {"max_grad_norm"}
            if released in now["max_grad_norm"]:  # the rule's own private release
                changed = [one for one in changed if one != "max_grad_norm"]
        if lawful.isdisjoint(changed):
            return changed
        moved = [p for one in self._schedulers or () if one.is_steady for p in one.leaves_moved]
        made = {way: self._made_of(last, moved[::way]) for way in (1, -1)}
        # One alone where a run is resumed, and an old one is still there.
        alone = [self._made_of(last, [one]) for one in moved] if self._is_first else []
        for name in lawful.intersection(changed):
            ways = [way for way in self._orders[name] if _alike(made[way][name], now[name])]
            self._orders[name] = ways
            if ways or any(_alike(one[name], now[name]) for one in alone):
                changed.remove(name)
        return changed

    def _made_of(self, last: Any, order: Iterable["_Scheduler"]) -> dict[str, Any]:
        """What the last steps of schedulers, one after the other, made of the last settings."""
        stub = SimpleNamespace(**{key: last[key][0] for key in _OF_OPACUS if key in last})
        stub.param_groups = [dict(group) for group in self._optimizer.param_groups]
        for k, group in enumerate(stub.param_groups):
            for key in (_OF_GROUPS & group.keys()) & last.keys():
                group[key] = _like(group[key], last[key][k])
        for one in order:
            one.move(stub)
        made = {key: [_plain(group.get(key)) for group in stub.param_groups] for key in _OF_GROUPS}
        return made | {key: [_plain(getattr(stub, key, None))] for key in _OF_OPACUS}


class _Scheduler:
    """A scheduler of torch or Opacus, the user's own object, and the pace of its steps."""

    def __init__(self, own: Any) -> None:
        self.own, self.kind = own, type(own).__name__
        self.of_opacus = type(own).__module__.startswith("opacus.")
        self.made = self._as_made()
        self._law = _Law(lambda epoch: [f(epoch) for f in self._functions()])
        self._parts = [_Scheduler(part) for part in getattr(own, "_schedulers", ())]
        self.leaves: list[Any] = [one for part in self._parts for one in part.leaves] or [self]
        self.passed = range(0)  # epochs that it moved to since the last step
        self._repeats = True  # its functions give what they gave when they were asked ahead
        # Step and epoch of its last move; one that restarts may move by parts of an epoch.
        self._last: tuple[int, int, Any] | None = None
        # Steps and epochs up to its first move, then, each once, those between later ones.
        self._paces: list[tuple[int, Any]] = []

    def _functions(self) -> list[Callable[[int], Any]]:
        """The user's functions that it asks now."""
        held = [getattr(self.own, name, None) for name in _FUNCTIONS]
        each = [f for one in held for f in (one if isinstance(one, list) else [one])]
        return list(filter(callable, each))

    def _as_made(self) -> str:
        """What it was made with, its parts too; in each process alike."""
        made = {k: v for k, v in vars(self.own).items() if k not in _OF_STEPS and not callable(v)}
        made = torch.utils._pytree.tree_map_only(Tensor, Tensor.tolist, made)
        return self.kind + repr(held_in({k: v for k, v in made.items() if k != "optimizer"}))

    def follow(self, step: int) -> bool:
        """Note how it moved since the last step; return whether by its pace it should have, too."""
        for part in self._parts:
            part.follow(step)
        # A chained one has no epoch of its own.
        counts = self.own if hasattr(self.own, "last_epoch") else self.leaves[0].own
        epoch, within, self.passed = counts.last_epoch, getattr(self.own, "T_cur", None), range(0)
        then, before, was_within = self._last or (step, epoch - 1, None)
        if (epoch, within) == (before, was_within):
            return len(self._paces) > 1 and step - then > max(steps for steps, _ in self._paces)
        self.passed = range(min(before + 1, epoch), epoch + 1)
        closures = map(inspect.getclosurevars, filter(inspect.isfunction, self._functions()))
        held = [value for one in closures for names in one[:2] for value in names.values()]
        # Asked, some functions would leave less for training. -1: of a part that has not begun.
        asked = not any(isinstance(value, _GIVEN_ONCE) for value in held)
        self._repeats = asked and self._law.at(max(epoch, 0))[1]
        self._repeats &= all(part._repeats for part in self._parts)
        if within is not None and epoch >= 0:  # of warm restarts: where torch's own steps lead
            left, length = epoch + within % 1, self.own.T_0
            while left >= length:
                left, length = left - length, length * self.own.T_mult
            self._repeats &= abs(left - within) < _SAME_STEP and self.own.T_i == length
        if self._last is not None and epoch != before:
            pace = step - then, epoch - before
            self._paces += [pace] if pace not in self._paces[1:] else []
        self._last = step if epoch != before else then, epoch, within
        return False

    @property
    def leaves_moved(self) -> list[Any]:
        """Its parts, or itself, that moved since the last step."""
        return [one for one in self.leaves if one.passed]

    @property
    def is_steady(self) -> bool:
        """Whether it steps at one pace from the start, as it was made, by functions that repeat."""
        first, pace, *others = self._paces if len(self._paces) > 1 else [(0, 0), (0, 0)]
        # The first move may come after the first step of an epoch.
        at_one_pace = not others and (first == pace or first[0] == pace[0] + 1)
        return at_one_pace and self.made == self._as_made() and self._repeats

    def move(self, optimizer: Any) -> None:
        """Move settings of an optimizer as its steps since the last one of training did."""
        twin = copy.copy(self.own)
        twin.optimizer, twin._get_lr_called_within_step = optimizer, True
        for epoch in self.passed:
            twin.last_epoch = epoch - self.of_opacus
            if self.of_opacus:
                twin.step()
                continue
            twin._step_count = self.own._step_count - self.passed[-1] + epoch
            begins = epoch == 0 and getattr(twin, "_get_closed_form_lr", None)
            for group, lr in zip(optimizer.param_groups, (begins or twin.get_lr)(), strict=True):
                group["lr"] = _like(group["lr"], float(lr))


def _schedulers_of(optimizer: Any) -> list[_Scheduler]:
    """Schedulers of torch and Opacus that move this optimizer; the user keeps them."""
    groups, objects = optimizer.original_optimizer.param_groups, gc.get_objects()
    # Classes that torch or Opacus wrote themselves: a subclass may read anything.
    ours = ("opacus.schedulers",), ("opacus.schedulers", "torch.optim.")
    kinds = {
        kind
        for kind in set(map(type, objects))
        if str(kind.__module__).startswith(ours[issubclass(kind, lr_scheduler.LRScheduler)])
    }
    mine = [
        one
        for one in (objects if kinds else ())  # of which there may be millions
        if type(one) in kinds
        if (found := getattr(getattr(one, "optimizer", None), "param_groups", None))
        if found[0] is groups[0]
    ]
    parts = {id(part) for one in mine for part in getattr(one, "_schedulers", ())}
    # A whole answers for its parts.
    return [_Scheduler(one) for one in mine if id(one) not in parts]


class _Law:
    """A function of the number of a step or epoch, asked ahead, which what training sees cannot be.

    It may end: a list of learning rates does.
    """

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function, self._known = function, dict[int, str]()
        self._next = 0.0  # from where on it was not asked; infinite if it ends before

    def at(self, number: int) -> tuple[Any, bool]:
        """What it gives there, and whether it gave the same when it was asked ahead."""
        value = self._function(number)
        if number + _AHEAD > self._next:
            start, self._next = int(max(number, self._next)), math.inf
            with suppress(Exception):
                for ahead in range(start, number + 2 * _AHEAD):
                    self._known[ahead] = repr(_plain(self._function(ahead)))
                self._next = number + 2 * _AHEAD
        return value, self._known.get(number) == repr(_plain(value))


def _like(held: Any, number: Any) -> Any:
    """A number as a setting that may be a tensor holds it."""
    return held.new_tensor(number) if isinstance(held, Tensor) else number


def _alike(made: Any, now: Any) -> bool:
    """Whether values of groups are the same but for rounding: torch has two forms of some laws."""
    if made == now:
        return True
    with suppress(TypeError, ValueError):
        both = np.array([made, now], np.float64)
        return bool(np.allclose(both[0], both[1], rtol=1e-9, atol=0.0))
    return False


def _plain(value: Any) -> Any:
    """Numbers, texts and lists of them, as the log keeps them."""
    if isinstance(value, Tensor | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    infinite = isinstance(value, float) and not math.isfinite(value)
    return value if isinstance(value, int | float | str | None) and not infinite else repr(value)
