import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import Dataset

from audits.training.models import HingeLoss
from indpriv import InputError, account
from indpriv.errors import EvidenceWarning
from indpriv.norm_log.evidence import lines_of
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import CausalLMLoss, NormPass, Recorder
from indpriv.recording.norms.batches import Keywords, described_loss, with_targets
from runs import make_run

VOCABULARY = 7


class Output(dict):
    """Like a ModelOutput: a mapping with attributes."""

    __getattr__ = dict.__getitem__


class LanguageModel(nn.Module):
    """Takes and returns what Hugging Face's models do, its mean loss over all tokens included."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 4)
        self.head = nn.Linear(4, VOCABULARY)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = torch.tanh(self.embedding(input_ids)).cumsum(1)
        logits = self.head(hidden)
        flat = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        return Output(logits=logits, loss=nn.functional.cross_entropy(*flat))


class Texts(Dataset):
    """Token lists of different lengths, as a tokenizer gives them."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"input_ids": [(index * k + k) % VOCABULARY for k in range(2, 4 + index % 3)]}


def padded(rows):
    """A batch as DataCollatorForLanguageModeling makes it."""
    longest = max(len(row["input_ids"]) for row in rows)

    def filled(row, value):
        return row["input_ids"] + [value] * (longest - len(row["input_ids"]))

    ids = torch.tensor([filled(row, 0) for row in rows])
    labels = torch.tensor([filled(row, -100) for row in rows])
    return {"input_ids": ids, "attention_mask": (labels >= 0).long(), "labels": labels}


@given(
    st.lists(st.lists(st.integers(-1, 4), min_size=4, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["mean", "sum"]),
)
def test_the_loss_of_a_sequence_is_that_of_its_labels_one_by_one(rows, over_tokens):
    labels = torch.tensor([[-100 if token < 0 else token for token in row] for row in rows])
    logits = torch.randn(len(rows), 4, 5, generator=torch.Generator().manual_seed(0))
    found = CausalLMLoss(over_tokens)(Output(logits=logits), {"labels": labels})
    for i, row in enumerate(labels):
        terms = [-logits[i, t - 1].log_softmax(0)[row[t]] for t in range(1, 4) if row[t] != -100]
        total = sum(terms, torch.zeros(()))
        expected = total / max(1, len(terms)) if over_tokens == "mean" else total
        torch.testing.assert_close(found[i], expected)


def test_what_is_no_language_model_is_refused():
    with pytest.raises(InputError, match="over_tokens"):
        CausalLMLoss("median")
    for outputs, batch in [(torch.zeros(2, 3), {}), (Output(logits=1), {}), ({}, torch.zeros(2))]:
        with pytest.raises(InputError, match="logits and batches with labels"):
            CausalLMLoss()(outputs, batch)


@pytest.mark.parametrize("backend", ["layerwise", "functorch"])
def test_norms_of_dict_batches_are_autograds(backend):
    torch.manual_seed(2**40 + 0)
    model, loss_fn = LanguageModel(), CausalLMLoss("sum")
    batch = Keywords(padded([Texts()[i] for i in range(9)]))
    with NormPass(model, loss_fn, batch, batch, backend=backend) as norm_pass:
        norms, losses = norm_pass(batch, batch)
    torch.testing.assert_close(losses, loss_fn(model(**batch), batch))
    for i in range(9):
        one = Texts()[i]["input_ids"]  # without padding
        outputs = model(torch.tensor([one]), labels=torch.tensor([one]))
        loss = nn.functional.cross_entropy(
            outputs.logits[0, :-1], torch.tensor(one[1:]), reduction="sum"
        )
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected = sum(float(g.double().square().sum()) for g in gradients) ** 0.5
        assert expected <= norms[i] <= expected * (1 + 1e-3)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_a_run_on_dict_batches_is_recorded_and_exact(mode, tmp_path):
    torch.manual_seed(2**40 + 0)
    loss_fn = CausalLMLoss()
    loader = torch.utils.data.DataLoader(Texts(), batch_size=10, collate_fn=padded)
    run = make_run(Texts(), LanguageModel(), mode=mode, data_loader=loader)
    recorder = Recorder(tmp_path, dataset=Texts(), loss_fn=loss_fn, every=1, test_set=Texts())
    if mode == "ghost":
        run.criterion.criterion, loss_fn.reduction = loss_fn, "mean"  # as make_private does
    else:
        run.criterion = lambda outputs, batch: loss_fn(outputs, batch).mean()
    with recorder.attach(run.model, run.optimizer, run.loader):
        for batch in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(**batch), batch).backward()
            run.optimizer.step()
    header = open_run(tmp_path).header
    assert not header["norm_pass"]["caveats"]
    assert header["run"]["loss"] == "CausalLMLoss(over_tokens='mean', ignore_index=-100)"


class WithOwnLoss(LanguageModel):
    """Its outputs are known to torch's pytrees, as Hugging Face's are."""

    def forward(self, **batch):
        return dict(super().forward(**batch))


@pytest.mark.parametrize("scaled", [False, True], ids=["as returned", "scaled in place"])
@pytest.mark.parametrize("max_grad_norm", [1e-4, 1.0])
def test_a_models_own_mean_over_all_tokens_of_a_batch_is_told_by_name(
    max_grad_norm, scaled, tmp_path
):
    """Also where every gradient is clipped; the Trainer of Hugging Face scales that loss in place."""
    torch.manual_seed(2**40 + 0)
    loader = torch.utils.data.DataLoader(Texts(), batch_size=10, collate_fn=padded)
    made = {"data_loader": loader, "max_grad_norm": max_grad_norm}
    run = make_run(Texts(), WithOwnLoss(), **made)
    recorder = Recorder(tmp_path, dataset=Texts(), loss_fn=CausalLMLoss(), every=1)

    def train():
        with recorder.attach(run.model, run.optimizer, run.loader):
            for batch in run.loader:
                run.optimizer.zero_grad()
                loss = run.model(**batch)["loss"]
                if scaled:
                    loss *= 1
                loss.backward()
                run.optimizer.step()

    with pytest.warns(EvidenceWarning, match="train on CausalLMLoss"):
        train()
    for participation in ("secret", "known"):
        log = open_run(tmp_path).log
        assert account(log, delta=1e-5, participation=participation).claim == "estimate"
    [line] = (one for one in lines_of(verify(open_run(tmp_path)), {}) if one.key == "contribution")
    assert line.status == "refuted"
    assert line.detail.startswith("train on CausalLMLoss")


def test_a_loss_may_be_a_function_of_outputs_alone():
    model = nn.Linear(3, 2)
    inputs = torch.randn(9, 3, generator=torch.Generator().manual_seed(1))
    with NormPass(model, lambda outputs: outputs.square().sum(1), inputs, inputs) as norm_pass:
        norms, _ = norm_pass(inputs, inputs)
    assert norms.shape == (9,)
    for loss_fn in (nn.MSELoss(), torch.nn.functional.cross_entropy, functools.partial(max, 1)):
        assert with_targets(loss_fn) is loss_fn


def test_a_loss_is_described_by_its_name():
    def mine(outputs):
        return outputs

    assert described_loss(with_targets(mine)).endswith("mine")
    assert described_loss(nn.CrossEntropyLoss()) == "CrossEntropyLoss()"


@given(st.integers(0, 1000), st.integers(2, 6), st.sampled_from(["mean", "sum", "none"]))
def test_the_hinge_loss_and_its_gradient_are_those_of_torch(seed, n_classes, reduction):
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(5, n_classes, generator=generator, requires_grad=True)
    targets = torch.randint(n_classes, (5,), generator=generator)
    ours, theirs = HingeLoss(reduction), nn.MultiMarginLoss(reduction=reduction)
    torch.testing.assert_close(ours(outputs, targets), theirs(outputs, targets))
    gradients = [
        torch.autograd.grad(loss(outputs, targets).sum(), outputs)[0] for loss in (ours, theirs)
    ]
    torch.testing.assert_close(*gradients)
