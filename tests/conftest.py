import os
import signal
import warnings
from importlib.util import find_spec

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import settings

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
