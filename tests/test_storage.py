"""Paths in object storage: what an address means, and what an S3 server that runs here says."""

import json
import os
import pickle
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from indpriv import EvidenceError, InputError, NormLog, _storage, account
from indpriv._folders import is_remote
from indpriv._storage import RemotePath, location
from indpriv.analysis import fidelity
from indpriv.audit import audit, read_audit
from indpriv.cli import run
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from object_storage import KEYS, s3_server
from synthetic import small_run, write_run

DELTA = 1e-5


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", *small_run(n=240, steps=6))


@pytest.mark.parametrize(
    "address",
    [
        "s3://bucket/runs/adult",
        "s3://bucket",
        "gs://bucket/a%20b?region=x",
        "gs://anonymous@bucket/run",
        "abfs://container@account.dfs.core.windows.net/run",
        "s3://b/r?scheme=http&e=h:1",
    ],
)
def test_an_address_is_kept(address):
    path = location(address)
    assert str(path) == address
    assert is_remote(path)
    assert location(Path(address)) == path  # as typer hands it on
    assert location(path) is path
    below = path / "records" / "1.parquet"
    assert is_remote(below)
    assert (below.name, below.parent.parent) == ("1.parquet", path)
    assert str(below).startswith(address.partition("?")[0])
    again = pickle.loads(pickle.dumps(below))
    assert again == below
    assert str(again) == str(below)
    assert len({below, again}) == 1


def test_parents_of_a_bucket_are_texts_and_can_be_hashed():
    found = [*location("s3://bucket/run/records").parents]
    assert [str(path) for path in found[:2]] == ["s3://bucket/run", "s3://bucket"]
    assert len({str(path) for path in found} & {"", "."}) == 0
    assert {hash(path) for path in found}


def test_other_paths_are_local(tmp_path):
    assert location(str(tmp_path)) == tmp_path
    assert location(f"file://{tmp_path}") == tmp_path
    assert location(r"C:/runs/adult") == Path("C:/runs/adult")
    assert not is_remote(location("runs/adult"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("ftp://host/run", "ftp:// is no storage that we read"),
        ("s3:///run", None),
        ("s3://key:secret@bucket/run", "holds credentials"),
        ("gs://secret@bucket/run", "holds credentials"),
        ("abfs://account:secret@host/container/run", "holds credentials"),
        ("abfs://container@account.dfs.core.windows.net/run?sig=secret", "holds credentials"),
    ],
)
def test_what_is_no_address_is_refused(address, message):
    if message is None:
        assert str(location(address)) == "s3://run"
        return
    with pytest.raises(InputError, match=message) as caught:
        location(address)
    assert "secret" not in str(caught.value)


def test_nothing_opens_it_as_a_local_file():
    path = location("s3://bucket/run")
    with pytest.raises(TypeError, match="lies in object storage"):
        open(path)  # noqa: SIM115, PLW1514
    with pytest.raises(AttributeError):
        path.chmod(0o600)


@pytest.mark.usefixtures("owner")
def test_a_run_is_read_from_a_bucket_each_byte_once(server, a_run, monkeypatch):
    server.upload(a_run, "runs", "tiny")
    local, fetched, plain = NormLog.open(a_run), [], RemotePath.read_bytes

    def counted(self):
        fetched.append(self.name)
        return plain(self)

    monkeypatch.setattr(RemotePath, "read_bytes", counted)
    opened = open_run(server.address("runs/tiny"))
    assert fetched == ["journal.jsonl"]
    log = opened.log
    assert (log.read() == local.read()).all()
    table = account(log, delta=DELTA)
    assert (table.epsilon == account(local, delta=DELTA).epsilon).all()
    files = [path.name for path in (a_run / "records").iterdir()]
    assert sorted(fetched) == sorted(["journal.jsonl", "ids.parquet", *files])
    checks = {check.key: check for check in verify(opened)}
    assert "compared when they are read" in checks["records"].detail
    assert checks["permissions"].status == "not checked"
    assert run(["check", server.address("runs/tiny"), "--set", "only=log"]) == 0


def _flip_a_record(server, run_dir, prefix):
    """Upload a run with one bit of the record of step 2 changed; the name of that file."""
    server.upload(run_dir, "runs", prefix)
    key = server.keys("runs", f"{prefix}/records/")[2]
    content = bytearray(server.client().get_object(Bucket="runs", Key=key)["Body"].read())
    content[len(content) // 2] ^= 4
    server.client().put_object(Bucket="runs", Key=key, Body=bytes(content))
    return key.rpartition("/")[2]


@pytest.mark.usefixtures("owner")
def test_a_flipped_bit_and_a_missing_file_are_named(server, a_run):
    name, address = _flip_a_record(server, a_run, "flipped"), server.address("runs/flipped")
    with pytest.raises(EvidenceError, match=rf"{name}.* was changed: its hash"):
        account(NormLog.open(address), delta=DELTA)
    assert run(["check", address]) == 1
    counted = NormLog.open(address, unreadable="worst_case")
    assert len(counted.unreadable_steps) == 1
    server.client().delete_object(Bucket="runs", Key=f"flipped/records/{name}")
    with pytest.raises(EvidenceError, match=rf"{name}: record of step 2 is missing"):
        NormLog.open(address)


@pytest.mark.usefixtures("owner")
def test_what_keeps_us_from_a_bucket_is_said_once(server, a_run, monkeypatch):
    with pytest.raises(InputError, match="there is no bucket nowhere; create it"):
        open_run(server.address("nowhere/run"))
    with pytest.raises(EvidenceError, match=r"holds no journal\.jsonl"):
        open_run(server.address("runs/nothing-here"))
    with pytest.raises(InputError, match="the server does not answer"):
        open_run("s3://runs/tiny?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1")


@pytest.mark.usefixtures("owner")
def test_an_audit_of_a_bucket_in_a_bucket(server, a_run, tmp_path, monkeypatch):
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(fidelity, name, ())
    server.upload(a_run, "runs", "audited")
    source, target = server.address("runs/audited"), server.address("runs/audits/tiny")
    with pytest.raises(InputError, match="bucket_is_private"):
        audit(source, tmp_path / "audit", delta=DELTA, upload_to=target)
    monkeypatch.chdir(tmp_path)
    words = ["--delta", str(DELTA), "--set", f"upload_to={target}", "--set", "bucket_is_private"]
    assert run(["audit", source, *words]) == 0
    audit(a_run, tmp_path / "local", delta=DELTA)
    names = sorted(path.name for path in (tmp_path / "local").iterdir() if path.name[0] != ".")
    assert sorted(key.rpartition("/")[2] for key in server.keys("runs", "audits/tiny")) == names
    there = location(target) / "epsilon.parquet"
    for folder in (tmp_path / "local", tmp_path / "audited-audit"):
        assert there.read_bytes() == (folder / "epsilon.parquet").read_bytes()
    table, examples = read_audit(target)
    assert len(table) == 240
    assert len(examples.train) == 240
    assert run(["show", target, "--by", "label"]) == 0


@contextmanager
def ray_on(n_workers):
    """Ray on this machine, whose workers have the environment variables of this process."""
    ray = pytest.importorskip("ray", reason="the extra indpriv[ray] is not installed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("RAY_worker_niceness", "0")
        ray.init(num_cpus=n_workers, include_dashboard=False, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("owner")
def test_ray_audits_a_run_in_a_bucket_to_the_same_bits(server, a_run, tmp_path, monkeypatch):
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(fidelity, name, ())
    server.upload(a_run, "runs", "on-ray")
    source = server.address("runs/on-ray")
    with ray_on(2):
        audit(source, tmp_path / "on-ray", delta=DELTA, engine="ray")
        table = account(NormLog.open(source), delta=DELTA, accountant="pld", engine="ray")
        name = _flip_a_record(server, a_run, "flipped-on-ray")
        with pytest.raises(EvidenceError, match=rf"{name}.* was changed: its hash"):
            account(NormLog.open(server.address("runs/flipped-on-ray")), delta=DELTA, engine="ray")
    audit(a_run, tmp_path / "local", delta=DELTA)
    there = tmp_path / "on-ray" / "epsilon.parquet"
    assert there.read_bytes() == (tmp_path / "local" / "epsilon.parquet").read_bytes()
    here = account(NormLog.open(a_run), delta=DELTA, accountant="pld")
    assert (table.epsilon == here.epsilon).all()
    assert (table.epsilon_lower == here.epsilon_lower).all()


@pytest.mark.slow
def test_workers_without_rights_are_refused_by_one_message(a_run, monkeypatch):
    pytest.importorskip("flask_cors", reason="needs an S3 server: pip install moto[server]")
    with s3_server() as guarded:
        guarded.client().create_bucket(Bucket="secret")
        guarded.upload(a_run, "secret", "tiny")
        users = []
        for name in ("stranger", "reader"):
            iam = guarded.client("iam")
            iam.create_user(UserName=name)
            keys = iam.create_access_key(UserName=name)["AccessKey"]
            users.append((keys["AccessKeyId"], keys["SecretAccessKey"]))
        allowed = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
        policy = json.dumps({"Version": "2012-10-17", "Statement": [allowed]})
        iam.put_user_policy(UserName="reader", PolicyName="reads", PolicyDocument=policy)
        guarded.require_rights()

        def become(user):
            for name, value in zip(KEYS, user, strict=True):
                monkeypatch.setenv(name, value)
            _storage._file_system.cache_clear()

        become(users[0])
        with ray_on(1):  # as the stranger
            become(users[1])
            log = NormLog.open(guarded.address("secret/tiny"))
            assert len(account(log, delta=DELTA)) == 240
            with pytest.raises(InputError, match="no right to do so in bucket secret; ask its ow"):
                account(log, delta=DELTA, engine="ray")
    _storage._file_system.cache_clear()


def test_credentials_without_rights_are_refused(a_run, monkeypatch):
    pytest.importorskip("flask_cors", reason="needs an S3 server: pip install moto[server]")
    with s3_server() as guarded:
        guarded.client().create_bucket(Bucket="secret")
        guarded.upload(a_run, "secret", "tiny")
        iam = guarded.client("iam")
        iam.create_user(UserName="stranger")
        keys = iam.create_access_key(UserName="stranger")["AccessKey"]
        guarded.require_rights()
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", keys["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", keys["SecretAccessKey"])
        _storage._file_system.cache_clear()
        with pytest.raises(InputError, match="no right to do so in bucket secret; ask its owner"):
            open_run(guarded.address("secret/tiny"))
    _storage._file_system.cache_clear()
