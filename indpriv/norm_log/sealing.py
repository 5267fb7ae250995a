"""The end of a log: hashes of the files beside it, and the signature of the journal. Sensitive.

Whoever writes the files can make a chain of hashes anew, but no signature. It says whose log it is,
not whether what was logged is true; for that see `indpriv.recording.checkpoints.challenge`.
"""

import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from indpriv import _files
from indpriv._facts import FAILED, PASSED, Fact, fact
from indpriv._journal import JournalWriter
from indpriv._signatures import fingerprint, public_keys, read_signature, signature
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.run_files import BESIDE, JOURNAL, LEAKAGE, SIGNATURE, holds_log


def seal(run_dir: Path, key: Any = None) -> None:
    """Add the hashes of the files beside a closed log to its end, and sign it with a `signing_key`.

    Call it once all files are written, and after changing one. It leaves an open log alone.
    """
    if not holds_log(run_dir):
        return
    with JournalWriter(run_dir) as journal:
        last = journal.entries[-1] if journal.entries else {"kind": ""}
        if last["kind"] != "close":
            return
        files = {name: _files.sha256(path) for name, path in _beside(run_dir).items()}
        if last.get("files") != files:
            said: dict[str, Any] = {
                name: last[name] for name in last.keys() - {"seq", "kind", "files"}
            }
            journal.append("close", **said, files=files)
    sign(run_dir, key)


def sign(run_dir: Path, key: Any) -> None:
    """Sign the journal as it is with a `signing_key`; nothing is done without one."""
    if key is not None:
        content = (run_dir / JOURNAL).read_bytes()
        _files.write_atomically(run_dir / SIGNATURE, signature(key, content))


def journal_check(state: LogState, signed_by: Path | None = None) -> Fact:
    """Whether log and files beside it are as they were closed, and signed by a key in signed_by.

    Raises:
        InputError: signed_by or the signature cannot be read, or cryptography is not installed.
    """
    there, said = _beside(state.run_dir), state.beside or {}
    faults = [
        f"{name} is not as it was when the log was closed: restore it from a copy"
        for name, sha256 in said.items()
        if name not in there or _files.sha256(there[name]) != sha256
    ]
    origin, fault = _origin(state, public_keys(signed_by) if signed_by else None)
    new = ", ".join(sorted(there.keys() - said.keys()))
    if signed_by and not fault and new:
        fault = f"{origin}, but not {new}"
    if faults or fault:
        return fact("check.journal", FAILED, faults="; ".join([*faults, *filter(None, [fault])]))
    torn = "; a torn last line was dropped" if state.torn else ""
    beside = f"as are {len(said)} files beside it" + f" ({new} came later)" * bool(new)
    if state.beside is None:
        beside = "without hashes of files beside it"
    return fact("check.journal", PASSED, beside=beside, torn=torn, origin=origin)


def _origin(state: LogState, keys: set[bytes] | None) -> tuple[str, str]:
    """Who signed the log, and what is wrong with that, or "".

    A signature of a part is wrong only where keys are named: the run may have been stopped.
    """
    path = state.run_dir / SIGNATURE
    if not path.is_file():
        unsigned = "unsigned: whoever gave you this run could have changed it"
        return unsigned, unsigned if keys else ""
    if keys is None and find_spec("cryptography") is None:
        return "signed, not verified: pip install 'indpriv[sign]'", ""
    lines = (state.run_dir / JOURNAL).read_bytes().splitlines(keepends=True)
    public, signed = read_signature(path, _ends(lines))
    by = f"signed by {fingerprint(public)}"
    if not signed:
        return by, f"the signature by {fingerprint(public)} is not of this log, or of more of it"
    if signed < len(lines):
        by += f" up to line {signed} of {len(lines)}, and not from there on"
    if keys is None:
        return f"{by}; compared with no key of yours", ""
    by += "" if public in keys else ", by none of your keys"
    return by, by if signed < len(lines) or public not in keys else ""


def _ends(lines: list[bytes]) -> Iterator[tuple[int, bytes]]:
    """Number of each line that may be the last signed one, and the hash of all up to it."""
    digest = hashlib.sha512()
    for number, line in enumerate(lines, 1):
        digest.update(line)
        if number in (1, len(lines)) or b'"kind":"close"' in line:
            yield number, digest.copy().digest()


def _beside(run_dir: Path) -> dict[str, Path]:
    """What is there, by name, of the files that an audit reads beside the log."""
    leaked = [*(run_dir / LEAKAGE).glob("*.parquet"), *(run_dir / LEAKAGE).glob("*.png")]
    names = [*BESIDE, *(f"{LEAKAGE}/{path.name}" for path in sorted(leaked))]
    return {name: run_dir / name for name in names if (run_dir / name).is_file()}
