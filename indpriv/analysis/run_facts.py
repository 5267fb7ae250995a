"""What was run, as the log recorded it. Sensitive."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from indpriv._arrays import FloatArray, Ids
from indpriv._columns import Rows, frames_of, to_floats
from indpriv._plain import AtLeastZero, Count, Share
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.declared import Declared
from indpriv.analysis.schedule import ScheduleFindings, schedule_of
from indpriv.analysis.summary import Finding
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog

_HASHED_AT_ONCE = 1 << 17  # ids, whose texts take ten times their memory


@dataclass(frozen=True)
class Range:
    """Smallest and largest realised value over all steps."""

    min: AtLeastZero
    max: AtLeastZero

    @classmethod
    def of(cls, values: FloatArray) -> "Range":
        """The range of a value at each step."""
        return cls(float(values.min()), float(values.max()))

    def __str__(self) -> str:
        if self.min == self.max:
            return f"{self.min:.6g}"
        return f"{self.min:.6g} to {self.max:.6g}"


@dataclass(frozen=True)
class RunFacts:
    """What was run, as the log recorded it.

    Attributes:
        n_examples, n_test_examples: number of training and test examples.
        n_units: number of distinct privacy units; None where each example is its own.
        train_accuracy, test_accuracy: of the final model; None where unknown.
        total_steps: number of steps of the run.
        expected_epochs: sum of sample_rate over the steps.
        noise_multiplier, max_grad_norm, sample_rate: realised values.
        individually_clipped: whether training clipped each example at its recorded level.
        n_records: number of steps with a record of every example.
        recorded_share: n_records over the number of steps.
        n_exact_examples: number of examples whose norm was recorded at every step.
        rounding: of norms, as a fraction of max_grad_norm; 0 if they were not rounded.
        rounding_mode: "up", "nearest" or "none".
        example_ids_sha256: fingerprint of the ids in order.
        caveats: reasons, found while recording, why individual epsilons are estimates.
        recorder: what the recorder read from the optimizer and the loader; part of the log's hash
            chain.
        declared: what run.json says in addition; not verified.
    """

    n_examples: Count
    n_test_examples: Count
    n_units: Count | None
    train_accuracy: Share | None
    test_accuracy: Share | None
    total_steps: Count
    expected_epochs: float
    noise_multiplier: Range
    max_grad_norm: Range
    sample_rate: Range
    individually_clipped: bool
    n_records: Count
    recorded_share: Share
    n_exact_examples: Count
    rounding: AtLeastZero
    rounding_mode: str
    example_ids_sha256: str
    caveats: tuple[str, ...]
    recorder: Mapping[str, Any]
    declared: Declared


def run_facts(
    log: NormLog, examples: ExampleTable | None, recorder: Mapping[str, Any], declared: Declared
) -> RunFacts:
    """Collect what is known about a run; see `RunFacts`."""
    settings, levels, references = log.settings, log.levels, log.reference_positions
    train, test = (
        None if examples is None else examples.rows(split) for split in ("train", "test")
    )
    return RunFacts(
        n_examples=log.n_examples,
        n_test_examples=0 if test is None else len(test),
        n_units=None if log.unit_ids is None else len(np.unique(log.unit_ids)),
        train_accuracy=_accuracy(train),
        test_accuracy=_accuracy(test),
        total_steps=log.total_steps,
        expected_epochs=float(settings.sample_rate.sum()),
        noise_multiplier=Range.of(settings.noise_multiplier),
        max_grad_norm=Range.of(settings.max_grad_norm),
        sample_rate=Range.of(settings.sample_rate),
        individually_clipped=log.individually_clipped,
        n_records=log.n_records,
        recorded_share=log.coverage,
        n_exact_examples=0 if references is None else len(references),
        rounding=0.0 if levels is None else levels.rounding,
        rounding_mode="none" if levels is None else levels.rounding_mode,
        example_ids_sha256=_fingerprint(log.example_ids),
        caveats=log.caveats,
        recorder=recorder,
        declared=declared,
    )


def _fingerprint(ids: Ids) -> str:
    """Hex SHA-256 of the ids as texts with a null between them."""
    found = hashlib.sha256()
    for start in range(0, len(ids), _HASHED_AT_ONCE):
        texts = "\0".join(map(str, ids[start : start + _HASHED_AT_ONCE].tolist()))
        found.update(("\0" * (start > 0) + texts).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _accuracy(rows: Rows | None) -> float | None:
    """The share of correct examples among those where that is known."""
    n, total = 0, 0.0
    for frame in [] if rows is None else frames_of(rows, ["correct"]):
        correct = to_floats(frame["correct"])
        known = correct[~np.isnan(correct)]
        n, total = n + len(known), total + float(known.sum())
    return total / n if n else None


def _run(run: AuditedRun) -> dict[str, Any]:
    recorded = run.recorded
    return {"run": run_facts(run.log, recorded.examples, recorded.recorder, recorded.declared)}


def _schedule(run: AuditedRun) -> dict[str, Any]:
    return {"schedule": schedule_of(run.log, run.epsilons.account.delta, run.recorded.curve)}


FINDINGS = (
    Finding("run", 70, _run, run=(RunFacts, "What was run.")),
    Finding(
        "schedule",
        72,
        _schedule,
        schedule=(ScheduleFindings | None, "Noise, clipping and accuracy over training."),
    ),
)
