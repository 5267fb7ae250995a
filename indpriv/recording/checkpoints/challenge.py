"""Challenges a log: are its norms, at steps drawn in secret, those of checkpoints and data?

A signature says whose log it is, this whether it is of the training that left these checkpoints.
Nothing here sees how batches were drawn, or steps without a checkpoint or without norms. Sensitive.
"""

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from indpriv import _checks
from indpriv._facts import FAILED, FILES, NOT_CHECKED, PASSED, Fact
from indpriv._types import StageProgress, silent
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import open_run
from indpriv.recording.checkpoints.audit_spec import AuditSpec, load_spec
from indpriv.recording.checkpoints.replay import CheckpointPass
from indpriv.recording.checkpoints.saved_models import StepOf, discover

TOLERANCE = 5e-3  # of a norm, beside the log's rounding: machines and backends differ by less
_CLIPPINGS = ("flat", "individual", "quantile")  # under which the log has norms of gradients
_SHARE = 0.2  # of the steps: a forgery of as many is what the odds are about
_HALF = 0.25, 0.05  # of a norm and of the clipping norm: half precision moves few norms by more
_MOVED = 0.05  # share of the norms that are not that few any more
_HALF_SLACK = 2**-5  # that a recorder adds to norms in half precision, at most


def challenge(
    checkpoints: str | Path,
    spec: AuditSpec | str,
    run_dir: str | Path,
    n: int = 10,
    *,
    step_of: StepOf = (),
    device: str = "cpu",
    tell: StageProgress = silent,
) -> list[Fact]:
    """Compute norms at n random steps from checkpoints and data, and compare the log's with them.

    If training used `torch.autocast`, call it under the same autocast. Where the log says that
    training used half precision, norms that differ by what it can explain are "not checked".

    Args:
        checkpoints: folder of the checkpoints, as of `replay`.
        spec: model and data of the run, as of `replay`.
        run_dir: the run whose log is challenged.
        n: number of steps, drawn by the operating system from those with norms and a checkpoint.
        step_of: steps of checkpoints that do not tell them; see `StepOptions`.
        device: device to compute on.
        tell: called as tell(stage, done, total) after each step.

    Returns:
        whether examples and norms agree, and that noise is not seen; details are sensitive.

    Raises:
        InputError: checkpoints, spec or log cannot be read, no step has both, or norms under this
            clipping, of this model or of this data set cannot be compared.
    """
    _checks.check_positive_int("challenges", n)
    spec = load_spec(spec) if isinstance(spec, str) else spec
    run = open_run(run_dir)
    log, header = run.log, run.state.header
    if (kind := header["run"].get("clipping", "flat")) not in _CLIPPINGS:
        raise InputError(f"{run_dir}: norms under {kind} clipping cannot be challenged; replay it")
    found = discover(Path(checkpoints), spec.load, step_of)
    found.check(checkpoints)
    saved = {model.step: model.path for model in found.models}
    with_norms = {*log.recorded_steps.tolist()}
    with_norms |= {*log.batch_norms.steps.tolist()} if log.batch_norms else set()
    there = sorted(with_norms & saved.keys())
    if not there:
        raise InputError(
            f"{checkpoints} has checkpoints of steps {sorted(saved)[:5]}, {run_dir} has norms of "
            f"{sorted(with_norms)[:5]}, and none has both; pass checkpoints of this run"
        )
    drawn = sorted(secrets.SystemRandom().sample(there, min(n, len(there))))
    made = CheckpointPass(spec, saved[drawn[0]], device)
    if made.caveats:
        raise InputError(f"norms cannot be compared with training's: {'; '.join(made.caveats)}")
    own, data = (np.asarray(ids).astype(str) for ids in (log.example_ids, spec.ids))
    place = pd.Index(data).get_indexer(pd.Index(own))  # of the log's examples in the data, or -1
    differ, n_norms, far = list[str](), 0, 0
    half = any(one.training and one.training.clip_rounding for one in run.state.sessions)
    batches = None if log.batch_norms is None else log.batch_norms.read(0, log.n_examples)
    headroom = (header["run"].get("clip_headroom") or 0.0) * log.individually_clipped
    slack = made.norm_pass.slack  # of both, and what a log says without half precision is not more
    said = min(header["norm_pass"].get("slack") or 0.0, slack + _HALF_SLACK * half)
    slack += TOLERANCE + said

    def differs(codes: Any, norms: Any, clip: float, share: float, of_clip: float) -> Any:
        """Whether each code is none that its norm, give or take this room, is rounded to."""
        room = norms * share + of_clip * clip
        bounds = np.maximum(norms - room, 0), norms + room
        low, high = (log.levels.encode(one, clip) if log.levels else one for one in bounds)
        return (codes < low) | (codes > high)

    with made.norm_pass:
        for number, step in enumerate(drawn, 1):
            norms = made.norms_at(saved[step])[0].norms
            clip = float(log.settings.max_grad_norm[step])
            # Positions and codes of each group of norms, and what was added to these norms.
            groups = [
                (np.arange(log.n_examples), codes, headroom)
                for codes in log.records[log.recorded_steps == step].read(0, log.n_examples)
            ]
            if batches is not None:
                at = batches.step == step
                groups.append((batches.position[at], batches.norm[at], 0.0))
            for positions, codes, added in groups:
                known = place[positions] >= 0
                positions, codes = positions[known], codes[known]
                now = norms[place[positions]] + added * clip
                wrong = differs(codes, now, clip, slack, 1e-6)
                far += int(differs(codes, now, clip, *_HALF).sum())
                differ += [f"{own[one]} at step {step}" for one in positions[wrong]]
                n_norms += len(now)
            tell("challenging", number, len(drawn))
    text = (
        f"{n_norms:,} norms at {len(drawn)} of the {len(there)} steps with a checkpoint (of "
        f"{log.total_steps}), drawn in secret: {', '.join(map(str, drawn))}"
    )
    status = FAILED if differ else PASSED
    if not differ:
        missed = max(100 * (1 - _SHARE) ** len(drawn), 0.01) if len(drawn) < len(there) else 0
        text += f"; a log forged in a fifth of them would be missed by {missed:.2g} % of challenges"
    else:
        text = f"{len(differ):,} of {text} differ, e.g. of example {differ[0]}"
        if half and far <= _MOVED * n_norms:
            status = NOT_CHECKED
            text = (
                f"cannot tell: {text}, which half precision can explain, and the log says that "
                "training used it; challenge under the same torch.autocast"
            )
    only = [*own[place < 0].tolist(), *np.setdiff1d(data, own).tolist()]
    few = f"{len(only):,} are only in the log or only in the data, e.g. {only[0]}" if only else ""
    checks = (
        ("examples", FAILED if few else PASSED, few or "the same in log and data"),
        ("norms", status, text),
        ("noise", NOT_CHECKED, "a forged noise multiplier is not seen"),
    )
    return [Fact("challenge", "check", *one, bears_on=FILES, private=True) for one in checks]
