"""The ledger of an audit's releases: requests, costs and answers. For the curator (0600).

An append-only hash-chained journal in AUDIT_DIR/ledger, or in a folder that copies share, with one
writer: while a release is being drawn, a second process is refused, so that two cannot both spend
what is left. A release exists once its line is on disk, and is shown only then; a crash before that
has spent nothing, since no one saw the draw. AUDIT_DIR/paid.json keeps length and last hash,
release.json what was spent: a ledger that is shorter or another is refused. A copy of the whole
directory, with a ledger of its own or in place of it, is not noticed.
"""

from collections.abc import Mapping
from datetime import UTC, datetime
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from indpriv._facts import damaged, refused
from indpriv._files import (
    JOURNAL,
    JournalWriter,
    chains,
    first_at,
    on_failure,
    read_json,
    write_json,
)
from indpriv._folders import make_folder
from indpriv._reading import AtLeastZero, Text, check, table
from indpriv.errors import InputError
from indpriv.release.request import FIGURES, Budget, Request

FOLDER, PAID, SHAREABLE, RELEASE_JSON = "ledger", "paid.json", "shareable", "release.json"
_SCHEMA = 1
_COSTS: dict[Any, str] = {
    Annotated[AtLeastZero, Field(gt=0)]: "epsilon",
    Annotated[AtLeastZero, Field(lt=1)]: "delta",
}
_LINES = {
    "open": table({Text: "fingerprint"}),
    "budget": table(_COSTS),
    "release": table({**_COSTS, dict[str, Any]: "request", dict[str, FIGURES]: "figures"}),  # type: ignore[valid-type]
}


class Ledger:
    """The one open ledger of a directory, which holds its lock until it is closed."""

    def __init__(self, directory: Path, fingerprint: str, folder: str | Path | None = None) -> None:
        """Open or start the ledger of an audit (or run), in its directory or in `folder`.

        Raises:
            InputError: another process has it open, or it is of other values (another fingerprint)
                or releases.
            EvidenceError: a line was changed or lost.
        """
        self._paid = make_folder(directory) / PAID
        folder = make_folder(Path(folder)) if folder else make_folder(directory, FOLDER)
        self._journal = JournalWriter(folder)
        with on_failure(self._journal.close):
            self._entries = self._journal.entries
            if self._entries:
                _check_lines(folder, self._entries, fingerprint)
            _compare(folder, self._entries, directory)
            if not self._entries:
                self._append("open", schema=_SCHEMA, fingerprint=fingerprint)

    @property
    def budget(self) -> Budget | None:
        """The limit on all releases together, None if none was set."""
        return next((_cost(entry) for entry in self._entries if entry["kind"] == "budget"), None)

    @property
    def spent(self) -> Budget:
        """What all releases cost together."""
        return sum(map(_cost, self.releases), Budget())

    @property
    def releases(self) -> list[dict[str, Any]]:
        """The lines of all releases."""
        return [entry for entry in self._entries if entry["kind"] == "release"]

    def set_budget(self, budget: Budget) -> None:
        """Limit all releases together; InputError if another limit is set, or more is spent."""
        if self.budget == budget:
            return
        if self.budget is not None:
            raise refused("refusal.ledger", "set_once", budget=self.budget)
        if not budget.covers(self.spent):
            raise InputError(f"{self.spent} is spent already, more than a budget of {budget}")
        self._append("budget", **budget.to_json())

    def stored(self, request: Request) -> dict[str, Any] | None:
        """Figures of the last release that answered the same request, None if there was none."""
        wanted = request.to_json()
        same = [entry["figures"] for entry in self.releases if entry["request"] == wanted]
        return same[-1] if same else None

    def check_affordable(self, cost: Budget) -> None:
        """Raise InputError if the budget does not cover a cost."""
        if self.budget is not None and not self.budget.covers(self.spent + cost):
            said = {"budget": self.budget, "spent": self.spent, "cost": cost}
            raise refused("refusal.ledger", "budget", **said)

    def record(self, request: Request, figures: Mapping[str, Any]) -> None:
        """Append a release; it is on disk when this returns."""
        self._append(
            "release", request=request.to_json(), figures=dict(figures), **request.cost.to_json()
        )

    def _append(self, kind: str, **values: Any) -> None:
        time = datetime.now(UTC).isoformat(timespec="seconds")
        self._journal.append(kind, time=time, **values)
        self._entries.append({"kind": kind, "time": time, **values})
        if kind != "open":  # which nothing was paid with
            write_json(self._paid, {"lines": len(self._journal), "chain": self._journal.chain})

    def close(self) -> None:
        """Release the lock."""
        self._journal.close()


def _check_lines(folder: Path, entries: list[dict[str, Any]], fingerprint: str) -> None:
    first = entries[0]
    kind, schema = first.get("kind"), first.get("schema")
    if (kind, schema) != ("open", _SCHEMA):
        said = {"folder": folder, "schema": _SCHEMA, "kind": kind, "other": schema}
        raise damaged("refusal.ledger", "schema", **said)
    if first.get("fingerprint") != fingerprint:
        raise refused("refusal.ledger", "other_values", folder=folder)
    for number, entry in enumerate(entries, 1):
        kind, where = str(entry.get("kind")), f"{folder / JOURNAL} line {number}"
        if kind not in _LINES:
            raise damaged("refusal.ledger", "kind", where=where, kind=kind)
        check(_LINES[kind], entry, where)


def _compare(folder: Path, entries: list[dict[str, Any]], directory: Path) -> None:
    """Refuse a ledger that is not, or not beyond, what a directory says that its releases cost."""
    releases = (_cost(entry) for entry in entries if entry["kind"] == "release")
    spent = [*accumulate(releases, initial=Budget())]
    lines = [{"lines": n, "chain": at} for n, at in enumerate(chains(entries))]
    costs = [{"releases": n, **cost.to_json()} for n, cost in enumerate(spent)]
    for name, states in ((PAID, lines), (f"{SHAREABLE}/{RELEASE_JSON}", costs)):
        path = directory / name
        content = read_json(path) if path.is_file() else states[0]
        told = {key: first_at(content, ("spent", key), (key,)) for key in states[0]}
        if told not in states:
            said = {"folder": folder, "n": len(entries), "spent": spent[-1], "path": path}
            raise refused("refusal.ledger", "cut", told=told, **said)


def _cost(entry: Mapping[str, Any]) -> Budget:
    return Budget.of(entry["epsilon"], entry["delta"])
