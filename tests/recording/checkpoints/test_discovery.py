import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from indpriv.errors import InputError
from indpriv.recording.checkpoints.discovery import discover, natural_key, steps_in_names


def state(value):
    return {"weight": torch.full((2, 2), float(value))}


def save(folder, name, content):
    folder.mkdir(exist_ok=True)
    torch.save(content, folder / name)


def opacus(value, *history):
    return {
        "module_state_dict": state(value),
        "privacy_accountant_state_dict": {"history": list(history), "mechanism": "rdp"},
    }


def steps(found):
    return [model.step for model in found.models]


def test_natural_order():
    names = ["step_10.pt", "step_9.pt", "step_100.pt", "step_1.pt"]
    assert sorted(names, key=natural_key) == ["step_1.pt", "step_9.pt", "step_10.pt", "step_100.pt"]


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_names_can_be_sorted_and_searched_for_steps(names):
    sorted(names, key=natural_key)
    assert len(steps_in_names(names)) == len(names)


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["step_10.pt", "step_9.pt"], [10, 9]),
        (["epoch=3-step=400.ckpt", "epoch=2-step=300.ckpt"], [400, 300]),
        (["checkpoint-500", "checkpoint-1000"], [500, 1000]),
        (["resnet20_400.pt", "resnet20_800.pt"], [400, 800]),
        (["global_step12.pt"], [12]),
        (["model-000340.pth"], [340]),
        (["7.pt"], [7]),
        (["epoch_3.pt", "epoch_4.pt"], [None, None]),
        (["best.pt", "last.ckpt"], [None, None]),
        (["run1_seed2_final.pt"], [None]),
        (["step_99999999999999999999.pt"], [None]),
    ],
)
def test_steps_in_names(names, expected):
    assert steps_in_names(names) == expected


def test_the_step_inside_decides(tmp_path):
    save(tmp_path, "step_10.pt", {"step": 900, "model": state(9)})
    save(tmp_path, "step_9.pt", {"global_step": torch.tensor(1000), "state_dict": state(10)})
    save(tmp_path, "whatever.pt", opacus(8, (1.0, 0.1, 500), (0.9, 0.1, 300)))
    found = discover(tmp_path)
    assert steps(found) == [800, 900, 1000]
    assert found.models[0].history == ((1.0, 0.1, 500), (0.9, 0.1, 300))
    assert found.problems == ()
    assert any(
        "step_10.pt is of step 900 by the step stored inside, not 10 as its name says" in note
        for note in found.notes
    )


def test_an_accountant_that_has_counted_nothing_is_of_step_0(tmp_path):
    save(tmp_path, "first.pt", opacus(1))
    assert steps(discover(tmp_path)) == [0]


def test_hugging_face_folders(tmp_path):
    for step in (1000, 500):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        save_file(state(step), folder / "model.safetensors")
        (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    (tmp_path / "runs").mkdir()
    assert steps(discover(tmp_path)) == [500, 1000]


def test_a_run_directory_with_a_folder_of_checkpoints(tmp_path):
    save(tmp_path / "checkpoints", "step-000340.pt", state(1))
    assert steps(discover(tmp_path)) == [340]


def test_the_same_model_twice_is_noted_and_two_models_are_refused(tmp_path):
    save(tmp_path, "step_100.pt", {"model_state_dict": state(1)})
    save(
        tmp_path,
        "last.ckpt",
        {"global_step": 100, "state_dict": {"net.weight": state(1)["weight"]}},
    )
    found = discover(tmp_path)
    assert steps(found) == [100]
    assert found.problems == ()
    assert (
        "last.ckpt, step_100.pt are the same model, of step 100; it is replayed once" in found.notes
    )
    save(tmp_path, "best.pt", {"step": 100, "model": state(2)})
    (problem,) = discover(tmp_path).problems
    assert "all of step 100, with different parameters" in problem


def test_gaps_are_reported(tmp_path):
    for step in (0, 100, 200, 500, 600):
        save(tmp_path, f"step_{step}.pt", state(step))
    assert discover(tmp_path).notes == (
        "checkpoints are usually 100 steps apart, but there is none between 200 and 500",
    )


def test_nothing_tells_the_step(tmp_path):
    save(tmp_path, "epoch_3.pt", state(1))
    (problem,) = discover(tmp_path).problems
    assert "epoch_3.pt is not known, neither from the file" in problem
    assert "step_400.pt" in problem


@pytest.mark.parametrize("content", [{"step": 500}, {}])
def test_an_accountant_that_was_started_again(tmp_path, content):
    save(tmp_path, "step_500.pt", {**opacus(1, (1.0, 0.1, 100)), **content})
    (problem,) = discover(tmp_path).problems
    assert "counted 100 steps" in problem
    assert "too small" in problem


def test_checkpoints_of_two_runs(tmp_path):
    save(tmp_path, "a.pt", opacus(1, (1.0, 0.1, 100)))
    save(tmp_path, "b.pt", opacus(2, (1.1, 0.1, 200)))
    (problem,) = discover(tmp_path).problems
    assert "in b.pt does not continue that in a.pt" in problem


def test_a_schedule_goes_on(tmp_path):
    save(tmp_path, "a.pt", opacus(1, (1.0, 0.1, 60), (1.0, 0.1, 40), (0.9, 0.1, 10)))
    save(tmp_path, "b.pt", opacus(2, (1.0, 0.1, 100), (0.9, 0.1, 50)))
    found = discover(tmp_path)
    assert found.problems == ()
    assert steps(found) == [110, 150]


@pytest.mark.parametrize(
    "history",
    [
        "x",
        [(1.0, 0.1)],
        [(-1.0, 0.1, 5)],
        [(1.0, 2.0, 5)],
        [(1.0, 0.1, 0)],
        [(True, 0.1, 5)],
        [(float("nan"), 0.1, 5)],
    ],
)
def test_a_history_that_is_none(tmp_path, history):
    torch.save(
        {"module_state_dict": state(1), "privacy_accountant_state_dict": {"history": history}},
        tmp_path / "step_5.pt",
    )
    (problem,) = discover(tmp_path).problems
    assert "not a list of (noise_multiplier, sample_rate, steps)" in problem


def test_no_folder_an_empty_one_and_one_of_other_things(tmp_path):
    with pytest.raises(InputError, match="is not a directory"):
        discover(tmp_path / "nowhere")
    with pytest.raises(InputError, match="it is empty"):
        discover(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"it contains notes\.txt"):
        discover(tmp_path)


def test_every_bad_file_is_listed(tmp_path):
    save(tmp_path, "step_1.pt", state(1))
    (tmp_path / "step_2.pt").write_bytes(b"")
    (tmp_path / "step_3.pt").write_bytes(b"PK")
    found = discover(tmp_path)
    assert steps(found) == [1]
    assert [problem.split(" ")[0] for problem in found.problems] == [
        str(tmp_path / "step_2.pt"),
        str(tmp_path / "step_3.pt"),
    ]
