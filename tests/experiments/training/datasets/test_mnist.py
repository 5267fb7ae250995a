import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from audits.training.datasets import mnist
from indpriv.errors import EvidenceError, InputError

SHARED = Path(__file__).parents[5] / "shared" / "data"


def idx_bytes(array):
    return struct.pack(f">{1 + array.ndim}I", 0x0800 | array.ndim, *array.shape) + array.tobytes()


@pytest.fixture
def folder(tmp_path):
    """A small MNIST of 7 + 3 digits; the training files plain, the test files gzipped."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 7), ("t10k", 3)):
        for kind, array in (
            ("images-idx3", generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            ("labels-idx1", np.arange(count, dtype=np.uint8)),
        ):
            content = idx_bytes(array)
            if split == "train":
                (tmp_path / f"{split}-{kind}-ubyte").write_bytes(content)
            else:
                (tmp_path / f"{split}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    return tmp_path


def test_reads_plain_and_gzipped_files(folder):
    dataset = mnist.load(folder)
    assert (dataset.train.inputs.shape, dataset.test.inputs.shape) == (
        (7, 1, 28, 28),
        (3, 1, 28, 28),
    )
    raw = (folder / "train-images-idx3-ubyte").read_bytes()
    np.testing.assert_allclose(
        dataset.train.inputs.ravel() * 255, np.frombuffer(raw[16:], np.uint8), atol=1e-4
    )
    assert dataset.test.targets.tolist() == [0, 1, 2]


@pytest.mark.skipif(not (SHARED / "mnist").is_dir(), reason=f"MNIST is not in {SHARED}")
def test_reads_the_real_files():
    dataset = mnist.load(SHARED)
    assert (len(dataset.train), len(dataset.test)) == (60000, 10000)
    assert np.bincount(dataset.train.targets).tolist() == [
        5923,
        6742,
        5958,
        6131,
        5842,
        5421,
        5918,
        6265,
        5851,
        5949,
    ]


def test_a_missing_file_is_named_with_the_places_and_the_remedy(tmp_path):
    with pytest.raises(InputError) as caught:
        mnist.load(tmp_path)
    for part in ("train-images-idx3-ubyte.gz", str(tmp_path / "mnist"), "four idx files"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda content: content[:-1], "announces"),
        (lambda content: content + b"x", "holds more"),
        (lambda content: content[:10], "unpack requires"),
        (lambda content: b"", "unpack requires"),
        (
            lambda content: struct.pack(">4I", 0x0803, 0xFFFFFFFF, 28, 28) + content[16:],
            "header",
        ),  # 3 TiB announced
        (lambda content: struct.pack(">4I", 0x0803, 7, 27, 28) + content[16:], "header"),
        (lambda content: struct.pack(">4I", 0x0D03, 7, 28, 28) + content[16:], "header"),
        (lambda content: content[:16] + content[16 : 16 + 784 * 3], "announces"),
    ],
)
def test_a_damaged_file_is_named(folder, damage, says):
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(EvidenceError, match=says) as caught:
        mnist.load(folder)
    assert "train-images-idx3-ubyte" in str(caught.value)


@pytest.mark.parametrize("cut", [5, 40, -8])
def test_a_damaged_gzip_file_is_named(folder, cut):
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(EvidenceError, match="t10k-images"):
        mnist.load(folder)


def test_a_gzip_bomb_is_not_unpacked(folder):
    """No more is unpacked than the header asks for, however much follows."""
    path = folder / "t10k-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(struct.pack(">2I", 0x0801, 3) + bytes(50_000_000)))
    with pytest.raises(EvidenceError, match="holds more"):
        mnist.load(folder)


def test_labels_must_be_digits_and_as_many_as_images(folder):
    path = folder / "train-labels-idx1-ubyte"
    path.write_bytes(idx_bytes(np.full(7, 10, dtype=np.uint8)))
    with pytest.raises(EvidenceError, match="labels of 0 to 9"):
        mnist.load(folder)
    path.write_bytes(idx_bytes(np.zeros(6, dtype=np.uint8)))
    with pytest.raises(EvidenceError, match="6 labels for 7 images"):
        mnist.load(folder)


def test_fashion_mnist_is_read_from_its_own_folder(folder):
    with pytest.raises(InputError, match="dataset-fashion-mnist"):
        mnist.load_fashion(folder)  # where the files of MNIST lie
    (folder / "fashion_mnist").mkdir()
    for path in folder.glob("*ubyte*"):
        path.rename(folder / "fashion_mnist" / path.name)
    found = mnist.load_fashion(folder)
    assert (found.name, len(found.train), len(found.test)) == ("fashion_mnist", 7, 3)
    assert found.class_names[9] == "Ankle boot"


@pytest.mark.skipif(
    not (SHARED / "fashion_mnist").is_dir(), reason=f"Fashion-MNIST is not in {SHARED}"
)
def test_reads_the_real_files_of_fashion_mnist():
    found = mnist.load_fashion(SHARED)
    assert np.bincount(found.train.targets).tolist() == [6000] * 10
