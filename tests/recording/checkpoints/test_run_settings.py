import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from indpriv.errors import InputError
from indpriv.recording.checkpoints.saved_models import (
    Discovery,
    SavedModel,
    StepOptions,
    parse_schedule,
    resolve,
)

HISTORY = ((1.5, 0.1, 60), (1.2, 0.1, 40))
ALL = StepOptions(1.1, 1.0, 0.1, 100, 1e-5, "poisson")


def found(*models, clipping_moves=False):
    models = models or ((0, ()), (50, ()), (100, ()))
    saved = [
        SavedModel(Path(f"step_{step}.pt"), step, "the step stated inside", history, clipping_moves)
        for step, history in models
    ]
    return Discovery(saved)


def settle(tmp_path, discovery=None, options=ALL, n=1000, **declared):
    if declared:
        (tmp_path / "run.json").write_text(json.dumps(declared))
    discovery = discovery or found()
    settings = resolve(tmp_path, discovery, options, n)
    caveats = settings.caveats if settings else []
    return SimpleNamespace(
        settings=settings, notes=discovery.notes, problems=discovery.problems, caveats=caveats
    )


def test_everything_from_options(tmp_path):
    settings = settle(tmp_path).settings
    assert len(settings.steps) == 100
    assert set(settings.steps.noise_multiplier) == {1.1}
    assert (settings.delta, settings.sampler, settings.declared) == (1e-5, "poisson", {})
    assert not settings.accountant_counted_all


def test_everything_missing_is_asked_for_in_one_message(tmp_path):
    (problem,) = settle(tmp_path, options=StepOptions()).problems
    for words in (
        "--set noise_multiplier",
        "--set max_grad_norm",
        "--set sample_rate",
        "--set steps",
        "--delta",
        "--set sampler",
        "run.json",
    ):
        assert words in problem


def test_the_accountant_tells_noise_rate_and_steps(tmp_path):
    resolved = settle(
        tmp_path,
        found((40, HISTORY[:1]), (100, HISTORY)),
        StepOptions(max_grad_norm=2.0, delta=1e-6, sampler="poisson"),
    )
    settings = resolved.settings
    assert np.array_equal(settings.steps.noise_multiplier, np.repeat([1.5, 1.2], [60, 40]))
    assert set(settings.steps.max_grad_norm) == {2.0}
    assert settings.accountant_counted_all
    assert settings.sources["noise_multiplier"] == "the accountant in the checkpoints"
    assert any("first checkpoint is of step 40" in note for note in resolved.notes)
    assert any("if training went on, pass --set steps" in caveat for caveat in resolved.caveats)


def test_run_json_comes_first_and_tells_the_rest(tmp_path):
    training = {
        "noise_multiplier": 1.1,
        "max_grad_norm": 1.0,
        "sample_rate": 0.1,
        "delta": 1e-5,
        "sampler": "poisson",
    }
    settings = settle(
        tmp_path, options=StepOptions(), steps=100, seeded=True, training=training
    ).settings
    assert set(settings.steps.noise_multiplier) == {1.1}
    assert settings.declared["seeded"]
    assert settings.sources["sampler"] == "run.json"


def test_run_json_beside_a_folder_named_checkpoints(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "run.json").write_text(
        json.dumps({"steps": 100, "training": {"noise_multiplier": 9.0}})
    )
    options = StepOptions(None, 1.0, 0.1, None, 1e-5, "poisson")
    assert resolve(tmp_path / "checkpoints", found(), options, 10).steps.noise_multiplier[0] == 9.0
    (tmp_path / "other").mkdir()
    assert resolve(tmp_path / "other", found(), options, 10) is None


@pytest.mark.parametrize(
    "sampler", ["UniformWithReplacementSampler", "DistributedUniformWithReplacementSampler"]
)
def test_the_sampler_that_a_recorder_saw(sampler, tmp_path):
    options = StepOptions(1.1, 1.0, 0.1, 100, 1e-5)
    recorder = {"sampler_class": sampler}
    assert settle(tmp_path, options=options, recorder=recorder).settings.sampler == "poisson"
    assert (
        settle(tmp_path, options=options, recorder={"sampler_class": "BatchSampler"}).settings
        is None
    )


@pytest.mark.parametrize(
    ("declared", "discovery", "options", "words"),
    [
        ({"training": {"noise_multiplier": 2.0}}, None, {}, "values of noise_multiplier contradict each other: at step 0 it is 2 by run.json and 1.1 by"),
        ({}, found((100, HISTORY)), {}, "at step 0 it is 1.1 by the options and 1.5 by the accountant in the checkpoints"),
        ({"steps": 90}, None, {}, "the values of steps contradict each other: 90 by run.json, 100 by the options"),
        ({}, None, {"steps": 90}, "steps is 90 by the options, but a checkpoint has had 100 updates"),
        ({"training": {"sampler": "shuffled"}}, None, {}, "sampler contradict each other: shuffled by run.json, poisson by the options"),
        ({"data": {"n_train": 1001}}, None, {}, "1000 examples, run.json says 1001"),
        ({"training": {"clipping": "per_layer"}}, None, {}, "clipping='per_layer'"),
        ({}, None, {"sampler": "magic"}, "sampler='magic' is not known"),
        ({}, None, {"delta": 2.0}, "delta=2.0 is not in (0, 1)"),
        ({}, None, {"steps": 0}, "the options: steps=0 is not a whole number"),
        ({"training": {"sampler": "magic"}}, None, {}, "run.json: sampler='magic' is not known"),
        ({}, None, {"noise_multiplier": "x"}, "noise_multiplier='x' is neither a number"),
        ({}, None, {"noise_multiplier": 0.0}, "noise_multiplier=0.0 is not a finite number above 0"),
        ({}, None, {"sample_rate": 1.5}, "sample_rate=1.5 is not in (0, 1]"),
        ({"training": {"max_grad_norm": [1.0, 2.0]}}, None, {"max_grad_norm": None}, "has 2 values"),
        ({}, found((100, ()), clipping_moves=True), {}, "clipping scheduler"),
        ({}, found((100, HISTORY)), {"steps": 200, "noise_multiplier": None}, "noise_multiplier of the steps from 100 on"),
    ],
)  # fmt: skip
def test_contradictions_and_gaps_are_problems(tmp_path, declared, discovery, options, words):
    resolved = settle(tmp_path, discovery, StepOptions(**{**vars(ALL), **options}), **declared)
    assert resolved.settings is None
    assert any(words in problem for problem in resolved.problems), resolved.problems


@pytest.mark.parametrize("content", ["[1]", "{"])
def test_a_run_json_that_is_none(tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    assert any("run.json" in problem for problem in settle(tmp_path).problems)


def test_a_run_is_never_taken_for_shorter_than_its_accountant_says(tmp_path):
    longer = found((100, HISTORY), (90, ((1.5, 0.1, 60), (1.2, 0.1, 30))))
    resolved = settle(
        tmp_path, longer, StepOptions(max_grad_norm=1.0, delta=1e-5, sampler="poisson")
    )
    assert len(resolved.settings.steps) == 100


def test_steps_beyond_the_accountant_need_settings_of_their_own(tmp_path):
    options = StepOptions("1.5,1.2@60", 1.0, 0.1, 200, 1e-5, "poisson")
    resolved = settle(tmp_path, found((100, HISTORY)), options)
    assert np.array_equal(
        resolved.settings.steps.noise_multiplier, np.repeat([1.5, 1.2], [60, 140])
    )
    assert resolved.caveats == [
        "the last checkpoint is of step 100 of 200, and its norms are used for the steps from it on"
    ]


def test_opacus_may_count_a_step_an_epoch_too_few(tmp_path):
    """At n = 93 the sampler draws at 1/93 and the accountant counts 1/92; the other way round is a contradiction."""
    options = StepOptions(max_grad_norm=1.0, delta=1e-5, sampler="poisson")
    resolved = settle(
        tmp_path, found((10, ((1.0, 1 / 92, 10),))), options, training={"sample_rate": 1 / 93}
    )
    assert resolved.settings.steps.sample_rate[0] == 1 / 93
    (problem,) = settle(
        tmp_path, found((10, ((1.0, 1 / 94, 10),))), options, training={"sample_rate": 1 / 93}
    ).problems
    assert "values of sample_rate contradict each other" in problem


def test_a_clipping_schedule_satisfies_a_clipping_scheduler(tmp_path):
    options = StepOptions(**{**vars(ALL), "max_grad_norm": "1.0,0.5@50"})
    clips = settle(
        tmp_path, found((100, ()), clipping_moves=True), options
    ).settings.steps.max_grad_norm
    assert (clips[49], clips[50]) == (1.0, 0.5)


def test_a_rate_that_fits_neither_opacus_nor_the_data_is_a_caveat(tmp_path):
    odd = StepOptions(**{**vars(ALL), "sample_rate": 0.0123})
    assert any(
        "may not be the data" in caveat for caveat in settle(tmp_path, options=odd, n=999).caveats
    )
    assert settle(tmp_path, n=999).caveats == []
    batch = StepOptions(**{**vars(ALL), "sample_rate": 256 / 999})
    assert settle(tmp_path, options=batch, n=999).caveats == []
    assert settle(tmp_path, options=batch, n=998).caveats != []


def test_schedules():
    assert parse_schedule("noise_multiplier", 1.5) == [(0, 1.5)]
    assert parse_schedule("noise_multiplier", "1.5, 0.9@500") == [(0, 1.5), (500, 0.9)]
    for bad in ("1.5@5", "1.5,0.9@500,0.8@500", "1.5,0.9@500,0.8@20", "1.5,,2", "", "1.5,-1@5"):
        with pytest.raises(InputError):
            parse_schedule("noise_multiplier", bad)
