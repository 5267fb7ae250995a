"""AttackSignals: how confident many models are on the same examples. Sensitive.

The models are trained on random subsets of the examples, so that attacks can compare a model with
others that were trained with an example, or without it. Models are not kept, only their signals.

They lie in a folder that grows model by model: `member.u8` and a file for each signal, such as
`confidence.f32`, hold one row of n_examples for each model, little-endian, without a header.
`signals.json` says how many rows count, with a checksum of each; it is replaced atomically, so that
a model is there whole or not at all. `ids.npz` names the examples.
"""

import io
import math
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from indpriv import _checks, _files
from indpriv._facts import damaged, refused, text
from indpriv._folders import make_folder, open_file, refuse_links
from indpriv._reading import Whole, check, named, read_npz, table
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray, NDArray
from indpriv.errors import EvidenceError, InputError

KINDS = {
    "confidence": "logit-scaled confidence in the true label, log(p / (1 - p))",
    "label_robustness": "share of perturbed copies that get the true label",
    "other": "any figure that is higher for members",
}
_SEEN = ("final_model", "checkpoints")  # adversaries that a signal of a model can belong to
_MOST_ALIKE = 0.5  # correlation of two memberships; independent coins give 0 +- 1 / sqrt(n)
_BY_CHANCE = 1e-6  # probability of memberships so alike, so that few examples are not refused
_DEVIATIONS = 5.0  # of numbers of references, for the same reason
_MOST_APART = 0.3  # relative difference of numbers of references; 1/4 for 8 models in equal halves
_FACTS = ("kind", "audited", "coins", "share", "fingerprint", "adversary")

CONFIDENCE, LABELS, CHECKPOINTS, GRADIENTS = "confidence", "labels", "checkpoints", "gradients"
SERIES: dict[str, dict[str, str]] = {  # signals of the same models by name, and what they are
    CONFIDENCE: {"kind": "confidence"},
    LABELS: {"kind": "label_robustness"},
    CHECKPOINTS: {"kind": "confidence", "adversary": "checkpoints"},
    GRADIENTS: {"kind": "other"},  # minus the logarithm of the norm of the final gradient
}
_JSON, _IDS = "signals.json", "ids.npz"
_ROWS = {"member": ("member.u8", "u1"), **{name: (f"{name}.f32", "<f4") for name in SERIES}}
_SCHEMA = 2
_SIGNALS = f"member {CONFIDENCE} {LABELS}? {CHECKPOINTS}? {GRADIENTS}?"
_MODEL = table({table({Whole: _SIGNALS}): "crc32"})
_CONTENT = table({dict[str, Any]: "facts settings", list[_MODEL]: "models"})  # type: ignore[valid-type]


@dataclass(frozen=True)
class AttackSignals:
    """Signals of many models on the same examples.

    Attributes:
        signal: (n_models, n_examples) float32, higher = more confident; NaN where not taken,
            infinities allowed. May be memory-mapped.
        member: (n_models, n_examples) bool, whether the model was trained on the example.
        example_ids: (n_examples,) unique; of an audited run, unique among its members and among
            its non-members, as the training and test examples of an ExampleTable.
        kind: what the signal is, one of `KINDS`.
        audited: the row of the run that is attacked; None: every model is a target in turn.
        unit_ids: (n_examples,) whose row each example is, or None if each is its own unit.
        coins: independent coins decided the memberships, one for each unit and model.
        share: probability that a coin includes a unit.
        fingerprint: identifies the training data of the audit, or "" where it is not known.
        adversary: "final_model", or "checkpoints" if a signal is a mean over checkpoints.
    """

    signal: NDArray[np.float32]
    member: BoolArray
    example_ids: NDArray[np.generic]
    kind: str = "confidence"
    audited: int | None = None
    unit_ids: NDArray[np.generic] | None = None
    coins: bool = False
    share: float = 0.5
    fingerprint: str = ""
    adversary: str = "final_model"

    def __post_init__(self) -> None:
        for problem in self._problems():
            raise InputError(problem)
        _checks.check_choice("kind", self.kind, KINDS)
        _checks.check_choice("adversary", self.adversary, _SEEN)
        _checks.check_flags(coins=self.coins)

    def _problems(self) -> Iterator[str]:
        """What does not match, shapes first, as all else needs them."""
        signal, member = self.signal, self.member
        if signal.ndim != 2 or signal.shape != member.shape:
            yield text("refusal.signals", "shapes", signal=signal.shape, member=member.shape)
        if signal.dtype != np.float32 or member.dtype != np.bool_:
            yield text("refusal.signals", "types", signal=signal.dtype, member=member.dtype)
        for name, ids in (("example_ids", self.example_ids), ("unit_ids", self.unit_ids)):
            if ids is not None and ids.shape != signal.shape[1:]:
                yield f"{name} {ids.shape} must name each of the {signal.shape[1]} examples"
        if not 0 < self.share < 1:
            yield f"share={self.share} is not between 0 and 1; pass e.g. 0.5"
        if self.audited is not None and not 0 <= self.audited < self.n_models:
            yield text("refusal.signals", "audited", audited=self.audited, n=self.n_models)
        keys = pd.DataFrame({"id": self.example_ids})
        if self.audited is not None:
            keys["member"] = member[self.audited]
        if keys.duplicated().any():
            yield text("refusal.signals", "ids", one=keys.loc[keys.duplicated(), "id"].iloc[0])
        codes = None if self.unit_ids is None else pd.factorize(self.unit_ids)[0]
        for model in range(self.n_models):
            if np.isnan(signal[model]).all():
                yield text("refusal.signals", "no_signal", model=model)
            if codes is not None and (split := split_units(codes, member[model])):
                yield text("refusal.signals", "split_units", model=model, n=split)

    @classmethod
    def from_arrays(
        cls,
        signal: ArrayLike,
        member: ArrayLike,
        example_ids: ArrayLike | None = None,
        **facts: Any,
    ) -> "AttackSignals":
        """Signals from any arrays; ids are positions by default, facts as the attributes.

        Raises:
            InputError: shapes that do not match, members other than 0 and 1, ids that repeat.
        """
        signals = np.asarray(signal, dtype=np.float32)
        included = np.asarray(member)
        if not np.isin(included, (0, 1)).all():
            raise InputError("member holds a value that is neither 0 nor 1")
        ids = np.arange(signals.shape[-1]) if example_ids is None else plain_ids(example_ids)
        if facts.get("unit_ids") is not None:
            facts["unit_ids"] = plain_ids(facts["unit_ids"])
        return cls(signals, included.astype(bool), ids, **facts)

    @property
    def n_models(self) -> int:
        """Number of models."""
        return len(self.signal)

    @property
    def n_examples(self) -> int:
        """Number of examples."""
        return len(self.example_ids)

    def finite(self, model: int) -> FloatArray:
        """The signal of a model in float64, with infinities at its largest and smallest finite one.

        A loss that is 0 in the precision of training has an infinite signal; its true value lies
        somewhere above the largest finite one.
        """
        signal = np.asarray(self.signal[model], dtype=np.float64)
        known = signal[np.isfinite(signal)]
        return np.clip(signal, *((known.min(), known.max()) if len(known) else (-1.0, 1.0)))

    @cached_property
    def centre(self) -> FloatArray:
        """(n_examples,) a value near the signals of each: sums of squares lose nothing less it."""
        return np.nan_to_num(self.finite(0))

    @cached_property
    def sums(self) -> FloatArray:
        """Number, sum and sum of squares of signals less their centre: what `moments` are made of.

        (3, 2, n_examples), of models that were trained on the example, and of those that were not.
        An attack on one model takes its `own_sums` away, so that no sum is made again.
        """
        return np.asarray(sum(map(self.own_sums, range(self.n_models))))

    def own_sums(self, model: int) -> FloatArray:
        """What one model adds to `sums`: nothing where it has no signal."""
        signal, inside = self.finite(model) - self.centre, self.member[model]
        known = np.stack([inside, ~inside]) & ~np.isnan(signal)
        powers = np.stack([np.ones_like(signal), signal, signal**2])
        return np.where(known, powers[:, None], 0.0)

    def check_references(self, target: int, least: int) -> None:
        """Raise InputError unless `least` references are left, of independent data."""
        if self.n_models - 1 < least:
            n = self.n_models - 1
            raise refused("refusal.signals", "few" if least > 1 else "none", n=n, least=least)
        first = slice(None) if self.unit_ids is None else np.unique(self.unit_ids, True)[1]
        mine, of_units = self.member[target], self.member[target][first]
        n = len(of_units)
        for model in set(range(self.n_models)) - {target}:
            other = self.member[model]
            if other.all() and not (self.coins and self.share**n > 1e-9):
                raise refused("refusal.signals", "all_in", model=model)
            if self._too_alike(other[first], of_units):
                shared = float(np.mean(other == mine))
                values = {"model": model, "target": target, "shared": shared}
                raise refused("refusal.signals", "same_examples", **values)
        noise = _DEVIATIONS / np.sqrt(n)
        # Attacks count these; where they follow from the target's examples, they give them away.
        having, spread = self.member.sum(axis=0) - mine, np.sqrt(mine.mean() * (1 - mine.mean()))
        for count in (having, self.n_models - 1 - having) if spread else ():
            inside, outside = float(count[mine].mean()), float(count[~mine].mean())
            by_chance = noise * count.std() / spread
            if abs(inside - outside) > max(_MOST_APART * max(inside, outside), by_chance):
                raise refused("refusal.signals", "dependent", target=target)

    def _too_alike(self, a: BoolArray, b: BoolArray) -> bool:
        """Whether memberships of units are the same or correlated, by more than coins explain."""
        n, n_a, n_b, both = len(a), int(a.sum()), int(b.sum()), int((a & b).sum())
        if np.array_equal(a, b):
            equal = self.share**2 + (1 - self.share) ** 2
            return not self.coins or equal**n < _BY_CHANCE
        spread = n_a * (n - n_a) * n_b * (n - n_b)
        if n * both - n_a * n_b <= _MOST_ALIKE * math.sqrt(spread):
            return False
        return float(stats.hypergeom.sf(both - 1, n, n_a, n_b)) < _BY_CHANCE  # Fisher's exact test

    def save(self, path: Path) -> None:
        """Write a new folder, whose signals are called "confidence"; only its owner can read it."""
        new_folder(path, self.example_ids, self.facts, unit_ids=self.unit_ids)
        for signal, member in zip(self.signal, self.member, strict=True):
            add_model(path, {CONFIDENCE: signal}, member)

    @property
    def facts(self) -> dict[str, Any]:
        """What describes the arrays: kind, audited, coins, share, fingerprint and adversary."""
        return {name: getattr(self, name) for name in _FACTS}

    @classmethod
    def open(cls, path: str | Path) -> "AttackSignals":
        """Read the confidences in a folder of `train_references` or `save`, memory-mapped.

        Raises:
            InputError: no such folder, or arrays that do not match.
            EvidenceError: a damaged file.
        """
        return open_signals(path)[CONFIDENCE]


def split_units(codes: IntArray, member: BoolArray) -> int:
    """How many units, numbered row by row, have both members and non-members."""
    rows, inside = np.bincount(codes), np.bincount(codes, weights=member)
    return int(((inside > 0) & (inside < rows)).sum())


def plain_ids(ids: ArrayLike) -> NDArray[np.generic]:
    """Ids as an array of numbers or texts, never of Python objects.

    >>> plain_ids(np.array(["a", 1], dtype=object)).tolist(), plain_ids([3, 4]).dtype.kind
    (['a', '1'], 'i')
    """
    array = np.asarray(ids)
    return array.astype(str) if array.dtype == object else array


def from_losses(loss: ArrayLike) -> FloatArray:
    """Logit-scaled confidence of cross-entropy losses: log(p / (1 - p)) with p = exp(-loss).

    That is -loss - log(-expm1(-loss)) in float64 for losses in nats, NaN where unknown; it neither
    overflows nor rounds to 0. A loss of 0 becomes infinity, an infinite one minus infinity.
    InputError for a loss below 0, which is no cross-entropy.

    >>> from_losses([1e-300, np.log(2), 50.0, 1000.0]).round(3).tolist()
    [690.776, 0.0, -50.0, -1000.0]
    """
    losses = np.asarray(loss, dtype=np.float64)
    if (losses < 0).any():
        raise refused("refusal.signals", "losses", n=int((losses < 0).sum()))
    with np.errstate(divide="ignore"):
        return np.asarray(-losses - np.log(-np.expm1(-losses)) + 0.0)


def is_signals(path: str | Path) -> bool:
    """Whether this is a folder of `train_references`."""
    return any((Path(path) / of / _JSON).is_file() for of in ("", CONFIDENCE))


def open_signals(path: str | Path) -> dict[str, AttackSignals]:
    """The signals in a folder by name; errors are those of `AttackSignals.open`."""
    path = Path(path)
    if not path.is_dir():
        raise refused("refusal.signals", "no_folder", path=path)
    content, of_rows = read_folder(path)
    models, n = content["models"], len(of_rows["example_ids"])
    if not models:
        raise InputError(f"{path} holds no model yet; run train_references again")
    rows = {name: _rows(path, name, models, n) for name in _ROWS if name in models[0]["crc32"]}
    member = rows.pop("member").view(np.bool_)
    with named(path):
        more: dict[str, Any] = {**of_rows, **content["facts"]}
        return {
            name: AttackSignals(signal, member, **SERIES[name] | more)
            for name, signal in rows.items()
        }


def new_folder(
    path: Path,
    example_ids: NDArray[np.generic],
    facts: Mapping[str, Any],
    *,
    unit_ids: NDArray[np.generic] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Make a folder without models (0700); InputError if it holds anything else.

    Facts are those of `AttackSignals` that all signals share; settings are what the maker of the
    models notes about all of them, compared when a series goes on.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(f"{path} exists and holds no signals; choose another folder")
    make_folder(path)
    write_arrays(path / _IDS, example_ids=example_ids, unit_ids=unit_ids)
    content = {"schema": _SCHEMA, "sensitive": "for the curator only", "facts": facts}
    _files.write_json(path / _JSON, content | {"settings": settings or {}, "models": []})


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """What signals.json says, where `models` has an entry for each whole one, and the ids."""
    if (path / CONFIDENCE / _JSON).is_file() and not (path / _JSON).is_file():
        raise EvidenceError(f"{path} was written by an earlier version; make the signals again")
    content = _files.read_json(path / _JSON)
    check(_CONTENT, content, str(path / _JSON))
    if content.get("schema") != _SCHEMA:
        raise EvidenceError(f"{path / _JSON} is of another schema; make the signals again")
    found = read_npz(path / _IDS)
    with named(path / _IDS):
        units = {"unit_ids": found["unit_ids"]} if "unit_ids" in found else {}
        return content, {"example_ids": found["example_ids"], **units}


def add_model(path: Path, signals: Mapping[str, NDArray[np.float32]], member: BoolArray) -> None:
    """Add one model to a folder, durably: signals by name. A row that was cut short is overwritten.

    InputError for rows of another length, or other signals than those of earlier models.
    """
    content, ids = read_folder(path)
    n, models, checksums = len(ids["example_ids"]), content["models"], dict[str, int]()
    rows = {"member": member, **signals}
    if wrong := [values.shape for values in rows.values() if values.shape != (n,)]:
        raise InputError(f"a row of a model is {wrong[0]}, for {n} examples")
    if models and rows.keys() != models[0]["crc32"].keys():
        raise refused("refusal.signals", "others", names=", ".join(signals), path=path)
    for name, values in rows.items():
        file_name, dtype = _ROWS[name]
        row = np.ascontiguousarray(values, dtype).tobytes()
        checksums[name] = zlib.crc32(row)
        with os.fdopen(open_file(path / file_name, os.O_WRONLY | os.O_CREAT), "wb") as file:
            file.seek(len(models) * len(row))  # fdopen did not truncate
            file.write(row)
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    _files.write_json(path / _JSON, {**content, "models": [*models, {"crc32": checksums}]})


def _rows(path: Path, name: str, models: Sequence[Mapping[str, Any]], n: int) -> NDArray[Any]:
    """(n_models, n) of one file, mapped; EvidenceError if one is cut short or was changed."""
    path, dtype = path / _ROWS[name][0], np.dtype(_ROWS[name][1])
    refuse_links(path)
    if not path.is_file() or path.stat().st_size < len(models) * n * dtype.itemsize:
        raise damaged("refusal.signals", "short", path=path, n=len(models), name=_JSON)
    found = np.memmap(path, dtype, "r", shape=(len(models), n))
    for model, entry in enumerate(models):
        if zlib.crc32(found[model].tobytes()) != entry["crc32"].get(name):
            raise damaged("refusal.signals", "checksum", model=model, path=path)
    return found


def write_arrays(path: Path, **arrays: NDArray[Any] | None) -> None:
    """Write those that there are as an .npz without pickles, which only its owner can read."""
    buffer = io.BytesIO()
    known: dict[str, Any] = {name: one for name, one in arrays.items() if one is not None}
    np.savez(buffer, **known)
    _files.write_atomically(path, buffer.getvalue())
