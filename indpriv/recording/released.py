"""What a final model tells of each example by its gradients, and canaries for it. Sensitive."""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from indpriv._checks import check_positive_int, check_setting
from indpriv._facts import refused
from indpriv._types import FloatArray
from indpriv.attacks.released import LEAST, ReleasedModel
from indpriv.errors import InputError
from indpriv.recording.checkpoints.replay import AuditSpec
from indpriv.recording.norms.batches import Batch, LossFn
from indpriv.recording.norms.norm_pass import AT_ONCE, FunctorchNorms, NormPass
from indpriv.recording.norms.shadow_model import ModelInTraining
from indpriv.recording.training_data import norms_of

_KEPT = 1 << 28  # values of gradients of hold-out examples: 1 GB
_CHECKED = 256  # examples on which norms are checked
_LONG = 1.5  # max_grad_norms that gradients of crafted canaries should have
_SEED = 0  # of the half of the test examples that the attacker fits on


def released_model(model: nn.Module, spec: AuditSpec, *, gradients: int = 256) -> ReleasedModel:
    """Gradients, losses and inputs of all examples at the parameters of a trained model.

    >>> known = released_model(trained, spec)                               # doctest: +SKIP
    >>> ATTACKS["gradient_ratio"].scores(Material(released=known))          # doctest: +SKIP

    Args:
        model: the trained model, or Opacus's wrapper of it; it is not changed.
        spec: of the run, with a test_set, half of which is the attacker's hold-out. Parameters that
            spec.model() freezes have no gradients.
        gradients: number of hold-out gradients that are kept, 4 bytes a parameter each; fewer where
            they exceed 1 GB.

    Raises:
        InputError: no test_set, fewer than 40 test examples, another model than spec.model(), no
            trainable parameter, or so many that 20 gradients exceed 1 GB.
    """
    trained = getattr(model, "_module", model)
    module = spec.model()
    try:
        module.load_state_dict(trained.state_dict())
    except RuntimeError as error:
        raise InputError(f"the model is not like spec.model(): {error}") from error
    module = module.to(next(iter(trained.parameters())).device).eval()
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    gradients = min(gradients, _KEPT // max(size, 1))
    if not size or gradients < LEAST:
        raise refused("refusal.attacks", "no_gradients", n=size)
    train, test = spec.examples(spec.collate_fn, next(module.parameters()).device)
    if test is None or len(test) < 2 * LEAST:
        raise refused("refusal.attacks", "no_holdout", n=0 if test is None else len(test))
    order = np.random.default_rng(_SEED).permutation(len(test))[: len(test) // 2]
    columns = np.sort(order[:gradients])
    passes, batch = FunctorchNorms(ModelInTraining(module, spec.loss_fn)), max(1, AT_ONCE // size)
    passes.shadow.eval()
    kept = torch.cat([passes.flat_gradients(Batch(*rows)) for rows in test.batches(batch, columns)])
    total = torch.zeros(size, dtype=torch.float64, device=kept.device)
    for rows in test.batches(batch, np.sort(order)):
        total += passes.flat_gradients(Batch(*rows)).sum(0, dtype=torch.float64)
    spanning = torch.cat([kept, (total / len(order)).to(kept)[None]])
    norms, products, inputs = [], [], list[Any]()
    for rows in (rows for part in (train, test) for rows in part.batches(batch)):
        found = passes.flat_gradients(Batch(*rows))
        norms.append(torch.linalg.vector_norm(found.double(), dim=1))
        products.append(found @ spanning.T)
        plain = isinstance(rows[0], Tensor)
        inputs.append(rows[0].flatten(1).float().cpu().numpy() if plain else None)
    test_rows = np.arange(len(test)) + len(train)
    return ReleasedModel(
        examples=spec.example_table(module, train, test),
        norms=torch.cat(norms).cpu().numpy(),
        holdout=np.isin(np.arange(len(train) + len(test)), test_rows[order]),
        columns=test_rows[columns],
        products=torch.cat(products).cpu().numpy(),
        inputs=None if any(one is None for one in inputs) else np.concatenate(inputs),
    )


def crafted_canaries(
    model: nn.Module,
    inputs: Tensor,
    targets: Tensor,
    loss_fn: LossFn,
    *,
    max_grad_norm: float = 1.0,
    steps: int = 30,
) -> TensorDataset:
    """Inputs crafted so that the final model shows which were trained on, for `InsertedCanaries`.

    After Yoon, Jeung and No 2024 (arXiv:2412.01756), with many canaries in one run. Adam makes
    their gradients at this model orthogonal, and longer than max_grad_norm. Coins are flipped
    afterwards, so bounds hold.

    Args:
        model: as the run starts, or trained on public examples; not changed.
        inputs: (n, ...) floats to begin with, e.g. random; each feature stays in its range.
        targets: (n,) their targets, e.g. wrong labels; returned with the crafted inputs.
        loss_fn: as of `Recorder`.
        max_grad_norm: of the run.
        steps: of Adam.

    Raises:
        InputError: what is no floats, does not fit or does not move, or gradients above 1 GB.
    """
    check_positive_int("steps", steps)
    check_setting("max_grad_norm", max_grad_norm)
    passes = FunctorchNorms(ModelInTraining(model, loss_fn))
    passes.shadow.eval()
    values = len(inputs) * sum(p.numel() for p in passes.shadow.parameters() if p.requires_grad)
    if not inputs.is_floating_point() or not 0 < values <= _KEPT:
        raise refused("refusal.attacks", "not_crafted", kind=inputs.dtype, n=values)
    if len(inputs) != len(targets):
        raise InputError(f"{len(inputs)} inputs have {len(targets)} targets; pass one for each")
    low, high = inputs.amin(0), inputs.amax(0)
    start = ((inputs - low) / (high - low).clamp(min=1e-12)).detach()  # in the range
    optimizer = torch.optim.Adam([place := start.clone().requires_grad_()], lr=0.05)
    for _ in range(steps):
        flat = passes.flat_gradients(Batch(low + place * (high - low), targets))
        norms = torch.linalg.vector_norm(flat, dim=1)
        unit = flat / norms[:, None].clamp(min=1e-12)
        short = (_LONG - norms / max_grad_norm).clamp(min=0)
        place.grad = torch.autograd.grad((unit @ unit.T).square().sum() + short @ short, place)[0]
        optimizer.step()
        place.data.clamp_(0, 1)
    if not place.isfinite().all() or torch.equal(place, start):
        raise refused("refusal.attacks", "not_moved", n=len(inputs))
    return TensorDataset((low + place * (high - low)).detach(), targets)


def gradient_signal(module: nn.Module, spec: AuditSpec) -> FloatArray:
    """(n,) minus the logarithm of each example's gradient norm, at a model in eval mode."""
    device = next(module.parameters()).device
    parts = [one for one in spec.examples(spec.collate_fn, device) if one is not None]
    with NormPass(module, spec.loss_fn, *next(parts[0].batches(_CHECKED))) as norm_pass:
        taken = [norms_of(norm_pass, part, np.arange(len(part))).norms for part in parts]
    return np.asarray(-np.log(np.maximum(np.concatenate(taken), 1e-300)))
