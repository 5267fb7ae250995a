"""`leak`: observe examples, reconstruct them, and compare; at checkpoints of a run. Sensitive.

Each example is observed once, with noise of its own. As a member it is compared with the
reconstruction from its own observation; as a non-member, with the one from the observation before
it. The columns of `details`:

    error        infinite where a reconstruction is not finite
    identified   0 or 1: the example is nearer to the reconstruction than every other candidate
    chance       the most of that without the example, on average over examples and candidates that
                 were drawn alike: copies of the most frequent candidate over all candidates, times
                 the number of reconstructions that may be the one
    label_found  0 or 1; NaN where no label was inferred
    iterations
    mu           how far the example moves what is read, over the standard deviation of the noise:
                 the mu of the best test between present and absent
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from indpriv._checks import check_positive_int
from indpriv._facts import refused, text
from indpriv._folders import make_folder
from indpriv._types import ArrayLike, Progress, StageProgress, silent
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.leakage import inversion
from indpriv.recording import AuditSpec
from indpriv.recording.checkpoints.safe_files import load_into
from indpriv.recording.checkpoints.saved_models import SavedModel, StepOf, discover
from indpriv.recording.norms.batches import LossFn

_SAME = 1e-3  # a relative difference of gradients that rounding explains
_MOST_LABELS = 8  # a larger batch, whose labels an attacker knows, is worth saying aloud


def leak(
    model: nn.Module,
    loss_fn: LossFn,
    inputs: Tensor,
    targets: Tensor,
    observation: inversion.Observation,
    attack: inversion.Inversion,
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
    n, size, generator = len(inputs), observation.batch_size, torch.Generator()
    known = size > 1 if knows_labels is None else knows_labels
    for problem in _problems(inputs, targets, observation, attack, knows_labels, known):
        raise InputError(problem)
    reader, known = inversion.Reader(model, loss_fn, observation), known and attack.needs_labels
    told_from = (*(candidates or (inputs, targets)), inputs, targets, known)
    known_with = size if attack.knows_candidates else 1
    generator.seed() if seed is None else generator.manual_seed(seed)
    scene = _Scene(*told_from, known_with, reader, attack, generator)
    scene.check()
    rows: list[dict[str, Any]] = []
    for start in range(0, n, size):
        found = scene.attacked(range(start, start + size))
        for place in range(start, start + size):
            columns, nearest = scene.compared(found, place)
            other = scene.compared(found, (place + size) % n)[0]
            rows += [columns, other]
            if watch is not None:
                watch(place, nearest)
        if progress is not None:
            progress(start + size, n)
    rows = rows[::2] + rows[1::2]  # every example as a member, and then as a non-member
    details = {name: np.array([row[name] for row in rows], np.float64) for name in rows[0]}
    places = details.pop("place").astype(np.int64)
    ids = np.arange(n) if example_ids is None else np.asarray(example_ids)
    return AttackScores(
        scores=-details["error"],
        member=np.repeat([True, False], n),
        method=f"{attack.title}, from {observation.text}" + ", labels known" * known,
        example_ids=ids[places],
        adversary="gradients",
        details=details,
    )


@dataclass(frozen=True)
class Candidates:
    """Which candidates (m, ...) an example (n, ...) is told from, and how often chance names it.

    labels_known: an example is told from candidates of its label; known_with: number of consecutive
    examples of which the attacker knows all but one.
    """

    inputs: Tensor
    targets: Tensor
    own_inputs: Tensor
    own_targets: Tensor
    labels_known: bool
    known_with: int

    def others(self, place: int) -> Tensor:
        """(m,) bool, the candidates that an example is told from: not its copies, but some."""
        numbers, own = self._numbers
        others = self._left(place) & (numbers != own[place])
        if not others.any():
            alike = " of its label" * self.labels_known
            raise refused("refusal.leakage", "no_candidate", alike=alike)
        return others

    def chance(self, place: int, n_guesses: int) -> float:
        """The most that the example is named by this number of guesses, which do not see it."""
        numbers, own = self._numbers
        left = self._left(place)
        number = int(left.sum()) + int(own[place] not in numbers[left])
        copies = int(numbers[self._labelled(place)].bincount().max())
        return min(1.0, n_guesses * copies / number)

    @cached_property
    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Of candidates (m,) and of examples (n,): copies have the same number."""
        every = torch.cat([self.inputs, self.own_inputs]).flatten(1)
        found = torch.unique(every, dim=0, return_inverse=True)[1]
        return found[: len(self.inputs)], found[len(self.inputs) :]

    def _labelled(self, place: int) -> Tensor:
        """(m,) bool, the candidates with the label of an example, if the attacker knows it."""
        if self.labels_known:
            return self.targets == self.own_targets[place]
        return torch.ones(len(self.inputs), dtype=torch.bool)

    def _left(self, place: int) -> Tensor:
        """The same without the examples that the attacker knows; their copies may still be it."""
        (numbers, own), left = self._numbers, self._labelled(place)
        start = place - place % self.known_with
        for other in range(start, start + self.known_with):
            same = (left & (numbers == own[other])).nonzero()
            if other != place and len(same):
                left[same[0]] = False
        return left


@dataclass(frozen=True)
class _Scene(Candidates):
    """What all looks of one call share."""

    reader: inversion.Reader
    attack: inversion.Inversion
    generator: torch.Generator

    def check(self) -> None:
        """Raise InputError if an example has no other candidate, or the model is random."""
        for place in range(len(self.own_inputs)):
            self.others(place)
        first, again = self._batch([0]), self._batch([0])
        if (first - again).norm() > _SAME * first.norm():
            raise refused("refusal.leakage", "random")

    def attacked(self, places: Sequence[int]) -> tuple[Tensor, int, Tensor | None]:
        """Observe and reconstruct examples: what `invert` gives, and the label that is inferred."""
        seen, known = self.reader.observation, self.labels_known
        inputs, targets = self.own_inputs[list(places)], self.own_targets[list(places)]
        observed = self.reader.read(inputs, targets)
        noise = torch.randn(observed.shape, generator=self.generator, dtype=observed.dtype)
        observed = observed + seen.noise_std * noise
        sent = torch.ones_like(observed, dtype=torch.bool)
        if seen.share < 1:
            sent[observed.abs().argsort()[: round((1 - seen.share) * len(sent))]] = False
        label = self._inferred(observed * sent) if len(places) == 1 else None
        if self.attack.needs_labels and not known and label is None:
            raise refused("refusal.leakage", "no_label", attack=self.attack.name)
        look = inversion.Look(
            observed,
            sent,
            targets if label is None or known else label,
            tuple(inputs.shape),
            *self._range,
            self.reader,
            self.generator,
            lambda place: self._alternatives(places, place),
        )
        return *self.attack.invert(look), label

    def compared(
        self, found: tuple[Tensor, int, Tensor | None], place: int
    ) -> tuple[dict[str, Any], Tensor]:
        """The columns of one example and a guess, and the reconstruction nearest to it."""
        (inputs, iterations, label), (low, high) = found, self._range
        others = self.inputs[self.others(place)].flatten(1).double()
        own = self.own_inputs[place].flatten().double()
        if self.attack.knows_candidates:  # its guesses stand in the order of the batch
            inputs = inputs[place % len(inputs)].unsqueeze(0)
        guesses = inputs.flatten(1).double()
        away = (guesses - own).square().mean(1) / (high - low) ** 2
        away = torch.nan_to_num(away, nan=np.inf, posinf=np.inf)
        nearest = int(away.argmin())
        distances = torch.cdist(guesses, others, compute_mode="donot_use_mm_for_euclid_dist")
        least = distances.square().min(1).values / own.numel() / (high - low) ** 2
        right = np.nan
        if label is not None and not self.labels_known:
            right = float(torch.equal(label, self.own_targets[place : place + 1]))
        columns = {
            "place": place,
            "error": float(away[nearest]),
            "identified": bool((away < least).any()),
            "label_found": right,
            "iterations": iterations,
            "chance": self.chance(place, len(guesses)),
            "mu": float(self._mu[place]),
        }
        return columns, inputs[nearest]

    @cached_property
    def _range(self) -> tuple[float, float]:
        low, high = torch.cat([self.inputs, self.own_inputs]).aminmax()
        return float(low), max(float(high), float(low) + 1e-12)

    @cached_property
    def _gradients(self) -> Tensor:
        """(m, d) what each candidate adds to a sum of gradients."""
        return torch.stack(
            [self.reader.read(*pair) for pair in inversion.one_by_one(self.inputs, self.targets)]
        )

    @cached_property
    def _mu(self) -> list[float]:
        """(n,) of each example, in its own batch."""
        size, std = self.reader.observation.batch_size, self.reader.observation.noise_std
        found = []
        for place in range(len(self.own_inputs)):
            batch = range(place - place % size, place - place % size + size)
            without = self._batch([p for p in batch if p != place])
            moved = float((self._batch(batch) - without).norm())
            found.append(moved / std if std else (np.inf if moved else 0.0))
        return found

    def _batch(self, places: Sequence[int]) -> Tensor:
        return self.reader.read(self.own_inputs[list(places)], self.own_targets[list(places)])

    def _alternatives(self, places: Sequence[int], place: int) -> tuple[Tensor, Tensor]:
        """See `Look`. The example itself comes last, so that ties count against the attack."""
        own, rest = places[place], [p for p in places if p != places[place]]
        others, beside = self.others(own), (self.own_inputs[rest], self.own_targets[rest])
        inputs = torch.cat([self.inputs[others], self.own_inputs[own : own + 1]])
        if self.reader.observation.of == "update":
            targets = torch.cat([self.targets[others], self.own_targets[own : own + 1]])
            read = [
                self.reader.read(torch.cat([x, beside[0]]), torch.cat([y, beside[1]]))
                for x, y in inversion.one_by_one(inputs, targets)
            ]
            return inputs, torch.stack(read)
        added = torch.cat([self._gradients[others], self._batch([own]).unsqueeze(0)])
        return inputs, added + self._batch(rest)

    def _inferred(self, observed: Tensor) -> Tensor | None:
        """(1,) label of a single example, by the sign of the last layer's gradient."""
        layers = [n for n, m in self.reader.model.named_modules() if isinstance(m, nn.Linear)]
        found = self.reader.gradients(observed)
        targets = self.own_targets
        if not layers or targets.is_floating_point() or targets.dim() != 1:
            return None
        last = found.get(f"{layers[-1]}.bias")
        if last is None:
            weight = found.get(f"{layers[-1]}.weight")
            last = None if weight is None else weight.sum(1)
        if last is None or f"{layers[-1]}." not in list(found)[-1]:
            return None
        return last.argmin().reshape(1)


def _problems(
    inputs: Tensor,
    targets: Tensor,
    observation: inversion.Observation,
    attack: inversion.Inversion,
    given: bool | None,
    known: bool,
) -> Iterator[str]:
    """What does not fit; given: whether labels are known as passed, known: as it is taken."""
    size = observation.batch_size
    if len(inputs) != len(targets):
        yield f"there are {len(inputs)} inputs and {len(targets)} targets"
    if not inputs.is_floating_point() and not attack.knows_candidates:
        yield text("refusal.leakage", "integers", attack=attack.name, dtype=inputs.dtype)
    if len(inputs) % size or len(inputs) < 2 * size:
        yield text("refusal.leakage", "batches", n=len(inputs), size=size)
    if attack.needs_labels and size > 1 and not known:
        yield "labels are inferred of single examples only; pass knows_labels=True"
    if attack.needs_labels and size > _MOST_LABELS and given is None:
        yield text("refusal.leakage", "labels", size=size, most=_MOST_LABELS)


# --- at checkpoints of a run

LAST = "last"
ObservationAt = Callable[[int], inversion.Observation]  # number of updates before -> what is read


def observation(
    seen: inversion.Observation,
    before_noise: bool,
    max_grad_norm: float | None,
    noise: float,
    clipping: str = "flat",
) -> inversion.Observation:
    """What is read, if clipped and with noise: InputError for an update, which has neither."""
    if seen.of == "update":
        if not before_noise:
            raise refused("refusal.leakage", "update")
        return seen
    noise = 0.0 if before_noise else noise
    return replace(seen, max_grad_norm=max_grad_norm, clipping=clipping, noise_multiplier=noise)


def leak_run(
    spec: AuditSpec,
    folder: Path,
    observation_at: ObservationAt,
    attack: inversion.Inversion,
    *,
    examples: int = 100,
    at: Sequence[int | str] = (0, LAST),
    knows_labels: bool = False,
    seed: int | None = None,
    progress: StageProgress = silent,
    pictures: int = 0,
    step_of: StepOf = (),
) -> tuple[AttackScores, Tensor]:
    """Reconstruct random training examples at checkpoints of a run, by one attack.

    This many examples are drawn at random before anything is looked at, in whole batches; they are
    also the candidates. Attacked are the checkpoints after these numbers of updates, or the "last".
    The result is scores with the column `step` in `details`, and (pictures, 2, ...) examples and
    their reconstructions at the first checkpoint. step_of is as of `StepOptions`. InputError
    without a checkpoint at a moment, for inputs of several tensors, or as `leak`.
    """
    check_positive_int("examples", examples, minimum=2)
    moments = _moments(folder, spec, step_of, at)
    size = observation_at(moments[0].step).batch_size
    n = min(examples, spec.n_examples) // size * size
    chosen = np.random.default_rng(seed).permutation(spec.n_examples)[:n]
    inputs, targets = _stacked(spec, chosen)
    found: list[AttackScores] = []
    kept: list[Tensor] = []

    def watch(place: int, picture: Tensor) -> None:
        if len(kept) < pictures:
            kept.append(torch.stack([inputs[place], picture]))

    def report(done: int, total: int) -> None:
        progress(f"reconstructing ({attack.name})", len(found) * total + done, len(moments) * total)

    for moment in moments:
        model = spec.model()
        load_into(model, moment.path, spec.load)
        scores = leak(
            model,
            spec.loss_fn,
            *(inputs, targets, observation_at(moment.step), attack),
            example_ids=spec.ids[chosen],
            knows_labels=knows_labels or None,
            seed=seed,
            watch=watch,
            progress=report,
        )
        step = np.full(len(scores.scores), float(moment.step))
        found.append(replace(scores, details={**scores.details, "step": step}))
    return _joined(found), torch.stack(kept) if kept else inputs[:0].unsqueeze(1)


def write_scores(scores: AttackScores, folder: Path, name: str) -> None:
    """Write FOLDER/NAME.parquet, for its owner only (0600)."""
    make_folder(folder.parent, folder.name)
    scores.to_parquet(folder / f"{name}.parquet")


def _moments(
    folder: Path, spec: AuditSpec, step_of: StepOf, at: Sequence[int | str]
) -> list[SavedModel]:
    found = discover(folder, spec.load, step_of)
    found.check(folder)
    by_step = {model.step: model for model in found.models}
    wanted = dict.fromkeys(max(by_step) if moment == LAST else moment for moment in at)
    for step in wanted:
        if step not in by_step:
            known = ", ".join(map(str, sorted(by_step)[:8])) + " ..." * (len(by_step) > 8)
            raise refused("refusal.leakage", "no_step", step=step, folder=folder, known=known)
    return [by_step[int(step)] for step in wanted]


def _stacked(spec: AuditSpec, chosen: Any) -> tuple[Tensor, Tensor]:
    rows = [spec.dataset[int(i)] for i in chosen]
    inputs, targets = (spec.collate_fn or default_collate)(rows) if rows else (None, None)
    if not (isinstance(inputs, Tensor) and isinstance(targets, Tensor)):
        raise refused("refusal.leakage", "inputs", kind=type(inputs).__name__)
    return inputs, targets


def _joined(found: Sequence[AttackScores]) -> AttackScores:
    """Scores at several moments as one; noise and clipping may have moved between them."""
    names = found[0].details
    return replace(
        found[0],
        scores=np.concatenate([one.scores for one in found]),
        member=np.concatenate([one.member for one in found]),
        example_ids=np.concatenate([np.asarray(one.example_ids) for one in found]),
        details={name: np.concatenate([one.details[name] for one in found]) for name in names},
    )
