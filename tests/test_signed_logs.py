"""Signed logs: whose log it is, and that the files beside it are those of its end."""

import json
import shutil
import subprocess
import sys
import warnings

import numpy as np
import pyarrow as pa
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from command_lines import run as command
from forging import lines_of, rechained, settings_forged, with_table
from indpriv import NormLog, RoundRecorder
from indpriv.analysis import fidelity
from indpriv.audit import audit
from indpriv.errors import EvidenceError, InputError, PrivacyWarning
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.run_files import seal
from indpriv.norm_log.verify import journal_check
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, blobs, make_run, record

NAMESPACE = "indpriv-log@v1"
needs_ssh_keygen = pytest.mark.skipif(
    shutil.which("ssh-keygen") is None, reason="no ssh-keygen on this machine"
)


def make_key(path, key=None):
    """An OpenSSH private key, and its public one beside it."""
    key = key or ed25519.Ed25519PrivateKey.generate()
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.OpenSSH,
            serialization.NoEncryption(),
        )
    )
    path.chmod(0o600)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public + b" anna@lab\n")
    return path


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    for name in ("anna", "mallory"):
        make_key(folder / name)
    return folder


@pytest.fixture(scope="module")
def made(tmp_path_factory, keys):
    folder = tmp_path_factory.mktemp("signed")
    options = {"test_set": blobs(40), "sign_with": keys / "anna", "run_info": {"delta": 1e-5}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record(make_run(), folder / "run", **options)
    return folder / "run"


@pytest.fixture
def run_dir(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


@pytest.fixture
def short_audits(monkeypatch):
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(fidelity, name, ())


def check_of(run_dir, signed_by=None):
    return journal_check(open_run(run_dir), signed_by)


def ssh_keygen(*arguments, content=b""):
    return subprocess.run(
        ["ssh-keygen", *map(str, arguments)], input=content, capture_output=True, check=False
    )


@needs_ssh_keygen
def test_openssh_verifies_what_is_signed_here(run_dir, keys, tmp_path):
    allowed = tmp_path / "allowed_signers"
    allowed.write_text(f'anna@lab namespaces="{NAMESPACE}" ' + (keys / "anna.pub").read_text())
    journal = run_dir / "journal.jsonl"
    words = (
        "-Y",
        "verify",
        "-f",
        allowed,
        "-I",
        "anna@lab",
        "-n",
        NAMESPACE,
        "-s",
        f"{journal}.sig",
    )
    good = ssh_keygen(*words, content=journal.read_bytes())
    assert good.returncode == 0, good.stderr
    assert ssh_keygen(*words, content=journal.read_bytes()[:-1]).returncode != 0
    shown = ssh_keygen("-l", "-f", keys / "anna.pub").stdout.decode().split()[1]
    assert f"signed by {shown}" in check_of(run_dir, allowed).detail


@needs_ssh_keygen
def test_a_log_that_openssh_signed_is_verified_here(tmp_path, keys):
    record(make_run(), tmp_path / "run")
    journal = tmp_path / "run" / "journal.jsonl"
    assert "unsigned" in check_of(tmp_path / "run").detail
    made = ssh_keygen("-Y", "sign", "-f", keys / "anna", "-n", NAMESPACE, journal)
    assert made.returncode == 0, made.stderr
    assert check_of(tmp_path / "run", keys / "anna.pub").status == "passed"
    ssh_keygen("-Y", "sign", "-f", keys / "anna", "-n", "git", journal)
    (tmp_path / "run" / "journal.jsonl.sig").unlink()
    ssh_keygen("-Y", "sign", "-f", keys / "anna", "-n", "git", journal)
    with pytest.raises(
        InputError, match=r"journal\.jsonl\.sig is no signature of a log: .*another namespace"
    ):
        check_of(tmp_path / "run")


def test_each_says_what_it_is_worth(run_dir, keys, capsys):
    named = check_of(run_dir)
    assert (named.status, named.key) == ("passed", "journal")
    assert "signed by SHA256:" in named.detail
    assert named.detail.endswith("compared with no key of yours")
    for code, arguments, words in (
        (0, ["--signed-by", keys / "anna.pub"], "signed by SHA256:"),
        (1, ["--signed-by", keys / "mallory.pub"], "by none of your keys"),
        (2, ["--signed-by", keys / "anna"], "holds no public ed25519 key"),
        (2, ["--signed-by", keys / "nowhere"], "cannot be read"),
    ):
        assert (
            command(["check", str(run_dir), "--set", "only=log", "--json", *map(str, arguments)])
            == code
        )
        captured = capsys.readouterr()
        assert words in captured.out + captured.err
        assert "compared with no key" not in captured.out
    (run_dir / "journal.jsonl.sig").unlink()
    assert command(["check", str(run_dir), "--set", "only=log"]) == 0
    words = "unsigned: whoever gave you this run could have changed it"
    assert words in " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert command(["check", str(run_dir), "--signed-by", str(keys / "anna.pub")]) == 1


@pytest.mark.slow
def test_an_audit_of_an_unsigned_log_says_so(run_dir, capsys):
    (run_dir / "journal.jsonl.sig").unlink()
    audit = ["audit", str(run_dir), "--output-dir", str(run_dir.parent / "audit"), "--verbose"]
    assert command(audit) == 0
    words = "unsigned: whoever gave you this run could have changed it"
    assert words in " ".join(capsys.readouterr().out.split())


def test_a_forged_log_with_a_new_chain_passes_all_but_the_signature(run_dir, keys):
    settings_forged(run_dir, noise_multiplier=4.0)
    assert NormLog.open(run_dir).settings.noise_multiplier.max() == 4.0
    assert check_of(run_dir, keys / "anna.pub").status == "failed"
    assert "is not of this log" in check_of(run_dir).detail
    (run_dir / "journal.jsonl.sig").unlink()
    assert "unsigned" in check_of(run_dir).detail
    assert check_of(run_dir).status == "passed"  # the chain alone cannot tell
    assert check_of(run_dir, keys / "anna.pub").status == "failed"


def test_no_other_number_of_lines_is_signed(run_dir, keys):
    whole = lines_of(run_dir)
    for n in range(2, len(whole)):
        rechained(run_dir, lambda _, n=n: whole[:n])
        assert check_of(run_dir, keys / "anna.pub").status == "failed"
    rechained(run_dir, lambda _: whole)
    assert check_of(run_dir, keys / "anna.pub").status == "passed"
    rechained(run_dir, lambda _: [*whole, whole[-1]])
    longer = check_of(run_dir, keys / "anna.pub")
    assert longer.status == "failed"
    assert f"up to line {len(whole)} of {len(whole) + 1}" in longer.detail
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.write(b'{"kind"')
    assert check_of(run_dir, keys / "anna.pub").status == "failed"


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(st.data())
def test_no_changed_byte_passes_as_signed(run_dir, keys, data):
    names = ["journal.jsonl", "journal.jsonl.sig", "run.json", "examples.parquet", "ids.parquet"]
    path = run_dir / data.draw(st.sampled_from(names))
    content = path.read_bytes()
    place, bits = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(1, 255))
    changed = bytearray(content)
    changed[place] ^= bits
    path.write_bytes(bytes(changed))
    try:
        run = open_run(run_dir)
        assert run.log.n_examples  # reads the ids
        passed = journal_check(run, keys / "anna.pub").status == "passed"
    except InputError:
        passed = False
    finally:
        path.write_bytes(content)
    if path.name.endswith(".sig") and passed:  # white space, or a bit that base64 does not use
        assert "".join(changed.decode().split())[:-30] == "".join(content.decode().split())[:-30]
    else:
        assert not passed


@pytest.mark.usefixtures("short_audits")
def test_files_beside_the_log_are_those_of_its_end(run_dir, keys, tmp_path, capsys):
    examples, about = run_dir / "examples.parquet", run_dir / "run.json"
    before = examples.read_bytes(), about.read_bytes()
    with_table(
        examples,
        lambda table: table.set_column(
            table.schema.get_field_index("loss"), "loss", pa.array(np.full(len(table), 0.1))
        ),
    )
    assert check_of(run_dir).status == "failed"
    assert "examples.parquet is not as it was" in check_of(run_dir).detail
    examples.write_bytes(before[0])
    about.write_text(json.dumps({**json.loads(before[1]), "delta": 0.5}))
    with pytest.warns(PrivacyWarning, match=r"delta=0\.5"):
        summary = audit(run_dir, tmp_path / "audit")
    assert summary.guarantee.status == "unproven"
    assert command(["check", str(run_dir)]) == 1
    assert command(["gate", str(tmp_path / "audit"), "--max", "delta=1"]) == 1
    about.unlink()
    assert "run.json is not as it was" in check_of(run_dir).detail
    about.write_bytes(before[1])
    assert check_of(run_dir, keys / "anna.pub").status == "passed"
    shutil.copy(examples, run_dir / "canaries.parquet")
    assert "canaries.parquet came later" in check_of(run_dir).detail
    assert "but not canaries.parquet" in check_of(run_dir, keys / "anna.pub").detail


def test_whoever_trains_can_correct_a_file_and_close_again(run_dir, keys):
    from indpriv.norm_log.run_files import signing_key

    about = run_dir / "run.json"
    about.write_text(json.dumps({**json.loads(about.read_text()), "delta": 1e-6}))
    seal(run_dir)
    assert check_of(run_dir).status == "passed"
    assert "and not from there on" in check_of(run_dir).detail
    assert check_of(run_dir, keys / "anna.pub").status == "failed"
    seal(run_dir, signing_key(keys / "anna"))
    assert check_of(run_dir, keys / "anna.pub").status == "passed"
    n = len(lines_of(run_dir))
    seal(run_dir, signing_key(keys / "anna"))
    assert len(lines_of(run_dir)) == n


def test_an_older_log_opens_and_says_what_its_end_lacks(run_dir, keys):
    rechained(
        run_dir,
        lambda lines: [{k: v for k, v in one.items() if k != "files"} for one in lines],
    )
    (run_dir / "journal.jsonl.sig").unlink()
    assert check_of(run_dir).status == "passed"
    assert "without hashes of files beside it" in check_of(run_dir).detail
    assert NormLog.open(run_dir).total_steps == 20


@pytest.mark.slow
def test_a_run_that_stopped_has_a_signed_beginning_and_a_resumed_one_a_signed_end(tmp_path, keys):
    run, folder = make_run(), tmp_path / "run"
    options = {
        "dataset": run.dataset,
        "loss_fn": PER_EXAMPLE,
        "every": 3,
        "sign_with": keys / "anna",
    }
    with (
        pytest.raises(RuntimeError),
        Recorder(folder, **options).attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
        raise RuntimeError("stopped")
    stopped = check_of(folder)
    assert stopped.status == "passed"
    assert "up to line 1 of" in stopped.detail
    assert "without hashes of files" in stopped.detail
    assert check_of(folder, keys / "anna.pub").status == "failed"
    again = Recorder(folder, **options, resume_at=10)
    with again.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    assert check_of(folder, keys / "anna.pub").status == "passed"
    unsigned = Recorder(folder, **options | {"sign_with": None}, resume_at=20)
    with unsigned.attach(run.model, run.optimizer, run.loader):
        run.train(1)
    assert check_of(folder).status == "passed"
    assert "and not from there on" in check_of(folder).detail
    assert check_of(folder, keys / "anna.pub").status == "failed"


def test_rounds_are_signed(tmp_path, keys):
    options = {"sampler": "fixed_size", "sign_with": keys / "anna"}
    with RoundRecorder(tmp_path / "run", ["a", "b", "c"], **options) as recorder:
        recorder.round(["c", "a"], [0.3, 1.7], noise_multiplier=1.0, max_grad_norm=0.5)
        assert "up to line 1" in check_of(tmp_path / "run").detail
    assert check_of(tmp_path / "run", keys / "anna.pub").status == "passed"


AUDIT_FILE = """
name = "digits"
[data]
dataset = "digits"
[model]
architecture = "mlp"
[training]
epochs = 2
batch_size = 256
learning_rate = 1.0
max_grad_norm = 1.0
noise_multiplier = 1.5
delta = 1e-5
non_private_baseline = true
[recording]
every = 3
[checkpoints]
every = 6
"""


@pytest.mark.slow
def test_train_signs_what_it_adds_after_the_log_was_closed(tmp_path, keys, capsys):
    (tmp_path / "digits.toml").write_text(AUDIT_FILE)
    words = [
        "audits",
        "train",
        str(tmp_path / "digits.toml"),
        "--run-dir",
        str(tmp_path / "run"),
        "--seed",
        "1",
    ]
    assert command([*words, "--sign-with", str(keys / "mallory.pub")]) == 2
    assert not (tmp_path / "run").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert command([*words, "--sign-with", str(keys / "anna")]) == 0
    assert check_of(tmp_path / "run", keys / "anna.pub").status == "passed"
    files = lines_of(tmp_path / "run")[-1]["files"]
    assert {"run.json", "examples.parquet", "examples-non-dp.parquet", "curve.parquet"} <= set(
        files
    )
    capsys.readouterr()


@pytest.mark.slow
@pytest.mark.usefixtures("short_audits")
def test_a_gate_wants_the_signed_log_and_the_audit_of_it(run_dir, keys, tmp_path, capsys):
    audit(run_dir, run_dir / "audit")
    shutil.copytree(run_dir / "audit", tmp_path / "elsewhere")
    signed = ["--signed-by", str(keys / "anna.pub")]
    assert command(["gate", str(run_dir / "audit"), *signed]) == 0
    assert command(["gate", str(tmp_path / "elsewhere"), *signed]) == 2  # which run?
    assert command(["gate", str(tmp_path / "elsewhere"), *signed, "--run", str(run_dir)]) == 0
    assert command(["gate", str(run_dir / "audit"), "--signed-by", str(keys / "mallory.pub")]) == 1
    capsys.readouterr()
    settings_forged(run_dir, noise_multiplier=4.0)
    (run_dir / "journal.jsonl.sig").unlink()
    audit(run_dir, run_dir / "audit")
    assert command(["gate", str(run_dir / "audit"), "--max", "delta=1"]) == 0
    assert command(["gate", str(run_dir / "audit"), *signed]) == 1
    capsys.readouterr()
    words = ["gate", str(tmp_path / "elsewhere"), *signed, "--run", str(run_dir), "--json"]
    assert command(words) == 1
    assert "the audit is not of this log" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("missing", "cannot be read"),
        ("public", "Not OpenSSH private key format"),
        ("rsa", "RSAPrivateKey"),
        ("encrypted", "password"),
        ("cut", "cannot sign a log"),
        ("folder", "cannot be read"),
    ],
)
def test_a_key_that_cannot_sign_is_one_message_before_training(kind, words, keys, tmp_path):
    path = tmp_path / "key"
    if kind == "public":
        path = keys / "anna.pub"
    elif kind == "rsa":
        make_key(path, rsa.generate_private_key(65537, 2048))
    elif kind == "encrypted":
        if ssh_keygen("-q", "-t", "ed25519", "-N", "secret", "-f", path).returncode:
            pytest.skip("no ssh-keygen to encrypt a key")
    elif kind == "cut":
        path.write_bytes((keys / "anna").read_bytes()[:150])
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(InputError, match=words):
        Recorder(tmp_path / "run", dataset=blobs(), loss_fn=PER_EXAMPLE, sign_with=path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("line", "passes"),
    [
        ("{key}", True),
        ("# {key}", False),
        ('command="rm \\"a b\\"",no-pty {key}', True),
        ("anna@lab,bob@lab {key}", True),
        ('anna@lab namespaces="git,indpriv-log@v1" {key}', True),
        ('anna@lab namespaces="git" {key}', False),
        ('anna@lab valid-before="20200101" {key}', False),
        ("*@lab cert-authority {key}", False),
        ("ssh-rsa AAAAB3NzaC1yc2E", False),
        ("ssh-ed25519 AAAA", False),
        ("", False),
    ],
)
def test_files_of_keys(run_dir, keys, tmp_path, line, passes):
    named = tmp_path / "signers"
    named.write_text("\n" + line.format(key=(keys / "anna.pub").read_text()) + "\n")
    if passes:
        assert check_of(run_dir, named).status == "passed"
    else:
        with pytest.raises(InputError, match="holds no public ed25519 key"):
            check_of(run_dir, named)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is no signature of a log"),
        (b"\xff\x00", "is no signature of a log"),
        (b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n", "no signature"),
    ],
)
def test_a_broken_signature_is_one_message(run_dir, content, words, capsys):
    (run_dir / "journal.jsonl.sig").write_bytes(content)
    with pytest.raises(InputError, match=words):
        check_of(run_dir)


def test_without_the_library_nobody_is_told_that_a_signature_was_verified(
    run_dir, keys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "signed, not verified: pip install" in check_of(run_dir).detail
    with pytest.raises(InputError, match="need cryptography: pip install"):
        check_of(run_dir, keys / "anna.pub")
    with pytest.raises(InputError, match="need cryptography"):
        Recorder(
            run_dir.parent / "new", dataset=blobs(), loss_fn=PER_EXAMPLE, sign_with=keys / "anna"
        )


@pytest.mark.parametrize("ids", [range(119), [0] * 120, [*range(120), *range(120)]])
def test_ids_are_held_against_the_examples(run_dir, ids):
    def change(lines):
        table = pa.table({"example_id": list(ids), "exact": [False] * len(ids)})
        said = with_table(run_dir / "ids.parquet", lambda _: table)
        return [{**lines[0], "ids_sha256": said["sha256"]}, *lines[1:]]

    rechained(run_dir, change)
    with pytest.raises(
        EvidenceError, match=rf"ids.parquet has {len(ids)} example ids.* log has 120"
    ):
        NormLog.open(run_dir)
