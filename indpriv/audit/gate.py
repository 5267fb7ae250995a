"""Gates for pipelines: is an audit good enough to go on? Judged from the content of audit.json alone.

Some conditions hold always: a limit on an epsilon that no guarantee stands behind would mean nothing. Logs of pipelines are
read by many, so that figures computed from the data are withheld unless asked for; that a condition on such a figure passed
or failed still tells something of the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from indpriv._formatting import format_delta, format_epsilon, format_lower_bound, format_share
from indpriv.analysis.summary import SCHEMA_VERSION
from indpriv.errors import InputError
from indpriv.norm_log.evidence import FAILED

WITHHELD = "withheld"
# Name of a limit -> the figure of "individual" that it is on.
_INDIVIDUAL = {
    "max_median_epsilon": "median",
    "max_p95_epsilon": "p95",
    "max_p99_epsilon": "p99",
    "max_epsilon": "max",
}


@dataclass(frozen=True)
class Limits:
    """What to ask of an audit; None asks nothing.

    Attributes:
        max_worst_case_epsilon, max_delta: of the guarantee.
        max_median_epsilon, max_p95_epsilon, max_p99_epsilon, max_epsilon: of individual epsilon.
        max_group_ratio: mean epsilon of the worst-off over the best-off group, raw, of every table of the audit.
        min_coverage: share of steps with a record.
        min_test_accuracy: of the final model.
        unit: of privacy, e.g. "user".
        exact: the individual epsilons are no estimates.
        verified: the guarantee's assumptions were checked, not only declared.
    """

    max_worst_case_epsilon: float | None = None
    max_delta: float | None = None
    max_median_epsilon: float | None = None
    max_p95_epsilon: float | None = None
    max_p99_epsilon: float | None = None
    max_epsilon: float | None = None
    max_group_ratio: float | None = None
    min_coverage: float | None = None
    min_test_accuracy: float | None = None
    unit: str | None = None
    exact: bool = False
    verified: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name.startswith(("max_", "min_")) and value is not None:
                share = name.startswith("min_") or name == "max_delta"
                if not (math.isfinite(value) and 0 <= value <= (1 if share else math.inf)):
                    expected = (
                        "a number from 0 to 1" if share else "a finite number of at least 0, e.g. 8"
                    )
                    raise InputError(f"--{name.replace('_', '-')} {value} is not {expected}")


@dataclass(frozen=True)
class Condition:
    """One condition: whether it holds, what was found, and what was asked; private: found is computed from the data."""

    name: str
    passed: bool
    found: str
    asked: str
    private: bool

    def shown(self, *, figures: bool) -> dict[str, Any]:
        """For a log: with figures computed from the data, or without."""
        found = self.found if figures or not self.private else WITHHELD
        return {"name": self.name, "passed": self.passed, "found": found, "asked": self.asked}


def judge(summary: Mapping[str, Any], limits: Limits) -> list[Condition]:
    """Hold an audit against what always must hold, then against limits.

    Args:
        summary: the content of audit.json.
        limits: what to ask besides.

    Raises:
        InputError: an audit of another schema, or one that lacks what is judged.
    """
    version = summary.get("schema_version")
    if version != SCHEMA_VERSION:
        raise InputError(
            f"audit.json has schema_version={version!r}, not {SCHEMA_VERSION}; make the audit again"
        )
    return [
        *_always(summary),
        *_guarantee(summary, limits),
        *_individual(summary, limits),
        *_groups(summary, limits),
    ]


def _always(summary: Mapping[str, Any]) -> list[Condition]:
    status, times_n = (
        _text(summary, "guarantee", "status"),
        _number(summary, "guarantee", "delta_times_n"),
    )
    failed = [
        _text(check, "name")
        for check in _items(summary, "checks")
        if _text(check, "status") == FAILED
    ]
    return [
        Condition(
            "guarantee",
            status in ("supported", "declared"),
            status,
            "supported or declared",
            private=False,
        ),
        Condition("delta times n", times_n < 1, f"{times_n:.2g}", "below 1", private=True),
        Condition(
            "evidence",
            not failed,
            ", ".join(failed) or "no check failed",
            "no check failed",
            private=False,
        ),
        *_findings(summary),
    ]


def _findings(summary: Mapping[str, Any]) -> list[Condition]:
    """Attacks that beat what the worst case allows: the run or its account is wrong."""
    found = []
    if summary.get("canaries") is not None:
        proven = _number(summary, "canaries", "overall", "bound", "epsilon")
        passed = proven <= _number(summary, "guarantee", "worst_case_epsilon")
        asked = "at most the worst case"
        found.append(
            Condition(
                "epsilon that canaries prove",
                passed,
                format_lower_bound(proven),
                asked,
                private=True,
            )
        )
    if summary.get("attack_by_epsilon") is not None:
        above = _number(summary, "attack_by_epsilon", "findings")
        found.append(
            Condition(
                "attacks above the worst case", above == 0, f"{above:g}", "none", private=True
            )
        )
    return found


def _guarantee(summary: Mapping[str, Any], limits: Limits) -> list[Condition]:
    found = []
    if limits.max_worst_case_epsilon is not None:
        worst, limit = (
            _number(summary, "guarantee", "worst_case_epsilon"),
            limits.max_worst_case_epsilon,
        )
        found.append(_at_most("worst-case epsilon", worst, limit, private=False))
    if limits.max_delta is not None:
        delta, limit = _number(summary, "guarantee", "delta"), limits.max_delta
        found.append(
            Condition(
                "delta", delta <= limit, format_delta(delta), f"at most {limit:g}", private=False
            )
        )
    if limits.unit is not None:
        unit = _text(summary, "account", "unit")
        found.append(
            Condition("unit of privacy", unit == limits.unit, unit, limits.unit, private=False)
        )
    if limits.verified:
        status = _text(summary, "guarantee", "status")
        found.append(
            Condition(
                "guarantee checked", status == "supported", status, "supported", private=False
            )
        )
    if limits.min_coverage is not None:
        share = _number(summary, "run", "recorded_share")
        found.append(_at_least("steps recorded", share, limits.min_coverage, private=False))
    return found


def _individual(summary: Mapping[str, Any], limits: Limits) -> list[Condition]:
    claim = _text(summary, "claim")
    found = []
    if limits.exact:
        found.append(Condition("claim", claim == "exact", claim, "exact", private=False))
    for option, name in _INDIVIDUAL.items():
        limit = getattr(limits, option)
        if limit is not None:
            value = _number(summary, "individual", name)
            found.append(
                _at_most(f"individual epsilon, {name} ({claim})", value, limit, private=True)
            )
    if limits.min_test_accuracy is not None:
        if _look_up(summary, ("run", "test_accuracy")) is None:
            raise InputError(
                "--min-test-accuracy: this audit knows no test accuracy; pass test_set to the Recorder"
            )
        accuracy = _number(summary, "run", "test_accuracy")
        found.append(_at_least("test accuracy", accuracy, limits.min_test_accuracy, private=True))
    return found


def _groups(summary: Mapping[str, Any], limits: Limits) -> list[Condition]:
    if limits.max_group_ratio is None:
        return []
    tables = [table for table in _items(summary, "groups") if table.get("ratio") is not None]
    if not tables:
        raise InputError(
            "--max-group-ratio: this audit compares no groups; audit again with --by COLUMN"
        )
    found = []
    for table in tables:
        limit, undefined = limits.max_group_ratio, _look_up(table, ("ratio", "value")) is None
        text = "undefined" if undefined else f"{_number(table, 'ratio', 'value'):.4g}"
        passed = not undefined and _number(table, "ratio", "value") <= limit
        name = f"mean epsilon of the worst-off over the best-off group by {_text(table, 'by')}"
        found.append(Condition(name, passed, text, f"at most {limit:g}", private=True))
    return found


def _at_most(name: str, value: float, limit: float, *, private: bool) -> Condition:
    return Condition(name, value <= limit, format_epsilon(value), f"at most {limit:g}", private)


def _at_least(name: str, value: float, limit: float, *, private: bool) -> Condition:
    return Condition(
        name, value >= limit, format_share(value, 1), f"at least {format_share(limit, 1)}", private
    )


def _look_up(summary: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = summary
    for name in path:
        if not (isinstance(value, Mapping) and name in value):
            raise InputError(f"audit.json lacks {'.'.join(path)}; make the audit again")
        value = value[name]
    return value


def _number(summary: Mapping[str, Any], *path: str) -> float:
    value = _look_up(summary, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(
            f"audit.json: {'.'.join(path)}={value!r} is not a finite number; make the audit again"
        )
    return float(value)


def _text(summary: Mapping[str, Any], *path: str) -> str:
    value = _look_up(summary, path)
    if not isinstance(value, str):
        raise InputError(
            f"audit.json: {'.'.join(path)}={value!r} is not a text; make the audit again"
        )
    return value


def _items(summary: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    value = _look_up(summary, (name,))
    if not (isinstance(value, list) and all(isinstance(item, Mapping) for item in value)):
        raise InputError(f"audit.json: {name} is not a list of objects; make the audit again")
    return value
