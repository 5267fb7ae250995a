"""`indpriv advise RUN`: advice from one recorded run."""

import json

import numpy as np
import pytest

from indpriv import NormLog, PrivacyFilter, RoundRecorder, account
from indpriv._files import write_json
from indpriv.cli import run as run_command
from indpriv.norm_log.norm_log import noisier
from runs import make_run, record
from synthetic import small_run, write_run


@pytest.fixture
def advise(capsys):
    def call(*arguments, code=0):
        found = run_command(["advise", *map(str, arguments)])
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return call


def test_advice_on_a_run(run_dir, advise, tmp_path):
    folder = tmp_path / "advice"
    options = (run_dir, "--target", 1.5, "--by", "sex", "--output-dir", folder)
    found = json.loads(advise(*options, "--json").out)
    assert found == json.loads((folder / "advice.json").read_text())
    assert (folder / "advice.json").stat().st_mode & 0o777 == 0o600
    everyone, *groups = found["groups"]
    assert (everyone["by"], everyone["name"]) == (None, "all")
    assert {(one["by"], one["name"]) for one in groups} == {("sex", "Female"), ("sex", "Male")}
    log = NormLog.open(run_dir)
    noise = everyone["noise"]
    then = account(noisier(log, noise["factor"]), delta=1e-5)
    assert np.quantile(then.epsilon, 0.95, method="inverted_cdf") == noise["quantile"] <= 1.5
    before = account(noisier(log, noise["factor"] / 1.01), delta=1e-5)
    assert np.quantile(before.epsilon, 0.95, method="inverted_cdf") > 1.5
    text = " ".join(advise(*options).out.split())
    assert "promise nothing" in text
    assert "gradient norms stay what they were" in text
    assert "same noise multiplier lowers the noise as well" in text
    for suffix in ("html", "md"):
        page = (folder / f"advice.{suffix}").read_text()
        assert "SENSITIVE" in page
        assert "sex: Female" in page


def test_default_groups_are_those_of_the_run(run_dir, advise, tmp_path):
    found = json.loads(advise(run_dir, "--target", 1, "--json", "--output-dir", tmp_path).out)
    assert {one["by"] for one in found["groups"]} == {None, "sex", "label"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--target", 0), "target=0.0 is not in (0, inf); it is an epsilon"),
        (("--target", -1), "target=-1.0 is not in (0, inf)"),
        (("--target", 1, "--set", "quantile=1"), "quantile=1.0 is not in (0, 1)"),
        (("--target", 1, "--by", "eyes"), "there is no column 'eyes'"),
        (("--target", 1, "--set", "delta=2"), "delta"),
    ],
)
def test_questions_that_cannot_be_answered(run_dir, advise, tmp_path, options, message):
    folder = tmp_path / "advice"
    assert message in advise(run_dir, *options, "--output-dir", folder, code=2).err
    assert not folder.exists()


def test_a_run_without_examples_has_no_groups(advise, tmp_path):
    run = write_run(tmp_path / "bare", small_run()[0], None)
    options = (run, "--target", 1, "--set", "delta=1e-5", "--json")
    assert [one["name"] for one in json.loads(advise(*options).out)["groups"]] == ["all"]
    assert "no groups by sex" in advise(*options, "--by", "sex", code=2).err


def test_a_guarantee_that_an_audit_does_not_give_is_none_here(advise, tmp_path):
    log, examples = small_run()
    run = write_run(tmp_path / "run", log, examples, recorder={"steps_per_epoch": 10})
    write_json(run / "run.json", {"config": {"audit": {"neighbouring": "add_remove"}}})
    options = (run, "--target", 1, "--set", "delta=1e-5", "--by", "sex")
    found = json.loads(advise(*options, "--json").out)["guarantee"]
    assert found["status"] == "unproven"  # updates tell n
    assert "which is no guarantee of this run" in (run / "advice" / "advice.md").read_text()


@pytest.mark.slow
def test_clipping_of_another_kind_has_no_clipping_norm(advise, tmp_path):
    log, examples = small_run()
    run = write_run(tmp_path / "run", log, examples, recorder={"clipping": "per_layer"})
    options = (run, "--target", 1, "--set", "delta=1e-5")
    found = json.loads(advise(*options, "--json").out)
    assert found["groups"][0]["clipping"] is None
    assert found["groups"][0]["noise"]["factor"] > 1
    assert 'clipping = "per_layer"' in " ".join(advise(*options).out.split())


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_federated_runs_and_filters_are_refused(advise, tmp_path):
    with RoundRecorder(tmp_path / "rounds", ["a", "b", "c"], sampler="fixed_size") as recorder:
        recorder.round(["a", "b"], [0.1, 0.2], noise_multiplier=1.0, max_grad_norm=1.0)
    recorded = tmp_path / "filtered"
    record(make_run(), recorded, privacy_filter=PrivacyFilter(order=3.0, rdp_cap=0.1))
    for run, message in ((tmp_path / "rounds", "federated run"), (recorded, "privacy filter")):
        assert message in advise(run, "--target", 1, "--set", "delta=1e-5", code=2).err
        assert not (run / "advice").exists()


@pytest.mark.parametrize("words", [[], ["--target", "1"]])
def test_a_file_that_is_no_run_and_a_missing_target_are_refused(run_dir, words, capsys):
    path = run_dir / "run.json" if words else run_dir
    assert run_command(["advise", str(path), *words]) == 2
    assert ("is one file of a run" if words else "--target") in capsys.readouterr().err
