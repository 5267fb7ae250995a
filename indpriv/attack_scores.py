"""AttackScores: the scores that an attack gives to members and non-members. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._columns import to_texts
from indpriv._files import read_parquet, write_private_parquet
from indpriv.errors import EvidenceError, InputError

_MEMBERSHIP = {"1": True, "true": True, "1.0": True, "0": False, "false": False, "0.0": False}
_COINS = "independent_fair_coins"


@dataclass(frozen=True)
class AttackScores:
    """Scores of one attack on one model.

    Attributes:
        scores: (n,) float64, higher = more likely a member; infinities allowed, no NaN.
        member: (n,) bool, whether the example was trained on.
        groups: (n,) str, the group of each example, or None.
        method: what produced the scores, in a few words.
        fair_coins: an independent fair coin decided whether to include each example, which a proof
            from one run needs.
    """

    scores: NDArray[np.float64]
    member: NDArray[np.bool_]
    method: str
    groups: NDArray[np.generic] | None = None
    fair_coins: bool = False

    def __post_init__(self) -> None:
        if self.scores.ndim != 1 or self.scores.shape != self.member.shape:
            raise InputError(
                f"scores {self.scores.shape} and member {self.member.shape} must have the same "
                f"length"
            )
        if self.groups is not None and self.groups.shape != self.scores.shape:
            raise InputError(
                f"groups {self.groups.shape} and scores {self.scores.shape} must have the same "
                f"length"
            )
        if np.isnan(self.scores).any():
            raise InputError(
                f"{int(np.isnan(self.scores).sum())} attack scores are NaN; an attack must score "
                f"every "
                "example"
            )

    def to_parquet(self, path: Path) -> None:
        """Write columns score, member and, if known, group, readable by the owner only (0600)."""
        frame = pd.DataFrame({"score": self.scores, "member": self.member})
        if self.groups is not None:
            frame["group"] = self.groups
        frame.attrs = {"method": self.method, _COINS: self.fair_coins}
        write_private_parquet(frame, path)

    @classmethod
    def from_file(cls, path: str | Path) -> AttackScores:
        """Read scores of any attack.

        Args:
            path: CSV with a header, or Parquet. Columns: score (higher = member), member (1/0 or
                true/false) and optionally group, of any type; missing groups become "(missing)".

        Raises:
            InputError: there is no such file, it is of another type, or a column is missing or
                holds other values.
        """
        path = Path(path)
        frame = _read(path)
        missing = [name for name in ("score", "member") if name not in frame.columns]
        if missing:
            raise InputError(
                f"{path} lacks the column{'s' * (len(missing) > 1)} {' and '.join(missing)} (it "
                f"has "
                f"{', '.join(map(str, frame.columns))}); an attack's scores need score (higher = "
                "member), member (1 or 0) and optionally group"
            )
        if frame.empty:
            raise InputError(f"{path} holds no scores; it needs one row per attacked example")
        return cls(
            scores=_numbers(frame["score"], path),
            member=_memberships(frame["member"], path),
            method=str(frame.attrs.get("method", "scores from outside")),
            groups=to_texts(frame["group"]) if "group" in frame.columns else None,
            fair_coins=frame.attrs.get(_COINS) is True,
        )


def _read(path: Path) -> pd.DataFrame:
    kind = path.suffix.lower()
    if kind not in (".csv", ".parquet"):
        raise InputError(f"{path} is neither .csv nor .parquet; write the scores as one of the two")
    if kind == ".parquet":
        return read_parquet(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        # Only an empty field is missing: a group may be called "NA" or "null".
        return pd.read_csv(
            path, dtype=str, keep_default_na=False, na_values=[""], encoding="utf-8-sig"
        )
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise EvidenceError(
            f"{path} cannot be read as CSV ({error}); write it with a header and UTF-8 text"
        ) from error


def _numbers(column: pd.Series[Any], path: Path) -> NDArray[np.float64]:
    try:
        found: NDArray[np.float64] = pd.to_numeric(column).to_numpy(np.float64, na_value=np.nan)
    except (ValueError, TypeError) as error:
        raise InputError(
            f"{path}: score holds a value that is not a number ({error}); higher must mean member"
        ) from error
    return found


def _memberships(column: pd.Series[Any], path: Path) -> NDArray[np.bool_]:
    texts = to_texts(column)
    unknown = sorted({str(text) for text in texts if str(text).strip().lower() not in _MEMBERSHIP})
    if unknown:
        raise InputError(
            f"{path}: member holds {unknown[0]!r}; write 1 or true for a member, 0 or false for a "
            "non-member"
        )
    return np.array([_MEMBERSHIP[str(text).strip().lower()] for text in texts], dtype=bool)
