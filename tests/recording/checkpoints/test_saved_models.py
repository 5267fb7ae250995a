import json
import shlex

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from indpriv.errors import InputError
from indpriv.recording.checkpoints.saved_models import (
    discover,
    natural_key,
    told_steps,
    what_to_type,
)


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


EPOCHS = [f"model_{epoch}.pt" for epoch in range(5)]
BY_EPOCH = dict(zip(EPOCHS, (0, 20, 40, 60, 80), strict=True))


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_names_can_be_sorted(names):
    sorted(names, key=natural_key)


@pytest.mark.parametrize(
    "told",
    [
        "0,20,40,60,80",
        " 0, 20, ..., 80 ",
        [0, 20, 40, 60, 80],
        range(0, 100, 20),
        ["0,20", "40,60,80"],
        BY_EPOCH,
        ",".join(f"{name}={step}" for name, step in BY_EPOCH.items()),
        [f"{name} = {step}" for name, step in BY_EPOCH.items()],
    ],
)
def test_steps_that_the_user_tells(told):
    assert told_steps(told, EPOCHS) == BY_EPOCH


def test_a_name_may_hold_anything_that_a_list_does_not():
    names = ["epoch=2-step=3.ckpt", "m.x+(5).pt", "1,2.pt"]
    told = dict(zip(names, (43, 5, 7), strict=True))
    assert told_steps(told, names) == told
    assert told_steps("epoch=2-step=3.ckpt=43,m.x+(5).pt=5", names) == {
        name: told[name] for name in names[:2]
    }


@given(st.integers(0, 10**6), st.integers(1, 10**4), st.integers(3, 300))
def test_dots_go_on_as_the_two_before(first, apart, n):
    last = first + apart * (n - 1)
    names = [f"{k}.pt" for k in range(n)]
    told = told_steps(f"{first},{first + apart},...,{last}", names)
    assert [*told.values()] == [*range(first, last + 1, apart)]
    with pytest.raises(InputError, match="these are no"):
        told_steps(f"{first},{first + apart},...,{last + apart}", names)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        *[(told, "is not a number of updates") for told in (
            "x,0,1,2,3", "=", "0,,40,60,80", "-1,0,1,2,3", "0,20,...,x", "0,20,40,60,1e5", "0,20,40,60,80.5", "a,b,...,z", "0,...,60,80,90",
            "1,2,3,4,...", "0,1,2,3,\u0663", "0,20,40,...,80", "model_0.pt=", "model_0.pt=...",
            "model_{epoch}.pt=20*epoch", "model_0.pt=20*1", "1,2,3,4," + "9" * 13,
        )],
        *[(told, "these are no 5 steps") for told in (
            "0,20,...,70", "20,20,...,80", "80,60,...,0", "0,1,...,999999999999", "0,20,...,20",
        )],
        ("0,20,...", "3 steps for 5"),
        ("0,20,40,60", "4 steps for 5 checkpoints"),
        (range(6), "6 steps for 5 checkpoints"),
        ("net_0.pt=0,model_1.pt=3", "'net_0.pt' is no checkpoint"),
        ("saved/model_0.pt=0", "is no checkpoint"),
        ("=20", "'' is no checkpoint"),
        ("0,20,40,60,model_4.pt=80", "'' is no checkpoint"),
        ({"model_0.pt": 1.5}, "is not a number of updates"),
        ({"model_0.pt": True}, "is not a number of updates"),
        ("model_0.pt=0,model_0.pt=20", "a name twice"),
    ],
)  # fmt: skip
def test_steps_that_cannot_be_followed_are_one_message(told, words):
    with pytest.raises(InputError) as error:
        told_steps(told, EPOCHS)
    text = str(error.value)
    assert text.startswith("--set step_of=")
    for word in (words, "'model_0.pt', 'model_1.pt', 'model_2.pt'", "--set step_of=0,20,...,80"):
        assert word in text
    assert "\n" not in text
    assert len(text) < 700


@pytest.mark.parametrize("told", ["0,20,...,0", "0,20,...,10", "5,5,...,5"])
def test_dots_need_two_checkpoints(told):
    with pytest.raises(InputError, match="these are no 1 steps"):
        told_steps(told, ["model.pt"])


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0,"), min_size=1, max_size=12).map(str.strip),
        min_size=1,
        unique=True,
    ).filter(all)
)
def test_what_to_type_can_be_typed(names):
    """In the order of the names, and by name, as a shell reads it."""
    rest, by_name = what_to_type(names).split(" or, by name, ")
    [typed] = [word for word in shlex.split(rest) if word.startswith("step_of=")]
    steps = range(0, 20 * len(names), 20)
    assert [*told_steps(typed.removeprefix("step_of="), names).values()] == [*steps]
    [typed] = shlex.split(by_name.replace("step_of=", "", 1))
    if all(map(str.isprintable, names[:2])):
        assert told_steps(typed, names) == dict(zip(names[:2], steps))  # noqa: B905


def test_the_step_inside_decides(tmp_path):
    save(tmp_path, "step_10.pt", {"step": 900, "model": state(9)})
    save(tmp_path, "step_9.pt", {"global_step": torch.tensor(1000), "state_dict": state(10)})
    save(tmp_path, "whatever.pt", opacus(8, (1.0, 0.1, 500), (0.9, 0.1, 300)))
    found = discover(tmp_path)
    assert steps(found) == [800, 900, 1000]
    assert found.models[0].history == ((1.0, 0.1, 500), (0.9, 0.1, 300))
    assert found.problems == []
    assert found.notes == []  # no name is a step


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
    save(tmp_path / "checkpoints", "step-000340.pt", {"step": 340, "model": state(1)})
    assert steps(discover(tmp_path)) == [340]


def test_the_same_model_twice_is_noted_and_two_models_are_refused(tmp_path):
    save(tmp_path, "step_100.pt", {"step": 100, "model_state_dict": state(1)})
    save(
        tmp_path,
        "last.ckpt",
        {"global_step": 100, "state_dict": {"net.weight": state(1)["weight"]}},
    )
    found = discover(tmp_path)
    assert steps(found) == [100]
    assert found.problems == []
    assert (
        "'last.ckpt', 'step_100.pt' are the same model, of step 100; it is replayed once"
        in found.notes
    )
    save(tmp_path, "best.pt", {"step": 100, "model": state(2)})
    (problem,) = discover(tmp_path).problems
    assert "all of step 100 by the step stated inside, with different parameters" in problem


def test_gaps_are_reported(tmp_path):
    for step in (0, 100, 200, 500, 600):
        save(tmp_path, f"step_{step}.pt", {"step": step, "model": state(step)})
    assert discover(tmp_path).notes == [
        "checkpoints are usually 100 steps apart, but there is none between 200 and 500"
    ]


@pytest.mark.parametrize(
    "names",
    [EPOCHS, [f"step_{i}.pt" for i in range(5)], ["ckpt_3.pt"], ["a.pt", "epoch=3-step=400.ckpt"]],
)
@pytest.mark.parametrize("other", [{"epoch": 3}, {"iteration": 7}, {"steps": 9}, {"step": 1.0}])
def test_nothing_tells_the_step(tmp_path, names, other):
    """Whatever a number in a name or another entry may count."""
    for value, name in enumerate(names):
        save(tmp_path, name, {**other, "model": state(value)})
    (problem,) = discover(tmp_path).problems
    assert f"the step of {names[0]!r}" in problem
    assert "is not in the file" in problem
    assert what_to_type(names) in problem
    assert discover(tmp_path).models == []


def test_a_name_with_control_characters_is_escaped(tmp_path):
    save(tmp_path, "model\x1b[31m_1.pt", state(1))
    (problem,) = discover(tmp_path).problems
    assert "\x1b" not in problem
    assert r"'model\x1b[31m_1.pt'" in problem


def test_a_folder_as_of_hugging_face_without_its_record(tmp_path):
    """`save_pretrained(f"checkpoint-{epoch}")` leaves such folders too."""
    for epoch in (1, 2):
        (tmp_path / f"checkpoint-{epoch}").mkdir()
        save_file(state(epoch), tmp_path / f"checkpoint-{epoch}" / "model.safetensors")
    (problem,) = discover(tmp_path).problems
    assert "--set step_of=0,20 " in problem
    assert steps(discover(tmp_path, step_of="20,40")) == [20, 40]


def test_the_user_tells_the_steps(tmp_path):
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", {"step": epoch, "model": state(epoch)})
    found = discover(tmp_path, step_of=[0, 20, 40])
    assert steps(found) == [0, 20, 40]
    assert {model.said_by for model in found.models} == {"--set step_of"}
    assert (
        "'model_2.pt' is of step 40 by --set step_of, not 2 by the step stated inside"
        in found.notes
    )


def test_steps_for_some_of_the_files(tmp_path):
    """What stands in the other files still counts."""
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", state(epoch))
    save(tmp_path, "step_60.pt", state(6))
    save(tmp_path, "inside.pt", {"step": 80, "model": state(8)})
    found = discover(tmp_path, step_of={"model_0.pt": 0, "model_1.pt": 20, "model_2.pt": 40})
    assert steps(found) == [0, 20, 40, 80]
    (problem,) = found.problems
    assert "--set step_of names only some of the checkpoints: the step of 'step_60.pt'" in problem
    assert "e.g. --set step_of=step_60.pt=0" in problem


def test_two_models_of_one_step(tmp_path):
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", state(epoch))
    (problem,) = discover(tmp_path, step_of="20,20,20").problems
    assert "'model_0.pt', 'model_1.pt', 'model_2.pt' are all of step 20 by --set step_of" in problem


@pytest.mark.parametrize("said", [50, 150])
def test_steps_that_contradict_the_accountant(tmp_path, said):
    save(tmp_path, "model.pt", opacus(1, (1.0, 0.1, 100)))
    (problem,) = discover(tmp_path, step_of=f"model.pt={said}").problems
    assert (
        f"is of step {said} by --set step_of, but the Opacus accountant inside counted 100"
        in problem
    )
    assert steps(discover(tmp_path, step_of="model.pt=100")) == [100]


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
    assert "in 'b.pt' does not continue that in 'a.pt'" in problem


def test_a_schedule_goes_on(tmp_path):
    save(tmp_path, "a.pt", opacus(1, (1.0, 0.1, 60), (1.0, 0.1, 40), (0.9, 0.1, 10)))
    save(tmp_path, "b.pt", opacus(2, (1.0, 0.1, 100), (0.9, 0.1, 50)))
    found = discover(tmp_path)
    assert found.problems == []
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
    with pytest.raises(InputError, match=r"it contains 'notes\.txt'"):
        discover(tmp_path)


def test_every_bad_file_is_listed(tmp_path):
    save(tmp_path, "step_1.pt", {"step": 1, "model": state(1)})
    (tmp_path / "step_2.pt").write_bytes(b"")
    (tmp_path / "step_3.pt").write_bytes(b"PK")
    found = discover(tmp_path)
    assert steps(found) == [1]
    assert [problem.split(" ")[0] for problem in found.problems] == [
        str(tmp_path / "step_2.pt"),
        str(tmp_path / "step_3.pt"),
    ]
