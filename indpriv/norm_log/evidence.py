"""The assumptions of an account, and Check: one of them compared with what a run recorded.

The texts stand in evidence.toml, those of the lines that evidence is for in lines.toml.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Annotated, Any

from indpriv._plain import Limits

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
# What fails with a check: the worst-case epsilon too, individual epsilons only, or neither (how
# files are stored).
WORST_CASE, INDIVIDUAL, FILES = "worst_case", "individual", "files"
SEEDED = (
    "the run was seeded (reproducible: no privacy): anyone with the seed can regenerate noise and "
    "sampling"
)
LARGEST_NORM = (
    "the noise of a step is scaled by the largest norm in its batch (no privacy): anyone who sees "
    "the update sees that norm, in the size of the noise"
)
NOT_COMPARED = "recorded before training was compared with its own recomputation"


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
    """Something that an account assumes of a run and that a check can confirm or refute.

    Attributes:
        key, title, bears_on: see Check.
        group: where the reference page lists it.
        line: of lines.toml, which a check of it confirms, leaves open or refutes; or "".
        holds: what a passed check has found. Markdown, as all three are.
        failure, advice: what it means if the check fails, and what to do then.
        optional: where it was not checked, other checks decide the line.
    """

    key: str
    group: str
    title: str
    bears_on: str
    line: str
    holds: str
    failure: str
    advice: str
    optional: bool = False

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


def read_texts(name: str, kind: str) -> list[dict[str, Any]]:
    """The entries of a file of texts beside this module."""
    content = files("indpriv.norm_log").joinpath(name).read_text(encoding="utf-8")
    entries: list[dict[str, Any]] = tomllib.loads(content)[kind]
    return entries


ASSUMPTIONS: Mapping[str, Assumption] = {
    entry["key"]: Assumption(**entry) for entry in read_texts("evidence.toml", "assumption")
}
"""By key, in the order of the reference page."""
# Keys of what a Recorder compares with its own recomputation of training.
COMPARISONS = tuple(key for key, one in ASSUMPTIONS.items() if "recomputation" in one.group)

HASH_CHAIN = ASSUMPTIONS["journal"]
RECORDS = ASSUMPTIONS["records"]
COVERAGE = ASSUMPTIONS["coverage"]
DECLARED_SETTINGS = ASSUMPTIONS["declared_settings"]
PERMISSIONS = ASSUMPTIONS["permissions"]
CLOSED = ASSUMPTIONS["closed"]
NO_VOIDED_STEPS = ASSUMPTIONS["no_voided_steps"]
RANDOM_NUMBERS = ASSUMPTIONS["random_numbers"]
TRAINING_WATCHED = ASSUMPTIONS["training_watched"]
PRIVATE_CLIPPING_NORM = ASSUMPTIONS["private_clipping_norm"]
SAMPLER = ASSUMPTIONS["sampler"]
SEEDS = ASSUMPTIONS["seeds"]
PARAMETERS = ASSUMPTIONS["parameters"]
RANKS = ASSUMPTIONS["ranks"]
BATCH_FOR_EVERY_STEP = ASSUMPTIONS["batch_for_every_step"]
WHOLE_BATCHES = ASSUMPTIONS["whole_batches"]
CLIPPING = ASSUMPTIONS["clipping"]
CLIPPING_PRECISION = ASSUMPTIONS["clipping_precision"]
INDIVIDUAL_CLIPPING = ASSUMPTIONS["individual_clipping"]
PRIVACY_FILTER = ASSUMPTIONS["privacy_filter"]
NOISE = ASSUMPTIONS["noise"]
BATCH_SIZES = ASSUMPTIONS["batch_sizes"]
PARTICIPATION = ASSUMPTIONS["participation"]
TOOK_PART = ASSUMPTIONS["took_part"]
OPACUS_ACCOUNTANT = ASSUMPTIONS["opacus_accountant"]
NORM_PASS = ASSUMPTIONS["norm_pass"]
NORM_PRECISION = ASSUMPTIONS["norm_precision"]
NORMS_IN_TRAINING = ASSUMPTIONS["norms_in_training"]
