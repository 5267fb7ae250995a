"""SessionCounts: what one recording session counted while a model trained. Sensitive.

The journal holds them as JSON; the keys are the fields' names. A session that watched training has
all counts, a replay of checkpoints none, and norms from another trainer at most those of draws.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from indpriv._reading import AtLeastZero, Whole, check
from indpriv._types import IntArray
from indpriv.errors import EvidenceError

NEGLIGIBLE_EXCESS = 1e-4  # of max_grad_norm
_MEASURED_MARGIN = 2.0
_Spread = Annotated[AtLeastZero, Field(le=1e100)]  # whose square is a number


class _Counts(BaseModel):
    """Plain numbers and words; keys that are not known here are passed over."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class DrawCounts(_Counts):
    """How often each example was drawn."""

    draws: Whole  # logical batches
    expected_participations: AtLeastZero  # of all examples: the sum of rates, times their number
    participations: Whole  # examples drawn, summed over all batches
    participations_min: Whole  # of one example, as the next two
    participations_max: Whole
    participations_variance: _Spread  # as independent draws at these rates have it
    participations_spread: _Spread  # sum over examples of squared deviations from expected
    size_min: Whole | None = None  # of one batch, as the next; None where they were not counted
    size_max: Whole | None = None
    together: AtLeastZero | None = None  # times that all of several rows of a unit were drawn
    together_expected: AtLeastZero | None = None  # as independent draws have it

    @classmethod
    def of(
        cls, times: IntArray, *, draws: int, expected: float, variance: float, **further: Any
    ) -> "DrawCounts":
        """Of times (n_examples,) drawn; expected and variance are those of one example."""
        return cls(
            draws=draws,
            expected_participations=expected * len(times),
            participations=int(times.sum()),
            participations_min=int(times.min()),
            participations_max=int(times.max()),
            participations_variance=variance,
            participations_spread=float(np.square(times - expected).sum()),
            **further,
        )


class Found(_Counts):
    """One comparison of training with its own recomputation."""

    steps: Whole = 0  # at which it was made
    refuted: Whole = 0  # of these, those at which training was something else
    unknown: Whole = 0  # at which nothing could be concluded
    detail: str = ""  # what was found at the first of them


class ComparedTraining(_Counts):
    """Comparisons of training with its own recomputation, by key of their assumption."""

    found: dict[str, Found] = {}


class TrainingCounts(_Counts):
    """What was seen of training itself. Steps and batches are logical ones."""

    sampler_class: str = ""  # that drew the batches
    training_seconds: AtLeastZero = 0.0  # of the steps, without the passes that take norms
    ranks: Whole = 1  # processes that trained together
    changed_outside: Whole = 0  # steps before which another than the optimizer changed parameters
    # Fingerprint of how often each example was in the batch of a step; None if the log keeps no
    # batch norms, or several ranks trained.
    took_part: str | None = None
    compared: ComparedTraining | None = None  # None in logs from before it was
    # Fingerprints after its last step of parameters and buffers, a space, and of the optimizer's
    # state, which older logs lack; None if they are sharded.
    weights: str | None = None
    # Items of the data set, settings of the last step, by name, and losses of a few examples after
    # it, which a resumed session repeats; None in older logs.
    items: str | None = None
    settings: dict[str, Any] | None = None
    losses_after: list[float] | None = None

    steps: Whole = 0  # parameter updates
    undrawn_steps: Whole = 0  # without a batch that was drawn
    unstepped_draws: Whole = 0  # batches that never became a step
    left_batches: Whole | None = None  # in hand when the loop left a pass, by no rule; None before
    # Whether the loop had a batch in hand when the session ended; None until then.
    ended_in_hand: bool | None = None
    peeks: Whole = 0  # passes that drew a batch and made no step, before one with steps
    passes: Whole = 0  # over the loader, with several steps
    dropped_batches: Whole = 0  # local ones, that the sampler of a rank left out of an epoch
    interrupted_batches: Whole = 0  # times the loop left a logical batch unfinished
    unmatched_steps: Whole = 0  # that clipped another number of gradients than their batch has

    gradients: Whole = 0  # that entered steps
    misclipped_gradients: Whole = 0  # clipped at another max_grad_norm than that of their step
    gradients_at_levels: Whole = 0  # clipped at the level of their own example
    underestimated_norms: Whole = 0  # by which ghost mode clipped too little
    # By how much clipped gradients are longer than max_grad_norm on this machine, as a fraction of
    # it; and the same from rounding norms to half precision.
    clip_excess: AtLeastZero = 0.0
    clip_rounding: AtLeastZero = 0.0

    compared_norms: Whole = 0  # norms in training that were compared with recorded ones
    larger_norms: Whole = 0  # of these, contributions larger than recorded
    largest_excess: AtLeastZero = 0.0  # as a fraction of max_grad_norm
    larger_clipped_norms: Whole = 0  # larger than recorded, but clipped in both
    smaller_norms: Whole | None = None  # contributions smaller than recorded; None in older logs

    # Noise or batches came from a generator with a chosen or default seed, or with one that was set
    # while training.
    guessable_seed: bool = False
    unmoved: Whole | None = None  # steps whose noise was not drawn from the optimizer's generator
    source: str | None = None  # what draws noise and batches; both None in older logs
    first_draw: str = ""  # fingerprint of the random state of the first draw, if it is known
    repeated_draws: Whole = 0  # from a random state that was drawn from before
    moved: Whole | None = None  # draws before which something else had drawn; None in older logs

    earlier_steps: Whole = 0  # that Opacus's accountant had counted before recording began
    accountant_steps: int | None = 0  # that it counted since; None if there is no accountant
    accountant_settings_match: bool = True  # its settings are those of the steps

    def forget_norms(self) -> None:
        """Leave out how norms compare: those of training are of another draw than the recorded."""
        self.compared_norms = self.larger_norms = self.larger_clipped_norms = 0
        self.underestimated_norms, self.smaller_norms, self.largest_excess = 0, None, 0.0

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


class NoiseCounts(_Counts):
    """The noise that one session added, over noise_multiplier * max_grad_norm of its step."""

    values: Whole  # measured: steps times trainable parameters
    variance: AtLeastZero  # mean square of all; 1 as accounted
    # Of the tensor whose variance is too small by the most standard errors.
    least_variance: AtLeastZero
    least_values: Whole
    fourth_moment: AtLeastZero  # mean fourth power of all; 3 for normal noise
    # In standard deviations: products with the noise of the previous and of the first step on the
    # same coordinates, the part along each step's sum of clipped gradients, the length of the sum
    # of all noise, and products of a step's signs with the signs of all earlier steps.
    previous: float
    first: float
    along_sum: float
    repeated: float = 0.0  # in logs before it was measured, as the next
    signed: float = 0.0


class Conversion(_Counts):
    """A log made of norms that another trainer wrote."""

    source: str  # name of their file


class Replay(_Counts):
    """A log of norms taken from saved checkpoints."""

    sources: Mapping[str, str]  # name of each setting, and where it was found
    accountant_counted_all: bool  # the accountant in the checkpoints counted every step
    weights_fingerprint: str | None  # of the last checkpoint; None at the end of the log
    refuted: Mapping[str, str] = {}  # key of a check that failed in a Recorder's log -> its detail


class RoundCounts(_Counts):
    """Rounds that a federated trainer passed to a `RoundRecorder`."""

    of: str  # what takes part: "client", or "example" where the log is of their rows
    steps: int  # rounds, or local steps
    took_part: str  # fingerprint of how often each took part


class SessionCounts(_Counts):
    """What one session says of the steps that it logged."""

    from_step: int  # the first of its steps
    seeded: bool  # the user said that random numbers come from a known seed
    caveats: Annotated[tuple[str, ...], Field(strict=False)]  # why accounts of it are estimates
    sampler: str  # of the log; see `NormLog`
    converted: Conversion | None = None  # a recorder watched if this and the next two are None
    replayed: Replay | None = None
    rounds: RoundCounts | None = None
    draws: DrawCounts | None = Field(default=None, exclude=True)  # None if nobody counted
    training: TrainingCounts | None = Field(default=None, exclude=True)  # None if nobody watched
    noise: NoiseCounts | None = None  # None if it was not measured

    @property
    def steps_of_other_batches(self) -> int:
        """Steps that used no drawn batch, or another number of rows than theirs has."""
        if self.training is None or self.draws is None:
            return 0
        undrawn = max(self.training.undrawn_steps, self.training.steps - self.draws.draws)
        return undrawn + self.training.unmatched_steps

    def to_json(self) -> dict[str, Any]:
        """As the journal holds them: what is known, that of draws and training among the others."""
        parts = [part.model_dump() for part in (self, self.draws, self.training) if part]
        content = {key: value for part in parts for key, value in part.items() if value is not None}
        if self.training is not None:
            content["accountant_steps"] = self.training.accountant_steps
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> "SessionCounts":
        """Read what `to_json` wrote; EvidenceError for counts of another kind, or too few."""
        where = "the counts of a session in the journal"
        parts: dict[str, type[_Counts]] = {"draws": DrawCounts, "training": TrainingCounts}
        nested: dict[str, BaseModel | None] = {}
        for name, kind in parts.items():
            known = any(content.get(key) is not None for key in kind.model_fields)
            nested[name] = check(kind, content, where) if known else None
        counts = check(cls, {**content, **nested}, where)
        if missing := counts.to_json().keys() - content.keys():
            named = ", ".join(sorted(missing))
            raise EvidenceError(f"{where} lack {named}: another version of indpriv wrote them")
        return counts
