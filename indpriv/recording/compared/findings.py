"""What comparisons of one session found, and which of them fit into their share of the time."""

import secrets
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from indpriv._facts import text
from indpriv.errors import EvidenceError, EvidenceWarning
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.session_counts import ComparedTraining, Found

_EQUAL, _OPEN, _REFUTED = range(3)
_ALL, _EVERY = 0.05, 0.03  # shares of training's time: of all comparisons, of those of every step
_ROOM = 0.85  # of that part, so that chance does not exceed it
_FREE = 1.0  # seconds that comparisons may take however short training is
_FIRST = 3  # steps that are repeated in any case
_RATES = 0.005, 0.25  # of the other steps


def say(key: str, detail: str, *, refuted: bool, strict: bool) -> None:
    """Warn of what a check found, with what to do; if strict, raise EvidenceError."""
    cost = "unproven" if refuted else "declared, not supported"
    # No advice fits errors.
    advice = "" if detail.startswith("not compared: ") else CHECKS[key].to_do
    said = f"{CHECKS[key].title}: {detail}; the run's guarantee is {cost}. {advice}".rstrip()
    if strict:
        raise EvidenceError(f"{said} (strict=True stops here)")
    warnings.warn(said, EvidenceWarning, stacklevel=2)


class Findings:
    """Counts of comparisons by the key of their check; a step counts as its worst."""

    def __init__(self) -> None:
        self.found: dict[str, Found] = {}  # by the end of the last step
        self._step: dict[str, tuple[int, str]] = {}

    def add(self, key: str, case: str = "", **values: Any) -> None:
        """Note one comparison of the current step: equal, or a case of the check's texts."""
        word = _REFUTED if case in CHECKS[key].refutes else _OPEN if case else _EQUAL
        self._note(key, word, text(f"check.{key}", case, **values) if case else "")

    def not_compared(self, keys: Iterable[str], why: str) -> None:
        """Note that comparisons could not be made."""
        for key in keys:
            self._note(key, _OPEN, why)

    def _note(self, key: str, word: int, detail: str) -> None:
        if word > self._step.get(key, (-1, ""))[0]:
            self._step[key] = word, detail

    def end_step(self) -> list[str]:
        """Count the step; return the keys that were refuted or left open for the first time."""
        new = []
        for key, (word, detail) in self._step.items():
            found = self.found.setdefault(key, Found())
            worst = _REFUTED if found.refuted else _OPEN if found.unknown else _EQUAL
            found.steps += word != _OPEN
            found.refuted += word == _REFUTED
            found.unknown += word == _OPEN
            new += [key] if word > worst else []
            if word > worst or not found.detail:
                found.detail = detail
        self._step.clear()
        return new


def worst_of(ranks: Sequence[Mapping[str, Found]]) -> ComparedTraining:
    """What was found by several ranks, as the log holds it: of each comparison the worst."""
    found = {}
    for key in dict.fromkeys(key for one in ranks for key in one):
        each = [one[key] for one in ranks if key in one]
        worst = max(each, key=lambda one: (one.refuted, one.unknown))
        found[key] = worst.model_copy(update={"steps": min(one.steps for one in each)})
    return ComparedTraining(found=found)


class Budget:
    """Chooses, with secret coins, the steps at which training is repeated."""

    def __init__(self, device: str) -> None:
        """Begin; on a CPU its own time counts, so that other processes cost no comparisons."""
        self._clock = time.process_time if device == "cpu" else time.perf_counter
        # Whether the comparisons of every step are made at the current one; whether it is repeated.
        self.every = self.drawn = True
        # "once": at the beginning and the end, a pass over what the data set holds.
        self._spent = {"every": 0.0, "drawn": 0.0, "once": 0.0}
        self._steps = self._n_drawn = self._n_every = 0
        self._trained, self._since = 0.0, self._clock()
        self._inside = False
        self._coins = secrets.SystemRandom()

    def begin_step(self) -> None:
        """Training takes up a step."""
        self._since = self._clock()

    @contextmanager
    def spending(self, kind: str) -> Iterator[None]:
        """Time of comparisons of every step, of drawn ones, or made once; not of training."""
        outer, self._inside = self._inside, True
        start = self._clock()
        try:
            yield
        finally:
            self._inside = outer
            if not outer:
                taken = self._clock() - start
                self._spent[kind] += taken
                self._since += taken

    def end_step(self) -> None:
        """The step is over; choose what is compared of the next one."""
        self._trained += self._clock() - self._since
        self._steps += 1
        self._n_drawn += self.drawn
        self._n_every += self.every
        spent, each = self._spent, self._spent["drawn"] / self._n_drawn
        self.every = spent["every"] <= _EVERY / _ALL * _FREE or self._coins.random() < self._thin()
        total = spent["every"] + spent["drawn"] + each
        rate = (_ALL * self._trained - spent["every"]) / (self._steps * max(each, 1e-9))
        rate = _RATES[1] if total <= _FREE else min(max(rate, _RATES[0]), _RATES[1])
        fits = total <= max(_FREE, _ALL * self._trained) and self._coins.random() < rate
        self.drawn = self._steps < _FIRST or fits
        self.every |= self.drawn

    def _thin(self) -> float:
        """Share of the steps whose comparisons fit into their part; less while it is overspent."""
        allowed, spent = _ROOM * _EVERY * self._trained, max(self._spent["every"], 1e-9)
        fair = allowed / self._steps / (spent / self._n_every)
        return fair * min(max(4 - 3 * spent / max(allowed, 1e-9), _RATES[0]), 1.0)
