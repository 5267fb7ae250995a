import numpy as np
import pandas as pd
import pytest
import torch
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.uniform_sampler import (
    UniformWithReplacementSampler,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import indpriv
from indpriv import ExampleTable, NormLog
from indpriv.errors import InputError
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import MODEL
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, per_example_gradient_norms
from indpriv.recording.checkpoints.safe_files import kept_model
from indpriv.recording.training_data import TrainingData
from runs import PER_EXAMPLE, blobs, failed, make_run, mlp, record


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_norms_are_those_each_step_starts_from(mode, tmp_path):
    run = make_run(mode=mode)
    inputs, targets = run.dataset.tensors
    expected = []

    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, rounding=0
    )
    run.model.train()
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            expected.append(
                per_example_gradient_norms(
                    run.model, PER_EXAMPLE, inputs, targets, backend="functorch"
                )
            )
            run.step(*batch)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == len(expected) == 10
    np.testing.assert_allclose(log.read(), torch.stack(expected).numpy(), rtol=1e-4)
    assert log.caveats == ()
    assert failed(tmp_path / "run") == set()


def test_opacus_accountant_keeps_counting(tmp_path):
    run = make_run()
    log = record(run, tmp_path / "run")
    assert run.engine.accountant.history == [(1.0, 0.1, 20)]
    assert log.settings.sample_rate[0] == 0.1
    assert run.engine.get_epsilon(1e-5) > 0


def test_hooks_and_sampler_are_restored(tmp_path):
    run = make_run()
    hook, sampler_class = run.optimizer.step_hook, type(run.loader.batch_sampler)
    record(run, tmp_path / "run")
    assert run.optimizer.step_hook is hook
    assert type(run.loader.batch_sampler) is sampler_class
    assert not run.optimizer.original_optimizer._optimizer_step_post_hooks


def test_recording_does_not_change_training(tmp_path):
    def train(recorded):
        torch.manual_seed(2**40 + 7)
        run = make_run()
        if recorded:
            record(run, tmp_path / "run", reference_examples=4)
        else:
            run.train()
        return torch.cat([p.detach().flatten() for p in run.model.parameters()])

    assert torch.equal(train(True), train(False))


def test_batch_memory_manager_records_logical_steps(tmp_path):
    run = make_run(batch_size=40)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with (
        recorder.attach(run.model, run.optimizer, run.loader),
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer
        ) as small,
    ):
        run.train(3, small)
    log = NormLog.open(tmp_path / "run")
    assert log.total_steps == 9
    assert log.recorded_steps.tolist() == list(range(9))
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("workers", [0, 2])
def test_empty_batches_are_steps(workers, tmp_path):
    dataset = blobs(30)
    run = make_run(dataset, batch_size=1, workers=workers)  # about a third of the batches are empty
    torch.manual_seed(2**40 + 1)
    log = record(run, tmp_path / "run", epochs=2, every=10)
    assert log.total_steps == 60
    assert failed(tmp_path / "run") == set()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loop_that_skips_empty_batches_is_an_estimate(workers, tmp_path):
    run = make_run(blobs(30), batch_size=1, workers=workers)
    torch.manual_seed(2**40 + 1)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=10)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(2):
            for inputs, targets in run.loader:
                if len(inputs):
                    run.step(inputs, targets)
    assert "a batch for every step" in failed(tmp_path / "run")
    assert any("never became a step" in caveat for caveat in NormLog.open(tmp_path / "run").caveats)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_early_break_is_no_fault(workers, tmp_path):
    run = make_run(workers=workers)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=2)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(3):
            for i, (inputs, targets) in enumerate(run.loader):
                if i == 4:
                    break
                run.step(inputs, targets)
    assert NormLog.open(tmp_path / "run").total_steps == 12
    assert failed(tmp_path / "run") == set()


def test_steps_on_another_loader_are_found(tmp_path):
    run = make_run()
    other = DataLoader(run.dataset, batch_size=12)
    record(run, tmp_path / "run", loader=other)
    assert "a batch for every step" in failed(tmp_path / "run")


def test_noise_scheduler_settings_are_those_of_each_step(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=4)
    sigmas = []
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            sigmas.append(run.optimizer.noise_multiplier)
            run.step(*batch)
            run.optimizer.noise_multiplier *= 1.1
            run.optimizer.max_grad_norm *= 0.9
    log = NormLog.open(tmp_path / "run")
    np.testing.assert_allclose(log.settings.noise_multiplier, sigmas)
    np.testing.assert_allclose(log.settings.max_grad_norm, 0.9 ** np.arange(10))
    assert failed(tmp_path / "run") == set()


def test_reference_examples_have_a_row_for_every_step(tmp_path):
    log = record(make_run(), tmp_path / "run", every=7, reference_examples=15)
    exact = log.reference_examples()
    assert exact.recorded_steps.tolist() == list(range(20))
    assert np.array_equal(exact.read()[::7], log.take(log.reference_positions).read())


def test_example_table_holds_losses_of_the_final_model(tmp_path):
    run = make_run()
    test_set = blobs(20)
    metadata = pd.DataFrame({"site": [f"s{i % 3}" for i in range(120)]})
    test_metadata = pd.DataFrame({"site": ["s1"] * 20})
    record(run, tmp_path / "run", test_set=test_set, metadata=metadata, test_metadata=test_metadata)
    table = ExampleTable.from_parquet(tmp_path / "run" / "examples.parquet")
    run.model.eval()
    with torch.no_grad():
        outputs = run.model._module(run.dataset.tensors[0])
    np.testing.assert_allclose(
        table.train["loss"], PER_EXAMPLE(outputs.double(), run.dataset.tensors[1]), rtol=1e-5
    )
    assert table.train["correct"].tolist() == (outputs.argmax(1) == run.dataset.tensors[1]).tolist()
    assert table.train["site"].tolist() == metadata["site"].tolist()
    assert len(table.test) == 20


def test_losses_of_sure_predictions_do_not_tie_at_0(tmp_path):
    gaps = torch.linspace(18.0, 28.0, 5)  # of logits: float32 rounds the loss of each to 0
    outputs, targets = torch.stack([gaps, 0 * gaps], dim=1), torch.zeros(5, dtype=torch.long)
    assert (PER_EXAMPLE(outputs, targets) == 0).all()
    data = TrainingData(TensorDataset(outputs, targets), PER_EXAMPLE)
    table = data.example_table(nn.Identity(), *data.examples(None, torch.device("cpu")))
    np.testing.assert_allclose(
        table.train["loss"], np.log1p(np.exp(-gaps.double().numpy())), rtol=1e-3
    )
    weighted = nn.CrossEntropyLoss(weight=torch.ones(2), reduction="none")  # takes float32 only
    data = TrainingData(TensorDataset(outputs, targets), weighted)
    table = data.example_table(nn.Identity(), *data.examples(None, torch.device("cpu")))
    assert (table.train["loss"] == 0).all()


def test_everything_sensitive_is_private(tmp_path):
    record(make_run(), tmp_path / "run", reference_examples=2)
    for path in (tmp_path / "run").rglob("*.*"):
        assert path.stat().st_mode & 0o077 == 0, path


def test_a_seeded_run_says_so(tmp_path):
    assert record(make_run(), tmp_path / "run", seeded=True).caveats == (SEEDED,)


@pytest.mark.parametrize(
    ("reseed", "generator", "told"),
    [
        (lambda: torch.manual_seed(0), None, True),
        (lambda: torch.manual_seed(20261121), None, True),
        (lambda: torch.seed(), None, False),
        (lambda: torch.seed(), torch.Generator(), True),  # unseeded, it has torch's default seed
        (
            lambda: torch.manual_seed(0),
            torch.Generator().manual_seed(2**40),
            True,
        ),  # noise; the coins have the small one
    ],
)
def test_a_seed_that_can_be_guessed_is_told(reseed, generator, told, tmp_path):
    run = make_run(noise_generator=generator)
    reseed()
    record(run, tmp_path / "run", epochs=1)
    seeds = [check for check in verify(open_run(tmp_path / "run")) if check.key == "seeds"]
    assert [check.status for check in seeds] == ["failed" if told else "not checked"]


@pytest.mark.parametrize(
    ("reseed", "found", "repeats"),
    [
        # For pictures of each epoch, say.
        (lambda _: torch.manual_seed(2**40 + 77), {"seeds", "random numbers"}, True),
        (lambda epoch: torch.manual_seed(2**40 + epoch), {"seeds"}, False),
        (lambda _: None, set(), False),
    ],
)
def test_random_numbers_that_come_again_are_found(reseed, found, repeats, tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for epoch in range(3):
            reseed(epoch)
            run.train(1)
    # Noise that comes again is seen in the sum of all noise too, but not in every run of a few steps.
    may_fail = found | {"noise"} if repeats else found
    assert found <= failed(tmp_path / "run") <= may_fail
    log = NormLog.open(tmp_path / "run")
    assert indpriv.account(log, delta=1e-5).claim == ("estimate" if found else "exact")
    assert read_state(tmp_path / "run").sessions[-1].training.repeated_draws == (
        40 if repeats else 0
    )  # batches and noise


@pytest.mark.parametrize(("seed", "repeats"), [(2**40, True), (2**41, False)])
def test_a_resumed_run_that_is_seeded_as_before_is_found(seed, repeats, tmp_path):
    for number, options in ((2**40, {}), (seed, {"resume_at": 10})):
        run = make_run()
        torch.manual_seed(2**40 + number)
        record(run, tmp_path / "run", epochs=1, **options)
    assert ("random numbers" in failed(tmp_path / "run")) == repeats


def test_shuffled_batches_are_an_estimate(tmp_path):
    run = make_run(poisson_sampling=False)
    log = record(run, tmp_path / "run")
    assert log.sampler == "sequential"
    assert any("not from Poisson sampling" in caveat for caveat in log.caveats)


def test_weighted_sampling_without_poisson_is_an_estimate(tmp_path):
    dataset = blobs()
    weighted = DataLoader(
        dataset, batch_size=12, sampler=WeightedRandomSampler([1.0] * 119 + [50.0], 120)
    )
    run = make_run(dataset, data_loader=weighted, poisson_sampling=False)
    assert record(run, tmp_path / "run").sampler == "other"


def test_a_poisson_sampler_that_prefers_some_examples_is_found(tmp_path, monkeypatch):
    run = make_run()
    plain = UniformWithReplacementSampler.__iter__

    def greedy(self):
        for indices in plain(self):
            yield sorted({*indices, 5})

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", greedy)
    record(run, tmp_path / "run", epochs=3)
    assert failed(tmp_path / "run") == {"participation of each example"}


def test_a_poisson_sampler_that_shuffles_instead_is_found(tmp_path, monkeypatch):
    def shuffled(self):  # every example once an epoch
        order = torch.randperm(self.num_samples).tolist()
        size = self.num_samples // self.steps
        yield from (order[start : start + size] for start in range(0, self.num_samples, size))

    monkeypatch.setattr(UniformWithReplacementSampler, "__iter__", shuffled)
    record(make_run(), tmp_path / "run", epochs=3)
    assert failed(tmp_path / "run") == {"participation of each example"}


def test_a_subclass_of_the_poisson_sampler_may_draw_otherwise(tmp_path):
    run = make_run()
    run.loader.batch_sampler.__class__ = type("Mine", (UniformWithReplacementSampler,), {})
    assert record(run, tmp_path / "run").sampler == "other"


def test_the_final_model_is_kept_on_request_and_sealed(tmp_path):
    run = make_run()
    record(run, tmp_path / "run", keep_model=True)
    again = mlp()
    assert kept_model(tmp_path / "run", again)
    trained = dict(run.model._module.state_dict())
    assert all(torch.equal(value, trained[name]) for name, value in again.state_dict().items())
    assert (tmp_path / "run" / MODEL).stat().st_mode & 0o777 == 0o600
    assert MODEL in read_state(tmp_path / "run").beside
    with pytest.raises(InputError, match=r"final/parameters.safetensors"):
        kept_model(tmp_path / "run", mlp(7))
    record(make_run(), tmp_path / "other")
    assert not kept_model(tmp_path / "other", again)
