"""The first tutorial as a notebook: text of the page, code as cells, what it shows as outputs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from pages import Block, blocks

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "tutorials/first_audit.md"
NOTEBOOK = PAGE.with_suffix(".ipynb")
_INSTALL = """\
# In Colab: upload the wheel that `pip wheel --no-deps .` makes in a checkout, then run this cell.
import glob
import importlib.util

if importlib.util.find_spec("indpriv") is None:
    %pip install --quiet {glob.glob("indpriv-*.whl")[0]}"""


def notebook_of(page: str) -> dict[str, Any]:
    """A notebook (format 4.5) with the same text, code and outputs as a page."""
    page = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    page = page.replace("The same text is a [notebook](first_audit.ipynb).\n\n", "")
    cells: list[dict[str, Any]] = [_code(_INSTALL, 0)]
    start = 0
    for block in blocks(page):
        fence = page.rfind("```", start, block.span[0])
        if block.source and not block.is_output:  # the package has it: to read
            continue
        _add_text(cells, page[start:fence])
        _add_block(cells, block)
        start = block.span[1] + len("```\n")
    _add_text(cells, page[start:])
    title = cells.pop(1)  # before the cell that installs
    for number, cell in enumerate([title, *cells]):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [title, *cells],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def written(notebook: dict[str, Any]) -> str:
    """The file of a notebook."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


def _add_text(cells: list[dict[str, Any]], text: str) -> None:
    # Pictures and links lead to files beside the page, which a lone notebook does not have.
    text = re.sub(r"<!-- .*? -->\n", "", text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)\n*", "", text)
    text = re.sub(r"\[([^\]]*)\]\((?!https?:)[^)]*\)", r"\1", text).strip("\n")
    if text:
        cells.append({"cell_type": "markdown", "id": "", "metadata": {}, "source": _lines(text)})


def _add_block(cells: list[dict[str, Any]], block: Block) -> None:
    if block.is_output:
        output = {"name": "stdout", "output_type": "stream", "text": _lines(block.code)}
        [*_, last] = (cell for cell in cells if cell["cell_type"] == "code")
        last["outputs"] = [output]
        return
    code = block.code.strip("\n")
    if block.language == "bash":
        code = "\n".join(f"!{line}" for line in code.splitlines())
    number = 1 + sum(cell["cell_type"] == "code" for cell in cells)
    cells.append(_code(code, number))


def _code(source: str, number: int) -> dict[str, Any]:
    return {
        "cell_type": "code",
        "execution_count": number or None,
        "id": "",
        "metadata": {},
        "outputs": [],
        "source": _lines(source),
    }


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)
