"""Reading the files of data sets, without trusting their headers and without unpickling."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from indpriv.errors import EvidenceError, InputError

MAX_COUNT = 1_000_000  # examples that a header may announce: far above any data set read here


def find_file(wanted: str, folders: list[Path], *, remedy: str) -> Path:
    """The first of `folders` / `wanted` that is a file, or `wanted` without its ".gz".

    The InputError, if there is none, names the file, every place that was tried, and the remedy.
    """
    for folder in folders:
        for name in dict.fromkeys((wanted, wanted.removesuffix(".gz"))):
            if (folder / name).is_file():
                return folder / name
    places = " and ".join(str(folder) for folder in folders)
    raise InputError(f"{wanted} is not in {places}; {remedy}")


def damaged(path: Path, what: str) -> EvidenceError:
    """The error for a data file that is not what it should be."""
    return EvidenceError(f"{path} is damaged or not the right file: {what}; get it again")


def read_npz(
    path: Path, item_shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, NDArray[np.integer]]:
    """Arrays of whole numbers in an npz file, each (n, *item_shape), without unpickling.

    The shape of one item is that of an image of bytes, or () for one whole number of any type. A
    missing array, or one of another shape or type, is an EvidenceError before any is unpacked.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return {
                name: _read_member(path, archive, name, shape)
                for name, shape in item_shapes.items()
            }
    except InputError:  # also a ValueError, and its message is complete
        raise
    except (
        OSError,
        EOFError,
        KeyError,
        ValueError,
        zipfile.BadZipFile,
        zlib.error,
        NotImplementedError,
    ) as error:
        raise damaged(path, str(error)) from error


def _read_member(
    path: Path, archive: zipfile.ZipFile, name: str, item_shape: tuple[int, ...]
) -> NDArray[np.integer]:
    """One array, once its header has been checked: a header could ask for any amount of memory."""
    with archive.open(f"{name}.npy") as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise damaged(path, f"{name} has npy version {version}")
        shape, _, dtype = np.lib.format.read_array_header_1_0(member)
    accepted = [item_shape] if item_shape else [(), (1,)]
    wanted = np.uint8 if item_shape else np.integer
    if not (np.issubdtype(dtype, wanted) and shape and shape[1:] in accepted):
        raise damaged(path, f"{name} has shape {shape} and type {dtype}")
    if shape[0] > MAX_COUNT:
        raise damaged(path, f"{name} has shape {shape}, more than {MAX_COUNT:,} items")
    with archive.open(f"{name}.npy") as member:
        array: NDArray[np.integer] = np.lib.format.read_array(member, allow_pickle=False)
    return array.reshape(len(array), *item_shape)


def scaled_images(images: NDArray[np.integer]) -> NDArray[np.float32]:
    """Images of bytes, (n, height, width) or (n, height, width, 3), scaled to [-1, 1].

    Returns (n, channels, height, width) float32.
    """
    channels_first = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
    inputs = np.ascontiguousarray(channels_first, dtype=np.float32)
    inputs /= np.float32(127.5)
    inputs -= np.float32(1)
    return inputs
