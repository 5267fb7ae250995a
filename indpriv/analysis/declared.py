"""What run.json declares about a run; nothing of it is verified. Sensitive if its texts are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from indpriv._files import first_at
from indpriv.norm_log.schema import checked_run_json


@dataclass(frozen=True)
class Declared:
    """The parts of run.json that an audit understands; all are optional.

    Attributes:
        name: of the run.
        delta: of its guarantee.
        participation, neighbouring, tolerance: of the account; see `indpriv.account`.
        groups: columns to compare, chosen beforehand.
        class_names: what the integer labels 0, 1, ... mean.
        released: what is published of the run.
        preprocessing: where the constants of the preprocessing come from.
        tuning: what was tried before this run.
        trust_model: who sees the data and adds the noise.
        code_commit: of the training code.
        data_fingerprint: of the data set.
        on_trust: item -> a statement that no check verifies.
        content: all of run.json, except what the recorder wrote.
    """

    name: str | None = None
    delta: float | None = None
    participation: str | None = None
    neighbouring: str | None = None
    tolerance: float | None = None
    groups: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    released: str | None = None
    preprocessing: str | None = None
    tuning: str | None = None
    trust_model: str | None = None
    code_commit: str | None = None
    data_fingerprint: str | None = None
    on_trust: Mapping[str, str] = field(default_factory=dict)
    content: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_run_json(cls, content: object) -> Declared:
        """Read run.json; InputError where a value has the wrong kind."""
        content = checked_run_json(content)
        delta = first_at(content, ("delta",), ("training", "delta"))
        on_trust = first_at(content, ("on_trust",)) or {}
        return cls(
            name=_text(content, ("name",)),
            delta=None if delta is None else float(delta),
            participation=_text(content, ("participation",), ("config", "audit", "participation")),
            neighbouring=_text(content, ("config", "audit", "neighbouring")),
            tolerance=first_at(content, ("config", "audit", "tolerance")),
            groups=_texts(content, ("groups",), ("config", "audit", "groups")),
            class_names=_texts(content, ("class_names",), ("data", "class_names")),
            released=_text(content, ("released",)),
            preprocessing=_text(content, ("preprocessing",), ("data", "preprocessing")),
            tuning=_text(content, ("tuning",)),
            trust_model=_text(content, ("trust_model",)),
            code_commit=_text(content, ("code_commit",)),
            data_fingerprint=_text(content, ("data", "fingerprint")),
            on_trust={str(item): str(text) for item, text in on_trust.items()},
            content={key: value for key, value in content.items() if key != "recorder"},
        )

    @property
    def of_lines(self) -> dict[str, str | None]:
        """What is said of lines of evidence that nobody can see, by key."""
        trusted = {key: self.on_trust.get(key) for key in ("people", "duplicates", "weights")}
        return {**trusted, "preprocessing": self.preprocessing, "tuning": self.tuning}


def _text(content: Mapping[str, Any], *paths: tuple[str, ...]) -> str | None:
    value = first_at(content, *paths)
    return str(value) if value else None


def _texts(content: Mapping[str, Any], *paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, first_at(content, *paths) or ()))
