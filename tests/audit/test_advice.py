"""`indpriv advise RUN`: advice from one recorded run."""

import json

import numpy as np
import pytest

from indpriv import NormLog, PrivacyFilter, RoundRecorder, account
from indpriv.cli import run as run_command
from indpriv.norm_log.views import noisier
from indpriv.training.datasets import load_dataset
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
        (("--target", 0), "target=0 is not a positive epsilon"),
        (("--target", -1), "target=-1 is not a positive epsilon"),
        (("--target", 1, "--quantile", 1), "quantile=1 is not in (0, 1)"),
        (("--target", 1, "--by", "eyes"), "there is no column 'eyes'"),
        (("--target", 1, "--delta", 2), "delta"),
    ],
)
def test_questions_that_cannot_be_answered(run_dir, advise, tmp_path, options, message):
    folder = tmp_path / "advice"
    assert message in advise(run_dir, *options, "--output-dir", folder, code=2).err
    assert not folder.exists()


def test_a_run_without_examples_has_no_groups(advise, tmp_path):
    run = write_run(tmp_path / "bare", small_run()[0], None)
    options = (run, "--target", 1, "--delta", 1e-5, "--json")
    assert [one["name"] for one in json.loads(advise(*options).out)["groups"]] == ["all"]
    assert "no groups by sex" in advise(*options, "--by", "sex", code=2).err


def test_clipping_of_another_kind_has_no_clipping_norm(advise, tmp_path):
    log, examples = small_run()
    run = write_run(tmp_path / "run", log, examples, recorder={"clipping": "per_layer"})
    options = (run, "--target", 1, "--delta", 1e-5)
    found = json.loads(advise(*options, "--json").out)
    assert found["groups"][0]["clipping"] is None
    assert found["groups"][0]["noise"]["factor"] > 1
    assert 'clipping = "per_layer"' in " ".join(advise(*options).out.split())


def test_federated_runs_and_filters_are_refused(advise, tmp_path):
    with RoundRecorder(tmp_path / "rounds", ["a", "b", "c"], sampler="fixed_size") as recorder:
        recorder.round(["a", "b"], [0.1, 0.2], noise_multiplier=1.0, max_grad_norm=1.0)
    recorded = tmp_path / "filtered"
    record(make_run(), recorded, privacy_filter=PrivacyFilter(order=3.0, rdp_cap=0.1))
    for run, message in ((tmp_path / "rounds", "federated run"), (recorded, "privacy filter")):
        assert message in advise(run, "--target", 1, "--delta", 1e-5, code=2).err
        assert not (run / "advice").exists()


AUDIT = """
name = "small"
[data]
dataset = "breast_cancer"
[model]
architecture = "mlp"
hidden = [4]
[training]
epochs = 4
batch_size = 64
learning_rate = 0.5
max_grad_norm = 1.0
target_epsilon = 6.0
delta = 1e-4
non_private_baseline = true
[recording]
every = 1
[checkpoints]
every = "epoch"
"""


@pytest.fixture
def audit_file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(AUDIT)
    return path


@pytest.mark.slow
def test_advice_on_records_from_runs_on_subsets(audit_file, advise, tmp_path):
    folder = tmp_path / "out"
    options = (audit_file, "--target", 5, "--subsets", "1,0.5", "--output-dir", folder)
    found = json.loads(advise(*options, "--jobs", 1, "--json").out)
    noise = set()
    for share, seed in ((0.5, 0), (0.5, 1), (1, 0), (1, 1)):
        log = NormLog.open(folder / "runs" / f"share={share}_seed={seed}")
        assert log.n_examples == np.ceil(456 * share)
        noise |= set(log.settings.noise_multiplier.tolist())
        table = account(log, delta=1e-4)
        quantile = np.quantile(table.epsilon, 0.95, method="inverted_cdf")
        reading = {"share": share, "seed": seed, "n_all": log.n_examples, "n": log.n_examples}
        reading |= {"quantile": quantile, "at_worst_case": quantile >= table.worst_case_epsilon}
        assert reading in found["groups"][0]["records"]["readings"]
    assert len(noise) == 1  # that of the whole data, though the audit names a target
    assert {one["by"] for one in found["groups"]} == {None, "label"}
    assert -1 < found["groups"][0]["records"]["exponent"] < 0
    kept = folder / "runs" / "share=1_seed=0" / "run.json"
    before = kept.read_bytes()
    text = " ".join(advise(*options, "--seeds", 2).out.split())  # what is done is not made again
    assert kept.read_bytes() == before
    assert "that new records are like those there are" in text
    assert "More records" in (folder / "advice.md").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--subsets", "0,1"), "0 is not in (0, 1]"),
        (("--subsets", "0.5,2"), "2 is not in (0, 1]"),
        (("--subsets", "half,1"), "--subsets half,1: pass shares"),
        (("--subsets", "0.5,0.5,1"), "a share twice"),
        (("--subsets", "1"), "and a smaller share"),
        (("--subsets", "0.25,0.5"), "needs 1, the whole data"),
        (("--subsets", "0.5,1", "--seeds", 1), "are 2 runs, too few"),
        (("--subsets", "0.1,0.5,1"), "batch_size=64 is larger"),
        (("--by", "race"), "there is no column 'race'"),
        (("--by", "loss:bins=3"), "differ from run to run"),
    ],
)
def test_subsets_that_say_nothing(audit_file, advise, tmp_path, options, message):
    folder = tmp_path / "out"
    printed = advise(audit_file, "--target", 1, *options, "--output-dir", folder, code=2)
    assert message in " ".join(printed.err.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("target_epsilon = 6.0", "noise_multiplier = 1.0\nfilter_epsilon = 2.0", "filter_epsilon"),
        ('dataset = "breast_cancer"', 'dataset = "breast_cancer"\nshare = 0.5', "share already"),
        (
            "max_grad_norm = 1.0",
            'max_grad_norm = "median"\nmedian_epsilon = 0.1',
            "a clipping norm of its own",
        ),
    ],
)
def test_audits_that_advice_knows_nothing_of(audit_file, advise, before, after, message):
    audit_file.write_text(AUDIT.replace(before, after))
    assert message in advise(audit_file, "--target", 1, code=2).err


@pytest.mark.slow
def test_whose_epsilon_rises_without_some_records(audit_file, advise, tmp_path):
    folder, ids = tmp_path / "out", tmp_path / "ids.txt"
    data = load_dataset("breast_cancer").train
    ids.write_text("0\n1\n2\n")
    benign = np.flatnonzero(data.targets == 1)
    options = (audit_file, "--without-ids", ids, "--seeds", 1, "--output-dir", folder)
    found = json.loads(advise(*options, "--jobs", 1, "--json").out)
    assert found["n_deleted"] == 3
    whole = folder / "runs" / "share=1_seed=0"
    (part,) = (folder / "runs").glob("without-*_seed=0")
    logs = [NormLog.open(run) for run in (whole, part)]
    assert [log.n_examples for log in logs] == [456, 453]
    noise = [log.settings.noise_multiplier[0] for log in logs]
    assert noise[0] == noise[1]
    old, new = (account(log, delta=1e-4).epsilon for log in logs)
    stay = np.arange(3, 456)
    everyone = found["groups"][0]
    assert everyone["mean_with"] == pytest.approx(old[stay].mean())
    assert everyone["mean_without"] == pytest.approx(new.mean())
    assert everyone["share_rises"] == pytest.approx((new > 1.1 * old[stay]).mean())
    named = next(one for one in found["groups"] if one["name"] == "benign")
    kept = np.isin(stay, benign)
    assert named["mean_without"] == pytest.approx(new[kept].mean())
    text = " ".join(advise(*options).out.split())
    assert "pass --seeds 2" in text
    assert "sampling rate is higher" in text
    for suffix in ("html", "md"):
        assert "SENSITIVE" in (folder / f"deletion.{suffix}").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "pass --target"),
        (("--without", "label=benign", "--target", 1), "or else --without"),
        (("--without", "label=benign", "--subsets", "0.5,1"), "--subsets has no part in advice"),
        (("--without", "label=purple"), "no training row of breast_cancer has that value"),
        (("--without", "eyes=blue"), "eyes"),
        (("--without", "label"), "without"),
        (("--without", "label=benign", "--without", "label=malignant"), "leaves no training row"),
        (("--without-ids", "nowhere.txt"), "--without-ids nowhere.txt"),
    ],
)
def test_deletions_that_say_nothing(audit_file, advise, tmp_path, options, message):
    folder = tmp_path / "out"
    printed = advise(audit_file, *options, "--output-dir", folder, code=2)
    assert message in " ".join(printed.err.split())
    assert not folder.exists()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--without", "sex=Male"), "--without"),
        (("--target", 1, "--seeds", 3), "--seeds"),
        (("--target", 1, "--subsets", "0.5,1"), "--subsets"),
        (("--target", 1, "--jobs", 2), "--jobs"),
    ],
)
def test_a_run_is_not_trained_again(run_dir, advise, options, named):
    message = " ".join(advise(run_dir, *options, code=2).err.split())
    assert f"{named} has no part in advice that trains nothing" in message


@pytest.mark.parametrize(("text", "reason"), [("1\nann\n", "'ann'"), ("\n", "is empty")])
def test_ids_that_are_no_numbers(audit_file, advise, tmp_path, text, reason):
    (tmp_path / "ids.txt").write_text(text)
    printed = advise(audit_file, "--without-ids", tmp_path / "ids.txt", code=2)
    message = " ".join(printed.err.split())
    assert reason in message
    assert "the id of one example on each line" in message
