"""Gates for pipelines: is an audit good enough to go on?

Figures of audit.json are computed again from the run's log, where it is there: individual epsilons
by the RDP accountant or of known participation, the worst case by any. The others are believed,
also those that the audit's own tables give, and each condition says so.

Some conditions are always checked: a limit on epsilon means nothing for a run whose guarantee
failed. Many people read the logs of pipelines, so figures computed from the data are withheld
unless they are asked for. Even then, whether a condition on such a figure passed or failed says
something about the data.
"""

import math
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from indpriv._formatting import format_delta, format_epsilon, format_lower_bound, format_share
from indpriv._reading import named
from indpriv._storage import location
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import table_for
from indpriv.analysis.distribution import describe
from indpriv.analysis.groups import group_tables
from indpriv.analysis.guarantee import SUPPORTED, guarantee_of
from indpriv.analysis.run_facts import run_facts
from indpriv.analysis.summary import Audit, above_worst_case
from indpriv.audit.audit_directory import EPSILON, SUMMARY, read_summary
from indpriv.audit.groups import groups_of
from indpriv.audit.method_of_run import as_checked
from indpriv.audit.run_directory import in_rows_of, recorded_run, with_units
from indpriv.audit.summarise import divisor_of_run
from indpriv.epsilon_table import Account, EpsilonParts
from indpriv.epsilon_table.parts import LARGEST_FILE
from indpriv.errors import InputError
from indpriv.norm_log.checks.of_known import if_known
from indpriv.norm_log.evidence import FAILED, PASSED, PERMISSIONS
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import holds_log
from indpriv.norm_log.sealing import journal_check

WITHHELD = "withheld"
RECOMPUTED, BELIEVED = "recomputed", "believed"
REPLAY = "replay"  # in an audit directory of checkpoints: the run that was made of them
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

    Attributes:
        name, passed, found, asked: of the condition.
        private: what was found is computed from the data.
        of: what must be computed again for it: "table", "groups" or "log"; "" if nothing is.
        known: "recomputed" from the log, or "believed": as the audit says.
    """

    name: str
    passed: bool
    found: str
    asked: str
    private: bool
    of: str = ""
    known: str = BELIEVED

    def shown(self, *, figures: bool) -> dict[str, Any]:
        """For a log, with or without figures computed from the data."""
        found = self.found if figures or not self.private else WITHHELD
        shown = {"name": self.name, "passed": self.passed, "found": found, "asked": self.asked}
        return {**shown, "known": self.known}


def judge_audit(
    audit_dir: Path, limits: Limits, run_dir: Path | None = None, signed_by: Path | None = None
) -> list[Condition]:
    """Judge an audit directory, after computing again what its run and its tables give.

    Args:
        audit_dir: of the audit.
        limits: what is required.
        run_dir: the audited run; by default the one that the audit lies in.
        signed_by: a file with the public keys of those who may have signed the run's log.

    Raises:
        InputError: as `judge`, or a table or log that cannot be read.
    """
    content = read_summary(audit_dir)
    said = Audit.from_json(content)
    found, known = _recomputed(location(audit_dir), said, limits, run_dir)
    if found is said:  # there is no table
        if run_dir is not None or signed_by is not None:
            raise InputError(
                f"{audit_dir} holds no {EPSILON}, so nothing in it can be compared with the log "
                "(--run, --signed-by); make the audit again"
            )
        return judge(content, limits)
    signed = []
    if signed_by is not None:
        signed = [_signed(said, run_dir or audit_dir.absolute().parent, signed_by)]
    close = max(1e-6, 10 * said.account.tolerance)  # brackets depend on who is accounted together
    reads: dict[str, Callable[[Audit], Any]] = {
        "log": lambda one: one.run.recorder.get("log_sha256"),
        **{name: attrgetter(path) for name, path in _COMPARED.items()},
    }
    wrong = ", ".join(
        name for name, read in reads.items() if _differ(read(said), read(found), close)
    )
    agree = Condition(
        "audit.json agrees with tables and log",
        not wrong,
        f"another {wrong}" if wrong else "it does",
        "it does",
        private=False,
        known=RECOMPUTED if known else BELIEVED,
    )
    conditions = judge(found.to_json(), limits)
    return [
        agree,
        *(replace(one, known=RECOMPUTED) if one.of in known else one for one in conditions),
        *signed,
    ]


def judge(content: Mapping[str, Any], limits: Limits) -> list[Condition]:
    """Check the content of audit.json against what is always required, then against limits.

    Raises:
        InputError: an audit of another schema, or one that lacks what is judged.
    """
    summary = Audit.from_json(content)
    return [
        *_always(summary),
        *_guarantee(summary, limits),
        *_individual(summary, limits),
        *_groups(summary, limits),
    ]


def _signed(said: Audit, run_dir: Path, keys: Path) -> Condition:
    """Whether the log that was audited is the one in run_dir, signed and whole."""
    run = open_run(run_dir, hash_all=True)
    check = journal_check(run.state, keys)
    faults = [] if check.status == PASSED else [check.detail]
    if said.run.recorder.get("log_sha256") != run.state.fingerprint:
        faults.append("the audit is not of this log, or of it as it was before")
    found = "; ".join([*faults, *run.faults.values()])
    asked = f"by a key in {keys}"
    return Condition(
        "log signed", not found, found or check.detail, asked, private=False, known=RECOMPUTED
    )


# What audit.json says and can be computed again.
_COMPARED = {
    "worst case": "guarantee.worst_case_epsilon",
    "delta": "guarantee.delta",
    "status of the guarantee": "guarantee.status",
    "unit": "account.unit",
    "claim": "claim",
    "number of people": "individual.n",
    **{f"{name} of individual epsilon": f"individual.{name}" for name in _INDIVIDUAL.values()},
    "share of recorded steps": "run.records.recorded_share",
    "test accuracy": "run.test_accuracy",
}


def _differ(said: Any, found: Any, tolerance: float) -> bool:
    if isinstance(said, float) and isinstance(found, float):
        return not math.isclose(said, found, rel_tol=tolerance, abs_tol=1e-12)
    return bool(said != found)


def _recomputed(
    audit_dir: Path, summary: Audit, limits: Limits, run_dir: Path | None
) -> tuple[Audit, frozenset[str]]:
    """The summary with what table and log give, and what the log gave; see `Condition`.

    A table alone proves nothing: whoever could edit audit.json could edit it too.
    """
    if not (audit_dir / EPSILON).exists():
        return summary, frozenset()
    parts = EpsilonParts.open(audit_dir / EPSILON)
    table = parts.table() if len(parts) <= LARGEST_FILE else parts
    account = table.account
    by = [group.by for group in summary.groups] if limits.max_group_ratio is not None else []
    groups = groups_of(audit_dir, by) if by else summary.groups
    summary = summary.replace(account=account, claim=table.claim, groups=groups)
    summary = summary.replace(individual=describe(table))
    near = audit_dir.parent if holds_log(audit_dir.parent) else audit_dir / REPLAY
    there = run_dir is not None or holds_log(near)  # one that was named must have a log
    run = open_run(run_dir or near, unreadable="worst_case") if there else None
    if run is None:
        delta = account.delta
        said: dict[str, Any] = {"worst_case_epsilon": table.worst_case_epsilon, "delta": delta}
        guarantee = replace(summary.guarantee, **said, delta_times_n=delta * len(table))
        return summary.replace(guarantee=guarantee), frozenset()
    log, recorded, known = run.log, recorded_run(run, "worst_case"), {"log"}
    if account.rows_per_unit is not None and log.unit_ids is None:
        with named(audit_dir / SUMMARY, "make the audit again"):  # the column is not in the log
            words = shlex.split(summary.command)
            log, recorded = with_units(log, recorded, words[words.index("--unit-column") + 1])
    secret = account.participation == "secret"
    checks = recorded.checks if secret else if_known(recorded.checks)
    # The account of everybody, unless it takes as long as the audit did.
    everybody = len(table) <= LARGEST_FILE and (account.accountant == "rdp" or not secret)
    everybody |= log.unit_ids is not None
    with named(audit_dir / EPSILON, "make the audit again"):
        method = _method_of(account)
    own = table_for(log if everybody else log.take(np.arange(1)), method)
    if everybody:
        table, known = own, {"log", "table"}
        summary = summary.replace(individual=describe(own))
        if by and recorded.examples is not None:
            examples = in_rows_of(own, recorded.examples)
            train, test = examples.aligned(own.example_ids), examples.test
            summary = summary.replace(groups=group_tables(own, train, test, by))
            known = {"log", "table", "groups"}
    divisor, said_of = divisor_of_run(log, table, recorded.recorder), recorded.declared.of_lines
    guarantee = guarantee_of(table, checks, recorded.recorder, None, divisor, said_of)
    # Who can read the files of a copy says nothing of the run.
    permissions = [one for one in summary.checks if one.key == PERMISSIONS.key]
    kept = (*(one for one in checks if one.key != PERMISSIONS.key), *permissions)
    return summary.replace(
        account=own.account,
        guarantee=replace(guarantee, worst_case_epsilon=own.worst_case_epsilon),
        claim=as_checked(own, checks).claim,
        run=run_facts(log, recorded.examples, recorded.recorder, recorded.declared),
        checks=kept,
    ), frozenset(known)


def _method_of(account: Account) -> Method:
    """How an audit was accounted."""
    basis: dict[str, Any] = {"delta": account.delta, "neighbouring": account.neighbouring}
    if account.participation == "known":
        return Method(**basis, participation="known")
    return Method(
        **basis,
        accountant=account.accountant,
        conversion=account.conversion,
        between_records=account.between_records,
        tolerance=account.tolerance or Method.tolerance,
    )


def _always(summary: Audit) -> list[Condition]:
    """The guarantee, the checks, and every finding of an attack that contradicts the account.

    Individual epsilon is no guarantee, so attacks that do better than it are notes.
    """
    guarantee, times_n = summary.guarantee, summary.guarantee.delta_times_n
    failed = ", ".join(check.title for check in summary.checks if check.status == FAILED)
    found = [
        Condition(
            "guarantee", guarantee.stands, guarantee.status, "supported or declared", False, "log"
        ),
        Condition("delta times n", times_n < 1, f"{times_n:.2g}", "below 1", True, "table"),
        Condition(
            "evidence", not failed, failed or "no check failed", "no check failed", False, "log"
        ),
    ]
    if summary.canaries is not None:
        proven = summary.canaries.overall["epsilon"].value
        passed = proven <= summary.guarantee.worst_case_epsilon
        name, text = "epsilon that canaries prove", format_lower_bound(proven)
        found.append(Condition(name, passed, text, "at most the worst case", private=True))
    if (gradients := summary.gradient_canaries) is not None:
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
    tried = len(summary.attack_by_epsilon) + len(summary.attacks)
    if tried or summary.attribute_attacks or summary.reconstruction:
        above = sum(one.above_ceiling for one in summary.attribute_attacks)
        above += above_worst_case(summary) + sum(one.findings for one in summary.reconstruction)
        name = "attacks above what the account allows"
        found.append(Condition(name, above == 0, f"{above}", "none", private=True))
    return found


def _guarantee(summary: Audit, limits: Limits) -> list[Condition]:
    found, guarantee = [], summary.guarantee
    if (limit := limits.max_worst_case_epsilon) is not None:
        worst = guarantee.worst_case_epsilon
        found.append(_at_most("worst-case epsilon", worst, limit, False, "log"))
    if (limit := limits.max_delta) is not None:
        passed, text = guarantee.delta <= limit, format_delta(guarantee.delta)
        found.append(Condition("delta", passed, text, f"at most {limit:g}", False, "log"))
    if limits.unit is not None:
        unit = summary.account.unit
        found.append(
            Condition("unit of privacy", unit == limits.unit, unit, limits.unit, False, "log")
        )
    if limits.verified:
        passed = guarantee.status == SUPPORTED
        text = f"{guarantee.status}: {guarantee.evidence}"
        found.append(Condition("guarantee checked", passed, text, SUPPORTED, False, "log"))
    if (limit := limits.min_coverage) is not None:
        share = summary.run.records.recorded_share
        found.append(_at_least("steps recorded", share, limit, False, "log"))
    return found


def _individual(summary: Audit, limits: Limits) -> list[Condition]:
    claim, found = summary.claim, []
    if limits.exact:
        found.append(Condition("claim", claim == "exact", claim, "exact", False, "log"))
    for option, figure in _INDIVIDUAL.items():
        if (limit := getattr(limits, option)) is not None:
            value = getattr(summary.individual, figure)
            name = f"individual epsilon, {figure} ({claim})"
            found.append(_at_most(name, value, limit, True, "table"))
    if (limit := limits.min_test_accuracy) is not None:
        accuracy = summary.run.test_accuracy
        if accuracy is None:
            raise InputError(
                "--min-test-accuracy: this audit has no test accuracy; pass test_set to the "
                "Recorder"
            )
        found.append(_at_least("test accuracy", accuracy, limit, True, "log"))
    return found


def _groups(summary: Audit, limits: Limits) -> list[Condition]:
    if (limit := limits.max_group_ratio) is None:
        return []
    ratios = [(table.by, table.ratio) for table in summary.groups]
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
            of="groups",
        )
        for by, ratio in ratios
        if ratio is not None
    ]


def _at_most(name: str, value: float, limit: float, private: bool, of: str) -> Condition:
    return Condition(name, value <= limit, format_epsilon(value), f"at most {limit:g}", private, of)


def _at_least(name: str, value: float, limit: float, private: bool, of: str) -> Condition:
    asked = f"at least {format_share(limit, 1)}"
    return Condition(name, value >= limit, format_share(value, 1), asked, private, of)
