"""Location30: which places people in Bangkok checked in at, grouped into 30 kinds of people.

After Shokri et al. 2017 (arXiv:1610.05820), who made it from Foursquare check-ins.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from audits.training.datasets.base import Dataset, Split
from audits.training.datasets.files import damaged, find_file

_FILE = "bangkok"
_REMEDY = (
    "it is the file in dataset_location.tgz of github.com/privacytrustlab/datasets: on each line a "
    "class from 1 to 30 and 446 zeros and ones"
)
_N_FEATURES, _N_CLASSES = 446, 30
_EVERY = 5  # every fifth row is in the test split


def load(data_dir: Path) -> Dataset:
    """4,008 + 1,002 people of 446 places each; inputs (n, 446) of 0 and 1.

    The file is in the data folder or its folder location30.
    """
    path = find_file(_FILE, [data_dir / "location30", data_dir], remedy=_REMEDY)
    try:
        lines = path.read_text(encoding="ascii").replace('"', "").split()
        rows = np.array([line.split(",") for line in lines], dtype=np.int64)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    if rows.ndim != 2 or rows.shape[1] != 1 + _N_FEATURES:
        raise damaged(path, f"its rows have shape {rows.shape}, not (n, {1 + _N_FEATURES})")
    labels, inputs = rows[:, 0], rows[:, 1:]
    if not (np.isin(inputs, (0, 1)).all() and 1 <= labels.min() <= labels.max() <= _N_CLASSES):
        raise damaged(path, f"it needs classes of 1 to {_N_CLASSES}, and features of 0 and 1")
    test = np.arange(len(rows)) % _EVERY == 0
    every = Split(inputs.astype(np.float32), labels - 1)
    return Dataset(
        name="location30",
        train=every.take(~test),
        test=every.take(test),
        class_names=tuple(map(str, range(1, _N_CLASSES + 1))),
        preprocessing="none: zeros and ones",
        source="Location30 (Shokri et al. 2017, from Foursquare check-ins of Yang et al. 2016)",
    )
