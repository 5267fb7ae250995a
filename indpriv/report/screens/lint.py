"""What `indpriv lint` finds: a screen, and a JSON document."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from indpriv._plain import to_json
from indpriv.analysis.lint.rule import ERROR, SEVERITIES, WARNING, Finding
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED

MEANING = (
    "Most thresholds are rules of thumb. A setting that passes may still be a bad one; `indpriv "
    "verify` checks what the guarantee rests on."
)
_INDENT = (0, 0, 0, 2)
_COLOURS = {ERROR: "bold red", WARNING: "yellow"}


def lint_document(path: str, findings: Sequence[Finding]) -> dict[str, Any]:
    """The JSON of `indpriv lint --json`: every rule, failed ones first."""
    return {
        "path": path,
        "meaning": MEANING,
        "failed": _failed(findings),
        "findings": to_json(findings),
    }


def print_lint(path: str, findings: Sequence[Finding], console: Console) -> None:
    """Print failed rules in full, and the titles of the others."""
    console.print(Text(f"Settings of {path}", style="bold"))
    for finding in findings:
        if finding.status == FAILED:
            _print_failed(finding, console)
    for status in (PASSED, NOT_CHECKED):
        named = [each for each in findings if each.status == status]
        if named:
            console.print(Text(f"\n{status}", style="bold"))
        for each in named:
            text = Text(f"{each.key}: {each.title}. {each.figures}")
            console.print(Padding(text, _INDENT, expand=False))
    counts = ", ".join(
        f"{count} {severity}{'' if count == 1 else 's'}"
        for severity, count in _failed(findings).items()
    )
    console.print(Text(f"\n{counts}. {MEANING}"))


def _failed(findings: Sequence[Finding]) -> dict[str, int]:
    found = Counter(finding.severity for finding in findings if finding.status == FAILED)
    return {severity: found[severity] for severity in SEVERITIES}


def _print_failed(finding: Finding, console: Console) -> None:
    head = Text(f"\n{finding.severity} ", style=_COLOURS.get(finding.severity, "cyan"))
    head.append(finding.key, style="bold")
    console.print(head)
    for name, text in (
        ("expected", f"{finding.title}."),
        ("here", finding.figures),
        ("literature", f"{finding.literature} [{finding.source}]"),
        ("what to do", finding.advice),
    ):
        line = Text(f"{name}: ", style="dim").append(text, style="not dim")
        console.print(Padding(line, _INDENT, expand=False))
