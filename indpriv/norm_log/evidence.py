"""Evidence: checks of a run, and the lines that an account rests on, each with one of four words.

The account is of the run that was trained if the first five lines hold at every step. Words come
from checks alone, and what was not checked is never called verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from indpriv._facts import (
    DECLARED,
    FAILED,
    NOT_CHECKED,
    ON_TRUST,
    PASSED,
    REFUTED,
    VERIFIED,
    Fact,
    Template,
    fact,
    templates,
    text,
)

SEEDED = (
    "the run was seeded (reproducible: no privacy): anyone with the seed can regenerate noise and "
    "sampling"
)
LARGEST_NORM = (
    "the noise of a step is scaled by the largest norm in its batch (no privacy): anyone who sees "
    "the update sees that norm, in the size of the noise"
)
CHECKS, LINES = templates("check"), templates("line")
# Keys of what a Recorder compares with its own recomputation of training.
COMPARISONS = tuple(key for key, one in CHECKS.items() if "never" in one.texts)
NOT_COMPARED = text(f"check.{COMPARISONS[0]}", "before")
# Assumptions of accounts with secret participation alone: those of Poisson sampling.
OF_SECRECY = frozenset(key for key, one in CHECKS.items() if one.only == "secret participation")
# Assumptions of accounts that use full records or clip levels, which those with known participation
# do not read.
OF_FULL_RECORDS = frozenset(key for key, one in CHECKS.items() if one.only == "full records")
# Of batches that were chosen in a way that no recorder knows.
ANY_CHOICE = fact("check.batch_for_every_step", NOT_CHECKED, "any_choice")
_SEEN = tuple(key for key, one in LINES.items() if one.needs)  # lines that a recorder can verify


def if_known(checks: Iterable[Fact]) -> tuple[Fact, ...]:
    """Checks of a run as an account with known participation reads them."""
    return tuple(
        replace(check, status=NOT_CHECKED, detail=text(f"check.{check.key}", "if_known"), advice="")
        if check.key in OF_SECRECY
        else check
        for check in checks
    )


def lines_of(
    checks: Sequence[Fact],
    recorder: Mapping[str, Any],
    said: Mapping[str, str | None] | None = None,
    left_out: frozenset[str] = frozenset(),
) -> tuple[Fact, ...]:
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
        _line(line, checks, words.get(key) or "", void.get(key) or "", left_out)
        for key, line in LINES.items()
    )


def unverified(lines: Sequence[Fact]) -> list[Fact]:
    """Of the lines that a recorder can verify, those that are not."""
    return [line for line in lines if line.key in _SEEN and line.status != VERIFIED]


def is_earned(lines: Sequence[Fact]) -> bool:
    """Whether "supported" may be said: all lines that a recorder can verify are there, verified."""
    words = {line.key: line.status for line in lines}
    return REFUTED not in words.values() and all(words.get(key) == VERIFIED for key in _SEEN)


def open_lines(lines: Sequence[Fact]) -> list[str]:
    """Which lines are not verified, and what would verify them, in sentences."""
    found = unverified(lines)
    if len(found) < len(_SEEN):
        return [
            f"{_name(line)} is not verified ({line.detail}); to verify it, {line.advice}"
            for line in found
        ]
    return [
        f"not verified: {', '.join(map(_name, found))}; to verify them, record training as it "
        "runs, with today's Recorder"
    ]


def evidence(lines: Sequence[Fact]) -> str:
    """What an account rests on, in one sentence that holds nothing of the data."""
    left = unverified(lines)
    return "; ".join(
        [f"{len(_SEEN) - len(left)} of {len(_SEEN)} lines verified"]
        + [
            f"{_name(line)} {line.status}"
            for line in lines
            if line in left or line.status == REFUTED or line.key in ("source", "start")
        ]
    )


def _name(line: Fact) -> str:
    return line.title.lower()


def _line(
    line: Template, checks: Sequence[Fact], said: str, void: str, left_out: frozenset[str]
) -> Fact:
    mine = [
        check
        for check in checks
        if check.key in CHECKS and CHECKS[check.key].line == line.key and check.key not in left_out
    ]
    failed = [check.detail for check in mine if check.status == FAILED]
    unknown = [
        check for check in mine if check.status == NOT_CHECKED and not CHECKS[check.key].optional
    ]
    passed = {check.key for check in mine if check.status == PASSED}
    missing = [k for k in line.needs if k not in passed | left_out | {c.key for c in unknown}]
    if failed or void:
        word, found = REFUTED, [void, *failed]
    elif not line.needs:
        word = DECLARED if said else ON_TRUST
        if line.key == "start":  # random items may hold anything
            rows = [check for check in checks if check.key == "rows"]
            unknown += [check for check in rows if check.status == NOT_CHECKED]
        found = [said or line.texts.get("on_trust", ""), *(check.detail for check in unknown)]
        found = found if any(found) else ["nothing was seen of it"]
    elif unknown or missing:
        word, found = DECLARED, _by_detail(unknown)
        found += [f"not compared: {CHECKS[key].title}" for key in missing]
    else:
        word, found = VERIFIED, _by_detail([c for c in mine if c.key in line.needs])
    return line.fact(word, "; ".join(filter(None, dict.fromkeys(found))))


def _by_detail(checks: Sequence[Fact]) -> list[str]:
    """What was found, once, after the titles of the checks that found it."""
    titles: dict[str, list[str]] = {}
    for check in checks:
        titles.setdefault(check.detail, []).append(check.title)
    return [f"{', '.join(dict.fromkeys(named))}: {detail}" for detail, named in titles.items()]
