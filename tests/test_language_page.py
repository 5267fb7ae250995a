"""reports/language/README.md: it is written from its figures, and each rule can fail."""

import copy
from pathlib import Path

import pytest

from indpriv._files import read_json
from reports.language.page import APART, BELOW, CHOSEN, EXTRACTED, HIDDEN, RULES, render, verdicts

FOLDER = Path(__file__).parents[1] / "reports" / "language"


@pytest.fixture
def known():
    return read_json(FOLDER / "language.json")


def words(figures):
    return {name: word for name, (word, _) in verdicts(figures).items()}


def test_the_page_is_written_from_its_figures(known):
    assert (FOLDER / "README.md").read_text(encoding="utf-8") == render(known)
    assert list(verdicts(known)) == list(RULES)


def test_membership_succeeds_where_extraction_fails(known):
    assert words(known)[EXTRACTED] == "shown"
    chance, out = copy.deepcopy(known), copy.deepcopy(known)
    for model in chance["models"]:
        model["attacks"][CHOSEN]["low"] = 0.49
    assert words(chance)[EXTRACTED] == "not shown"
    for model in out["models"]:
        model["extraction"]["members"]["discoverable"]["100"] = 1
    assert words(out)[EXTRACTED] == "not shown"


@pytest.mark.parametrize(("out", "word"), [(0, "not shown"), (5, "shown")])
def test_longer_training_brings_secrets_out(out, word, known):
    for model in known["models"]:
        model["extraction"]["members"]["discoverable"]["100"] = out
        model["extraction"]["others"]["discoverable"]["100"] = 0
    assert words(known)[APART] == word


def test_a_secret_that_comes_out_with_dp_refutes(known):
    assert words(known)[HIDDEN] == "shown"
    known["models"][-1]["extraction"]["members"]["discoverable"]["100"] = 1
    assert words(known)[HIDDEN] == "refuted"


@pytest.mark.parametrize("what", ["bound", "chance"])
def test_a_figure_above_its_epsilon_refutes(what, known):
    assert words(known)[BELOW] == "shown"
    model = known["models"][-1]
    if what == "bound":
        model["attacks"][CHOSEN]["epsilon_fdp"] = model["epsilon"] + 0.1
    else:
        model["extraction"]["members"]["chance"]["1"] = model["ceilings"]["1"] + 0.01
    assert words(known)[BELOW] == "refuted"
