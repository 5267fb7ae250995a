"""Files: what a table is about survives, and modes are read where the system keeps them."""

import hashlib
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from indpriv._files import others_can_read, read_parquet, read_verified, write_private_parquet
from indpriv.errors import EvidenceError


def test_a_table_keeps_what_it_says_about_itself(tmp_path):
    frame = pd.DataFrame({"epsilon": [1.0]})
    frame.attrs = {"claim": "exact", "account": {"delta": 1e-5}}
    write_private_parquet(frame, tmp_path / "new.parquet")
    assert read_parquet(tmp_path / "new.parquet").attrs == frame.attrs


def test_and_where_pyarrow_does_not_keep_it(tmp_path):
    """As before pyarrow 22, whose tables of pandas had no attributes."""
    table = pa.table({"epsilon": [1.0]})
    table = table.replace_schema_metadata({"indpriv": '{"claim": "exact"}'})
    pq.write_table(table, tmp_path / "old.parquet")
    assert read_parquet(tmp_path / "old.parquet").attrs == {"claim": "exact"}


def test_who_can_read(tmp_path, monkeypatch):
    tmp_path.chmod(0o755)
    assert others_can_read(tmp_path)
    monkeypatch.setattr(os, "name", "nt")
    assert not others_can_read(tmp_path)
    monkeypatch.undo()
    tmp_path.chmod(0o700)
    assert not others_can_read(tmp_path)


def test_a_file_that_is_changed_after_it_was_read_is_compared_again(tmp_path):
    path, content = tmp_path / "file", b"as it was"
    path.write_bytes(content)
    digest = hashlib.sha256(content).hexdigest()
    assert read_verified(path, digest) == content
    path.write_bytes(b"as it is!")
    os.utime(path, ns=(0, 1))  # some file systems keep times of a few milliseconds only
    with pytest.raises(EvidenceError, match="changed"):
        read_verified(path, digest)
