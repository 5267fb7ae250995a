"""CONTRIBUTING names files and what they define: all of it exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PATHS = sorted(
    set(re.findall(r"`((?:indpriv|tests|reports|benchmarks|audits|docs)/[\w./]*)`", TEXT))
)
# `path` (`Name`), (`path`: `Name`) and "Register it in `path` (`NAME`)"
DEFINED = sorted(set(re.findall(r"`((?:indpriv|audits)/[\w/]+\.py)`(?:: | \()`(\w+)`", TEXT)))
RECIPES = re.findall(r"### (.+)\n\n((?:\d\. .+\n)+)", TEXT)


@pytest.mark.parametrize("path", PATHS)
def test_a_named_file_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), DEFINED)
def test_a_name_is_defined_in_its_file(path, name):
    source = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^(class |def )?{name}\b", source, re.MULTILINE)


def test_every_recipe_has_five_lines():
    assert [title for title, _ in RECIPES] == [
        "an accountant",
        "the norm of a layer",
        "an attack",
        "a group statistic",
        "a data set",
        "an experiment",
        "a finding",
        "a check",
        "a refusal of the Recorder",
        "a lint rule",
        "a page of documentation",
    ]
    assert all(lines.count("\n") == 5 for _, lines in RECIPES)
    assert len(DEFINED) >= 10
