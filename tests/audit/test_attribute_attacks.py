"""A small run on Adult that names attributes, its audit, and `indpriv attack` on it."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from audits.training.config import AuditConfig
from audits.training.datasets import load_dataset
from audits.training.dp_sgd import train
from indpriv._plain import records
from indpriv.analysis.attacks.attributes import BY_EPSILON
from indpriv.audit import audit
from indpriv.cli import run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("attributes")
    tables = AuditConfig.from_toml("audits/adult.toml").to_dict()
    tables["model"]["hidden"] = [8]
    tables["training"] |= {"epochs": 2, "batch_size": 200}
    tables["recording"]["record_holdout"] = True
    tables["attacks"] = {"attributes": ["sex", "race"]}
    adult = load_dataset("adult")
    small = replace(
        adult,
        train=adult.train.take(np.arange(len(adult.train)) < 800),
        test=adult.test.take(np.arange(len(adult.test)) < 400),
    )
    train(AuditConfig.from_dict(tables), folder / "run", seed=1, dataset=small)
    return folder, audit(folder / "run", folder / "audit", by=["sex", "label"])


def test_an_audit_measures_the_attributes_that_its_file_names(a_run):
    folder, summary = a_run
    every = summary.attribute_attacks
    found = list(records(every[every["by"] == ""]))
    assert [(each.model, each.attribute) for each in found[::2]] == [
        ("dp", "sex"), ("dp", "race"), ("non_dp", "sex"), ("non_dp", "race"),
    ]  # fmt: skip
    race = found[2]
    assert (race.n_members, race.n_others) == (800, 200)
    same = (every["attribute"], every["guesser"], every["model"])
    of_race = every[(same[0] == "race") & (same[1] == race.guesser) & (same[2] == "dp")]
    assert set(of_race["by"]) == {"", "sex", "label", BY_EPSILON}
    assert set(every["by"][every["attribute"] == "sex"]) == {"", "label", BY_EPSILON}
    assert 0 < of_race["n_members"][of_race["by"] == BY_EPSILON].sum() <= 800
    assert 0 < race.individual_ceiling <= race.ceiling < 1
    assert found[4].ceiling is found[4].individual_ceiling is None
    assert "attributes" in set(summary.attacks["attack"])
    assert "### Attributes" in (folder / "audit" / "audit.md").read_text()


def test_a_run_is_attacked_without_references(a_run, capsys):
    run_dir = a_run[0] / "run"
    assert run(["attack", str(run_dir), "--attack", "attributes"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"sex +imputation times", shown)
    assert "without DP" in shown
    assert run(["attack", str(run_dir), "--attack", "attributes", "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert len(content["attribute_attacks"]) == 8
    assert [each["attack"] for each in content["attacks"]] == ["attributes", "attributes"]
    assert [each["model"] for each in content["attacks"]] == ["dp", "non_dp"]
    assert run(["attack", str(run_dir), "--attack", "rmia"]) == 2
    assert "takes them, for --signals" in " ".join(capsys.readouterr().err.split())
    assert run(["attack", str(run_dir)]) == 0
    assert "Loss threshold" in capsys.readouterr().out
