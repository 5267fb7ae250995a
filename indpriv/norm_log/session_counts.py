"""SessionCounts: what one recording session counted while a model trained. Sensitive.

The journal holds them as JSON; the keys are the fields' names. A session that watched training has
all counts, a replay of checkpoints none, and norms from another trainer at most those of draws.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from indpriv import _plain
from indpriv._arrays import IntArray
from indpriv.errors import EvidenceError, InputError

NEGLIGIBLE_EXCESS = 1e-4  # of max_grad_norm
_MEASURED_MARGIN = 2.0

_FLAT = {"flatten": True}  # keys of a part stand among those of the session


@dataclass(frozen=True)
class DrawCounts:
    """How often each example was drawn.

    Attributes:
        draws: number of logical batches drawn.
        expected_participations: sum over draws of sample_rate times the number of examples.
        participations: number of examples drawn, summed over all batches.
        participations_min, participations_max: of one example.
        participations_variance: of one example, as independent draws at these rates have it.
        participations_spread: sum over examples of the squared deviation from the expected number.
    """

    draws: int
    expected_participations: float
    participations: int
    participations_min: int
    participations_max: int
    participations_variance: float
    participations_spread: float

    @classmethod
    def of(
        cls, participations: IntArray, *, draws: int, expected: float, variance: float
    ) -> DrawCounts:
        """Of participations (n_examples,); expected and variance are those of one example."""
        return cls(
            draws=draws,
            expected_participations=expected * len(participations),
            participations=int(participations.sum()),
            participations_min=int(participations.min()),
            participations_max=int(participations.max()),
            participations_variance=variance,
            participations_spread=float(np.square(participations - expected).sum()),
        )


@dataclass
class BatchCounts:
    """How steps and batches belong together. Steps are those of logical batches.

    Attributes:
        steps: number of parameter updates.
        undrawn_steps: steps for which no batch was drawn.
        unstepped_draws: batches that were drawn and never became a step.
        looks: iterations over the loader that drew a batch and ended without a step.
        passes: iterations over the loader with several steps.
        dropped_batches: local batches that the sampler of a rank left out of an epoch.
        interrupted_batches: times the loop left a logical batch unfinished.
        unmatched_steps: steps that clipped a number of gradients other than the size of their
            batch.
    """

    steps: int = 0
    undrawn_steps: int = 0
    unstepped_draws: int = 0
    looks: int = field(default=0, metadata={"json": "peeks"})
    passes: int = 0
    dropped_batches: int = 0
    interrupted_batches: int = 0
    unmatched_steps: int = 0


@dataclass
class ClippingCounts:
    """What gradients were clipped at.

    Attributes:
        gradients: number of gradients that entered steps.
        misclipped_gradients: of these, clipped at another max_grad_norm than that of their step.
        gradients_at_levels: of these, clipped at the level of their own example.
        underestimated_norms: gradients that ghost mode clipped by too small a norm, so that they
            stay above max_grad_norm.
        clip_excess: by how much clipped gradients are longer than max_grad_norm on this machine,
            as a fraction of it.
        clip_rounding: the same from rounding norms to half precision.
    """

    gradients: int = 0
    misclipped_gradients: int = 0
    gradients_at_levels: int = 0
    underestimated_norms: int = 0
    clip_excess: float = 0.0
    clip_rounding: float = 0.0

    @property
    def accounted_excess(self) -> float:
        """By how much longer than max_grad_norm accounts let a clipped gradient be, as a fraction.

        Twice the measured excess of float32 sums, which agrees with that of gradients to within a
        half; and what half precision can add, a bound. An excess below what rounding epsilons up
        for display adds is left out.
        """
        measured = _MEASURED_MARGIN * self.clip_excess
        counted = measured if self.clip_excess > NEGLIGIBLE_EXCESS else 0.0
        return (1 + counted) * (1 + self.clip_rounding) - 1


@dataclass
class ComparedNorms:
    """Gradient norms in training, compared with recorded ones.

    Attributes:
        compared_norms: number of them.
        larger_norms: of these, contributions larger than recorded.
        largest_excess: the largest difference, as a fraction of max_grad_norm.
        larger_clipped_norms: of these, larger than recorded, but clipped in both.
    """

    compared_norms: int = 0
    larger_norms: int = 0
    largest_excess: float = 0.0
    larger_clipped_norms: int = 0


@dataclass
class RandomnessCounts:
    """What was seen of random numbers.

    Attributes:
        guessable_seed: noise or batches came from a generator with a chosen or default seed, or
            with one that was set while training.
        unmoved: steps whose noise was not drawn from the optimizer's generator.
        source: what draws noise and batches, in words; both None in older logs.
        first_draw: fingerprint of the random state of the first draw; empty if it is not known.
        repeated_draws: draws of noise or of a batch from a random state that was drawn from before.
        moved: draws before which something else had drawn from their generator; None in older logs.
    """

    guessable_seed: bool = False
    unmoved: int | None = None
    source: str | None = None
    first_draw: str = ""
    repeated_draws: int = 0
    moved: int | None = None


@dataclass(frozen=True)
class AccountantCounts:
    """What Opacus's accountant counted.

    Attributes:
        earlier_steps: steps that it had counted before recording began.
        accountant_steps: steps that it counted since; None if there is no accountant.
        accountant_settings_match: its settings are those of the steps.
    """

    earlier_steps: int = 0
    accountant_steps: int | None = 0
    accountant_settings_match: bool = True


@dataclass
class Found:
    """One comparison of training with its own recomputation.

    Attributes:
        steps: number of steps at which it was made.
        refuted: of these, steps at which training was something else.
        unknown: steps at which nothing could be concluded.
        detail: what was found at the first of them.
    """

    steps: int = 0
    refuted: int = 0
    unknown: int = 0
    detail: str = ""


@dataclass
class ComparedTraining:
    """Comparisons of training with its own recomputation, by key of their assumption."""

    found: Mapping[str, Found] = field(default_factory=dict)


@dataclass
class TrainingCounts:
    """What was seen of training itself.

    Attributes:
        sampler_class: name of the class that drew the batches.
        training_seconds: wall time of the steps, without the passes that take norms.
        ranks: number of processes that trained together.
        changed_outside: steps before which something other than the optimizer changed parameters.
        took_part: fingerprint of how often each example was in the batch of a step; None if the
            log keeps no batch norms, or several ranks trained.
        compared: with its own recomputation; None in logs from before it was.
    """

    sampler_class: str = ""
    training_seconds: float = 0.0
    ranks: int = 1
    changed_outside: int = 0
    took_part: str | None = None
    compared: ComparedTraining | None = None
    batches: BatchCounts = field(default_factory=BatchCounts, metadata=_FLAT)
    clipping: ClippingCounts = field(default_factory=ClippingCounts, metadata=_FLAT)
    norms: ComparedNorms = field(default_factory=ComparedNorms, metadata=_FLAT)
    randomness: RandomnessCounts = field(default_factory=RandomnessCounts, metadata=_FLAT)
    accountant: AccountantCounts = field(default_factory=AccountantCounts, metadata=_FLAT)


@dataclass(frozen=True)
class NoiseCounts:
    """The noise that one session added, over noise_multiplier * max_grad_norm of its step.

    Attributes:
        values: number of values measured: steps times trainable parameters.
        variance: mean square of all; 1 as accounted.
        least_variance, least_values: the same of the tensor whose variance is too small by the
            most standard errors, and its number of values.
        fourth_moment: mean fourth power of all; 3 for normal noise.
        previous, first: products with the noise of the previous and of the first step on the same
            coordinates, summed and in standard deviations.
        along_sum: part along each step's sum of clipped gradients, likewise.
    """

    values: int
    variance: float
    least_variance: float
    least_values: int
    fourth_moment: float
    previous: float
    first: float
    along_sum: float


@dataclass(frozen=True)
class Conversion:
    """A log made of norms that another trainer wrote; source: the name of their file."""

    source: str


@dataclass(frozen=True)
class Replay:
    """A log of norms taken from saved checkpoints.

    Attributes:
        sources: name of each setting, and where it was found.
        accountant_counted_all: the accountant in the checkpoints counted every step.
        weights_fingerprint: hash of the weights of the last checkpoint; None at the end of the log.
    """

    sources: Mapping[str, str]
    accountant_counted_all: bool
    weights_fingerprint: str | None


@dataclass(frozen=True)
class RoundCounts:
    """Rounds that a federated trainer passed to a `RoundRecorder`.

    Attributes:
        of: what takes part: "client", or "example" where the log is of their rows.
        steps: number of rounds, or of local steps.
        took_part: fingerprint of how often each took part.
    """

    of: str
    steps: int
    took_part: str


@dataclass(frozen=True)
class SessionCounts:
    """What one session says about the steps that it logged.

    Attributes:
        from_step: the first of its steps.
        seeded: the user said that random numbers come from a known seed.
        caveats: reasons why an account of its norms is an estimate.
        sampler: of the log; see `NormLog`.
        conversion, replay, rounds: where its norms come from; all None if a recorder watched
            training.
        draws: how often examples were drawn; None if it is not known.
        training: counts of a recorder that watched training; None if none did.
        noise: measured as training added it; None if it was not.
    """

    from_step: int
    seeded: bool
    caveats: tuple[str, ...]
    sampler: str
    conversion: Conversion | None = field(default=None, metadata={"json": "converted"})
    replay: Replay | None = field(default=None, metadata={"json": "replayed"})
    rounds: RoundCounts | None = None
    draws: DrawCounts | None = field(default=None, metadata=_FLAT)
    training: TrainingCounts | None = field(default=None, metadata=_FLAT)
    noise: NoiseCounts | None = None

    @property
    def took_part(self) -> tuple[int, str] | None:
        """Number of steps, and fingerprint of how often each example took part; None if unknown."""
        if self.rounds is not None:
            return self.rounds.steps, self.rounds.took_part
        if self.training is None or self.training.took_part is None:
            return None
        return self.training.batches.steps, self.training.took_part

    def to_json(self) -> dict[str, Any]:
        """As the journal holds them: what is not known is left out."""
        content = {key: value for key, value in _plain.to_json(self).items() if value is not None}
        if self.training is not None:
            content["accountant_steps"] = self.training.accountant.accountant_steps
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> SessionCounts:
        """Read what `to_json` wrote.

        Raises:
            EvidenceError: a count is absent, or it is of another kind.
        """
        try:
            counts = _plain.from_json(cls, content, "the journal")
        except InputError as error:
            raise EvidenceError(f"the counts of a session cannot be read: {error}") from error
        missing = counts.to_json().keys() - content.keys()
        if missing:
            raise EvidenceError(
                f"the counts of a session lack {', '.join(sorted(missing))}: another version of "
                "indpriv wrote them"
            )
        return counts
