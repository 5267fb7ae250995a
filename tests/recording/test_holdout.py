import numpy as np
import pytest
from torch.utils.data import DataLoader, Subset

import indpriv
from indpriv.audit import audit
from indpriv.errors import InputError
from indpriv.recording import Recorder, TruncatedPoissonSampler
from runs import PER_EXAMPLE, blobs, make_run, record


def recorded(run_dir, run, **options):
    test_set = Subset(run.dataset, range(50))
    record(run, run_dir, 1, test_set=test_set, record_holdout=True, **options)


def test_the_holdout_has_the_norms_it_would_have_had(tmp_path):
    """The hold-out here is the first fifty training examples, so both logs must agree on them."""
    recorded(tmp_path / "run", make_run(), reference_examples=5, batch_norms=True)
    log, holdout = (
        indpriv.NormLog.open(tmp_path / "run"),
        indpriv.NormLog.open(tmp_path / "run" / "holdout"),
    )
    assert np.array_equal(log.recorded_steps, holdout.recorded_steps)
    assert np.array_equal(log.read()[:, :50], holdout.read())
    assert (holdout.total_steps, holdout.n_examples, holdout.reference_positions) == (
        log.total_steps,
        50,
        None,
    )
    table = indpriv.account(holdout, delta=1e-5)
    assert table.worst_case_epsilon == indpriv.account(log, delta=1e-5).worst_case_epsilon


def test_the_batches_of_a_holdout_are_those_of_training(tmp_path):
    """Of 50 test examples none would ever be left out by a cap that 120 reach in some steps."""
    data = blobs()
    sampler = TruncatedPoissonSampler(num_samples=len(data), sample_rate=0.1, max_batch_size=20)
    loader = DataLoader(data, batch_sampler=sampler)
    recorded(tmp_path / "run", make_run(data, data_loader=loader, poisson_sampling=False))
    log, holdout = map(indpriv.NormLog.open, (tmp_path / "run", tmp_path / "run" / "holdout"))
    assert holdout.truncation == log.truncation
    worst = [indpriv.account(one, delta=1e-5).worst_case_epsilon for one in (log, holdout)]
    assert worst[0] == worst[1]


def test_an_interrupted_holdout_goes_on(tmp_path):
    recorded(tmp_path / "run", make_run())
    recorded(tmp_path / "run", make_run(), resume_at=6)
    holdout = indpriv.NormLog.open(tmp_path / "run" / "holdout")
    assert holdout.total_steps == indpriv.NormLog.open(tmp_path / "run").total_steps == 16
    assert holdout.recorded_steps.tolist() == [0, 3, 6, 9, 12, 15]


def test_training_examples_that_are_named_do_not_lose_the_holdout(tmp_path):
    recorded(tmp_path / "run", make_run(), example_ids=[f"note {number}" for number in range(120)])
    found = audit(tmp_path / "run", tmp_path / "audit", delta=1e-3).attack_by_epsilon
    for _, part in found.groupby("target_fpr"):
        assert part["n_others"].sum() == 25  # a random half chose the threshold


def test_there_must_be_a_holdout(tmp_path):
    with pytest.raises(InputError, match="record_holdout=True without a test_set"):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, record_holdout=True)
