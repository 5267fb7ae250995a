"""What stands in the way is named, and what each message says to type works."""

import re

import pytest
import torch
from opacus.grad_sample.utils import wrap_model
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.checkpoint import checkpoint

from indpriv import InputError
from indpriv.recording.norms.batches import Batch, Keywords
from indpriv.recording.norms.model_checks import hindrance
from indpriv.recording.norms.norm_pass import NormPass
from runs import PER_EXAMPLE

SIZE = 9


def refusal(model, inputs, mode="hooks"):
    """What attaching a Recorder to this model says; "" if it is accepted."""
    torch.manual_seed(0)
    wrapped = wrap_model(model, grad_sample_mode=mode)
    targets = torch.arange(SIZE) % 2
    try:
        with NormPass(wrapped, PER_EXAMPLE, inputs, targets) as norm_pass:
            norm_pass.check_training(wrapped)
    except InputError as error:
        return str(error)
    return ""


class Block(nn.Module):
    def __init__(self, add, inplace=False):
        super().__init__()
        self.linear, self.relu, self.add = nn.Linear(4, 4), nn.ReLU(inplace), add
        self.head = nn.Linear(4, 2)

    def forward(self, inputs):
        out = self.linear(inputs)
        if self.add:
            out += inputs
        return self.head(self.relu(out))


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_what_is_changed_in_place_is_named_with_the_switch(mode):
    inputs = torch.randn(SIZE, 4)
    said = refusal(Block(add=True), inputs, mode)
    assert "output of Linear 'linear' is changed in place" in said
    assert "out = out + x" in said
    said = refusal(Block(add=False, inplace=True), inputs, mode)
    assert "ReLU 'relu' changes the output of Linear 'linear' in place" in said
    model = Block(add=False, inplace=True)
    exec(re.sub(r".*(for part .*): (if .*): (.*)", r"\1:\n \2:\n  \3", said), {"model": model})
    assert refusal(model, inputs, mode) == ""


class Text(nn.Module):
    """With position ids as Hugging Face makes them where none are given."""

    def __init__(self):
        super().__init__()
        self.tokens, self.wpe = nn.Embedding(5, 4), nn.Embedding(8, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])[None]
        return self.head(torch.tanh(self.tokens(tokens) + self.wpe(position_ids)).mean(1))


@pytest.mark.parametrize("length", [6, 8])  # 8 examples are compared
@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
def test_positions_that_all_examples_share_are_named(mode, length):
    tokens = torch.randint(0, 5, (SIZE, length), generator=torch.Generator().manual_seed(0))
    said = refusal(Text(), Keywords(tokens=tokens), mode)
    assert "Embedding 'wpe' looks up the same positions for all examples" in said
    ids = torch.arange(length).repeat(SIZE, 1)
    assert "torch.arange(length).repeat(batch, 1)" in said
    assert refusal(Text(), Keywords(tokens=tokens, position_ids=ids), mode) == ""
    frozen = Text()
    frozen.wpe.requires_grad_(False)
    assert refusal(frozen, Keywords(tokens=tokens), mode) == ""


def test_a_bag_of_texts_is_refused():
    tokens = torch.randint(0, 5, (SIZE, 3), generator=torch.Generator().manual_seed(0))
    model = nn.Sequential(nn.EmbeddingBag(5, 4), nn.Linear(4, 2))
    assert "EmbeddingBag '0'" in refusal(model, tokens)


class Scaled(nn.Module):
    """A parameter in a container that is never called, as IA3 has it."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterDict({"default": nn.Parameter(torch.ones(4))})
        self.linear = nn.Linear(4, 2)

    def forward(self, inputs):
        return self.linear(inputs * self.scales["default"])


def test_a_parameter_that_no_hook_sees_is_named():
    model = Scaled()
    assert "ParameterDict 'scales' has trained parameters" in refusal(model, torch.randn(SIZE, 4))
    few = Batch(torch.randn(SIZE, 4), torch.arange(SIZE))
    assert "ParameterDict 'scales'" in hindrance(model, few)
    assert hindrance(model.linear, few) == ""


def test_a_parameter_used_twice_is_refused_in_ghost_mode_alone():
    def tied():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))
        model[2].weight = model[0].weight
        return model

    inputs = torch.randn(SIZE, 4, generator=torch.Generator().manual_seed(0))
    assert refusal(tied(), inputs, "hooks") == ""
    said = refusal(tied(), inputs, "ghost")
    assert "Linear '0' and Linear '2': a parameter is used several times" in said
    assert 'grad_sample_mode="hooks"' in said
    model = tied()
    model[3].spare = nn.Linear(4, 4, bias=False)  # never called, as T5's shared embedding
    model[3].spare.weight = model[0].weight
    assert "Linear '3.spare'" in hindrance(
        wrap_model(model, grad_sample_mode="ghost"), Batch(inputs, inputs)
    )


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(4), nn.LSTM(4, 4), nn.GRU(4, 4)])
def test_layers_that_opacus_replaces_are_named_with_the_line_that_does_it(layer):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    batch = torch.randn(SIZE, 4), torch.arange(SIZE)
    with pytest.raises(
        InputError, match=rf"^{type(layer).__name__} '1': .*Validator\.fix\(model\)$"
    ):
        NormPass(model, PER_EXAMPLE, *batch)
    assert ModuleValidator.is_valid(ModuleValidator.fix(model))


class Checkpointed(nn.Module):
    """A perceptron whose checkpoint begins with its first layer, or holds all of it."""

    def __init__(self, whole, asks=False):
        super().__init__()
        self.first, self.head = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2)
        self.whole, self.asks = whole, asks

    def forward(self, inputs):
        inputs = inputs.requires_grad_() if self.asks else inputs
        if self.whole:
            return checkpoint(lambda x: self.head(self.first(x)), inputs, use_reentrant=True)
        return self.head(checkpoint(self.first, inputs, use_reentrant=True))


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_without_gradients_is_named(whole):
    inputs = torch.randn(SIZE, 4)
    said = refusal(Checkpointed(whole), inputs)
    assert "Linear 'first.0' runs in a checkpoint that no trained layer comes before" in said
    assert refusal(Checkpointed(whole, asks=True), inputs) == ""


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs, weight):
        return 2 * inputs

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient, gradient.sum(0)


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, inputs):
        return Twice.apply(inputs, self.weight)


def test_a_layer_whose_own_function_torch_func_refuses_is_named():
    said = refusal(nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 2)), torch.randn(SIZE, 4))
    assert "Doubled '1': RuntimeError" in said
    assert "setup_context" in said
