import pytest

from indpriv.analysis.disclosures import disclosures
from indpriv.analysis.recorded_run import Declared, RecordedRun
from indpriv.attacks import Material
from indpriv.norm_log.evidence import CHECKS
from summaries import audit_of
from synthetic import epsilon_table, small_run

DECLARED = "every checkpoint may be published under the worst-case epsilon"
RECORDER = {"loss_reduction": "mean", "expected_batch_size": 24}
PASSED = CHECKS["sampler"].fact("passed", "fine")


@pytest.fixture(scope="module")
def run():
    return small_run(n=60, steps=4)


def rows(run, *, delta=1e-5, checks=(PASSED,), **recorder):
    log, examples = run
    declared = Declared({"released": DECLARED})
    evidence = RecordedRun(
        Material(examples), declared=declared, recorder={**RECORDER, **recorder}, checks=checks
    )
    summary = audit_of(
        log, epsilon_table([1.0] * 60, delta=delta), evidence, name="x", by=["label"]
    )
    found = disclosures(summary)
    assert summary.disclosures[0] == found[0]
    return {row.title: row for row in found}


def test_a_supported_run_keeps_what_was_declared(run):
    found = rows(run)
    assert found["What is released"].detail == DECLARED
    assert (
        "only the worst case and the other settings may be published"
        in found["Private in this document"].detail
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seeded": True}, "the run was seeded (reproducible: no privacy)"),
        (
            {"checks": (CHECKS["batch_sizes"].fact("failed", "odd"),)},
            "a check of its assumptions failed",
        ),
        ({"delta": 0.02}, "delta is at least 1/n"),
    ],
)
def test_without_a_guarantee_nothing_is_released_under_it(run, changes, why):
    found = rows(run, **changes)
    assert found["What is released"].status == "failed"
    for item in ("What is released", "Private in this document"):
        assert f"nothing may be published under a guarantee: {why}" in found[item].detail
        assert "may be published under the worst-case" not in found[item].detail
        assert "settings may be published" not in found[item].detail


def test_what_nobody_stated_is_called_assumed(run):
    found = rows(run)
    for title in ("Unit of privacy", "Neighbouring relation", "Trust model"):
        assert found[title].status == "assumed"
    assert found["What is released"].status == "declared"
    stated = rows(run, converted=True)  # by whoever wrote the log
    for title in ("Unit of privacy", "Neighbouring relation"):
        assert stated[title].status == "declared"


@pytest.mark.parametrize(
    ("neighbouring", "status", "words"),
    [
        ("add_remove", "assumed", "add/remove one example"),
        ("zero_out", "assumed", "it counts as 0, and the number of examples and the batches stay"),
        ("replace_one", "declared", "replace one example"),
    ],
)
def test_a_relation_is_declared_only_where_somebody_chose_it(run, neighbouring, status, words):
    log, examples = run
    table = epsilon_table([1.0] * 60, neighbouring=neighbouring)
    summary = audit_of(log, table, RecordedRun(Material(examples)), name="x", by=["label"])
    row = next(row for row in summary.disclosures if row.key == "neighbouring")
    assert (row.status, row.detail.endswith(words)) == (status, True)
    declared = Declared({"account": {"neighbouring": neighbouring}} if neighbouring else {})
    summary = audit_of(log, table, RecordedRun(Material(examples), declared=declared), name="x")
    row = next(row for row in summary.disclosures if row.key == "neighbouring")
    assert row.status == "declared"


def test_ranks_are_named_and_their_batches_counted_together(run):
    found = rows(run, ranks=2)
    assert found["Steps"].detail.endswith("each taken by 2 ranks together")
    assert found["Normalisation of the gradient"].detail.endswith(
        "over the expected batch size, 48"
    )
    assert rows(run)["Normalisation of the gradient"].detail.endswith(
        "over the expected batch size, 24"
    )


@pytest.mark.parametrize(
    ("recorder", "value"),
    [({"sampler_class": "x"}, "poisson; observed: x"), ({}, "poisson; not observed")],
)
def test_the_sampler_is_named_where_it_was_seen(run, recorder, value):
    assert rows(run, **recorder)["Sampler"].detail == value


def test_whatever_gives_n_away_is_private(run):
    found = rows(run)
    private = {item for item, row in found.items() if row.private}
    assert private == {
        "Delta and n",
        "Number of examples",
        "Normalisation of the gradient",
        "Fingerprint of the data",
    }
    open_texts = " ".join(row.detail for row in found.values() if not row.private)
    for told in ("60", "24", "times n"):
        assert told not in open_texts.replace("0.1", ""), open_texts
