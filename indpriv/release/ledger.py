"""The ledger of an audit's releases: requests, costs and answers. For the curator (0600).

An append-only hash-chained journal in AUDIT_DIR/ledger, with one writer: while a release is being
drawn, a second process is refused, so that two cannot both spend what is left. A release exists
once its line is on disk, and is shown only then; a crash before that has spent nothing, since no
one saw the draw. The ledger counts releases from this directory only: deleting it, or copying
the audit elsewhere, evades it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from indpriv._files import on_failure
from indpriv._folders import make_folder
from indpriv._journal import JournalWriter
from indpriv._reading import AtLeastZero, Text, check, table
from indpriv.errors import EvidenceError, InputError
from indpriv.release.assumptions import describe
from indpriv.release.request import Budget, Request

FOLDER = "ledger"
_SCHEMA = 1
_COSTS = {AtLeastZero: "epsilon delta"}
_LINES = {
    "open": table({Text: "fingerprint"}),
    "budget": table(_COSTS),
    "release": table({**_COSTS, dict[str, Any]: "request figures"}),
}


class Ledger:
    """The one open ledger of a directory; use it in a `with` block, which holds its lock."""

    def __init__(self, directory: Path, fingerprint: str) -> None:
        """Open or start it.

        Args:
            directory: of the audit (or run).
            fingerprint: of the values that releases are made of.

        Raises:
            InputError: another process has it open, or it belongs to other values.
            EvidenceError: a line was changed or lost.
        """
        folder = make_folder(directory, FOLDER)
        self._journal = JournalWriter(folder)
        with on_failure(self._journal.close):
            self._entries = self._journal.entries
            self._check_values(folder, fingerprint)
        if not self._entries:
            self._append("open", schema=_SCHEMA, fingerprint=fingerprint)

    def _check_values(self, folder: Path, fingerprint: str) -> None:
        for number, entry in enumerate(self._entries, 1):
            if (kind := _LINES.get(entry["kind"])) is not None:
                check(kind, entry, f"{folder} line {number}")
        if not self._entries:
            return
        first = self._entries[0]
        if first.get("kind") != "open" or first.get("schema") != _SCHEMA:
            raise EvidenceError(
                f"{folder} is not a ledger of schema {_SCHEMA} but {first.get('kind')!r} of schema "
                f"{first.get('schema')!r}; use the version of indpriv that wrote it"
            )
        if first["fingerprint"] != fingerprint:
            raise InputError(
                f"{folder} counts releases of other values: this directory was audited again, from "
                "another run or with another accounting. Releases of both cost the same people "
                "privacy, and indpriv does not add them up: audit into a new directory, and add "
                "the cost of the releases from this one yourself"
            )

    @property
    def budget(self) -> Budget | None:
        """The limit on all releases together, None if none was set."""
        return next((_cost(entry) for entry in self._entries if entry["kind"] == "budget"), None)

    @property
    def spent(self) -> Budget:
        """What all releases cost together."""
        return sum(map(_cost, self._releases), Budget())

    @property
    def n_releases(self) -> int:
        """The number of releases."""
        return len(self._releases)

    @property
    def _releases(self) -> list[dict[str, Any]]:
        return [entry for entry in self._entries if entry["kind"] == "release"]

    def set_budget(self, budget: Budget) -> None:
        """Limit all releases together; the limit cannot be changed.

        Raises:
            InputError: another limit is set already, or more is spent.
        """
        standing = self.budget
        if standing == budget:
            return
        if standing is not None:
            raise InputError(
                f"the budget of this audit was set to {describe(standing)}, and a budget is set "
                "once; leave --budget out"
            )
        if not budget.covers(self.spent):
            raise InputError(
                f"{describe(self.spent)} is spent already, more than a budget of {describe(budget)}"
            )
        self._append("budget", **budget.to_json())

    def stored(self, request: Request) -> dict[str, Any] | None:
        """Figures of the last release that answered the same request, None if there was none."""
        wanted = request.to_json()
        same = [entry["figures"] for entry in self._releases if entry["request"] == wanted]
        return same[-1] if same else None

    def check_affordable(self, cost: Budget) -> None:
        """Raise InputError if the budget does not cover a cost."""
        if self.budget is not None and not self.budget.covers(self.spent + cost):
            raise InputError(
                f"the budget of this audit is {describe(self.budget)}; {describe(self.spent)} is "
                f"spent, and this release would cost {describe(cost)}: refused, nothing was drawn. "
                "Earlier releases can be shown again"
            )

    def record(self, request: Request, figures: Mapping[str, Any]) -> None:
        """Append a release; it is on disk when this returns."""
        self._append(
            "release", request=request.to_json(), figures=dict(figures), **request.cost.to_json()
        )

    def _append(self, kind: str, **values: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._journal.append(kind, time=time, **values)
        self._entries.append({"kind": kind, "time": time, **values})

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *_: object) -> None:
        self._journal.close()


def _cost(entry: Mapping[str, Any]) -> Budget:
    return Budget.of(entry["epsilon"], entry["delta"])
