"""The pages of proofs and the accountant's code cite each other's numbers."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs/explanation").glob("proofs*.md"))
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
CODE = sorted((ROOT / "indpriv/accountant").rglob("*.py"))
LINES = set(re.findall(r"^\*\*\[(\d\.\d)\]", PAGE, re.MULTILINE))
SECTIONS = set(re.findall(r"^(?:## |# Proofs, section )(\d)[.:] ", PAGE, re.MULTILINE))
CITED = {
    file.name: set(re.findall(r"(?<!\S)\[(\d(?:\.\d)?)\]", text))
    for file in CODE
    if "proofs.md" in (text := file.read_text(encoding="utf-8"))
}


def test_what_the_code_cites_is_on_the_page():
    assert {"laws.py", "tight.py"} <= set(CITED)
    unknown = {name: cited - LINES - SECTIONS for name, cited in CITED.items()}
    assert not {name: cited for name, cited in unknown.items() if cited}


def test_the_code_cites_every_line_of_the_page():
    assert len(LINES) == len(re.findall(r"^\*\*\[", PAGE, re.MULTILINE)) > 20
    assert not LINES - set().union(*CITED.values())


def test_the_page_cites_its_own_lines():
    assert not set(re.findall(r"\[(\d(?:\.\d)?)\]", PAGE)) - LINES - SECTIONS


def test_constants_of_the_code_cite_a_line():
    constants = [
        line
        for name in ("laws.py", "tight.py")
        for line in (ROOT / "indpriv/accountant" / name).read_text(encoding="utf-8").splitlines()
        if re.match(r"_?[A-Z_]+ = -?\d", line)
    ]
    memory = [line for line in constants if "<<" in line and "[" not in line]
    assert len(constants) > len(memory) + 8
    assert [line for line in constants if "[" not in line and line not in memory] == []
