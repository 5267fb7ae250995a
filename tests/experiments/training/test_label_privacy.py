"""`label_epsilon`: labels are randomised before training, and the guarantee is of labels alone."""

import math
from dataclasses import replace

import numpy as np
import pytest

from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from audits.training.label_privacy import (
    ceiling,
    randomised,
    randomised_with_prior,
    with_label_privacy,
)
from audits.training.randomness import Randomness
from audits.training.shadows import train_shadows
from indpriv._files import read_json
from indpriv.audit import audit
from indpriv.errors import InputError

DRAWS = 200_000
PRIOR = [0.5, 0.3, 0.15, 0.05]


def config(**data):
    return AuditConfig.from_dict(
        {
            "name": "small",
            "data": {"dataset": "breast_cancer", "label_epsilon": 1.0, **data},
            "model": {"architecture": "mlp", "hidden": [4]},
            "training": {
                "epochs": 1,
                "batch_size": 64,
                "learning_rate": 0.2,
                "max_grad_norm": 1.0,
                "delta": 1e-4,
                "noise_multiplier": 2.0,
            },
            "recording": {"every": 1},
            "checkpoints": {"every": "epoch"},
        }
    )


def shares(draw):
    """(4, 4) how often each label becomes each."""
    return np.array([np.bincount(draw(label), minlength=4) / DRAWS for label in range(4)])


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0])
def test_a_label_is_kept_as_often_as_the_guarantee_allows(epsilon):
    random = np.random.default_rng(0)
    found = shares(lambda label: randomised(np.full(DRAWS, label), 4, epsilon, random))
    kept = math.exp(epsilon) / (math.exp(epsilon) + 3)
    assert ceiling(4, epsilon) == pytest.approx(kept)
    assert np.diag(found) == pytest.approx(kept, abs=0.01)
    assert found[~np.eye(4, dtype=bool)] == pytest.approx((1 - kept) / 3, abs=0.01)


@pytest.mark.parametrize(("epsilon", "classes"), [(0.5, 1), (1.0, 2), (2.0, 3), (4.0, 4)])
def test_with_a_prior_no_output_tells_labels_apart_by_more_than_epsilon(epsilon, classes):
    """The less a label is protected, the more classes it is drawn from."""
    random, prior = np.random.default_rng(1), np.tile(PRIOR, (DRAWS, 1))
    found = shares(
        lambda label: randomised_with_prior(np.full(DRAWS, label), prior, epsilon, random)
    )
    assert np.count_nonzero(found.sum(axis=0)) == classes
    seen = found[:, :classes]
    assert np.log(seen.max(axis=0) / seen.min(axis=0)).max() <= epsilon + 0.05
    inside = np.diag(found)[:classes]
    assert inside == pytest.approx(ceiling(classes, epsilon), abs=0.01)
    assert found[classes:, :classes] == pytest.approx(1 / classes, abs=0.01)


def test_a_prior_is_followed_row_by_row():
    labels, random = np.array([0, 1, 2, 3]), np.random.default_rng(2)
    sure = np.eye(4)[[3, 1, 0, 2]]
    assert randomised_with_prior(labels, sure, 1.0, random).tolist() == [3, 1, 0, 2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    path = tmp_path_factory.mktemp("labels") / "run"
    return train(config(), path, seed=1)


def test_a_run_says_the_guarantee_of_its_labels_beside_its_own(run, tmp_path):
    record = read_json(run.run_dir / "run.json")
    said = record["on_trust"]["labels"]
    assert "epsilon 1 of one row's label alone" in said
    assert "no part of any other epsilon" in said
    assert "a chosen seed draws the same again" in said
    unseeded = with_label_privacy(
        load_dataset("breast_cancer"), config(), Randomness.from_seed(None)
    )
    assert "from the operating system's randomness" in unseeded.on_trust["labels"]
    plain = train(
        replace(config(), data=replace(config().data, label_epsilon=None)), tmp_path, seed=1
    )
    others = read_json(tmp_path / "run.json")
    assert "labels" not in others["on_trust"]
    assert record["guarantee"]["epsilon"] == others["guarantee"]["epsilon"]
    assert record["data"]["fingerprint"] != others["data"]["fingerprint"]
    assert plain.worst_case_epsilon == run.worst_case_epsilon
    audit(run.run_dir, output_dir=tmp_path / "audit")
    assert "label differential privacy with epsilon 1" in (
        tmp_path / "audit" / "audit.md"
    ).read_text(encoding="utf-8")


def test_what_would_draw_other_labels_is_refused(run, tmp_path):
    with pytest.raises(InputError, match="each run draws its labels anew"):
        train_shadows(config(), tmp_path / "shadows", n_models=2)
    tables = config().to_dict()
    tables["training"] = {"max_grad_norm": 1.0, "delta": 1e-4, "noise_multiplier": 2.0}
    tables["federated"] = {
        "rounds": 1,
        "protect": "client",
        "client_rate": 0.5,
        "local_learning_rate": 0.1,
        "clients": 4,
    }
    with pytest.raises(InputError, match="other than dataset do not go with"):
        AuditConfig.from_dict(tables)
    with pytest.raises(InputError, match="label_epsilon"):
        config(label_epsilon=0.0)


def test_labels_that_were_drawn_without_a_seed_are_not_drawn_again(tmp_path):
    plan = replace(config(), checkpoints=replace(config().checkpoints, every=1))

    def crash(stage, done, total):
        if done == 3:
            raise RuntimeError("crash")

    for seed in (None, 2):
        with pytest.raises(RuntimeError, match="crash"):
            train(plan, tmp_path / f"{seed}", seed=seed, progress=crash)
    with pytest.raises(InputError, match="labels drawn anew by label_epsilon"):
        train(plan, tmp_path / "None", resume=True)
    assert train(plan, tmp_path / "2", seed=2, resume=True).steps > 3
