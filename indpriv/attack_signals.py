"""AttackSignals: how confident many models are on the same examples. Sensitive.

The models are trained on random subsets of the examples, so that attacks can compare a model with
others that were trained with an example, or without it. Models are not kept, only their signals.
"""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from indpriv._arrays import BoolArray, FloatArray
from indpriv._checks import check_choice
from indpriv._files import write_atomically
from indpriv._reading import named, parse_json, read_npz
from indpriv._signals_files import SignalsFolder
from indpriv.errors import InputError

KINDS = {
    "confidence": "logit-scaled confidence in the true label, log(p / (1 - p))",
    "label_robustness": "share of perturbed copies that get the true label",
    "other": "any figure that is higher for members",
}
_SEEN = ("final_model", "checkpoints")  # adversaries that a signal of a model can belong to
_MOST_ALIKE = 0.5  # correlation of two memberships; independent coins give 0 +- 1 / sqrt(n)
_DEVIATIONS = 5.0  # of that, so that few examples are not refused by chance
_ARRAYS = ("signal", "member", "example_ids", "unit_ids")


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
        self._check_shapes()
        check_choice("kind", self.kind, KINDS)
        check_choice("adversary", self.adversary, _SEEN)
        if not 0 < self.share < 1:
            raise InputError(f"share={self.share} is not between 0 and 1; pass e.g. 0.5")
        if self.audited is not None and not 0 <= self.audited < self.n_models:
            raise InputError(
                f"audited={self.audited} is no row of the {self.n_models} models; number them from "
                "0"
            )
        self._check_ids()
        for model in range(self.n_models):
            self._check_model(model)

    def _check_ids(self) -> None:
        ids = pd.DataFrame({"id": self.example_ids})
        if self.audited is not None:
            ids["member"] = self.member[self.audited]
        if ids.duplicated().any():
            raise InputError(
                f"example_ids has {ids.loc[ids.duplicated(), 'id'].iloc[0]} twice; each example "
                "needs its own (a member and a non-member of the audited run may share one)"
            )

    def _check_shapes(self) -> None:
        if self.signal.ndim != 2 or self.signal.shape != self.member.shape:
            raise InputError(
                f"signal {self.signal.shape} and member {self.member.shape} must both be "
                "(n_models, n_examples)"
            )
        if self.signal.dtype != np.float32 or self.member.dtype != np.bool_:
            raise InputError(
                f"signal is {self.signal.dtype} and member {self.member.dtype}; make them float32 "
                "and bool, e.g. with AttackSignals.from_arrays"
            )
        for name, ids in (("example_ids", self.example_ids), ("unit_ids", self.unit_ids)):
            if ids is not None and ids.shape != self.signal.shape[1:]:
                raise InputError(
                    f"{name} {ids.shape} must name each of the {self.signal.shape[1]} examples"
                )

    def _check_model(self, model: int) -> None:
        if np.isnan(self.signal[model]).all():
            raise InputError(
                f"model {model} has no signal (all are NaN, as after training that diverged); "
                "leave it out"
            )
        if self.unit_ids is None:
            return
        codes, _ = pd.factorize(self.unit_ids)
        rows = np.bincount(codes)
        inside = np.bincount(codes, weights=self.member[model])
        if split := int(((inside > 0) & (inside < rows)).sum()):
            raise InputError(
                f"model {model} was trained on some rows of {split} units and not on their "
                "others; include or leave out whole units"
            )

    @classmethod
    def from_arrays(
        cls,
        signal: ArrayLike,
        member: ArrayLike,
        example_ids: ArrayLike | None = None,
        **facts: Any,
    ) -> AttackSignals:
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

    @property
    def targets(self) -> tuple[int, ...]:
        """The models that are attacked: the audited one, or each in turn."""
        return tuple(range(self.n_models)) if self.audited is None else (self.audited,)

    def check_references(self, target: int, least: int) -> None:
        """Raise InputError unless `least` references of other data are left beside the target."""
        if self.n_models - 1 < least:
            raise InputError(
                f"the number of reference models is {self.n_models - 1}, and this attack needs "
                f"{least}; train more with indpriv.attacks.train_references"
                + ", or use rmia, which works with one"
                * (least > 1)
            )
        limit = max(_MOST_ALIKE, _DEVIATIONS / np.sqrt(self.n_examples))
        mine = self.member[target]
        for model in set(range(self.n_models)) - {target}:
            other = self.member[model]
            if np.array_equal(other, mine) or _correlation(other, mine) > limit:
                shared = float(np.mean(other == mine))
                raise InputError(
                    f"reference {model} was trained on the same examples as the attacked model "
                    f"{target}, as far as {shared:.1%} of their memberships go; references need "
                    "training sets of their own, drawn independently"
                )

    def save(self, path: Path) -> None:
        """Write an .npz file without pickles, which only the owner can read (0600)."""
        arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        buffer = io.BytesIO()
        np.savez(buffer, **arrays, facts=np.array(json.dumps(self.facts)))
        write_atomically(path, buffer.getvalue())

    @property
    def facts(self) -> dict[str, Any]:
        """What describes the arrays: kind, audited, coins, share, fingerprint and adversary."""
        names = ("kind", "audited", "coins", "share", "fingerprint", "adversary")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def open(cls, path: str | Path) -> AttackSignals:
        """Read signals: a folder that `train_references` wrote (memory-mapped), or an .npz.

        Args:
            path: the folder, or an .npz with the arrays signal, member and optionally example_ids
                and unit_ids.

        Raises:
            InputError: no such file, or arrays that do not match.
            EvidenceError: a damaged file, or one that would run code.
        """
        path = Path(path)
        if path.is_dir():
            folder = SignalsFolder.open(path)
            with named(path):
                signal, member = folder.arrays()
                ids, units = folder.example_ids, folder.unit_ids
                return cls(signal, member, ids, unit_ids=units, **folder.facts)
        if not path.is_file():
            raise InputError(f"{path} does not exist; pass one of train_references, or an .npz")
        found = read_npz(path)
        with named(path):
            facts = parse_json(str(found["facts"]).encode()) if "facts" in found else {}
            missing = [name for name in ("signal", "member") if name not in found]
            if missing:
                raise InputError(f"{path} lacks the array {' and '.join(missing)}")
            return cls.from_arrays(
                found["signal"],
                found["member"],
                found.get("example_ids"),
                unit_ids=found.get("unit_ids"),
                **facts,
            )


def _correlation(a: BoolArray, b: BoolArray) -> float:
    """Pearson's correlation of two memberships; 0 where one is constant."""
    share_a, share_b, both = float(a.mean()), float(b.mean()), float((a & b).mean())
    spread = share_a * (1 - share_a) * share_b * (1 - share_b)
    return (both - share_a * share_b) / np.sqrt(spread) if spread > 0 else 0.0


def plain_ids(ids: ArrayLike) -> NDArray[np.generic]:
    """Ids as an array of numbers or texts, never of Python objects.

    >>> plain_ids(np.array(["a", 1], dtype=object)).tolist(), plain_ids([3, 4]).dtype.kind
    (['a', '1'], 'i')
    """
    array = np.asarray(ids)
    return array.astype(str) if array.dtype == object else array


def from_losses(loss: ArrayLike) -> FloatArray:
    """Logit-scaled confidence of cross-entropy losses: log(p / (1 - p)) with p = exp(-loss).

    Args:
        loss: losses in nats, at least 0; NaN where unknown. A loss of 0 becomes infinity, an
            infinite loss minus infinity.

    Returns:
        -log(expm1(loss)) in float64, of the same shape; it neither overflows nor rounds to 0.

    Raises:
        InputError: a loss below 0, which is no cross-entropy.

    >>> from_losses([1e-300, np.log(2), 50.0, 1000.0]).round(3).tolist()
    [690.776, 0.0, -50.0, -1000.0]
    """
    losses = np.asarray(loss, dtype=np.float64)
    if (losses < 0).any():
        raise InputError(
            f"{int((losses < 0).sum())} losses are below 0, which no cross-entropy is; pass "
            "cross-entropy losses, or signals of your own"
        )
    with np.errstate(divide="ignore", over="ignore"):
        small = -np.log(np.expm1(np.minimum(losses, 1.0)))
        large = -(losses + np.log1p(-np.exp(-np.maximum(losses, 1.0))))
    return np.where(losses < 1.0, small, large) + 0.0
