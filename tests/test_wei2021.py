"""reports/wei2021/README.md: it is written from its figures, and its verdicts follow them."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from audits.rules import composed_epsilons
from indpriv._files import read_json
from indpriv.leakage import Observation
from indpriv.leakage.inversion import Reader, one_by_one
from reports.shared.pictures import Gallery, network
from reports.wei2021 import paper
from reports.wei2021.accounts import noise_of
from reports.wei2021.cost import verdict_of_cost
from reports.wei2021.leakage import (
    ORDER,
    Widened,
    verdicts_of_leakage,
    what_clipping_fools,
    widths_of,
)
from reports.wei2021.page import (
    curve_of,
    render,
    verdict_at_accuracy,
    verdict_of_accuracy,
    verdict_of_moving,
    verdict_of_table_5,
    verdict_of_table_8,
)

REPORTS = Path(__file__).parents[1] / "reports"
RUN = {
    "max_grad_norm": 4.0,
    "step": [0, 50, 100],
    "test_accuracy": [0.1, 0.5, 0.9],
    "worst_case_epsilon": [0.0, 0.4, 0.6],
    "worst_case": 0.6,
    "median_epsilon": 0.3,
    "at_worst_case": 0.1,
}


@pytest.fixture
def known():
    return read_json(REPORTS / "wei2021" / "wei2021.json")


def runs_of(method, final, reached=0.6, norm=4):
    run = {**RUN, "worst_case_epsilon": [0.0, 0.4, reached]}
    return {
        f"{method}-{norm}-{number}": run
        | {"test_accuracy": [0.1, 0.5, final + 0.001 * (number - 1)]}
        for number in range(3)
    }


def test_the_page_is_written_from_its_figures(known):
    assert (REPORTS / "wei2021" / "README.md").read_text(encoding="utf-8") == render(known)


def test_verdicts_of_accounts_follow_the_figures(known):
    accounts = copy.deepcopy(known["accounts"])
    assert verdict_of_table_5(accounts) == "reproduced"
    assert verdict_of_table_8(accounts).startswith("reproduced")
    accounts["table_5"]["10000"][0] *= 1.002
    accounts["table_8"]["linear"][0] += 6
    assert verdict_of_table_5(accounts) == "not reproduced"
    assert verdict_of_table_8(accounts) == "not reproduced"


@pytest.mark.parametrize(
    ("decay", "accuracy", "at_accuracy"),
    [
        (None, "not run", "not run"),
        ((0.95, 0.5), "reproduced", "reproduced"),
        ((0.9005, 0.5), "not reproduced", "reproduced"),  # better, but no more than by chance
        ((0.85,), "not reproduced", "not reproduced"),
        ((0.95, 0.7), "reproduced", "not reproduced"),
    ],
)
def test_verdicts_of_runs(decay, accuracy, at_accuracy):
    runs = runs_of("baseline", 0.9) | (runs_of("cdecay", *decay) if decay else {})
    assert verdict_of_accuracy(runs) == accuracy
    assert verdict_at_accuracy(runs) == at_accuracy
    fixed = runs_of("baseline", 0.9) | (runs_of("cdecay_std", *decay) if decay else {})
    assert verdict_at_accuracy(fixed, "cdecay_std") == at_accuracy


def test_a_method_has_to_help_at_every_clipping_norm_of_the_claim():
    runs = runs_of("baseline", 0.9) | runs_of("baseline", 0.9, norm=32)
    runs |= runs_of("quantile", 0.95) | runs_of("quantile", 0.85, norm=32)
    assert verdict_of_accuracy(runs, "quantile") == "differs"
    assert verdict_of_accuracy(runs, "quantile", only=4.0) == "reproduced"
    assert verdict_of_accuracy(runs, "quantile", only=32.0) == "not reproduced"
    assert verdict_of_accuracy(runs, "adaclip") == "not run"


def test_one_run_of_three_that_reaches_the_accuracy_does_not_decide():
    runs = runs_of("baseline", 0.9) | runs_of("cdecay", 0.8, 0.5)
    runs["cdecay-4-0"]["test_accuracy"][-1] = 0.95
    assert verdict_at_accuracy(runs) == "not reproduced"
    runs["cdecay-4-1"]["test_accuracy"][-1] = 0.95
    assert verdict_at_accuracy(runs) == "reproduced"


def test_a_system_that_the_paper_does_not_have_there_is_beside_none_of_its_figures(known):
    """Table IX's last rows are of dyn[S,sigma], not of dynsigma."""
    rows = [line for line in render(known).splitlines() if line.startswith("| dyn")]
    cells = {
        row.split(" | ")[0].strip("| "): row.split(" | ")[2] for row in rows if "epsilon" not in row
    }
    assert cells["dyn[S,sigma], linear, not private"] == "0.459"
    assert {cells[f"dynsigma, {law}"] for law in ("linear", "exponential")} == {"–"}


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "reproduced"),
        ({"quantile": 1.01}, "differs"),
        ({"none": 2.0, "moving": 1.2, "adaclip": 1.2}, "not reproduced"),
    ],
)
def test_the_verdict_of_cost_follows_its_three_claims(changes, verdict):
    seconds = {"none": 0.1, "baseline": 1.0, "moving": 1.0, "quantile": 1.5, "adaclip": 1.5}
    assert verdict_of_cost(seconds | changes) == verdict
    assert verdict_of_cost({}) == "not run"


def test_a_run_without_privacy_has_no_epsilon_at_an_accuracy():
    assert curve_of(RUN).epsilon_at(0.7) == pytest.approx(0.5)
    assert curve_of({**RUN, "worst_case_epsilon": [None] * 3}).epsilon_at(0.7) is None


def test_the_laws_of_noise_are_those_of_the_published_code():
    linear, exponential = noise_of("linear"), noise_of("exponential")
    assert (round(linear[0], 1), round(linear[-1], 1)) == (15.8, 3.7)
    assert (round(exponential[0], 1), round(exponential[-1], 1)) == (15.8, 3.0)
    assert np.ptp(np.diff(1 / linear)) < 1e-12
    assert np.ptp(np.diff(np.log(1 / exponential))) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("law", paper.STEP_EPSILON)
def test_iterations_of_the_printed_table(law):
    """Within 4 of what is printed: less is spent 4 before, and more 5 after."""
    fields = ("basic", "advanced_as_printed", *paper.FIELDS[2:])
    noise = noise_of(law)
    for field, budget, printed in zip(
        fields, paper.TABLE_5[10_000], paper.TABLE_8[law], strict=True
    ):
        before, after = (
            getattr(composed_epsilons(noise[:n], 0.01, total_steps=n, delta=1e-5), field)
            for n in (printed - 4, printed + 5)
        )
        assert before <= budget < after, field


@pytest.mark.parametrize(("layers", "epsilon"), [(1, 0.823), (3, 1.47), (5, 1.94)])
def test_clipping_each_layer_divides_the_noise_multiplier_by_their_root(layers, epsilon):
    noise = paper.NOISE / np.sqrt(layers)
    found = composed_epsilons(noise, 0.01, total_steps=10_000, delta=paper.DELTA)
    assert found.moments == pytest.approx(epsilon, abs=5e-3)


def leaked(errors=None, **shares):
    """One row for each data set and protection, with the shares that are back on MNIST and LFW."""
    return [
        {"data": data, "protection": protection, "close": share}
        | {"error": (errors or {}).get(protection, 0.5)}
        for protection, both in shares.items()
        for data, share in zip(("mnist", "lfw_people"), both, strict=True)
    ]


@pytest.mark.parametrize(
    ("none", "baseline", "words"),
    [
        ((1.0, 5 / 6), (1 / 6, 1 / 6), ("reproduced", "reproduced")),
        ((1.0, 4 / 6), (1 / 6, 0.0), ("differs", "differs")),
        ((4 / 6, 4 / 6), (0.0, 0.0), ("not reproduced", "not reproduced")),
    ],
)
def test_the_verdicts_of_leakage_follow_their_rows(none, baseline, words):
    found = verdicts_of_leakage(leaked(none=none, baseline=baseline))
    assert tuple(found.values()) == (*words, "not run")
    assert set(verdicts_of_leakage([]).values()) == {"not run"}


@pytest.mark.parametrize(
    ("quantile", "errors", "word"),
    [
        ((0.5, 0.5), {}, "reproduced"),
        ((0.5, 0.2), {}, "not reproduced"),  # no fewer than of the baseline
        ((0.5, 0.9), {}, "not reproduced"),
        ((0.2, 0.2), dict(zip(ORDER, (0.0, 0.1, 0.2, 0.3, 0.4), strict=True)), "differs"),
        ((0.2, 0.2), dict(zip(ORDER, (0.0, 0.1, 0.2, 0.3, None), strict=True)), "differs"),
        ((0.2, 0.2), dict(zip(ORDER, (0.0, 0.1, 0.3, 0.3, 0.4), strict=True)), "not reproduced"),
    ],
)
def test_the_order_of_leaking_systems_is_that_of_the_paper(quantile, errors, word):
    shares = {"none": (1.0, 1.0), "adaclip": (0.7, 0.7), "quantile": quantile}
    shares |= {"baseline": (0.2, 0.2), "dyn[S,sigma]": (0.0, 0.0)}
    rows = leaked(errors, **shares)
    assert verdicts_of_leakage(rows)["III, order"] == word
    more = {"data": "cifar10", "protection": "none", "close": 1.0, "error": 0.0}
    assert verdicts_of_leakage([*rows, more])["III, order"] == "not run"


def test_what_adaptive_systems_divide_by_is_of_the_gradients_of_the_batch():
    """AdaClip's gradients then have a mean squared norm near 1; nothing of the network changes."""
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(24, 1, 8, 8, generator=generator), torch.arange(24) % 10
    gallery = Gallery("random", network(8), inputs[:4], targets[:4], (inputs[4:], targets[4:]))
    found = widths_of(gallery)
    wide = Widened(gallery.model, found["adaclip"])
    assert torch.allclose(wide(inputs), gallery.model(inputs), atol=1e-4)
    reader = Reader(wide, nn.CrossEntropyLoss(reduction="none"), Observation())
    rows = [reader.gradients(reader.read(*row)) for row in one_by_one(inputs, targets)]
    for name, held in rows[0].items():
        moved = torch.stack([row[name] for row in rows])
        assert (moved - moved.mean(0)).flatten(1).square().sum(1).mean() == pytest.approx(
            1, rel=0.1
        )
        quantile = found["quantile"][name.removeprefix("network.")]
        largest = found["dyn[S,sigma]"][name.removeprefix("network.")]
        assert 0 < quantile <= largest <= paper.CLIP or largest == paper.CLIP
        assert held.isfinite().all()


def test_what_clipping_fools_names_both_attacks(known):
    rows = copy.deepcopy(known["leakage"])
    for row in rows:
        row["close"] = {"as published": 1 / 6, "lbfgs": 5 / 6}.get(row["attack"], 1.0)
    text = " ".join(" ".join(what_clipping_fools(rows)).split())
    assert "attack finds 4 of 24 pictures, and 20 of 24 when" in text


def test_a_worst_case_is_never_shown_smaller_than_it_is(known):
    """0.65915 by RDP is 0.66, as the tool has it."""
    text = " ".join(render(known).split())
    assert "with flat clipping: 0.66 by RDP and 0.61 by loss distributions" in text
    assert "with 5 layers (1.65 by RDP)" in text


def test_what_is_not_attacked_is_named_with_its_command(known):
    rows = [row for row in known["leakage"] if row["protection"] != "adaclip"]
    text = " ".join(render({**known, "leakage": rows}).split())
    assert "Table III: " in text
    assert "AdaClip, sigma = 6 of lfw_people" in text


def test_laws_of_moving_parameters_that_differ_are_said_to(known):
    runs = runs_of("baseline", 0.9) | runs_of("moving_linear", 0.95)
    assert verdict_of_moving(runs | runs_of("moving_exponential", 0.95)) == "reproduced"
    assert verdict_of_moving(runs | runs_of("moving_exponential", 0.85)) == "differs"
    lower = runs_of("moving_linear", 0.85) | runs_of("moving_exponential", 0.85)
    assert verdict_of_moving(runs | lower) == "not reproduced"
