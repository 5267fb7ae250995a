"""Runs and audits in Google Cloud Storage and Azure: emulators of both, where they are installed.

Google's: pip install gcp-storage-emulator. Azure's: npm install azurite, with azurite-blob on PATH.
"""

import json
import shutil
import subprocess
import sys
import urllib.request
from functools import partial

import pytest
from pyarrow.fs import AzureFileSystem

from indpriv import InputError, NormLog, _storage, account, upload
from indpriv._storage import location
from indpriv.analysis import fidelity
from indpriv.audit import audit, read_audit
from indpriv.cli import run
from indpriv.norm_log.norm_log import open_run
from object_storage import free_port, wait_until_it_answers
from processes import running
from synthetic import small_run, write_run

DELTA = 1e-5
QUIET = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
# Of every Azurite: learn.microsoft.com/azure/storage/common/storage-use-azurite
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "tiny", *small_run(n=240, steps=6))


@pytest.fixture(autouse=True)
def no_file_system_of_before(monkeypatch):
    monkeypatch.setattr(fidelity, "COARSER", ())
    monkeypatch.setattr(fidelity, "RULES", ())
    monkeypatch.setattr(fidelity, "FIDELITY_EPOCHS", ())
    _storage._file_system.cache_clear()
    yield
    _storage._file_system.cache_clear()


def google_address(port, below):
    options = f"endpoint_override=127.0.0.1:{port}&scheme=http&retry_limit_seconds=2"
    return f"gs://anonymous@{below}?{options}"


@pytest.fixture(scope="module")
def google():
    pytest.importorskip(
        "gcp_storage_emulator", reason="needs a server: pip install gcp-storage-emulator"
    )
    port = free_port()
    options = ["start", "--host", "127.0.0.1", "--port", str(port), "--in-memory"]
    with running([sys.executable, "-m", "gcp_storage_emulator", *options], **QUIET) as process:
        wait_until_it_answers(process, port)
        buckets = f"http://127.0.0.1:{port}/storage/v1/b?project=tests"
        bucket, kind = json.dumps({"name": "runs"}).encode(), {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(buckets, bucket, kind)).close()
        yield partial(google_address, port)


def azure_address(port, below):
    container, _, path = below.partition("/")
    at = f"127.0.0.1:{port}"
    options = f"blob_storage_authority={at}&dfs_storage_authority={at}&enable_tls=false"
    return (
        f"abfs://{container}@{ACCOUNT}.dfs.core.windows.net/{path}"
        f"?{options}&credential_kind=anonymous"
    )


@pytest.fixture
def azure():
    """Addresses of Azurite, and its file system with the key, which no address may hold."""
    server = shutil.which("azurite-blob")
    if server is None:
        pytest.skip("needs a server: npm install azurite, and azurite-blob on PATH")
    port = free_port()
    options = ["--blobPort", str(port), "--inMemoryPersistence", "--skipApiVersionCheck"]
    command = [server, "--blobHost", "127.0.0.1", *options, "--disableTelemetry"]
    with running(command, **QUIET) as process:
        wait_until_it_answers(process, port)
        at = f"127.0.0.1:{port}"
        system = AzureFileSystem(
            ACCOUNT,
            account_key=KEY,
            blob_storage_authority=at,
            dfs_storage_authority=at,
            blob_storage_scheme="http",
            dfs_storage_scheme="http",
        )
        system.create_dir("runs")
        yield partial(azure_address, port), system


def check_a_run_and_its_audit(address_of, a_run, tmp_path):
    """A run is read there as on a disk, and it and its audit are sent there."""
    source, target = address_of("runs/tiny"), address_of("runs/audits/tiny")
    upload(a_run, source, bucket_is_private=True)
    opened = open_run(source)
    assert (opened.log.read() == NormLog.open(a_run).read()).all()
    here = account(NormLog.open(a_run), delta=DELTA)
    assert (account(opened.log, delta=DELTA).epsilon == here.epsilon).all()
    assert run(["check", source, "--set", "only=log"]) == 0

    audit(source, tmp_path / "audit", delta=DELTA, upload_to=target, bucket_is_private=True)
    audit(a_run, tmp_path / "local", delta=DELTA)
    names = sorted(path.name for path in (tmp_path / "local").iterdir() if path.name[0] != ".")
    assert sorted(path.name for path in location(target).iterdir()) == names
    there = location(target) / "epsilon.parquet"
    assert there.read_bytes() == (tmp_path / "local" / "epsilon.parquet").read_bytes()
    assert len(read_audit(target)[0]) == 240
    assert run(["show", target, "--by", "label"]) == 0


@pytest.mark.slow
def test_a_run_and_its_audit_in_google_cloud_storage(google, a_run, tmp_path):
    check_a_run_and_its_audit(google, a_run, tmp_path)
    with pytest.raises(InputError, match="there is no bucket anonymous@nowhere; create it"):
        open_run(google("nowhere/run"))
    with pytest.raises(InputError, match="the server does not answer; check the network"):
        open_run(google_address(free_port(), "runs/tiny"))


@pytest.mark.slow
def test_a_run_and_its_audit_in_azure(azure, a_run, tmp_path, monkeypatch):
    address_of, system = azure
    with pytest.raises(InputError, match="no right to do so in bucket runs@devstoreaccount1"):
        open_run(address_of("runs/tiny"))  # as nobody
    with pytest.raises(InputError, match="the server does not answer; check the network"):
        open_run(azure_address(free_port(), "runs/tiny"))
    monkeypatch.setattr(_storage, "_file_system", lambda *_: (system, "runs"))
    check_a_run_and_its_audit(address_of, a_run, tmp_path)
    monkeypatch.undo()
