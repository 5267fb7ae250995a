"""Exposure: how far up a secret ranks among all that it could have been. Sensitive.

After Carlini, Liu, Erlingsson, Kos and Song 2019, "The Secret Sharer: Evaluating and Testing
Unintended Memorization in Neural Networks" (arXiv:1802.08232v3). A secret is drawn at random from
known candidates and inserted into the training data. Its rank is its place among the candidates in
the order of the model's log-perplexity, and its exposure log2(number of candidates / rank), in
bits: about 1.44 on average if the model knows nothing, and all bits of the secret at rank 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy import integrate, stats

from indpriv._checks import check_positive_int
from indpriv._columns import to_floats
from indpriv._files import read_parquet, write_private_parquet
from indpriv._reading import named
from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError

METHOD = "exposure of secrets"
_COLUMNS = ("example_id", "rows", "share", "exposure")


@dataclass(frozen=True)
class Exposures:
    """Exposure of secrets in one model.

    Attributes:
        ids: (n,) whose secret each is.
        rows: (n,) number of rows of the training data with the secret; 0 of a control, which was
            drawn in the same way and inserted nowhere.
        share: (n,) of the candidates that rank at least as high, the secret among them; in
            (0, 1]. Of a secret that was not inserted it is uniform, or a little larger.
        exposure: (n,) bits: -log2(share), unless it is extrapolated.
        n_candidates: how many there are.
        extrapolated: (n,) whether a fitted law gave the exposure, because the secret ranks above
            all sampled candidates. It is an estimate, and no proof rests on it.
    """

    ids: NDArray[np.generic]
    rows: IntArray
    share: FloatArray
    exposure: FloatArray
    n_candidates: int
    extrapolated: BoolArray

    def __post_init__(self) -> None:
        lengths = {len(getattr(self, name)) for name in ("rows", "share", "exposure")}
        if lengths != {len(self.ids)} or len(self.extrapolated) != len(self.ids):
            raise InputError(
                f"there are {len(self.ids)} secrets, but rows, share and exposure are of other "
                "lengths"
            )
        if not len(self.ids) or not ((self.share > 0) & (self.share <= 1)).all():
            raise InputError("shares of candidates must be in (0, 1], of at least one secret")
        if pd.Index(self.ids).has_duplicates:
            raise InputError("ids has the same id twice; give each secret its own")

    @classmethod
    def from_ranks(
        cls, ids: ArrayLike, rows: ArrayLike, ranks: ArrayLike, n_candidates: int
    ) -> Exposures:
        """Exposures of exact ranks (n,) among all candidates, 1 for the most likely one.

        Raises:
            InputError: a rank that is not among 1 to n_candidates, or lengths that differ.

        >>> Exposures.from_ranks(["anna", "ben"], [16, 1], [1, 512], 1024).exposure
        array([10.,  1.])
        """
        places = np.asarray(ranks, dtype=np.int64)
        share = places / check_positive_int("n_candidates", n_candidates, minimum=2)
        return cls(
            np.asarray(ids),
            np.asarray(rows, dtype=np.int64),
            share,
            -np.log2(np.where(places > 0, share, np.nan)) + 0.0,
            n_candidates,
            np.zeros(len(places), dtype=bool),
        )

    @classmethod
    def from_samples(
        cls,
        ids: ArrayLike,
        rows: ArrayLike,
        log_perplexity: ArrayLike,
        samples: ArrayLike,
        n_candidates: int,
    ) -> Exposures:
        """Exposures of secrets whose candidates are too many to rank.

        A secret among the samples' values gets -log2 of their share that ranks at least as high.
        One above all of them gets the exposure that a skew-normal law fitted to the samples gives
        (section 4.3 of the paper), marked as extrapolated, and at most log2(n_candidates).

        Args:
            ids: (n,) whose secret each is.
            rows: (n,) rows with each; 0 of a control.
            log_perplexity: (n,) of the secrets.
            samples: (n, m) of m random candidates for each secret, at least 100.
            n_candidates: number of candidates in all.

        Raises:
            InputError: too few samples, shapes that do not match, or values that are NaN.
        """
        own = np.asarray(log_perplexity, dtype=np.float64)
        drawn = np.asarray(samples, dtype=np.float64)
        if drawn.ndim != 2 or len(drawn) != len(own) or drawn.shape[1] < 100:
            raise InputError(
                f"samples {drawn.shape} must hold at least 100 random candidates for each of the "
                f"{len(own)} secrets"
            )
        if not (np.isfinite(own).all() and np.isfinite(drawn).all()):
            raise InputError("log-perplexities must be finite")
        above = (drawn <= own[:, None]).sum(axis=1)
        share = (above + 1) / (drawn.shape[1] + 1)
        most = np.log2(check_positive_int("n_candidates", n_candidates, minimum=2))
        exposure = np.minimum(-np.log2(share), most)
        for secret in np.flatnonzero(above == 0):
            exposure[secret] = np.clip(
                extrapolated_exposure(float(own[secret]), drawn[secret]), exposure[secret], most
            )
        return cls(
            np.asarray(ids),
            np.asarray(rows, dtype=np.int64),
            share,
            exposure,
            n_candidates,
            above == 0,
        )

    @property
    def inserted(self) -> BoolArray:
        """(n,) whether the training data hold the secret."""
        return self.rows > 0

    def to_scores(self) -> AttackScores:
        """Exposure as the score of a membership attack on the owners, grouped by rows."""
        return AttackScores(
            scores=self.exposure,
            member=self.inserted,
            method=METHOD,
            groups=np.array([f"{rows} rows" for rows in self.rows], dtype=object),
            example_ids=self.ids,
        )

    def to_parquet(self, path: Path) -> None:
        """Write a table that `from_parquet` and `AttackScores.from_file` read (0600)."""
        frame = pd.DataFrame(
            {
                "example_id": self.ids,
                "member": self.inserted,
                "score": self.exposure,
                "group": [f"{rows} rows" for rows in self.rows],
                "rows": self.rows,
                "share": self.share,
                "exposure": self.exposure,
                "extrapolated": self.extrapolated,
            }
        )
        frame.attrs = {"method": METHOD, "n_candidates": self.n_candidates}
        write_private_parquet(frame, path)

    @classmethod
    def from_parquet(cls, path: Path) -> Exposures:
        """Read what `to_parquet` wrote; InputError if it is something else."""
        kinds = {"example_id": "", "rows": "i", "share": "f", "exposure": "f", "extrapolated": "b"}
        with named(path):
            frame = read_parquet(path, kinds=kinds)
            return cls(
                frame["example_id"].to_numpy(),
                frame["rows"].to_numpy(np.int64),
                to_floats(frame["share"]),
                to_floats(frame["exposure"]),
                int(frame.attrs["n_candidates"]),
                frame["extrapolated"].to_numpy(bool),
            )


def exact_rank(log_perplexity: ArrayLike, secret: int) -> int:
    """The place of a candidate among all, 1 if no other is as likely; ties count against it.

    Args:
        log_perplexity: (n_candidates,) of each candidate, smaller = more likely.
        secret: position of the secret among them.

    >>> exact_rank([3.0, 1.0, 2.0, 2.0], 2)
    3
    """
    values = np.asarray(log_perplexity, dtype=np.float64)
    if np.isnan(values).any():
        raise InputError("a log-perplexity is NaN, so that nothing can be ranked")
    return int((values <= values[secret]).sum())


def extrapolated_exposure(log_perplexity: float, samples: FloatArray) -> float:
    """-log2 of the probability of at most this log-perplexity, by a skew-normal law.

    The law is fitted to the samples by maximum likelihood (Carlini et al. 2019, section 4.3). Its
    left tail is integrated relative to its density at the secret, so that it does not underflow.
    """
    law = stats.skewnorm(*stats.skewnorm.fit(samples))
    scale, top = float(law.std()), float(law.logpdf(log_perplexity))
    tail, _ = integrate.quad(
        lambda z: float(np.exp(law.logpdf(log_perplexity - scale * z) - top)), 0, np.inf
    )
    return float(-(top + np.log(scale * tail)) / np.log(2))
