"""Reference models for a recorded run, trained by its owner's own function. Sensitive.

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
from torch import nn

from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, StageProgress
from indpriv.attack_signals import CONFIDENCE, GRADIENTS, AttackSignals, from_losses, plain_ids
from indpriv.attacks.released import released_of_run
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
from indpriv.recording.norms.batches import tensors_of
from indpriv.recording.norms.shadow_model import standard_module
from indpriv.recording.released import gradient_signal, released_model

_EXAMPLE = "path/to/train.py:fit, a file that also has a spec = AuditSpec(...)"
_BATCH = 4096
_TOLERANCE = 0.02, 0.01  # of a loss, relative and absolute, on another machine or precision

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
        model, module = standard_module(found), spec.model()
        states = [one.state_dict() for one in (module, model)]
        for name in {**states[0], **states[1]}:
            shape, own_shape = (
                tuple(one[name].shape) if name in one else "absent" for one in states
            )
            if shape != own_shape:
                shapes = {"found": own_shape, "wanted": shape}
                raise refused("refusal.signals", "other_model", said=self.said, name=name, **shapes)
        module.load_state_dict(model.state_dict())
        module = module.to(next(model.parameters()).device)
        own, wanted = (self._table(one).frame["loss"] for one in (model, module))
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
