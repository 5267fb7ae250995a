"""Plan: what a Recorder was asked to do, checked, in one object."""

from __future__ import annotations

import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import torch

from indpriv import _checks
from indpriv._arrays import IntArray
from indpriv.errors import InputError
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.journal_state import LogState, state_to_resume
from indpriv.norm_log.reader import read_reference_positions
from indpriv.norm_log.recording_policy import DEFAULT_POLICY, RecordingPolicy
from indpriv.norm_log.records import Levels
from indpriv.norm_log.writer import LogHeader, fingerprint
from indpriv.recording.clipping.filtered import Filter
from indpriv.recording.clipping.individual import check_headroom
from indpriv.recording.compared.settings import PublicSettings
from indpriv.recording.losses import described_loss
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import described_parameters
from indpriv.recording.opacus.ranks import Ranks, check_together
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.run_attack import RunAttack
from indpriv.recording.training_data import TrainingData


@dataclass(frozen=True)
class Plan:
    """What a Recorder was asked to do, with every choice made; see `Recorder` for the options."""

    run_dir: Path
    data: TrainingData
    policy: RecordingPolicy
    run_id: str
    reference_positions: IntArray
    rounding: float
    rounding_mode: str
    individual_clipping: bool
    clip_headroom: float
    privacy_filter: Filter | None
    record_holdout: bool
    seeded: bool
    on_write_error: str
    resume_at: int | None
    attack: RunAttack | None
    clipping_norm_epsilon: float
    start: str | None
    strict: bool
    public_settings: PublicSettings | None
    sign_with: Any

    def __post_init__(self) -> None:
        _checks.check_choice("rounding_mode", self.rounding_mode, ("up", "nearest"))
        _checks.check_choice("on_write_error", self.on_write_error, ("stop", "continue"))
        _checks.check_clipping_norm_epsilon(self.clipping_norm_epsilon)
        if self.individual_clipping and self.rounding_mode != "up":
            raise InputError(
                f"rounding_mode={self.rounding_mode!r} with individual_clipping would clip "
                'examples below their recorded norms; pass rounding_mode="up"'
            )
        if self.attack is not None and self.resume_at is not None:
            raise InputError(
                "an attack cannot go on in a resumed run: what it saw of the first steps is lost; "
                "leave out attack="
            )
        if self.record_holdout and self.data.test_set is None:
            raise InputError(
                "record_holdout=True without a test_set; pass the data set whose norms are to be "
                "recorded as test_set="
            )

    @property
    def levels(self) -> Levels | None:
        """The log's rounding; None if it keeps norms in full."""
        return Levels(self.rounding, self.rounding_mode) if self.rounding else None

    def agreed(self, ranks: Ranks, run: OpacusRun, norm_pass: NormPass) -> tuple[Plan, LogHeader]:
        """The plan and the log's header, once all ranks agree; the first one's choices hold."""
        if ranks.size > 1 and self.on_write_error != "stop":
            raise InputError(
                f"on_write_error={self.on_write_error!r} with several ranks: the others would go "
                "on taking norms for a log that only the first rank knows to be lost; pass "
                'on_write_error="stop"'
            )
        run_id, positions = ranks.gather("attach", (self.run_id, self.reference_positions))[0]
        # What an account with known participation reads; for another sampler no other is supported.
        policy = self.policy if run.is_poisson else replace(self.policy, batch_norms=True)
        plan = replace(self, run_id=run_id, reference_positions=positions, policy=policy)
        header = plan._header(ranks, run, norm_pass)
        shared = {
            **vars(header),
            **run.shared_by_ranks,
            "resume_at": self.resume_at,
            "example_ids": fingerprint(self.data.ids),
        }
        caveats = shared.pop("norm_pass")["caveats"]  # each rank chooses its own fastest backend
        found = ranks.gather("attach", (shared, run.sampling_seed, caveats))
        check_together("attach", [part for part, _, _ in found], [seed for _, seed, _ in found])
        all_caveats = list(dict.fromkeys(caveat for *_, caveats in found for caveat in caveats))
        return plan, replace(header, norm_pass={**header.norm_pass, "caveats": all_caveats})

    def _header(self, ranks: Ranks, run: OpacusRun, norm_pass: NormPass) -> LogHeader:
        limit = self.privacy_filter
        if (run.clipping != "flat" or run.no_privacy) and (
            self.individual_clipping or limit or self.attack
        ):
            raise InputError(
                "individual clipping, privacy filters and attacks on the run need flat clipping "
                'with noise for max_grad_norm; leave them out, or use make_private(clipping="flat")'
            )
        void = [SEEDED] if self.seeded else []
        void += [run.no_privacy] if run.no_privacy else []
        return LogHeader(
            rounding=self.rounding,
            rounding_mode=self.rounding_mode,
            unit=self.data.unit,
            neighbouring="add_remove",
            sampler=run.sampler,
            individually_clipped=self.individual_clipping,
            norm_pass=norm_pass.to_header([*norm_pass.caveats, *void]),
            policy=self.policy.in_steps(run.steps_per_epoch).to_dict(),
            privacy_filter={}
            if limit is None
            else {"order": limit.order, "rdp_cap": limit.rdp_cap},
            run={
                "id": self.run_id,
                "clipping": "individual" if self.individual_clipping else run.clipping,
                "clip_headroom": self.clip_headroom,
                "clipping_norm_epsilon": self.clipping_norm_epsilon,
                "seeded": self.seeded,
                **({} if self.start is None else {"start": self.start}),
                "no_privacy": run.no_privacy,
                "ranks": ranks.size,
                "loss": described_loss(self.data.loss_fn),
                **_described(run),
            },
        )


def _described(run: OpacusRun) -> dict[str, Any]:
    """What the header of a log says about the optimizer, the sampler and the model."""
    optimizer = run.optimizer
    return {
        "optimizer": type(optimizer.original_optimizer).__name__,
        "learning_rate": _of_all_groups(optimizer, "lr"),
        "momentum": _of_all_groups(optimizer, "momentum"),
        "weight_decay": _of_all_groups(optimizer, "weight_decay"),
        "loss_reduction": optimizer.loss_reduction,
        "expected_batch_size": optimizer.expected_batch_size,
        "secure_mode": bool(optimizer.secure_mode),
        "sampler_class": run.sampler_class,
        **_truncation(run),
        "steps_per_epoch": run.steps_per_epoch,
        **described_parameters(run.whole.module),
        "versions": {
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "python": platform.python_version(),
        },
    }


def _truncation(run: OpacusRun) -> dict[str, int]:
    """The cap on batches; empty if there is none."""
    if run.sampler != "truncated_poisson":
        return {}
    return {"max_batch_size": int(run.batch_sampler.max_batch_size)}


def _of_all_groups(optimizer: Any, name: str) -> float | None:
    """A setting of the optimizer, as it is now; None if its groups differ or it has none."""
    values = {group.get(name) for group in optimizer.param_groups}
    (value,) = values if len(values) == 1 else (None,)
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Beginning:
    """Where recording begins: in a new log, or at a step of one that is resumed."""

    resume_at: int | None
    state: LogState | None

    @classmethod
    def of(cls, run_dir: Path, resume_at: int | Mapping[str, Any] | None) -> Beginning:
        """Look at a run directory; InputError unless recording can begin there."""
        step, run_id = (None, None) if resume_at is None else _checked_step(resume_at)
        state = state_to_resume(run_dir, step)
        if state is not None and run_id is not None and run_id != state.header["run"].get("id", ""):
            raise InputError(
                f"the checkpoint was saved while another run was recorded than that in {run_dir}; "
                "pass the run directory that belongs to it"
            )
        return cls(step, state)

    @property
    def run_id(self) -> str:
        """Of the run that is resumed, or a new one."""
        if self.state is None:
            return secrets.token_hex(8)
        return str(self.state.header["run"].get("id", ""))

    def policy(self, given: RecordingPolicy | None, **choices: Any) -> RecordingPolicy:
        """The given policy; else that of the log; else the default one with the choices made."""
        made = {name: value for name, value in choices.items() if value is not None}
        if given is not None:
            for name, value in made.items():
                raise InputError(
                    f"the Recorder has both {name}={value!r} and a policy, which already says this "
                    f"({given.describe()}); pass one of them"
                )
            return given
        if self.state is not None and not made and self.state.header.get("policy"):
            return RecordingPolicy.from_header(self.state.header)
        return RecordingPolicy(**made) if "every" in made else replace(DEFAULT_POLICY, **made)

    def headroom(self, given: float | None, *, individually: bool) -> float:
        """The given clip headroom; else that of the log, or the default; see `check_headroom`."""
        logged = None if self.state is None else self.state.header["run"].get("clip_headroom", 0.0)
        return check_headroom(given, individually=individually, logged=logged)

    def reference_positions(
        self, run_dir: Path, policy: RecordingPolicy, n_examples: int
    ) -> IntArray:
        """Positions of the reference examples: those of the log, or new random ones."""
        if self.state is not None and self.state.header["n_exact"]:
            return read_reference_positions(run_dir)
        wanted = policy.reference_examples
        if wanted > n_examples:
            raise InputError(
                f"reference_examples={wanted} is more than the {n_examples} training examples"
            )
        return np.sort(np.random.default_rng().choice(n_examples, wanted, replace=False))


def _checked_step(resume_at: int | Mapping[str, Any]) -> tuple[int, str | None]:
    """The step to resume at, and the run that it is a step of, if the caller said which."""
    if not isinstance(resume_at, Mapping):
        return _checks.check_positive_int("resume_at", resume_at, minimum=0), None
    if set(resume_at) != {"step", "run"} or not isinstance(resume_at["run"], str):
        raise InputError(
            f"resume_at has {sorted(map(str, resume_at))}; pass a step, or what "
            "Recorder.state_dict() returned"
        )
    return _checks.check_positive_int("resume_at", resume_at["step"], minimum=0), resume_at["run"]
