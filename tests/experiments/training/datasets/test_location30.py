from pathlib import Path

import numpy as np
import pytest

from audits.training.datasets import location30
from indpriv.errors import EvidenceError, InputError

SHARED = Path(__file__).parents[5] / "shared" / "data"


def write(folder, rows):
    lines = [f'"{row[0]}",' + ",".join(map(str, row[1:])) for row in rows]
    (folder / "bangkok").write_text("\n".join(lines) + "\n")
    return folder


def rows(n=11):
    features = np.random.default_rng(0).integers(0, 2, (n, 446))
    return np.column_stack([1 + np.arange(n) % 30, features])


def test_every_fifth_row_is_a_test_row(tmp_path):
    found = location30.load(write(tmp_path, rows()))
    assert (len(found.train), len(found.test)) == (8, 3)
    np.testing.assert_array_equal(found.test.inputs, rows()[[0, 5, 10], 1:])
    assert found.test.targets.tolist() == [0, 5, 10]
    assert found.n_classes == 30


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="privacytrustlab"):
        location30.load(tmp_path)


@pytest.mark.parametrize(
    ("column", "value", "says"), [(0, 31, "classes of 1 to 30"), (5, 2, "features of 0 and 1")]
)
def test_a_damaged_file_is_refused(column, value, says, tmp_path):
    wrong = rows()
    wrong[3, column] = value
    with pytest.raises(EvidenceError, match=says):
        location30.load(write(tmp_path, wrong))
    with pytest.raises(EvidenceError, match="shape"):
        location30.load(write(tmp_path, rows()[:, :-1]))
    (tmp_path / "bangkok").write_text("1,x\n")
    with pytest.raises(EvidenceError, match="invalid literal"):
        location30.load(tmp_path)


@pytest.mark.skipif(not (SHARED / "location30").is_dir(), reason=f"Location30 is not in {SHARED}")
def test_reads_the_real_file():
    found = location30.load(SHARED)
    assert (len(found.train), len(found.test)) == (4008, 1002)
