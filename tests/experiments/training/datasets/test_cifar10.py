import io
import pickle
import zipfile

import numpy as np
import pytest

from audits.training.datasets import cifar10
from indpriv.errors import EvidenceError, InputError


@pytest.fixture
def arrays():
    generator = np.random.default_rng(0)
    return {
        "x_train": generator.integers(0, 256, (6, 32, 32, 3), dtype=np.uint8),
        "y_train": np.arange(6),
        "x_test": generator.integers(0, 256, (2, 32, 32, 3), dtype=np.uint8),
        "y_test": np.arange(2)[:, None],
    }


@pytest.fixture
def batches(tmp_path, monkeypatch):
    """Six binary batches of 4 images, in place of 10,000."""
    monkeypatch.setattr(cifar10, "_BATCH", 4)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    generator = np.random.default_rng(1)
    for name in (*cifar10._BINARY["train"], *cifar10._BINARY["test"]):
        records = generator.integers(0, 256, (4, 3073), dtype=np.uint8)
        records[:, 0] = np.arange(4)
        (folder / name).write_bytes(records.tobytes())
    return folder


def test_npz_is_read_scaled_and_channels_first(tmp_path, arrays):
    np.savez_compressed(tmp_path / "cifar10.npz", **arrays)
    dataset = cifar10.load(tmp_path)
    assert (dataset.train.inputs.shape, dataset.test.inputs.shape) == (
        (6, 3, 32, 32),
        (2, 3, 32, 32),
    )
    expected = arrays["x_train"][2, 5, 7, 1] / 127.5 - 1
    assert dataset.train.inputs[2, 1, 5, 7] == pytest.approx(expected, abs=1e-6)
    assert np.abs(dataset.train.inputs).max() <= 1
    assert dataset.test.targets.tolist() == [0, 1]


def test_binary_batches_are_label_then_colour_planes(batches):
    dataset = cifar10.load(batches.parent)
    assert (len(dataset.train), len(dataset.test)) == (20, 4)
    record = np.frombuffer((batches / "data_batch_2.bin").read_bytes(), np.uint8).reshape(4, 3073)[
        3
    ]
    assert dataset.train.targets[7] == record[0] == 3
    np.testing.assert_allclose(dataset.train.inputs[7].ravel(), record[1:] / 127.5 - 1, atol=1e-6)


def test_both_formats_give_the_same(batches, tmp_path):
    from_batches = cifar10.load(batches.parent)

    def raw(split):
        return np.rint((split.inputs + 1) * 127.5).astype(np.uint8).transpose(0, 2, 3, 1)

    other = tmp_path / "npz"
    other.mkdir()
    np.savez(
        other / "cifar10.npz",
        x_train=raw(from_batches.train),
        y_train=from_batches.train.targets,
        x_test=raw(from_batches.test),
        y_test=from_batches.test.targets,
    )
    assert cifar10.load(other).fingerprint() == from_batches.fingerprint()


def test_missing_files_are_named_with_the_remedy(tmp_path):
    with pytest.raises(InputError) as caught:
        cifar10.load(tmp_path)
    for part in ("cifar10.npz", "data_batch_1.bin", str(tmp_path), "cifar-10-binary.tar.gz"):
        assert part in str(caught.value)


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was read",))


def test_the_python_versions_pickles_are_refused_unread(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "data_batch_1").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(InputError, match="pickles, which can run code"):
        cifar10.load(tmp_path)


def test_a_pickle_inside_the_npz_is_refused_unread(tmp_path, arrays):
    arrays["y_train"] = np.array([Bomb()], dtype=object)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(EvidenceError, match="y_train has shape"):
        cifar10.load(tmp_path)


def test_a_header_that_asks_for_terabytes_is_refused(tmp_path, arrays):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|u1", "fortran_order": False, "shape": (10**9, 32, 32, 3)}
    )
    np.savez(
        tmp_path / "cifar10.npz",
        **{name: array for name, array in arrays.items() if name != "x_train"},
    )
    with zipfile.ZipFile(tmp_path / "cifar10.npz", "a") as archive:
        archive.writestr("x_train.npy", header.getvalue())
    with pytest.raises(EvidenceError, match="x_train has shape"):
        cifar10.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays.pop("y_test"),
        lambda arrays: arrays.update(x_train=arrays["x_train"].astype(np.float32)),
        lambda arrays: arrays.update(x_train=arrays["x_train"][:, :16]),
        lambda arrays: arrays.update(y_train=arrays["y_train"] + 9),
        lambda arrays: arrays.update(y_train=-arrays["y_train"]),
        lambda arrays: arrays.update(y_train=arrays["y_train"][:-1]),
        lambda arrays: arrays.update(x_test=arrays["x_test"][:0], y_test=arrays["y_test"][:0]),
        lambda arrays: arrays.update(y_test=np.zeros((2, 10), np.uint8)),
        lambda arrays: arrays.update(y_test=np.uint8(3)),
    ],
)
def test_wrong_arrays_are_refused_and_the_file_named(tmp_path, arrays, change):
    change(arrays)
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(EvidenceError, match=r"cifar10\.npz is damaged"):
        cifar10.load(tmp_path)


@pytest.mark.parametrize("keep", [0, 100, 3000])
def test_a_cut_npz_is_refused(tmp_path, arrays, keep):
    path = tmp_path / "cifar10.npz"
    np.savez_compressed(path, **arrays)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(EvidenceError, match=r"cifar10\.npz is damaged"):
        cifar10.load(tmp_path)


def test_a_flipped_byte_in_the_npz_is_refused(tmp_path, arrays):
    path = tmp_path / "cifar10.npz"
    np.savez(path, **arrays)
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(content)
    with pytest.raises(EvidenceError, match=r"cifar10\.npz is damaged"):
        cifar10.load(tmp_path)


def test_a_missing_short_or_wrong_batch_is_named(batches):
    (batches / "data_batch_3.bin").unlink()
    with pytest.raises(InputError, match=r"data_batch_3\.bin is missing"):
        cifar10.load(batches.parent)
    (batches / "data_batch_3.bin").write_bytes(b"\0" * 100)
    with pytest.raises(EvidenceError, match=r"data_batch_3\.bin .* 100 bytes"):
        cifar10.load(batches.parent)
    (batches / "data_batch_3.bin").write_bytes(b"\x0b" * 4 * 3073)
    with pytest.raises(EvidenceError, match=r"data_batch_3\.bin .* label 11"):
        cifar10.load(batches.parent)
