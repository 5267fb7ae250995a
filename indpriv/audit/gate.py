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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from indpriv._facts import PASSED
from indpriv._formatting import format_delta, format_epsilon, format_share
from indpriv._reading import named
from indpriv._storage import location
from indpriv.accountant.account import table_for
from indpriv.accountant.method import Method
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.distribution import describe
from indpriv.analysis.guarantee import SUPPORTED, guarantee_of_run
from indpriv.analysis.recorded_run import recorded_run, with_units
from indpriv.analysis.summary import Audit, findings
from indpriv.audit.audit_directory import EPSILON, SUMMARY, groups_of, read_summary
from indpriv.audit.method_of_run import as_checked
from indpriv.epsilon_table import LARGEST_FILE, Account, EpsilonParts
from indpriv.errors import InputError
from indpriv.norm_log.evidence import if_known
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import holds_log
from indpriv.norm_log.verify import journal_check

WITHHELD = "withheld"
RECOMPUTED, BELIEVED = "recomputed", "believed"
REPLAY = "replay"  # in an audit directory of checkpoints: the run that was made of them
_FROM = {"verdict": "log", "checks": "log"}  # what gives the values of a finding again


class _Limited(NamedTuple):
    """What a limit is on: its name, where an audit has it, and how it is shown.

    private, of: as in `Condition`.
    """

    name: str
    figure: str
    shown: Callable[[float], str] = format_epsilon
    private: bool = True
    of: str = "table"


_share = partial(format_share, digits=1)
_LIMITED = {
    "max_worst_case_epsilon": _Limited(
        "worst-case epsilon", "guarantee.worst_case_epsilon", private=False, of="log"
    ),
    "max_delta": _Limited("delta", "guarantee.delta", format_delta, False, "log"),
    "max_median_epsilon": _Limited("individual epsilon, median", "individual.median"),
    "max_p95_epsilon": _Limited("individual epsilon, p95", "individual.p95"),
    "max_p99_epsilon": _Limited("individual epsilon, p99", "individual.p99"),
    "max_epsilon": _Limited("individual epsilon, max", "individual.max"),
    "min_coverage": _Limited("steps recorded", "run.recorded_share", _share, False, "log"),
    "min_test_accuracy": _Limited("test accuracy", "run.test_accuracy", _share, of="log"),
}
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
        for name in (*_LIMITED, "max_group_ratio"):
            value, share = getattr(self, name), name in _SHARES
            largest = 1.0 if share else math.inf
            if value is not None and not (math.isfinite(value) and 0 <= value <= largest):
                number = (
                    "a number from 0 to 1" if share else "a finite number of at least 0, e.g. 8"
                )
                raise InputError(f"--{name.replace('_', ' ', 1)}={value} is not {number}")


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
    audit = Audit.from_json(content)
    numbers = [_limit(audit, name, getattr(limits, name)) for name in _LIMITED]
    found = [*_always(audit), *_words(audit, limits), *filter(None, numbers)]
    return [*found, *_groups(audit, limits.max_group_ratio)]


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
    **{limited.name: limited.figure for limited in _LIMITED.values()},
    "status of the guarantee": "guarantee.status",
    "unit": "account.unit",
    "claim": "claim",
    "number of people": "individual.n",
}


def _differ(said: Any, found: Any, tolerance: float) -> bool:
    if isinstance(said, float) and isinstance(found, float):
        return not math.isclose(said, found, rel_tol=tolerance, abs_tol=1e-12)
    return bool(said != found)


def _recomputed(
    audit_dir: Path, said: Audit, limits: Limits, run_dir: Path | None
) -> tuple[Audit, frozenset[str]]:
    """The audit with what table and log give, and what the log gave; see `Condition`.

    A table alone proves nothing: whoever could edit audit.json could edit it too.
    """
    if not (audit_dir / EPSILON).exists():
        return said, frozenset()
    parts = EpsilonParts.open(audit_dir / EPSILON)
    table = parts.table() if len(parts) <= LARGEST_FILE else parts
    account = table.account
    by = [group.by for group in said.groups] if limits.max_group_ratio is not None else []
    groups = groups_of(audit_dir, by) if by else said.groups
    found = said.replace(
        account=account, claim=table.claim, groups=groups, individual=describe(table)
    )
    near = audit_dir.parent if holds_log(audit_dir.parent) else audit_dir / REPLAY
    there = run_dir is not None or holds_log(near)  # one that was named must have a log
    opened = open_run(run_dir or near, unreadable="worst_case") if there else None
    if opened is None:
        delta = account.delta
        worst: dict[str, Any] = {"worst_case_epsilon": table.worst_case_epsilon, "delta": delta}
        guarantee = replace(said.guarantee, **worst, delta_times_n=delta * len(table))
        return found.replace(guarantee=guarantee), frozenset()
    log, recorded, known = opened.log, recorded_run(opened), {"log"}
    if account.rows_per_unit is not None and log.unit_ids is None:
        with named(audit_dir / SUMMARY, "make the audit again"):  # the column is not in the log
            words = shlex.split(said.command)
            log, recorded = with_units(log, recorded, words[words.index("--unit-column") + 1])
    secret = account.participation == "secret"
    if not secret:
        recorded = replace(recorded, checks=if_known(recorded.checks))
    # The account of everybody, unless it takes as long as the audit did.
    everybody = len(table) <= LARGEST_FILE and (account.accountant == "rdp" or not secret)
    everybody |= log.unit_ids is not None
    with named(audit_dir / EPSILON, "make the audit again"):
        method = _method_of(account)
    own = table_for(log if everybody else log.take(np.arange(1)), method)
    run = AuditedRun(log, as_checked(own, recorded.checks), recorded, by=by)
    if everybody:
        known = {"log", "table"}
        found = found.replace(individual=describe(own))
        if by and recorded.examples is not None:
            found, known = found.replace(groups=run.audit.groups), {"log", "table", "groups"}
    n = own.account.delta * (len(own) if everybody else log.n_examples)
    # Who can read the files of a copy says nothing of the run.
    permissions = [one for one in said.checks if one.key == "permissions"]
    kept = (*(one for one in run.audit.checks if one.key != "permissions"), *permissions)
    return found.replace(
        account=own.account,
        guarantee=replace(guarantee_of_run(run), delta_times_n=n),
        claim=run.epsilons.claim,
        run=run.audit.run,
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
    )


def _always(audit: Audit) -> Iterator[Condition]:
    """That no finding contradicts the account.

    Individual epsilon is no guarantee, so attacks that do better than it are notes.
    """
    for finding in findings():
        if finding.watched and finding.holds_something(audit):
            alarms = tuple(finding.alarms(audit))
            text = " ".join(alarms) or "none"
            if finding.public is not None:
                text = finding.public(audit)
            yield Condition(
                finding.watched,
                not alarms,
                text,
                "no alarm",
                private=finding.public is None,
                of=_FROM.get(finding.name, ""),
            )


def _words(audit: Audit, limits: Limits) -> Iterator[Condition]:
    """What must be the case, where no number is limited."""
    guarantee, unit = audit.guarantee, audit.account.unit
    checked = f"{guarantee.status}: {guarantee.evidence}"
    if limits.unit is not None:
        yield Condition("unit of privacy", unit == limits.unit, unit, limits.unit, False, "log")
    if limits.verified:
        passed = guarantee.status == SUPPORTED
        yield Condition("guarantee checked", passed, checked, SUPPORTED, False, "log")
    if limits.exact:
        yield Condition("claim", audit.claim == "exact", audit.claim, "exact", False, "log")


def _limit(audit: Audit, option: str, limit: float | None) -> Condition | None:
    """Whether a limit on a number holds; None for no limit."""
    if limit is None:
        return None
    limited, most = _LIMITED[option], option.startswith("max")
    value = attrgetter(limited.figure)(audit)
    if value is None:
        raise InputError(
            f"--{option.replace('_', ' ', 1)}: this audit has no {limited.name}; pass test_set to "
            "the Recorder"
        )
    name = f"{limited.name} ({audit.claim})" if limited.of == "table" else limited.name
    asked = f"at most {limit:g}" if most else f"at least {limited.shown(limit)}"
    passed = value <= limit if most else value >= limit
    return Condition(name, passed, limited.shown(value), asked, limited.private, limited.of)


def _groups(audit: Audit, limit: float | None) -> Iterator[Condition]:
    ratios = {table.by: table.ratio.value for table in audit.groups if table.ratio is not None}
    if limit is not None and not ratios:
        raise InputError(
            "--max group_ratio: this audit compares no groups; audit again with --by COLUMN"
        )
    for by, ratio in ratios.items() if limit is not None else ():
        name = f"mean epsilon of the worst-off over the best-off group by {by}"
        found = "undefined" if ratio is None else f"{ratio:.4g}"
        passed = ratio is not None and ratio <= limit
        yield Condition(name, passed, found, f"at most {limit:g}", private=True, of="groups")
