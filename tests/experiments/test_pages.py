"""reports/README.md: a line for each page and audit, with commands, figures and times that stand elsewhere too."""

import json
import re
from pathlib import Path

import pytest

from reports.yu2023.audits import AUDITS

ROOT = Path(__file__).parents[2]
REPORTS = ROOT / "reports"
INDEX = (REPORTS / "README.md").read_text("utf-8")
ROWS = {
    match[1]: [cell.strip() for cell in match[2].split(" | ")]
    for match in re.finditer(r"^\| \[\w+\]\(([\w/.]+)\) \| (.+) \|$", INDEX, re.MULTILINE)
}
PAGES = sorted(
    path.parent.name for path in REPORTS.glob("*/__main__.py") if path.parent.name != "demo"
)
MADE_BY = {
    f"make {target}": command
    for target, command in re.findall(
        r"^(\w+):.*\n\t\$\(BIN\)/(python -m reports\.\w+)$",
        (ROOT / "Makefile").read_text("utf-8"),
        re.MULTILINE,
    )
}


def text_of(path):
    """On one line, so that what a line break parts is found."""
    return " ".join(path.read_text("utf-8").replace("\\", "").replace("\n#", "\n").split())


def test_each_page_and_audit_has_a_line():
    audits = [name for name in AUDITS if (REPORTS / name / "audit.md").is_file()]
    expected = [f"{name}/README.md" for name in PAGES] + [f"{name}/audit.md" for name in audits]
    assert sorted(ROWS) == sorted(expected)


@pytest.mark.parametrize("target", ROWS)
def test_a_line_says_what_its_page_says(target):
    _, found, _, _ = ROWS[target]
    page = text_of(REPORTS / target)
    figures = re.findall(r"\d[\d.,]*\d|\d", found)
    assert figures or target in ("wei2021/README.md", "fedcdp/README.md", "validation/README.md")
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![.,]?\d)", page), figure
    if target.endswith("audit.md"):
        worst, relation, status, median, claim, high, ratio, low = re.fullmatch(
            r"worst case ([\d.]+) \((zero out; )?(\w+)\), median ([\d.]+) \((\w+)\); "
            r"mean of (?:digit )?(\S+) ([\d.]+) times that of (?:digit )?(\S+)",
            found,
        ).groups()
        over = "zero out the contribution of" if relation else "add/remove"
        named = "Worst-case epsilon, no guarantee" if status == "unproven" else "worst-case epsilon"
        assert f"{named} | {worst} | delta 1e-5, {over} one example, Poisson" in page
        assert f"Status of the guarantee | {status} |" in page
        assert f"Median individual epsilon | {median} | {claim}; not a guarantee |" in page
        assert f"Mean epsilon of {high} over {low}: raw **{ratio} [" in page


@pytest.mark.parametrize("target", ROWS)
def test_a_command_makes_what_its_line_says(target):
    _, _, command, time = ROWS[target]
    name, command = Path(target).parent.name, command.strip("`")
    if target.endswith("audit.md"):
        run = json.loads((REPORTS / target).with_suffix(".json").read_text("utf-8"))["run"]
        gpu = run["declared"]["training"]["device"].startswith("cuda")
        assert command == f"python -m reports.yu2023 {name}{' --device cuda' * gpu}"
        said = text_of(ROOT / "audits" / f"{name}.toml")
    else:
        assert MADE_BY.get(command, command) == f"python -m reports.{name}"
        said = text_of(REPORTS / name / "__main__.py")
    if time == "–":
        assert not re.search(r"(hour|minute)s? on", said)
    else:
        assert time.casefold() in said.casefold()
