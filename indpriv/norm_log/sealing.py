"""The end of a log: hashes of the files beside it, and the signature of the journal. Sensitive.

Whoever writes the files can make a chain of hashes anew, but no signature. It says whose log it is,
not whether what was logged is true; for that see `indpriv.recording.checkpoints.challenge`.
Signatures are those of ed25519 keys of OpenSSH (PROTOCOL.sshsig, with the namespace
indpriv-log@v1), as `ssh-keygen -Y` makes and verifies them.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from indpriv import _files
from indpriv._facts import FAILED, PASSED, Fact, fact
from indpriv._folders import refuse_links
from indpriv._journal import JournalWriter
from indpriv.errors import InputError
from indpriv.norm_log.journal_state import LogState
from indpriv.norm_log.run_files import BESIDE, JOURNAL, LEAKAGE, SIGNATURE, holds_log

NAMESPACE = "indpriv-log@v1"
_KIND, _MAGIC, _SPACE, _HASH = b"ssh-ed25519", b"SSHSIG", NAMESPACE.encode(), b"sha512"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_PUBLIC = re.compile(r"(?:^|\s)ssh-ed25519\s+(AAAA[A-Za-z0-9+/]{64})(?:\s|$)")
_LIMITED = re.compile(r"^\s*#|cert-authority|valid-(after|before)=", re.IGNORECASE)
_LARGEST = 1 << 20  # bytes of a file of keys, or of a signature


def seal(run_dir: Path, key: Any = None) -> None:
    """Add the hashes of the files beside a closed log to its end, and sign it with a `signing_key`.

    Call it once all files are written, and after changing one. It leaves an open log alone.
    """
    if not holds_log(run_dir):
        return
    with JournalWriter(run_dir) as journal:
        last: dict[str, Any] = journal.entries[-1] if journal.entries else {"kind": ""}
        if last["kind"] != "close":
            return
        files = {name: _files.sha256(path) for name, path in _beside(run_dir).items()}
        if last.get("files") != files:
            said = {name: last[name] for name in last if name not in ("seq", "kind", "files")}
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


# --- signatures


def signing_key(path: str | Path | None) -> Any:
    """A private key, None for None; InputError unless of OpenSSH, ed25519, without passphrase."""
    if path is None:
        return None
    exceptions, serialization, ed25519 = _cryptography()
    content = _read(Path(path))
    try:
        key = serialization.load_ssh_private_key(content, password=None)
        found = type(key).__name__
    except (TypeError, ValueError, exceptions.UnsupportedAlgorithm) as error:
        key, found = None, str(error)
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(
            f"{path} cannot sign a log ({found}); pass an ed25519 key without passphrase, as made "
            "by: ssh-keygen -t ed25519 -N '' -f KEY. With any other, sign the closed log yourself: "
            f"ssh-keygen -Y sign -n {NAMESPACE} -f KEY RUN/journal.jsonl"
        )
    return key


def signature(key: Any, content: bytes) -> bytes:
    """The file that says that a private key signed this content."""
    value = key.sign(_signed(hashlib.sha512(content).digest()))
    text = base64.b64encode(_whole(key.public_key().public_bytes_raw(), value)).decode()
    lines = [text[start : start + 70] for start in range(0, len(text), 70)]
    return "\n".join([_BEGIN, *lines, _END, ""]).encode()


def read_signature(path: Path, digests: Iterable[tuple[int, bytes]]) -> tuple[bytes, int]:
    """The public key that signed, and the number of the last content with its signature, or 0.

    Args:
        path: of the signature.
        digests: number and SHA-512 of each content that it may be of.

    Raises:
        InputError: it is none of a log by an ed25519 key, or cryptography is not installed.
    """
    exceptions, _, ed25519 = _cryptography()
    text = _read(path).decode("ascii", "replace").strip()
    armoured = "".join(text.removeprefix(_BEGIN).removesuffix(_END).split())
    try:
        packed = base64.b64decode(armoured, validate=True)
        key, value = packed[33:65], packed[-64:]
        verifier = ed25519.Ed25519PublicKey.from_public_bytes(key)
    except ValueError:
        packed, key, value = b"", b"", b""
    if not packed or packed != _whole(key, value):
        raise InputError(
            f"{path} is no signature of a log: it is damaged, for another namespace than "
            f"{NAMESPACE}, or not by an ed25519 key; sign again, or remove it"
        )
    last = 0
    for number, digest in digests:
        try:
            verifier.verify(value, _signed(digest))
            last = number
        except exceptions.InvalidSignature:
            continue
    return key, last


def public_keys(path: Path) -> set[bytes]:
    """The ed25519 keys for logs in a .pub file, or one of allowed signers or authorized keys.

    Those limited by time or a certificate are left out; InputError if none is left.
    """
    found = set()
    for line in _read(path).decode("utf-8", "replace").splitlines():
        if (key := _PUBLIC.search(line)) and not _LIMITED.search(line):
            options = line[: key.start()]
            if "namespaces=" not in options.lower() or NAMESPACE in options:
                found.add(base64.b64decode(key[1])[-32:])
    if not found:
        raise InputError(
            f"{path} holds no public ed25519 key that may sign {NAMESPACE} at any time; pass the "
            "signer's .pub file, which begins with ssh-ed25519, or a file of allowed signers"
        )
    return found


def fingerprint(public: bytes) -> str:
    """SHA256:..., as `ssh-keygen -l` prints it."""
    digest = base64.b64encode(hashlib.sha256(_packed(_KIND, public)).digest()).decode()
    return f"SHA256:{digest.rstrip('=')}"


def _signed(digest: bytes) -> bytes:
    return _MAGIC + _packed(_SPACE, b"", _HASH, digest)


def _whole(public: bytes, value: bytes) -> bytes:
    parts = _packed(_KIND, public), _SPACE, b"", _HASH, _packed(_KIND, value)
    return _MAGIC + (1).to_bytes(4) + _packed(*parts)


def _packed(*parts: bytes) -> bytes:
    return b"".join(len(part).to_bytes(4) + part for part in parts)


def _read(path: Path) -> bytes:
    refuse_links(path)
    try:
        with path.open("rb") as file:
            content: bytes = file.read(_LARGEST)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); pass a file") from error
    return content


def _cryptography() -> tuple[Any, Any, Any]:
    try:
        from cryptography import exceptions
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise InputError("signatures need cryptography: pip install 'indpriv[sign]'") from error
    return exceptions, serialization, ed25519
