import pytest

from summaries import summary_of
from synthetic import small_run


@pytest.fixture(scope="session")
def run():
    return small_run()


@pytest.fixture(scope="session")
def summary(run):
    return summary_of(*run)
