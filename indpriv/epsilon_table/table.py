"""EpsilonTable: the epsilon of each example and its claim. Sensitive.

An individual epsilon describes the run that happened. It is not a differential-privacy guarantee.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv._arrays import FloatArray, IntArray
from indpriv._files import write_private_parquet
from indpriv._formatting import format_delta, format_epsilon
from indpriv._plain import from_json
from indpriv.errors import InputError

DISCLAIMER = (
    "Individual epsilon describes this run. It is not a differential-privacy guarantee; "
    "quote the worst-case epsilon as the guarantee."
)


_SAMPLERS = {
    "poisson": "Poisson",
    "truncated_poisson": "truncated Poisson",
    "fixed_size": "fixed-size",
}
_RELATIONS = {
    "add_remove": "add/remove",
    "zero_out": "zero out the contribution of",
    "replace_one": "replace",
}


def relation_words(neighbouring: str) -> str:
    """A neighbouring relation in words, e.g. "add/remove", which "one example" may follow."""
    return _RELATIONS.get(neighbouring, neighbouring)


FALSE_POSITIVE_RATE = 0.01  # at which accounts state the limit on membership tests
KEPT_DETAILS = ("n_rows", "unit_worst_case", "true_positive_limit")


@dataclass(frozen=True)
class Account:
    """What an epsilon means, stated with every figure.

    Attributes:
        delta, unit, neighbouring, sampler: define it.
        participation: "secret" if an attacker does not know who took part in which step, as
            amplification by sampling needs; "known" if the bound holds against one who does;
            "known in some runs" of several that were composed.
        accountant, conversion, between_records: how it was computed.
        tolerance: of an account by an earlier version, within which epsilons depended on which
            other examples were accounted with them; 0 today.
        rounding: of norms, as a fraction of max_grad_norm; 0 is none.
        rounding_mode: "up" or "nearest".
        total_steps: of the run.
        recorded_share: share of them that have a record.
        max_batch_size: cap on batches, of sampler "truncated_poisson"; else None.
        privacy_filter: what caps all epsilons; "" if only max_grad_norm does.
        rows_per_unit: None if each row is a unit. Otherwise the rows of a unit were accounted
            together, and the worst case is that of the largest unit, which has this many rows.
        clipping_norm_epsilon: what the worst case contains for a clipping norm that is a private
            release, e.g. the private median of the norms at the start; 0 if it is not.
    """

    delta: float
    unit: str
    neighbouring: str
    sampler: str
    accountant: str
    conversion: str
    between_records: str
    rounding: float
    rounding_mode: str
    total_steps: int
    recorded_share: float
    privacy_filter: str = ""
    rows_per_unit: int | None = None
    participation: str = "secret"
    tolerance: float = 0.0
    max_batch_size: int | None = None
    clipping_norm_epsilon: float = 0.0

    @property
    def guaranteed_by(self) -> str:
        """What the worst case rests on."""
        return f"{self.privacy_filter}{self._clipping_norm}" if self.privacy_filter else self.method

    @property
    def method(self) -> str:
        """The accountant in words."""
        known = {"gaussian": "exact Gaussian accountant"}
        name = known.get(self.accountant, f"{self.accountant.upper()} accountant")
        return f"{name}{self._clipping_norm}"

    @property
    def _clipping_norm(self) -> str:
        """What is added for a private clipping norm, in words."""
        if not (cost := self.clipping_norm_epsilon):
            return ""
        return f", including epsilon {format_epsilon(cost)} for a private clipping norm"

    @property
    def sampling(self) -> str:
        """What the bound assumes of sampling, e.g. "Poisson sampling"."""
        if self.participation == "known":
            return "participation known"
        words = f"{_SAMPLERS.get(self.sampler, self.sampler)} sampling"
        if self.participation != "secret":
            words += f", participation {self.participation}"
        cap = self.max_batch_size
        return words if cap is None else f"{words} with at most {cap:,} in a batch"

    @property
    def one_unit(self) -> str:
        """The unit of privacy, with the number of rows that the worst case counts for it."""
        rows = self.rows_per_unit or 1
        return self.unit if rows == 1 else f"{self.unit} of at most {rows:,} rows"

    @property
    def relation(self) -> str:
        """The neighbouring relation, e.g. "add/remove one example"."""
        return f"{relation_words(self.neighbouring)} one {self.one_unit}"

    @property
    def id_column(self) -> str:
        """The ids of a table: "example_id", or "unit_id" if rows were accounted together."""
        return "example_id" if self.rows_per_unit is None else "unit_id"

    @property
    def plural(self) -> str:
        """What epsilons are of, in the plural."""
        return "examples" if self.rows_per_unit is None else f"{self.unit}s"

    @property
    def at_worst_case(self) -> str:
        """The worst case that an epsilon can reach: that of as many rows as its unit has."""
        several = (self.rows_per_unit or 1) > 1
        return "at the worst case of as many rows" if several else "at the worst case"

    @property
    def why_at_worst_case(self) -> str:
        """What is known of examples or units whose epsilon is the worst case."""
        if self.participation == "known":
            return "took part the most, and were clipped in each of their steps"
        pairs = self.sampler == "truncated_poisson" or self.neighbouring == "replace_one"
        loose = self.sampler == "fixed_size" or (pairs and self.accountant == "pld")
        if self.privacy_filter or loose:
            return "no smaller bound is proven for them"
        return "clipped in every step"

    def describe(self) -> str:
        """One line that is shown with every epsilon."""
        return f"delta {format_delta(self.delta)}, {self.relation}, {self.sampling}, {self.method}"


@dataclass(frozen=True)
class EpsilonTable:
    """Output-specific epsilon of every example.

    Norms without rounding and very many settings are counted at the nodes of a lattice, which makes
    epsilon a little larger than it need be: for the accountant "rdp" by less than 0.1 percent in
    ordinary runs. "pld" rounds them up (down for the lower end): norms by at most 0.15 percent, and
    settings by at most 0.15 percent or, if both noise and sample rate take thousands of values, by
    a few percent.

    Attributes:
        example_ids: (n_examples,); ids of units, one row per unit, unless account.rows_per_unit is
            None.
        epsilon, epsilon_lower, epsilon_upper: (n_examples,); the bracket covers numerical error
            only; the lower end is 0 by RDP and for units of several rows, and without what a
            private clipping norm costs.
        worst_case_epsilon: the run's guarantee: of an example at max_grad_norm in every step, with
            known participation of the most exposed one in the steps that it took part in, or the
            cap of the run's privacy filter if that is smaller.
        claim: "exact" (never too small for this trajectory) or "estimate".
        claim_reason: why.
        account: delta, unit, neighbouring relation, sampler and method.
        details: further columns, each (n_examples,). true_positive_limit, the largest rate of a
            membership test at a false-positive rate of 1 %, by Rényi divergences, and exact with
            known participation. Of "rdp": best_order, and order_at_boundary
            where a wider range of orders might give less. Of "pld": rdp_epsilon.
            Of units: n_rows, and unit_worst_case, the worst case of a unit with that number of
            rows; worst_case_epsilon is that of the unit with the most. Under a privacy filter:
            left_out_at, the step from which an example was left out, or -1.
    """

    example_ids: NDArray[np.generic]
    epsilon: FloatArray
    epsilon_lower: FloatArray
    epsilon_upper: FloatArray
    worst_case_epsilon: float
    claim: str
    claim_reason: str
    account: Account
    details: Mapping[str, NDArray[np.generic]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        columns = {
            "epsilon": self.epsilon,
            "epsilon_lower": self.epsilon_lower,
            "epsilon_upper": self.epsilon_upper,
        }
        for name, values in columns.items():
            bad = ~(np.isfinite(values) & (values >= 0))
            if bad.any():
                raise InputError(
                    f"the accountant gave {name}={values[bad][0]} for example "
                    f"{self.example_ids[bad].tolist()[0]!r}; an epsilon must be a finite number of "
                    "at least 0"
                )
        if not (np.isfinite(self.worst_case_epsilon) and self.worst_case_epsilon >= 0):
            raise InputError(
                f"the accountant gave worst_case_epsilon={self.worst_case_epsilon}; it must be a "
                "finite number of at least 0"
            )

    def __len__(self) -> int:
        return len(self.example_ids)

    @property
    def at_worst_case(self) -> NDArray[np.bool_]:
        """(n_examples,) whether epsilon is the worst case, of a unit that of as many rows."""
        worst = self.details.get("unit_worst_case", np.float64(self.worst_case_epsilon))
        return np.asarray(self.epsilon >= worst.astype(np.float64) * (1 - 1e-9))

    def table(self, details: Collection[str] = KEPT_DETAILS) -> "EpsilonTable":
        """The table itself, with all its details; see `EpsilonParts`, which reads them."""
        return self

    def tables(self, details: Collection[str] = KEPT_DETAILS) -> Iterator["EpsilonTable"]:
        """Yield the table itself; see `EpsilonParts`, which yields several."""
        yield self

    def take(self, kept: NDArray[np.bool_] | IntArray | slice) -> "EpsilonTable":
        """The table of the examples that a mask (n_examples,), positions or a slice choose."""
        return replace(
            self,
            example_ids=self.example_ids[kept],
            epsilon=self.epsilon[kept],
            epsilon_lower=self.epsilon_lower[kept],
            epsilon_upper=self.epsilon_upper[kept],
            details={name: values[kept] for name, values in self.details.items()},
        )

    def with_worst_case(self, epsilon: float) -> "EpsilonTable":
        """The table of some units of a run, once the worst case of all is known.

        Worst cases of units grow by as much as that of the run.
        """
        more, details = epsilon - self.worst_case_epsilon, dict(self.details)
        if more and "unit_worst_case" in details:
            details["unit_worst_case"] = details["unit_worst_case"].astype(np.float64) + more
        return replace(self, worst_case_epsilon=epsilon, details=details)

    @classmethod
    def joined(cls, parts: Sequence["EpsilonTable"]) -> "EpsilonTable":
        """The units of all parts of a table, with the largest worst case."""
        if len(parts) == 1:
            return parts[0]
        worst = max(part.worst_case_epsilon for part in parts)
        parts = [part.with_worst_case(worst) for part in parts]
        names, epsilon = parts[0].details, np.concatenate([part.epsilon for part in parts])
        upper = epsilon
        if any(part.epsilon_upper is not part.epsilon for part in parts):
            upper = np.concatenate([part.epsilon_upper for part in parts])
        return replace(
            parts[0],
            example_ids=np.concatenate([part.example_ids for part in parts]),
            epsilon=epsilon,
            epsilon_lower=np.concatenate([part.epsilon_lower for part in parts]),
            epsilon_upper=upper,
            details={name: np.concatenate([p.details[name] for p in parts]) for name in names},
        )

    def to_frame(self) -> pd.DataFrame:
        """One row per example (or unit): its id, epsilon, epsilon_lower, epsilon_upper and details.

        The ids are in the column example_id (or unit_id). `.attrs` says what the numbers mean
        (claim, delta, unit, neighbouring relation, sampler, disclaimer).
        """
        frame = pd.DataFrame(
            {
                self.account.id_column: self.example_ids,
                "epsilon": self.epsilon,
                "epsilon_lower": self.epsilon_lower,
                "epsilon_upper": self.epsilon_upper,
                **self.details,
            }
        )
        frame.attrs = {
            "sensitive": "for the curator only",
            "disclaimer": DISCLAIMER,
            "worst_case_epsilon": self.worst_case_epsilon,
            "claim": self.claim,
            "claim_reason": self.claim_reason,
            "account": dict(vars(self.account)),
        }
        return frame

    def to_parquet(self, path: Path, *, columns: pd.DataFrame | None = None) -> None:
        """Write epsilon.parquet, readable by its owner only (0600).

        Args:
            path: the file.
            columns: further columns, one row per example in this table's order (loss, correct,
                metadata).
        """
        frame = self.to_frame()
        if columns is not None:
            attrs = frame.attrs
            frame = pd.concat([frame, columns.reset_index(drop=True)], axis=1)
            frame.attrs = attrs
        write_private_parquet(frame, path)

    @classmethod
    def from_frame(
        cls, frame: pd.DataFrame, details: Collection[str] = KEPT_DETAILS
    ) -> "EpsilonTable":
        """The table that `to_frame` or `to_parquet` wrote; InputError if the claim is missing.

        details: columns of the frame that are details, where it has them.
        """
        missing = {"worst_case_epsilon", "claim", "claim_reason", "account"} - set(frame.attrs)
        if missing:
            raise InputError(
                f"this epsilon table lacks {', '.join(sorted(missing))}; it was not written by "
                "indpriv"
            )
        account = from_json(Account, frame.attrs["account"], "the account of this epsilon table")
        kept = [name for name in details if name in frame]
        return cls(
            example_ids=frame[account.id_column].to_numpy(),
            epsilon=frame["epsilon"].to_numpy(np.float64),
            epsilon_lower=frame["epsilon_lower"].to_numpy(np.float64),
            epsilon_upper=frame["epsilon_upper"].to_numpy(np.float64),
            worst_case_epsilon=float(frame.attrs["worst_case_epsilon"]),
            claim=frame.attrs["claim"],
            claim_reason=frame.attrs["claim_reason"],
            account=account,
            details={name: frame[name].to_numpy() for name in kept},
        )
