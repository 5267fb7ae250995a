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
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from indpriv import _checks, _facts, _storage
from indpriv._formatting import formatted, round_down, round_up
from indpriv._reading import named
from indpriv.accountant.method import Method
from indpriv.analysis import distribution, summary
from indpriv.analysis.groups import MIN_GROUP
from indpriv.analysis.guarantee import guarantee_of_run
from indpriv.analysis.recorded_run import with_units
from indpriv.audit.audit_directory import EPSILON, SUMMARY, groups_of, read_summary
from indpriv.audit.pipeline import accounted, read_run
from indpriv.epsilon_table import LARGEST_FILE, EpsilonTable
from indpriv.norm_log import run_files, verify
from indpriv.norm_log.fields import ACCOUNT_WORDS, UNITS
from indpriv.norm_log.norm_log import open_run

WITHHELD = "withheld"
SHARES = ("1", "probability")  # units of figures from 0 to 1
RECOMPUTED, BELIEVED = "recomputed", "believed"
REPLAY = "replay"  # in an audit directory of checkpoints: the run that was made of them
GROUP_RATIO = "max_group_ratio"  # largest over smallest mean epsilon of two groups, of every table
LIMITS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_FROM = {"verdict": "log", "checks": "log"}  # what gives the values of a finding again
# What audit.json says and can be computed again.
_COMPARED = {
    **{of["name"]: of["figure"] for of in LIMITS.values() if summary.column_at(of["figure"]).unit},
    "status of the guarantee": "guarantee.status",
    "delta of the account": "account.delta",
    **{name: f"account.{name}" for name in ("unit", "neighbouring", "sampler", "participation")},
    "claim": "claim",
    "number of people": "individual.n",
}


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raise InputError for limits not in gate.toml, that limit nothing, or that nothing meets."""
    for option, value in limits.items():
        _checks.check_choice("limit", option, (*LIMITS, GROUP_RATIO))
        share = option in LIMITS and summary.column_at(LIMITS[option]["figure"]).unit in SHARES
        if value is not None and option == "unit":
            _checks.check_choice("--require unit", value, UNITS)
        if value is None or not option.startswith(("max_", "min_")):
            continue
        interval = "[0, 1]" if share else "[1, inf)" if option == GROUP_RATIO else "[0, inf)"
        _checks.check_number(f"--{option.replace('_', ' ', 1)}", value, interval)


@dataclass(frozen=True)
class Condition:
    """One condition: whether it holds, what was found and what was required."""

    name: str
    passed: bool
    found: str
    asked: str
    of: str = ""  # what must be computed again for it: "table", "groups" or "log"; "": nothing
    private: bool = False  # what was found is computed from the data
    known: str = BELIEVED  # as the audit says; or RECOMPUTED, from the log

    def shown(self, *, figures: bool) -> dict[str, Any]:
        """For a log, with or without figures computed from the data."""
        found = self.found if figures or not self.private else WITHHELD
        shown = {"name": self.name, "passed": self.passed, "found": found, "asked": self.asked}
        return {**shown, "known": self.known}


def judge_audit(
    audit_dir: Path,
    limits: Mapping[str, Any],
    run_dir: Path | None = None,
    signed_by: Path | None = None,
) -> list[Condition]:
    """Judge an audit directory, after computing again what its run and its tables give.

    limits: what is required, by the names in `LIMITS` and `GROUP_RATIO`; None requires nothing.
    run_dir: the audited run; by default the one that the audit lies in. signed_by: a file with the
    public keys of those who may have signed the run's log. InputError as of `judge`, and for a
    table or log that cannot be read.
    """
    check_limits(limits)
    content = read_summary(audit_dir)
    said = summary.Audit.from_json(content)
    ratios = limits.get(GROUP_RATIO) is not None
    found, known = _recomputed(_storage.location(audit_dir), said, run_dir, groups=ratios)
    if found is said:  # there is no table
        if run_dir is not None or signed_by is not None:
            raise _facts.refused("refusal.audits", "no_epsilons", folder=audit_dir, name=EPSILON)
        return judge(content, limits)
    close = max(1e-6, 10 * said.account.tolerance)  # brackets depend on who is accounted together
    reads: dict[str, Callable[[summary.Audit], Any]] = {
        "log": lambda one: one.run.recorder.get("log_sha256"),
        **{name: attrgetter(path) for name, path in _COMPARED.items()},
    }
    wrong = ", ".join(
        name for name, read in reads.items() if _differ(read(said), read(found), close)
    )
    text = f"another {wrong}" if wrong else "yes"
    agree = Condition("audit.json agrees with tables and log", not wrong, text, "yes")
    conditions = [
        replace(agree, known=RECOMPUTED if known else BELIEVED),
        *(
            replace(one, known=RECOMPUTED) if one.of in known else one
            for one in judge(found.to_json(), limits)
        ),
    ]
    if signed_by is not None:
        conditions.append(_signed(said, run_dir or audit_dir.absolute().parent, signed_by))
    return conditions


def judge(content: Mapping[str, Any], limits: Mapping[str, Any]) -> list[Condition]:
    """Check the content of audit.json against what is always required, then against limits.

    Individual epsilon is no guarantee, so attacks that do better than it are no alarms. InputError
    for an audit of another schema, or that lacks what is judged, and for limits that are not known
    or limit nothing.
    """
    check_limits(limits)
    audit = summary.Audit.from_json(content)
    found = []
    for finding in summary.findings():
        if finding.watched and finding.holds_something(audit):
            alarms = tuple(finding.alarms(audit))
            text = finding.public(audit) if finding.public else " ".join(alarms) or "none"
            of, private = _FROM.get(finding.name, ""), finding.public is None
            found.append(Condition(finding.watched, not alarms, text, "no alarm", of, private))
    for option in LIMITS:
        if (limit := limits.get(option)) is not None and limit is not False:  # 0.0 is a limit
            found.append(_limited(audit, option, limit))
    return [*found, *_groups(audit, limits.get(GROUP_RATIO))]


def _limited(audit: summary.Audit, option: str, limit: Any) -> Condition:
    """Whether one figure is within its limit, or is the text that is required."""
    about = LIMITS[option]
    name, of, figure = about["name"], about["of"], summary.column_at(about["figure"])
    value, private = attrgetter(about["figure"])(audit), figure.private
    if value is None:
        said = f"--{option.replace('_', ' ', 1)}"
        raise _facts.refused("refusal.audits", "no_figure", option=said, name=name)
    most = option.startswith("max_")
    if not figure.unit:
        asked, found = about.get("asked", limit), formatted(value, figure.form)
        found += f": {audit.guarantee.evidence}" if option == "verified" else ""
        return Condition(name, value == asked, found, asked, of, private)
    name = f"{name} ({audit.claim})" if of == "table" else name
    passed = value <= limit if most else value >= limit
    return Condition(name, passed, *_beside(value, limit, figure.form, most), of, private)


def _beside(value: float, limit: float, form: str, most: bool = True) -> tuple[str, str]:
    """A figure, rounded towards a failure, and its limit in full: on the same sides as texts."""
    scale, unit = (100, " %") if form == "share1" else (1, "")
    asked = f"{limit * scale:.15g}"
    digits = max(2, -int(Decimal(asked).as_tuple().exponent))
    found = (round_up if most else round_down)(value * scale, digits) + unit
    if form == "delta" or (most and digits == 2 and not unit):
        found = formatted(value, form)
    return found, f"at {'most' if most else 'least'} {asked}{unit}"


def _groups(audit: summary.Audit, limit: float | None) -> Iterator[Condition]:
    if limit is None:
        return
    ratios = {table.by: table.ratio.value for table in audit.groups if table.ratio is not None}
    if not audit.groups:
        raise _facts.refused("refusal.audits", "no_groups")
    if not ratios:
        by = ", ".join(table.by for table in audit.groups)
        raise _facts.refused("refusal.audits", "small_groups", by=by, least=MIN_GROUP)
    for by, ratio in ratios.items():
        name = f"mean epsilon of the worst-off over the best-off group by {by}"
        found, asked = _beside(limit if ratio is None else ratio, limit, "eps")
        found, passed = ("undefined", False) if ratio is None else (found, ratio <= limit)
        yield Condition(name, passed, found, asked, "groups", private=True)


def _signed(said: summary.Audit, run_dir: Path, keys: Path) -> Condition:
    """Whether the log that was audited is the one in run_dir, signed and whole."""
    run = open_run(run_dir, hash_all=True)
    check = verify.journal_check(run, keys)
    faults = [] if check.status == _facts.PASSED else [check.detail]
    if said.run.recorder.get("log_sha256") != run.fingerprint:
        faults.append("the audit is not of this log, or of it as it was before")
    found = "; ".join([*faults, *run.faults.values()])
    asked = f"by a key in {keys}"
    return Condition("log signed", not found, found or check.detail, asked, known=RECOMPUTED)


def _differ(said: Any, found: Any, tolerance: float) -> bool:
    if isinstance(said, float) and isinstance(found, float):
        return not math.isclose(said, found, rel_tol=tolerance, abs_tol=1e-12)
    return bool(said != found)


def _recomputed(
    audit_dir: Path, said: summary.Audit, run_dir: Path | None, *, groups: bool
) -> tuple[summary.Audit, frozenset[str]]:
    """The audit with what table and log give, and what the log gave; see `Condition`.

    A table alone proves nothing: whoever could edit audit.json could edit it too.
    """
    if not (audit_dir / EPSILON).exists():
        return said, frozenset()
    parts = EpsilonTable.open(audit_dir / EPSILON)
    table = parts.table() if len(parts) <= LARGEST_FILE else parts
    account, by = table.account, [group.by for group in said.groups] if groups else []
    found = said.replace(
        account=account,
        claim=table.claim,
        groups=groups_of(audit_dir, by) if by else said.groups,
        individual=distribution.describe(table),
    )
    near = audit_dir.parent if run_files.holds_log(audit_dir.parent) else audit_dir / REPLAY
    if run_dir is None and not run_files.holds_log(near):  # one that was named must have a log
        worst = {"worst_case_epsilon": table.worst_case_epsilon, "delta": account.delta}
        of_all = account.delta * len(table)
        guarantee = replace(said.guarantee, **worst, delta_times_n=of_all)
        return found.replace(guarantee=guarantee), frozenset()
    _, log, recorded = read_run(run_dir or near, "worst_case")
    known = {"log"}
    if account.rows_per_unit is not None and log.unit_ids is None:
        with named(audit_dir / SUMMARY, "make the audit again"):  # the column is not in the log
            words = shlex.split(said.command)
            log, recorded = with_units(log, recorded, words[words.index("--unit-column") + 1])
    # The account of everybody, unless it takes as long as the audit did.
    secret = account.participation == "secret"
    everybody = len(table) <= LARGEST_FILE and (account.accountant == "rdp" or not secret)
    everybody |= log.unit_ids is not None
    names = ["delta", *(ACCOUNT_WORDS if secret else ("neighbouring", "participation"))]
    with named(audit_dir / EPSILON, "make the audit again"):
        method = Method(**{name: getattr(account, name) for name in names})
    own, run = accounted(log if everybody else log.take(np.arange(1)), recorded, method, by)
    run = replace(run, log=log)
    if everybody:
        known |= {"table"}
        found = found.replace(individual=distribution.describe(own))
        if by and recorded.examples is not None:
            known |= {"groups"}
            found = found.replace(groups=run.audit.groups)
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
