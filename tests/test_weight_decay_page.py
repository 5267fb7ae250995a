"""reports/weight_decay: written from its figures, and its rule can fail."""

from pathlib import Path

import pytest

from indpriv._files import read_json
from reports.weight_decay.page import VALUES, render, verdict

FOLDER = Path(__file__).parents[1] / "reports" / "weight_decay"


@pytest.mark.skipif(not (FOLDER / "weight_decay.json").is_file(), reason="not run")
def test_the_page_is_written_from_its_figures():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page == render(read_json(FOLDER / "weight_decay.json"))


@pytest.mark.parametrize(
    ("means", "word"),
    [
        ((0.90, 0.91, 0.93), "reproduced"),
        ((0.90, 0.93, 0.93), "differs"),
        ((0.93, 0.93, 0.90), "not reproduced"),
        ((0.9300, 0.9301, 0.9303), "not reproduced"),  # by no more than chance
    ],
)
def test_more_weight_decay_has_to_help_by_more_than_chance(means, word):
    runs = {
        f"{value:g}-{run}": {"test_accuracy": mean + 0.002 * (run - 1), "epsilon": 3.0}
        for value, mean in zip(VALUES, means, strict=True)
        for run in range(3)
    }
    assert verdict({"runs": runs}) == word
    assert verdict({"runs": dict(list(runs.items())[:-1])}) == "not run"
    assert f"helps, on Adult: {word}" in render({"runs": runs})
