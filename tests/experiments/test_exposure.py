"""`python -m audits exposure` on runs that had secrets before."""

import json

import numpy as np
import pytest

from audits.__main__ import app
from audits.exposure.ranks import Exposures
from indpriv import NormLog
from indpriv.cli import run as run_command
from indpriv.norm_log.run_files import SECRETS
from synthetic import write_run


def run(words):
    return run_command(words, app, "python -m audits")


OWNERS = [f"owner {k}" for k in range(8)]


def test_a_run_without_dp_has_exposures_and_no_epsilon(tmp_path, capsys):
    Exposures.from_ranks(OWNERS, [4] * 8, [1] * 8, 1024).to_parquet(tmp_path / SECRETS)
    assert run(["exposure", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "10.00" in shown
    assert "A ceiling is" not in shown
    assert run(["exposure", str(tmp_path), "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["extracted"] == 8
    assert row["worst_case_epsilon"] is None


@pytest.mark.parametrize(("ranks", "code"), [([1] * 8, 1), (range(100, 900, 100), 0)])
def test_exposure_beyond_the_worst_case_fails(tmp_path, capsys, ranks, code):
    log = NormLog.from_arrays(
        np.full((1, 8), 0.5),
        [0],
        total_steps=20,
        noise_multiplier=4.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        example_ids=OWNERS,
        rounding=0.01,
    )
    write_run(tmp_path, log, None)
    Exposures.from_ranks(OWNERS, [1] * 8, list(ranks), 1024).to_parquet(tmp_path / SECRETS)
    assert run(["exposure", str(tmp_path)]) == code
    shown = " ".join(capsys.readouterr().out.split())
    assert ("the run or its account is wrong" in shown) == bool(code)


def test_models_that_do_not_exist_are_refused(tmp_path, capsys):
    assert run(["exposure", str(tmp_path / "new"), "--model", "gpt"]) == 2
    assert "'lstm', 'transformer'" in capsys.readouterr().err
