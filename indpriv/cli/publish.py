"""publish: quantiles and a card for others, statements for owners, a PDF of the report."""

from pathlib import Path
from typing import Any

from indpriv._checks import check_choice
from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv.analysis.summary import SENSITIVE
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import REPORT
from indpriv.cli.common import check_folder, print_json, progress_bar, say, show_result, typed
from indpriv.errors import InputError
from indpriv.norm_log.run_files import holds_log
from indpriv.release.ledger import SHAREABLE
from indpriv.release.page import MODEL_CARD, read_release, render_model_card
from indpriv.release.statement import owners, write_statements
from indpriv.report.page import print_pdf


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
    from indpriv.release import Request, parse_budget, parse_quantiles, release
    from indpriv.release.page import print_release

    norms = check_choice("--of", of, ("epsilon", "norms")) == "norms"
    if holds_log(path) != norms:  # budget is spent only on the figures that were asked for
        _refuse_other_figures(path, norms)
    ledger = settings.pop("ledger", None)
    request = Request(parse_quantiles(which), mean, groups=tuple(group), **options, **settings)
    limit = parse_budget(budget) if budget else None
    published = release(path, request, budget=limit, spend=spend, ledger_dir=ledger)
    show_result(as_json, published.content, print_release, published.content)
    source = "stored answer, shown at no further cost; --spend draws again"
    if not as_json:
        say(f"\n{published.folder} ({'drawn now and paid for' if published.fresh else source})")


def _refuse_other_figures(path: Path, norms: bool) -> None:
    if norms:
        raise InputError(f"--of norms is for a run directory, and {path} is none; leave it out")
    audit_dir = path / "audit"
    made = "" if audit_dir.is_dir() else f"after {typed('audit', path)}, "
    raise InputError(
        f"{path} is a run, and epsilons are released from its audit; {made}type: "
        f"{typed('publish quantiles', audit_dir)} ...; norms before the first step need --of norms"
    )


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
    check_folder("--output-dir", output_dir or audit_dir)
    chosen = owners(audit_dir, example=example, unit=unit)
    with progress_bar() as progress:
        paths = write_statements(audit_dir, chosen, output_dir, progress)
    if as_json:
        print_json([str(path) for path in paths])
    elif every_owner:
        say(f"{len(paths)} statements in {paths[0].parent}, each for one owner only")
    else:
        say(paths[0].read_text(encoding="utf-8"))
        say(f"{paths[0]}: for this owner only")


def card(audit_dir: Path) -> None:
    """Write the guarantee as a model-card block (YAML and Markdown, as on Hugging Face)."""
    text = render_model_card(read_summary(audit_dir), read_release(audit_dir))
    folder = make_folder(audit_dir, SHAREABLE)
    write_atomically(folder / MODEL_CARD, text.encode("utf-8"))
    say(text)
    say(f"{folder / MODEL_CARD}: for others")


def pdf(audit_dir: Path) -> None:
    """Print the report to report.pdf, which is sensitive, with an installed Chromium."""
    read_summary(audit_dir)  # refused where it is no audit, with what to type
    print_pdf(audit_dir / REPORT, audit_dir / "report.pdf")
    say(f"{audit_dir / 'report.pdf'}: {SENSITIVE}")
