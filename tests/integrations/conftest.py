import pytest

from indpriv.recording import Recorder
from runs import PER_EXAMPLE, make_run


@pytest.fixture
def run():
    return make_run()


@pytest.fixture
def recorder(run, tmp_path):
    return Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=3)
