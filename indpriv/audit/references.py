"""Signals of reference models for the attacks on a run: do they belong to it? Sensitive."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from scipy.special import expit

from indpriv._columns import to_floats
from indpriv._files import first_at
from indpriv.attack_signals import AttackSignals, from_losses
from indpriv.attacks.train_references import CONFIDENCE, open_signals
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.schema import read_run_json

_TOLERANCE = 0.01  # of a probability; losses were computed in the precision of training


def read_references(
    path: Path, run_dir: Path, examples: ExampleTable | None
) -> Mapping[str, AttackSignals]:
    """The signals in a folder, by name, once it is clear that they are of this run.

    Args:
        path: a folder of `train_references(..., audited=...)`, or an .npz file.
        run_dir: the run that is attacked.
        examples: its examples and losses.

    Raises:
        InputError: signals of other data, of other examples or of another run.
    """
    found = open_signals(path)
    if examples is None:
        raise InputError(f"{run_dir} has no losses of its examples, which attacks compare with")
    fingerprint = _fingerprint_of(run_dir)
    for signals in found.values():
        if signals.audited is None:
            raise InputError(
                f"{path} holds a study, without this run; train references for it: "
                f"indpriv.attacks.train_references with audited= of {run_dir}"
            )
        if signals.fingerprint and fingerprint and signals.fingerprint != fingerprint:
            raise InputError(
                f"{path} holds signals of other data than {run_dir} (another fingerprint)"
            )
    _check_is_of_run(found[CONFIDENCE], examples, path, run_dir)
    return found


def unchecked_facts(run_dir: Path, references: Mapping[str, AttackSignals]) -> tuple[str, ...]:
    """What `read_references` could not check about these signals, in sentences."""
    if not references:
        return ()
    found, signals = [], references[CONFIDENCE]
    if not (signals.fingerprint and _fingerprint_of(run_dir)):
        where = f"run.json of {run_dir}" if signals.fingerprint else "the file of the signals"
        found.append(
            f"No fingerprint of the data is in {where}: that the reference models were trained on "
            "the data of this run was not checked."
        )
    if signals.kind != CONFIDENCE:
        found.append(
            "The signals are no confidences: that they are of this run's model was not checked."
        )
    return tuple(found)


def _fingerprint_of(run_dir: Path) -> str | None:
    found = first_at(read_run_json(run_dir), ("data", "fingerprint"))
    return None if found is None else str(found)


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
        loss, signal = to_floats(losses.loc[ids]), np.float64(signals.signal[row][inside])
        if len(ids) and (np.isnan(loss) | np.isnan(signal)).all():
            raise InputError(
                f"row {row} of {path} has no confidence that can be compared with a loss of "
                f"{run_dir}; train references for this run"
            )
        apart = np.abs(expit(from_losses(loss)) - expit(signal))
        if np.nanmax(apart, initial=0.0) > _TOLERANCE:
            raise InputError(
                f"row {row} of {path} is not the model of {run_dir}: its confidences differ by up "
                f"to {np.nanmax(apart):.2f}; train references for this run"
            )
