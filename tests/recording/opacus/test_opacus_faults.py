"""Faults of Opacus 1.6: each is shown on Opacus alone, and refused by its own name.

Once Opacus is right, the first half of a test fails and its refusal may go.
"""

import pytest
import torch
from opacus.grad_sample.utils import wrap_model
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from indpriv import EvidenceError, InputError
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, blobs, make_run, mlp

MODES = ["hooks", "functorch", "ghost"]
RUNS = pytest.mark.parametrize(
    ("mode", "dropout"), [("hooks", 0.0), ("functorch", 0.3), ("ghost", 0.3)]
)


def texts():
    """Token 0 is padding behind texts of 1 to 5 tokens."""
    tokens = torch.randint(1, 9, (60, 5), generator=torch.Generator().manual_seed(0))
    for row in range(60):
        tokens[row, 1 + row % 5 :] = 0
    return TensorDataset(tokens, torch.arange(60) % 2)


def refusal(tmp_path, model, dataset, mode):
    """What attaching says; "" if three steps were recorded."""
    run = make_run(dataset, model, mode=mode)
    recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE)
    try:
        with recorder.attach(run.model, run.optimizer, run.loader):
            for _, (inputs, targets) in zip(range(3), run.loader, strict=False):
                run.step(inputs, targets)
    except InputError as error:
        assert not (tmp_path / "run").exists()
        return str(error)
    return ""


class Text(nn.Module):
    def __init__(self, dropout=0.0, padding_idx=None):
        super().__init__()
        self.table = nn.Embedding(9, 8, padding_idx=padding_idx)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(8, 2)

    def forward(self, tokens):
        return self.head(self.dropout(self.hidden(tokens, self.table(tokens))))

    def hidden(self, tokens, vectors):
        return vectors.mean(1)


class Attention(Text):
    def __init__(self, heads, dropout=0.0):
        super().__init__(dropout)
        self.attend = DPMultiheadAttention(8, heads, batch_first=True)

    def hidden(self, tokens, vectors):
        padding = tokens == 0
        out, _ = self.attend(vectors, vectors, vectors, padding, need_weights=False)
        return (out * ~padding[..., None]).sum(1) / (~padding).sum(1, keepdim=True)


def test_attention_of_opacus_depends_on_the_padded_length(tmp_path):
    tokens = texts().tensors[0][:1, :1]
    longer = nn.functional.pad(tokens, (0, 4))
    for heads, moved in ((1, False), (2, True)):
        torch.manual_seed(0)
        model = Attention(heads).eval()
        assert torch.allclose(model(tokens), model(longer), atol=1e-5) is not moved
    assert refusal(tmp_path, Attention(1), texts(), "hooks") == ""


@RUNS
def test_attention_of_opacus_with_several_heads_is_refused(mode, dropout, tmp_path):
    said = refusal(tmp_path, Attention(2, dropout), texts(), mode)
    assert said.startswith("DPMultiheadAttention 'attend': with batch_first=True and several heads")
    assert "scaled_dot_product_attention" in said


class Packed(Text):
    def __init__(self, kind, dropout=0.0):
        super().__init__(dropout)
        self.rnn = kind(8, 8, batch_first=True)

    def hidden(self, tokens, vectors):
        lengths = (tokens != 0).sum(1)
        packed = pack_padded_sequence(vectors, lengths, batch_first=True, enforce_sorted=False)
        last = self.rnn(packed)[1]
        return (last[0] if isinstance(last, tuple) else last)[-1]


class Padded(Packed):
    """The same states, as the message says to take them."""

    def hidden(self, tokens, vectors):
        lengths = (tokens != 0).sum(1)
        outputs = self.rnn(vectors)[0]
        return outputs[torch.arange(len(lengths)), lengths - 1]


def test_rnns_of_opacus_have_gradients_in_the_order_of_length():
    tokens, targets = (part[:8] for part in texts().tensors)
    model = wrap_model(Packed(DPLSTM), grad_sample_mode="hooks", loss_reduction="sum")
    PER_EXAMPLE(model(tokens), targets).sum().backward()
    together = {name: p.grad_sample.clone() for name, p in model.named_parameters()}
    wrong = set()
    for i in range(8):
        model.zero_grad()
        PER_EXAMPLE(model(tokens[i : i + 1]), targets[i : i + 1]).sum().backward()
        for name, p in model.named_parameters():
            if not torch.allclose(together[name][i], p.grad_sample[0], atol=1e-5):
                wrong.add("rnn" in name)
    assert wrong == {True}


@RUNS
@pytest.mark.parametrize("kind", [DPLSTM, DPGRU])
def test_packed_texts_in_another_order_are_refused(kind, mode, dropout, tmp_path):
    said = refusal(tmp_path, Packed(kind, dropout), texts(), mode)
    assert said.startswith(f"{kind.__name__} 'rnn' gets a packed batch sorted by length")
    assert "outputs[torch.arange(len(lengths)), lengths - 1]" in said
    if not dropout:
        assert refusal(tmp_path, Padded(kind), texts(), mode) == ""
        packed, padded = Packed(kind), Padded(kind)
        padded.load_state_dict(packed.state_dict())
        tokens = texts().tensors[0]
        torch.testing.assert_close(padded(tokens), packed(tokens))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("mode", ["hooks", "ew"])
def test_padding_that_opacus_trains_is_refused(mode, dropout, tmp_path):
    said = refusal(tmp_path, Text(dropout, padding_idx=0), texts(), mode)
    assert "Opacus ignores padding_idx of the Embedding 'table'" in said


class Checkpointed(nn.Module):
    def __init__(self, reentrant, dropout=0.0):
        super().__init__()
        self.first, self.last, self.reentrant = nn.Linear(6, 6), nn.Linear(8, 2), reentrant
        self.middle = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(dropout))

    def forward(self, inputs):
        return self.last(checkpoint(self.middle, self.first(inputs), use_reentrant=self.reentrant))


@RUNS
def test_checkpoints_that_are_not_reentrant_are_refused(mode, dropout, tmp_path):
    said = refusal(tmp_path, Checkpointed(False, dropout), blobs(), mode)
    assert said.startswith("Linear 'middle.0' runs in a checkpoint that is not reentrant")
    assert refusal(tmp_path, Checkpointed(True, dropout), blobs(), mode) == ""


def test_ghost_mode_with_a_plain_loss_is_refused_before_the_step(tmp_path):
    run = make_run(mode="ghost")
    before = [p.detach().clone() for p in run.model.parameters()]
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE)
    run.criterion = nn.CrossEntropyLoss()
    with (
        pytest.raises(EvidenceError, match=r"were not clipped: .*criterion that make_private"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        run.train(1)
    assert all(torch.equal(p, q) for p, q in zip(run.model.parameters(), before, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trained", [True, False])
def test_parameters_frozen_or_unfrozen_on_the_way_are_told(trained, mode, tmp_path):
    model = mlp()
    model[0].weight.requires_grad_(trained)
    run = make_run(model=model, mode=mode)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every="once")
    happened = "frozen" if trained else "unfrozen"
    with (
        pytest.raises(InputError, match=rf"were {happened} during the run: \S*0.weight"),
        recorder.attach(run.model, run.optimizer, run.loader),
    ):
        for step, batch in enumerate(run.loader):
            if step == 2:
                model[0].weight.requires_grad_(not trained)
            run.step(*batch)
