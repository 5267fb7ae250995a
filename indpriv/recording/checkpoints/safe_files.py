"""From a checkpoint file to a model's parameters, without running anything in it. Sensitive.

A pickle is a program. Only two kinds of file are read: safetensors, and zip archives of torch.save
whose pickle names nothing but tensors, numbers and plain containers. Everything else is refused,
with a message that says what to do.
"""

import hashlib
import pickletools
import warnings
import zipfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from indpriv._facts import refused, text
from indpriv._files import SUFFIXES, read_json, write_atomically
from indpriv._folders import make_folder, refuse_links
from indpriv._reading import Text, Whole, check, named, table
from indpriv.errors import InputError
from indpriv.norm_log.run_files import MODEL
from indpriv.recording.norms.batches import described, parts_of

LoadFn = Callable[[Any], Mapping[str, Tensor]]
"""`load(state)` -> state_dict, for unusual layouts; state is the object saved in the file."""

# In a Hugging Face checkpoint folder:
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "adapter_model.safetensors")
_TRAINER_STATE = "trainer_state.json"
_STATE, _INDEX = table({Whole: "global_step?"}), table({dict[str, Text]: "weight_map"})
# Where trainers store the parameters: indpriv and most scripts, Opacus, Lightning, others.
_PLACES = (
    *("model_state_dict", "module_state_dict", "state_dict"),
    *("model", "net", "module", "weights", "params"),
)
_SHOWN = 5
_SAVE_AGAIN = text("sentence.replay", "save_again")

# Names in a pickle of tensors, containers and numbers. torch's own safe loader also allows
# constructors that take a size (bytearray, torch.FloatTensor, ...), with which a file of a hundred
# bytes could fill the memory.
_HARMLESS = {
    "collections": ("OrderedDict", "Counter"),
    "_codecs": ("encode",),
    "__builtin__": ("set", "complex"),
    "builtins": ("set", "complex"),
    "torch": ("Size", "device"),
    "torch.serialization": ("_get_layout",),
    "torch.nn.parameter": ("Parameter",),
    "torch._utils": (
        *("_rebuild_parameter", "_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3"),
    ),
}
# Opcodes that name a class in other ways, and that torch.save does not write.
_UNUSUAL = ("STACK_GLOBAL", "INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4")
_NUMBERS = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")


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


class _Accountant:
    """Replaces the accountants of Opacus, whose states name a method of theirs in Opacus 1.5."""

    # None holds an accountant: a file that makes one could give it a __setstate__.

    def __new__(cls, *_: object) -> "_Accountant":
        raise ValueError("reading it would make an object, which could run code")


def _method(kind: type, name: str) -> str:
    """Replaces getattr, for the name of an accountant's method only."""
    if kind is not _Accountant or name != "mechanism":
        raise ValueError("reading it would need getattr, which could run code")
    return name


# Losses and noise multipliers are often numpy scalars; these functions of ours read them.
_REPLACEMENTS = {
    **dict.fromkeys(("__builtin__.getattr", "builtins.getattr"), _method),
    "opacus.accountants.rdp.RDPAccountant": _Accountant,
    "opacus.accountants.prv.PRVAccountant": _Accountant,
    "opacus.accountants.gdp.GaussianAccountant": _Accountant,
    "numpy.dtype": _NumpyType,
    "numpy._core.multiarray.scalar": _numpy_number,
    "numpy.core.multiarray.scalar": _numpy_number,
}


@dataclass(frozen=True)
class Content:
    """The content of one checkpoint."""

    path: Path  # the file, or the folder of a Hugging Face checkpoint
    values: Any  # the saved object; tensors are mapped from the file, not read into memory
    # As safetensors metadata, a trainer's file beside the weights, or the saved dict states it.
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
    """Read a checkpoint without running anything in it; tensors stay in the file until used.

    The path is a file of torch.save or safetensors, or a folder of `_WEIGHTS`, whole or in shards.
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


def _weights_of(folder: Path) -> list[Path]:
    """The weight files of a Hugging Face checkpoint folder; [] for any other folder."""
    for name in _WEIGHTS:
        if (folder / name).is_file():
            return [folder / name]
        if not (index := folder / f"{name}.index.json").is_file():
            continue
        content = read_json(index)
        check(_INDEX, content, str(index))
        shards = sorted(set(content["weight_map"].values()))
        for shard in shards:
            if shard != Path(shard).name or shard.startswith(".") or not (folder / shard).is_file():
                raise refused("refusal.checkpoints", "no_shard", index=index, shard=shard)
        return [folder / shard for shard in shards]
    return []


def _read_file(path: Path) -> Content:
    refuse_links(path)
    if path.suffix == ".safetensors":
        try:
            with safe_open(path, framework="pt") as file:
                names = file.keys()  # file is not a mapping
                tensors = {name: file.get_tensor(name) for name in names}
                metadata = file.metadata() or {}
        except Exception as error:  # whatever it raises at broken bytes
            reason = first_line(error)
            raise refused("refusal.checkpoints", "tensors", path=path, reason=reason) from error
        step = metadata.get("step", metadata.get("global_step", ""))
        return Content(path, tensors, int(step) if step.isdecimal() and len(step) < 19 else None)
    replacements: list[Any] = [(ours, name) for name, ours in _REPLACEMENTS.items()]
    reason = _suspicion(path)
    if not reason:
        try:
            with warnings.catch_warnings(), torch.serialization.safe_globals(replacements):
                warnings.simplefilter("ignore")
                values = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
                return Content(path, values, _step_in(values))
        except Exception as error:  # noqa: BLE001  # likewise
            reason = first_line(error)
    raise InputError(f"{path} cannot be read safely: {reason}; {_SAVE_AGAIN}")


def _step_in(values: Any) -> int | None:
    """The whole number, or tensor of one, that a saved dict calls step or global_step."""
    for name in ("step", "global_step") if isinstance(values, Mapping) else ():
        step = values.get(name)
        if isinstance(step, Tensor) and step.numel() == 1 and not step.is_floating_point():
            step = step.item()
        if type(step) is int and 0 <= step < 10**12:
            return step
    return None


def _suspicion(path: Path) -> str:
    """Why a file is no plain archive of torch.save, found before torch reads it; "" if it is."""
    try:
        with zipfile.ZipFile(path) as archive:
            parts = archive.infolist()
        if any(part.compress_type != zipfile.ZIP_STORED for part in parts):
            return (
                "it is a compressed archive, which torch.save never writes and which may be a bomb"
            )
        if sum(part.file_size for part in parts) > path.stat().st_size:
            return "its parts claim to be larger than the file: it may be a bomb"
        # By torch's own reader, which ignores upper and lower case: these bytes it will run.
        with torch.serialization._open_zipfile_reader(str(path)) as reader:
            if not reader.has_record("data.pkl"):
                return "it is not an archive of torch.save"
            return _harm(reader.get_record("data.pkl"))
    except zipfile.BadZipFile:
        if not path.stat().st_size:
            return "it is empty"
        return "it is cut off, or not an archive of torch.save (PyTorch 1.6 or later)"
    except Exception as error:  # noqa: BLE001  # whatever is raised at broken bytes
        return f"it is damaged ({first_line(error)})"


def _harm(pickled: bytes) -> str:
    """What a pickle would need that is not on the list, a torch dtype or a storage class."""
    for opcode, argument, _ in pickletools.genops(pickled):
        if opcode.name in _UNUSUAL:
            return f"its pickle uses {opcode.name}, which torch.save does not write"
        if opcode.name == "GLOBAL":
            module, _, attribute = str(argument).partition(" ")
            name = f"{module}.{attribute}"
            known = attribute in _HARMLESS.get(module, ()) or name in _REPLACEMENTS
            storage = attribute.endswith("Storage")
            storage = storage and module in ("torch", "torch.cuda", "torch.storage")
            dtype = module == "torch" and isinstance(getattr(torch, attribute, None), torch.dtype)
            if not (known or storage or dtype):
                return f"reading it would need {name[:80]}, which could run code or fill the memory"
    return ""


def state_of(content: Content, load: LoadFn | None = None) -> dict[str, Tensor]:
    """The state_dict inside a checkpoint, where the user's `load` or usual places have it."""
    names = [str(name)[:40] for name in content.entries]
    holds = f"a dict of {', '.join([*names[:_SHOWN], *(['...'] if names[_SHOWN:] else [])])}"
    if not names:
        holds = f"a {type(content.values).__name__} without names"
    if load is not None:
        try:
            found = _tensors(load(content.values))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            kind, path = type(error).__name__, content.path
            said = {"kind": kind, "path": path, "error": error, "described": holds}
            raise refused("refusal.checkpoints", "load_failed", **said) from error
    else:
        nested = (_tensors(content.entries.get(name)) for name in _PLACES)
        bare = _tensors(content.values)
        found = next(filter(None, nested), bare if len(bare) == len(content.entries) else {})
    if not found:
        raise refused("refusal.checkpoints", "state", path=content.path, found=holds)
    return found


def _tensors(values: object) -> dict[str, Tensor]:
    """The entries of a mapping that are tensors with a name."""
    items = values.items() if isinstance(values, Mapping) else ()
    return {k: v for k, v in items if isinstance(k, str) and isinstance(v, Tensor)}


def fit(state: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Match a saved state to a model: prefixes of wrappers are removed, tied parameters filled in.

    The prefix (Opacus `_module.`, `module.`, `_orig_mod.`, an attribute) is found by comparison.
    Tensors outside it are ignored; under it, names, shapes and types must match (InputError).
    """
    wanted, tied = model.state_dict(keep_vars=True), defaultdict[int, list[str]](list)
    for name, tensor in wanted.items():
        tied[id(tensor)].append(name)
    prefix = _prefix(state, [*tied.values()])
    inner = {name.removeprefix(prefix): t for name, t in state.items() if name.startswith(prefix)}
    if averaged := {f"{prefix}n_averaged", "n_averaged"} & (state.keys() - wanted.keys()):
        raise refused("refusal.checkpoints", "averaged", name=min(averaged))
    for names in tied.values():  # safetensors stores a tensor under one of its names only
        for present in [name for name in names if name in inner][:1]:
            inner |= {name: inner.get(name, inner[present]) for name in names}
    both = [(name, inner[name], tensor) for name, tensor in wanted.items() if name in inner]
    compared = [(name, *map(described, pair)) for name, *pair in both]
    differences = [
        *(f"{name} is {a} in the file and {b} in the model" for name, a, b in compared if a != b),
        *(f"{name} is missing from the file" for name in wanted if name not in inner),
        *(f"{name} is unknown to the model" for name in inner if name not in wanted),
    ]
    if differences:
        more = f"; and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        shown = "; ".join(differences[:_SHOWN]) + more
        raise refused("refusal.checkpoints", "other_parameters", differences=shown)
    return inner


def _prefix(state: Mapping[str, Tensor], tied: list[list[str]]) -> str:
    """What stands before all names of a model, by tensor; if nothing does, before most of them."""
    found = Counter[str]()
    for names in tied:
        pairs = product(names, state)
        found.update({x[: -len(own)] for own, x in pairs if f".{x}".endswith(f".{own}")})
    whole = [prefix for prefix, times in sorted(found.items()) if times == len(tied)]
    if len(whole) > 1 and "" not in whole:
        raise refused("refusal.checkpoints", "several_models", prefixes=whole)
    return max(sorted({"", *found}), key=found.__getitem__)


def load_into(model: nn.Module, path: Path, load: LoadFn | None = None) -> dict[str, Tensor]:
    """Load a checkpoint into a model, if all values are finite, and return what was loaded."""
    with named(path, broken=()):
        state = fit(state_of(read_content(path), load), model)
        for name, tensor in state.items():
            real = tensor.is_floating_point() or tensor.is_complex()
            if real and not torch.isfinite(tensor).all():
                raise refused("refusal.checkpoints", "diverged", name=name)
    model.load_state_dict(state)
    return state


def keep_model(model: nn.Module, run_dir: Path, name: str = MODEL) -> None:
    """Write the final parameters and buffers of a run into its directory, for its owner only."""
    make_folder(run_dir, Path(name).parent.name)
    state = model.state_dict()
    plain = {name: one.detach().cpu().contiguous().clone() for name, one in state.items()}
    write_atomically(run_dir / name, save(plain))  # clones, as no two may share memory


def kept_model(run_dir: Path, model: nn.Module, name: str = MODEL) -> bool:
    """Load the final parameters of a run into a model like its own; whether the run kept them."""
    if kept := (run_dir / name).is_file():
        load_into(model, run_dir / name)
    return kept


def fingerprint_of(state: Mapping[str, Tensor]) -> str:
    """Hash of the names, shapes, types and values of a state."""
    digest = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name].detach().cpu()
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        for part in parts_of(tensor):
            digest.update(part.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
