"""A whole audit above the limit, which a test lowers, beside the audit of every example."""

import json

import numpy as np
import pytest

from indpriv.analysis.statistics import histogram
from indpriv.audit import audit
from indpriv.audit.run_directory import RecordedRun
from indpriv.example_table import ExampleTable
from synthetic import small_run, write_run

MOST = 150


@pytest.fixture(scope="module")
def audits(tmp_path_factory):
    """audit.json and report.html of the same run: exact, and from histograms and samples."""
    folder = tmp_path_factory.mktemp("many")
    log, examples = small_run(n=400)
    write_run(folder / "run", log, examples)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for limit, name in ((histogram.MOST_EXACT, "exact"), (MOST, "binned")):
            patch.setattr(histogram, "MOST_EXACT", limit)
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
    assert said["most_exact"] == said["attacked_members"] == MOST
    assert said["quantile_error"] == 2**-10
    assert f"This audit has more than {MOST} examples." in page
    assert f"Attacks used {MOST} random training examples" in page
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
    for name in ("pearson", "spearman"):
        key = "pearson_log_loss" if name == "pearson" else name
        error = binned["exactness"][f"{name}_error"]
        assert abs(binned["loss"][key] - exact["loss"][key]) <= error


def test_attacks_use_a_sample_of_the_members(audits):
    (exact, _), (binned, _) = audits
    for mine, other in zip(exact["attacks"], binned["attacks"], strict=True):
        assert (mine["overall"]["n_members"], other["overall"]["n_members"]) == (400, MOST)
        assert other["overall"]["n_nonmembers"] == mine["overall"]["n_nonmembers"]
        low, high = mine["overall"]["discrimination"]["auc_interval"].values()
        assert low < other["overall"]["discrimination"]["auc"] < high


def test_the_sample_is_that_of_its_seed(monkeypatch):
    monkeypatch.setattr(histogram, "MOST_EXACT", MOST)
    run = RecordedRun(examples=small_run(n=400)[1])
    drawn = [run.for_attacks(seed).examples.train["example_id"].to_numpy() for seed in (0, 0, 1)]
    assert np.array_equal(drawn[0], drawn[1])
    assert not np.array_equal(drawn[0], drawn[2])
    assert all(len(np.unique(ids)) == MOST for ids in drawn)


def test_units_of_several_rows_are_attacked_whole(monkeypatch):
    monkeypatch.setattr(histogram, "MOST_EXACT", MOST)
    examples = small_run(n=400)[1]
    people = examples.frame.assign(unit_id=examples.frame["example_id"] // 2)
    run = RecordedRun(examples=ExampleTable(people))
    assert run.for_attacks(0) is run
