"""reports/tips: written from its figures, and its rule can fail."""

from pathlib import Path

import pytest
import torch

from indpriv._files import read_json
from reports.tips.page import FIRST, PHASES, RUNS, TIPS, VIEWS, render, verdicts
from reports.tips.views import PIXELS, Shifted

FOLDER = Path(__file__).parents[1] / "reports" / "tips"


@pytest.mark.skipif(not (FOLDER / "tips.json").is_file(), reason="not run")
def test_the_page_is_written_from_its_figures():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page == render(read_json(FOLDER / "tips.json"))


@pytest.mark.parametrize("tip", TIPS, ids=lambda tip: tip.title)
@pytest.mark.parametrize(
    ("means", "word"),
    [
        ((0.90, 0.91, 0.93), "reproduced"),
        ((0.90, 0.93, 0.93), "differs"),
        ((0.93, 0.93, 0.90), "not reproduced"),
        ((0.9300, 0.9301, 0.9303), "not reproduced"),  # by no more than chance
    ],
)
def test_a_tip_has_to_help_by_more_than_chance(tip, means, word):
    runs = {
        f"{setting}-{run}": {"test_accuracy": mean + 0.002 * (run - 1), "epsilon": 3.0}
        for setting, mean in zip(tip.settings, means, strict=True)
        for run in range(RUNS)
    }
    assert verdicts({"runs": runs})[tip.claim] == word
    assert f"{tip.claim}: {word}" in render({"runs": runs})
    assert verdicts({"runs": dict(list(runs.items())[:-1])})[tip.claim] == "not run"


def test_a_first_phase_is_part_of_its_run_and_no_run_of_its_own():
    name = f"batch_{next(iter(PHASES))}-0"
    one = {"test_accuracy": 0.85, "epsilon": 2.5, "not_verified": ["noise"], "seconds": 30.0}
    page = render(
        {"runs": {f"{name}{FIRST}": one, name: one | {"epsilon": 2.9, "not_verified": []}}}
    )
    assert "not verified in some run are noise" in page
    assert "epsilon 2.90" in page
    assert "took 1.0 CPU minutes" in page
    assert "0.8500 (0.8500 to 0.8500) | 1" in page


@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_views_are_the_picture_and_shifts_of_it_by_at_most_two_pixels(views):
    picture = torch.full((1, 1, 9, 9), -1.0)
    picture[0, 0, 4, 4] = 1.0
    items = Shifted(picture.expand(200, -1, -1, -1).contiguous(), torch.arange(200), *views)
    seen, labels = items.__getitems__(list(range(200)))
    assert seen.shape == (200, sum(views), 1, 9, 9)
    assert labels.tolist() == list(range(200))
    plain, shifted = seen[:, : views[0]], seen[:, views[0] :]
    assert (plain == picture).all()
    assert (seen.eq(1).sum((2, 3, 4)) == 1).all()
    assert (seen.eq(-1).sum((2, 3, 4)) == 80).all()
    places = (shifted == 1).nonzero()[:, -2:] - 4
    assert len(places) == 200 * views[1]
    if len(places):  # all shifts in 200 draws are by one at most once in 10^88
        assert places.abs().max() == PIXELS
