"""Reference models for a recorded run, trained by its owner's own function. Sensitive.

The run directory holds the final losses of the run on its training and test examples, which are the
signals of the attacked model; an AuditSpec says how to take the same of a reference.
"""

import hashlib
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._types import FloatArray, IntArray, StageProgress
from indpriv.attack_signals import AttackSignals, from_losses, plain_ids
from indpriv.attacks.train_references import pool_of_run, train_references
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import (
    EXAMPLES,
    EXAMPLES_NON_DP,
    REFERENCES,
    REFERENCES_NON_DP,
    data_fingerprint,
)
from indpriv.recording.checkpoints.replay import AuditSpec, checked_spec, load_name
from indpriv.recording.checkpoints.safe_files import kept_model
from indpriv.recording.norms.batches import tensors_of

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

    Independent coins decide which of the run's training and test examples each model is trained on.
    A call that was interrupted goes on where it ended, and n_models may be raised later.

    Args:
        run_dir: the run, recorded with a test_set; with keep_model=True, inputs are compared too.
        fit: fit(indices, seed) returns a model that was trained on these examples with the noise,
            steps and sampling rate of the run; indices count through spec.dataset, then
            spec.test_set. "train.py:fit" stands for a function in a file that also has `spec`.
        n_models: number of reference models in all.
        spec: model, data sets and loss of the run, where fit is a function.
        baseline: fit trains without privacy. Unless run_dir has a baseline, one is trained on the
            run's training examples, and its losses are written there; references are for it.
        output: a new folder or that of an earlier call; by default `references` in run_dir, or
            `references-non-dp`, where `indpriv attack` and `indpriv audit` find it.
        workers: number of processes; above 1, fit is one of a file or of a module.
        progress: called as progress(stage, done, total) after each model.
        tell: called with an estimate of the time that is left, after the first model.

    Raises:
        InputError: data sets that are not those of the run or change when they are read again, a
            fit that returns another model, or a run without test examples.
    """
    run_dir = Path(run_dir)
    examples = ExampleTable.from_parquet(run_dir / EXAMPLES)
    pool_of_run(examples)  # which says what cannot be attacked
    models = OwnModels(fit, spec)
    data = data_fingerprint(run_dir) if models.check_is_of_run(examples, run_dir) else ""
    if baseline and not (run_dir / EXAMPLES_NON_DP).is_file():
        models.losses_without_dp(examples).to_parquet(run_dir / EXAMPLES_NON_DP)
    attacked = run_dir / (EXAMPLES_NON_DP if baseline else EXAMPLES)
    return train_references(
        models.trained,
        n_models,
        signal_fn=models.confidences,
        pool=pool_of_run(ExampleTable.from_parquet(attacked), data),
        output=output or run_dir / (REFERENCES_NON_DP if baseline else REFERENCES),
        settings={"data": models.fingerprint},
        workers=workers,
        progress=progress,
        tell=tell,
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
        self.said = fit if isinstance(fit, str) else "fit"
        try:
            inspect.signature(self.code[0]).bind(0, 0)
        except TypeError as error:
            raise InputError(f"{self.said} is no function fit(indices, seed): {error}") from error
        self.fingerprint = self._read()

    @property
    def code(self) -> tuple[FitFn, AuditSpec]:
        """The function, and what says how to take the signals of its models."""
        if isinstance(self._fit, str):
            return _loaded(self._fit)
        return self._fit, cast(AuditSpec, self._spec)

    def trained(self, indices: IntArray, seed: int) -> nn.Module:
        """A model trained on some examples, without Opacus's wrapper, if it is like the run's."""
        fit, spec = self.code
        found: Any = fit(indices, seed)
        model = getattr(found, "_module", found)
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise refused("refusal.signals", "no_model", said=self.said, kind=kind)
        own, wanted = (
            {name: tuple(value.shape) for name, value in one.state_dict().items()}
            for one in (model, spec.model())
        )
        for name in {**wanted, **own}:
            if own.get(name) != wanted.get(name):
                shapes = {"found": own.get(name, "absent"), "wanted": wanted.get(name, "none")}
                raise refused("refusal.signals", "other_model", said=self.said, name=name, **shapes)
        return model

    def confidences(self, model: nn.Module, _: IntArray | None = None) -> FloatArray:
        """(n,) of all examples, those of the training set first."""
        self._check_data()
        return from_losses(self._table(model).frame["loss"])

    def check_is_of_run(self, examples: ExampleTable, run_dir: Path) -> bool:
        """Raise InputError unless ids and labels are those of the run, in its order.

        Inputs are compared, by losses of the run's model, if it was kept; whether they were.
        """
        self._check_data()
        of = {"said": self.said, "run_dir": run_dir}
        model = self.code[1].model()
        kept = kept_model(run_dir, model)
        table = self._table(model)
        for split in ("train", "test"):
            found, wanted = (getattr(one, split) for one in (table, examples))
            own, ids = (plain_ids(part["example_id"]).astype(str) for part in (found, wanted))
            if not np.array_equal(own, ids):
                n = len(np.setxor1d(own, ids)) or len(ids)
                raise refused("refusal.signals", "other_ids", n=n, split=split, **of)
            labels, known = (to_floats(part["label"]) for part in (found, wanted))
            if n := int((labels != known)[~np.isnan(known)].sum()):
                raise refused("refusal.signals", "other_labels", n=n, split=split, **of)
            own, known = (to_floats(part["loss"]) for part in (found, wanted))
            if kept and (n := int((~np.isclose(own, known, *_TOLERANCE, equal_nan=True)).sum())):
                raise refused("refusal.signals", "other_inputs", n=n, split=split, **of)
        return kept

    def losses_without_dp(self, examples: ExampleTable) -> ExampleTable:
        """The examples of a run with losses of a model that was trained on those of its training.

        The model is trained here, by a function that adds no noise.
        """
        seed = int(np.random.default_rng().integers(2**63))
        found = self._table(self.trained(np.arange(examples.n_train), seed)).frame
        losses = {name: found[name].array for name in ("loss", "correct")}
        return ExampleTable(examples.frame.assign(**losses))

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
