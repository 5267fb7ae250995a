"""reports/fedcdp/README.md: its numbers are computed, and its verdicts follow them."""

import copy
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import norm

from indpriv._files import read_json
from reports.fedcdp import paper
from reports.fedcdp.accounts import honest, known, shared_coins, shared_coins_by_moments, table_6
from reports.fedcdp.cost import verdict_of_cost
from reports.fedcdp.leakage import (
    BATCHES,
    CDP,
    DATA,
    NO_DP,
    ROWS,
    SDP,
    SHARES,
    gallery_of,
    seen,
    verdicts_of_leakage,
)
from reports.fedcdp.page import (
    NORMS,
    by_share,
    falls,
    interior,
    render,
    verdict_of_accuracy,
    verdict_of_chance,
    verdict_of_decay,
    verdict_of_lemma_2,
    verdict_of_limit,
    verdict_of_median,
    verdict_of_norms,
    verdict_of_pruning,
    verdict_of_shares,
    verdict_of_table_6,
    verdicts_of_sweeps,
)
from reports.fedcdp.proposition import MULTIPLES
from reports.shared.pictures import Gallery
from reports.shared.rates import limit
from reports.shared.recorded import not_verified

REPORTS = Path(__file__).parents[1] / "reports"


@pytest.fixture
def figures():
    return read_json(REPORTS / "fedcdp" / "fedcdp.json")


def test_the_page_is_written_from_its_figures(figures):
    assert (REPORTS / "fedcdp" / "README.md").read_text(encoding="utf-8") == render(figures)


@pytest.mark.parametrize("name", ["MNIST", "cancer"])
def test_the_printed_epsilons_take_one_round_too_many(name):
    setting = paper.SETTINGS[name]
    assert table_6(setting) == pytest.approx(paper.TABLE_6[name], abs=2e-4)
    fewer = paper.Setting(setting.rounds - 1, setting.local_steps, setting.batch)
    without = table_6(fewer)  # composes the number of rounds there are
    for place in (0, 2):
        assert paper.TABLE_6[name][place] - without[place] > 2e-4


def test_honest_figures_of_a_client_and_of_a_row(figures):
    found = honest(paper.SETTINGS["MNIST"])
    assert found == pytest.approx(figures["accounts"]["honest"]["MNIST"])
    assert found["client_one_round"] == pytest.approx(69.46, abs=0.01)
    assert found["client"] == pytest.approx(458.7, abs=0.1)
    assert found["row"] < found["sdp_row"] < found["row_in_every_round"] < found["client"]


@pytest.mark.parametrize("mu", [0.2, 3.0, 26.0])
def test_known_participation_has_the_delta_of_its_gaussian(mu):
    epsilon = known(mu**2)
    low, high = norm.logcdf([-epsilon / mu - mu / 2, -epsilon / mu + mu / 2])
    assert np.exp(high) - np.exp(epsilon + low) == pytest.approx(paper.DELTA, rel=1e-6)


def test_rates_of_one_coin_may_not_be_multiplied(figures):
    coins = figures["accounts"]["shared_coins"]
    assert shared_coins_by_moments() == pytest.approx(coins["moments"])
    for multiplied, shared in coins.values():
        assert shared > 1.5 * multiplied


@pytest.mark.slow
def test_rates_of_one_coin_by_loss_distributions(figures):
    coins = figures["accounts"]["shared_coins"]
    assert shared_coins()["pld"] == pytest.approx(coins["pld"], rel=1e-3)


def test_verdicts_follow_the_figures(figures):
    assert verdict_of_table_6(figures["accounts"]) == "reproduced"
    accounts = copy.deepcopy(figures["accounts"])
    accounts["table_6"]["Adult"][1] -= 3e-4
    assert verdict_of_table_6(accounts) == "not reproduced"
    found = {"lost": {"random": [0.0] * len(MULTIPLES)}}
    assert verdict_of_limit(found) == "refuted"
    found["lost"]["random"][MULTIPLES.index(10.0)] = 0.6
    assert verdict_of_limit(found) == "not refuted"


@pytest.mark.parametrize(
    ("sdp", "cdp", "accuracy", "chance"),
    [
        ([0.1, 0.12, 0.15], [0.1, 0.09, 0.1], "not reproduced", "shown"),
        ([0.1, 0.12, 0.15], [0.1, 0.3, 0.1], "not reproduced", "not shown"),
        ([0.1, 0.7, 0.82], [0.1, 0.7, 0.85], "reproduced", "not shown"),
        (None, [0.1, 0.1, 0.1], "not run", "not run"),
    ],
)
def test_verdicts_of_runs(sdp, cdp, accuracy, chance):
    runs = {"cdp_cnn": {"test_accuracy": cdp}}
    if sdp is not None:
        runs["sdp_cnn"] = {"test_accuracy": sdp}
    assert verdict_of_accuracy(runs) == accuracy
    assert verdict_of_chance(runs) == chance


def test_verdicts_of_cost_and_norms_follow_the_figures():
    seconds = {"no DP": 2.0, "Fed-SDP": 2.1, "Fed-CDP": 6.0, "Fed-CDP(decay)": 6.0}
    assert verdict_of_cost(seconds) == "reproduced"
    assert verdict_of_cost(seconds | {"Fed-CDP": 3.0}) == "differs"
    assert verdict_of_cost({}) == "not run"
    runs = {name: {"norms": [0.3, 0.2]} for name in NORMS}
    assert verdict_of_norms(runs) == "reproduced"
    assert verdict_of_norms(runs | {"mnist_fed_row": {"norms": [0.1, 0.2]}}) == "not reproduced"
    assert verdict_of_norms({}) == "not run"


def ended(**accuracies):
    """Runs by name that end with an accuracy."""
    return {name: {"test_accuracy": [0.1, last]} for name, last in accuracies.items()}


@pytest.mark.parametrize(
    ("constant", "decayed", "word"),
    [
        ((0.30, 0.32, 0.33), (0.34, 0.36, 0.37), "reproduced"),
        ((0.30, 0.32, 0.35), (0.34, 0.36, 0.37), "differs"),
        ((0.30, 0.32, 0.35), (0.29, 0.31, 0.36), "not reproduced"),
        ((0.30, 0.32), (0.34, 0.36), "not run"),
    ],
)
def test_a_norm_that_falls_helps_beyond_chance(constant, decayed, word):
    runs = {}
    for name, each in (
        *(("mnist_fed_row", (0.7, 0.71, 0.72)), ("fed_row_decay", (0.73, 0.74, 0.75))),
        *(("cdp", constant), ("cdp_decay", decayed)),
    ):
        names = (f"{name}{repeat}" for repeat in ("", "_2", "_3"))
        runs |= ended(**dict(zip(names, each, strict=False)))
    assert verdict_of_decay(runs) == word


@pytest.mark.parametrize(
    ("accuracies", "highest", "word"),
    [
        ([0.3, 0.2, 0.5, 0.4, 0.3, 0.2], "reproduced", "differs"),
        ([0.1, 0.5, 0.4, 0.3, 0.2, 0.05], "differs", "differs"),
        ([0.5, 0.4, 0.3, 0.2, 0.1, 0.1], "not reproduced", "reproduced"),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], "not reproduced", "not reproduced"),
        ([0.30, 0.31, 0.31, 0.32, 0.31, 0.30], "not reproduced", "not reproduced"),  # by chance
    ],
)
def test_accuracies_by_norm_and_by_noise(accuracies, highest, word):
    runs = [[each - 0.01, each, each + 0.01] for each in accuracies]
    assert interior(runs) == highest
    assert falls(runs) == word


def test_the_stated_noise_is_judged_by_three_runs_of_every_norm_and_noise():
    names = [""] + [
        f"_{key}_{value:g}"
        for key, stated in (("clip", paper.CLIP), ("noise", paper.NOISE))
        for value in paper.VALUES
        if value != stated
    ]
    runs = ended(**{f"adult_cdp{name}{run}": 0.81 for name in names for run in ("", "_2", "_3")})
    claim = "accuracy on Adult at the stated noise"
    assert verdicts_of_sweeps(runs, "Adult")[claim] == "reproduced"  # 0.824 less 0.02
    low = runs | ended(adult_cdp=0.75)
    assert verdicts_of_sweeps(low, "Adult")[claim] == "not reproduced"
    del runs["adult_cdp_noise_8_3"]
    assert set(verdicts_of_sweeps(runs, "Adult").values()) == {"not run"}


def test_lfw_is_best_at_its_own_clipping_norms():
    runs = [[each] for each in (0.1, 0.2, 0.3, 0.4, 0.5, 0.3)]
    assert interior(runs, (4.0, 6.0)) == "reproduced"
    assert interior(runs) == "differs"


@pytest.mark.parametrize(
    ("sdp", "cdp", "word"),
    [
        ((0.5, 0.6, 0.6, 0.7), (0.6, 0.7, 0.8, 0.9), "reproduced"),
        ((0.1, 0.1, 0.1, 0.1), (0.12, 0.3, 0.4, 0.5), "differs"),
        ((0.5, 0.6, 0.6, 0.7), (0.6, 0.7, 0.8, 0.7), "not reproduced"),
        ((0.5, 0.6, 0.6), (0.6, 0.7, 0.8), "not run"),
    ],
)
def test_systems_are_compared_at_every_share_of_clients(sdp, cdp, word):
    runs = {}
    for name, each in (("no_dp", cdp), ("sdp", sdp), ("cdp", cdp), ("cdp_decay", cdp)):
        names = (f"{name}_cnn{suffix}" for suffix in ("_0.05", "", "_0.2", "_0.5"))
        runs |= ended(**dict(zip(names, each, strict=False)))
    assert verdict_of_shares(by_share(runs)) == word


@pytest.mark.parametrize(("client", "word"), [(1.5, "not reproduced"), (1.0, "reproduced")])
def test_a_client_whose_epsilon_lies_above_that_of_its_row_refutes_the_lemma(client, word, figures):
    accounts = copy.deepcopy(figures["accounts"])
    for each in accounts["honest"].values():
        each["client"] = client * each["row"]
    assert verdict_of_lemma_2(accounts) == word


@pytest.mark.parametrize(
    ("sdp", "cdp", "word"),
    [
        ((0.30, 0.29, 0.28), (0.50, 0.49, 0.48), "reproduced"),
        ((0.15, 0.14, 0.13), (0.50, 0.49, 0.48), "differs"),
        ((0.30, 0.29, 0.20), (0.50, 0.49, 0.48), "not reproduced"),
        ((0.30, 0.29, 0.28), (0.32, 0.31, 0.27), "not reproduced"),
        ((0.30, 0.29), (0.50, 0.49), "not run"),
    ],
)
def test_pruned_updates_keep_accuracy_and_order(sdp, cdp, word):
    names = ("", "_pruned_0.1", "_pruned_0.3")
    runs = {}
    for system, each in (("sdp", sdp), ("cdp", cdp)):
        runs |= ended(**dict(zip((f"{system}{name}" for name in names), each, strict=False)))
    assert verdict_of_pruning(runs) == word


@pytest.mark.parametrize(
    ("accuracies", "word"),
    [
        ((0.92, 0.91), "reproduced"),
        ((0.92, 0.80), "differs"),
        ((0.80, 0.89), "not reproduced"),
        ((0.92,), "not run"),
    ],
)
def test_the_median_does_as_well_as_a_norm_chosen_by_hand(accuracies, word):
    runs = ended(mnist_fed_client=0.926)
    runs |= ended(**dict(zip(("median", "median_rate"), accuracies, strict=False)))
    assert verdict_of_median(runs) == word


def read(kind, system, close, identified=0.0, error=0.5, data=DATA):
    """Rows of the published attack on what a system shows."""
    return [
        {
            "data": each,
            "type": kind,
            "system": system,
            "attack": "as published",
            "close": close,
            "identified": identified,
            "error": error,
        }
        for each in data
    ]


def by_type_2(plain, noisy, errors=(0.4, 0.5)):
    return [
        *read(ROWS, f"{NO_DP}, {SDP}", plain),
        *read(ROWS, f"{CDP}, noise on each row", noisy, error=errors[0]),
        *read(ROWS, f"{CDP}(decay), noise on each row", noisy, error=errors[1]),
    ]


def by_batch(plain, told, noisy, errors=(0.1, 0.2, 0.3)):
    systems = (f"{SDP}, noise of the client", CDP, f"{CDP}(decay)")
    return read(BATCHES, NO_DP, plain, told, data=DATA[:1]) + [
        row
        for system, error in zip(systems, errors, strict=True)
        for row in read(BATCHES, system, noisy, error=error, data=DATA[:1])
    ]


def test_type_2_succeeds_but_for_fed_cdp():
    def word(*shares):
        return verdicts_of_leakage(by_type_2(*shares))["VII, type 2"]

    assert word(1.0, 0.0) == "reproduced"
    assert word(0.5, 0.0) == "differs"
    assert word(1.0, 0.5) == "differs"
    assert set(verdicts_of_leakage([]).values()) == {"not run"}


def test_a_failure_counts_only_where_the_attack_succeeds_without_dp():
    def words(*shares):
        found = verdicts_of_leakage(by_batch(*shares))
        return [found[f"VII, types 0 and 1, {word}"] for word in ("success", "failure")]

    assert words(1.0, 1.0, 0.0) == ["reproduced", "reproduced"]
    assert words(0.3, 1.0, 0.0) == ["differs", "reproduced"]
    assert words(0.3, 0.3, 0.0) == ["not reproduced", "not run"]
    assert words(1.0, 1.0, 0.1) == ["reproduced", "not reproduced"]


@pytest.mark.parametrize(
    ("batches", "rows", "word"),
    [
        ((0.1, 0.2, 0.3), (0.4, 0.5), "reproduced"),
        ((0.1, 0.2, 0.19), (0.4, 0.5), "differs"),
        ((0.1, 0.2, 0.3), (0.4, 0.3), "not reproduced"),
    ],
)
def test_the_order_of_systems_is_that_of_the_paper(batches, rows, word):
    found = verdicts_of_leakage(by_batch(1.0, 1.0, 0.0, batches) + by_type_2(1.0, 0.0, rows))
    assert found["VII, order"] == word


def test_pruning_does_not_stop_type_2():
    def word(*shares):
        rows = [
            row
            for kept, close in zip(SHARES, shares, strict=True)
            for row in read(ROWS, f"{NO_DP}, {1 - kept:.0%} pruned", close)
        ]
        return verdicts_of_leakage(rows)["Figure 5"]

    assert word(1.0, 1.0, 1.0, 0.0, 0.0) == "reproduced"
    assert word(1.0, 1.0, 0.0, 0.0, 0.0) == "differs"
    assert word(0.0, 0.0, 0.0, 0.0, 0.0) == "not reproduced"


def test_batches_and_rows_are_attacked_as_each_system_shows_them():
    found = seen()
    assert found[BATCHES, NO_DP].max_grad_norm is None
    for (kind, system), observation in found.items():
        assert observation.batch_size == (3 if kind == BATCHES else 1)
        if CDP in system and "once" not in system:  # sigma and C of each of ten parameters
            assert observation.noise_std / paper.NOISE == pytest.approx(
                6.0 if "decay" in system else 4.0
            )


def test_a_worst_case_is_never_shown_smaller_than_it_is(figures):
    assert figures["accounts"]["cancer_copies"] > 3.94
    assert "3.95 after three rounds" in render(figures)


def test_a_run_without_dp_holds_no_log_and_nothing_to_verify(tmp_path):
    assert not_verified(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "digits", "shown"),
    [(3.2481, 1, "3.3"), (73.106, 1, "73.2"), (2.5, 1, "2.5"), (6.181, 2, "6.19"), (0.0, 1, "0.0")],
)
def test_what_nothing_exceeds_is_never_shown_smaller(value, digits, shown):
    assert limit(value, digits) == shown


def test_each_picture_of_a_batch_is_told_from_some_of_its_label(monkeypatch):
    """Of LFW among 100 pictures few persons have two: the attack on batches had no candidates."""
    asked = []
    monkeypatch.setattr(
        Gallery, "of", lambda name, pictures, **options: asked.append((name, options))
    )
    for name in DATA:
        for kind in (BATCHES, ROWS):
            gallery_of(name, kind)
    assert [options["candidates"] for _, options in asked] == [100, 100, None, 100]
