"""reports/validation/README.md: it is written from its figures, and they find what is planted."""

import copy
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from indpriv._files import read_json
from reports.validation.figures import rates
from reports.validation.page import render

REPORTS = Path(__file__).parents[1] / "reports"


@pytest.fixture
def known():
    return read_json(REPORTS / "validation" / "validation.json")


def test_the_page_is_written_from_its_figures(known):
    assert (REPORTS / "validation" / "README.md").read_text(encoding="utf-8") == render(known)


def test_the_account_stands_in_every_study(known):
    """What the design asked for: within 5 % of the account's mu in every bin that has power."""
    for study in known["studies"].values():
        with_power = [part for part in study["bins"] if part["has_power"]]
        assert study["agree"]
        assert with_power
        assert all(part["within"] for part in with_power)


def test_a_contradiction_is_called_so(known):
    changed = copy.deepcopy(known)
    changed["studies"]["adult"]["agree"] = False
    assert render(known).count("CONTRADICT") == 0
    assert render(changed).count("CONTRADICT") == 1


def test_rates_are_not_those_within_a_run():
    """The noise that a run's scores share ranks them within it; a threshold for all runs does not."""
    rng, n_runs, n = np.random.default_rng(0), 200, 50
    run, member = np.repeat(np.arange(n_runs), n), rng.random(n_runs * n) < 0.5
    scores = member + rng.normal(size=n_runs)[run]
    none = np.zeros(len(run))
    predicted = pd.DataFrame(
        {"with_example": none, "without_example": none, "separation": none, 2.0: none}
    )
    evidence = predicted.assign(evidence=scores, member=member, run=run)
    found = rates(evidence, scores)
    low, high = found["auc_interval"]["low"], found["auc_interval"]["high"]
    assert low < stats.norm.cdf(np.sqrt(0.5)) < high < 0.9
    assert found["tpr_at_fpr"]["0.01"] < 0.3
