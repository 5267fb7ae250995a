import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opacus.accountants import GaussianAccountant, PRVAccountant, RDPAccountant
from safetensors.torch import save_file
from torch import nn

from indpriv.errors import InputError
from indpriv.recording.checkpoints.safe_files import is_checkpoint, read_content, state_of
from indpriv.recording.checkpoints.saved_models import discover

STATE = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.zeros(2)}


class Touch:
    """A pickle of this makes a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def saved(tmp_path):
    torch.save({"step": 3, "model_state_dict": STATE}, tmp_path / "a.pt")
    return tmp_path / "a.pt"


def refused(path, *words):
    with pytest.raises(InputError) as error:
        read_content(path)
    for word in (str(path), *words):
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_what_torch_save_writes_is_read(tmp_path):
    content = {
        "parameter": nn.Parameter(torch.ones(3)), "half": torch.ones(2, dtype=torch.bfloat16), "set": {1, 2},
        "bytes": b"x", "dtype": torch.float32, "device": torch.device("cpu"), "complex": 1 + 2j, "nested": [(1, None)],
    }  # fmt: skip
    torch.save(content, tmp_path / "a.pt")
    read = read_content(tmp_path / "a.pt").values
    assert read["parameter"].tolist() == [1, 1, 1]
    assert (read["set"], read["bytes"], read["complex"]) == ({1, 2}, b"x", 1 + 2j)


def test_files_without_checksums(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(STATE, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(read_content(tmp_path / "a.pt").values["weight"], STATE["weight"])


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_a_malicious_pickle_runs_nothing(tmp_path, protocol):
    torch.save({"weight": Touch(tmp_path / "made")}, tmp_path / "zip.pt", pickle_protocol=protocol)
    torch.save(
        {"weight": Touch(tmp_path / "made")},
        tmp_path / "old.pt",
        _use_new_zipfile_serialization=False,
    )
    (tmp_path / "bare.bin").write_bytes(pickle.dumps(Touch(tmp_path / "made"), protocol))
    (tmp_path / "fake.safetensors").write_bytes(pickle.dumps(Touch(tmp_path / "made"), protocol))
    for name in ("zip.pt", "old.pt", "bare.bin"):
        refused(tmp_path / name, "cannot be read safely", "torch.save(model.state_dict(), path)")
    refused(tmp_path / "fake.safetensors", "save it again")
    with pytest.raises(InputError):
        read_content(tmp_path / "zip.pt")
    assert discover(tmp_path).models == []
    assert not (tmp_path / "made").exists()


def test_the_refusal_names_what_reading_would_need(tmp_path):
    from argparse import Namespace

    torch.save({"args": Namespace(lr=0.1), "model": STATE}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "argparse.Namespace", "load it where you trust it")


@pytest.mark.parametrize(
    "name", ["__builtin__ bytearray", "torch FloatTensor", "torch._utils _rebuild_wrapper_subclass"]
)
@pytest.mark.parametrize("file", ["data.pkl", "DATA.PKL"])
def test_constructors_that_torch_allows_but_which_can_fill_the_memory(tmp_path, name, file):
    module, attribute = name.split()
    program = b"\x80\x02c" + f"{module}\n{attribute}\n".encode() + b"K\x05\x85R."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr(f"a/{file}", program)
        archive.writestr("a/version", "3\n")
    refused(tmp_path / "a.pt", attribute)


@pytest.mark.parametrize(
    "number",
    [np.float64(1.5), np.float32(1.5), np.int64(-3), np.uint8(7), np.bool_(True), np.float16(0.5)],
)
def test_numpy_numbers_are_read_as_numbers(tmp_path, number):
    torch.save({"loss": number, "weight": torch.ones(2)}, tmp_path / "a.pt")
    loss = read_content(tmp_path / "a.pt").values["loss"]
    assert loss == number.item()
    assert type(loss) is type(number.item())


@pytest.mark.parametrize(
    "value",
    [np.str_("x"), np.datetime64("2020-01-01"), np.ones(3), np.complex128(1j), np.void(b"xx")],
)
def test_other_numpy_values_are_refused(tmp_path, value):
    torch.save({"value": value}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", "numpy")


def test_an_object_disguised_as_a_numpy_number(tmp_path):
    inner = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x85R"
    program = b"\x80\x02cnumpy._core.multiarray\nscalar\n" + inner + b"X\x01\x00\x00\x00a\x86R."
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
    refused(tmp_path / "a.pt", "a numpy value of type 'O8'")


def test_an_accountant_of_opacus_1_5_is_read_as_text(tmp_path):
    """Its state_dict holds a method, as which torch saves getattr and the class."""
    history = [(1.0, 0.1, 3)]
    for accountant in (RDPAccountant, PRVAccountant, GaussianAccountant):
        path = tmp_path / "a.pt"
        torch.save({"history": history, "mechanism": accountant.mechanism}, path)
        assert read_content(path).values == {"history": history, "mechanism": "mechanism"}


def test_no_other_attribute_is_looked_up(tmp_path):
    class Looked:
        def __init__(self, owner, name):
            self.asked = owner, name

        def __reduce__(self):
            return getattr, self.asked

    for owner, name in ((RDPAccountant, "get_epsilon"), (dict, "fromkeys"), ("text", "join")):
        torch.save({"mechanism": Looked(owner, name)}, tmp_path / "a.pt")
        refused(tmp_path / "a.pt", "reading it would need")


@pytest.mark.parametrize(
    "makes", [b")R", b")\x81", b")\x81}X\x0c\x00\x00\x00__setstate__cbuiltins\nset\nsb]b"]
)
def test_no_accountant_is_made(tmp_path, makes):
    """An object with a __setstate__ of the file's own would call what the file says."""
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        program = b"\x80\x02copacus.accountants.rdp\nRDPAccountant\n" + makes + b"."
        archive.writestr("a/data.pkl", program)
        archive.writestr("a/version", "3\n")
        archive.writestr("a/byteorder", "little")
    refused(tmp_path / "a.pt", "reading it would make an object")


def test_a_zip_bomb(tmp_path, saved):
    with (
        zipfile.ZipFile(saved) as archive,
        zipfile.ZipFile(tmp_path / "bomb.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for entry in archive.infolist():
            bomb.writestr(entry.filename, archive.read(entry))
        bomb.writestr("a/data/9", b"\0" * 50_000_000)
    assert (tmp_path / "bomb.pt").stat().st_size < 200_000
    refused(tmp_path / "bomb.pt", "may be a bomb")


def test_parts_that_overlap(tmp_path, saved):
    content = bytearray(saved.read_bytes())
    start = content.index(b"PK\x01\x02")
    content[start + 20 : start + 28] = struct.pack(
        "<II", 2**30, 2**30
    )  # compressed and real size of the first part
    (tmp_path / "b.pt").write_bytes(content)
    refused(tmp_path / "b.pt", "may be a bomb")


@pytest.mark.parametrize("kept", [0, 1, 30, 0.5, 0.99])
def test_a_file_that_is_cut_off(saved, kept):
    content = saved.read_bytes()
    saved.write_bytes(content[: kept if isinstance(kept, int) else int(kept * len(content))])
    refused(saved, "it is empty" if kept == 0 else "cut off")


def test_a_truncated_safetensors_file(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors")
    content = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(content[:-4])
    refused(tmp_path / "a.safetensors", "not a readable safetensors file")


def test_safetensors_with_a_step(tmp_path):
    save_file(STATE, tmp_path / "a.safetensors", metadata={"step": "42"})
    content = read_content(tmp_path / "a.safetensors")
    assert content.step == 42
    assert torch.equal(content.values["weight"], STATE["weight"])


def test_a_folder_in_shards(tmp_path):
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    save_file({"weight": STATE["weight"]}, folder / "model-00001-of-00002.safetensors")
    save_file({"bias": STATE["bias"]}, folder / "model-00002-of-00002.safetensors")
    places = {
        "weight": "model-00001-of-00002.safetensors",
        "bias": "model-00002-of-00002.safetensors",
    }
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "training_args.bin").write_bytes(pickle.dumps(Touch(tmp_path / "made")))
    assert is_checkpoint(folder)
    assert set(read_content(folder).values) == {"weight", "bias"}
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/passwd", ".hidden.safetensors", "missing.safetensors"]
)
def test_an_index_that_climbs_out_of_its_folder(tmp_path, name):
    save_file(STATE, tmp_path / "outside.safetensors")
    folder = tmp_path / "checkpoint-500"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"weight": name}})
    )
    with pytest.raises(InputError, match="no such file beside it"):
        read_content(folder)


def test_what_does_not_look_like_a_checkpoint(tmp_path):
    for name in ("notes.txt", ".step_1.pt", "runs"):
        (tmp_path / name).mkdir() if name == "runs" else (tmp_path / name).write_text("x")
        assert not is_checkpoint(tmp_path / name)


def whole_archive(folder: Path) -> bytes:
    torch.save({"step": 3, "model_state_dict": STATE}, folder / "whole.pt")
    return (folder / "whole.pt").read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_bytes_are_read_or_refused(tmp_path, data):
    """Changed archives, safetensors and pickles: tensors or one InputError, nothing else."""
    kind = data.draw(st.sampled_from(["zip", "pickle", "safetensors", "random"]))
    suffix = ".safetensors" if kind == "safetensors" else ".pt"
    if kind == "safetensors":
        save_file(STATE, tmp_path / "whole.safetensors")
        content = bytearray((tmp_path / "whole.safetensors").read_bytes())
    elif kind == "random":
        content = bytearray(data.draw(st.binary(max_size=300)))
    else:
        content = bytearray(whole_archive(tmp_path))
    if kind == "pickle":  # only the program inside is changed, so that it is reached
        with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
            program = archive.read("whole/data.pkl")
        first, last = content.index(program), content.index(program) + len(program)
    else:
        first, last = 0, len(content)
    for _ in range(data.draw(st.integers(1, 4)) if last else 0):
        content[data.draw(st.integers(first, last - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / f"fuzzed{suffix}"
    path.write_bytes(bytes(content))
    try:
        state = state_of(read_content(path))
    except InputError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in state.values())
