"""docs/reference/models.md is what benchmarks/models.py writes, and no refusal is without a remedy."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("models", ROOT / "benchmarks/models.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_model_and_every_refusal_a_remedy(benchmark):
    text = (ROOT / "docs/reference/models.md").read_text("utf-8").partition(benchmark.MARKER)[2]
    text, _, wide = text.partition(benchmark.WIDE_HEAD)
    assert [name in wide for name in benchmark.TRANSFORMERS] == [True] * 7
    rows = [
        [entry.strip() for entry in line.split("|")[1:-1]]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    assert tuple(rows[0]) == benchmark.TITLES
    names = [re.sub(r" \([\d,]+\)$", "", row[0]) for row in rows[2:]]
    assert names == list(benchmark.KINDS)
    works = [any("refused" not in cell for cell in row[1:4]) for row in rows[2:]]
    assert sum(works) >= 16
    refusals = re.findall(r"^\d+\. (.*)$", text, re.MULTILINE)
    numbers = {int(n) for n in re.findall(r"refused \((\d+)\)", text)}
    assert numbers == set(range(1, len(refusals) + 1))
    remedies = ("fix(model)", "train with", "use ", "give ", "write ", "switch ", "call ")
    assert [said for said in refusals if not any(word in said for word in remedies)] == []


@pytest.mark.slow
def test_one_model_is_trained_recorded_and_compared_with_float64(benchmark):
    name, cells, ratios, seconds = benchmark.row("MLP", benchmark.KINDS["MLP"], "cpu")
    assert name == "MLP (354)"
    assert [(cell.says, cell.backend) for cell in cells] == [("exact", "layerwise")] * 3
    assert float(ratios) > 0
    assert float(seconds) >= 0
    refusals = [
        benchmark.Cell(f"{layer} is x") for layer in ("A 'a'", "B 'a.b'", "A 'a' and B 'b'")
    ]
    table = benchmark.table([(name, refusals, "", "")])
    assert table.endswith(
        "| MLP (354) | refused (1) | refused (1) | refused (1) |  |  |\n\n1. *layer* is x"
    )
