import copy
import warnings
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch
from opacus import GradSampleModule
from opacus.grad_sample.grad_sample_module_fast_gradient_clipping import (
    GradSampleModuleFastGradientClipping,
)
from opacus.grad_sample.utils import wrap_model
from torch import nn
from torch.utils.checkpoint import checkpoint

from indpriv import InputError
from indpriv.recording import NormPass, per_example_gradient_norms
from indpriv.recording.norms import norm_pass as norm_passes
from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.layerwise import LayerwiseNorms
from indpriv.recording.norms.norm_pass import norms_by_autograd
from runs import PER_EXAMPLE, blobs, make_run, mlp

BACKENDS = ["layerwise", "functorch"]


def reference(model, loss_fn, inputs, targets):
    """One example at a time by autograd in float64."""
    model = copy.deepcopy(model).double()
    norms = []
    for i in range(len(targets)):
        batch = inputs[i : i + 1]
        batch = batch.double() if batch.is_floating_point() else batch
        loss = loss_fn(model(batch), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        norms.append(sum(float(g.square().sum()) for g in gradients) ** 0.5)
    return np.array(norms)


def cnn():
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


def sequence_model():
    torch.manual_seed(2)
    return nn.Sequential(
        nn.Embedding(10, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Flatten(), nn.Linear(20, 3)
    )


CASES = {
    "mlp": (mlp, lambda g: torch.randn(9, 6, generator=g), 2),
    "cnn": (cnn, lambda g: torch.randn(9, 1, 8, 8, generator=g), 3),
    "sequence": (sequence_model, lambda g: torch.randint(0, 10, (9, 4), generator=g), 3),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES)
def test_every_backend_is_autograds_norm_and_never_below_it(case, backend):
    build, draw, classes = CASES[case]
    generator = torch.Generator().manual_seed(3)
    model, inputs = build(), draw(generator)
    targets = torch.randint(0, classes, (9,), generator=generator)
    norms = per_example_gradient_norms(model, PER_EXAMPLE, inputs, targets, backend=backend).numpy()
    expected = reference(model, PER_EXAMPLE, inputs, targets)
    assert np.all(norms >= expected * (1 - 1e-6))
    np.testing.assert_allclose(norms, expected, rtol=1e-3)


@pytest.mark.parametrize("case", CASES)
def test_norms_do_not_depend_on_the_batch_they_are_taken_in(case):
    build, draw, classes = CASES[case]
    generator = torch.Generator().manual_seed(4)
    model, inputs = build(), draw(generator)
    targets = torch.randint(0, classes, (9,), generator=generator)
    norm_pass = NormPass(model, PER_EXAMPLE, inputs, targets)
    expected = reference(model, PER_EXAMPLE, inputs, targets)
    for size, channels_last in product([1, 4, 9], [False, True]):
        norm_pass.batch_size, norm_pass._norms._channels_last = size, channels_last
        norms, losses = norm_pass(inputs, targets)
        np.testing.assert_allclose(norms.numpy() / (1 + norm_pass.slack), expected, rtol=1e-5)
        torch.testing.assert_close(losses, PER_EXAMPLE(model(inputs), targets).detach())


@pytest.mark.parametrize("backend", BACKENDS)
def test_channels_last_changes_nothing(backend):
    torch.manual_seed(6)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2), nn.Tanh(), nn.Conv2d(4, 4, 2), nn.Flatten(), nn.Linear(36, 3)
    )
    inputs, targets = torch.randn(12, 2, 9, 9), torch.arange(12) % 3
    with NormPass(model, PER_EXAMPLE, inputs, targets, backend=backend) as norm_pass:
        norms = norm_pass(inputs, targets)[0].numpy()
        if backend == "layerwise":
            assert norm_pass._norms._channels_last
    np.testing.assert_allclose(norms, reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_under_autocast_norms_are_those_of_its_arithmetic(case):
    build, draw, classes = CASES[case]
    generator = torch.Generator().manual_seed(5)
    model, inputs = build(), draw(generator)
    targets = torch.randint(0, classes, (9,), generator=generator)
    expected = []
    for i in range(9):
        with torch.autocast("cpu", torch.bfloat16):
            loss = PER_EXAMPLE(model(inputs[i : i + 1]), targets[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        expected.append(sum(float(g.double().square().sum()) for g in gradients) ** 0.5)
    with torch.autocast("cpu", torch.bfloat16):
        low = NormPass(model, PER_EXAMPLE, inputs, targets)
    assert low.backend == "layerwise"
    norms = low(inputs, targets)[
        0
    ].numpy()  # a step of training may end outside of autocast: the pass does not
    assert np.all(norms >= expected)
    np.testing.assert_allclose(norms / (1 + low.slack), expected, rtol=1e-2)
    assert low.slack == pytest.approx(4 * torch.finfo(torch.bfloat16).eps, rel=0.01)


def test_a_model_in_half_precision_has_its_own_slack():
    inputs, targets = blobs(8).tensors
    model = mlp().bfloat16()
    norms = per_example_gradient_norms(model, PER_EXAMPLE, inputs.bfloat16(), targets).numpy()
    expected = reference(model, PER_EXAMPLE, inputs.bfloat16(), targets)
    assert np.all(norms >= expected)
    np.testing.assert_allclose(norms, expected, rtol=0.06)


class TwoTypes(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(9)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2).bfloat16()

    def forward(self, inputs):
        return self.last(self.first(inputs).tanh().bfloat16())


@pytest.mark.parametrize("frozen", [False, True])
def test_a_model_of_two_types_has_the_slack_of_the_coarser_one(frozen):
    """Whichever comes first, and even if the coarser part is frozen: training rounds there."""
    inputs, targets = blobs(16).tensors
    model = TwoTypes()
    model.last.requires_grad_(not frozen)
    with NormPass(model, PER_EXAMPLE, inputs, targets) as norm_pass:
        norms = norm_pass(inputs, targets)[0].numpy()
    assert norm_pass.slack >= 4 * torch.finfo(torch.bfloat16).eps
    expected = norms_by_autograd(norm_pass._model, Batch(inputs, targets)).numpy()
    assert np.all(norms >= expected)


def test_a_batch_that_does_not_fit_into_memory_is_halved(monkeypatch):
    inputs, targets = blobs(32).tensors
    model = mlp()
    norm_pass = NormPass(model, PER_EXAMPLE, inputs, targets)
    run, sizes = LayerwiseNorms.__call__, []

    def limited(norms, batch):
        sizes.append(len(batch))
        if len(batch) > 9:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return run(norms, batch)

    monkeypatch.setattr(LayerwiseNorms, "__call__", limited)
    norms = norm_pass(inputs, targets)[0].numpy()
    assert sizes == [32, 16, 8, 8, 8, 8]
    assert norm_pass.batch_size == 8
    np.testing.assert_allclose(norms, reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-4)

    def never(norms, batch):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(LayerwiseNorms, "__call__", never)
    with pytest.raises(InputError, match="not enough memory for the gradient norm of one example"):
        norm_pass(inputs, targets)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, inputs):
        return self.head(self.attention(inputs, inputs, inputs, need_weights=False)[0].mean(1))


def other_layer():
    """With one that is left to torch.func."""
    torch.manual_seed(8)
    return nn.Sequential(nn.Linear(6, 8), nn.PReLU(8), nn.Linear(8, 2))


MORE = CASES | {
    "attention": (Attention, lambda g: torch.randn(9, 9, 4, generator=g), 3),
    "other layer": (other_layer, lambda g: torch.randn(9, 6, generator=g), 2),
}


@pytest.mark.parametrize("case", MORE)
def test_norms_of_smaller_batches(case):
    build, draw, classes = MORE[case]
    generator = torch.Generator().manual_seed(3)
    model, inputs = build(), draw(generator).repeat_interleave(3, 0)
    if case != "sequence":
        inputs = inputs * torch.rand(27, *(1,) * (inputs.ndim - 1), generator=generator)
    targets = torch.randint(0, classes, (27,), generator=generator)
    norm_pass = NormPass(model, PER_EXAMPLE, inputs, targets)
    expected = reference(model, PER_EXAMPLE, inputs, targets)
    for size in (0, 1, 2, 9, 27):  # one is as long as a sequence
        norms, losses = norm_pass(inputs[:size], targets[:size])
        np.testing.assert_allclose(
            norms.numpy() / (1 + norm_pass.slack), expected[:size], rtol=1e-5
        )
        torch.testing.assert_close(losses, PER_EXAMPLE(model(inputs), targets).detach()[:size])


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.inner = mlp()

    def forward(self, inputs):
        self.calls += 1
        return self.inner(inputs)


def test_buffers_of_the_model_in_training_are_left_alone():
    inputs, targets = blobs(16).tensors
    model = Counts()
    NormPass(model, PER_EXAMPLE, inputs, targets)(inputs, targets)
    assert int(model.calls) == 0


def test_a_closed_pass_gives_no_zeros():
    inputs, targets = blobs(8).tensors
    with NormPass(mlp(), PER_EXAMPLE, inputs, targets) as norm_pass:
        pass
    with pytest.raises(InputError, match="closed"):
        norm_pass(inputs, targets)


def test_another_error_is_not_taken_for_want_of_memory():
    inputs, targets = blobs(8).tensors
    norm_pass = NormPass(mlp(), PER_EXAMPLE, inputs, targets)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        norm_pass(inputs[:, :3], targets)


def test_an_embedding_that_mixes_examples_is_refused():
    model = nn.Sequential(
        nn.Embedding(10, 6, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(24, 3)
    )
    tokens = torch.randint(0, 10, (8, 4))
    with pytest.raises(InputError, match="scale_grad_by_freq mixes examples"):
        per_example_gradient_norms(model, PER_EXAMPLE, tokens, torch.zeros(8, dtype=torch.long))


def test_frozen_parameters_do_not_count():
    model = mlp()
    model[0].requires_grad_(False)
    inputs, targets = blobs(8).tensors
    norms = per_example_gradient_norms(model, PER_EXAMPLE, inputs, targets).numpy()
    np.testing.assert_allclose(norms, reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-4)


def test_a_wrapped_model_keeps_its_hooks_gradients_and_mode():
    run = make_run()
    inputs, targets = blobs(8).tensors
    run.model.train()
    run.criterion(run.model(inputs), targets).backward()
    before = [p.grad_sample.clone() for p in run.model.parameters()]
    per_example_gradient_norms(run.model, PER_EXAMPLE, inputs, targets)
    assert all(
        torch.equal(p.grad_sample, kept)
        for p, kept in zip(run.model.parameters(), before, strict=True)
    )
    assert run.model.training
    run.optimizer.step()
    run.step(inputs, targets)  # hooks still deliver
    assert isinstance(run.model, GradSampleModule)


def test_norms_follow_the_parameters_of_the_model_in_training():
    model = mlp()
    inputs, targets = blobs(8).tensors
    with NormPass(model, PER_EXAMPLE, inputs, targets) as norm_pass:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.7)
        norms, _ = norm_pass(inputs, targets)
    np.testing.assert_allclose(
        norms.numpy(), reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-4
    )


def test_parts_kept_in_eval_mode_stay_so():
    model = nn.Sequential(nn.Dropout(0.5), mlp()).train()
    model[0].eval()
    inputs, targets = blobs(8).tensors
    with NormPass(model, PER_EXAMPLE, inputs, targets) as norm_pass:
        norms, _ = norm_pass(inputs, targets)
    assert norm_pass.caveats == ()
    assert not model[0].training
    assert model[1].training
    np.testing.assert_allclose(
        norms.numpy(), reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-4
    )


def test_training_randomness_is_untouched():
    inputs, targets = blobs(8).tensors
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    torch.manual_seed(5)
    NormPass(model, PER_EXAMPLE, inputs, targets).close()
    after = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(after, torch.rand(3))


def test_dropout_is_a_caveat():
    inputs, targets = blobs(8).tensors
    with NormPass(nn.Sequential(nn.Dropout(0.5), mlp()), PER_EXAMPLE, inputs, targets) as norm_pass:
        assert "random" in norm_pass.caveats[0]
    with NormPass(mlp(), PER_EXAMPLE, inputs, targets) as norm_pass:
        assert norm_pass.caveats == ()


def test_warnings_of_training_are_shown_as_often_as_without_a_pass():
    """Python forgets which it has shown wherever its filters change."""
    inputs, targets = blobs(8).tensors
    with (
        NormPass(mlp(), PER_EXAMPLE, inputs, targets) as norm_pass,
        warnings.catch_warnings(record=True) as shown,
    ):
        warnings.simplefilter("default")
        for _ in range(3):
            norm_pass(inputs, targets)
            warnings.warn("of training", UserWarning, stacklevel=1)
    assert len(shown) == 1


def test_parameters_frozen_during_training_are_found():
    model = mlp()
    inputs, targets = blobs(8).tensors
    with NormPass(model, PER_EXAMPLE, inputs, targets) as norm_pass:
        model[2].bias.requires_grad_(False)
        with pytest.raises(InputError, match=r"trainable parameters changed.*2\.bias"):
            norm_pass(inputs, targets)


def test_batch_norm_is_refused_with_opacus_message():
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    inputs, targets = blobs(8).tensors
    with pytest.raises(InputError, match="BatchNorm"):
        per_example_gradient_norms(model, PER_EXAMPLE, inputs, targets)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.weight = (
            nn.Linear(6, 6),
            nn.Parameter(torch.ones(6, 2, dtype=torch.complex64)),
        )

    def forward(self, inputs):
        return (self.layer(inputs) @ self.weight.real) + (inputs @ self.weight.imag)


def test_complex_parameters_are_refused():
    """Of their gradients a sum of squared reals would see one half, and Opacus's noise covers no more."""
    inputs, targets = blobs(8).tensors
    with pytest.raises(InputError, match="'weight' is complex"):
        per_example_gradient_norms(Complex(), PER_EXAMPLE, inputs, targets)


class MixesExamples(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 2)

    def forward(self, inputs):
        outputs = self.layer(inputs)
        return outputs - outputs.mean(0, keepdim=True)


def test_a_model_that_mixes_examples_is_refused():
    inputs, targets = blobs(8).tensors
    with pytest.raises(InputError, match=r"^MixesExamples mixes examples in its own forward"):
        per_example_gradient_norms(
            MixesExamples(), PER_EXAMPLE, inputs, targets, backend="functorch"
        )


class MixesLargeBatches(MixesExamples):
    def forward(self, inputs):
        return super().forward(inputs) if len(inputs) > 20 else self.layer(inputs)


@pytest.mark.parametrize("backend", ["auto", "functorch"])
def test_a_model_that_mixes_examples_in_large_batches_only_is_refused(backend):
    inputs, targets = blobs(32).tensors
    with pytest.raises(InputError, match="does the model or the loss mix examples"):
        per_example_gradient_norms(
            MixesLargeBatches(), PER_EXAMPLE, inputs, targets, backend=backend
        )
    with pytest.raises(InputError, match="does the model or the loss mix examples"):
        NormPass(MixesLargeBatches(), PER_EXAMPLE, inputs, targets, backend="functorch")


def test_a_reduced_loss_is_refused():
    inputs, targets = blobs(8).tensors
    with pytest.raises(InputError, match="one loss per example"):
        per_example_gradient_norms(mlp(), nn.CrossEntropyLoss(), inputs, targets)


def test_microbatches_have_no_individual_gradient():
    inputs, targets = blobs(8).tensors

    def loss_of_pairs(outputs, labels):
        return PER_EXAMPLE(outputs, labels).reshape(-1, 2).mean(1)

    with pytest.raises(InputError, match=r"loss_fn fails on .*it must take batches of any size"):
        per_example_gradient_norms(mlp(), loss_of_pairs, inputs, targets)


def test_a_backend_that_fails_the_check_is_passed_over(monkeypatch):
    """Not even a backend that comes first is trusted."""

    class TooSmall(LayerwiseNorms):
        def __call__(self, batch):
            norms, losses = super().__call__(batch)
            return 0.9 * norms, losses

    monkeypatch.setattr(norm_passes, "LayerwiseNorms", TooSmall)
    model, inputs, targets = a_batch_of("cnn")
    with NormPass(model, PER_EXAMPLE, inputs, targets) as norm_pass:
        assert norm_pass.backend == "functorch"
        assert "within its batch" in norm_pass.fallback
        norms = norm_pass(inputs, targets)[0].numpy()
    np.testing.assert_allclose(norms, reference(model, PER_EXAMPLE, inputs, targets), rtol=1e-3)


def test_no_examples_have_no_norms():
    inputs, targets = blobs(8).tensors
    assert per_example_gradient_norms(mlp(), PER_EXAMPLE, inputs[:0], targets[:0]).shape == (0,)


@pytest.mark.parametrize("backend", ["magic", "ghost", "hooks", "autograd"])
def test_unknown_backend_is_refused(backend):
    inputs, targets = blobs(8).tensors
    with pytest.raises(InputError, match=f"backend='{backend}' .* leave it out, or .*'layerwise'"):
        per_example_gradient_norms(mlp(), PER_EXAMPLE, inputs, targets, backend=backend)


def a_batch_of(case):
    build, draw, classes = CASES[case]
    generator = torch.Generator().manual_seed(6)
    return build(), draw(generator), torch.randint(0, classes, (9,), generator=generator)


def check_training(model, inputs, targets, mode):
    options = {"max_grad_norm": 1.0} if mode == "ghost" else {}
    wrapped = wrap_model(model, grad_sample_mode=mode, **options)
    with NormPass(wrapped, PER_EXAMPLE, inputs, targets) as norm_pass:
        norm_pass.check_training(wrapped)


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("case", CASES)
def test_what_opacus_trains_on_is_what_is_recorded(case, mode):
    check_training(*a_batch_of(case), mode)


@pytest.mark.parametrize(
    ("mode", "samplers", "factor", "refused"),
    [
        ("hooks", "GRAD_SAMPLERS", 1.1, True),
        ("hooks", "GRAD_SAMPLERS", 0.9, True),
        ("functorch", "GRAD_SAMPLERS", 1.1, False),  # not what trains
        ("ghost", "NORM_SAMPLERS", 0.9, True),
        ("ghost", "NORM_SAMPLERS", 1.1, False),  # clips more than it must
    ],
)
def test_a_wrong_formula_of_opacus_is_found(mode, samplers, factor, refused, monkeypatch):
    model, inputs, targets = a_batch_of("mlp")
    table = getattr(GradSampleModuleFastGradientClipping, samplers)
    right = table[nn.Linear]

    def wrong(*args):
        return {parameter: value * factor for parameter, value in right(*args).items()}

    monkeypatch.setitem(table, nn.Linear, wrong)
    with pytest.raises(InputError, match="Opacus computes other") if refused else nullcontext():
        check_training(model, inputs, targets, mode)


class Coarse(torch.autograd.Function):
    """Multiplies by weights, with another gradient where torch.func computes it in float32."""

    generate_vmap_rule = True

    @staticmethod
    def forward(inputs, weight):
        return inputs * weight

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        inputs, weight = ctx.saved_tensors
        inside = torch._C._functorch.peek_interpreter_stack() is not None
        off = 2.0 if inside and gradient.dtype is torch.float32 else 1.0
        return gradient * weight, off * (gradient * inputs).sum(0)


class ScaledInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, inputs):
        return Coarse.apply(inputs, self.weight)


@pytest.mark.parametrize("backend", ["auto", "functorch"])
def test_what_is_wrong_in_float32_alone_is_refused_unless_rounding_explains_it(backend):
    """In float64 all ways agree; in float32 none agrees with autograd, which rounding moves little."""
    inputs, targets = blobs(32).tensors
    model = nn.Sequential(ScaledInputs(), mlp())
    with pytest.raises(InputError, match=r"example \d has norm"):
        NormPass(model, PER_EXAMPLE, inputs, targets, backend=backend)
    NormPass(model.double(), PER_EXAMPLE, inputs.double(), targets, backend=backend)


def test_a_formula_of_opacus_that_is_wrong_in_float32_alone_is_found(monkeypatch):
    model, inputs, targets = a_batch_of("mlp")
    right = GradSampleModule.GRAD_SAMPLERS[nn.Linear]

    def wrong(layer, activations, gradients):
        off = 1.1 if gradients.dtype is torch.float32 else 1.0
        return {p: off * g for p, g in right(layer, activations, gradients).items()}

    monkeypatch.setitem(GradSampleModule.GRAD_SAMPLERS, nn.Linear, wrong)
    with pytest.raises(InputError, match="Opacus computes other"):
        check_training(model, inputs, targets, "hooks")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
def test_padding_that_opacus_trains_is_found(mode):
    """Hooks and ew give the row of padding a gradient; where no padding is at hand the norms would agree."""
    torch.manual_seed(7)
    model = nn.Sequential(nn.Embedding(10, 6, padding_idx=0), nn.Flatten(), nn.Linear(24, 3))
    tokens, targets = torch.randint(0, 10, (9, 4)), torch.randint(0, 3, (9,))
    refused = mode in ("hooks", "ew")
    for inputs in (tokens, tokens.clamp(min=1)):
        with (
            pytest.raises(InputError, match="padding_idx of the Embedding '0'")
            if refused
            else nullcontext()
        ):
            check_training(copy.deepcopy(model), inputs, targets, mode)


def test_what_opacus_cannot_train_is_said():
    model = nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(24, 3))
    inputs, targets = torch.randn(9, 2, 3, 4), torch.randint(0, 3, (9,))
    check_training(copy.deepcopy(model), inputs, targets, "hooks")
    with pytest.raises(InputError, match=r"Opacus cannot compute per-example gradients.*functorch"):
        check_training(model, inputs, targets, "ghost")


class Scaled(torch.autograd.Function):
    """Nothing but another gradient: over the mean of its batch, or half as long."""

    @staticmethod
    def forward(ctx, inputs, mixes):
        ctx.mixes = mixes
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (50 * gradient.abs().mean() if ctx.mixes else 2), None


class ScaledModel(nn.Module):
    def __init__(self, mixes):
        super().__init__()
        self.inner, self.mixes = mlp(), mixes

    def forward(self, inputs):
        return self.inner[2](Scaled.apply(self.inner[1](self.inner[0](inputs)), self.mixes))


@pytest.mark.parametrize("backend", ["auto", "functorch"])
def test_a_backward_pass_that_mixes_examples_is_refused(backend):
    """A forward pass of each row on its own says nothing of a backward pass over all of them."""
    inputs, targets = blobs(32).tensors
    norm_pass = NormPass(ScaledModel(mixes=False), PER_EXAMPLE, inputs, targets)
    norms, losses = norm_pass(inputs, targets)
    expected = norms_by_autograd(norm_pass._model, Batch(inputs, targets))
    torch.testing.assert_close(norms / (1 + norm_pass.slack), expected)
    torch.testing.assert_close(losses, PER_EXAMPLE(mlp()(inputs), targets).detach())
    with pytest.raises(InputError, match=r"per-example norms of this model cannot be computed"):
        NormPass(ScaledModel(mixes=True), PER_EXAMPLE, inputs, targets, backend=backend)


def test_layers_in_a_reentrant_checkpoint_have_norms():
    inputs, targets = blobs(32).tensors
    inner, model = mlp(), nn.Linear(6, 6)

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.inner = model, inner

        def forward(self, inputs):
            return checkpoint(self.inner, self.first(inputs), use_reentrant=True)

    with NormPass(Checkpointed(), PER_EXAMPLE, inputs, targets) as norm_pass:
        assert norm_pass.backend == "layerwise"
        norms = norm_pass(inputs, targets)[0].numpy()
    expected = reference(nn.Sequential(model, inner), PER_EXAMPLE, inputs, targets)
    np.testing.assert_allclose(norms / (1 + norm_pass.slack), expected, rtol=1e-5)
