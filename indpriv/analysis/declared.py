"""What run.json declares about a run; nothing of it is verified. Sensitive if its texts are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import core_schema

from indpriv._files import first_at
from indpriv.errors import InputError
from indpriv.norm_log.run_files import checked_run_json

# Arguments of `indpriv.account` that run.json may have, and where else than under "account".
_ACCOUNT: dict[str, tuple[tuple[str, ...], ...]] = {
    "delta": (("delta",), ("training", "delta")),
    "participation": (("participation",), ("config", "audit", "participation")),
    "neighbouring": (("config", "audit", "neighbouring"),),
    "accountant": (),
    "conversion": (),
    "between_records": (),
}


@dataclass(frozen=True)
class Declared:
    """The parts of run.json that an audit understands; all are optional.

    Attributes:
        name: of the run.
        delta: of its guarantee.
        participation, neighbouring: of the account; see `indpriv.account`.
        account: all that is declared of the account, by its arguments; the three above included.
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
    account: Mapping[str, Any] = field(default_factory=dict)
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

    def as_json(self) -> Mapping[str, Any]:
        """See `indpriv._plain.to_json`."""
        return self.content

    @classmethod
    def __get_pydantic_core_schema__(cls, _kind: Any, handler: Any) -> Any:
        content = handler.generate_schema(Mapping[str, Any])
        return core_schema.no_info_after_validator_function(cls.from_run_json, content)

    @classmethod
    def from_run_json(cls, content: object) -> Declared:
        """Read run.json; InputError where a value has the wrong kind."""
        content = checked_run_json(content)
        account = _account(content)
        on_trust = first_at(content, ("on_trust",)) or {}
        return cls(
            name=_text(content, ("name",)),
            delta=account.get("delta"),
            participation=account.get("participation"),
            neighbouring=account.get("neighbouring"),
            account=account,
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


def _account(content: Mapping[str, Any]) -> dict[str, Any]:
    """What is declared of the account, under "account" or elsewhere."""
    # Earlier versions took a tolerance, which no account needs now
    if wrong := sorted((content.get("account") or {}).keys() - _ACCOUNT.keys() - {"tolerance"}):
        raise InputError(
            f"run.json: account has the key {wrong[0]!r}, which is none of {', '.join(_ACCOUNT)}; "
            "correct it"
        )
    every = {key: first_at(content, ("account", key), *at) for key, at in _ACCOUNT.items()}
    found = {key: value for key, value in every.items() if value not in (None, "")}
    return found | ({"delta": float(found["delta"])} if "delta" in found else {})


def _text(content: Mapping[str, Any], *paths: tuple[str, ...]) -> str | None:
    value = first_at(content, *paths)
    return str(value) if value else None


def _texts(content: Mapping[str, Any], *paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(str, first_at(content, *paths) or ()))
