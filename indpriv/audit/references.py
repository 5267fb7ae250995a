"""Signals of reference models for the attacks on a run: do they belong to it? Sensitive."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.special import expit

from indpriv._columns import to_floats
from indpriv._files import first_at, read_json
from indpriv.attack_signals import AttackSignals, from_losses
from indpriv.attacks.train_references import CONFIDENCE, open_signals
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import RUN_JSON

_TOLERANCE = 0.01  # of a probability; losses were computed in the precision of training


def read_references(
    path: Path, run_dir: Path, examples: ExampleTable | None
) -> Mapping[str, AttackSignals]:
    """The signals in a folder, by name, once it is clear that they are of this run.

    Args:
        path: a folder of `indpriv shadow --for-run`, or an .npz file.
        run_dir: the run that is attacked.
        examples: its examples and losses.

    Raises:
        InputError: signals of other data, of other examples or of another run.
    """
    found = open_signals(path)
    if examples is None:
        raise InputError(f"{run_dir} has no losses of its examples, which attacks compare with")
    record = run_dir / RUN_JSON
    fingerprint = first_at(read_json(record), ("data", "fingerprint")) if record.is_file() else None
    for signals in found.values():
        if signals.audited is None:
            raise InputError(
                f"{path} holds a study, without this run; train references for it: indpriv shadow "
                f"AUDIT.toml --for-run {run_dir}"
            )
        if signals.fingerprint and fingerprint and signals.fingerprint != fingerprint:
            raise InputError(
                f"{path} holds signals of other data than {run_dir} (another fingerprint)"
            )
    _check_is_of_run(found[CONFIDENCE], examples, path, run_dir)
    return found


def _check_is_of_run(
    signals: AttackSignals, examples: ExampleTable, path: Path, run_dir: Path
) -> None:
    """Raise InputError unless ids, memberships and the audited row are those of the run."""
    row = signals.audited or 0
    member = np.array(signals.member[row])
    for split, inside in ((examples.train, member), (examples.test, ~member)):
        losses = split.set_index("example_id")["loss"]
        ids = signals.example_ids[inside]
        if not np.isin(ids, losses.index.to_numpy()).all():
            raise InputError(f"{path} holds examples that {run_dir} does not have")
        if signals.kind != "confidence":
            continue
        known = expit(from_losses(to_floats(losses.loc[ids])))
        apart = np.abs(known - expit(np.array(signals.signal[row][inside], dtype=np.float64)))
        if np.nanmax(apart, initial=0.0) > _TOLERANCE:
            raise InputError(
                f"row {row} of {path} is not the model of {run_dir}: its confidences differ by up "
                f"to {np.nanmax(apart):.2f}; train references for this run"
            )
