"""Images of a run's training set, which a report may show."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from indpriv.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def training_images(run_dir: Path, data_dir: Path | None) -> NDArray[np.float32]:
    """Training images of a run of `indpriv train`, if its data set is still the same."""
    from indpriv.norm_log.run_files import RUN_JSON
    from indpriv.norm_log.schema import read_run_json
    from indpriv.training.datasets import load_dataset

    data = read_run_json(run_dir).get("data") or {}
    if not data.get("dataset"):
        raise InputError(
            f"--show-examples: {run_dir / RUN_JSON} names no data set (data.dataset), and a run "
            "directory holds no examples; leave the option out and look examples up by the ids in "
            "the report"
        )
    dataset = load_dataset(data["dataset"], data_dir)
    if dataset.fingerprint() != data.get("fingerprint"):
        raise InputError(
            f"--show-examples: the run was trained on other data than {data['dataset']} as loaded "
            "(another fingerprint: canaries, a subset or another version), so the ids would name "
            "other examples; leave the option out"
        )
    return dataset.train.inputs
