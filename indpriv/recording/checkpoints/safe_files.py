"""Reads checkpoint files without running anything in them. What they contain is sensitive.

A pickle is a program. Only two kinds of file are read: safetensors, and zip archives of torch.save
whose pickle names nothing but tensors, numbers and plain containers. Everything else is refused,
with a message that says what to do.
"""

from __future__ import annotations

import pickletools
import struct
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from safetensors import safe_open

from indpriv._files import read_json
from indpriv._folders import refuse_links
from indpriv._reading import Text, Whole, check, table
from indpriv.errors import InputError

SUFFIXES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors", ".tar")
# In a Hugging Face checkpoint folder:
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_TRAINER_STATE = "trainer_state.json"
_STATE, _INDEX = table({Whole: "global_step?"}), table({dict[str, Text]: "weight_map"})
_SAVE_AGAIN = (
    "load it where you trust it, and save only the tensors: torch.save(model.state_dict(), path), "
    "or safetensors.torch.save_file(model.state_dict(), path)"
)

# Names in a pickle of tensors, containers and numbers. torch's own safe loader also allows
# constructors that take a size (bytearray, torch.FloatTensor, ...), with which a file of a hundred
# bytes could fill the memory.
_HARMLESS = {
    "collections OrderedDict",
    "collections Counter",
    "_codecs encode",
    "__builtin__ set",
    "builtins set",
    "__builtin__ complex",
    "builtins complex",
    "torch Size",
    "torch device",
    "torch.serialization _get_layout",
    "torch.nn.parameter Parameter",
    "torch._utils _rebuild_tensor",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
}
# Opcodes that name a class in other ways, and that torch.save does not write.
_UNUSUAL = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")


class _NumpyType:
    """Replaces numpy.dtype while a file is read: the type of a single number only."""

    def __init__(self, code: str, *_: object) -> None:
        if code not in _NUMBERS:
            raise ValueError(f"a numpy value of type {str(code)[:20]!r}")
        self.code, self.order = code, "<"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


def _numpy_number(kind: _NumpyType, content: bytes) -> int | float | bool:
    """Replaces numpy's own reconstruction of a scalar, which would accept any object."""
    if not isinstance(kind, _NumpyType) or not isinstance(content, bytes):
        raise ValueError("a numpy value that is not a single number")
    number: int | float | bool = np.frombuffer(content, kind.order + kind.code, count=1)[0].item()
    return number


_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
# Losses and noise multipliers are often numpy scalars; these functions of ours read them.
_REPLACEMENTS = (
    (_NumpyType, "numpy.dtype"),
    (_numpy_number, "numpy._core.multiarray.scalar"),
    (_numpy_number, "numpy.core.multiarray.scalar"),
)


@dataclass(frozen=True)
class Content:
    """The content of one checkpoint.

    Attributes:
        path: the file, or the folder of a Hugging Face checkpoint.
        values: the saved object; tensors are mapped from the file, not read into memory.
        step: the step in safetensors metadata or in a trainer's file beside the weights, or None.
    """

    path: Path
    values: Any
    step: int | None = None

    @property
    def entries(self) -> Mapping[Any, Any]:
        """The saved object, if it is a dict, else nothing."""
        return self.values if isinstance(self.values, Mapping) else {}


def is_checkpoint(path: Path) -> bool:
    """Whether a path is a file with the suffix of a checkpoint, or a folder with weights."""
    if path.name.startswith("."):
        return False
    return bool(_weights_of(path)) if path.is_dir() else path.suffix in SUFFIXES and path.is_file()


def read_content(path: Path) -> Content:
    """Read a checkpoint without running anything in it. Tensors stay in the file until used.

    The path is a file of torch.save or safetensors, or a folder with `model.safetensors` or
    `pytorch_model.bin`, whole or in shards.

    Raises:
        InputError: it is damaged, claims more content than its size, or could run code when read.
    """
    if not path.is_dir():
        return _read_file(path)
    values: dict[str, Any] = {}
    for file in _weights_of(path):
        part = _read_file(file)
        if part.entries is not part.values:
            kind = type(part.values).__name__
            raise InputError(f"{file} contains a {kind}, not tensors by name; {_SAVE_AGAIN}")
        values.update(part.entries)
    state = path / _TRAINER_STATE
    content = read_json(state) if state.is_file() else {}
    check(_STATE, content, str(state))
    return Content(path, values, content.get("global_step"))


def _read_file(path: Path) -> Content:
    refuse_links(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    _check_archive(path)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.serialization.safe_globals(list(_REPLACEMENTS)):
                values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # whatever torch raises at broken bytes
        raise _refusal(path, first_line(error)) from error
    return Content(path, values)


def _read_safetensors(path: Path) -> Content:
    try:
        with safe_open(path, framework="pt") as file:
            names = file.keys()  # file is not a mapping
            tensors = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata() or {}
    except Exception as error:  # likewise
        raise InputError(
            f"{path} is not a readable safetensors file: {first_line(error)}; save it again"
        ) from error
    step = metadata.get("step", metadata.get("global_step", ""))
    return Content(path, tensors, int(step) if step.isdecimal() and len(step) < 19 else None)


def _check_archive(path: Path) -> None:
    """Refuse anything but a plain archive of torch.save, before torch reads any of it."""
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            reason = _suspicion(archive.infolist(), file, path.stat().st_size)
    except zipfile.BadZipFile:
        reason = "it is cut off, or not an archive of torch.save (PyTorch 1.6 or later)"
        reason = reason if path.stat().st_size else "it is empty"
    except Exception as error:  # noqa: BLE001  # likewise
        reason = f"it is damaged ({first_line(error)})"
    if reason:
        raise _refusal(path, reason)


def _suspicion(entries: Sequence[zipfile.ZipInfo], file: IO[bytes], size: int) -> str:
    """Why an archive must not be read; "" if nothing is suspicious."""
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        return "it is a compressed archive, which torch.save never writes and which may be a bomb"
    if sum(entry.file_size for entry in entries) > size:
        return "its parts claim to be larger than the file: it may be a bomb"
    # torch's reader ignores upper and lower case.
    pickles = [entry for entry in entries if entry.filename.lower().endswith(".pkl")]
    if not pickles:
        return "it is not an archive of torch.save"
    for entry in pickles:
        for opcode, argument, _ in pickletools.genops(_stored(file, entry)):
            if opcode.name in _UNUSUAL:
                return f"its pickle uses {opcode.name}, which torch.save does not write"
            if opcode.name == "GLOBAL" and not _is_harmless(str(argument)):
                name = str(argument).replace(" ", ".")
                return f"reading it would need {name[:80]}, which could run code or fill the memory"
    return ""


def _stored(file: IO[bytes], entry: zipfile.ZipInfo) -> bytes:
    """One part, without the checksum test of zipfile: torch can write files without checksums."""
    file.seek(entry.header_offset + 26)
    name_length, extra_length = struct.unpack("<HH", file.read(4))
    file.seek(name_length + extra_length, 1)
    return file.read(entry.file_size)


def _is_harmless(name: str) -> bool:
    """Whether a name is on the list, a torch dtype, or a storage class."""
    if name in _HARMLESS or name.replace(" ", ".") in {replaced for _, replaced in _REPLACEMENTS}:
        return True
    module, _, attribute = name.partition(" ")
    if module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype):
        return True
    return module in ("torch", "torch.cuda", "torch.storage") and attribute.endswith("Storage")


def _weights_of(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face checkpoint folder; [] for any other folder."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    return []


def _shards(index: Path) -> list[Path]:
    content = read_json(index)
    check(_INDEX, content, str(index))
    names = sorted(set(content["weight_map"].values()))
    for name in names:
        if name != Path(name).name or name.startswith(".") or not (index.parent / name).is_file():
            raise InputError(
                f"{index} names {name!r}, but there is no such file beside it; "
                "save the checkpoint again"
            )
    return [index.parent / name for name in names]


def _refusal(path: Path, reason: str) -> InputError:
    return InputError(f"{path} cannot be read safely: {reason}; {_SAVE_AGAIN}")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
