"""The account of runs beside the attacks that they made on themselves while they trained."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from indpriv.accountant.predicted_evidence import PredictedEvidence, predicted_evidence
from indpriv.analysis.attacks.account_test import Evidence
from indpriv.analysis.attacks.canary_findings import CanaryResults, measure_gradient_canaries
from indpriv.attack_scores import AttackScores
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import GRADIENT_CANARIES, HOLDOUT, WHITE_BOX, holds_log


def white_box_of_run(run_dir: Path) -> tuple[AttackScores, PredictedEvidence]:
    """Evidence of a run's white-box attack, and what its log predicts, row by row.

    Raises:
        InputError: the run was not attacked by `WhiteBox`, or test examples were attacked whose
            norms were not recorded.
    """
    path = run_dir / WHITE_BOX
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {WHITE_BOX}; record a run with attack=WhiteBox() and "
            "record_holdout=True"
        )
    scores = AttackScores.from_file(path)
    if scores.example_ids is None:
        raise InputError(f"{path} lacks the column example_id; it is not what a Recorder wrote")
    inside = predicted_evidence(log := NormLog.open(run_dir))
    place = {example: k for k, example in enumerate(np.asarray(log.example_ids).tolist())}
    rows = np.array([place[k] for k in scores.example_ids[scores.member].tolist()], dtype=np.int64)
    parts = [inside.take(rows)]
    if not scores.member.all():
        if not holds_log(run_dir / HOLDOUT):
            raise InputError(
                f"{run_dir} attacked test examples, but has no log of their norms; record it with "
                "record_holdout=True"
            )
        outside = predicted_evidence(NormLog.open(run_dir / HOLDOUT))
        parts.append(outside.take(scores.example_ids[~scores.member].astype(np.int64)))
    return scores, PredictedEvidence.concatenated(parts)


def evidence_of_runs(run_dirs: Sequence[Path]) -> Evidence:
    """Evidence of the white-box attacks on several runs, beside what their logs predict."""
    found = [white_box_of_run(Path(run_dir)) for run_dir in run_dirs]
    return Evidence(
        np.concatenate([scores.scores for scores, _ in found]),
        np.concatenate([scores.member for scores, _ in found]),
        np.repeat(np.arange(len(found)), [len(scores.scores) for scores, _ in found]),
        PredictedEvidence.concatenated([predicted for _, predicted in found]),
    )


def canaries_of_run(run_dir: Path, *, delta: float = 1e-5) -> CanaryResults:
    """What the gradient canaries of a run say, for each of their lengths.

    Raises:
        InputError: the run had none, or too few of each length.
    """
    path = run_dir / GRADIENT_CANARIES
    if not path.is_file():
        raise InputError(
            f"{run_dir} has no {GRADIENT_CANARIES}; record a run with attack=GradientCanaries(...)"
        )
    settings = NormLog.open(run_dir).settings
    found = measure_gradient_canaries(AttackScores.from_file(path), settings, delta=delta)
    if not found.lengths:
        raise InputError(" ".join(found.left_out) or f"{path} holds no canaries")
    return found
