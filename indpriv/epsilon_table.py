"""The epsilon of each example and its claim, in memory or in the parts of a data set. Sensitive.

An individual epsilon describes the run that happened. It is not a differential-privacy guarantee.

epsilon.parquet is a file, or a folder of parts where the table is long. A folder holds
`_account.json`, which says what its parts belong to and how many there are, and part-00000.parquet,
part-00001.parquet and so on, each with the next PART_ROWS rows and the columns and metadata of a
file. A part exists whole or not at all. Readers of Parquet data sets leave out names that begin
with an underscore, and read the rows in order.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any

import numpy as np
import pandas as pd
from pydantic import Field

from indpriv import _files, _folders, _plain, _storage
from indpriv._columns import Rows, StoredColumn, as_rows, joined
from indpriv._facts import damaged, refused, text
from indpriv._formatting import format_delta, format_epsilon
from indpriv._reading import Whole, check, named, table
from indpriv._types import BoolArray, FloatArray, IntArray, NDArray
from indpriv.errors import EvidenceError

DISCLAIMER = text("sentence.guarantee", "disclaimer")
FALSE_POSITIVE_RATE = 0.01  # at which accounts state the limit on membership tests
KEPT_DETAILS = ("n_rows", "unit_worst_case", "true_positive_limit")
PART_ROWS = _files.ROW_GROUP_SIZE
LARGEST_FILE = 4 * PART_ROWS  # rows: a longer table is a folder of parts
MARKER = "_account.json"
_PARTS = table({Annotated[Whole, Field(ge=1)]: "rows"})
_ENDS = ("epsilon", "epsilon_lower", "epsilon_upper")
_STATED = ("worst_case_epsilon", "claim", "claim_reason", "account")
_KINDS = {
    **dict.fromkeys(_ENDS, "f"),
    **{"n_rows?": "i", "unit_worst_case?": "f", "true_positive_limit?": "f"},
}
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


@dataclass(frozen=True)
class Account:
    """What an epsilon means, stated with every figure.

    Attributes:
        delta, unit, neighbouring, sampler: what the epsilon is for.
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

    delta: _plain.Delta
    unit: str
    neighbouring: str
    sampler: str
    accountant: str
    conversion: str
    between_records: str
    rounding: _plain.Percent
    rounding_mode: str
    total_steps: _plain.Count
    recorded_share: _plain.Share
    privacy_filter: str = ""
    rows_per_unit: _plain.Count | None = None
    participation: str = "secret"
    tolerance: _plain.Number = 0.0
    max_batch_size: _plain.Count | None = None
    clipping_norm_epsilon: _plain.Epsilon = 0.0

    @property
    def guaranteed_by(self) -> str:
        """What the worst case rests on."""
        return f"{self.privacy_filter}{self._clipping_norm}" if self.privacy_filter else self.method

    @property
    def method(self) -> str:
        """The accountant in words."""
        name = "exact Gaussian" if self.accountant == "gaussian" else self.accountant.upper()
        return f"{name} accountant{self._clipping_norm}"

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
        return "counted as clipped in every step"

    def describe(self) -> str:
        """One line that is shown with every epsilon."""
        return f"delta {format_delta(self.delta)}, {self.relation}, {self.sampling}, {self.method}"


@dataclass(frozen=True, kw_only=True)
class EpsilonTable:
    """Output-specific epsilon of every example, with the claim and meaning of all of them.

    Norms without rounding and very many settings are rounded up to fewer, which makes epsilon a
    little larger than it need be; see docs/explanation/accountants.md.

    Attributes:
        example_ids: (n_examples,); ids of units, one row per unit, unless account.rows_per_unit is
            None.
        epsilon, epsilon_lower, epsilon_upper: (n_examples,); the bracket covers numerical error
            only; the lower end is 0 by RDP and for units of several rows, and without what a
            private clipping norm costs.
        worst_case_epsilon: the run's guarantee: of an example at max_grad_norm in every step (with
            known participation, in those of the most exposed one), or a privacy filter's cap.
        claim: "exact" (never too small) or "estimate".
        claim_reason: why.
        account: delta, unit, relation, sampler, method.
        details: further columns, each (n_examples,). true_positive_limit, the largest rate of a
            membership test at a false-positive rate of 1 %, by Rényi divergences, and exact with
            known participation. Of "rdp": best_order, and order_at_boundary
            where a wider range of orders might give less. Of "pld": rdp_epsilon.
            Of units: n_rows, and unit_worst_case, the worst case of a unit with that number of
            rows; worst_case_epsilon is that of the unit with the most. Under a privacy filter:
            left_out_at, the step from which an example was left out, or -1.
        path: where it was opened.
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
    path: Path | None = None

    def __post_init__(self) -> None:
        for name in _ENDS if self.in_memory else ():
            values = getattr(self, name)
            bad = ~(np.isfinite(values) & (values >= 0))
            if bad.any():
                example = self.example_ids[bad].tolist()[0]
                wrong = {"name": name, "value": values[bad][0], "example": example}
                raise refused("refusal.epsilons", "epsilon", **wrong)
        if not (np.isfinite(self.worst_case_epsilon) and self.worst_case_epsilon >= 0):
            raise refused("refusal.epsilons", "worst_case", epsilon=self.worst_case_epsilon)

    def __len__(self) -> int:
        return len(self.example_ids)

    @property
    def at_worst_case(self) -> BoolArray:
        """(n_examples,) whether epsilon is the worst case, of a unit that of as many rows."""
        worst = self.details.get("unit_worst_case", np.float64(self.worst_case_epsilon))
        return np.asarray(self.epsilon >= worst.astype(np.float64) * (1 - 1e-9))

    @property
    def in_memory(self) -> bool:
        """Whether its columns are, or are read from files when they are asked for."""
        return not isinstance(self.epsilon, StoredColumn)

    @property
    def attrs(self) -> dict[Any, Any]:
        """What a frame of these epsilons says of them, in its own attrs."""
        about: dict[Any, Any] = {"sensitive": "for the curator only", "disclaimer": DISCLAIMER}
        about |= {name: getattr(self, name) for name in _STATED}
        return about | {"account": dict(vars(self.account))}

    def tables(self, details: Collection[str] = KEPT_DETAILS) -> "Iterator[EpsilonTable]":
        """Yield the table of each part, in memory; details: those that it keeps."""
        own: Any = self.epsilon
        parts = [(0, len(self))] if self.in_memory else own.rows.ranges()
        kept = {name: values for name, values in self.details.items() if name in details}
        yield from (replace(self, details=kept).take(slice(*part)) for part in parts)

    def table(self, details: Collection[str] = KEPT_DETAILS) -> "EpsilonTable":
        """The whole table in memory; details: those that it keeps."""
        kept = {name: values for name, values in self.details.items() if name in details}
        return replace(self, details=kept).take(slice(None))

    def take(self, kept: BoolArray | IntArray | slice) -> "EpsilonTable":
        """The table of the examples that a mask (n_examples,), positions or a slice choose."""
        with nullcontext() if self.path is None else named(self.path):
            ends: dict[str, Any] = {
                name: np.asarray(getattr(self, name)[kept], np.float64) for name in _ENDS
            }
            details = {name: values[kept] for name, values in self.details.items()}
            ends |= {"details": details, "example_ids": self.example_ids[kept]}
            return replace(self, path=None, **ends)

    def with_worst_case(self, epsilon: float) -> "EpsilonTable":
        """The table once the worst case of all units is known; theirs grow by as much as that."""
        more, details = epsilon - self.worst_case_epsilon, dict(self.details)
        if more and "unit_worst_case" in details:
            details["unit_worst_case"] = details["unit_worst_case"].astype(np.float64) + more
        return replace(self, worst_case_epsilon=epsilon, details=details)

    @classmethod
    def joined(cls, parts: "Sequence[EpsilonTable]") -> "EpsilonTable":
        """The units of all parts of a table, with the largest worst case."""
        if len(parts) == 1:
            return parts[0]
        worst = max(part.worst_case_epsilon for part in parts)
        parts = [part.with_worst_case(worst) for part in parts]
        columns: dict[str, Any] = {
            name: np.concatenate([getattr(part, name) for part in parts])
            for name in ("example_ids", *_ENDS)
        }
        if all(part.epsilon_upper is part.epsilon for part in parts):  # one array in memory
            columns["epsilon_upper"] = columns["epsilon"]
        details = {
            name: np.concatenate([part.details[name] for part in parts])
            for name in parts[0].details
        }
        return replace(parts[0], details=details, **columns)

    def to_frame(self) -> pd.DataFrame:
        """One row per example (or unit): its id, epsilon, epsilon_lower, epsilon_upper and details.

        The ids are in the column example_id (or unit_id). `.attrs` says what the numbers mean
        (claim, delta, unit, neighbouring relation, sampler, disclaimer).
        """
        if isinstance(self.epsilon, StoredColumn):
            return self.epsilon.rows.read(0, len(self))
        ends = {name: getattr(self, name) for name in _ENDS}
        frame = pd.DataFrame({self.account.id_column: self.example_ids, **ends, **self.details})
        frame.attrs = self.attrs
        return frame

    def to_parquet(self, path: str | Path, *, columns: pd.DataFrame | None = None) -> None:
        """Write epsilon.parquet, readable by its owner only (0600).

        columns: further ones (loss, correct, metadata), one row per example in this table's order.
        """
        frame = self.to_frame()
        if columns is not None:
            frame = pd.concat([frame, columns.reset_index(drop=True)], axis=1)
            frame.attrs = self.attrs
        _files.write_private_parquet(frame, Path(path))

    @classmethod
    def open(cls, path: str | Path) -> "EpsilonTable":
        """The table in a file or folder of parts; `table` and `tables` read it.

        Raises:
            InputError: no table of epsilons.
            EvidenceError: a part is missing or damaged.
        """
        path = _storage.location(path)
        rows = joined(_tables_in(path)) if path.is_dir() else Rows.open(path, _KINDS)
        with named(path):
            if not len(rows):
                raise EvidenceError("it has no rows")
            return replace(cls.of_rows(rows), path=path)

    @classmethod
    def of_rows(cls, rows: pd.DataFrame | Rows) -> "EpsilonTable":
        """The table that `to_frame` or `to_parquet` wrote; InputError if the claim is missing."""
        rows = as_rows(rows)
        attrs = rows.read(0, 0).attrs
        if missing := sorted({*_STATED} - {*attrs}):
            raise refused("refusal.epsilons", "of_others", missing=", ".join(missing))
        stated = {name: attrs[name] for name in _STATED}
        where = "the account of this epsilon table"
        stated["account"] = _plain.from_json(Account, stated["account"], where)
        stated["worst_case_epsilon"] = float(stated["worst_case_epsilon"])
        columns: dict[str, Any] = {name: StoredColumn(rows, name) for name in rows.columns}
        ids, ends = columns.pop(stated["account"].id_column), {k: columns.pop(k) for k in _ENDS}
        return cls(example_ids=ids, details=columns, **ends, **stated)


def ranges(n_rows: int) -> list[tuple[int, int]]:
    """(start, stop) of the rows of each part."""
    starts = range(0, n_rows, PART_ROWS)
    return [(start, min(start + PART_ROWS, n_rows)) for start in starts]


def _tables_in(folder: Path) -> list[Rows]:
    marker = _files.read_json(folder / MARKER)
    check(_PARTS, marker, str(folder / MARKER))
    found, expected = [], _parts(folder, marker["rows"])
    for part, (start, stop) in expected.items():
        if not part.is_file():
            values = {"part": part.name, "n": len(expected)}
            raise damaged("refusal.epsilons", "part", folder=folder, **values)
        rows = Rows.open(part, _KINDS)
        if len(rows) != stop - start:
            raise damaged("refusal.epsilons", "rows", part=part, n=len(rows), of=stop - start)
        found.append(rows)
    return found


def beside(
    epsilons: EpsilonTable, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[tuple[EpsilonTable, pd.DataFrame]]:
    """Yield each part of the epsilons with the rows of its examples, which have the same order."""
    start = 0
    for part in epsilons.tables():
        stop = start + len(part)
        yield part, rows.read(start, stop, columns)
        start = stop


def _parts(folder: Path, n_rows: int) -> dict[Path, tuple[int, int]]:
    """The file of each part, and the range of its rows."""
    return {folder / f"part-{k:05d}.parquet": rows for k, rows in enumerate(ranges(n_rows))}


class PartsWriter:
    """A folder of parts that are written in any order; it goes on with one that was stopped."""

    def __init__(self, folder: Path, n_rows: int, belongs_to: Mapping[str, Any]) -> None:
        """Begin a folder, or keep parts of it that belong to the same account, to the last bit."""
        self._parts = _parts(folder, n_rows)
        marker = {"rows": n_rows, "rows_per_part": PART_ROWS, "belongs_to": dict(belongs_to)}
        _folders.make_folder(folder)
        self.discarded = 0  # parts of another account, which are removed
        if not (folder / MARKER).is_file() or _files.read_json(folder / MARKER) != marker:
            for part in sorted(folder.glob("part-*.parquet")):
                _folders.remove_file(part)
                self.discarded += 1
            _files.write_json(folder / MARKER, marker)
        for leftover in folder.glob(".part-*.tmp"):
            _folders.remove_file(leftover)

    def missing(self) -> dict[Path, tuple[int, int]]:
        """The parts that are not there, each with the range of its rows."""
        return {path: rows for path, rows in self._parts.items() if not path.is_file()}

    def share_worst_case(self) -> None:
        """Give each part the worst case of all, once all are there: the largest of theirs."""
        found = map(Rows.open, self._parts)
        own = [rows.read(0, 0).attrs["worst_case_epsilon"] for rows in found]
        for path, worst in zip(self._parts, own, strict=True):
            if worst != max(own):
                table = EpsilonTable.of_rows(_files.read_parquet(path))
                table.table(table.details).with_worst_case(max(own)).to_parquet(path)


def write_epsilons(
    epsilons: EpsilonTable,
    path: Path,
    rows: pd.DataFrame | Rows | None = None,
    names: Mapping[str, str] | None = None,
) -> None:
    """Write epsilons in place of a file or, above LARGEST_FILE rows, of a folder of parts.

    rows: further columns, in the order of the epsilons. names: of some -> their names in the file.
    """

    def further(start: int, stop: int) -> pd.DataFrame | None:
        if rows is None:
            return None
        read = as_rows(rows).read(start, stop, None if names is None else list(names))
        return read.rename(columns=dict(names or {}))

    parts = {path: (0, len(epsilons))}
    if path.is_dir():
        rmtree(path, ignore_errors=True)
    if len(epsilons) > LARGEST_FILE:
        _folders.remove_file(path)
        about = {"account": dict(vars(epsilons.account))}
        parts = PartsWriter(path, len(epsilons), about).missing()
    for path, part in parts.items():
        epsilons.take(slice(*part)).to_parquet(path, columns=further(*part))
