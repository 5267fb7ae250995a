"""audits/README.md: a line for each audit file, and no figure that its page does not show."""

import re
from pathlib import Path

import pytest

from audits.__main__ import app

ROOT = Path(__file__).parents[2]
AUDITS = ROOT / "audits"
LINES = [
    line.strip("|").split("|") for line in (AUDITS / "README.md").read_text("utf-8").splitlines()
]
ROWS = {row[0].strip(" `"): row for row in LINES if row[0].strip(" `").endswith(".toml")}
CLAIMS = {"(exact)": "exact; not a guarantee", "(estimate)": "estimate; not a guarantee"}


def pages_of(text):
    linked = [AUDITS / target for target in re.findall(r"\]\(([^)]+)\)", text)]
    return linked + [ROOT / path for path in re.findall(r"`(docs/[^`]+)`", text)]


def test_each_audit_file_has_a_line():
    assert set(ROWS) == {path.name for path in AUDITS.glob("*.toml")}


def test_each_command_has_a_line():
    named = {
        match[1] for row in LINES if (match := re.fullmatch(r" `python -m audits (\w+)` ", row[0]))
    }
    assert named == {one.name or one.callback.__name__ for one in app.registered_commands}


@pytest.mark.parametrize("name", ROWS)
def test_a_figure_stands_on_its_page(name):
    _, _, found, where = ROWS[name]
    texts = [path.read_text("utf-8").replace("\\", "") for path in pages_of(where)]
    figures = re.findall(r"\d+\.\d+", found)
    assert texts or not figures
    for figure in figures:
        assert any(re.search(rf"(?<![\d.]){re.escape(figure)}(?!\d)", text) for text in texts), (
            figure
        )
    for claim, said in CLAIMS.items():
        assert claim not in found or said in texts[0]
    if "worst case" in found and "audit" in where:
        worst = re.search(r"worst case (\d+\.\d+)", found)[1]
        relation = "zero out" if "zero out" in found else "add/remove"
        line = rf"[Ww]orst-case epsilon(, no guarantee)? \| {worst} \| delta 1e-5, {relation} ([a-z ]+ of )?one example, Poisson sampling"
        assert re.search(line, texts[0])
        median = re.search(r"median (\d+\.\d+)", found)[1]
        assert f"Median individual epsilon | {median} |" in texts[0]
