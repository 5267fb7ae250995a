"""Training reference models on random subsets of the data, keeping only their signals. Sensitive.

Reference models are trained on the data, and the guarantee of the audited run does not cover them:
delete them, as here, or never let them leave the curator.
"""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv import attack_signals
from indpriv._checks import check_positive_int
from indpriv._columns import to_floats
from indpriv._facts import refused
from indpriv._files import OneWriter
from indpriv._folders import named_by_person
from indpriv._types import (
    ArrayLike,
    BoolArray,
    FloatArray,
    IntArray,
    NDArray,
    StageProgress,
    silent,
)
from indpriv.attack_signals import CONFIDENCE, SERIES, AttackSignals
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable

TRAINING = "training reference models"

TrainFn = Callable[[IntArray, int], Any]
SignalFn = Callable[[Any, IntArray], "ArrayLike | Mapping[str, ArrayLike]"]

_Trained = tuple[dict[str, NDArray[np.float32]], BoolArray]  # signals by name, and memberships


@dataclass(frozen=True)
class Pool:
    """The examples that references are trained on, and which of them have coins.

    Attributes:
        n_examples: number of examples in all.
        targets: (n_targets,) ascending positions of those whose membership is decided by coins;
            the others are always trained on.
        example_ids, unit_ids, share, fingerprint: of the targets, as in `AttackSignals`.
        audited: signals of the attacked run by name and its memberships of the targets, or None.
    """

    n_examples: int
    targets: IntArray
    example_ids: NDArray[np.generic]
    unit_ids: NDArray[np.generic] | None = None
    share: float = 0.5
    fingerprint: str = ""
    audited: tuple[Mapping[str, FloatArray], BoolArray] | None = None

    def flip(self, rng: np.random.Generator) -> BoolArray:
        """Memberships of the targets by independent coins, one for each unit."""
        if self.unit_ids is None:
            return rng.random(len(self.targets)) < self.share
        codes, units = pd.factorize(self.unit_ids)
        return np.asarray((rng.random(len(units)) < self.share)[codes])

    def positions(self, member: BoolArray) -> IntArray:
        """Positions of the examples to train on."""
        inside = np.ones(self.n_examples, dtype=bool)
        inside[self.targets] = member
        return np.flatnonzero(inside)


def pool_of_run(examples: ExampleTable, fingerprint: str = "", **more: FloatArray) -> Pool:
    """Training and test examples of a run, in this order, with what its final losses say of them.

    more: other signals of the run's model by name, (n,) each.
    InputError without test examples, or for units of several rows: coins are of single rows.
    """
    train, test = examples.train, examples.test
    if test.empty:
        raise refused("refusal.signals", "no_test_set")
    if not examples.has_unit_for_each_row:
        raise refused("refusal.signals", "units_of_run")
    ids, losses = (pd.concat([train[name], test[name]]) for name in ("example_id", "loss"))
    n, member = len(ids), np.arange(len(ids)) < len(train)
    return Pool(
        n,
        np.arange(n),
        attack_signals.plain_ids(ids),
        share=len(train) / n,
        fingerprint=fingerprint,
        audited=({CONFIDENCE: attack_signals.from_losses(to_floats(losses)), **more}, member),
    )


def study_pool(
    n_examples: int,
    targets: int | None = None,
    *,
    unit_ids: ArrayLike | None = None,
    example_ids: ArrayLike | None = None,
    fingerprint: str = "",
    seed: int | None = None,
    output: str | Path | None = None,
) -> Pool:
    """Random targets with fair coins, among examples of which the others are always trained on.

    There are n_examples // 2 targets by default, and no more; of unit_ids (n_examples,), whole
    units are chosen until they hold that number of rows. example_ids (n_examples,) are positions by
    default; the seed is that of the choice, None for one of the operating system. Where output
    holds signals already, their targets are chosen again. InputError for a number out of range.
    """
    wanted = check_positive_int("targets", n_examples // 2 if targets is None else targets)
    if wanted > n_examples // 2:
        raise refused("refusal.signals", "targets", wanted=wanted, n_examples=n_examples)
    units = np.arange(n_examples) if unit_ids is None else attack_signals.plain_ids(unit_ids)
    ids = np.arange(n_examples) if example_ids is None else attack_signals.plain_ids(example_ids)
    codes, names = pd.factorize(units)
    order = np.random.default_rng(seed).permutation(len(names))
    held = np.cumsum(np.bincount(codes)[order])
    chosen = np.zeros(len(names), dtype=bool)
    chosen[order[: int(np.searchsorted(held, wanted)) + 1]] = True
    positions = np.flatnonzero(chosen[codes])
    if output is not None and attack_signals.is_signals(output):
        earlier = attack_signals.read_folder(Path(output))[1]["example_ids"]
        positions = np.flatnonzero(np.isin(ids, earlier))
    return Pool(
        n_examples,
        positions,
        ids[positions],
        unit_ids=None if unit_ids is None else units[positions],
        fingerprint=fingerprint,
    )


def train_references(
    train_fn: TrainFn,
    n_models: int,
    *,
    signal_fn: SignalFn,
    pool: Pool | int,
    output: str | Path,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    workers: int = 1,
    progress: StageProgress | None = None,
) -> AttackSignals:
    """Train models on random subsets of the data, with any framework; keep only their signals.

    An interrupted series goes on where it ended, and n_models may be raised later.

    Args:
        train_fn: train_fn(positions, seed) returns a model trained on these examples, with the
            noise, number of steps and sampling rate of the audit.
        n_models: number of reference models in all.
        signal_fn: signal_fn(model, positions) returns (n,) logit-scaled confidences (see
            `indpriv.attack_signals.from_losses`), or these as "confidence" and other signals by
            name, such as "labels", "checkpoints" and "gradients".
        pool: which examples have coins; a number of examples stands for `study_pool` of it.
        output: a new folder, or that of an earlier call with the same pool and settings.
        settings: what the models have in common; compared when a series goes on.
        seed: of choices, coins and the seed of each model; None draws them from the operating
            system.
        workers: number of processes; above 1, train_fn and signal_fn must be functions of a module.
        progress: called as progress(stage, done, total) after each model.

    Returns:
        the signals called "confidence"; `indpriv.attack_signals.open_signals` reads all of them.

    Raises:
        InputError: a folder of another pool or of other settings, or signals of a wrong shape.
    """
    check_positive_int("n_models", n_models)
    check_positive_int("workers", workers)
    pool = pool if isinstance(pool, Pool) else study_pool(pool, seed=seed, output=output)
    path, report = Path(output), progress or silent
    named_by_person(path)
    if not attack_signals.is_signals(path):
        facts: dict[str, Any] = {"audited": None if pool.audited is None else 0, "coins": True}
        facts |= {"share": pool.share, "fingerprint": pool.fingerprint}
        attack_signals.new_folder(
            path, pool.example_ids, facts, unit_ids=pool.unit_ids, settings=settings
        )
    with ExitStack() as stack:
        stack.enter_context(closing(OneWriter(path)))  # one process adds models at a time
        rows = _models_of(path, pool, dict(settings or {}))
        if pool.audited is not None and not rows:
            attack_signals.add_model(path, _named(pool.audited[0]), pool.audited[1])
            rows = 1
        before = attack_signals.open_signals(path)[CONFIDENCE].signal[-1] if rows else None
        done = rows - (pool.audited is not None)
        report(TRAINING, done, n_models)
        numbers, train = range(done, n_models), partial(_train_one, train_fn, signal_fn, pool, seed)
        each: Callable[..., Iterable[_Trained]] = map
        if workers > 1:
            processes = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
            each = stack.enter_context(processes).map
        for number, (signals, member) in zip(numbers, each(train, numbers), strict=True):
            own = signals[CONFIDENCE]
            if before is not None and np.allclose(before, own, 1e-4, 1e-4, equal_nan=True):
                raise refused("refusal.signals", "same_model", n=number + 1)
            attack_signals.add_model(path, signals, member)
            report(TRAINING, number + 1, n_models)
            before = own
    return AttackSignals.open(path)


def _train_one(
    train_fn: TrainFn, signal_fn: SignalFn, pool: Pool, seed: int | None, number: int
) -> _Trained:
    """Signals and memberships of one model."""
    rng = np.random.default_rng(None if seed is None else [seed, number])
    member = pool.flip(rng)
    model = train_fn(pool.positions(member), int(rng.integers(2**63)))
    return _named(signal_fn(model, pool.targets)), member


def _named(signals: ArrayLike | Mapping[str, ArrayLike]) -> dict[str, NDArray[np.float32]]:
    found = signals if isinstance(signals, Mapping) else {CONFIDENCE: signals}
    if CONFIDENCE not in found or not found.keys() <= SERIES.keys():
        names, known = ", ".join(found), ", ".join(list(SERIES)[1:])
        raise refused("refusal.signals", "signal_fn", names=names, first=CONFIDENCE, known=known)
    return {name: np.asarray(values, dtype=np.float32) for name, values in found.items()}


def _models_of(path: Path, pool: Pool, settings: Mapping[str, Any]) -> int:
    """Number of models of a series; InputError if it is of other examples or settings."""
    content, ids = attack_signals.read_folder(path)
    facts, earlier = content["facts"], content["settings"]
    if not (
        np.array_equal(ids["example_ids"], pool.example_ids)
        and (facts["fingerprint"], facts["share"]) == (pool.fingerprint, pool.share)
    ):
        raise InputError(f"{path} holds signals of other examples; choose another folder")
    keys = sorted({*settings, *earlier})
    if changed := [key for key in keys if earlier.get(key) != settings.get(key)]:
        raise refused("refusal.signals", "settings", path=path, names=", ".join(changed))
    return len(content["models"])
