"""Bad input: one clear error, before anything is trained."""

import pandas as pd
import pytest
import torch
from opacus import grad_sample
from opacus.utils.adaptive_clipping.adaptive_clipping_utils import PrivacyEngineAdaptiveClipping
from opacus.utils.uniform_sampler import (
    DistributedUniformWithReplacementSampler,
)
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from indpriv import EvidenceError, ExampleTable, InputError, NormLog, RoundRecorder
from indpriv.norm_log.journal_state import read_state
from indpriv.recording import Recorder
from recording.loops.parts import Views, view_losses
from runs import PER_EXAMPLE, blobs, make_run, mlp, record


def test_nan_example_stops_with_its_id_before_the_model_is_lost(tmp_path):
    dataset = blobs()
    dataset.tensors[0][17] = float("nan")
    run = make_run(dataset)
    with pytest.raises(InputError, match=r"NaN gradient norms for 1 examples, e.g. ids \[17\]"):
        record(run, tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in run.model.parameters())


def test_a_replaced_step_hook_is_found_at_the_first_step(tmp_path):
    run = make_run()
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=3)
    with (
        pytest.raises(EvidenceError, match="step hook did not run"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
        run.optimizer.attach_step_hook(lambda optimizer: None)
        run.train(1)
    assert read_state(tmp_path / "run").total_steps == 10  # nothing that was recorded is lost
    assert not read_state(tmp_path / "run").closed


def test_an_optimizer_without_the_accountants_hook_is_refused(tmp_path):
    run = make_run()
    run.optimizer.step_hook = None
    with pytest.raises(InputError, match="would report epsilon 0"):
        record(run, tmp_path / "run")


def test_hooks_on_parts_of_the_model_are_refused(tmp_path):
    if not hasattr(grad_sample, "GradSampleHooks"):
        pytest.skip("from Opacus 1.6 on")
    run = make_run()
    run.model.remove_hooks()
    run.model = run.model._module
    parts = [grad_sample.GradSampleHooks(run.model[place]) for place in (0, 2)]
    with pytest.raises(InputError, match="several hooks of Opacus's take gradients"):
        record(run, tmp_path / "run")
    assert len(parts) == 2


def test_a_plain_optimizer_is_refused(tmp_path):
    run = make_run()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    with pytest.raises(InputError, match="not an Opacus DPOptimizer"):
        record(run, tmp_path / "run")


ADAPTIVE = {
    "target_unclipped_quantile": 0.5,
    "clipbound_learning_rate": 0.2,
    "max_clipbound": 10.0,
    "min_clipbound": 0.1,
    "unclipped_num_std": 5.0,
}


def test_adaptive_clipping_in_hooks_mode_is_refused(tmp_path):
    run = make_run(clipping="adaptive", max_grad_norm=1.0, **ADAPTIVE)
    with pytest.raises(InputError, match="adaptive clipping is not supported"):
        record(run, tmp_path / "run")


def test_adaptive_clipping_is_refused_at_its_first_step(tmp_path):
    dataset, model = blobs(), mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer, criterion, loader = PrivacyEngineAdaptiveClipping().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(dataset, batch_size=40),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        criterion=nn.CrossEntropyLoss(),
        grad_sample_mode="ghost",
    )
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE)
    with (
        pytest.raises(InputError, match="adaptive clipping is not supported"),
        recorder.attach(model, optimizer, loader),
    ):
        for inputs, targets in loader:
            optimizer.zero_grad()
            criterion(model(inputs), targets).backward()
            optimizer.step()


def test_the_sampler_of_a_shard_with_the_optimizer_of_one_process_is_refused(tmp_path):
    run = make_run()
    run.loader.batch_sampler.__class__ = DistributedUniformWithReplacementSampler
    with pytest.raises(
        InputError, match="each draws from its own shard and gradients are added up"
    ):
        record(run, tmp_path / "run")


def test_no_noise_is_refused(tmp_path):
    run = make_run(noise_multiplier=0.0)
    with pytest.raises(InputError, match=r"noise_multiplier=0\.0"):
        record(run, tmp_path / "run")


def test_different_clipping_norms_of_model_and_optimizer_are_refused(tmp_path):
    run = make_run(mode="ghost")
    run.optimizer.max_grad_norm = 0.5
    with pytest.raises(InputError, match="in ghost mode set both"):
        record(run, tmp_path / "run")


def test_an_accountant_that_counts_too_small_a_rate_is_refused(tmp_path):
    run = make_run()
    run.loader.batch_sampler.sample_rate = 0.2
    with pytest.raises(InputError, match="the accountant's epsilon is too small"):
        record(run, tmp_path / "run")


def test_another_data_set_than_the_loaders_is_refused(tmp_path):
    run = make_run()
    run.dataset = blobs(121)
    with pytest.raises(InputError, match="has 121 examples, the loader's data set has 120"):
        record(run, tmp_path / "run")


def test_an_empty_data_set_is_refused(tmp_path):
    with pytest.raises(InputError, match="no examples"):
        Recorder(tmp_path / "run", dataset=blobs(0), loss_fn=PER_EXAMPLE)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(())


def test_a_data_set_without_length_is_refused(tmp_path):
    with pytest.raises(InputError, match="has no length"):
        Recorder(tmp_path / "run", dataset=Stream(), loss_fn=PER_EXAMPLE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every=0"),
        ({"every": "week"}, "every='week'"),
        ({"policy": "epoch"}, "policy='epoch' is no RecordingPolicy"),
        ({"test_metadata": pd.DataFrame({"a": [1]})}, "test_metadata is given without test_set"),
        ({"reference_examples": 121}, "reference_examples=121 is more"),
        (
            {"metadata": pd.DataFrame({"a": range(3)})},
            r"metadata lacks 117 of 120.*reset_index\(drop=True\)",
        ),
        ({"metadata": pd.DataFrame({"loss": range(120)})}, "may not have the columns loss"),
        ({"metadata": pd.DataFrame({"a": range(120)}, index=[0] * 120)}, "duplicated index"),
        (
            {"metadata": pd.DataFrame({"a": ["x", *range(119)]})},
            "metadata cannot be stored .*column a",
        ),
        (
            {"metadata": pd.DataFrame([[1, 2]] * 120, columns=["a", "a"])},
            "metadata cannot be stored .*Duplicate",
        ),
        (
            {"metadata": pd.DataFrame({"a": [[1]] * 120})},
            "metadata cannot be stored .a holds lists or tables",
        ),
        ({"upload_to": "s3://a/b", "bucket_is_private": "no"}, "pass bucket_is_private=True"),
        ({"metadata": pd.Series(range(120))}, "metadata of the train examples is a Series"),
        (
            {"metadata": pd.DataFrame({"age": range(150)})},
            "metadata has 150 rows for 120 train examples, which are numbered 0 to 119",
        ),
        ({"example_ids": [1] * 120}, "119 duplicates"),
        ({"unit_ids": [1]}, "unit_ids has shape"),
        ({"unit": "client"}, 'unit="client" needs unit ids'),
        ({"rounding": 7}, "rounding=7"),
        ({"resume_at": 3}, "holds no journal"),
    ],
)
def test_bad_options_are_refused_before_training(options, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": True}, "run.start=True is not right: it should be a valid string"),
        ({"seeded": "no"}, "run.seeded='no' is not right: it should be a valid boolean"),
        ({"individual_clipping": "no"}, "individually_clipped='no' is not right"),
    ],
)
def test_what_no_log_could_be_read_with_is_refused_before_training(options, message, tmp_path):
    """A log that cannot be read again would be found out after the training that it is of."""
    run = make_run()
    steps = []
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, **options)
    with (
        pytest.raises(InputError, match=message),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        steps.append(1)
    assert not steps
    assert not (tmp_path / "run/journal.jsonl").exists()


def test_metadata_of_training_and_test_examples_must_fit_together(tmp_path):
    ages, texts = pd.DataFrame({"age": range(120)}), pd.DataFrame({"age": ["40 to 49"] * 120})
    with pytest.raises(InputError, match="the same for training and test examples"):
        Recorder(
            tmp_path / "run",
            dataset=blobs(),
            loss_fn=PER_EXAMPLE,
            test_set=blobs(),
            metadata=ages,
            test_metadata=texts,
        )


def test_metadata_of_examples_with_ids_may_hold_further_rows(tmp_path):
    ids = [f"p{number}" for number in range(120)]
    ages = pd.DataFrame({"age": range(150)}, index=[f"p{149 - number}" for number in range(150)])
    record(make_run(), tmp_path / "run", example_ids=ids, metadata=ages)
    table = ExampleTable.from_parquet(tmp_path / "run/examples.parquet")
    assert table.train["age"].tolist() == list(range(149, 29, -1))


@pytest.mark.parametrize("name", ["unit_ids", "example_ids"])
def test_ids_that_are_texts_stand_beside_numbered_test_examples(name, tmp_path):
    ids = [f"p{number}" for number in range(120)]
    record(make_run(), tmp_path / "run", test_set=blobs(), **{name: ids})
    table = ExampleTable.from_parquet(tmp_path / "run/examples.parquet")
    assert table.train[name[:-1]].tolist() == ids
    assert table.test[name[:-1]].tolist() == [str(number) for number in range(120)]
    assert table.aligned(NormLog.open(tmp_path / "run").example_ids)["loss"].notna().all()


def test_a_run_directory_holds_one_run(tmp_path):
    record(make_run(), tmp_path / "run")
    with pytest.raises(InputError, match="already holds a recorded run"):
        record(make_run(), tmp_path / "run")


class Changeable(Dataset):
    """Changes under the recorder's feet, as a data set that is cached or filtered lazily does."""

    def __init__(self):
        self.inputs, self.targets = blobs().tensors

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


def test_a_data_set_that_changes_its_order_is_found(tmp_path):
    dataset = Changeable()
    run = make_run(dataset)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE, every=3)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(1)
        order = torch.randperm(120, generator=torch.Generator().manual_seed(0))
        dataset.inputs, dataset.targets = dataset.inputs[order], dataset.targets[order]
        run.train(1)
    with pytest.raises(EvidenceError, match="changed its order or its labels between records"):
        NormLog.open(tmp_path / "run")


def test_a_data_set_that_shrinks_is_found(tmp_path):
    dataset = Changeable()
    run = make_run(dataset)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE, every=10)
    with (
        pytest.raises(InputError, match="has 119 examples now and had 120"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for i, batch in enumerate(run.loader):
            run.step(*batch)
            if i == 8:
                dataset.inputs, dataset.targets = dataset.inputs[:119], dataset.targets[:119]


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_views_of_an_example_are_refused_with_what_to_do(mode, tmp_path):
    views = TensorDataset(torch.randn(120, 3, 6), blobs().tensors[1])
    run = make_run(views, Views(mlp()), mode=mode)
    with pytest.raises(InputError, match=r"3 views of each example, average.*Recorder\(views=3\)"):
        Recorder(tmp_path / "run", dataset=views, loss_fn=view_losses).attach(
            run.model, run.optimizer, run.loader
        ).__enter__()


@pytest.mark.parametrize(
    ("run_info", "said"),
    [
        ({"delta": "1e-5"}, "run_info: delta='1e-5' is not right: it should be a valid number"),
        ({"groups": "sex"}, "run_info: groups='sex' is not right: it should be a valid list"),
        ({"config": pd.DataFrame({"a": [1]})}, "run_info cannot be written as JSON: .*DataFrame"),
        ({"rate": float("nan")}, "run_info cannot be written as JSON"),
        ({"delta": 0}, r"run_info: delta=0\.0 is not in \(0, 1\)"),
        ({"training": {"delta": 1}}, r"run_info: delta=1\.0 is not in \(0, 1\)"),
        ({"account": {"delta": 2.5}}, r"run_info: delta=2\.5 is not in \(0, 1\)"),
        ({"participation": "maybe"}, "run_info: participation='maybe' is not known"),
        ({"account": {"accountant": "prv"}}, "run_info: accountant='prv' is not known"),
        ({"account": {"neighbouring": "swap"}}, "run_info: neighbouring='swap' is not known"),
        ({"account": {"deltas": 1e-5}}, "^run_info: account has the key 'deltas'"),
        (
            {"noise_multiplier": 0},
            r"run_info: noise_multiplier=0\.0 is not a finite number above 0",
        ),
        (
            {"training": {"sample_rate": [0.1, 2]}},
            r"run_info: sample_rate=2\.0 at step 1 is not in",
        ),
        ({"max_grad_norm": -1}, r"run_info: max_grad_norm=-1\.0 is not a finite number above 0"),
    ],
)
def test_what_run_json_cannot_hold_is_refused_before_training(run_info, said, tmp_path):
    with pytest.raises(InputError, match=said):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, run_info=run_info)
    with pytest.raises(InputError, match=said):
        RoundRecorder(tmp_path / "rounds", ["a"], sampler="poisson", run_info=run_info)
    assert not list(tmp_path.iterdir())


def test_a_data_frame_is_no_data_set(tmp_path):
    people = pd.DataFrame({"age": [1.0], "label": [0]})
    with pytest.raises(
        InputError, match=r"dataset is a DataFrame, .* pass the data set that the D"
    ):
        Recorder(tmp_path / "run", dataset=people, loss_fn=PER_EXAMPLE)


@pytest.mark.parametrize("below", [".", "runs/mine"])
def test_a_file_in_the_place_of_the_run_is_named(below, tmp_path):
    file = tmp_path / "people.csv"
    file.touch()
    with pytest.raises(InputError, match=r"people\.csv is a file, where a directory is needed"):
        Recorder(file / below, dataset=blobs(), loss_fn=PER_EXAMPLE)
