from dataclasses import replace

import numpy as np
import pytest

from audits.training import dp_sgd
from audits.training.canaries import train_with_canaries
from audits.training.config import DataConfig
from indpriv import NormLog
from indpriv._facts import text
from indpriv._files import read_json
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.attack_scores import AttackScores
from indpriv.audit import audit
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

from .test_dp_sgd import config, toy


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("canaries") / "run"
    with dp_sgd.quiet_opacus():
        train_with_canaries(
            config(recording={"rounding": 0.01, "record_holdout": True}), folder, 100, dataset=toy()
        )
    return folder


def test_only_included_canaries_are_trained_on(run_dir):
    scores = AttackScores.from_file(run_dir / "canaries.parquet")
    examples = ExampleTable.from_parquet(run_dir / "examples.parquet")
    assert (len(scores.scores), scores.fair_coins) == (100, True)
    assert 20 < scores.member.sum() < 80  # a fair coin fails this with probability 1e-9
    assert examples.train["canary"].sum() == scores.member.sum()
    assert len(examples.train) == 200 + scores.member.sum()
    assert not examples.test["canary"].any()
    own = np.sort(-examples.train.loc[examples.train["canary"], "loss"].to_numpy())
    assert np.allclose(own, np.sort(scores.scores[scores.member]), rtol=1e-5)
    assert measure_attack(scores).method == text("sentence.canaries", "fair_coins")


def test_neither_the_rate_nor_the_divisor_depends_on_the_coins(run_dir):
    recorder = read_json(run_dir / "run.json")["recorder"]
    rate = 1 / -(-300 // config().training.batch_size)
    assert NormLog.open(run_dir).settings.sample_rate == pytest.approx(rate)
    assert recorder["expected_batch_size"] == int(300 * rate)


def test_a_cap_on_rows_would_drop_canaries(tmp_path):
    capped = replace(config(), data=DataConfig("lfw", unit_column="person_id", max_rows_per_unit=3))
    with pytest.raises(InputError, match=r"a cap .* could drop canaries"):
        train_with_canaries(capped, tmp_path / "run", 100, dataset=toy())


def test_the_audit_of_the_run_has_them(run_dir, tmp_path):
    summary = audit(run_dir, tmp_path / "audit", by=["canary"])
    canaries = summary.canaries
    assert canaries.overall["auc_n"] == 100
    assert not summary.attack_by_epsilon.empty
    assert not summary.attacks["above_worst_case"].any()
    assert not summary.attack_by_epsilon["above_worst_case"].any()
    assert canaries.delta == summary.account.delta
    assert canaries.bounds["steinke2023"].epsilon < summary.guarantee.worst_case_epsilon
    assert set(summary.groups[0].rows["name"]) == {"True", "False"}


def test_seeded_coins_repeat_and_labels_are_wrong(tmp_path):
    data = toy(n=60)
    found = []
    for name in ("a", "b"):
        with dp_sgd.quiet_opacus():
            run = train_with_canaries(
                config(batch_size=20, delta=1e-3), tmp_path / name, 30, seed=5, dataset=data
            )
        found.append(AttackScores.from_file(run.run_dir / "canaries.parquet"))
    assert np.array_equal(found[0].member, found[1].member)
    assert np.array_equal(found[0].scores, found[1].scores)
    trained = ExampleTable.from_parquet(tmp_path / "a" / "examples.parquet").train
    counts = trained.groupby("canary")["label"].count()
    assert counts[True] == found[0].member.sum()


@pytest.mark.parametrize(
    ("n", "message"), [(15, "canaries=15"), (300, "not below the number of training examples, 300")]
)
def test_numbers_of_canaries_that_make_no_sense(n, message, tmp_path):
    with pytest.raises(InputError, match=message):
        train_with_canaries(config(), tmp_path / "run", n, dataset=toy())
    assert not (tmp_path / "run").exists()
