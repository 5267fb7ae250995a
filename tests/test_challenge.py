"""A log is challenged: norms at steps drawn in secret, from checkpoints and data."""

import json
import shutil
import sys
import warnings
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch.utils.data import Subset

import plain_opacus
from forging import norms_forged, rechained, with_table
from indpriv import NormLog
from indpriv.cli import run as command
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import AuditSpec, Recorder
from indpriv.recording.checkpoints.replay import challenge
from runs import PER_EXAMPLE, blobs, mlp

AGREES = {"examples": "passed", "norms": "passed", "noise": "not checked"}
SPEC = AuditSpec(model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE)


def trained(folder, precision=None, **options):
    """A recorded run that saves the model before each of its 20 steps, and after the last."""

    def watch(*run):
        with torch.autocast("cpu", precision, enabled=precision is not None):
            recorder = Recorder(folder / "run", **made)
        return recorder.attach(*run)

    data = blobs()
    made = {"dataset": data, "loss_fn": PER_EXAMPLE, "every": 1} | options
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = mlp()
        torch.seed()  # the noise of each run is its own
        plain_opacus.train(
            model,
            data,
            folder / "saved",
            epochs=2,
            batch_size=12,
            save_every=1,
            precision=precision,
            watch=watch,
        )
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("challenged"), batch_norms=True)


@pytest.fixture
def run_dir(made, tmp_path):
    return shutil.copytree(made / "run", tmp_path / "run")


def found(made, run_dir, n=10, spec=SPEC):
    checks = challenge(made / "saved", spec, run_dir, n)
    return {check.title: check for check in checks}


def words_of(checks):
    return {title: check.status for title, check in checks.items()}


def passes_the_chain(run_dir):
    return not any(check.status == "failed" for check in verify(open_run(run_dir))[:2])


def test_a_log_as_it_was_written_agrees_at_every_step(made):
    checks = found(made, made / "run", 20)
    assert words_of(checks) == AGREES
    entries = NormLog.open(made / "run").batch_norms.read(0, 120)
    assert f"{20 * 120 + len(entries):,} norms at 20 of the 20 steps" in checks["norms"].detail
    assert "missed by 0 %" in checks["norms"].detail
    few = found(made, made / "run", 5)
    assert "5 of the 20 steps" in few["norms"].detail
    assert "33 % of challenges" in few["norms"].detail  # 0.8^5
    assert "a forged noise multiplier is not seen" in few["noise"].detail


@pytest.mark.parametrize("factor", [0.3, 0.9, 1.5])
def test_norms_times_a_factor_are_found(made, run_dir, factor):
    norms_forged(run_dir, factor)
    assert passes_the_chain(run_dir)
    assert words_of(found(made, run_dir, 2))["norms"] == "failed"


def test_one_person_is_found_at_whatever_step_is_drawn(made, run_dir):
    log = NormLog.open(run_dir)
    largest = int(log.read()[:, :].min(axis=0).argmax())
    norms_forged(run_dir, 0.5, rows=slice(largest, largest + 1))
    checks = found(made, run_dir, 3)
    assert checks["norms"].status == "failed"
    assert f"example {largest} at step" in checks["norms"].detail


def test_forged_steps_are_found_exactly_where_one_of_them_is_drawn(made, run_dir):
    forged = set(range(0, 20, 5))
    norms_forged(run_dir, 0.3, steps=range(0, 20, 5))
    for _ in range(6):
        check = found(made, run_dir, 3)["norms"]
        drawn = {
            int(one)
            for one in check.detail.split("secret: ")[1]
            .split(" differ")[0]
            .split(";")[0]
            .split(", ")
        }
        assert len(drawn) == 3
        assert (check.status == "failed") == bool(drawn & forged)
        assert "52 % of challenges" in check.detail or check.status == "failed"  # 51.2: 0.8^3


def test_a_log_that_calls_its_norms_coarse_may_not_say_others(made, run_dir):
    """What a header says of the precision of its norms is a stranger's word too."""
    norms_forged(run_dir, 0.7)
    rechained(
        run_dir,
        lambda lines: [
            {**lines[0], "norm_pass": {**lines[0]["norm_pass"], "slack": 9.0}},
            *lines[1:],
        ],
    )
    assert words_of(found(made, run_dir, 2))["norms"] == "failed"


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
def test_training_in_half_precision_is_not_accused_and_its_forgeries_are(tmp_path, precision):
    made = trained(tmp_path, precision, batch_norms=True)
    for under in (None, precision):
        with torch.autocast("cpu", under, enabled=under is not None):
            check = found(made, made / "run", 20)["norms"]
        assert check.status in ("passed", "not checked")
        assert ("cannot tell" in check.detail) == (check.status == "not checked")
    norms_forged(made / "run", 0.3)
    assert words_of(found(made, made / "run", 3))["norms"] == "failed"


def test_a_log_that_only_says_half_precision_earns_no_more_than_cannot_tell(made, run_dir):
    norms_forged(run_dir, 0.5, rows=slice(3))

    def half(lines):
        for line in lines:
            if "evidence" in line:
                line["evidence"]["clip_rounding"] = 0.01
        return lines

    assert words_of(found(made, run_dir, 3))["norms"] == "failed"
    rechained(run_dir, half)
    check = found(made, run_dir, 3)["norms"]
    assert check.status == "not checked"
    assert "cannot tell" in check.detail


def test_a_person_that_either_side_lacks_is_found(made, run_dir):
    fewer = AuditSpec(model=mlp, dataset=Subset(blobs(), range(119)), loss_fn=PER_EXAMPLE)
    assert words_of(found(made, made / "run", 2, spec=fewer))["examples"] == "failed"

    def cut(lines):
        table = lambda old: old.slice(0, 119)  # noqa: E731
        found = [{**lines[0], "n_examples": 119}]
        found[0]["ids_sha256"] = with_table(run_dir / "ids.parquet", table)["sha256"]
        for line in lines[1:]:
            if line["kind"] == "record":
                line = {**line, "n_examples": 119}
                line |= with_table(run_dir / "records" / line["file"], table)
            elif line["kind"] == "free":
                kept = lambda old: old.filter(pa.compute.less(old["position"], 119))  # noqa: E731
                line = {**line, **with_table(run_dir / "records" / line["file"], kept)}
            found.append(line)
        return found

    import pyarrow.compute  # noqa: F401

    rechained(run_dir, cut)
    assert NormLog.open(run_dir).n_examples == 119
    checks = found(made, run_dir, 2)
    assert checks["examples"].status == "failed"
    assert "e.g. 119" in checks["examples"].detail
    assert checks["norms"].status == "passed"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"rounding": 0.0}, marks=pytest.mark.slow),
        pytest.param({"rounding": 0.001, "rounding_mode": "nearest"}, marks=pytest.mark.slow),
        {"individual_clipping": True, "every": 4},
        pytest.param({"every": "once", "batch_norms": True}, marks=pytest.mark.slow),
        pytest.param({"example_ids": [f"person {k}" for k in range(120)]}, marks=pytest.mark.slow),
    ],
)
def test_logs_of_every_kind_agree_and_their_forgeries_do_not(tmp_path, options):
    made = trained(tmp_path, **options)
    spec = SPEC
    if "example_ids" in options:
        spec = AuditSpec(
            model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE, example_ids=options["example_ids"]
        )
    checks = found(made, made / "run", 20, spec=spec)
    assert words_of(checks) == AGREES, checks
    norms_forged(made / "run", 0.3)
    assert words_of(found(made, made / "run", 20, spec=spec))["norms"] == "failed"


@pytest.mark.slow
def test_checkpoints_of_another_run_do_not_agree(made, tmp_path):
    other = trained(tmp_path)
    assert words_of(found(other, made / "run", 5))["norms"] == "failed"


def test_what_cannot_be_challenged_is_one_message(made, run_dir, tmp_path):
    with pytest.raises(InputError, match="challenges"):
        found(made, made / "run", 0)
    (tmp_path / "few").mkdir()
    shutil.copy(made / "saved" / "step_20.pt", tmp_path / "few")
    with pytest.raises(InputError, match=r"has checkpoints of steps \[20\].* none has both"):
        challenge(tmp_path / "few", SPEC, made / "run")
    dropout = lambda: torch.nn.Sequential(*mlp()[:2], torch.nn.Dropout(0.5), mlp()[2])  # noqa: E731
    spec = AuditSpec(
        model=dropout,
        dataset=blobs(),
        loss_fn=PER_EXAMPLE,
        load=lambda state: {
            name.replace("_module.", "").replace("2.", "3.", 1): value
            for name, value in state["module_state_dict"].items()
        },
    )
    with pytest.raises(InputError, match="cannot be compared with training's"):
        found(made, made / "run", spec=spec)
    rechained(
        run_dir,
        lambda lines: [
            {**lines[0], "run": {**lines[0]["run"], "clipping": "per_layer"}},
            *lines[1:],
        ],
    )
    with pytest.raises(InputError, match="per_layer clipping cannot be challenged"):
        found(made, run_dir)


def test_on_the_command_line(made, run_dir, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec = made / "my_spec.py"
    spec.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\nfrom test_challenge import SPEC as spec\n"
    )
    words = ["--spec", f"{spec}:spec", "--set", "challenges=3", "--set", "only=log"]
    words = ["check", "--checkpoints", str(made / "saved"), *words]
    assert command([*words, str(run_dir), "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)["parts"]
    status = {one["title"]: one["status"] for one in found["checks"] if one["key"] == "challenge"}
    assert status == AGREES
    norms_forged(run_dir, 0.3)
    assert command([*words, str(run_dir), "--json"]) == 1
    assert '"failed"' in capsys.readouterr().out
    assert command([*words, str(made)]) == 2
    assert command(["check", str(run_dir), "--checkpoints", str(made / "saved")]) == 2
    assert "--checkpoints FOLDER --spec" in capsys.readouterr().err
