import torch
from torch import nn

from indpriv.recording.norms import norm_pass

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_what_fits_on_a_gpu_is_a_quarter_of_its_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 8000))
    assert norm_pass.examples_at_once(20, GPU) == 50
    assert norm_pass.examples_at_once(10**9, GPU) == 1


def test_on_a_cpu_a_batch_is_about_what_fits_into_its_caches(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2**40, 2**41))
    assert norm_pass.examples_at_once(2**17, CPU) == 96 * 2**20 // 2**17
    assert norm_pass.examples_at_once(2**23, CPU) == 64  # with fewer, calls cost most
    assert norm_pass.examples_at_once(2**25, CPU) == 16  # 512 MiB
    assert norm_pass.examples_at_once(10**10, CPU) == 1
    assert norm_pass.examples_at_once(2**23, GPU) == 2**15
    assert norm_pass.examples_at_once(1, CPU) == norm_pass.examples_at_once(1, GPU) == 2**15


def test_saved_bytes_are_those_of_the_tensors_kept():
    layer = nn.Linear(10, 3)
    inputs = torch.randn(7, 10, requires_grad=True)
    kept = norm_pass.saved_bytes(lambda: torch.tanh(layer(inputs)))
    assert kept == 4 * (7 * 10 + 10 * 3 + 7 * 3)  # inputs, weight, output of tanh: each once
