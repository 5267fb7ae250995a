"""Lines of evidence: what an account of a run rests on, each with one of four words.

The account is of the run that was trained if the first five hold at every step; see lines.toml.
Words come from checks alone, and what was not checked is never called verified.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from indpriv._plain import Limits
from indpriv.norm_log.evidence import (
    ASSUMPTIONS,
    FAILED,
    NOT_CHECKED,
    PASSED,
    SEEDED,
    Check,
    read_texts,
)

VERIFIED, DECLARED, ON_TRUST, REFUTED = "verified", "declared", "on trust", "refuted"
WORDS = (VERIFIED, DECLARED, ON_TRUST, REFUTED)


@dataclass(frozen=True)
class Line:
    """One thing that an account rests on, and how it is known.

    Attributes:
        key: "batch", "contribution", "noise", "update", "settings", "source", "start", or one of
            those that nobody can see; never changes.
        title, statement: as shown; the statement is what has to hold.
        word: "verified" (compared, equal), "declared" (somebody said so, or nothing was compared),
            "on trust" (nobody can see it) or "refuted".
        detail: what was found.
        verify: what would verify it; "" where nothing can, or it is verified.
    """

    key: str
    title: str
    statement: str
    word: Annotated[str, Limits(texts=WORDS)]
    detail: str
    verify: str

    @property
    def found(self) -> str:
        """What was found, and what would verify it."""
        return f"{self.detail}; to verify it, {self.verify}" if self.verify else self.detail


@dataclass(frozen=True)
class LineText:
    """An entry of lines.toml: what a line states, and the checks that verify it."""

    key: str
    title: str
    statement: str
    needs: tuple[str, ...] = ()
    verify: str = ""
    on_trust: str = ""


LINES = tuple(
    LineText(**{**entry, "needs": tuple(entry.get("needs", ()))})
    for entry in read_texts("lines.toml", "line")
)
_SEEN = tuple(text.key for text in LINES if text.needs)  # lines that a recorder can verify


def lines_of(
    checks: Sequence[Check],
    recorder: Mapping[str, Any],
    said: Mapping[str, str | None] | None = None,
    left_out: frozenset[str] = frozenset(),
) -> tuple[Line, ...]:
    """Every line of a run, whatever the run.

    Args:
        checks: of the run; see `indpriv.norm_log.verify.verify`.
        recorder: what the header of its log says; its "start" is the user's word.
        said: key of a line that nobody can see -> what the user says of it.
        left_out: keys of checks of assumptions that the account does not make.
    """
    words = {"start": recorder.get("start"), **(said or {})}
    void = {"noise": recorder.get("no_privacy"), "source": SEEDED if recorder.get("seeded") else ""}
    return tuple(
        _line(text, checks, words.get(text.key) or "", void.get(text.key) or "", left_out)
        for text in LINES
    )


def unverified(lines: Sequence[Line]) -> list[Line]:
    """Of the lines that a recorder can verify, those that are not."""
    return [line for line in lines if line.key in _SEEN and line.word != VERIFIED]


def is_earned(lines: Sequence[Line]) -> bool:
    """Whether "supported" may be said: all lines that a recorder can verify are there, verified."""
    words = {line.key: line.word for line in lines}
    return REFUTED not in words.values() and all(words.get(key) == VERIFIED for key in _SEEN)


def open_lines(lines: Sequence[Line]) -> list[str]:
    """Which lines are not verified, and what would verify them, in sentences."""
    found = unverified(lines)
    if len(found) < len(_SEEN):
        return [
            f"{_name(line)} is not verified ({line.detail}); to verify it, {line.verify}"
            for line in found
        ]
    return [
        f"not verified: {', '.join(map(_name, found))}; to verify them, record training as it "
        "runs, with today's Recorder"
    ]


def evidence(lines: Sequence[Line]) -> str:
    """What an account rests on, in one sentence that holds nothing of the data."""
    left = unverified(lines)
    return "; ".join(
        [f"{len(_SEEN) - len(left)} of {len(_SEEN)} lines verified"]
        + [
            f"{_name(line)} {line.word}"
            for line in lines
            if line in left or line.word == REFUTED or line.key in ("source", "start")
        ]
    )


def _name(line: Line) -> str:
    return line.title.lower()


def _line(
    text: LineText, checks: Sequence[Check], said: str, void: str, left_out: frozenset[str]
) -> Line:
    mine = [
        check
        for check in checks
        if check.key in ASSUMPTIONS and ASSUMPTIONS[check.key].line == text.key
        if check.key not in left_out
    ]
    failed = [check.detail for check in mine if check.status == FAILED]
    unknown = [
        check
        for check in mine
        if check.status == NOT_CHECKED and not ASSUMPTIONS[check.key].optional
    ]
    passed = {check.key for check in mine if check.status == PASSED}
    missing = [k for k in text.needs if k not in passed | left_out | {c.key for c in unknown}]
    if failed or void:
        word, found = REFUTED, [void, *failed]
    elif not text.needs:
        word = DECLARED if said else ON_TRUST
        if text.key == "start":  # random items may hold anything
            rows = [check for check in checks if check.key == "rows"]
            unknown += [check for check in rows if check.status == NOT_CHECKED]
        found = [said or text.on_trust, *(check.detail for check in unknown)]
        found = found if any(found) else ["nothing was seen of it"]
    elif unknown or missing:
        word, found = DECLARED, _by_detail(unknown)
        found += [f"not compared: {ASSUMPTIONS[key].title}" for key in missing]
    else:
        word, found = VERIFIED, _by_detail([c for c in mine if c.key in text.needs])
    verify = text.verify if word == DECLARED else ""
    detail = "; ".join(filter(None, dict.fromkeys(found)))
    return Line(text.key, text.title, text.statement, word, detail, verify)


def _by_detail(checks: Sequence[Check]) -> list[str]:
    """What was found, once, after the titles of the checks that found it."""
    titles: dict[str, list[str]] = {}
    for check in checks:
        titles.setdefault(check.detail, []).append(check.title)
    return [f"{', '.join(dict.fromkeys(named))}: {detail}" for detail, named in titles.items()]
