"""Reference models for a recorded run, and what its own model tells attackers. Sensitive.

The run directory holds the final losses of the run on its training and test examples, which are the
signals of the attacked model; an AuditSpec says how to take the same of a reference. If the model
was kept, the norms of final gradients are signals too.
"""

import ast
import hashlib
import inspect
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from indpriv._checks import check_positive_int, check_setting
from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, StageProgress
from indpriv.attack_signals import CONFIDENCE, GRADIENTS, AttackSignals, from_losses, plain_ids
from indpriv.attacks.released import LEAST, ReleasedModel, released_of_run
from indpriv.attacks.train_references import pool_of_run, train_references
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import (
    EXAMPLES,
    EXAMPLES_NON_DP,
    MODEL,
    MODEL_NON_DP,
    REFERENCES,
    REFERENCES_NON_DP,
    data_fingerprint,
)
from indpriv.recording.checkpoints.replay import AuditSpec, checked_spec, load_name
from indpriv.recording.checkpoints.safe_files import keep_model, kept_model
from indpriv.recording.norms.batches import FAULTS, Batch, LossFn, tensors_of
from indpriv.recording.norms.norm_pass import AT_ONCE, FunctorchNorms, NormPass
from indpriv.recording.norms.shadow_model import ModelInTraining, standard_module
from indpriv.recording.training_data import norms_of

_EXAMPLE = "path/to/train.py:fit, a file that also has a spec = AuditSpec(...)"
_BATCH = 4096
_TOLERANCE = 0.02, 0.01  # of a loss, relative and absolute, on another machine or precision
_KEPT = 1 << 28  # values of gradients of hold-out examples: 1 GB
_CHECKED = 256  # examples on which norms are checked
_LONG = 1.5  # max_grad_norms that gradients of crafted canaries should have
_SEED = 0  # of the half of the test examples that the attacker fits on

FitFn = Callable[[IntArray, int], nn.Module]


def references_for_run(
    run_dir: str | Path,
    fit: FitFn | str,
    n_models: int = 16,
    *,
    spec: AuditSpec | None = None,
    baseline: bool = False,
    output: str | Path | None = None,
    workers: int = 1,
    progress: StageProgress | None = None,
    tell: Callable[[str], None] | None = None,
) -> AttackSignals:
    """Train reference models for a finished run with its own training code; keep their signals.

    Coins decide which of the run's training and test examples each model is trained on. A call that
    was interrupted goes on, and n_models may be raised later.

    Args:
        run_dir: the run, recorded with a test_set; with keep_model=True, inputs are compared too,
            and what the model itself tells attackers is kept.
        fit: fit(indices, seed) returns a model trained on these examples with the noise, steps
            and sampling rate of the run; indices count through spec.dataset, then
            spec.test_set. "train.py:fit" stands for a function in a file that also has `spec`.
        n_models: number of reference models in all.
        spec: model, data sets and loss of the run, where fit is a function.
        baseline: fit trains without privacy; references are for a baseline on the run's training
            examples, which is trained and kept unless run_dir has one.
        output: a new folder or that of an earlier call; by default `references` in run_dir, or
            `references-non-dp`, where the commands find it.
        workers: number of processes; above 1, fit is one of a file or of a module.
        progress: called as progress(stage, done, total) after each model.
        tell: called with what attacks on the model itself lack.

    Raises:
        InputError: data sets that are not those of the run or change when they are read again, a
            fit that returns another model, a run without test examples, or earlier references of
            another run, fit or training code (what the file of fit defines).
    """
    run_dir = Path(run_dir)
    examples = ExampleTable.from_parquet(run_dir / EXAMPLES)
    pool_of_run(examples)  # which says what cannot be attacked
    models = OwnModels(fit, spec)
    attacked = models.kept(examples, run_dir, MODEL)
    data, model = "" if attacked is None else data_fingerprint(run_dir), "dp"
    if baseline:
        if not (run_dir / EXAMPLES_NON_DP).is_file():
            models.train_baseline(examples, run_dir)
        examples, model = ExampleTable.from_parquet(run_dir / EXAMPLES_NON_DP), "non_dp"
        attacked = models.kept(examples, run_dir, MODEL_NON_DP)
    more = dict[str, FloatArray]()
    if attacked is not None:
        known = released_of_run(run_dir)
        try:
            more[GRADIENTS] = gradient_signal(attacked, models.code[1])
            if model not in known:
                of_model = released_model(attacked, models.code[1])
                replace(of_model, examples=examples).save(run_dir, model)
        except InputError as error:
            if tell is not None:
                tell(f"fewer attacks on the model itself: {error}")
    models.gradients = bool(more)
    return train_references(
        models.trained,
        n_models,
        signal_fn=models.signals,
        pool=pool_of_run(examples, data, **more),
        output=output or run_dir / (REFERENCES_NON_DP if baseline else REFERENCES),
        settings={
            "data": models.fingerprint,
            "fit": models.said.rpartition(":")[2],
            "training code": models.source,
            "run": hashlib.sha256(to_floats(examples.frame["loss"]).tobytes()).hexdigest(),
            "signals": [CONFIDENCE, *more],
        },
        workers=workers,
        progress=progress,
    )


@cache
def _loaded(reference: str) -> tuple[FitFn, AuditSpec]:
    """What a file has, imported once in each process, so that fit and spec are of the same data."""
    module, fit = load_name(reference, reference, _EXAMPLE)
    return fit, checked_spec(reference, "spec", vars(module).get("spec"))


class OwnModels:
    """Models by the code of the run; a process of its own gets a file's name and imports it."""

    def __init__(self, fit: FitFn | str, spec: AuditSpec | None) -> None:
        if (spec is None) != isinstance(fit, str):
            raise InputError("pass fit as a function with spec=, or as FILE.py:NAME without it")
        self._fit, self._spec = fit, spec
        self.said = fit if isinstance(fit, str) else getattr(fit, "__name__", "fit")
        self.gradients = False
        try:
            inspect.signature(self.code[0]).bind(0, 0)
        except TypeError as error:
            raise InputError(f"{self.said} is no function fit(indices, seed): {error}") from error
        self.fingerprint = self._read()

    @property
    def source(self) -> str:
        """A hash of what the file of fit defines, "" where Python knows no source.

        Comments do not count, nor what the file does when it is run, as to ask for more models.
        """
        try:
            file = ast.parse("".join(inspect.findsource(self.code[0])[0]))
        except (OSError, TypeError, SyntaxError):  # typed in, or made by a call
            return ""
        file.body = [one for one in file.body if not isinstance(one, ast.Expr | ast.If)]
        return hashlib.sha256(ast.unparse(file).encode()).hexdigest()

    @property
    def code(self) -> tuple[FitFn, AuditSpec]:
        """The function, and what says how to take the signals of its models."""
        if isinstance(self._fit, str):
            return _loaded(self._fit)
        return self._fit, cast(AuditSpec, self._spec)

    def trained(self, indices: IntArray, seed: int) -> nn.Module:
        """The run's model with parameters that were trained on some examples, in eval mode."""
        fit, spec = self.code
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Full backward hook is firing")  # inputs have no grad
            found: Any = fit(indices, seed)
        if not isinstance(found, nn.Module):
            raise refused("refusal.signals", "no_model", said=self.said, kind=type(found).__name__)
        module = _as_in_run(found, spec)
        own, wanted = (self._table(m).frame["loss"] for m in (standard_module(found), module))
        if n := int((~np.isclose(own, wanted, *_TOLERANCE, equal_nan=True)).sum()):
            raise refused("refusal.signals", "other_outputs", said=self.said, n=n)
        return module

    def signals(self, module: nn.Module, _: IntArray | None = None) -> dict[str, FloatArray]:
        """Of all examples, those of the training set first, (n,) each."""
        self._check_data()
        found = {CONFIDENCE: from_losses(self._table(module).frame["loss"])}
        if self.gradients:
            found[GRADIENTS] = gradient_signal(module, self.code[1])
        return found

    def kept(self, examples: ExampleTable, run_dir: Path, name: str) -> nn.Module | None:
        """The model that a run kept by this name, None if it kept none.

        InputError unless ids, labels and, by that model's losses, inputs are the run's, in order.
        """
        self._check_data()
        of, model = {"said": self.said, "run_dir": run_dir}, self.code[1].model()
        kept = kept_model(run_dir, model, name)
        table = self._table(model)
        for split in ("train", "test"):
            both = [getattr(one, split) for one in (table, examples)]
            own, ids = (plain_ids(part["example_id"]).astype(str) for part in both)
            if not np.array_equal(own, ids):
                n = len(np.setxor1d(own, ids)) or len(ids)
                raise refused("refusal.signals", "other_ids", n=n, split=split, **of)
            labels, known = (to_floats(part["label"]) for part in both)
            now, then = (to_floats(part["loss"]) for part in both)
            differ = {"other_labels": (labels != known) & ~np.isnan(known)}
            differ["other_inputs"] = kept & ~np.isclose(now, then, *_TOLERANCE, equal_nan=True)
            for case, n in ((case, int(one.sum())) for case, one in differ.items() if one.any()):
                raise refused("refusal.signals", case, n=n, split=split, **of)
        return model if kept else None

    def train_baseline(self, examples: ExampleTable, run_dir: Path) -> None:
        """Train a model on the training examples of a run; keep it and its losses."""
        seed = int(np.random.default_rng().integers(2**63))
        module = self.trained(np.arange(examples.n_train), seed)
        keep_model(module, run_dir, MODEL_NON_DP)
        found = self._table(module).frame
        losses = {name: found[name].array for name in ("loss", "correct")}
        ExampleTable(examples.frame.assign(**losses)).to_parquet(run_dir / EXAMPLES_NON_DP)

    def _table(self, model: nn.Module) -> ExampleTable:
        spec, device = self.code[1], next(model.parameters()).device
        return spec.example_table(model.eval(), *spec.examples(spec.collate_fn, device))

    def _check_data(self) -> None:
        if self._read() != self.fingerprint:
            raise refused("refusal.signals", "rows_again", said=self.said)

    def _read(self) -> str:
        """A hash of all examples as they are read now."""
        spec, found = self.code[1], hashlib.sha256()
        for part in spec.examples(spec.collate_fn, torch.device("cpu")):
            for batch in () if part is None else part.batches(_BATCH):
                for tensor in tensors_of(batch):
                    found.update(tensor.contiguous().numpy().tobytes())
        return found.hexdigest()


def _as_in_run(trained: nn.Module, spec: AuditSpec) -> nn.Module:
    """spec.model() with the parameters of a trained model; InputError if that is another model."""
    model, module = standard_module(trained), spec.model()
    states = [one.state_dict() for one in (module, model)]
    for name in {**states[0], **states[1]}:
        wanted, found = (
            tuple(getattr(one[name], "shape", ())) if name in one else "absent" for one in states
        )
        if wanted != found:
            raise refused("refusal.signals", "other_model", name=name, found=found, wanted=wanted)
    module.load_state_dict(states[1])
    return module.to(next(model.parameters()).device)


# --- what a final model tells of each example by its gradients, and canaries for it


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
            trainable parameter, so many that 20 gradients exceed 1 GB, or a model of which
            torch.func takes no gradients.
    """
    module = _as_in_run(model, spec).eval()
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
    try:
        parts = [passes.flat_gradients(Batch(*rows)) for rows in test.batches(batch, columns)]
    except FAULTS as error:
        raise refused("refusal.attacks", "no_functorch", error=error) from error
    kept = torch.cat(parts)
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
