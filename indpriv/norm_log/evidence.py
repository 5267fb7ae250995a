"""The assumptions of an account, and Check: one of them compared with what a run recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from indpriv._plain import Limits

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
# What fails with a check: the worst-case epsilon too, individual epsilons only, or neither (how
# files are stored).
WORST_CASE, INDIVIDUAL, FILES = "worst_case", "individual", "files"
SEEDED = (
    "the run was seeded (reproducible: no privacy): anyone with the seed can regenerate noise and "
    "sampling"
)


@dataclass(frozen=True)
class Check:
    """One assumption, compared with what the run recorded.

    Attributes:
        key: names the assumption; never changes. A run of several sessions has several checks with
            one key.
        title: shown to readers in place of the key.
        status: "passed", "failed" or "not checked".
        detail: what was found.
        bears_on: "worst_case" if the guarantee rests on it, "individual" if only individual
            epsilons do, else "files".
    """

    key: str
    title: str = field(metadata={"json": "name"})
    status: Annotated[str, Limits(texts=(PASSED, FAILED, NOT_CHECKED))]
    detail: str
    bears_on: Annotated[str, Limits(texts=(WORST_CASE, INDIVIDUAL, FILES))]


@dataclass(frozen=True)
class Assumption:
    """Something that an account assumes of a run and that a check can confirm or refute."""

    key: str
    title: str
    bears_on: str = WORST_CASE

    def passed(self, detail: str) -> Check:
        """It holds."""
        return self.check(PASSED, detail)

    def failed(self, detail: str) -> Check:
        """It does not hold."""
        return self.check(FAILED, detail)

    def not_checked(self, detail: str) -> Check:
        """What the run recorded neither confirms nor refutes it."""
        return self.check(NOT_CHECKED, detail)

    def check(self, status: str, detail: str) -> Check:
        """A check with this status."""
        return Check(self.key, self.title, status, detail, self.bears_on)


# Of the files of a run.
HASH_CHAIN = Assumption("journal", "journal")
RECORDS = Assumption("records", "records", INDIVIDUAL)
COVERAGE = Assumption("coverage", "coverage", INDIVIDUAL)
DECLARED_SETTINGS = Assumption("declared_settings", "run.json")
PERMISSIONS = Assumption("permissions", "permissions", FILES)
# Of a run as a whole.
CLOSED = Assumption("closed", "log closed")
NO_VOIDED_STEPS = Assumption("no_voided_steps", "no voided steps")
RANDOM_NUMBERS = Assumption("random_numbers", "random numbers")
TRAINING_WATCHED = Assumption("training_watched", "training")
# Of each recording session.
SAMPLER = Assumption("sampler", "sampler")
SEEDS = Assumption("seeds", "seeds")
PARAMETERS = Assumption("parameters", "parameters")
RANKS = Assumption("ranks", "ranks")
BATCH_FOR_EVERY_STEP = Assumption("batch_for_every_step", "a batch for every step")
WHOLE_BATCHES = Assumption("whole_batches", "whole batches")
CLIPPING = Assumption("clipping", "clipping")
CLIPPING_PRECISION = Assumption("clipping_precision", "clipping, precision")
INDIVIDUAL_CLIPPING = Assumption("individual_clipping", "individual clipping", INDIVIDUAL)
PRIVACY_FILTER = Assumption("privacy_filter", "privacy filter")
NOISE = Assumption("noise", "noise")
BATCH_SIZES = Assumption("batch_sizes", "batch sizes")
PARTICIPATION = Assumption("participation", "participation of each example")
OPACUS_ACCOUNTANT = Assumption("opacus_accountant", "Opacus's accountant")
# Of the norms. Larger norms in training mean other data or another loss. A few that are barely
# larger only mean that arithmetic differed: where two inputs of a max-pool are almost equal, the
# gradient may pass through either.
NORM_PASS = Assumption("norm_pass", "norm pass", INDIVIDUAL)
NORM_PRECISION = Assumption("norm_precision", "norm pass, precision", INDIVIDUAL)
NORMS_IN_TRAINING = Assumption("norms_in_training", "norms in training")
