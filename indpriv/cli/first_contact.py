"""What to type next where a command did not get the run or the audit file that it needs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from indpriv._storage import is_remote, location
from indpriv.errors import InputError

_LEVELS = 3  # of folders that are searched for runs
_NAMED = 5  # runs or files that a message names
_MOVED = {  # to audits/
    "sweep": "sweep",
    "attack exposure": "exposure",
    "advise": "",
    "train": "train",
    "shadow": "shadow",
    "lint": "lint",
    "attack run": "attack",
    "leak": "leak",
}
_DELETES = {"--without", "--without-ids"}
_TRAINS = _DELETES | {"--subsets", "--seeds", "--jobs"}  # of advise: it trained new runs
_ARCHIVES = {".zip": "zipfile", ".tar": "tarfile", ".tgz": "tarfile", ".gz": "tarfile"}


def checked_run(path: Path | None, command: str, program: str = "indpriv") -> Path:
    """The path, if it is a run directory.

    command, program: as they are typed before it.

    Raises:
        InputError: it is missing or something else; the message says what to type next.
    """
    from indpriv.norm_log.run_files import JOURNAL, RUN_DIRECTORY, holds_log

    command = f"{program} {command}"
    if path is None:
        raise InputError(f"{command} needs a run directory; {_type_one(command, Path())}")
    path = location(path)
    if holds_log(path):
        return path
    if is_remote(path):
        raise InputError(f"{path} holds no {JOURNAL}; {RUN_DIRECTORY}")
    if not path.exists():
        raise InputError(f"{path} does not exist; {_type_one(command, Path())}")
    raise InputError((_of_folder if path.is_dir() else _of_file)(path, command))


def _of_folder(path: Path, command: str) -> str:
    from indpriv.audit.audit_directory import REPORT, SUMMARY
    from indpriv.norm_log.run_files import JOURNAL, RUN_DIRECTORY

    if (path / SUMMARY).is_file():
        return (
            f"{path} is an audit directory, and {command} needs a run directory. To read the "
            f"audit, open {path / REPORT} or type: {typed('groups', path)}\n  "
            f"For a run, {_type_one(command, path, path.parent)}"
        )
    if _runs_in(path):
        return f"{path} holds no {JOURNAL}, but folders in it do; {_type_one(command, path)}"
    found = sorted(item.name for item in path.iterdir())[:_NAMED]
    holds = f"it holds {', '.join(found)}" if found else "it is empty"
    return f"{path} holds no {JOURNAL} ({holds}); {RUN_DIRECTORY}. {_replayed(path)}"


def _of_file(path: Path, command: str) -> str:
    from indpriv.audit.audit_directory import SUMMARY
    from indpriv.norm_log.run_files import holds_log

    folder = path.parent
    if holds_log(folder):
        return f"{path} is one file of a run; type: {typed(command, folder, '')}"
    if (folder / SUMMARY).is_file():
        return _of_folder(folder, command)
    unpacked = path.with_name(path.name.split(".")[0])
    if unpacked.exists():
        unpacked = unpacked.with_name(f"{unpacked.name}-unpacked")
    if path.suffix in _ARCHIVES:
        unpack = shlex.join(["python", "-m", _ARCHIVES[path.suffix], "-e", str(path)])
        return (
            f"{path} is an archive, and a run is a directory; type: {unpack} "
            f"{shlex.quote(str(unpacked))}, then: {typed(command, unpacked, '')}"
        )
    if path.suffix == ".toml":
        return (
            f"{path} is an audit file, which says how to train; in a clone of indpriv, type: "
            f"{typed('train', path, 'python -m audits')}, then: "
            f"{typed(command, Path('runs', path.stem), '')}"
        )
    return f"{path} is a file, and a run is a directory. {_replayed(folder)}"


def _replayed(folder: Path) -> str:
    return (
        "A folder of checkpoints is replayed with an AuditSpec, which builds model and data again: "
        f"{typed('audit', folder)} --spec train.py:spec"
    )


def _type_one(command: str, *folders: Path) -> str:
    """The command for each run below the folders, or how to record a run where there is none."""
    found = list(dict.fromkeys(run for folder in folders for run in _runs_in(folder)))
    if not found:
        return (
            "no run was found here. To record one, type: indpriv demo, or attach a Recorder to "
            "your own training loop"
        )
    return f"type one of{_lines([(command, run) for run in found[:_NAMED]], '')}"


def _runs_in(folder: Path) -> list[Path]:
    """Run directories below a folder, the nearest first; not the logs of their test examples."""
    from indpriv.norm_log.run_files import HOLDOUT, JOURNAL

    return [
        path.parent
        for level in range(_LEVELS)
        for path in sorted(folder.glob("/".join(["*"] * level + ["*", JOURNAL])))
        if path.parent.name != HOLDOUT
    ]


def _lines(commands: Sequence[tuple[str, Path]], program: str = "indpriv") -> str:
    return ":" + "".join(f"\n  {typed(*words, program)}" for words in commands)


def typed(command: str, path: Path, program: str = "indpriv") -> str:
    """The line to type for a command on a path."""
    return shlex.join([*program.split(), *command.split(), str(path)])


def check_moved(words: Sequence[str]) -> None:
    """Raise InputError if they are a command that is an experiment now, with the line to type."""
    _check_images(words)
    for old, new in _MOVED.items():
        rest = words[len(old.split()) :]
        if list(words[: len(old.split())]) != old.split():
            continue
        if old == "advise":
            names = {word.partition("=")[0] for word in rest}
            if not (names & _TRAINS or any(_is_audit_file(word) for word in rest)):
                continue
            new = "deletion" if names & _DELETES else "subsets"
        elif (old == "leak" and not any(word.startswith("--data-dir") for word in rest)) or (
            old in ("lint", "attack run") and not any(word.endswith(".toml") for word in rest)
        ):
            continue
        line = shlex.join(["python", "-m", "audits", new, *rest])
        raise InputError(f"this is an experiment now; in a clone of indpriv, type: {line}")


def _check_images(words: Sequence[str]) -> None:
    """Refuse --show-examples of audit as it was: without a file."""
    if "audit" not in words[:1]:
        return
    after = dict(zip(words, [*words[1:], "-"], strict=True))
    images = after.get("--show-examples", "images.npy")
    if images.startswith("-") or Path(images).is_dir() or "--data-dir" in after:
        names = [word for word in (images, *words[1:2]) if Path(word).is_dir()]
        line = typed("images", Path(*names[:1] or ["RUN"]), "python -m audits")
        raise InputError(
            "--show-examples takes a .npy file of images now, and --data-dir is gone; for a run of "
            f"the experiments, in a clone of indpriv, type: {line} images.npy (with --data-dir, if "
            "its data set needs that), then audit it with --show-examples images.npy"
        )


def _is_audit_file(word: str) -> bool:
    return word.endswith(".toml") and Path(word).is_file()
