import torch
from torch import nn

from indpriv.recording.norms import memory


def test_what_fits_is_a_quarter_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 4000)
    device = torch.device("cpu")
    assert memory.largest_that_fits(10, device, at_most=4096) == 100
    assert memory.largest_that_fits(10, device, at_most=64) == 64
    assert memory.largest_that_fits(10**9, device, at_most=64) == 1


def test_the_machine_has_some_memory_free():
    assert 2**20 < memory.free_memory(torch.device("cpu")) < 2**50


def test_saved_bytes_are_those_of_the_tensors_kept():
    layer = nn.Linear(10, 3)
    inputs = torch.randn(7, 10, requires_grad=True)
    kept = memory.saved_bytes(lambda: torch.tanh(layer(inputs)))
    assert kept == 4 * (7 * 10 + 10 * 3 + 7 * 3)  # inputs, weight, output of tanh: each once
