"""Facts: checks, lines of evidence, disclosures, hazards and findings of lint, all of one class.

Their texts stand beside this file, one TOML file for each kind. Code decides the status of a fact
and passes the values that its text names in braces, as in str.format, or attributes of them:
{run.n_examples:,}. Names of formats of our own stand in `_FORMATS`.
"""

import re
import string
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import ROUND_CEILING, Context
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any

from indpriv import _formatting
from indpriv._types import OneOf
from indpriv.errors import EvidenceError, InputError

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"  # of checks, and of lint
# Of a line of evidence: compared, equal; somebody said so, or nothing was compared; nobody can see
# it; it does not hold.
VERIFIED, DECLARED, ON_TRUST, REFUTED = "verified", "declared", "on trust", "refuted"
# Of disclosures and hazards too: nobody stated it, so this tool's default stands; there is no
# record; the account does not cover it.
ASSUMED, UNKNOWN, NOT_COVERED = "assumed", "unknown", "not covered"
_STATUSES = (
    *(PASSED, FAILED, NOT_CHECKED),
    *(VERIFIED, DECLARED, ON_TRUST, REFUTED),
    *(ASSUMED, UNKNOWN, NOT_COVERED),
)
# What fails with a check: the worst-case epsilon too, individual epsilons only, or neither (how
# files are stored).
WORST_CASE, INDIVIDUAL, FILES = "worst_case", "individual", "files"
# A hazard: the account relies on it; a way to misread the figures; what is not counted.
ASSUMPTION, READING, SCOPE = "assumption", "reading", "scope"
# A failed rule of lint: no guarantee worth the name; it costs accuracy or privacy; worth trying.
SEVERITIES = ERROR, WARNING, NOTE = ("error", "warning", "note")
_KINDS = ("check", "line", "disclosure", ASSUMPTION, READING, SCOPE, *SEVERITIES)
_TWO_DIGITS_UP = Context(prec=2, rounding=ROUND_CEILING)  # of what a check may miss
_LINK = re.compile(r"\[([^]]+)\]\([^)]*\)")  # of a page
_FORMATS: Mapping[str, Callable[[Any], str]] = {
    "delta": _formatting.format_delta,
    "epsilon": _formatting.format_epsilon,
    "full": _formatting.format_in_full,
    "number": _formatting.format_number,
    "percent": lambda share: f"{100 * share:.2g} %",
    "share": _formatting.format_share,
    "share_up": _formatting.format_share_up,
    "up": lambda value: f"{float(_TWO_DIGITS_UP.create_decimal(value * (1 - 1e-9))):g}",
    "words": lambda name: str(name).replace("_", " "),
}


@dataclass(frozen=True)
class Fact:
    """What is known of one thing that an account or its reader relies on, and how it is known.

    Attributes:
        key: names it among those of its kind; never changes. A run of several sessions has several
            checks with one key.
        kind: "check", "line", "disclosure"; of a hazard "assumption" (the account relies on it),
            "reading" (a way to misread the figures) or "scope" (what is not counted); of a rule of
            lint its severity, "error", "warning" or "note".
        title: shown to readers in place of the key.
        status: how it is known, or whether it holds.
        detail: what was found.
        about: what has to hold, why it matters or what the literature says, whatever was found.
        advice: what to do, or what would verify it; "" where nothing is to be done.
        bears_on: of a check: "worst_case" if the guarantee rests on it, "individual" if only
            individual epsilons do, else "files".
        private: the detail says something about the data, so it must not be published.
        publishable: it may appear on a model card, if the run's guarantee may be published.
    """

    key: str
    kind: Annotated[str, OneOf(*_KINDS)]
    title: str
    status: Annotated[str, OneOf(*_STATUSES)]
    detail: str
    about: str = ""
    advice: str = ""
    bears_on: Annotated[str, OneOf("", WORST_CASE, INDIVIDUAL, FILES)] = ""
    private: bool = False
    publishable: bool = False

    @property
    def short(self) -> str:
        """A few words for a first screen."""
        return self.key.replace("_", " ")

    @property
    def found(self) -> str:
        """What was found; of a line of evidence also what would verify it."""
        to_do = self.advice if self.kind == "line" else ""
        return f"{self.detail}; to verify it, {to_do}" if to_do else self.detail


@dataclass(frozen=True)
class Template:
    """What a TOML file says of a fact, whatever a run shows; the head of each explains its keys.

    Texts may name values in braces. private may be the names of those texts that are.
    """

    key: str
    kind: str
    title: str
    about: str = ""
    advice: str = ""
    bears_on: str = ""
    private: bool | list[str] = False
    publishable: bool = False
    shown: str = ""
    texts: Mapping[str, str] = field(default_factory=dict)
    text: str | None = None
    source: str = ""
    needs: list[str] = field(default_factory=list)
    line: str = ""
    optional: bool = False
    refutes: list[str] = field(default_factory=list)
    only: str = ""
    group: str = ""
    holds: str = ""
    failure: str = ""

    @property
    def to_do(self) -> str:
        """The advice without links to other pages."""
        return _LINK.sub(r"\1", self.advice)

    def text_of(self, status: str, case: str = "") -> str:
        """The text of a case, else of a status, with its braces; KeyError without one."""
        if case or self.text is None:
            return self.texts[case or status.replace(" ", "_")]
        return self.texts.get(status.replace(" ", "_"), self.text)

    def fact(self, status: str, detail: str, case: str = "", title: str = "") -> Fact:
        """The fact with this status and detail."""
        private = self.private if isinstance(self.private, bool) else case in self.private
        about = f"{self.about} [{self.source}]" if self.source else self.about
        advice = self.to_do if status in (FAILED, DECLARED) else ""
        words = self.key, self.kind, title or self.title, status, detail, about, advice
        return Fact(*words, self.bears_on, private, self.publishable)


@cache
def templates(kind: str) -> Mapping[str, Template]:
    """The templates of one kind by key, in the order of their file."""
    return MappingProxyType(
        {
            key: Template(key=key, **{"kind": kind, **_inherited(kind, key)})
            for key in _entries(kind)
            if not key.startswith("_")
        }
    )


@cache
def _entries(kind: str) -> Mapping[str, Any]:
    content = files("indpriv._facts").joinpath(f"{kind}s.toml").read_text(encoding="utf-8")
    return tomllib.loads(content)


def _inherited(kind: str, key: str) -> dict[str, Any]:
    """An entry with the defaults of its file, and what it takes over from the entry it is like."""
    entry = dict(_entries(kind)[key])
    of, _, other = entry.pop("like", "").rpartition(".")
    like = _inherited(of or kind, other) if other else {}
    texts = {**like.get("texts", {}), **entry.get("texts", {})}
    return {**_entries(kind).get("_", {}), **like, **entry, "texts": texts}


class _Texts(string.Formatter):
    """Formats with names of our own beside those of Python."""

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec in _FORMATS:
            return _FORMATS[format_spec](value)
        return str(super().format_field(value, format_spec))


def filled(content: str, values: Mapping[str, object]) -> str:
    """A text with values in place of its braces; KeyError or AttributeError if one is missing."""
    return _Texts().vformat(content, (), values)


def text(name: str, case: str, /, **values: object) -> str:
    """The text that `name`, "kind.key", has for a case, with these values."""
    kind, _, key = name.partition(".")
    return filled(templates(kind)[key].texts[case], values)


def refused(name: str, case: str, /, **values: object) -> InputError:
    """The error that says a text, as of `text`."""
    return InputError(text(name, case, **values))


def damaged(name: str, case: str, /, **values: object) -> EvidenceError:
    """The same of what a run recorded."""
    return EvidenceError(text(name, case, **values))


def fact(name: str, status: str, case: str = "", /, **values: object) -> Fact:
    """The fact `name`, "kind.key", with a status, and its text or that of a case filled."""
    kind, _, key = name.partition(".")
    one = templates(kind)[key]
    detail = filled(one.text_of(status, case), values)
    return one.fact(status, detail, case, filled(one.shown, values))
