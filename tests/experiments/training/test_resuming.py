"""Runs of `train` that were stopped or killed, and go on from their last checkpoint."""

import os
import signal
import stat
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import indpriv
from audits.__main__ import app
from audits.training import steps
from audits.training.canaries import train_with_canaries
from audits.training.checkpoints import TrainingState, list_checkpoints, load_checkpoint
from audits.training.config import AuditConfig, DataConfig
from audits.training.datasets.base import Dataset, Split
from audits.training.dp_sgd import train
from audits.training.step_plan import worst_case_epsilon
from indpriv._files import read_json
from indpriv.accountant import PrivacyFilter
from indpriv.audit import audit
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import RESUME
from indpriv.norm_log.verify import verify
from processes import running, wait_for_records

SCHEDULE = {"law": "linear", "start": 2.0, "end": 1.0}


def config(recording=None, checkpoints=5, attacks=None, **training):
    settings = {
        "epochs": 2,
        "batch_size": 50,
        "learning_rate": 0.5,
        "momentum": 0.9,
        "weight_decay": 0.01,
        "schedule": "cosine",
        "max_grad_norm": 1.0,
        "delta": 1e-4,
        "noise_multiplier": 1.0,
    }
    return AuditConfig.from_dict(
        {
            "name": "toy",
            "data": {"dataset": "digits"},
            "model": {"architecture": "mlp", "hidden": [8]},
            "training": settings | training,
            "recording": {"every": 1, "rounding": 0} | (recording or {}),
            "checkpoints": {"every": checkpoints},
            "attacks": attacks or {},
        }
    )


def toy(n=300, n_test=60, seed=0):
    """Three classes that differ in their mean; six steps an epoch."""
    generator = np.random.default_rng(seed)
    splits = []
    for size in (n, n_test):
        targets = np.arange(size) % 3
        inputs = generator.normal(size=(size, 6)) + 1.5 * targets[:, None]
        splits.append(Split(inputs.astype(np.float32), targets.astype(np.int64)))
    return Dataset("toy", *splits, tuple("abc"), "none", "made here")


class CrashError(Exception):
    """Ends a run without warning."""


def crashed(k, plan, run_dir, stage="training", **options):
    """A run that crashes after k steps."""

    def crash(now, done, total):
        if (now, done) == (stage, k):
            raise CrashError

    with pytest.raises(CrashError):
        train(plan, run_dir, progress=crash, **{"dataset": toy()} | options)


def interrupted(k, plan, run_dir, **options):
    """A run that is asked to stop after k steps."""

    def interrupt(stage, done, total):
        if done == k:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match=f"after {k} of .*; --resume goes on"):
        train(plan, run_dir, progress=interrupt, **{"dataset": toy()} | options)


def failed(run_dir):
    return {check.key for check in verify(open_run(run_dir)) if check.status == "failed"}


def assert_same(ours, theirs):
    """Parameters, records, losses and epsilons of two runs, to the bit."""
    for mine, other in zip(
        ours.module.state_dict().items(), theirs.module.state_dict().items(), strict=True
    ):
        assert mine[0] == other[0]
        assert torch.equal(mine[1], other[1])
    logs = [NormLog.open(run.run_dir) for run in (ours, theirs)]
    assert logs[0].recorded_steps.tolist() == logs[1].recorded_steps.tolist()
    np.testing.assert_array_equal(logs[0].read(), logs[1].read())
    for name in ("noise_multiplier", "max_grad_norm", "sample_rate"):
        np.testing.assert_array_equal(*(getattr(log.settings, name) for log in logs))
    epsilons = [indpriv.account(log, delta=1e-4).epsilon for log in logs]
    np.testing.assert_array_equal(*epsilons)
    tables = [pd.read_parquet(run.run_dir / "examples.parquet") for run in (ours, theirs)]
    pd.testing.assert_frame_equal(*tables)
    curves = [pd.read_parquet(run.run_dir / "curve.parquet") for run in (ours, theirs)]
    both = curves[0].merge(curves[1], on="step")
    assert both["step"].tolist() == curves[1]["step"].tolist()
    assert both["test_accuracy_x"].tolist() == both["test_accuracy_y"].tolist()


KINDS = {
    "plain": {},
    "small physical batches": {"max_physical_batch_size": 16},
    "ghost": {"grad_sample_mode": "ghost"},
    "individual clipping": {
        "individual_clipping": True,
        "recording": {"every": 5, "rounding": 0.01},
    },
    "schedules": {"max_grad_norm": SCHEDULE, "noise_multiplier": SCHEDULE},
    "per layer": {"clipping": "per_layer"},
    "quantile": {"clipping": "quantile"},
    "adaclip": {"clipping": "adaclip"},
    "largest norm": {"noise_scale": "largest_norm", "allow_no_privacy": True},
}


@pytest.mark.parametrize(
    "kind",
    [kind if kind == "plain" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_a_seeded_run_that_crashed_ends_as_if_it_had_not(kind, tmp_path):
    """Its last checkpoint lies within the first epoch, and the crash within the second."""
    plan = config(**KINDS[kind])
    whole = train(plan, tmp_path / "whole", seed=1, dataset=toy())
    crashed(8, plan, tmp_path / "run", seed=1)
    assert_same(train(plan, tmp_path / "run", seed=1, dataset=toy(), resume=True), whole)


@pytest.mark.slow
def test_it_does_so_wherever_it_crashed(tmp_path):
    """Before its first checkpoint, at the end of an epoch, and after the last step."""
    plan = config(checkpoints="epoch")
    whole = train(plan, tmp_path / "whole", seed=1, dataset=toy())
    for k in (3, 6, 7, 12):
        crashed(k, plan, tmp_path / f"at{k}", seed=1)
        run = train(plan, tmp_path / f"at{k}", seed=1, dataset=toy(), resume=True)
        assert_same(run, whole)
        assert not (run.run_dir / RESUME).exists()


@pytest.mark.slow
def test_a_seeded_run_may_stop_several_times(tmp_path):
    plan = config(checkpoints=4)
    whole = train(plan, tmp_path / "whole", seed=1, dataset=toy())
    crashed(2, plan, tmp_path / "run", seed=1)
    interrupted(7, plan, tmp_path / "run", seed=1, resume=True)
    crashed(9, plan, tmp_path / "run", seed=1, resume=True)
    run = train(plan, tmp_path / "run", seed=1, dataset=toy(), resume=True)
    assert_same(run, whole)
    assert pd.read_parquet(tmp_path / "run" / "curve.parquet")["step"].tolist() == [0, 4, 7, 8, 12]
    steps_saved = [load_checkpoint(path).step for path in list_checkpoints(tmp_path / "run")]
    assert steps_saved == [0, 4, 7, 8, 12]


@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
@pytest.mark.filterwarnings("ignore:no step at max_grad_norm fits")
def test_a_seeded_run_with_a_privacy_filter_and_test_norms_goes_on(tmp_path):
    plan = config(
        recording={"record_holdout": True, "rounding": 0.01, "every": 2},
        individual_clipping=True,
        filter_epsilon=2.0,
    )

    def limit(noise_multiplier, sample_rate):
        return PrivacyFilter.for_epsilon(
            2.0, delta=1e-4, noise_multiplier=noise_multiplier, sample_rate=sample_rate
        )

    options = {"dataset": toy(), "seed": 1, "privacy_filter": limit}
    whole = train(plan, tmp_path / "whole", **options)
    left_out_at = NormLog.open(tmp_path / "whole").filtered.left_out_at
    assert (left_out_at < 10).any()
    crashed(10, plan, tmp_path / "run", **options)
    run = train(plan, tmp_path / "run", **options, resume=True)
    assert_same(run, whole)
    held = [NormLog.open(each.run_dir / "holdout").read() for each in (run, whole)]
    np.testing.assert_array_equal(*held)


KILLED = """
import sys, time, warnings; warnings.simplefilter("ignore")
sys.path[:0] = {paths!r}
from test_resuming import config, toy, train
train(config(), {run_dir!r}, seed=1, dataset=toy(), progress=lambda *_: time.sleep(0.2))
"""


@pytest.mark.slow
@pytest.mark.parametrize("records", [3, 8])
def test_a_seeded_run_that_was_killed_ends_as_if_it_had_not(records, tmp_path):
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    code = KILLED.format(paths=paths, run_dir=str(tmp_path / "run"))
    with running([sys.executable, "-c", code]) as process:
        wait_for_records(process, tmp_path / "run", records)
        process.kill()
        process.wait(30)
    assert NormLog.open(tmp_path / "run").total_steps < 12
    run = train(config(), tmp_path / "run", seed=1, dataset=toy(), resume=True)
    assert_same(run, train(config(), tmp_path / "whole", seed=1, dataset=toy()))


@pytest.mark.slow
@pytest.mark.usefixtures("hears_ctrl_c")
def test_an_unseeded_run_that_was_stopped_is_one_run(tmp_path):
    interrupted(7, config(), tmp_path / "run")
    state = tmp_path / "run" / RESUME
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    run = train(config(), tmp_path / "run", dataset=toy(), resume=True)
    assert run.steps == 12
    assert failed(tmp_path / "run") == set()
    record = read_json(tmp_path / "run" / "run.json")
    assert (record["status"], record["steps"]) == ("finished", 12)
    assert record["guarantee"]["lost_steps"] == 0
    assert record["guarantee"]["epsilon"] == pytest.approx(
        worst_case_epsilon(np.ones(12), 1 / 6, 1e-4), rel=1e-6
    )
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert curve["step"].tolist() == [0, 5, 7, 10, 12]
    assert curve["seconds"].is_monotonic_increasing
    assert record["wall_seconds"] >= curve["seconds"].iloc[-1]
    summary = audit(tmp_path / "run", tmp_path / "audit")
    assert summary.claim == "exact"
    assert (summary.guarantee.status, summary.guarantee.reasons) == ("supported", ())
    assert [check.title for check in summary.checks if check.status == "failed"] == []


def test_an_unseeded_run_draws_new_random_numbers(tmp_path):
    """And its state tells nothing of the old ones."""
    crashed(3, config(), tmp_path / "run")
    state = TrainingState.read(tmp_path / "run")
    assert (state.seed, state.generators) == (None, {})
    content = torch.load(tmp_path / "run" / RESUME, weights_only=True)
    assert not [value for value in content.values() if getattr(value, "dtype", 0) == torch.uint8]
    first = NormLog.open(tmp_path / "run").read()
    train(config(), tmp_path / "run", dataset=toy(), resume=True)
    again = NormLog.open(tmp_path / "run").read()
    np.testing.assert_array_equal(first[0], again[0])
    assert not np.array_equal(first[1], again[1])


@pytest.mark.slow
def test_steps_that_crashes_lost_count_in_the_worst_case_and_are_told(tmp_path):
    """Up to five steps, two steps of the log among them; then up to two after the last checkpoint."""
    crashed(2, config(), tmp_path / "run")
    crashed(11, config(), tmp_path / "run", resume=True)
    run = train(config(), tmp_path / "run", dataset=toy(), resume=True)
    assert failed(tmp_path / "run") == {"no_voided_steps"}
    record = read_json(tmp_path / "run" / "run.json")
    assert record["guarantee"]["lost_steps"] == 5 + 2
    expected = worst_case_epsilon(np.ones(12 + 7), 1 / 6, 1e-4)
    assert record["guarantee"]["epsilon"] == run.worst_case_epsilon == pytest.approx(expected)
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert curve["worst_case_epsilon"].iloc[0] == 0
    for step, epsilon in curve[["step", "worst_case_epsilon"]].iloc[1:].to_numpy():
        lost = worst_case_epsilon(np.ones(int(step) + 7), 1 / 6, 1e-4)
        assert epsilon == pytest.approx(lost, rel=1e-5)
    summary = audit(tmp_path / "run", tmp_path / "audit")
    assert summary.claim == "estimate"
    assert summary.guarantee.status == "unproven"
    assert any("3 steps were run and declared void" in why for why in summary.guarantee.reasons)


def test_no_model_of_lost_steps_is_ever_on_disk(tmp_path, monkeypatch):
    """A crash between what resumes a run and the model of that step."""
    saved = steps.save_checkpoint

    def save(run_dir, module, step, history):
        if step == 5:
            raise CrashError
        return saved(run_dir, module, step, history)

    monkeypatch.setattr(steps, "save_checkpoint", save)
    with pytest.raises(CrashError):
        train(config(), tmp_path / "run", dataset=toy())
    assert TrainingState.read(tmp_path / "run").step == 5
    assert [load_checkpoint(path).step for path in list_checkpoints(tmp_path / "run")] == [0]
    monkeypatch.undo()
    train(config(), tmp_path / "run", dataset=toy(), resume=True)
    found = [load_checkpoint(path) for path in list_checkpoints(tmp_path / "run")]
    assert [one.step for one in found] == [0, 5, 10, 12]
    assert found[1].accountant_history == [(1.0, pytest.approx(1 / 6), 5)]
    assert failed(tmp_path / "run") == set()


@pytest.mark.slow
def test_a_run_that_stopped_beside_its_baseline_only_trains_that(tmp_path):
    plan = config(non_private_baseline=True)
    whole = train(plan, tmp_path / "whole", seed=1, dataset=toy())
    crashed(3, plan, tmp_path / "run", stage="training without DP", seed=1)
    assert read_json(tmp_path / "run" / "run.json")["status"] == "running"
    run = train(plan, tmp_path / "run", seed=1, dataset=toy(), resume=True)
    assert_same(run, whole)
    tables = [
        pd.read_parquet(tmp_path / name / "examples-non-dp.parquet") for name in ("run", "whole")
    ]
    pd.testing.assert_frame_equal(*tables)
    record = read_json(tmp_path / "run" / "run.json")
    assert (record["status"], record["guarantee"]["lost_steps"]) == ("finished", 0)
    titles = [[check.title for check in verify(open_run(tmp_path / n))] for n in ("run", "whole")]
    assert titles[0] == titles[1]  # the session without a step has no checks of its own


def changed(plan, **data):
    return replace(plan, data=DataConfig(**{"dataset": "digits"} | data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 2}, "was begun with no seed; it cannot go on with seed=2"),
        ({"dataset": toy(seed=1)}, "was trained on other data than toy as it is now"),
        (
            {"config": config(batch_size=60)},
            "other settings than this audit's: training.batch_size was 50 and is 60 now",
        ),
        (
            {"config": config(filter_epsilon=9.0), "privacy_filter": PrivacyFilter(8.0, 1.0)},
            r"training.filter_epsilon was None and is 9.0 now",
        ),
        (
            {"config": config(attacks={"gradient_canaries": 20})},
            "toy attacks its own run .* train it anew",
        ),
    ],
)
def test_what_is_not_the_run_that_was_begun_is_refused(options, message, tmp_path):
    crashed(3, config(), tmp_path / "run")
    before = (tmp_path / "run" / "journal.jsonl").read_bytes()
    given = {"config": config(), "dataset": toy()} | options
    with pytest.raises(InputError, match=message) as error:
        train(run_dir=tmp_path / "run", resume=True, **given)
    assert "\n" not in str(error.value)
    assert (tmp_path / "run" / "journal.jsonl").read_bytes() == before


def test_a_seed_must_be_that_of_the_run(tmp_path):
    crashed(3, config(), tmp_path / "run", seed=1)
    with pytest.raises(InputError, match="was begun with seed=1; it cannot go on without one"):
        train(config(), tmp_path / "run", dataset=toy(), resume=True)
    with pytest.raises(InputError, match="was begun with seed=1; it cannot go on with seed=3"):
        train(config(), tmp_path / "run", dataset=toy(), seed=3, resume=True)


def test_where_there_is_nothing_to_resume(tmp_path):
    with pytest.raises(
        InputError, match="is no run of python -m audits train; there is nothing to resume"
    ):
        train(config(), tmp_path / "none", dataset=toy(), resume=True)
    assert not (tmp_path / "none").exists()
    train(config(steps=2, epochs=None), tmp_path / "done", dataset=toy())
    with pytest.raises(InputError, match="is finished; there is nothing to resume"):
        train(config(steps=2, epochs=None), tmp_path / "done", dataset=toy(), resume=True)
    with pytest.raises(InputError, match="already holds a recorded run"):
        train(config(), tmp_path / "done", dataset=toy())
    crashed(3, config(), tmp_path / "run")
    with pytest.raises(InputError, match=r"has not ended; go on with it \(--resume\)"):
        train(config(), tmp_path / "run", dataset=toy())
    (tmp_path / "run" / RESUME).write_bytes(b"damaged")
    with pytest.raises(EvidenceError, match="is damaged, or holds more than tensors"):
        train(config(), tmp_path / "run", dataset=toy(), resume=True)
    (tmp_path / "run" / RESUME).unlink()
    with pytest.raises(InputError, match=r"no resume.state: .* train it anew"):
        train(config(), tmp_path / "run", dataset=toy(), resume=True)


def test_a_run_with_canaries_is_none_without_them(tmp_path):
    def crash(stage, done, total):
        raise CrashError

    with pytest.raises(CrashError):
        train_with_canaries(config(), tmp_path / "run", 20, dataset=toy(), progress=crash)
    with pytest.raises(InputError, match=r"other data than toy as it is now \(canaries"):
        train(config(), tmp_path / "run", dataset=toy(), resume=True)


AUDIT_FILE = """
name = "digits"
[data]
dataset = "digits"
[model]
architecture = "mlp"
hidden = [4]
[training]
steps = 4
batch_size = 300
learning_rate = 0.5
max_grad_norm = 1.0
noise_multiplier = 2.0
delta = 1e-4
[recording]
every = 2
[checkpoints]
every = 3
"""


def test_the_command_goes_on_and_refuses(tmp_path):
    path, run_dir = tmp_path / "digits.toml", tmp_path / "run"
    path.write_text(AUDIT_FILE, encoding="utf-8")
    crashed(2, AuditConfig.from_toml(path), run_dir, dataset=None)
    command = ["train", str(path), "--run-dir", str(run_dir)]

    def called(*options):
        found = CliRunner().invoke(app, [*command, *options])
        return found.exit_code, " ".join(f"{found.output} {found.exception or ''}".split())

    assert "go on with it (--resume)" in called()[1]
    assert "a run with --canaries cannot be resumed" in called("--resume", "--canaries", "20")[1]
    code, output = called("--resume")
    assert code == 0, output
    assert "4 steps" in output
    assert "it includes 3 steps that crashes may have lost" in output
    assert "is finished; there is nothing to resume" in called("--resume")[1]
