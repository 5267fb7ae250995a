import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from indpriv.errors import InputError
from indpriv.recording.checkpoints.discovery import discover, natural_key
from indpriv.recording.checkpoints.step_names import step_in_name, steps_said, what_to_type


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
    assert all(step_in_name(name) is None or "step" in name.lower() for name in names)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("step_10.pt", 10),
        ("step-000340.pth", 340),
        ("global_step12.pt", 12),
        ("globalstep12.pt", 12),
        ("Step=400-v1.ckpt", 400),
        ("seed2_step_100-loss=0.53.pt", 100),
        ("steps_7.pt.tar", 7),
        ("step_99999999999999999999.pt", None),
        # these may count anything
        *[(name, None) for name in ("7.pt", "model_0.pt", "ckpt_3.pt", "iter_100.pt", "resnet20_400.pt")],
        *[(name, None) for name in ("best.pt", "checkpoint-500", "checkpoint_4.pt", "misstep_4.pt")],
        # not whole numbers, or several
        *[(name, None) for name in ("step_10k.pt", "step_1e5.pt", "step_1.5.pt", "step_-5.pt", "step_1_step_2.pt")],
        # steps of the epoch or of the run
        *[(name, None) for name in ("epoch=3-step=400.ckpt", "ep3_step_5.pt", "step_5_e3.pt", "round_2_step_9.pt")],
        *[(name, None) for name in ("epoch_3.pt", "epoch3.pt", "step.pt")],
    ],
)  # fmt: skip
def test_steps_in_names(name, expected):
    assert step_in_name(name) == expected


EPOCHS = [f"model_{epoch}.pt" for epoch in range(5)]


@pytest.mark.parametrize(
    ("rules", "names", "steps"),
    [
        ("model_{epoch}.pt=20*epoch", EPOCHS, [0, 20, 40, 60, 80]),
        ("model_{epoch}.pt = 20 * (epoch + 1) ", EPOCHS, [20, 40, 60, 80, 100]),
        (["model_{i}.pt=-(-i)*10-i*3+0"], EPOCHS, [0, 7, 14, 21, 28]),
        ("model_{epoch}.pt=0020", ["model_07.pt"], None),
        ("a.pt=0,b.pt=20", ["a.pt", "b.pt"], [0, 20]),
        (["a.pt=0", "b.pt=20,c{x}.pt=x"], ["a.pt", "b.pt", "c30.pt"], [0, 20, 30]),
        ("epoch={e}-step={s}.ckpt=e*20+s", ["epoch=2-step=3.ckpt"], [43]),
        ("m.x+({n}).pt=n", ["m.x+(5).pt"], [5]),
    ],
)
def test_steps_that_the_user_says(rules, names, steps):
    if steps is None:  # 0020 is not a number of Python
        with pytest.raises(InputError, match="is not FILE=STEP"):
            steps_said(rules, names)
        return
    assert steps_said(rules, names) == dict(zip(names, steps, strict=True))


@given(st.integers(0, 10**5), st.integers(0, 10**4), st.integers(0, 99))
def test_what_the_user_says_is_computed(epoch, per, offset):
    said = steps_said(f"m{{epoch}}.pt={per}*(epoch+{offset})", [f"m{epoch}.pt"])
    expected = per * (epoch + offset)
    assert said == {f"m{epoch}.pt": expected}


@pytest.mark.parametrize(
    "rule",
    [
        "", "=", "x", "=20", "model_{epoch}.pt", "model_{epoch}.pt=", "model_{epoch}.pt=20epoch",
        "model_{epoch}.pt=20*epochs", "model_{epoch}.pt=20/epoch", "model_{epoch}.pt=20//epoch",
        "model_{epoch}.pt=9**epoch", "model_{epoch}.pt=1.5*epoch", "model_{epoch}.pt=1e3",
        "model_{epoch}.pt=True", "model_{epoch}.pt=epoch()", "model_{epoch}.pt=__import__('os')",
        "model_{epoch}.pt=(lambda: 1)()", "model_{epoch}.pt=epoch if epoch else 1",
        "model_{epoch}.pt=[epoch][0]", "model_{epoch}.pt=epoch.real", "model_{epoch}.pt=epoch;1",
        "model_{epoch}.pt=" + "(" * 60 + "1" + ")" * 60, "model_{epoch}.pt=" + "-" * 5000 + "1",
        "model_{epoch}.pt=1 if epoch", "model_{epoch}.pt=epoch<2", "model_{epoch}.pt=20\n*epoch",
        "model_{epoch}_{epoch}.pt=epoch", "model_{a}{b}.pt=a", "model_{}.pt=20", "model_{0}.pt=20",
        "model_{epoch.pt=20", "model_epoch}.pt=20", "model_{{epoch}}.pt=20*epoch", "a.pt=\x00",
        "model_{epoch}.pt=20*ep\u043ech", "model_0.pt=0,,b.pt=20", "model_{epoch}.pt=20 epoch",
    ],
)  # fmt: skip
def test_rules_that_cannot_be_read_are_one_message(rule):
    with pytest.raises(InputError) as error:
        steps_said(rule, EPOCHS)
    text = str(error.value)
    assert "is not FILE=STEP" in text
    assert '--set step_of="model_{epoch}.pt=20*epoch"' in text
    assert "\n" not in text
    assert len(text) < 700


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ("net_{epoch}.pt=20*epoch", ["'net_{epoch}.pt=20*epoch' matches none", "'model_0.pt', 'model_1.pt', 'model_2.pt', ...", "without their folder", '"model_{epoch}.pt=20*epoch"']),
        ("saved/model_{epoch}.pt=20*epoch", ["matches none of the checkpoints"]),
        ("model_{epoch}.pt=20*epoch-20", ["'model_0.pt' would be of step -20;"]),
        ("model_{epoch}.pt=99999999999999*epoch", ["'model_1.pt' would be of step 99999999999999;", "to 1000000000000"]),
        ("model_{e}.pt=" + "e*" * 40 + "e+10000000000000", ["would be of step"]),
        (["model_{epoch}.pt=20*epoch", "model_4.pt=100"], ["'model_4.pt' would be of step 100, and 80 by another rule"]),
    ],
)  # fmt: skip
def test_rules_that_do_not_fit_are_one_message(rules, words):
    with pytest.raises(InputError) as error:
        steps_said(rules, EPOCHS)
    for word in words:
        assert word in str(error.value)


@given(
    st.lists(
        st.text(st.characters(exclude_characters="/\0"), min_size=1, max_size=12),
        min_size=1,
        unique=True,
    )
)
def test_what_to_type_can_be_typed(names):
    """The example is always a rule, and matches files unless their names mean something to a shell."""
    rule = what_to_type(names).split('"')[1]
    try:
        assert set(steps_said(rule, names)) <= set(names)
    except InputError as error:
        assert "matches none" in str(error) or "would be" in str(error)


@pytest.mark.parametrize(
    ("names", "typed"),
    [
        ([*EPOCHS, "best.pt"], "model_{epoch}.pt=20*epoch"),
        (["model_a.pt", "model_b.pt"], "model_a.pt=0,model_b.pt=20"),
        (["step_1.pt", "step_2.pt"], "step_{step}.pt=step"),
        (["checkpoint-1", "checkpoint-2"], "checkpoint-{step}=step"),
        (["epoch=1-step=5.ckpt", "epoch=2-step=9.ckpt"], "epoch={epoch}-step={step}.ckpt=step"),
        (["resnet20_400.pt", "resnet20_800.pt"], "resnet20_{epoch}.pt=20*epoch"),
        (["m1_acc0.91.pt", "m2_acc0.95.pt"], "m{epoch}_acc0.{n14}.pt=20*epoch"),
        (['a"$(x)1.pt', 'a"$(x)2.pt'], "FILE=20"),
        (["ckpt_3.pt"], "ckpt_3.pt=20"),
    ],
)
def test_what_to_type(names, typed):
    shown, _, more = what_to_type(names).removeprefix('--set step_of="').partition('"')
    assert shown == typed
    assert ("20*(epoch+1)" in more) == ("*epoch" in typed)


def test_the_step_inside_decides(tmp_path):
    save(tmp_path, "step_10.pt", {"step": 900, "model": state(9)})
    save(tmp_path, "step_9.pt", {"global_step": torch.tensor(1000), "state_dict": state(10)})
    save(tmp_path, "whatever.pt", opacus(8, (1.0, 0.1, 500), (0.9, 0.1, 300)))
    found = discover(tmp_path)
    assert steps(found) == [800, 900, 1000]
    assert found.models[0].history == ((1.0, 0.1, 500), (0.9, 0.1, 300))
    assert found.problems == ()
    assert any(
        "'step_10.pt' is of step 900 by the step stored inside, not 10 by its name" in note
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
        "'last.ckpt', 'step_100.pt' are the same model, of step 100; it is replayed once"
        in found.notes
    )
    save(tmp_path, "best.pt", {"step": 100, "model": state(2)})
    (problem,) = discover(tmp_path).problems
    assert "all of step 100 by the step stored inside, with different parameters" in problem


def test_gaps_are_reported(tmp_path):
    for step in (0, 100, 200, 500, 600):
        save(tmp_path, f"step_{step}.pt", state(step))
    assert discover(tmp_path).notes == (
        "checkpoints are usually 100 steps apart, but there is none between 200 and 500",
    )


@pytest.mark.parametrize("names", [EPOCHS, [f"epoch_{i}.pt" for i in range(5)], ["ckpt_3.pt"]])
def test_nothing_tells_the_step(tmp_path, names):
    for value, name in enumerate(names):
        save(tmp_path, name, {"epoch": value, "model": state(value)})
    (problem,) = discover(tmp_path).problems
    assert f"the step of {names[0]!r}" in problem
    assert "is neither in the file" in problem
    assert what_to_type(names) in problem
    assert discover(tmp_path).models == ()


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
    assert '--set step_of="checkpoint-{step}=step"' in problem
    assert steps(discover(tmp_path, step_of="checkpoint-{epoch}=20*epoch")) == [20, 40]


def test_the_user_says_the_steps(tmp_path):
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", {"step": epoch, "model": state(epoch)})
    found = discover(tmp_path, step_of="model_{epoch}.pt=20*epoch")
    assert steps(found) == [0, 20, 40]
    assert {model.said_by for model in found.models} == {"--set step_of"}
    assert (
        "'model_2.pt' is of step 40 by --set step_of, not 2 by the step stored inside"
        in found.notes
    )


def test_rules_for_some_of_the_files(tmp_path):
    """Where the user gives rules, no other name is read; what stands in a file still counts."""
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", state(epoch))
    save(tmp_path, "step_60.pt", state(6))
    save(tmp_path, "inside.pt", {"step": 80, "model": state(8)})
    found = discover(tmp_path, step_of="model_{epoch}.pt=20*epoch")
    assert steps(found) == [0, 20, 40, 80]
    (problem,) = found.problems
    assert "--set step_of matches only some of the checkpoints: the step of 'step_60.pt'" in problem


def test_rules_that_give_two_models_one_step(tmp_path):
    for epoch in range(3):
        save(tmp_path, f"model_{epoch}.pt", state(epoch))
    (problem,) = discover(tmp_path, step_of="model_{epoch}.pt=20").problems
    assert "'model_0.pt', 'model_1.pt', 'model_2.pt' are all of step 20 by --set step_of" in problem
    assert '--set step_of="model_{epoch}.pt=20*epoch"' in problem


@pytest.mark.parametrize("said", [50, 150])
def test_rules_that_contradict_the_accountant(tmp_path, said):
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
    with pytest.raises(InputError, match=r"it contains 'notes\.txt'"):
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
