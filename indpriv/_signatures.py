"""Signatures of logs by ed25519 keys of OpenSSH, as `ssh-keygen -Y` makes and verifies them.

The format is OpenSSH's PROTOCOL.sshsig, with the namespace indpriv-log@v1.
"""

import base64
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from indpriv._folders import refuse_links
from indpriv.errors import InputError

NAMESPACE = "indpriv-log@v1"
_KIND, _MAGIC, _SPACE, _HASH = b"ssh-ed25519", b"SSHSIG", NAMESPACE.encode(), b"sha512"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_PUBLIC = re.compile(r"(?:^|\s)ssh-ed25519\s+(AAAA[A-Za-z0-9+/]{64})(?:\s|$)")
_LIMITED = re.compile(r"^\s*#|cert-authority|valid-(after|before)=", re.IGNORECASE)
_LARGEST = 1 << 20  # bytes of a file of keys, or of a signature


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
