"""Commands that read what exists: show, check, gate, and publish, which writes what others read."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import typer

from indpriv import _facts
from indpriv._checks import check_choice, check_delta
from indpriv._facts import FAILED, NOT_CHECKED, REFUTED, Fact, refused
from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv._formatting import Console
from indpriv._plain import to_json
from indpriv.analysis.attacks.canaries import CanaryResults
from indpriv.analysis.attacks.evidence import Identity, agree, identities, too_few_runs
from indpriv.analysis.lint import facts_of_run, lint
from indpriv.analysis.recorded_run import Declared
from indpriv.analysis.summary import SENSITIVE, Audit
from indpriv.audit import audit_directory, groups_of, read_summary
from indpriv.audit.attacks import canaries_of_run, evidence_of_runs
from indpriv.audit.gate import judge_audit
from indpriv.audit.pipeline import evidence_of_run
from indpriv.cli import common
from indpriv.cli.commands import keys_of
from indpriv.errors import InputError
from indpriv.norm_log.evidence import evidence, is_earned, lines_of
from indpriv.norm_log.norm_log import OpenedRun, open_run
from indpriv.norm_log.run_files import GRADIENT_CANARIES, WHITE_BOX, holds_log, read_run_json
from indpriv.norm_log.verify import verify
from indpriv.release import Request, parse_budget, parse_quantiles, publish
from indpriv.release.ledger import SHAREABLE
from indpriv.report.formats import data_of
from indpriv.report.page import print_page, print_pdf
from indpriv.report.report import print_sensitive

_OF_SEVERAL = {"at_epsilon", "at_accuracy"}  # settings of show
_NAMES, _CONDITIONS = 32, 40  # columns of the names of checks, and of those of gate
_LIMITS = {"--max": "largest", "--min": "smallest", "--require": "require"}  # options of gate


def show(audit_dirs: list[Path], by: list[str], settings: dict[str, Any], as_json: bool) -> None:
    """Compare groups of an audit; with several audits of the same data, compare these."""
    several = len(audit_dirs) > 1
    if wrong := [key for key in settings if (key in _OF_SEVERAL) != several]:
        kind = "one audit" if several else "several audits of the same data"
        raise InputError(f"--set {wrong[0]} is for {kind}; leave it out")
    if several:
        compared = audit_directory.compare_audits(audit_dirs, by, **settings)
        common.show_result(
            as_json, to_json(compared), print_sensitive, "comparison", found=compared
        )
        return
    folder = audit_directory.audit_in(audit_dirs[0])
    summary = read_summary(folder)
    audit = Audit.from_json(summary)
    if by or settings or (folder / audit_directory.EPSILON).exists():
        tables = groups_of(folder, by, **settings)
    else:  # published without its tables
        tables = audit.groups
    values = {"tables": tables, "audit": summary, "raw": "within" not in settings}
    values["vulnerability"] = audit.vulnerability
    content = audit_directory.groups_json(tables, summary)
    common.show_result(as_json, content, print_sensitive, "group_tables", **values)


class _Part(NamedTuple):
    """What a part of check found: as JSON, its template and values, what the exit code follows."""

    content: dict[str, Any]
    template: str
    values: dict[str, Any]
    failed: bool = False
    left_open: bool = False


def check(
    run_dirs: list[Path],
    signed_by: Path | None,
    checkpoints: Path | None,
    spec: str | None,
    settings: dict[str, Any],
    as_json: bool,
) -> None:
    """Check a run's log, what its account rests on, its settings, and attacks on its account."""
    only, delta = settings.pop("only", None), settings.pop("delta", None)
    if delta is not None:
        check_delta(delta)
    runs = [common.checked_run(run, "check") for run in run_dirs or (None,)]
    if (checkpoints is None) != (spec is None) or (spec is not None and len(runs) > 1):
        raise refused("refusal.commands", "checkpoints")
    strict = settings.pop("strict", False)
    found: list[_Part] = []
    for run in runs:
        opened = cache(partial(open_run, run, unreadable="worst_case"))  # read once for both
        if only in (None, "log"):
            compared = []
            if checkpoints is not None and spec is not None:
                compared = _challenge(run, checkpoints, spec, **settings)
            found.append(_log(run, opened, signed_by, compared))
        if only in (None, "settings"):
            found.append(_if_possible(only, _settings_of_run, run, opened, delta, strict))
    if only in (None, "attacks"):
        found += _attacks(runs, only, delta or 1e-5)
    failed, left_open = (any(getattr(p, key) for p in found) for key in ("failed", "left_open"))
    if as_json:
        parts = [{**p.content, "failed": p.failed, "left_open": p.left_open} for p in found]
        common.print_json({"failed": failed, "left_open": left_open, "parts": parts})
    else:
        for part in found:
            print_page(part.template, Console(highlight=False), key_width=_NAMES, **part.values)
    if failed or left_open:
        raise typer.Exit(1 if failed else 3)


def _if_possible(only: str | None, make: Callable[..., _Part], *of: Any) -> _Part:
    """A part that is left open where it cannot be made, unless it is all that was asked for."""
    try:
        return make(*of)
    except InputError as error:
        if only is not None:
            raise
        content = {"reason": f"left open: {error}"}
        return _Part(content, "left_open", content, left_open=True)


def _challenge(
    run_dir: Path, checkpoints: Path, spec: str, challenges: int = 10, **options: Any
) -> list[Fact]:
    """Checks of the norms of a log against those of checkpoints, at random steps."""
    from indpriv.recording.checkpoints.replay import challenge

    common.check_device(options.get("device", "cpu"))
    with common.progress_bar() as progress:
        return challenge(checkpoints, spec, run_dir, challenges, **options, tell=progress)


def _log(
    run_dir: Path, opened: Callable[[], OpenedRun], signed_by: Path | None, compared: Sequence[Fact]
) -> _Part:
    """The checks of a log, with those against checkpoints, and the lines of its account."""
    checks, lines = evidence_of_run(opened, signed_by)
    every = [*checks, *compared]
    failed = any(one.status == FAILED for one in every) or REFUTED in {one.status for one in lines}
    cannot_tell = any((one.title, one.status) == ("norms", NOT_CHECKED) for one in compared)
    values = {"run": str(run_dir), "evidence": evidence(lines), "lines": lines, "checks": every}
    left_open = cannot_tell or not is_earned(lines)
    return _Part(to_json(values), "check", values, failed, left_open)


def _settings_of_run(
    run_dir: Path, opened: Callable[[], OpenedRun], delta: float | None, strict: bool
) -> _Part:
    run, declared = opened(), Declared(read_run_json(run_dir))
    recorder = {**run.header["run"], "seeded": run.seeded}
    facts = facts_of_run(run.log, recorder, declared, delta, lines_of(verify(run), recorder))
    return settings_part(run_dir, lint(facts), strict)


def settings_part(path: Path, findings: Sequence[Fact], strict: bool) -> _Part:
    """What the literature says of the settings of a run or an audit file.

    strict: it also fails where a rule of severity "warning" is broken.
    """
    stopping = (_facts.ERROR, _facts.WARNING) if strict else (_facts.ERROR,)
    found = Counter(one.kind for one in findings if one.status == FAILED)
    failed, meaning = {kind: found[kind] for kind in _facts.SEVERITIES}, data_of("texts")["of_lint"]
    values = {"path": str(path), "meaning": meaning, "failed": failed, "findings": findings}
    broken = any(one.status == FAILED and one.kind in stopping for one in findings)
    return _Part(to_json(values), "lint", values, broken)


def _attacks(runs: Sequence[Path], only: str | None, delta: float) -> list[_Part]:
    """The accounts of runs against the attacks that they made on themselves."""

    def part(found: Sequence[Identity], canaries: Mapping[str, CanaryResults]) -> _Part:
        content: dict[str, Any] = {
            "identities": [{**to_json(one), "z": one.z} for one in found],
            "canaries": {run: to_json(of.lengths) for run, of in canaries.items()},
            "canaries_left_out": {run: list(of.left_out) for run, of in canaries.items()},
        }
        agrees, few = agree(found), too_few_runs(found)
        content["too_few_runs"] = few is not None
        refuted = not (agrees and all(of.agree for of in canaries.values()))
        values: dict[str, Any] = {"found": found, "canaries": canaries}
        values |= {"agrees": agrees, "few": few}
        return _Part(content, "validation", values, refuted)

    def of_canaries(run: Path) -> _Part:
        return part((), {str(run): canaries_of_run(run, delta=delta)})

    def of_white_box() -> _Part:
        if len(attacked) == 1 and only is None:
            raise InputError("the white-box attack of one run proves nothing; pass several runs")
        return part(identities(evidence_of_runs(attacked)), {})

    canaries = [run for run in runs if (run / GRADIENT_CANARIES).is_file()]
    others = [run for run in runs if run not in canaries]
    attacked = others if only else [run for run in others if (run / WHITE_BOX).is_file()]
    parts = [_if_possible(only, of_canaries, run) for run in canaries]
    return [*parts, *([_if_possible(only, of_white_box)] if attacked else [])]


def gate(
    audit_dir: Path,
    largest: dict[str, float],
    smallest: dict[str, float],
    require: dict[str, Any],
    audited: Path | None,
    signed_by: Path | None,
    figures: bool,
    as_json: bool,
) -> None:
    """Compare an audit with limits, for pipelines: exit code 1 with the reason if one fails."""
    limits: dict[str, Any] = {f"max_{key}": value for key, value in largest.items()}
    limits |= {f"min_{key}": value for key, value in smallest.items()} | require
    if not any(value is not False for value in limits.values()) and signed_by is None:
        keys = (f"\n  {flag} {', '.join(keys_of('gate', one))}" for flag, one in _LIMITS.items())
        raise refused("refusal.commands", "no_limit", keys="".join(keys))
    if signed_by is not None or audited is not None:
        audited = common.checked_run(audited or audit_dir.absolute().parent, "gate AUDIT_DIR --run")
    conditions = judge_audit(audit_dir, limits, audited, signed_by)
    shown = [condition.shown(figures=figures) for condition in conditions]
    passed = all(condition.passed for condition in conditions)
    if as_json:
        common.print_json({"passed": passed, "conditions": shown})
    else:
        values = {"passed": passed, "conditions": shown}
        print_page("gate", Console(highlight=False), key_width=_CONDITIONS, **values)
    if not passed:
        raise typer.Exit(1)


def quantiles(
    path: Path,
    of: str,
    which: str,
    mean: bool,
    group: list[str],
    budget: str | None,
    spend: bool,
    settings: dict[str, Any],
    as_json: bool,
    **options: Any,
) -> None:
    """Release quantiles and the mean of individual epsilon; options: as `Request` has them."""
    if check_choice("--of", of, ("epsilon", "norms")) == "norms":
        common.checked_run(path, "publish quantiles --of norms")
    elif holds_log(path):  # budget is spent only on the figures that were asked for
        audit_dir = path / "audit"
        made = "" if audit_dir.is_dir() else f"after {common.typed('audit', path)}, "
        typed = common.typed("publish quantiles", audit_dir)
        raise refused("refusal.commands", "epsilons_of_run", path=path, made=made, typed=typed)
    kept = {"ledger_dir": settings.pop("ledger", None)}
    kept["empty_groups"] = settings.pop("empty_groups", False)
    request = Request(parse_quantiles(which), mean, groups=tuple(group), **options, **settings)
    limit = parse_budget(budget) if budget else None
    published = publish.release(path, request, budget=limit, spend=spend, **kept)
    common.show_result(as_json, published.content, publish.print_release, published.content)
    stored = "stored answer, shown at no further cost; --spend draws again"
    if not as_json:
        source = "drawn now and paid for" if published.fresh else stored
        common.say(f"\n{published.folder} ({source})")


def statement(
    audit_dir: Path,
    example: str | None,
    unit: str | None,
    every_owner: bool,
    output_dir: Path | None,
    as_json: bool,
) -> None:
    """Write a page in plain language that tells one owner, or each, their own epsilon."""
    if (example is not None) + (unit is not None) + every_owner != 1:
        raise InputError("pass one of --example ID, --unit ID and --all")
    common.check_folder("--output-dir", output_dir or audit_dir)
    chosen = publish.owners(audit_dir, example=example, unit=unit)
    with common.progress_bar() as progress:
        paths = publish.write_statements(audit_dir, chosen, output_dir, progress)
    if as_json:
        common.print_json([str(path) for path in paths])
    elif every_owner:
        common.say(f"{len(paths)} statements in {paths[0].parent}, each for one owner only")
    else:
        common.say(paths[0].read_text(encoding="utf-8"))
        common.say(f"{paths[0]}: for this owner only")


def card(audit_dir: Path) -> None:
    """Write the guarantee as a model-card block (YAML and Markdown, as on Hugging Face)."""
    text = publish.render_model_card(read_summary(audit_dir), publish.read_release(audit_dir))
    folder = make_folder(audit_dir, SHAREABLE)
    write_atomically(folder / publish.MODEL_CARD, text.encode("utf-8"))
    common.say(text)
    common.say(f"{folder / publish.MODEL_CARD}: for others")


def pdf(audit_dir: Path) -> None:
    """Print the report to report.pdf, which is sensitive, with an installed Chromium."""
    read_summary(audit_dir)  # refused where it is no audit, with what to type
    print_pdf(audit_dir / audit_directory.REPORT, audit_dir / "report.pdf")
    common.say(f"{audit_dir / 'report.pdf'}: {SENSITIVE}")
