"""CIFAR-10 from its official binary batches or from an npz file.

The pickles of its Python version are never read: they can run code.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from audits.training.datasets import files
from audits.training.datasets.base import Dataset, Split
from audits.training.datasets.files import damaged, scaled_images
from indpriv.errors import InputError

_SHAPE = (32, 32, 3)
_RECORD = 1 + 32 * 32 * 3  # bytes: a label, then the red, green and blue planes
_BATCH = 10_000
_NPZ = "cifar10.npz"
_BINARY = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}
_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_SUBFOLDERS = ("cifar10", "cifar-10-batches-bin", ".")

Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]  # images (n, 32, 32, 3), labels (n,)


def load(data_dir: Path) -> Dataset:
    """50,000 + 10,000 colour images, scaled to [-1, 1]; inputs (n, 3, 32, 32).

    The data folder, or its folder cifar10 or cifar-10-batches-bin, contains either cifar10.npz
    (x_train (n, 32, 32, 3) uint8, y_train, x_test, y_test) or the six binary batches.
    """
    folders = [data_dir / name for name in _SUBFOLDERS]
    for folder in folders:
        if (folder / _NPZ).is_file():
            return _dataset(read_npz(folder / _NPZ))
        if (folder / _BINARY["train"][0]).is_file():
            return _dataset(_read_batches(folder))
    message = (
        f"neither {_NPZ} nor {_BINARY['train'][0]} is in {', '.join(map(str, folders))}; put "
        "CIFAR-10's binary version there (cifar-10-binary.tar.gz of "
        "https://www.cs.toronto.edu/~kriz/cifar.html, unpacked)"
    )
    python_version = [*folders, data_dir / "cifar-10-batches-py"]
    if any((folder / "data_batch_1").is_file() for folder in python_version):
        message += (
            "; the Python version found there consists of pickles, which can run code and are "
            "never read"
        )
    raise InputError(message)


def _dataset(arrays: dict[str, Raw]) -> Dataset:
    splits = {
        name: Split(scaled_images(images), labels) for name, (images, labels) in arrays.items()
    }
    return Dataset(
        name="cifar10",
        train=splits["train"],
        test=splits["test"],
        class_names=_NAMES,
        preprocessing="pixels scaled from 0..255 to [-1, 1]",
        source="CIFAR-10 (Krizhevsky 2009), research use",
    )


def _read_batches(folder: Path) -> dict[str, Raw]:
    arrays = {}
    for split, names in _BINARY.items():
        images, labels = zip(*(read_batch(folder / name) for name in names), strict=True)
        arrays[split] = (np.concatenate(images), np.concatenate(labels))
    return arrays


def read_batch(path: Path) -> Raw:
    """Images (10000, 32, 32, 3) and labels (10000,) of one official binary batch."""
    if not path.is_file():
        raise InputError(
            f"{path} is missing; CIFAR-10 has six binary batches: unpack cifar-10-binary.tar.gz "
            "again"
        )
    if path.stat().st_size != _BATCH * _RECORD:
        raise damaged(path, f"it has {path.stat().st_size} bytes, a batch has {_BATCH * _RECORD}")
    records = np.fromfile(path, dtype=np.uint8).reshape(_BATCH, _RECORD)
    labels = records[:, 0].astype(np.int64)
    if labels.max() >= len(_NAMES):
        raise damaged(path, f"it has the label {labels.max()}, labels are 0 to 9")
    return records[:, 1:].reshape(_BATCH, 3, 32, 32).transpose(0, 2, 3, 1), labels


def read_npz(path: Path) -> dict[str, Raw]:
    """Images (n, 32, 32, 3) and labels (n,) of "train" and "test" in an npz file."""
    found = files.read_npz(path, {"x_train": _SHAPE, "y_train": (), "x_test": _SHAPE, "y_test": ()})
    arrays = {}
    for split in ("train", "test"):
        images = found[f"x_{split}"].astype(np.uint8, copy=False)
        labels = found[f"y_{split}"].astype(np.int64)
        known = len(labels) > 0 and 0 <= labels.min() <= labels.max() < len(_NAMES)
        if len(images) != len(labels) or not known:
            raise damaged(
                path, f"y_{split} needs a label of 0 to 9 for each of {len(images)} images"
            )
        arrays[split] = (images, labels)
    return arrays
