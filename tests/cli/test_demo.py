"""`indpriv demo` as a command: what it replaces, and what it refuses."""

import json
import subprocess

import pytest

from command_lines import run, words_of
from indpriv.demo.train import train


@pytest.mark.parametrize("said", [{"name": "adult"}, {}, None])
def test_a_folder_that_is_no_demo_is_never_removed(capsys, tmp_path, said):
    """A user's own run on Adult may have the same name."""
    found = tmp_path / "out" / "run"
    found.mkdir(parents=True)
    (found / "mine.txt").write_text("a", encoding="utf-8")
    if said is not None:
        (found / "run.json").write_text(json.dumps(said), encoding="utf-8")
    assert run(["demo", "--output-dir", tmp_path / "out"]) == 2
    assert "not the run of an earlier demo" in " ".join(capsys.readouterr().err.split())
    assert (found / "mine.txt").read_text(encoding="utf-8") == "a"


def test_a_negative_seed_is_refused_before_anything_is_removed(capsys, tmp_path):
    found = tmp_path / "run"
    found.mkdir()
    (found / "run.json").write_text('{"made_by": "indpriv demo"}', encoding="utf-8")
    assert run(["demo", "--output-dir", tmp_path, "--seed", "-1"]) == 2
    assert "seed=-1" in capsys.readouterr().err
    assert (found / "run.json").is_file()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:opacus")
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_demo_replaces_an_older_one_and_audits_it(tmp_path):
    train(tmp_path / "run", epochs=1, progress=lambda *_: None)
    command = words_of("demo", "--output-dir", tmp_path, "--seed", "7", "--json")
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    summary = json.loads(done.stdout)
    assert summary["guarantee"]["worst_case_epsilon"] == pytest.approx(3.0, abs=0.01)
    assert summary["guarantee"]["status"] == "void"
    assert {"label", "race", "sex", "age_band"} <= {
        name for table in summary["groups"] for name in table["columns"]
    }
    assert (tmp_path / "report.html").is_file()
