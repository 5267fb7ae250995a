"""`leak`: observe examples, reconstruct them, and compare. Sensitive.

Each example is observed once, with noise of its own. As a member it is compared with the
reconstruction from its own observation; as a non-member, with the one from the observation before
it. The columns of `details`:

    error        infinite where a reconstruction is not finite
    identified   0 or 1: the example is nearer to the reconstruction than every other candidate
    chance       the most of that without the example, on average over examples and candidates that
                 were drawn alike: the number of copies of the most frequent candidate over the
                 number of candidates, times the number of reconstructions that may be the one
                 (those of a batch, but for an attack that names each example in its place)
    label_found  0 or 1; NaN where no label was inferred
    iterations
    mu           how far the example moves what is read, over the standard deviation of the noise:
                 the mu of the best test between present and absent
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from indpriv._arrays import FloatArray
from indpriv._progress import Progress
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.leakage.candidates import Candidates
from indpriv.leakage.inversion import Guess, Inversion, Look
from indpriv.leakage.observation import Observation, Reader, one_by_one
from indpriv.recording.norms.batches import LossFn

_SAME = 1e-3  # a relative difference of gradients that rounding explains
_MOST_LABELS = 8  # a larger batch, whose labels an attacker knows, is worth saying aloud


def leak(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    observation: Observation,
    attack: Inversion,
    *,
    candidates: tuple[Tensor, Tensor] | None = None,
    example_ids: ArrayLike | None = None,
    knows_labels: bool | None = None,
    seed: int | None = None,
    watch: Callable[[int, Tensor], None] | None = None,
    progress: Progress | None = None,
) -> AttackScores:
    """Reconstruct examples from what is read of their gradients at this state of the model.

    Args:
        model: without dropout and layers that mix examples.
        loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,).
        inputs: (n, ...) chosen without looking at them; consecutive ones make a batch.
        targets: (n,) their labels.
        observation: what is read, and what protects it.
        attack: one of `INVERSIONS`.
        candidates: inputs (m, ...) and targets (m,) that an example is told from; default the
            examples. Copies of the example are left out.
        example_ids: (n,) default 0..n-1.
        knows_labels: candidates then have the example's label. Default for batches; the label of
            a single example is inferred (Zhao et al. 2020, arXiv:2001.02610).
        seed: makes noise and starts reproducible: for tests.
        watch: called with the position of each example and the reconstruction nearest to it.
        progress: called with (examples done, examples in all).

    Returns:
        2n scores: minus the mean squared error of a value, where inputs range from 0 to 1. See
        the module for the columns of `details`.

    Raises:
        InputError: a model, inputs or options that the attack does not take, fewer than two
            observations or than two candidates.
    """
    _check(inputs, targets, observation, attack)
    known = observation.batch_size > 1 if knows_labels is None else knows_labels
    _check_labels(observation, attack, knows_labels, known)
    reader, known = Reader(model, loss_fn, observation), known and attack.needs_labels
    candidates, generator = candidates or (inputs, targets), _generator(seed)
    scene = _Scene(reader, attack, inputs, targets, candidates, known, generator)
    scene.check()
    columns = _columns(scene, watch, progress)
    places = columns.pop("place").astype(np.int64)
    ids = np.arange(len(inputs)) if example_ids is None else np.asarray(example_ids)
    return AttackScores(
        scores=-columns["error"],
        member=np.repeat([True, False], len(inputs)),
        method=f"{attack.title}, from {observation.text}" + ", labels known" * known,
        example_ids=ids[places],
        adversary="gradients",
        details=columns,
    )


def _columns(
    scene: _Scene, watch: Callable[[int, Tensor], None] | None, progress: Progress | None
) -> dict[str, FloatArray]:
    """(2n,) each: of every example as a member, and then of every one as a non-member."""
    members, others = [], []
    n, size = len(scene.inputs), scene.reader.observation.batch_size
    for start in range(0, n, size):
        guess, label = scene.attacked(range(start, start + size))
        for place in range(start, start + size):
            found, nearest = scene.compared(guess, place, label)
            members.append({"place": place, **found})
            if watch is not None:
                watch(place, nearest)
            other = (place + size) % n
            others.append({"place": other, **scene.compared(guess, other, label)[0]})
        if progress is not None:
            progress(start + size, n)
    every = [*members, *others]
    return {name: np.array([row[name] for row in every], np.float64) for name in every[0]}


@dataclass(frozen=True)
class _Scene:
    """What all looks of one call share."""

    reader: Reader
    attack: Inversion
    inputs: Tensor
    targets: Tensor
    candidates: tuple[Tensor, Tensor]
    labels_known: bool
    generator: torch.Generator

    @cached_property
    def told_from(self) -> Candidates:
        """What each example is told from."""
        known_with = self.reader.observation.batch_size if self.attack.knows_candidates else 1
        return Candidates(
            *self.candidates, self.inputs, self.targets, self.labels_known, known_with
        )

    def check(self) -> None:
        """Raise InputError before any attack.

        Each example needs another candidate, and of a random model mu would be that of another
        draw.
        """
        for place in range(len(self.inputs)):
            self.told_from.others(place)
        first, again = self._batch([0]), self._batch([0])
        if (first - again).norm() > _SAME * first.norm():
            raise InputError(
                "the gradient of the same example differs from one call to the next, and an "
                "attacker cannot know what was drawn; observe the model without dropout and other "
                "randomness"
            )

    def attacked(self, places: Sequence[int]) -> tuple[Guess, Tensor | None]:
        """Observe the examples at these places, and reconstruct them; also their inferred label."""
        seen = self.reader.observation
        inputs, targets = self.inputs[list(places)], self.targets[list(places)]
        observed = self.reader.read(inputs, targets).detach()
        noise = torch.randn(observed.shape, generator=self.generator, dtype=observed.dtype)
        observed = observed + seen.noise_std * noise
        sent = torch.ones_like(observed, dtype=torch.bool)
        if seen.share < 1:
            sent[observed.abs().argsort()[: round((1 - seen.share) * len(sent))]] = False
        label = self._inferred(observed * sent) if len(places) == 1 else None
        if self.attack.needs_labels and not self.labels_known and label is None:
            raise InputError(
                f"the attack {self.attack.name} needs a label, and none can be inferred: the model "
                "does not end with a linear layer, or targets are no class numbers; pass "
                "knows_labels=True"
            )
        look = Look(
            observed,
            sent,
            targets if label is None or self.labels_known else label,
            tuple(inputs.shape),
            *self._range,
            self.reader,
            self.generator,
            lambda place: self._alternatives(places, place),
        )
        return self.attack.invert(look), label

    def compared(
        self, guess: Guess, place: int, label: Tensor | None
    ) -> tuple[dict[str, Any], Tensor]:
        """The columns of one example and a guess, and the reconstruction nearest to it."""
        others = self._candidates[self.told_from.others(place)]
        low, high = self._range
        own = self.inputs[place].flatten().double()
        inputs = guess.inputs
        if self.attack.knows_candidates:  # its guesses stand in the order of the batch
            inputs = inputs[place % len(inputs)].unsqueeze(0)
        guesses = inputs.flatten(1).double()
        away = (guesses - own).square().mean(1) / (high - low) ** 2
        away = torch.nan_to_num(away, nan=np.inf, posinf=np.inf)
        nearest = int(away.argmin())
        distances = torch.cdist(guesses, others, compute_mode="donot_use_mm_for_euclid_dist")
        least = distances.square().min(1).values / own.numel() / (high - low) ** 2
        target = self.targets[place : place + 1]
        columns = {
            "error": float(away[nearest]),
            "identified": bool((away < least).any()),
            "label_found": np.nan
            if label is None or self.labels_known
            else float(torch.equal(label, target)),
            "iterations": guess.iterations,
            "chance": self.told_from.chance(place, len(guesses)),
            "mu": float(self._mu[place]),
        }
        return columns, inputs[nearest]

    @cached_property
    def _range(self) -> tuple[float, float]:
        values = self.candidates[0].double()
        low = min(float(values.min()), float(self.inputs.min()))
        return low, max(float(values.max()), float(self.inputs.max()), low + 1e-12)

    @cached_property
    def _candidates(self) -> Tensor:
        """(m, d) flat."""
        return self.candidates[0].flatten(1).double()

    @cached_property
    def _gradients(self) -> Tensor:
        """(m, d) what each candidate adds to a sum of gradients."""
        return torch.stack([self._read(*pair) for pair in one_by_one(*self.candidates)])

    @cached_property
    def _mu(self) -> list[float]:
        """(n,) of each example, in its own batch."""
        size, std = self.reader.observation.batch_size, self.reader.observation.noise_std
        found = []
        for place in range(len(self.inputs)):
            batch = range(place - place % size, place - place % size + size)
            moved = float(
                (self._batch(batch) - self._batch([p for p in batch if p != place])).norm()
            )
            found.append(moved / std if std else (np.inf if moved else 0.0))
        return found

    def _batch(self, places: Sequence[int]) -> Tensor:
        return self._read(self.inputs[list(places)], self.targets[list(places)])

    def _read(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self.reader.read(inputs, targets).detach()

    def _alternatives(self, places: Sequence[int], place: int) -> tuple[Tensor, Tensor]:
        """See `Look`. The example itself comes last, so that ties count against the attack."""
        own, rest = places[place], [p for p in places if p != places[place]]
        others = self.told_from.others(own)
        inputs = torch.cat([self.candidates[0][others], self.inputs[own : own + 1]])
        targets = torch.cat([self.candidates[1][others], self.targets[own : own + 1]])
        if self.reader.observation.of == "update":
            beside = self.inputs[rest], self.targets[rest]
            read = [
                self._read(torch.cat([x, beside[0]]), torch.cat([y, beside[1]]))
                for x, y in one_by_one(inputs, targets)
            ]
            return inputs, torch.stack(read)
        added = torch.cat([self._gradients[others], self._batch([own]).unsqueeze(0)])
        return inputs, added + self._batch(rest)

    def _inferred(self, observed: Tensor) -> Tensor | None:
        """(1,) label of a single example, by the sign of the last layer's gradient."""
        layers = [n for n, m in self.reader.model.named_modules() if isinstance(m, nn.Linear)]
        found = self.reader.gradients(observed)
        if not layers or self.targets.is_floating_point() or self.targets.dim() != 1:
            return None
        last = found.get(f"{layers[-1]}.bias")
        if last is None:
            weight = found.get(f"{layers[-1]}.weight")
            last = None if weight is None else weight.sum(1)
        if last is None or f"{layers[-1]}." not in list(found)[-1]:
            return None
        return last.argmin().reshape(1)


def _generator(seed: int | None) -> torch.Generator:
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


def _check(inputs: Tensor, targets: Tensor, observation: Observation, attack: Inversion) -> None:
    if len(inputs) != len(targets):
        raise InputError(f"there are {len(inputs)} inputs and {len(targets)} targets")
    if not inputs.is_floating_point() and not attack.knows_candidates:
        raise InputError(
            f"the attack {attack.name} reconstructs floating-point inputs, not {inputs.dtype}; use "
            "the attack informed"
        )
    size = observation.batch_size
    if len(inputs) % size or len(inputs) < 2 * size:
        raise InputError(
            f"{len(inputs)} examples make no two whole batches of {size}; each reconstruction is "
            "compared with the examples of another observation"
        )


def _check_labels(
    observation: Observation, attack: Inversion, given: bool | None, known: bool
) -> None:
    if not attack.needs_labels:
        return
    if observation.batch_size > 1 and not known:
        raise InputError("labels are inferred of single examples only; pass knows_labels=True")
    if observation.batch_size > _MOST_LABELS and given is None:
        raise InputError(
            f"a batch of {observation.batch_size} has more than {_MOST_LABELS} labels, which "
            "nothing infers; pass knows_labels=True for an attacker who knows them"
        )
