import json

import numpy as np
import pytest

import indpriv
from indpriv import EvidenceError, InputError, NormLog
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, blobs, failed, make_run
from several_ranks import (
    N,
    a_batch_is_dropped,
    differ,
    disk_is_full,
    filtered,
    half_a_shard_is_lost,
    in_small_batches,
    launch,
    one_is_killed,
    one_trains_otherwise,
    resumed,
    sharded_otherwise,
    with_expected_norms,
    without_shards,
)


@pytest.mark.parametrize("mode", ["hooks", "ghost", "per_layer", "ghost_fsdp"])
def test_norms_of_all_ranks_are_those_of_autograd(mode, tmp_path):
    first, _ = launch(with_expected_norms, tmp_path, tmp_path / "run", mode)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == len(first) == 8
    np.testing.assert_allclose(log.read(), first, rtol=1e-4)
    assert not log.caveats
    assert failed(tmp_path / "run") == set()
    checks = {check.title: check.detail for check in verify(open_run(tmp_path / "run"))}
    assert checks["ranks"].startswith("2 ranks")
    noise = read_state(tmp_path / "run").sessions[0].noise
    n_parameters = 74
    assert noise.values == 8 * (n_parameters // 2 if mode == "ghost_fsdp" else n_parameters)
    assert noise.variance == pytest.approx(1, abs=6 * np.sqrt(2 / noise.values))
    assert indpriv.account(log, delta=1e-5).claim == "exact"
    assert log.batch_norms.steps.tolist() == list(range(8))
    entries = log.batch_norms.read(0, log.n_examples)
    np.testing.assert_allclose(
        entries.norm, first[entries.step, entries.position], rtol=1e-4
    )  # so that ids are right
    assert len(entries) == read_state(tmp_path / "run").sessions[0].draws.participations > N


@pytest.mark.parametrize("mode", ["hooks", pytest.param("ghost_fsdp", marks=pytest.mark.slow)])
def test_what_only_another_rank_does_refutes(mode, tmp_path):
    launch(one_trains_otherwise, tmp_path, tmp_path / "run", mode)
    checks = {check.key: check for check in verify(open_run(tmp_path / "run"))}
    assert checks["loss"].status == checks["replay"].status == "failed"


@pytest.mark.slow
def test_one_rank_of_fsdp2_takes_norms_at_the_current_parameters(tmp_path):
    (expected,) = launch(with_expected_norms, tmp_path, tmp_path / "run", "ghost_fsdp", size=1)
    log = NormLog.open(tmp_path / "run")
    np.testing.assert_allclose(log.read(), expected, rtol=1e-4)
    assert failed(tmp_path / "run") == set()


def test_physical_batches_of_all_ranks_are_one_step(tmp_path):
    assert launch(in_small_batches, tmp_path, tmp_path / "run") == [None, None]
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 8
    assert log.caveats == ()


@pytest.mark.parametrize("mode", ["hooks", "ghost_fsdp"])
def test_levels_and_filter_hold_on_all_ranks(mode, tmp_path):
    assert launch(filtered, tmp_path, tmp_path / "run", mode) == [None, None]
    assert failed(tmp_path / "run") == set()
    log = NormLog.open(tmp_path / "run")
    assert (log.filtered.left_out_at < log.total_steps).any()
    assert (log.filtered.left_out_at == log.total_steps).any()


@pytest.mark.parametrize(
    ("moment", "steps", "records"), [("between steps", 5, 2), ("in a comparison", 5, 2)]
)
def test_a_rank_that_dies_leaves_a_log_without_its_record(moment, steps, records, tmp_path):
    error, gone = launch(one_is_killed, tmp_path, tmp_path / "run", moment)
    assert gone is None
    assert isinstance(error, EvidenceError)
    assert "another of the 2 ranks did not answer at" in str(error)
    log = NormLog.open(tmp_path / "run")
    assert (log.total_steps, log.n_records) == (steps, records)
    # Opacus counts a step before it is taken.
    assert failed(tmp_path / "run") <= {"log closed", "Opacus's accountant"}


def test_a_full_disk_of_the_first_rank_stops_all(tmp_path):
    error, other = launch(disk_is_full, tmp_path, tmp_path / "run")
    assert isinstance(error, OSError)
    assert isinstance(other, EvidenceError)
    log = NormLog.open(tmp_path / "run")
    assert (log.total_steps, log.n_records) == (6, 2)


@pytest.mark.parametrize(
    ("what", "message", "steps"),
    [
        ("seed", "at attach two of 2 ranks draw with the same seed", None),
        (
            "rounding",
            r"at attach the ranks differ in rounding \(0.01 on rank 0, 0.02 on rank 1\)",
            None,
        ),
        ("divisor", "at attach the ranks differ in", None),
        ("coins", "at attach the ranks differ in the coins of canaries", None),
        (
            "noise",
            r"at step 0 the ranks differ in noise_multiplier \(1.0 on rank 0, 0.5 on rank 1\)",
            0,
        ),
        ("epoch", "at step 0 the ranks differ in shuffle_seed", 0),
        ("reseeded", "at step 4 two of 2 ranks draw with the same seed", 4),
        ("parameters", "at the pass before step 6 the ranks differ in the model's parameters", 6),
        ("a NaN", f"NaN.*{N - 1}", 3),
        ("an end", "rank 0 at step 4, rank 1 at the end of the block", 4),
    ],
)
def test_ranks_that_do_not_train_one_model_stop_together(what, message, steps, tmp_path):
    for error in launch(differ, tmp_path, tmp_path / "run", what):
        assert isinstance(error, InputError), error
        with pytest.raises(InputError, match=message):
            raise error
    assert (tmp_path / "run").exists() == (steps is not None)
    if steps is not None:
        assert read_state(tmp_path / "run").total_steps == steps


def test_examples_of_a_rank_that_are_never_drawn_are_found(tmp_path):
    assert launch(half_a_shard_is_lost, tmp_path, tmp_path / "run") == [None, None]
    assert failed(tmp_path / "run") == {"batch sizes", "participation of each example"}
    assert indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim == "estimate"


def test_ranks_resume_together_and_in_the_same_number(tmp_path):
    first, second = launch(resumed, tmp_path, tmp_path / "run")
    assert first == second == {"step": 4, "run": first["run"]}
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 8
    assert json.loads((tmp_path / "run" / "run.json").read_text())["recorder"]["ranks"] == 2
    run = make_run(blobs(N), batch_size=60)
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        individual_clipping=True,
        every=3,
        resume_at=8,
    )
    with (
        pytest.raises(EvidenceError, match="ranks=2"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("small batches", "one is empty with probability .*take larger batches or fewer ranks"),
        ("shuffled", "with Poisson sampling"),
        ("plain DDP", "DifferentiallyPrivateDistributedDataParallel"),
        ("continue", "on_write_error='continue' with several ranks"),
    ],
)
def test_what_several_ranks_cannot_be_accounted_in_is_refused(what, message, tmp_path):
    for error in launch(without_shards, tmp_path, tmp_path / "run", what):
        with pytest.raises(InputError, match=message):
            raise error
    assert not (tmp_path / "run").exists()


def test_models_that_are_sharded_otherwise_are_refused(tmp_path):
    first, second = launch(sharded_otherwise, tmp_path, tmp_path / "run")
    assert first == second
    assert "gradients of another precision than recorded norms" in first["half precision"]
    assert "the noise would not be what the account assumes" in first["a sum over ranks"]
    assert "'2.bias' is not sharded over all 2 ranks" in first["one parameter whole"]
    assert "'0.weight' is not sharded over all 2 ranks" in first["in each rank"]
    assert not (tmp_path / "run").exists()


def test_empty_local_batches_that_the_sampler_leaves_out_are_found(tmp_path):
    assert launch(a_batch_is_dropped, tmp_path, tmp_path / "run") == [None, None]
    assert (
        read_state(tmp_path / "run").sessions[0].training.dropped_batches == 2 * 2
    )  # ranks, epochs
    assert failed(tmp_path / "run") == {"a batch for every step"}
