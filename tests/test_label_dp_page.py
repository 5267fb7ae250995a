"""reports/label_dp: written from its figures, and its rules can fail."""

from pathlib import Path

import numpy as np
import pytest

from audits.training.label_privacy import randomised
from indpriv._files import read_json
from reports.label_dp.page import (
    CLASSES,
    EPSILONS,
    NONE,
    PRIOR,
    contradicted,
    guess,
    render,
    share_guessed,
    verdict,
)

FOLDER = Path(__file__).parents[1] / "reports" / "label_dp"


@pytest.mark.skipif(not (FOLDER / "label_dp.json").is_file(), reason="not run")
def test_the_page_is_written_from_its_figures():
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert page == render(read_json(FOLDER / "label_dp.json"))


@pytest.mark.parametrize(
    ("accuracies", "word"),
    [
        ((0.84, 0.85, 0.855), "reproduced"),
        ((0.82, 0.85, 0.855), "differs"),
        ((0.80, 0.81, 0.82), "not reproduced"),
        ((0.84, 0.85), "not run"),
    ],
)
def test_close_is_judged_at_each_epsilon(accuracies, word):
    names = [f"{PRIOR} {epsilon:g}" for epsilon in EPSILONS]
    found = dict(zip(names, accuracies, strict=False))
    known = {f"{NONE} 0": 0.855} | found
    assert verdict({"accuracy": {name: [value] * 3 for name, value in known.items()}}) == word


@pytest.mark.parametrize(("hits", "beyond"), [(580, []), (640, [1.0])])
def test_guesses_above_the_ceiling_contradict_the_guarantee(hits, beyond):
    """The ceiling of epsilon 1 is 73.1 %: 1,740 of 2,400 are 72.5 %, 1,920 are 80 %."""
    assert contradicted({"guessed": {"1": {"hits": [hits] * 3, "guesses": 800}}}) == beyond


@pytest.mark.parametrize("epsilon", EPSILONS)
def test_models_that_remember_every_label_reach_the_ceiling_and_do_not_pass_it(epsilon):
    """Null calibration: what is remembered is the randomised label, on top of what each row says."""
    random, n = np.random.default_rng(3), 4000
    secrets = random.integers(0, CLASSES, (3, n))
    drawn = [randomised(each, CLASSES, epsilon, random) for each in secrets]
    of_rows = random.normal(size=(1, n, CLASSES))
    found = guess(of_rows + 3 * np.eye(CLASSES)[drawn], of_rows)
    hits = [int(np.sum(g == s)) for g, s in zip(found, secrets, strict=True)]
    known = {"guessed": {f"{epsilon:g}": {"hits": hits, "guesses": n}}}
    assert contradicted(known) == []
    share, low, high = share_guessed(known["guessed"][f"{epsilon:g}"], 3)
    assert low < np.mean([np.mean(d == s) for d, s in zip(drawn, secrets, strict=True)]) < high
    assert share > 0.55


def test_models_that_remember_nothing_are_guessed_from_by_chance():
    random = np.random.default_rng(4)
    found = guess(*random.normal(size=(2, 3, 4000, CLASSES)))
    hits = [int(np.sum(each == random.integers(0, CLASSES, 4000))) for each in found]
    assert share_guessed({"hits": hits, "guesses": 4000})[0] == pytest.approx(0.5, abs=0.025)
