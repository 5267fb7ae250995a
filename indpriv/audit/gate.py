"""Gates for pipelines: is an audit good enough to go on? Judged from audit.json alone.

Some conditions are always checked: a limit on epsilon means nothing for a run whose guarantee
failed. Many people read the logs of pipelines, so figures computed from the data are withheld
unless they are asked for. Even then, whether a condition on such a figure passed or failed says
something about the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indpriv._formatting import format_delta, format_epsilon, format_lower_bound, format_share
from indpriv.analysis.guarantee import SUPPORTED
from indpriv.analysis.summary import AuditSummary
from indpriv.errors import InputError
from indpriv.norm_log.evidence import FAILED, PASSED
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.sealing import journal_check

WITHHELD = "withheld"
# Name of a limit -> the figure of individual epsilon that it is on.
_INDIVIDUAL = {
    "max_median_epsilon": "median",
    "max_p95_epsilon": "p95",
    "max_p99_epsilon": "p99",
    "max_epsilon": "max",
}
_NUMBERS = ("max_worst_case_epsilon", "max_group_ratio", *_INDIVIDUAL)
_SHARES = ("max_delta", "min_coverage", "min_test_accuracy")


@dataclass(frozen=True)
class Limits:
    """What to require of an audit; None requires nothing.

    Attributes:
        max_worst_case_epsilon, max_delta: of the guarantee.
        max_median_epsilon, max_p95_epsilon, max_p99_epsilon, max_epsilon: of individual epsilon.
        max_group_ratio: largest over smallest mean epsilon of two groups, raw, of every table of
            the audit.
        min_coverage: share of steps with a record.
        min_test_accuracy: of the final model.
        unit: of privacy, e.g. "user".
        exact: the individual epsilons must not be estimates.
        verified: the guarantee must be supported: every line that a recorder can verify is.
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
        for names, largest, expected in (
            (_NUMBERS, math.inf, "a finite number of at least 0, e.g. 8"),
            (_SHARES, 1.0, "a number from 0 to 1"),
        ):
            for name in names:
                value = getattr(self, name)
                if value is not None and not (math.isfinite(value) and 0 <= value <= largest):
                    raise InputError(f"--{name.replace('_', '-')} {value} is not {expected}")


@dataclass(frozen=True)
class Condition:
    """One condition: whether it holds, what was found and what was required.

    private: what was found is computed from the data.
    """

    name: str
    passed: bool
    found: str
    asked: str
    private: bool

    def shown(self, *, figures: bool) -> dict[str, Any]:
        """For a log, with or without figures computed from the data."""
        found = self.found if figures or not self.private else WITHHELD
        return {"name": self.name, "passed": self.passed, "found": found, "asked": self.asked}


def judge(content: Mapping[str, Any], limits: Limits) -> list[Condition]:
    """Check the content of audit.json against what is always required, then against limits.

    Raises:
        InputError: an audit of another schema, or one that lacks what is judged.
    """
    summary = AuditSummary.from_json(content)
    return [
        *_always(summary),
        *_guarantee(summary, limits),
        *_individual(summary, limits),
        *_groups(summary, limits),
    ]


def signed(content: Mapping[str, Any], run_dir: Path, keys: Path) -> Condition:
    """Whether the log that was audited is the one in run_dir, signed and whole.

    keys: a file with the public keys of those who may have signed it.
    """
    run = open_run(run_dir, hash_all=True)
    check = journal_check(run.state, keys)
    faults = [] if check.status == PASSED else [check.detail]
    if AuditSummary.from_json(content).run.recorder.get("log_sha256") != run.state.fingerprint:
        faults.append("the audit is not of this log, or of it as it was before")
    found = "; ".join([*faults, *run.faults.values()])
    asked = f"by a key in {keys}"
    return Condition("log signed", not found, found or check.detail, asked, private=False)


def _always(summary: AuditSummary) -> list[Condition]:
    """The guarantee, the checks, and every finding of an attack that contradicts the account.

    Individual epsilon is no guarantee, so attacks that do better than it are notes.
    """
    guarantee, times_n = summary.guarantee, summary.guarantee.delta_times_n
    attacks = summary.attacks
    failed = ", ".join(check.title for check in summary.notes.checks if check.status == FAILED)
    found = [
        Condition(
            "guarantee", guarantee.stands, guarantee.status, "supported or declared", private=False
        ),
        Condition("delta times n", times_n < 1, f"{times_n:.2g}", "below 1", private=True),
        Condition(
            "evidence", not failed, failed or "no check failed", "no check failed", private=False
        ),
    ]
    if attacks.canaries is not None:
        proven = attacks.canaries.overall.bound.epsilon
        passed = proven <= summary.guarantee.worst_case_epsilon
        name, text = "epsilon that canaries prove", format_lower_bound(proven)
        found.append(Condition(name, passed, text, "at most the worst case", private=True))
    if (gradients := attacks.gradient_canaries) is not None:
        wrong = [f"{one.length:g}" for one in gradients.lengths if not one.agrees]
        found.append(
            Condition(
                "gradient canaries agree with the account",
                gradients.agree,
                f"not those of length {', '.join(wrong)}" if wrong else "all lengths",
                "all lengths",
                private=True,
            )
        )
    if attacks.by_epsilon or attacks.every.results or attacks.attributes or attacks.reconstruction:
        above = attacks.every.findings + sum(one.above_ceiling for one in attacks.attributes)
        above += attacks.by_epsilon.findings if attacks.by_epsilon else 0
        above += sum(one.findings for one in attacks.reconstruction)
        name = "attacks above what the account allows"
        found.append(Condition(name, above == 0, f"{above}", "none", private=True))
    return found


def _guarantee(summary: AuditSummary, limits: Limits) -> list[Condition]:
    found, guarantee = [], summary.guarantee
    if (limit := limits.max_worst_case_epsilon) is not None:
        worst = guarantee.worst_case_epsilon
        found.append(_at_most("worst-case epsilon", worst, limit, private=False))
    if (limit := limits.max_delta) is not None:
        passed, text = guarantee.delta <= limit, format_delta(guarantee.delta)
        found.append(Condition("delta", passed, text, f"at most {limit:g}", private=False))
    if limits.unit is not None:
        unit = summary.account.unit
        found.append(
            Condition("unit of privacy", unit == limits.unit, unit, limits.unit, private=False)
        )
    if limits.verified:
        passed = guarantee.status == SUPPORTED
        text = f"{guarantee.status}: {guarantee.evidence}"
        found.append(Condition("guarantee checked", passed, text, SUPPORTED, private=False))
    if (limit := limits.min_coverage) is not None:
        share = summary.run.records.recorded_share
        found.append(_at_least("steps recorded", share, limit, private=False))
    return found


def _individual(summary: AuditSummary, limits: Limits) -> list[Condition]:
    claim, found = summary.claim, []
    if limits.exact:
        found.append(Condition("claim", claim == "exact", claim, "exact", private=False))
    for option, figure in _INDIVIDUAL.items():
        if (limit := getattr(limits, option)) is not None:
            value = getattr(summary.individual, figure)
            name = f"individual epsilon, {figure} ({claim})"
            found.append(_at_most(name, value, limit, private=True))
    if (limit := limits.min_test_accuracy) is not None:
        accuracy = summary.run.test_accuracy
        if accuracy is None:
            raise InputError(
                "--min-test-accuracy: this audit has no test accuracy; pass test_set to the "
                "Recorder"
            )
        found.append(_at_least("test accuracy", accuracy, limit, private=True))
    return found


def _groups(summary: AuditSummary, limits: Limits) -> list[Condition]:
    if (limit := limits.max_group_ratio) is None:
        return []
    ratios = [(table.by, table.ratios.raw) for table in summary.groups]
    if not any(ratio is not None for _, ratio in ratios):
        raise InputError(
            "--max-group-ratio: this audit compares no groups; audit again with --by COLUMN"
        )
    return [
        Condition(
            name=f"mean epsilon of the worst-off over the best-off group by {by}",
            passed=ratio.value is not None and ratio.value <= limit,
            found="undefined" if ratio.value is None else f"{ratio.value:.4g}",
            asked=f"at most {limit:g}",
            private=True,
        )
        for by, ratio in ratios
        if ratio is not None
    ]


def _at_most(name: str, value: float, limit: float, *, private: bool) -> Condition:
    return Condition(name, value <= limit, format_epsilon(value), f"at most {limit:g}", private)


def _at_least(name: str, value: float, limit: float, *, private: bool) -> Condition:
    asked = f"at least {format_share(limit, 1)}"
    return Condition(name, value >= limit, format_share(value, 1), asked, private)
