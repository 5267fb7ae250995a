import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from audits.training.datasets import Split
from audits.training.tensors import tensor_set, whole_batch


def test_batches_are_those_of_a_plain_tensor_dataset():
    inputs = np.random.default_rng(0).normal(size=(10, 1, 4, 4)).astype(np.float32)
    dataset = tensor_set(Split(inputs, np.arange(10)))
    plain = TensorDataset(torch.from_numpy(inputs), torch.arange(10))
    indices = [[3, 1, 3], [9], [0, 2, 4, 6]]
    for ours, theirs in zip(
        DataLoader(dataset, batch_sampler=indices, collate_fn=whole_batch),
        DataLoader(plain, batch_sampler=indices),
        strict=True,
    ):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert [len(tensor) for tensor in dataset.__getitems__([])] == [0, 0]
    assert torch.equal(dataset[3][0], plain[3][0])
