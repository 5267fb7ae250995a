"""`indpriv compose`: recorded runs on the same people, accounted together."""

import json
import shutil

import pandas as pd
import pytest

from indpriv import NormLog, account
from indpriv.cli import run as run_command


@pytest.fixture
def compose(capsys):
    def call(*arguments, code=0):
        found = run_command(["compose", *map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call


def test_a_run_with_itself(run_dir, compose, tmp_path):
    copy = tmp_path / "again"
    shutil.copytree(run_dir, copy)
    assert "are the same run" in compose(run_dir, copy, code=2).err
    found = json.loads(
        compose(run_dir, copy, "--same-run", "--json", "--output-dir", tmp_path / "both").out
    )
    assert found == json.loads((tmp_path / "both" / "composition.json").read_text())
    table = pd.read_parquet(tmp_path / "both" / "epsilon.parquet")
    assert (table["n_runs"] == 2).all()
    delta = found["account"]["delta"]
    alone = account(NormLog.open(run_dir), delta=delta)
    assert found["runs"][0]["worst_case_epsilon"] == alone.worst_case_epsilon
    assert alone.worst_case_epsilon < found["worst_case_epsilon"] < 2 * alone.worst_case_epsilon
    assert found["account"]["total_steps"] == 2 * alone.account.total_steps
    assert (tmp_path / "both" / "epsilon.parquet").stat().st_mode & 0o777 == 0o600
    page = compose(run_dir, copy, "--same-run", "--tuning-mean", 3).out
    assert "geometric law with mean 3" in " ".join(page.split())
    assert "It is not a differential-privacy guarantee" in " ".join(page.split())


def test_what_cannot_be_composed(run_dir, compose):
    assert "needs two runs" in compose(run_dir, code=2).err
    assert "does not exist" in compose(run_dir, run_dir / "nothing", code=2).err
    message = compose(run_dir, run_dir, "--same-run", "--by", "nothing", code=2).err
    assert "nothing" in message
