"""A run directory: names of its files, what is read of run.json, and the end of its log. Sensitive.

At its end a log names the hashes of the files beside it, and its journal is signed. Whoever writes
the files can make a chain of hashes anew, but no signature. It says whose log it is, not whether
what was logged is true; for that see `indpriv.recording.checkpoints.replay`. Signatures are
those of ed25519 keys of OpenSSH (PROTOCOL.sshsig, with the namespace indpriv-log@v1), as
`ssh-keygen -Y` makes and verifies them.
"""

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from indpriv import _checks, _facts, _files, _folders
from indpriv._reading import Number, Text, Whole, YesNo, check, named, table
from indpriv.errors import InputError, check_installed
from indpriv.norm_log.fields import ACCOUNT_WORDS

Line = dict[str, Any]  # of the journal
SCHEMA = 1  # of the journal
MOST_STEPS = 10**7  # settings of all steps are held in memory

JOURNAL = _files.JOURNAL
SIGNATURE = f"{JOURNAL}.sig"  # where ssh-keygen -Y sign puts it
IDS = "ids.parquet"
ID_COLUMNS = {"example_id": "it", "unit_id?": "itf", "exact": "b"}  # see `check_columns`
RECORDS = "records"  # a folder: one Parquet file per record, or one for each part of it
RUN_JSON = "run.json"
EXAMPLES, EXAMPLES_NON_DP = "examples.parquet", "examples-non-dp.parquet"
MODEL_NON_DP = "non-dp/parameters.safetensors"  # in a folder: models of the run lie outside it
MODEL = "final/parameters.safetensors"  # of the run itself, where its Recorder kept it
KEPT = {"dp": (MODEL, EXAMPLES), "non_dp": (MODEL_NON_DP, EXAMPLES_NON_DP)}
RELEASED = "released.npz"  # beside either model: what it tells attackers of each example
RESUME = "resume.state"  # of a run that has not ended; its suffix is that of no model
CANARIES, GRADIENT_CANARIES = "canaries.parquet", "gradient-canaries.parquet"
WHITE_BOX, COINS = "white-box.parquet", "coins.json"  # the latter of inserted canaries
ATTRIBUTES, ATTRIBUTES_NON_DP = "attributes.parquet", "attributes-non-dp.parquet"
SECRETS = "secrets.parquet"
CURVE = "curve.parquet"
LEAKAGE = "leakage"  # a folder: scores and pictures of reconstructions
REFERENCES = "references"  # a folder: signals of reference models for the run
REFERENCES_NON_DP = "references-non-dp"  # the same for its baseline
HOLDOUT = "holdout"  # a folder: the log of the test examples
# What an audit reads beside the log: hashed when it is closed.
BESIDE = [RUN_JSON, EXAMPLES, EXAMPLES_NON_DP, MODEL_NON_DP, CANARIES, GRADIENT_CANARIES, WHITE_BOX]
BESIDE += [COINS, MODEL, ATTRIBUTES, ATTRIBUTES_NON_DP, SECRETS, CURVE, f"{HOLDOUT}/{JOURNAL}"]
RECORD_FILE = re.compile(r"((exact|free|filter)-)?\d{12}(-\d{5})?\.parquet")
RUN_DIRECTORY = _facts.text(
    "sentence.missing", "run_directory", files=[JOURNAL, IDS, RECORDS, RUN_JSON, EXAMPLES]
)
NAMESPACE = "indpriv-log@v1"
_KIND, _MAGIC, _SPACE, _HASH = b"ssh-ed25519", b"SSHSIG", NAMESPACE.encode(), b"sha512"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_PUBLIC = re.compile(r"(?:^|\s)ssh-ed25519\s+(AAAA[A-Za-z0-9+/]{64})(?:\s|$)")
_LIMITED = re.compile(r"^\s*#|cert-authority|valid-(after|before)=", re.IGNORECASE)
_LARGEST = 1 << 20  # bytes of a file of keys, or of a signature


def part_name(record: str, number: int) -> str:
    """The file of one part of a record whose name is that of a single file."""
    return f"{record.removesuffix('.parquet')}-{number:05d}.parquet"


def files_of(line: Line) -> list[Line]:
    """What a line says of its files: several, where a record is in parts."""
    if "parts" not in line:
        return [line]
    return [
        {**line, "file": part_name(line["file"], number), "bytes": size, "sha256": sha256}
        for number, (size, sha256) in enumerate(line["parts"])
    ]


def holds_log(path: Path) -> bool:
    """Whether a folder holds the log of a run."""
    return (path / JOURNAL).is_file()


def why_no_run(path: Path) -> str:
    """Why a path is no run directory, and what one is; "" if it is one."""
    if not path.is_dir():
        return f"{path} is not a directory; {RUN_DIRECTORY}"
    found = sorted(item.name for item in path.iterdir())[:5]
    holds = f"it holds {', '.join(found)}" if found else "it is empty"
    return "" if holds_log(path) else f"{path} holds no {JOURNAL} ({holds}); {RUN_DIRECTORY}"


def _each_a_number(value: object) -> object:
    rows = value if isinstance(value, list) else [value]
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in rows):
        raise ValueError("it is one number, or a list with one number per step")
    return value


_OneOrEach = Annotated[Any, AfterValidator(_each_a_number)]
_AllSteps = Annotated[Whole, Field(ge=1, le=MOST_STEPS)]

_AUDIT = table({Text: "participation? neighbouring?", Number: "tolerance?", list[Text]: "groups?"})
# Arguments of `indpriv.account` that run.json may have, and where else than under "account".
ACCOUNT: dict[str, tuple[tuple[str, ...], ...]] = {
    "delta": (("delta",), ("training", "delta")),
    **dict.fromkeys(ACCOUNT_WORDS, ()),
    "participation": (("participation",), ("config", "audit", "participation")),
    "neighbouring": (("config", "audit", "neighbouring"),),
}
_WORDS = " ".join(f"{word}?" for word in ACCOUNT_WORDS)
_RUN_JSON = table(
    {
        table({Text: _WORDS, Number: "delta? tolerance?"}): "account?",
        Number: "delta?",
        _AllSteps: "steps?",
        _OneOrEach: "noise_multiplier? max_grad_norm? sample_rate?",
        YesNo: "seeded?",
        list[Any]: "groups? class_names?",
        dict[str, Any]: "on_trust?",
        table({_OneOrEach: "noise_multiplier? max_grad_norm? sample_rate?", Number: "delta?"}): (
            "training?"
        ),
        table({_AUDIT: "audit?"}): "config?",
        table({Text: "fingerprint? dataset?", list[Any]: "class_names?"}): "data?",
        table({Number: "epsilon? delta?"}): "guarantee?",
    }
)


def checked_run_json(content: Any, where: Path | str = RUN_JSON) -> Mapping[str, Any]:
    """The content of run.json, if what is read of it is of the right kinds; else EvidenceError."""
    check(_RUN_JSON, content, str(where), "correct it")
    found: Mapping[str, Any] = content
    return found


def declared_account(content: Mapping[str, Any], where: Path | str = RUN_JSON) -> dict[str, Any]:
    """What run.json says of the account, by the arguments of `indpriv.account`; else InputError."""
    # Earlier versions took a tolerance, which no account needs now
    if wrong := sorted((content.get("account") or {}).keys() - {*ACCOUNT, "tolerance"}):
        said = {"where": where, "key": wrong[0], "known": ", ".join(ACCOUNT)}
        raise _facts.refused("refusal.run_json", "account_key", **said)
    every = {key: _files.first_at(content, ("account", key), *at) for key, at in ACCOUNT.items()}
    found = {key: value for key, value in every.items() if value not in (None, "")}
    return found | ({"delta": float(found["delta"])} if "delta" in found else {})


def checked_run_info(run_info: Mapping[str, Any] | None) -> dict[str, Any]:
    """What a user wants run.json to hold; InputError, before training, where no audit takes it."""
    try:
        json.dumps(content := dict(run_info or {}), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"run_info cannot be written as JSON: {error}") from error
    return dict(check_declared(content, "run_info"))


def check_declared(content: Any, where: Path | str = RUN_JSON) -> Mapping[str, Any]:
    """As `checked_run_json`, before a run is written; InputError for what no audit would take."""
    found = checked_run_json(content, where)
    with named(where, broken=()):
        for key, value in declared_account(found, where).items():
            if key != "delta":
                _checks.check_choice(key, value, ACCOUNT_WORDS[key])
            else:
                _checks.check_delta(value)
        for said in (found, found.get("training") or {}):
            for name in _checks.SETTINGS:
                if said.get(name) is not None:
                    _checks.check_setting(name, said[name])
    return found


def read_run_json(run_dir: Path) -> Mapping[str, Any]:
    """What run.json of a run holds; nothing where there is none. EvidenceError as above."""
    path = run_dir / RUN_JSON
    return checked_run_json(_files.read_json(path), path) if path.is_file() else {}


def data_fingerprint(run_dir: Path) -> str:
    """Identifies the data of a run, where run.json does or its model ("model ..."); else ""."""
    kept = f"model {_files.sha256(run_dir / MODEL)}" if (run_dir / MODEL).is_file() else ""
    return str(_files.first_at(read_run_json(run_dir), ("data", "fingerprint")) or kept)


# --- the end of a log


def seal(run_dir: Path, key: Any = None) -> None:
    """End a closed log with the hashes of the files beside it, and sign it with a `signing_key`.

    Call it once all files are written, and after changing one. It leaves an open log alone.
    """
    if not holds_log(run_dir):
        return
    with _files.JournalWriter(run_dir) as journal:
        last: dict[str, Any] = journal.entries[-1] if journal.entries else {"kind": ""}
        if last["kind"] != "close":
            return
        files = {name: _files.sha256(path) for name, path in files_beside(run_dir).items()}
        if last.get("files") != files:
            said = {name: last[name] for name in last if name not in ("seq", "kind", "files")}
            journal.append("close", **said, files=files)
    sign(run_dir, key)


def sign(run_dir: Path, key: Any) -> None:
    """Sign the journal as it is with a `signing_key`; nothing is done without one."""
    if key is None:
        return
    digest = hashlib.sha512((run_dir / JOURNAL).read_bytes()).digest()
    whole = _whole(key.public_key().public_bytes_raw(), key.sign(_signed(digest)))
    packed = base64.b64encode(whole).decode()
    lines = [packed[start : start + 70] for start in range(0, len(packed), 70)]
    content = "\n".join([_BEGIN, *lines, _END, ""]).encode()
    _files.write_atomically(run_dir / SIGNATURE, content)


def files_beside(run_dir: Path) -> dict[str, Path]:
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
        raise _facts.refused("refusal.signature", "key", path=path, found=found, name=NAMESPACE)
    return key


def read_signature(path: Path, digests: Iterable[tuple[int, bytes]]) -> tuple[bytes, int]:
    """The key that signed, and the number of the last SHA-512 digest that it signed, or 0."""
    exceptions, _, ed25519 = _cryptography()
    content = _read(path).decode("ascii", "replace").strip()
    armoured = "".join(content.removeprefix(_BEGIN).removesuffix(_END).split())
    try:
        packed = base64.b64decode(armoured, validate=True)
        key, value = packed[33:65], packed[-64:]
        verifier = ed25519.Ed25519PublicKey.from_public_bytes(key)
    except ValueError:
        packed, key, value = b"", b"", b""
    if not packed or packed != _whole(key, value):
        raise _facts.refused("refusal.signature", "none", path=path, name=NAMESPACE)
    last = 0
    for number, digest in digests:
        try:
            verifier.verify(value, _signed(digest))
            last = number
        except exceptions.InvalidSignature:
            continue
    return key, last


def public_keys(path: Path) -> set[bytes]:
    """The ed25519 keys of a file, but those limited by time or a certificate."""
    found = set()
    for line in _read(path).decode("utf-8", "replace").splitlines():
        if (key := _PUBLIC.search(line)) and not _LIMITED.search(line):
            options = line[: key.start()]
            if "namespaces=" not in options.lower() or NAMESPACE in options:
                found.add(base64.b64decode(key[1])[-32:])
    if not found:
        raise _facts.refused("refusal.signature", "public", path=path, name=NAMESPACE)
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
    _folders.refuse_links(path)
    try:
        with path.open("rb") as file:
            content: bytes = file.read(_LARGEST)
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror}); pass a file") from error
    return content


def _cryptography() -> tuple[Any, Any, Any]:
    check_installed("Signatures", "sign", "cryptography")
    from cryptography import exceptions
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return exceptions, serialization, ed25519
