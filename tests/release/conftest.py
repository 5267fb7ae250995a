"""Audit directories made by hand: small, no training, no figures."""

import shutil

import numpy as np
import pandas as pd
import pytest

from indpriv._files import read_json, write_json
from indpriv.analysis.recorded_run import Declared, RecordedRun
from summaries import audit_of
from synthetic import epsilon_table, small_run, sound_checks

WORST = 2.0
CHECKS = sound_checks()


def write_small_audit(
    folder, epsilon, *, checks=CHECKS, recorder=None, declared=None, settings=None, **account
):
    """An audit of these epsilons in this folder, without the report; people are Male, Female, Male, ..."""
    folder.mkdir(mode=0o700)
    n = len(epsilon)
    log, examples = small_run(n=n, steps=3, **settings or {})
    train = examples.train.assign(sex=np.resize(["Male", "Female"], n))
    table = epsilon_table(epsilon, worst_case=WORST, **account)
    evidence = RecordedRun(
        declared=Declared(declared or {}), checks=checks, recorder=recorder or {}
    )
    summary = audit_of(log, table, evidence, name="small")
    table.to_parquet(
        folder / "epsilon.parquet", columns=train[["loss", "correct", "label", "sex", "age"]]
    )
    examples.frame.assign(sex="Male").to_parquet(folder / "examples.parquet")
    write_json(folder / "audit.json", summary.to_json())
    return folder


def epsilons(n, seed=0):
    return np.minimum(np.random.default_rng(seed).gamma(2.0, 0.4, n), WORST)


@pytest.fixture(scope="session")
def pristine(tmp_path_factory):
    return write_small_audit(tmp_path_factory.mktemp("release") / "audit", epsilons(400))


@pytest.fixture
def audit_dir(pristine, tmp_path):
    return shutil.copytree(pristine, tmp_path / "audit")


@pytest.fixture
def edit_audit(audit_dir):
    """Change audit.json: edit(lambda summary: ...)."""

    def edit(change):
        summary = read_json(audit_dir / "audit.json")
        change(summary)
        write_json(audit_dir / "audit.json", summary)

    return edit


def read_epsilons(folder):
    return pd.read_parquet(folder / "epsilon.parquet")["epsilon"].to_numpy()
