import gc
import os
import random
import signal
import warnings
import zlib
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import fsspec
import numpy as np
import opacus
import pytest
import torch
from hypothesis import settings
from pyarrow import fs

from indpriv import _storage
from object_storage import KEYS, InMemory, s3_server

torch.set_num_threads(1)

# Doctests are looked for in every file, and Flower is an extra.
collect_ignore = [] if find_spec("flwr") else ["flower_clients.py"]

# What Opacus 1.5 lacks or does otherwise, and the tests that are left out with it: make test-opacus15
OPACUS_15 = {
    "no make_private(wrap_model=False)": ("model_not_wrapped", "hooks_attached_in_place"),
    "states of accountants that torch.load(weights_only=True) does not read": (
        "test_settings_that_only_options_tell_are_not_checked",
        "test_other_checkpoints_than_before_are_refused",
        "test_a_model_that_diverged_on_the_way_keeps_what_was_done",
        "tests/test_cli_replay.py",
    ),
    "noise drawn at another place, where these tests put their own": (
        "test_broken_noise_fails_in_one_run",
        "test_the_noise_stays_at_max_grad_norm",
    ),
    "no bfloat16 autocast in hooks mode": (
        "test_autocast_that_only_training_has_is_found",
        "test_clipping_by_norms_in_half_precision_is_told",
        "autocast to bfloat16",
    ),
    "no noise in another type than float32": (
        "bfloat16_model",
        "test_the_clipping_norm_follows_the_share_of_unclipped_gradients",
    ),
    "another message of its own": ("test_layers_that_opacus_replaces_are_named",),
}
if opacus.__version__ < "1.6":
    collect_ignore.append("recording/opacus/test_ranks.py")  # FSDP2


def pytest_collection_finish():
    """What was imported is here to stay: each attach, which looks at all objects, need not see it."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    for item in items if opacus.__version__ < "1.6" else ():
        for reason, names in OPACUS_15.items():
            if any(name in item.nodeid for name in names):
                item.add_marker(pytest.mark.skip(reason=f"Opacus 1.5: {reason}"))


# A slow machine is not a failure. CI draws the same examples each time; other runs draw new ones.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True)
def _same_draws(request, monkeypatch):
    """In CI, each test draws the same random numbers each time: secrets, too, in its own process.

    The seed is so large that it does not look chosen.
    """
    if not os.environ.get("CI"):
        return
    seed, process = zlib.crc32(request.node.nodeid.encode()), os.getpid()
    secret = random.Random(seed)

    def urandom(n):
        return secret.randbytes(n) if os.getpid() == process else os.urandom(n)

    monkeypatch.setattr(random, "_urandom", urandom)  # of secrets and numpy, too
    torch.manual_seed(2**40 + seed)
    np.random.seed(seed)
    random.seed(seed)


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
