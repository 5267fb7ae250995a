import os
import signal
import warnings
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import fsspec
import pytest
import torch
from hypothesis import settings
from pyarrow import fs

from indpriv import _storage
from object_storage import KEYS, InMemory, s3_server

torch.set_num_threads(1)

# Doctests are looked for in every file, and Flower is an extra.
collect_ignore = [] if find_spec("flwr") else ["flower_clients.py"]

# A slow machine is not a failure. CI draws the same examples each time; other runs draw new ones.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture
def hears_ctrl_c():
    """SIGINT raises KeyboardInterrupt, here and in children, even if pytest ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _quiet_torch():
    """Warnings are errors here, but for what torch and Opacus say about their own internals."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(torch|opacus)\..*")
        warnings.filterwarnings(
            "ignore", message=".*(Full backward hook|Secure RNG|Optimal order).*"
        )
        yield


@pytest.fixture(scope="session")
def server():
    """An S3 server with a bucket "runs"."""
    pytest.importorskip("moto", reason="needs an S3 server: pip install moto[server]")
    pytest.importorskip("flask_cors", reason="needs an S3 server: pip install moto[server]")
    with s3_server() as found:
        found.client().create_bucket(Bucket="runs")
        yield found


@pytest.fixture
def owner(monkeypatch):
    """The environment has the keys of the owner of a server."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    _storage._file_system.cache_clear()
    yield
    _storage._file_system.cache_clear()


@pytest.fixture
def bucket(monkeypatch):
    """Object storage in memory: a function from a path to its address."""
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    system = fs.PyFileSystem(InMemory(memory))
    monkeypatch.setattr(_storage, "_file_system", lambda scheme, name, query: (system, name))
    yield lambda below: f"s3://bucket/{below}"
    memory.store.clear()
