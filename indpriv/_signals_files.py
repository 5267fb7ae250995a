"""The folder of an AttackSignals: rows of raw arrays, committed model by model. Sensitive.

`signal.f32` and `member.u8` hold one row of n_examples for each model, little-endian, without a
header. `signals.json` says how many rows count, with a checksum of each; it is replaced
atomically, so that a row is there whole or not at all. `ids.npz` names the examples.
"""

from __future__ import annotations

import io
import os
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from indpriv._arrays import BoolArray
from indpriv._files import read_json, write_atomically, write_json
from indpriv._folders import make_folder, open_file, refuse_links
from indpriv._reading import Whole, check, named, read_npz, table
from indpriv.errors import EvidenceError, InputError

SIGNALS = "signals.json"
_IDS, _SIGNAL, _MEMBER = "ids.npz", "signal.f32", "member.u8"
_SCHEMA = 1
_MODEL = table({list[Whole]: "crc32", dict[str, Any]: "about?"})
_CONTENT = table({dict[str, Any]: "facts settings", list[_MODEL]: "models"})  # type: ignore[valid-type]


@dataclass(frozen=True)
class SignalsFolder:
    """A folder of signals that grows by one model at a time.

    Attributes:
        path: the folder.
        example_ids, unit_ids: (n_examples,); unit_ids may be None.
        facts: kind, audited, coins, share, fingerprint and adversary.
        models: one entry for each whole row: its checksums, and what its maker noted about it.
        settings: what its maker notes about all models, compared when a series goes on.
    """

    path: Path
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None
    facts: dict[str, Any]
    models: tuple[dict[str, Any], ...]
    settings: dict[str, Any]

    @classmethod
    def create(
        cls,
        path: Path,
        example_ids: NDArray[np.generic],
        facts: dict[str, Any],
        *,
        unit_ids: NDArray[np.generic] | None = None,
        settings: dict[str, Any] | None = None,
    ) -> SignalsFolder:
        """Make a folder without models (0700); InputError if it holds anything else."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise InputError(f"{path} exists and holds no signals; choose another folder")
        make_folder(path)
        ids = {"example_ids": example_ids}
        if unit_ids is not None:
            ids["unit_ids"] = unit_ids
        buffer = io.BytesIO()
        np.savez(buffer, **ids)  # type: ignore[arg-type]
        write_atomically(path / _IDS, buffer.getvalue())
        folder = cls(path, example_ids, unit_ids, facts, (), settings or {})
        folder._commit()
        return folder

    @classmethod
    def open(cls, path: Path) -> SignalsFolder:
        """Read what a folder holds; EvidenceError where a row that counts is cut short."""
        content = read_json(path / SIGNALS)
        check(_CONTENT, content, str(path / SIGNALS))
        if content.get("schema") != _SCHEMA:
            raise EvidenceError(f"{path / SIGNALS} is of another schema; make the signals again")
        ids = read_npz(path / _IDS)
        with named(path / _IDS):
            folder = cls(
                path,
                ids["example_ids"],
                ids.get("unit_ids"),
                dict(content["facts"]),
                tuple(content["models"]),
                dict(content["settings"]),
            )
        for name, size in ((_SIGNAL, 4), (_MEMBER, 1)):
            needed = len(folder.models) * len(folder.example_ids) * size
            if needed and (not (path / name).is_file() or (path / name).stat().st_size < needed):
                raise EvidenceError(
                    f"{path / name} is shorter than the {len(folder.models)} models in "
                    f"{SIGNALS}; make the signals again"
                )
        return folder

    def append(
        self, signal: NDArray[np.float32], member: BoolArray, about: dict[str, Any] | None = None
    ) -> SignalsFolder:
        """Add one model, durably; the folder with it. A row that was cut short is overwritten."""
        n = len(self.example_ids)
        if signal.shape != (n,) or member.shape != (n,):
            raise InputError(
                f"a model has {signal.shape} signals and {member.shape} memberships, for {n} "
                "examples"
            )
        rows = (
            (_SIGNAL, np.ascontiguousarray(signal, "<f4").tobytes()),
            (_MEMBER, np.ascontiguousarray(member, np.uint8).tobytes()),
        )
        for name, row in rows:
            _write_at(self.path / name, len(self.models) * len(row), row)
        entry = {"crc32": [zlib.crc32(row) for _, row in rows], "about": about or {}}
        added = replace(self, models=(*self.models, entry))
        added._commit()
        return added

    def first(self, n: int) -> SignalsFolder:
        """The folder with its first n models only; the others do not count from the next append."""
        return replace(self, models=self.models[:n])

    def arrays(self) -> tuple[NDArray[np.float32], BoolArray]:
        """Signals and memberships, (n_models, n_examples) each, mapped from the files.

        Raises:
            InputError: there is no model.
            EvidenceError: a row does not match its checksum.
        """
        shape = (len(self.models), len(self.example_ids))
        if not self.models:
            raise InputError(f"{self.path} holds no model yet; run train_references again")
        for name in (_SIGNAL, _MEMBER):
            refuse_links(self.path / name)
        signal = np.memmap(self.path / _SIGNAL, "<f4", "r", shape=shape)
        member = np.memmap(self.path / _MEMBER, np.uint8, "r", shape=shape)
        for model, entry in enumerate(self.models):
            found = [zlib.crc32(part[model].tobytes()) for part in (signal, member)]
            if found != list(entry["crc32"]):
                raise EvidenceError(
                    f"model {model} in {self.path} does not match its checksum; make the signals "
                    "again"
                )
        return signal, member.view(np.bool_)

    def _commit(self) -> None:
        content = {
            "schema": _SCHEMA,
            "sensitive": "for the curator only",
            "facts": self.facts,
            "settings": self.settings,
            "models": list(self.models),
        }
        write_json(self.path / SIGNALS, content)


def _write_at(path: Path, offset: int, row: bytes) -> None:
    descriptor = open_file(path, os.O_WRONLY | os.O_CREAT)
    with os.fdopen(descriptor, "wb") as file:  # fdopen does not truncate
        file.seek(offset)
        file.write(row)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
