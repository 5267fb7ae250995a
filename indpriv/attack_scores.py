"""AttackScores: the scores that an attack gives to members and non-members. Sensitive."""

import csv
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks, _files, _reading
from indpriv._columns import to_texts
from indpriv._facts import damaged, refused, text
from indpriv._types import ArrayLike, BoolArray, FloatArray, IntArray, NDArray
from indpriv.errors import InputError

_MEMBERSHIP = {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}
_COINS = "independent_fair_coins"
_OPTIONAL = {"group": "groups", "example_id": "example_ids", "model": "model"}  # column -> field
_MOST_COLUMNS = 1000  # of a CSV file
_COLUMNS = ("score", "member", *_OPTIONAL)
_HIGHER = "a number; higher must mean member"
_FROM_0 = "a whole number; number the attacked models from 0"

# What the attacker of each adversary sees, weakest first.
ADVERSARIES = {
    "final_model": "the final model",
    "checkpoints": "several checkpoints of the run",
    "updates": "every noisy update, but no other example's membership",
    "full": "every noisy update, and the membership or the batches of all other examples",
    "gradients": "a gradient or an update of the example itself, once",
}
# What attackers see, from the least to the most.
RUNGS = {
    "labels": "predicted labels",
    "losses": "losses of the final model",
    "references": "confidences of the final model, with reference models",
    "model": "parameters of the final model",
    "checkpoints": "confidences of every checkpoint, with reference models",
}


@dataclass(frozen=True)
class AttackScores:
    """Scores of one attack on one model, or on several models that are told apart by `model`.

    Attributes:
        scores: (n,) float64, higher = more likely a member; infinities allowed, no NaN.
        member: (n,) bool, whether the example was trained on.
        groups: (n,) str, the group of each example, or None.
        method: what produced the scores, in a few words.
        fair_coins: an independent fair coin decided whether to include each example, which a proof
            from one run needs.
        example_ids: (n,) whose score each is, or None. A training and a test example may share an
            id: they differ in `member`.
        model: (n,) int64, the number of the attacked model, or None for one model.
        adversary: what the attacker sees, one of `ADVERSARIES`. It decides which bounds hold for
            the scores.
        details: further numbers of each score by name, (n,) each; NaN where there is none.
    """

    scores: FloatArray
    member: BoolArray
    method: str
    groups: NDArray[np.generic] | None = None
    fair_coins: bool = False
    example_ids: NDArray[np.generic] | None = None
    model: IntArray | None = None
    adversary: str = "final_model"
    details: Mapping[str, FloatArray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given = {"scores": np.asarray(self.scores, np.float64), "member": np.asarray(self.member)}
        if given["member"].dtype != bool:  # numbers would choose other scores, as positions
            given["member"] = _memberships(pd.Series(given["member"]))
        given |= {k: np.asarray(v) for k in _OPTIONAL.values() if (v := vars(self)[k]) is not None}
        vars(self).update(given, details={k: np.asarray(v) for k, v in self.details.items()})
        shape = self.scores.shape
        for name, values in self._columns().items():
            if values.shape != shape or values.ndim != 1:
                raise InputError(f"{name} {values.shape} and scores {shape} must have one length")
        _checks.check_choice("adversary", self.adversary, ADVERSARIES)
        _checks.check_flags(fair_coins=self.fair_coins)
        if np.isnan(self.scores).any():
            raise refused("refusal.scores", "nan", n=int(np.isnan(self.scores).sum()))

    def take(self, chosen: BoolArray) -> "AttackScores":
        """The scores that a mask (n,) chooses."""
        columns = {name: values[chosen] for name, values in self._columns().items()}
        details = {name: columns.pop(name) for name in self.details}
        return replace(self, scores=self.scores[chosen], details=details, **columns)

    def _columns(self) -> dict[str, Any]:
        """What there is beside the scores, by field or detail."""
        fields = {name: getattr(self, name) for name in ("member", *_OPTIONAL.values())}
        return {k: v for k, v in (fields | dict(self.details)).items() if v is not None}

    def check_one_model(self, bound: str) -> None:
        """Raise InputError if the scores are of several models, for which `bound` does not hold."""
        if self.model is not None and len(self.model) and np.ptp(self.model):
            raise refused("refusal.scores", "several_models", bound=bound)

    def check_adversary(self, bound: str, refused: Collection[str] = ("full",)) -> None:
        """Raise InputError if `bound`, in a few words, does not hold for what the attacker sees.

        It never holds for several models; refused: the adversaries for which it does not hold.
        """
        if self.adversary in refused:
            case = "another_gradient" if self.adversary == "gradients" else "shared_noise"
            values = {"bound": bound, "name": self.adversary, "sees": ADVERSARIES[self.adversary]}
            raise InputError(text("refusal.scores", case, **values))
        self.check_one_model(bound)

    def to_parquet(self, path: str | Path) -> None:
        """Write columns score and member, those of group, example_id and model, and the details.

        Only the owner can read the file (0600).
        """
        column_of = {field: column for column, field in _OPTIONAL.items()}
        columns = {column_of.get(name, name): each for name, each in self._columns().items()}
        frame = pd.DataFrame({"score": self.scores, **columns})
        frame.attrs = {
            "method": self.method,
            _COINS: self.fair_coins,
            "adversary": self.adversary,
            "details": list(self.details),
        }
        _files.write_private_parquet(frame, Path(path))

    @classmethod
    def from_file(cls, path: str | Path) -> "AttackScores":
        """Read scores of any attack from a CSV with a header, or Parquet.

        Columns: score (higher = member), member (1/0 or true/false) and optionally group, of any
        type (missing groups become "(missing)"), example_id and model (a whole number). InputError
        for no such file, another type, and a column that is missing or holds other values.
        """
        with _reading.named(path := Path(path)):
            frame = _read(path)
            missing = [name for name in ("score", "member") if name not in frame.columns]
            if missing:
                lacking = f"column{'s' * (len(missing) > 1)} {' and '.join(missing)}"
                there = ", ".join(map(str, frame.columns[:9]))
                raise refused("refusal.scores", "columns", lacking=lacking, there=there)
            if frame.empty:
                raise InputError("it holds no scores; it needs one row per attacked example")
            return cls(
                scores=_numbers(frame["score"], np.float64, _HIGHER),
                member=_memberships(frame["member"]),
                method=str(frame.attrs.get("method", "scores from outside")),
                groups=to_texts(frame["group"]) if "group" in frame else None,
                fair_coins=frame.attrs.get(_COINS) is True,
                example_ids=frame["example_id"].to_numpy() if "example_id" in frame else None,
                model=_numbers(frame["model"], np.int64, _FROM_0) if "model" in frame else None,
                adversary=str(frame.attrs.get("adversary", "final_model")),
                details={
                    name: frame[name].to_numpy(np.float64)
                    for name in frame.attrs.get("details", ())
                },
            )


class CanaryEvidence:
    """Evidence of canaries in directions of their own, each a member if a fair coin says so.

    Attributes:
        member: (n,) bool.
        lengths: (n,) norms of what they send over max_grad_norm.
    """

    def __init__(self, count: int, lengths: ArrayLike, rng: np.random.Generator) -> None:
        self.member = rng.random(count) < 0.5
        self.lengths = np.resize(np.asarray(lengths, dtype=np.float64), count)
        self._evidence = np.zeros(count)

    def observe(self, seen: FloatArray, setting: Mapping[str, float]) -> None:
        """Add what a step of these settings shows along each direction, (n,)."""
        self._evidence += log_likelihood_ratio(
            seen / (setting["noise_multiplier"] * setting["max_grad_norm"]),
            relative_norm=self.lengths,
            noise_multiplier=setting["noise_multiplier"],
            sample_rate=setting["sample_rate"],
        )

    def scores(self, method: str) -> AttackScores:
        """The evidence for each canary's membership; groups are lengths."""
        return AttackScores(
            scores=self._evidence.copy(),
            member=self.member.copy(),
            method=method,
            groups=np.array([f"{length:g}" for length in self.lengths], dtype=object),
            fair_coins=True,
            adversary="updates",
        )


def _read(path: Path) -> pd.DataFrame:
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise InputError(f"{path} is neither .csv nor .parquet; write the scores as one of the two")
    if kind == ".parquet":
        return _files.read_parquet(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        # Only an empty field is missing: a group may be called "NA" or "null".
        options: Any = {"dtype": str, "keep_default_na": False, "na_values": [""]}
        options |= {"encoding": "utf-8-sig", "index_col": False}
        with path.open(encoding="utf-8-sig", newline="") as file:
            names = next(csv.reader(file), [])
        if not names:
            raise csv.Error("it is empty")
        if len(names) > _MOST_COLUMNS:  # they would fill the memory, however short the rows are
            raise InputError(f"{path} has {len(names):,} columns, more than {_MOST_COLUMNS:,}")
        if "score" not in names or "member" not in names:
            return pd.DataFrame(columns=names)
        found: pd.DataFrame = pd.read_csv(path, usecols=_COLUMNS.__contains__, **options)
        return found
    except (pd.errors.ParserError, csv.Error, UnicodeDecodeError) as error:
        raise damaged("refusal.scores", "csv", path=path, error=error) from error


def _numbers(column: "pd.Series[Any]", dtype: type, what: str) -> NDArray[Any]:
    """A column as numbers; InputError where it holds something else than `what`."""
    try:
        found = pd.to_numeric(column)
        if dtype is np.float64:
            return found.to_numpy(dtype, na_value=np.nan)
        return found.to_numpy().astype(dtype, casting="safe")
    except (ValueError, TypeError) as error:
        raise InputError(f"{column.name} holds a value that is not {what} ({error})") from error


def _memberships(column: "pd.Series[Any]") -> BoolArray:
    texts = to_texts(column)
    unknown = sorted({str(text) for text in texts if str(text).strip().lower() not in _MEMBERSHIP})
    if unknown:
        raise refused("refusal.scores", "member", value=unknown[0])
    return np.array([_MEMBERSHIP[str(text).strip().lower()] for text in texts], dtype=bool)


def log_likelihood_ratio(
    score: ArrayLike, *, relative_norm: ArrayLike, noise_multiplier: float, sample_rate: float
) -> FloatArray:
    """Log-likelihood ratio (n,) of one step of DP-SGD: positive where it speaks for "in". In nats.

    The attacker subtracts from the noisy sum what all other examples contributed, and projects the
    rest on the example's gradient. In standard deviations of the noise, this score (n,) is N(0, 1)
    without the example. With it, it is N(relative_norm / noise_multiplier, 1) in the steps that
    drew the example, at rate sample_rate, and N(0, 1) in the others. By Neyman and Pearson no test
    is more powerful than the sum of these ratios over the steps.

    relative_norm: (n,) or one: norm of the clipped gradient over max_grad_norm.

    >>> log_likelihood_ratio([2.0], relative_norm=1.0, noise_multiplier=1.0, sample_rate=1.0)
    array([1.5])
    """
    shift = np.asarray(relative_norm, dtype=np.float64) / noise_multiplier
    drawn = np.asarray(score, dtype=np.float64) * shift - shift**2 / 2
    if sample_rate == 1:
        return drawn
    ratio: FloatArray = np.logaddexp(np.log1p(-sample_rate), np.log(sample_rate) + drawn)
    return ratio
