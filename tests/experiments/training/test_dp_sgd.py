import json
import os
import signal
import stat
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from opacus.accountants import RDPAccountant
from torch import nn

import indpriv
from audits.training import dp_sgd
from audits.training.config import AttackConfig, AuditConfig, DataConfig
from audits.training.config.schedules import Schedule
from audits.training.datasets.base import Dataset, Split
from audits.training.dp_sgd import train
from audits.training.models import build_model
from audits.training.private_setting import make_private
from audits.training.randomness import Randomness
from audits.training.step_plan import worst_case_epsilon
from audits.training.steps import take_steps
from indpriv._files import read_json, sha256
from indpriv.audit import audit
from indpriv.audit.attacks import white_box_of_run
from indpriv.audit.gate import judge
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog, open_run
from indpriv.norm_log.run_files import MODEL_NON_DP
from indpriv.norm_log.verify import verify
from indpriv.recording.checkpoints.safe_files import read_content, state_of
from indpriv.recording.checkpoints.saved_models import discover

DELTA = 1e-4
SCHEDULE = {"law": "linear", "start": 1.0, "end": 0.5}


def config(architecture="mlp", recording=None, checkpoints=5, **training):
    model = {"architecture": architecture} | ({"hidden": [8]} if architecture == "mlp" else {})
    settings = {
        "epochs": 2,
        "batch_size": 50,
        "learning_rate": 0.5,
        "momentum": 0.9,
        "max_grad_norm": 1.0,
        "delta": DELTA,
        "noise_multiplier": 1.0,
    }
    if "target_epsilon" in training:
        del settings["noise_multiplier"]
    return AuditConfig.from_dict(
        {
            "name": "toy",
            "data": {"dataset": "digits"},
            "model": model,
            "training": settings | training,
            "recording": {"every": 1, "rounding": 0} | (recording or {}),
            "checkpoints": {"every": checkpoints},
        }
    )


def toy(n=300, n_test=60, shape=(6,), n_classes=3):
    """Classes that differ in their mean."""
    generator = np.random.default_rng(0)
    splits = []
    for size in (n, n_test):
        targets = np.arange(size) % n_classes
        inputs = generator.normal(size=(size, *shape)) + 1.5 * targets.reshape(
            -1, *(1 for _ in shape)
        )
        splits.append(Split(inputs.astype(np.float32), targets.astype(np.int64)))
    trusted = {"duplicates": "there are none"}
    return Dataset("toy", *splits, tuple("abc"[:n_classes]), "none", "made here", on_trust=trusted)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Twelve unseeded steps, every one recorded without rounding, and the non-private baseline."""
    run_dir = tmp_path_factory.mktemp("runs") / "toy"
    seen = []
    with dp_sgd.quiet_opacus():
        run = train(
            config(target_epsilon=4.0, non_private_baseline=True),
            run_dir,
            dataset=toy(),
            progress=lambda *args: seen.append(args),
        )
    assert [done for stage, done, total in seen if stage == "training"] == list(range(1, 13))
    assert {total for _, _, total in seen} == {12}
    assert run.steps == 12
    return run_dir


def test_nothing_speaks_against_an_unseeded_run(run_dir):
    assert [
        (check.title, check.detail)
        for check in verify(open_run(run_dir))
        if check.status != "passed"
    ] == [("seeds", "its state is from the operating system")]


def test_the_log_holds_every_step_of_the_run(run_dir):
    log = indpriv.NormLog.open(run_dir)
    assert (log.total_steps, log.n_records, log.n_examples, log.sampler) == (12, 12, 300, "poisson")
    assert np.all(log.settings.sample_rate == 1 / 6)
    assert np.all(log.settings.max_grad_norm == 1.0)
    noise_multiplier = read_json(run_dir / "run.json")["training"]["noise_multiplier"]
    assert np.all(log.settings.noise_multiplier == noise_multiplier)


def test_a_record_holds_the_norms_of_the_checkpoint_of_its_step(run_dir):
    """The reference implementation: one backward pass per example, at the parameters that the step starts from."""
    rows, dataset = indpriv.NormLog.open(run_dir).read(), toy()
    for saved in discover(run_dir).models[:-1]:
        model = build_model(config().model, (6,), 3)
        model.load_state_dict(state_of(read_content(saved.path)))
        model.double()
        for example in (0, 7, 299):
            model.zero_grad()
            inputs = torch.from_numpy(dataset.train.inputs[[example]]).double()
            nn.functional.cross_entropy(
                model(inputs), torch.from_numpy(dataset.train.targets[[example]])
            ).backward()
            norm = float(sum(p.grad.square().sum() for p in model.parameters()).sqrt())
            assert rows[saved.step, example] == pytest.approx(
                norm, rel=1e-3
            )  # training computes in float32


def test_checkpoints_lie_at_the_start_every_k_steps_and_the_end(run_dir):
    models = discover(run_dir).models
    assert [saved.step for saved in models] == [0, 5, 10, 12]
    for saved in models:
        content = torch.load(saved.path, weights_only=True)
        assert sum(count for _, _, count in content["accountant_history"]) == content["step"]


def test_the_guarantee_is_opacus_own_and_within_the_target(run_dir):
    record = read_json(run_dir / "run.json")
    guarantee = record["guarantee"]
    accountant = RDPAccountant()
    accountant.history = [(record["training"]["noise_multiplier"], 1 / 6, 12)]
    with dp_sgd.quiet_opacus():
        assert guarantee["epsilon"] == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert 4.0 - 2e-3 <= guarantee["epsilon"] <= 4.0
    assert {key: guarantee[key] for key in ("claim", "delta", "unit", "sampler")} == {
        "claim": "worst_case",
        "delta": DELTA,
        "unit": "example",
        "sampler": "poisson",
    }
    table = indpriv.account(indpriv.NormLog.open(run_dir), delta=DELTA)
    assert table.claim == "exact"
    # Our orders are not those of Opacus
    assert np.all(table.epsilon <= guarantee["epsilon"] * (1 + 5e-4))
    assert table.epsilon.min() < guarantee["epsilon"]


def test_the_record_says_what_was_done_and_what_is_on_trust(run_dir):
    record = read_json(run_dir / "run.json")
    assert record["status"] == "finished"
    assert record["steps"] == record["training"]["planned_steps"] == 12
    assert record["seeded"] is False
    assert record["label"] is None
    assert record["training"]["secure_mode"] is False
    assert AuditConfig.from_dict(record["config"]) == config(
        target_epsilon=4.0, non_private_baseline=True
    )
    assert record["model"]["parameters"] == 6 * 8 + 8 + 8 * 3 + 3
    assert record["data"]["fingerprint"] == toy().fingerprint()
    assert {"random generator", "duplicates", "tuning", "preprocessing"} <= set(record["on_trust"])
    assert record["on_trust"]["duplicates"] == "there are none"  # the data set's own words
    assert "recorder" in record  # the Recorder's own part is kept
    assert record["wall_seconds"] > 0


def test_example_tables_of_the_run_and_its_baseline(run_dir):
    table = indpriv.ExampleTable.from_parquet(run_dir / "examples.parquet")
    assert (len(table.train), len(table.test)) == (300, 60)
    final = build_model(config().model, (6,), 3)
    final.load_state_dict(state_of(read_content(discover(run_dir).models[-1].path)))
    losses = nn.functional.cross_entropy(
        final(torch.from_numpy(toy().test.inputs)),
        torch.from_numpy(toy().test.targets),
        reduction="none",
    )
    np.testing.assert_allclose(table.test["loss"], losses.detach().numpy(), rtol=1e-4, atol=1e-6)
    assert read_json(run_dir / "run.json")["test_accuracy"] == pytest.approx(
        table.test["correct"].mean()
    )
    baseline = indpriv.ExampleTable.from_parquet(run_dir / "examples-non-dp.parquet")
    assert (len(baseline.train), len(baseline.test)) == (300, 60)
    assert not np.allclose(baseline.train["loss"], table.train["loss"])


def test_what_is_sensitive_is_private(run_dir):
    for name in (
        "run.json",
        "examples.parquet",
        "examples-non-dp.parquet",
        "checkpoints/step-000012.pt",
    ):
        assert stat.S_IMODE((run_dir / name).stat().st_mode) == 0o600


def final_parameters(run_dir, seed=3, **changes):
    run = train(config(recording={"every": "epoch"}, **changes), run_dir, dataset=toy(), seed=seed)
    return torch.cat([p.detach().ravel() for p in run.module.parameters()])


def test_a_seeded_run_repeats_and_is_labelled_void(tmp_path):
    one, same, other = (
        final_parameters(tmp_path / name, seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    record = read_json(tmp_path / "a" / "run.json")
    assert record["seeded"] is True
    assert record["label"] == "reproducible: no privacy"
    assert record["guarantee"]["claim"] == "none (reproducible: no privacy)"
    assert any("no privacy" in caveat for caveat in indpriv.NormLog.open(tmp_path / "a").caveats)
    assert '"seed":' not in json.dumps(record)  # the seed itself is told to nobody
    logs = [indpriv.NormLog.open(tmp_path / name).read() for name in "ab"]
    np.testing.assert_array_equal(*logs)


def test_an_unseeded_run_does_not_repeat_though_torch_was_seeded(tmp_path):
    runs = []
    for name in "ab":
        torch.manual_seed(0)
        runs.append(final_parameters(tmp_path / name, seed=None))
    assert not torch.allclose(*runs, atol=1e-3)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"grad_sample_mode": "ghost"}, marks=pytest.mark.slow),
        pytest.param({"max_physical_batch_size": 7}, marks=pytest.mark.slow),
        {"grad_sample_mode": "ghost", "max_physical_batch_size": 7},
    ],
)
def test_faster_and_smaller_ways_train_the_same_model(tmp_path, changes):
    plain, other = (
        final_parameters(tmp_path / "plain"),
        final_parameters(tmp_path / "other", **changes),
    )
    torch.testing.assert_close(plain, other, rtol=1e-3, atol=1e-4)
    log = indpriv.NormLog.open(tmp_path / "other")
    assert (log.total_steps, log.recorded_steps.tolist()) == (12, [0, 6])


def test_noise_has_the_stated_size(tmp_path, monkeypatch):
    """Two runs of one step that differ in their noise only: their difference is that noise, twice."""
    parameters = []
    for noise in (1, 2):
        monkeypatch.setattr(
            Randomness,
            "from_seed",
            lambda seed, noise=noise: Randomness(5, 6, noise, 7, 8, 9, 10, seeded=False),
        )
        run = train(
            config(
                epochs=1, batch_size=300, noise_multiplier=3.0, max_grad_norm=0.2, learning_rate=2.0
            ),
            tmp_path / str(noise),
            dataset=toy(n_test=5, shape=(60,)),
        )
        assert run.steps == 1
        parameters.append(torch.cat([p.detach().ravel() for p in run.module.parameters()]))
    difference = (parameters[0] - parameters[1]).numpy()
    expected = 2**0.5 * 2.0 * 3.0 * 0.2 / 300  # lr * noise_multiplier * max_grad_norm / batch
    assert len(difference) == 515  # so the standard error of the ratio is 3 %
    assert np.std(difference) / expected == pytest.approx(1, abs=0.15)


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_individual_clipping_makes_rare_records_exact(mode, tmp_path):
    settings = config(
        individual_clipping=True,
        clip_headroom=0.05,
        grad_sample_mode=mode,
        max_physical_batch_size=20,
        recording={"every": 1, "growth": 2.0, "longest": "epoch", "rounding": 0.25},
    )
    run = train(settings, tmp_path / "r", dataset=toy())
    log = indpriv.NormLog.open(tmp_path / "r")
    assert log.recorded_steps.tolist() == [0, 1, 3, 7]
    table = indpriv.account(log, delta=DELTA)
    assert (table.claim, table.claim_reason[:30]) == ("exact", "Training clipped each example ")
    assert table.worst_case_epsilon <= run.worst_case_epsilon * (1 + 1e-6)
    content = read_json(tmp_path / "r" / "run.json")
    assert (content["training"]["clipping"], content["recorder"]["clip_headroom"]) == (
        "individual",
        0.05,
    )
    coverage = next(
        check.detail for check in verify(open_run(tmp_path / "r")) if check.title == "coverage"
    )
    assert coverage.endswith(
        "training clipped at the levels of the last one (norms plus 0.05 of max_grad_norm)"
    )
    nearest = config(
        individual_clipping=True,
        recording={"every": 1, "rounding": 0.25, "rounding_mode": "nearest"},
    )
    with pytest.raises(InputError, match="rounding_mode='nearest' with individual_clipping"):
        train(nearest, tmp_path / "n", dataset=toy())
    assert not (tmp_path / "n").exists()


def test_a_unit_column_goes_into_the_log_and_a_cap_drops_the_rows_beyond_it(tmp_path):
    dataset = toy(60, 10)
    people = np.arange(60) // 4
    dataset = replace(
        dataset, train=replace(dataset.train, metadata=pd.DataFrame({"person_id": people}))
    )
    data = DataConfig("lfw", unit_column="person_id", max_rows_per_unit=3)
    with pytest.raises(InputError, match="larger than the training set of 45 examples"):
        dp_sgd.train(replace(config(batch_size=50), data=data), tmp_path / "r", dataset=dataset)
    by_person = replace(config(epochs=1, batch_size=20), data=data)
    with dp_sgd.quiet_opacus():
        dp_sgd.train(by_person, tmp_path / "run", dataset=dataset)
    log = NormLog.open(tmp_path / "run")
    assert (log.unit, log.n_examples) == ("user", 45)
    assert log.unit_ids.tolist() == np.repeat(np.arange(15), 3).tolist()
    examples = ExampleTable.from_parquet(tmp_path / "run" / "examples.parquet").train
    assert examples["unit_id"].tolist() == examples["person_id"].tolist() == log.unit_ids.tolist()


def test_empty_poisson_batches_are_steps(tmp_path):
    for mode in ("hooks", "ghost"):
        run = train(
            config(epochs=1, batch_size=1, grad_sample_mode=mode, recording={"every": 30}),
            tmp_path / mode,
            dataset=toy(n=60),
        )
        log = indpriv.NormLog.open(tmp_path / mode)
        assert run.steps == log.total_steps == 60  # a third of these batches are empty
        assert all(torch.isfinite(p).all() for p in run.module.parameters())


def test_where_opacus_takes_a_step_less_the_target_still_holds(tmp_path):
    """int(1 / (1 / 93)) is 92: the sampler draws 92 batches at 1/93, the accountant counts them at 1/92."""
    assert int(1 / (1 / 93)) == 92
    run = train(
        config(batch_size=1, target_epsilon=2.0, recording={"every": "epoch"}),
        tmp_path / "r",
        dataset=toy(n=93),
    )
    assert run.steps == 184
    assert 2.0 - 2e-3 <= run.worst_case_epsilon <= 2.0


@pytest.mark.usefixtures("hears_ctrl_c")
def test_ctrl_c_leaves_a_usable_run(tmp_path):
    def interrupt(stage, done, total):
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config(non_private_baseline=True), tmp_path / "r", dataset=toy(), progress=interrupt)
    record = read_json(tmp_path / "r" / "run.json")
    assert (record["status"], record["steps"], record["training"]["planned_steps"]) == (
        "interrupted",
        3,
        12,
    )
    log = indpriv.NormLog.open(tmp_path / "r")
    assert log.total_steps == 3
    assert [saved.step for saved in discover(tmp_path / "r").models] == [0, 3]
    assert len(indpriv.ExampleTable.from_parquet(tmp_path / "r" / "examples.parquet").train) == 300
    assert not (tmp_path / "r" / "examples-non-dp.parquet").exists()
    table = indpriv.account(log, delta=DELTA)
    assert table.worst_case_epsilon <= record["guarantee"]["epsilon"] * (1 + 5e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "shape"),
    [("tanh_cnn", (1, 16, 16)), ("resnet20_gn", (3, 32, 32)), ("wrn16_4", (3, 8, 8))],
)
def test_image_models_train_and_record(tmp_path, architecture, shape):
    run = train(
        config(
            architecture, epochs=1, batch_size=6, max_physical_batch_size=4, recording={"every": 2}
        ),
        tmp_path / "r",
        dataset=toy(n=12, n_test=3, shape=shape),
    )
    log = indpriv.NormLog.open(tmp_path / "r")
    assert run.steps == log.total_steps == 2
    assert np.all(log.read() > 0)


def test_bad_requests_are_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"target_epsilon=1e-06 cannot be reached"):
        train(config(target_epsilon=1e-6), tmp_path / "r", dataset=toy())
    with pytest.raises(InputError, match="seed=-1"):
        train(config(), tmp_path / "r", dataset=toy(), seed=-1)
    with pytest.raises(InputError, match="takes images"):
        train(config("tanh_cnn"), tmp_path / "r", dataset=toy())
    assert not (tmp_path / "r").exists()


def test_a_delta_that_lets_a_whole_example_out_is_warned_of(tmp_path):
    with pytest.warns(UserWarning, match="not below 1/n=0.0033"):
        train(config(delta=0.01, epochs=1), tmp_path / "r", dataset=toy())


def test_a_directory_in_use_is_refused(run_dir):
    before = (run_dir / "run.json").read_bytes()
    with pytest.raises(InputError, match="already holds"):
        train(config(), run_dir, dataset=toy())
    assert (run_dir / "run.json").read_bytes() == before


@pytest.mark.slow
def test_adult_reaches_the_promised_accuracy_at_epsilon_3(tmp_path):
    tables = AuditConfig.from_toml("audits/adult.toml").to_dict()
    tables["recording"]["every"] = "epoch"
    run = train(AuditConfig.from_dict(tables), tmp_path / "adult")
    assert run.worst_case_epsilon <= 3.0
    assert run.test_accuracy >= 0.845


def test_an_audit_file_attacks_examples_through_every_update(tmp_path):
    mine = replace(config(), attacks=AttackConfig(white_box=20))
    train(mine, tmp_path / "run", dataset=toy(), seed=3)
    scores, predicted = white_box_of_run(tmp_path / "run")
    assert (int(scores.member.sum()), len(scores.member)) == (20, 40)
    assert (predicted.separation > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"white_box": 5, "gradient_canaries": 20}, "both given"),
    ],
)
def test_attacks_that_do_not_go_together_are_refused(given, message):
    """Nor does a white box with clipping of each tensor."""
    layers = config().to_dict()
    layers["training"]["clipping"] = "per_layer"
    with pytest.raises(InputError, match="need flat clipping"):
        AuditConfig.from_dict({**layers, "attacks": {"white_box": 5}})
    with pytest.raises(InputError, match=message):
        AuditConfig.from_dict({**config().to_dict(), "attacks": given})


@pytest.mark.slow
def test_an_audit_file_inserts_gradient_canaries_and_the_audit_judges_them(tmp_path):
    mine = replace(
        config(),
        attacks=AttackConfig(gradient_canaries=60, canary_lengths=(1.0, 0.5)),
    )
    train(mine, tmp_path / "run", dataset=toy(), seed=3)
    found = audit(tmp_path / "run", tmp_path / "audit")
    rates = found.rates.query("part == 'longest canaries'").set_index("rate").loc["auc"]
    longest = found.gradient_canaries.lengths[-1]
    assert (rates.n_members, rates.n_others) == (longest.n_members, longest.n_others)
    assert rates.low < rates.value < rates.high
    assert "| Every noisy update | " in (tmp_path / "audit" / "audit.md").read_text()
    gradients = found.gradient_canaries
    assert [one.length for one in gradients.lengths] == [0.5, 1.0]
    assert sum(one.n_members + one.n_others for one in gradients.lengths) == 60
    assert gradients.agree
    assert "Gradient canaries" in (tmp_path / "audit" / "audit.md").read_text()
    gate = {one.name: one for one in judge(found.to_json(), {})}
    assert gate["gradient canaries that contradict the account"].passed
    wrong = replace(gradients, lengths=(replace(gradients.lengths[0], agrees=False),))
    content = found.replace(gradient_canaries=wrong).to_json()
    gate = {one.name: one for one in judge(content, {})}
    assert not gate["gradient canaries that contradict the account"].passed


def test_an_audit_file_clips_per_layer(tmp_path):
    with dp_sgd.quiet_opacus():
        run = train(
            config(clipping="per_layer", max_grad_norm=0.6),
            tmp_path / "run",
            dataset=toy(n_test=5),
        )
    log = indpriv.NormLog.open(tmp_path / "run")
    assert set(log.settings.max_grad_norm) == {0.6}
    assert log.read().max() <= 0.6 * (1 + 1e-5)
    assert read_json(tmp_path / "run" / "run.json")["training"]["clipping"] == "per_layer"
    assert indpriv.account(log, delta=DELTA).worst_case_epsilon <= run.worst_case_epsilon


@pytest.mark.parametrize(
    "changes",
    [
        {"grad_sample_mode": "ghost"},
        {"individual_clipping": True},
        {"filter_epsilon": 3.0},
    ],
)
@pytest.mark.parametrize("clipping", ["per_layer", "quantile", "adaclip"])
def test_what_other_clipping_does_not_go_with(clipping, changes):
    with pytest.raises(InputError, match="does not go with"):
        config(clipping=clipping, **changes)


LARGEST = {"noise_scale": "largest_norm", "allow_no_privacy": True}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clipping": "quantile", "max_grad_norm": SCHEDULE}, "does not go with a schedule"),
        ({"clipping": "quantile", "noise_multiplier": None, "noise_std": 1.0}, "noise_std"),
        ({"quantile": 0.5}, "for clipping"),
        ({"noise_scale": "largest_norm"}, "not differentially private"),
        (LARGEST | {"target_epsilon": 3.0}, "does not go with target_epsilon"),
        (LARGEST | {"filter_epsilon": 3.0}, "does not go with filter_epsilon"),
        (LARGEST | {"clipping": "per_layer"}, "does not go with clipping"),
    ],
)
def test_clipping_and_noise_that_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        config(**settings)


def test_noise_of_the_number_that_is_too_small_is_refused_before_training(tmp_path):
    audit = config(clipping="quantile", quantile_noise=0.01)
    with pytest.raises(InputError, match="twice the noise"):
        train(audit, tmp_path / "run", dataset=toy())
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("clipping", ["per_layer", "adaclip"])
def test_a_schedule_with_other_clipping_is_realised(clipping, tmp_path):
    """Norms are recorded after the clipping norms have moved to those of the coming step."""
    settings = {"clipping": clipping, "max_grad_norm": SCHEDULE, "noise_multiplier": SCHEDULE}
    with dp_sgd.quiet_opacus():
        train(config(**settings, epochs=1), tmp_path / "run", dataset=toy(n_test=5))
    log = indpriv.NormLog.open(tmp_path / "run")
    values = Schedule(**SCHEDULE).values(6)
    np.testing.assert_allclose(log.settings.max_grad_norm, values)
    np.testing.assert_allclose(log.settings.noise_multiplier, values)
    assert [c.title for c in verify(open_run(tmp_path / "run")) if c.status == "failed"] == []
    assert indpriv.account(log, delta=DELTA).claim == "exact"


@pytest.mark.slow
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "quantile", "adaclip"])
def test_a_run_of_each_clipping_is_trained_and_audited(clipping, tmp_path):
    """With schedules, of noise_std where the clipping norm does not follow the data."""
    settings = {"clipping": clipping, "noise_multiplier": SCHEDULE, "epochs": 1}
    if clipping != "quantile":
        settings |= {"max_grad_norm": SCHEDULE, "noise_multiplier": None, "noise_std": SCHEDULE}
    with dp_sgd.quiet_opacus():
        run = train(config(**settings), tmp_path / "run", dataset=toy())
    found = audit(tmp_path / "run", tmp_path / "audit", neighbouring="add_remove")
    assert found.claim == "exact"
    assert found.guarantee.worst_case_epsilon <= run.worst_case_epsilon * (1 + 1e-9)
    epsilon = pd.read_parquet(tmp_path / "audit" / "epsilon.parquet")["epsilon"]
    assert 0 < epsilon.max() <= found.guarantee.worst_case_epsilon
    assert [check.title for check in found.checks if check.status == "failed"] == []


def test_gradient_canaries_need_flat_clipping():
    tables = config(clipping="per_layer").to_dict()
    tables["attacks"] = {"gradient_canaries": 20}
    with pytest.raises(InputError, match="need flat clipping"):
        AuditConfig.from_dict(tables)


def test_a_run_with_noise_of_the_largest_norm_says_so(tmp_path):
    settings = LARGEST | {"epochs": 1, "max_grad_norm": 50.0}
    with dp_sgd.quiet_opacus():
        train(config(**settings), tmp_path / "run", dataset=toy())
    assert "largest norm" in read_json(tmp_path / "run" / "run.json")["guarantee"]["claim"]
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert curve["worst_case_epsilon"].isna().all()
    assert (curve["noise_multiplier"].iloc[1:] < 1).all()


def test_a_run_of_a_number_of_steps_ends_within_an_epoch(tmp_path):
    """And the baseline beside it, after as many."""
    settings = {"epochs": None, "steps": 8, "non_private_baseline": True}
    seen = []
    with dp_sgd.quiet_opacus():
        run = train(
            config(**settings),
            tmp_path / "run",
            dataset=toy(n_test=5),
            progress=lambda *args: seen.append(args),
        )
    assert run.steps == 8
    assert read_json(tmp_path / "run" / "run.json")["status"] == "finished"
    assert indpriv.NormLog.open(tmp_path / "run").total_steps == 8
    assert [c.title for c in verify(open_run(tmp_path / "run")) if c.status == "failed"] == []
    assert max(done for stage, done, _ in seen if stage == "training without DP") == 8


def test_a_run_stops_before_its_worst_case_passes_a_limit(tmp_path):
    limit = 3.0
    settings = config(noise_multiplier=SCHEDULE, epochs=3, stop_at_epsilon=limit)
    with dp_sgd.quiet_opacus():
        run = train(settings, tmp_path / "run", dataset=toy(n_test=5))
    noise = Schedule(**SCHEDULE).values(18)
    spent = [worst_case_epsilon(noise[:n], 1 / 6, DELTA) for n in (run.steps, run.steps + 1)]
    assert run.worst_case_epsilon == pytest.approx(spent[0])
    assert spent[0] <= limit < spent[1]
    record = read_json(tmp_path / "run" / "run.json")
    assert (record["status"], record["training"]["planned_steps"]) == ("finished", run.steps)
    with pytest.raises(InputError, match="spent by the first step"):
        train(
            replace(settings, training=replace(settings.training, stop_at_epsilon=0.1)),
            tmp_path / "x",
            dataset=toy(),
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": None}, "neither epochs nor steps"),
        ({"steps": 10}, "both epochs and steps"),
        ({"stop_at_epsilon": 1.0, "non_private_baseline": True}, "does not go with"),
        (LARGEST | {"stop_at_epsilon": 1.0}, "does not go with stop_at_epsilon"),
    ],
)
def test_ends_of_training_that_are_refused(changes, message):
    with pytest.raises(InputError, match=message):
        config(**changes)


def test_the_learning_rate_falls_as_a_cosine_and_weights_decay():
    settings = config(schedule="cosine", weight_decay=0.01)
    private = make_private(settings, toy(), Randomness.from_seed(1), "cpu")
    (group,) = private.optimizer.param_groups
    rates = [group["lr"]]
    take_steps(
        private, settings.training, lambda _: rates.append(group["lr"]), lambda: False, "cpu"
    )
    expected = 0.5 * np.cos(np.pi * np.arange(12) / 24) ** 2
    np.testing.assert_allclose(rates[:12], expected, rtol=1e-12)
    assert group["weight_decay"] == 0.01


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_norms_losses_and_baseline_of_a_run_with_hinge_loss_are_of_that_loss(tmp_path, mode):
    settings = config(loss="hinge", grad_sample_mode=mode, non_private_baseline=True)
    train(settings, tmp_path / "run", seed=1, dataset=toy())
    rows, data = indpriv.NormLog.open(tmp_path / "run").read(), toy().train
    inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets)
    hinge = nn.MultiMarginLoss(reduction="none")
    first, last = discover(tmp_path / "run").models[0], discover(tmp_path / "run").models[-1]
    model = build_model(settings.model, (6,), 3)
    model.load_state_dict(state_of(read_content(first.path)))
    for i in range(5):
        loss = hinge(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = sum(float(gradient.double().square().sum()) for gradient in gradients) ** 0.5
        assert rows[0][i] == pytest.approx(norm, rel=1e-3)
    for path, table in (
        (last.path, "examples.parquet"),
        (tmp_path / "run" / MODEL_NON_DP, "examples-non-dp.parquet"),
    ):
        model.load_state_dict(state_of(read_content(path)))
        losses = ExampleTable.from_parquet(tmp_path / "run" / table).train["loss"]
        expected = hinge(model(inputs), targets).detach().numpy()
        np.testing.assert_allclose(losses, expected, rtol=1e-4, atol=1e-6)


def test_a_run_goes_on_from_the_parameters_of_another_and_says_so(tmp_path):
    dataset = toy()
    train(config(non_private_baseline=True), tmp_path / "public", dataset=dataset)
    source = tmp_path / "public" / MODEL_NON_DP
    tables = config().to_dict()
    tables["model"]["pretrained"] = str(source)
    train(AuditConfig.from_dict(tables), tmp_path / "run", dataset=dataset)
    before = state_of(read_content(source))
    start = state_of(read_content(discover(tmp_path / "run").models[0].path))
    assert all(torch.equal(start[name], value) for name, value in before.items())
    record = read_json(tmp_path / "run" / "run.json")
    assert record["model"]["pretrained"]["file"] == "parameters.safetensors"
    assert record["model"]["pretrained"]["sha256"] == sha256(source)
    assert "no epsilon covers those data" in record["on_trust"]["pretraining"]
    starts = [open_run(tmp_path / run).header["run"]["start"] for run in ("public", "run")]
    assert starts == ["random", "pretrained: parameters.safetensors"]
