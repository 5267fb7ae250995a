"""A whole audit above the limit, which a test lowers, beside the audit of every example."""

import json

import numpy as np
import pandas as pd
import pytest

from indpriv.analysis import recorded_run, statistics
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.attacks import Material
from indpriv.audit import audit
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES_NON_DP
from synthetic import small_run, write_run

MOST = 150


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """audit.json and report.html of the same run: exact, and from histograms and samples."""
    folder = tmp_path_factory.mktemp("many")
    log, examples = small_run(n=400)
    write_run(folder / "run", log, examples)
    write_run(folder / "run/holdout", log.take(range(len(examples.test))), None)
    losses = examples.frame["loss"] * np.where(examples.frame["split"] == "train", 0.8, 1.0)
    ExampleTable(examples.frame.assign(loss=losses)).to_parquet(folder / "run" / EXAMPLES_NON_DP)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for limit, name in ((statistics.MOST_EXACT, "exact"), (MOST, "binned")):
            patch.setattr(statistics, "MOST_EXACT", limit)
            patch.setattr(recorded_run, "MOST_ATTACKED", MOST)
            audit(folder / "run", folder / name, delta=1e-5)
            files = [
                (folder / name / file).read_text("utf-8") for file in ("audit.json", "report.html")
            ]
            found.append((json.loads(files[0]), files[1]))
    return found


def test_the_report_says_what_is_not_of_every_example(audits):
    (exact, plain), (binned, page) = audits
    assert exact["exactness"] is None
    assert "random training examples" not in plain
    said = binned["exactness"]
    assert said["most_exact"] == said["attacked_members"] == said["attacked_nonmembers"] == MOST
    assert said["quantile_error"] == 2**-10
    assert f"This audit has more than {MOST} examples." in page
    page = " ".join(page.split())
    assert f"Attacks used {MOST} random training examples and {MOST} random test examples;" in page
    assert f"All this is of {MOST} random examples of 400." in page
    assert "random examples of" not in plain
    assert said["compared"] is None  # all 400, as fewer than 20,000


def test_what_is_said_to_be_exact_is(audits):
    (exact, _), (binned, _) = audits
    for key in ("guarantee", "individual", "run", "checks", "drivers", "claim"):
        assert binned[key] == exact[key], key
    for mine, other in zip(exact["groups"], binned["groups"], strict=True):
        for one, two in zip(mine["rows"], other["rows"], strict=True):
            for name in ("name", "n", "n_test", "max", "share_at_worst_case", "train_accuracy"):
                assert two[name] == one[name]
            assert two["mean"] == pytest.approx(one["mean"], rel=1e-12)
            assert two["mean_loss"] == pytest.approx(one["mean_loss"], rel=1e-12)
            for name in ("median", "p95", "p99"):
                assert two[name] == pytest.approx(
                    one[name], rel=binned["exactness"]["quantile_error"]
                )
    assert (
        binned["exactness"]["related"] == binned["loss"]["n"] + binned["loss"]["left_out"] == MOST
    )
    assert exact["loss"]["n"] == 400


def test_attacks_use_samples_of_both_splits(audits):
    (exact, _), (binned, _) = audits
    error = 1.96 * 0.5 / MOST**0.5  # in 95 of 100 samples
    key = ["model", "attack", "rate"]
    whole, some = (
        pd.DataFrame(of["rates"]).query("by == '' and attack == 'loss_threshold'").set_index(key)
        for of in (exact, binned)
    )
    assert set(whole.index.get_level_values("model")) == {"dp", "non_dp"}
    assert set(whole.index) == set(some.index)
    for of, n in ((whole, (400, 200)), (some, (MOST, MOST))):
        sides = of[["n_members", "n_others"]].drop_duplicates()
        assert sides.to_numpy().tolist() == [[*n]]
    off = (some["value"] - whole["value"]).abs().unstack()
    assert (off["advantage"] <= 2 * error).all()
    assert (off["auc"] <= error).all()


def test_the_hold_out_is_of_the_test_examples_that_are_attacked(audits):
    for (document, _), n_members, n_others in zip(audits, (400, MOST), (200, MOST), strict=True):
        # half of the non-members choose the thresholds
        bins = pd.DataFrame(document["attack_by_epsilon"]).groupby("target_fpr")
        for _, part in bins:
            assert part[["n_members", "n_others"]].sum().tolist() == [n_members, n_others // 2]


def test_the_sample_is_that_of_its_seed(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", MOST)
    monkeypatch.setattr(recorded_run, "MOST_ATTACKED", MOST)
    run = RecordedRun(Material(small_run(n=400)[1]))
    for split in ("train", "test"):
        drawn = [
            getattr(run.for_attacks(seed).examples, split)["example_id"].to_numpy()
            for seed in (0, 0, 1)
        ]
        assert np.array_equal(drawn[0], drawn[1])
        assert not np.array_equal(drawn[0], drawn[2])
        assert all(len(np.unique(ids)) == MOST for ids in drawn)


def test_few_test_examples_are_attacked_whole(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", MOST)
    monkeypatch.setattr(recorded_run, "MOST_ATTACKED", 200)
    run = RecordedRun(Material(small_run(n=400)[1]))
    members, others = run.attacked(0)
    assert (len(members), others) == (200, None)
    assert len(run.for_attacks(0).examples.test) == 200


def test_units_of_several_rows_are_attacked_whole(monkeypatch):
    monkeypatch.setattr(statistics, "MOST_EXACT", MOST)
    examples = small_run(n=400)[1]
    people = examples.frame.assign(unit_id=examples.frame["example_id"] // 2)
    run = RecordedRun(Material(ExampleTable(people)))
    assert run.for_attacks(0) is run
