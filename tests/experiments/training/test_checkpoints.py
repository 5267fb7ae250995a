import pickle
import stat

import pytest
import torch
from torch import nn

from audits.training.checkpoints import (
    checkpoint_path,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from indpriv.errors import EvidenceError, InputError

HISTORY = [(1.4, 1 / 34, 9)]


def test_a_checkpoint_comes_back_without_running_code(tmp_path):
    model = nn.Linear(3, 2)
    path = save_checkpoint(tmp_path, model, 9, HISTORY)
    assert path == tmp_path / "checkpoints" / "step-000009.pt"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    torch.load(path, weights_only=True)
    checkpoint = load_checkpoint(path)
    assert (checkpoint.step, checkpoint.accountant_history) == (9, HISTORY)
    restored = nn.Linear(3, 2)
    restored.load_state_dict(checkpoint.model_state_dict)
    assert torch.equal(restored.weight, model.weight)


def test_a_checkpoint_is_a_copy(tmp_path):
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    path = save_checkpoint(tmp_path, model, 0, [])
    with torch.no_grad():
        model.weight.add_(1)
    assert torch.equal(load_checkpoint(path).model_state_dict["weight"], before)


def test_they_are_listed_by_step(tmp_path):
    for step in (1_000_000, 9, 10, 999_999):
        save_checkpoint(tmp_path, nn.Linear(1, 1), step, [])
    (tmp_path / "checkpoints" / "step-x.pt").write_text("")
    assert list_checkpoints(tmp_path) == [
        checkpoint_path(tmp_path, step) for step in (9, 10, 999_999, 1_000_000)
    ]


class Bomb:
    def __reduce__(self):
        return (pytest.fail, ("a checkpoint ran code",))


def test_a_malicious_checkpoint_is_refused_unread(tmp_path):
    path = tmp_path / "bad.pt"
    torch.save({"schema": 1, "step": Bomb()}, path)
    with pytest.raises(EvidenceError, match=r"bad\.pt"):
        load_checkpoint(path)
    path.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(EvidenceError, match=r"bad\.pt"):
        load_checkpoint(path)


def test_damaged_foreign_missing_and_newer_files_are_refused(tmp_path):
    path = save_checkpoint(tmp_path, nn.Linear(3, 2), 9, HISTORY)
    whole = path.read_bytes()
    for content in (b"", whole[:200], whole[:-100], b"x" * 500):
        path.write_bytes(content)
        with pytest.raises(EvidenceError, match=r"step-000009\.pt"):
            load_checkpoint(path)
    torch.save([1, 2], path)
    with pytest.raises(EvidenceError, match="not a checkpoint of an indpriv run"):
        load_checkpoint(path)
    torch.save({"schema": 2, "step": 1, "model_state_dict": {}, "accountant_history": []}, path)
    with pytest.raises(InputError, match="update indpriv"):
        load_checkpoint(path)
    with pytest.raises(InputError, match="does not exist"):
        load_checkpoint(tmp_path / "none.pt")
