"""Runs compared at an epsilon and at an accuracy, read off their checkpoints."""

import json
import shutil

import numpy as np
import pandas as pd
import pytest

from indpriv import InputError
from indpriv._files import read_json, write_json
from indpriv._plain import to_json
from indpriv.audit import audit
from indpriv.audit.audit_directory import compare_audits
from indpriv.cli import run

CURVE = {
    "step": [0, 10, 20],
    "test_accuracy": [0.1, 0.5, 0.9],
    "worst_case_epsilon": [0.0, 1.0, 2.0],
}


def run_like(folder, name, curve):
    """A copy of an audited run, as if it had had this curve."""
    copy = shutil.copytree(folder, folder.parent / name)
    summary = read_json(copy / "audit" / "audit.json")
    summary["schedule"]["curve"] = curve
    write_json(copy / "audit" / "audit.json", summary)
    return copy


def test_runs_are_read_at_an_epsilon_and_at_an_accuracy(run_dir, tmp_path, no_extras, capsys):
    """One run that is private, one that has no privacy, and one without checkpoints."""
    folder = shutil.copytree(run_dir, tmp_path / "private")
    pd.DataFrame(CURVE).to_parquet(folder / "curve.parquet")
    curve = audit(folder, folder / "audit").schedule.curve
    runs = [
        folder,
        run_like(folder, "void", {**to_json(curve), "epsilon": []}) / "audit",
        run_like(folder, "bare", None) / "audit",
    ]
    found = compare_audits(runs, ["label"], at_epsilon=1.5, at_accuracy=0.3)
    private, void, bare = found["readings"]
    at = [private[name] for name in ("accuracy", "epsilon", "step")]
    assert at == pytest.approx([0.7, 0.5, 5.0])
    audited = read_json(folder / "audit" / "audit.json")
    assert private["worst_case_epsilon"] == audited["guarantee"]["worst_case_epsilon"]
    assert private["median_epsilon"] == audited["individual"]["median"]
    nothing = ("accuracy", "epsilon", "worst_case_epsilon", "median_epsilon")
    assert [void[name] for name in nothing] == [None] * 4
    assert void["step"] == pytest.approx(5.0)
    assert bare is None

    assert run(["show", *map(str, runs), "--set", "at_epsilon=1.5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "accuracy at epsilon 1.50" in text
    assert "70.0 %" in text
    assert "epsilon at accuracy" not in text
    assert run(["show", *map(str, runs), "--set", "at_accuracy=0.3", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["at_accuracy"] == 0.3
    assert printed["readings"][0]["epsilon"] == pytest.approx(0.5)
    assert [one and one["epsilon"] for one in printed["readings"][1:]] == [None, None]


@pytest.mark.parametrize(
    "place", [{"at_epsilon": 0.0}, {"at_epsilon": np.inf}, {"at_accuracy": 95.0}]
)
def test_places_that_no_run_can_reach_are_refused(place):
    (name,) = place
    with pytest.raises(InputError, match=f"{name}="):
        compare_audits(["one", "two"], **place)
