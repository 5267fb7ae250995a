"""What to type next where a command did not get the run or the audit file that it needs."""

from __future__ import annotations

import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from indpriv.errors import InputError

_LEVELS = 3  # of folders that are searched for runs
_NAMED = 5  # runs or files that a message names
_MOVED = Path(__file__).with_name("moved.toml")
_EXPERIMENTS = "python -m audits"
_ARCHIVES = {".zip": "zipfile", ".tar": "tarfile", ".tgz": "tarfile", ".gz": "tarfile"}


def checked_run(path: Path | None, command: str, program: str = "indpriv") -> Path:
    """The path, if it is a run directory.

    command, program: as they are typed before it.

    Raises:
        InputError: it is missing or something else; the message says what to type next.
    """
    from indpriv._folders import is_remote
    from indpriv._storage import location
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
            f"audit, open {path / REPORT} or type: {typed('show', path)}\n  "
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
            f"{typed('train', path, _EXPERIMENTS)}, then: "
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
    return "type one of:" + "".join(f"\n  {typed(command, run, '')}" for run in found[:_NAMED])


def _runs_in(folder: Path) -> list[Path]:
    """Run directories below a folder, the nearest first; not the logs of their test examples."""
    from indpriv.norm_log.run_files import HOLDOUT, JOURNAL

    return [
        path.parent
        for level in range(_LEVELS)
        for path in sorted(folder.glob("/".join(["*"] * level + ["*", JOURNAL])))
        if path.parent.name != HOLDOUT
    ]


def typed(command: str, path: Path, program: str = "indpriv") -> str:
    """The line to type for a command on a path."""
    return shlex.join([*program.split(), *command.split(), str(path)])


def check_moved(words: Sequence[str], program: str) -> None:
    """Raise InputError if the words are a command line of before, with the line to type now."""
    indpriv = program != _EXPERIMENTS
    for line in tomllib.loads(_MOVED.read_text(encoding="utf-8"))["line"]:
        old = line["old"].split()
        rest = list(words[len(old) :])
        is_of = indpriv or line.get("both")
        if list(words[: len(old)]) != old or not is_of or not _is_meant(line, rest):
            continue
        reason = "this command line has changed"
        if line.get("experiment"):
            program, reason = _EXPERIMENTS, "this is an experiment now; in a clone of indpriv"
        now = shlex.join([*f"{program} {line['new']}".split(), *_rewritten(line, rest)])
        about = next((word for word in rest if not word.startswith("-")), "RUN")
        notes = {text.replace("{}", about) for text in _of_options(line, "notes", rest)}
        raise InputError("; ".join([f"{reason}, type: {now}", *notes]))


def _of_options(line: Mapping[str, Any], key: str, rest: Sequence[str]) -> list[str]:
    """What a line of the table has under a key for the options among the words."""
    table = line.get(key, {})
    return [table[name] for name in (word.partition("=")[0] for word in rest) if name in table]


def _is_meant(line: Mapping[str, Any], rest: Sequence[str]) -> bool:
    """Whether a line of the table is about what follows its first words."""
    if line.get("argument") and (not rest or rest[0].startswith("-")):
        return False
    if line["old"] == line["new"] and not line.get("experiment"):
        return bool(_of_options(line, "options", rest))
    when = line.get("when", ())
    return not when or any(word.partition("=")[0].endswith(end) for word in rest for end in when)


def _rewritten(line: Mapping[str, Any], rest: Sequence[str]) -> list[str]:
    """What follows the first words, as it is typed now."""
    rest, options, first = [*rest], line.get("options", {}), line.get("first")
    found, value_of = list[str](), ""  # value_of: the option before, whose value may follow
    while rest:
        word = rest.pop(0)
        name, given, value = word.partition("=")
        new = options.get(name)
        if first and not word.startswith("-") and not value_of:
            new, given, value, first = first, "=", word, None
        value_of = name if new is None and word.startswith("--") and not given else ""
        if new is None:
            found.append(word)
            continue
        if not given and ("{}" in new or not new):
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "VALUE"
        found += [part.replace("{}", value) for part in shlex.split(new)]
    return found
