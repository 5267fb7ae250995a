"""Recorder: hangs on an Opacus run and writes its NormLog and ExampleTable. Its output is sensitive.

What flows: at attach, and right after the update before each step that the policy names, one pass over the training set
takes every example's gradient norm at the parameters that this step starts from; at each step the optimizer's realised
settings are read; at the end the final model's losses are taken.
"""

from __future__ import annotations

import platform
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import opacus
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn
from torch.utils.data import DataLoader, Dataset

from indpriv import _checks
from indpriv._files import write_json
from indpriv.errors import InputError
from indpriv.example_table import check_metadata, check_storable
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import UNITS, check_ids, check_unit_ids
from indpriv.norm_log.reader import read_reference_positions, read_state
from indpriv.norm_log.recording_policy import DEFAULT_POLICY, RecordingPolicy
from indpriv.norm_log.writer import LogHeader, NormLogWriter, fingerprint
from indpriv.recording.clipping.filtered import Filter
from indpriv.recording.clipping.individual import check_headroom
from indpriv.recording.data_passes import Examples, SharedPass, example_table
from indpriv.recording.environment import surroundings
from indpriv.recording.holdout import HoldoutLog
from indpriv.recording.norms.batches import LossFn, check_losses
from indpriv.recording.norms.model_checks import check_buffers
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.opacus.ranks import Ranks, check_together
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.session import Plan, Session


class Recorder:
    """Records one Opacus run.

    >>> from indpriv.recording import Recorder
    >>> recorder = Recorder("runs/mine", dataset=train_set, loss_fn=loss_fn, every=200)        # doctest: +SKIP
    >>> with recorder.attach(model, optimizer, loader):                                        # doctest: +SKIP
    ...     for inputs, targets in loader: ...
    """

    @_checks.accepts_former_names
    def __init__(
        self,
        run_dir: str | Path,
        *,
        dataset: Dataset[Any],
        loss_fn: LossFn,
        every: int | str | None = None,
        policy: RecordingPolicy | None = None,
        rounding: float = 0.01,
        rounding_mode: str = "up",
        reference_examples: int | None = None,
        batch_norms: bool | None = None,
        individual_clipping: bool = False,
        clip_headroom: float | None = None,
        privacy_filter: Filter | None = None,
        test_set: Dataset[Any] | None = None,
        record_holdout: bool = False,
        metadata: pd.DataFrame | None = None,
        test_metadata: pd.DataFrame | None = None,
        example_ids: ArrayLike | None = None,
        unit_ids: ArrayLike | None = None,
        unit: str = "example",
        seeded: bool = False,
        resume_at: int | Mapping[str, Any] | None = None,
        on_write_error: str = "stop",
        run_info: Mapping[str, Any] | None = None,
    ) -> None:
        """Check everything that can be checked before training.

        Args:
            run_dir: directory of the run; created (0700), and may not hold another run.
            dataset: the training set the loader draws from, map-style, of (inputs, targets).
            loss_fn: `loss_fn(outputs, targets)` -> per-example losses (batch,).
            every: K: full norm passes before steps 0, K, 2K, ...; or "epoch", "2 epochs", ...; or "once". 1 makes the
                account exact. Default: after gaps of 4, 8, 16, ... steps, at most an epoch.
            policy: when to take which norms, in one object, instead of every, reference_examples and batch_norms; a resumed
                run without any of them goes on with the log's own.
            rounding: of norms, as a fraction of max_grad_norm; 0 keeps float64.
            rounding_mode: "up" (never under-reports) or "nearest" (the paper's; the account is an estimate).
            reference_examples: so many random examples get exact norms at every step, default none (they measure what K costs
                in fidelity; each step then pays one pass over them).
            batch_norms: keep the norms that DP-SGD computes of each sampled batch, default not: they cost next to nothing,
                and sharpen between_records="last" and "closest".
            individual_clipping: clip each example at its last recorded level instead of max_grad_norm, which makes the
                account exact at any K (Yu et al. 2023, Algorithm 3); the noise stays as it is.
            clip_headroom: how far above its norm that level is, as a fraction of max_grad_norm in [0, 1], default 0.1: room
                for norms to grow until the next record. It enters the account; the log records the levels.
            privacy_filter: an `indpriv.PrivacyFilter`: who would pass its cap is clipped at 0 from then on, which guarantees
                the cap to everybody: all rows of a unit are charged, and leave, together. With individual_clipping an example is charged for its level, else for
                max_grad_norm.
            test_set: of (inputs, targets); its final losses serve attacks and group accuracy.
            record_holdout: also record the norms of the test set, in RUN/holdout: what its epsilon would have been on the
                same trajectory, which an attack judged by epsilon needs. Each full record then takes a pass over it too.
            metadata: one row per training example, indexed by example id: columns to compare groups by.
            test_metadata: likewise for the test set, indexed 0..n_test-1.
            example_ids: (n,) unique ids in the order of the data set; default 0..n-1.
            unit_ids: (n,) the person or client each row belongs to; needed where the unit is not the example.
            unit: "example", "user" or "client".
            seeded: sampling or noise come from a published or reproducible seed: no privacy, and labelled so.
            resume_at: continue the log in run_dir at this step, the one of the checkpoint that training resumes from, or
                with what `state_dict` gave for that checkpoint; whatever was logged beyond it is void.
            on_write_error: where the log cannot be written (a full disk), "stop" training, or "continue" it without
                recording; what was logged before stays, and the log says that it was not closed.
            run_info: what else to keep in run.json, e.g. the training configuration. It tells by itself the processor, the
                number of threads, and the git commit of the working folder (`code_commit`; yours counts where you give one).

        Raises:
            InputError: an empty data set, metadata or ids that do not fit it, both a policy and an argument that it
                replaces, or a run directory in use.
        """
        self.run_dir = Path(run_dir)
        self._dataset, self._test_set, self._loss_fn = dataset, test_set, loss_fn
        n = _length(dataset)
        self._ids: NDArray[np.generic] = (
            np.arange(n) if example_ids is None else np.asarray(example_ids)
        )
        check_ids(self._ids, n)
        self._unit = _checks.check_choice("unit", unit, UNITS)
        self._unit_ids = check_unit_ids(unit_ids, n, self._unit)
        self._rounding = _checks.check_rounding(rounding)
        self._rounding_mode = _checks.check_choice(
            "rounding_mode", rounding_mode, ("up", "nearest")
        )
        if individual_clipping and self._rounding_mode != "up":
            raise InputError(
                f"rounding_mode={rounding_mode!r} with individual_clipping would clip examples below their recorded norms; "
                'pass rounding_mode="up"'
            )
        self._individual_clipping = individual_clipping
        self._clip_headroom = check_headroom(clip_headroom, individually=individual_clipping)
        self._filter = privacy_filter
        choices = {
            "every": every,
            "reference_examples": reference_examples,
            "batch_norms": batch_norms,
        }
        self._policy = _policy(policy, choices)
        if self._policy.reference_examples > n:
            raise InputError(
                f"reference_examples={self._policy.reference_examples} is more than the {n} training examples"
            )
        self._exact = np.sort(
            np.random.default_rng().choice(n, self._policy.reference_examples, replace=False)
        )
        check_metadata(metadata, self._ids, "train")
        self._metadata, self._test_metadata = metadata, test_metadata
        if test_set is not None:
            _length(test_set)
        elif record_holdout:
            raise InputError(
                "record_holdout=True without a test_set; pass test_set=, whose norms are to be recorded"
            )
        self._record_holdout = record_holdout
        if test_metadata is not None:
            check_metadata(test_metadata, np.arange(_length(test_set)), "test")
        check_storable(metadata, test_metadata)
        self._seeded = seeded
        self._resume_from = resume_at if isinstance(resume_at, Mapping) else None
        self._resume_at = _step_of(resume_at) if isinstance(resume_at, Mapping) else resume_at
        self._run_id = secrets.token_hex(8)
        self._on_write_error = _checks.check_choice(
            "on_write_error", on_write_error, ("stop", "continue")
        )
        self._session: Session | None = None
        self._run_info = dict(run_info or {})
        self._attached = False
        policy_given = policy is not None or any(choice is not None for choice in choices.values())
        self._check_run_dir(policy_given=policy_given, clip_headroom=clip_headroom)

    def _check_run_dir(self, *, policy_given: bool, clip_headroom: float | None) -> None:
        journal = self.run_dir / "journal.jsonl"
        if self._resume_at is None:
            if journal.exists():
                raise InputError(
                    f"{self.run_dir} already holds a recorded run; choose another directory, remove it, or continue it "
                    "with resume_at=STEP"
                )
            return
        _checks.check_positive_int("resume_at", self._resume_at, minimum=0)
        state = read_state(self.run_dir)
        self._run_id = state.header["run"].get("id", "")
        if self._resume_from is not None and self._resume_from["run"] != self._run_id:
            raise InputError(
                f"the checkpoint was saved while another run was recorded than that in {self.run_dir}; pass the run directory "
                "that belongs to it"
            )
        if not policy_given and state.header.get("policy"):
            self._policy = RecordingPolicy.from_header(state.header)
        if self._individual_clipping:
            logged_headroom = state.header["run"].get("clip_headroom", 0.0)
            self._clip_headroom = check_headroom(
                clip_headroom, individually=True, logged=logged_headroom
            )
        if state.header["n_exact"]:
            self._exact = read_reference_positions(self.run_dir)
        logged = state.total_steps
        if self._resume_at > logged:
            raise InputError(
                f"resume_at={self._resume_at}, but the log in {self.run_dir} proves only {logged} steps; the steps between "
                f"would be missing: resume from a checkpoint at step {logged} or before"
            )

    @contextmanager
    def attach(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]
    ) -> Iterator[Recorder]:
        """Record while the block trains. The loop, the loader and the optimizer are used unchanged.

        Where several ranks train (Opacus's DPDDP), each attaches a Recorder made with the same arguments: full passes are
        divided between them, and the first writes the log. To resume, all must see the run directory.

        Args:
            model: as PrivacyEngine.make_private returned it; likewise optimizer and loader.
            optimizer: an Opacus DPOptimizer, flat clipping, in any grad_sample_mode.
            loader: the loader that the loop draws from (BatchMemoryManager may wrap it inside the block).

        Raises:
            InputError: a set-up that cannot be accounted soundly; nothing has been trained yet.
            EvidenceError: during training, once the evidence would be wrong (a replaced hook, a stopped accountant).
        """
        if self._attached:
            raise InputError(
                f"the Recorder of {self.run_dir} was attached before: a second block would begin at step 0 again; put the "
                "whole training into one block, or make a new Recorder with resume_at=STEP"
            )
        run = OpacusRun(model, optimizer, loader, len(self._ids))
        device = next(run.module.parameters()).device
        examples = Examples(self._dataset, loader.collate_fn, device)
        inputs, targets = next(examples.batches(256))
        with (
            NormPass(model, self._loss_fn, inputs, targets) as norm_pass,
            closing(Ranks(optimizer)) as ranks,
            ExitStack() as logs,
        ):
            norm_pass.check_training(model, inputs, targets)
            check_buffers(run.module, inputs)
            self._probe_test_set(run, norm_pass)
            self._attached = True
            header = self._agree(ranks, run, norm_pass)
            writer: NormLogWriter | None = None
            holdout: HoldoutLog | None = None
            if ranks.writes:
                self.run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
                writer = NormLogWriter(self.run_dir, header, self._ids, self._unit_ids, self._exact)
                logs.callback(writer.close)
                if self._record_holdout:
                    holdout = HoldoutLog(self.run_dir, header, norm_pass, self._test_examples(run))
                    logs.callback(holdout.close)
                told = {**surroundings(device), **self._run_info, "recorder": dict(header.run)}
                write_json(self.run_dir / "run.json", told)
            shared_pass = SharedPass(ranks, run.module, norm_pass, examples, self._ids)
            session = Session(
                self.run_dir,
                self._plan(),
                run,
                shared_pass,
                writer,
                header.norm_pass["caveats"],
                holdout,
            )
            self._session = session
            try:
                with session.recording():
                    yield self
                session.write(session.finish)  # before anything else can fail: the run is complete
                session.write(lambda _: self._write_examples(run, norm_pass, examples))
            finally:
                self._session = None

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint, between two steps of an attached block, and to resume with: resume_at=.

        The log is brought up to date first, so that it proves every step of the checkpoint whatever happens next.

        Raises:
            InputError: the Recorder is not attached.
        """
        if self._session is None:
            raise InputError(
                "the Recorder is not attached; call state_dict() inside the block of attach(...)"
            )
        return {"step": self._session.bring_up_to_date(), "run": self._run_id}

    def _agree(self, ranks: Ranks, run: OpacusRun, norm_pass: NormPass) -> LogHeader:
        """The header of the log, once the ranks of the run agree on it: what is drawn by chance is the first rank's."""
        if ranks.size > 1 and self._on_write_error != "stop":
            raise InputError(
                f"on_write_error={self._on_write_error!r} with several ranks would leave all others taking norms for a log that "
                'only the first one knows to be lost; pass "stop"'
            )
        self._run_id, self._exact = ranks.gather("attach", (self._run_id, self._exact))[0]
        header = self._header(ranks, run, norm_pass)
        alike = {
            **vars(header),
            **run.shared_by_ranks,
            "resume_at": self._resume_at,
            "example_ids": fingerprint(self._ids),
        }
        caveats = alike.pop("norm_pass")["caveats"]  # each rank finds its own fastest way
        found = ranks.gather("attach", (alike, run.sampling_seed, caveats))
        check_together("attach", [one for one, _, _ in found], [seed for _, seed, _ in found])
        every = list(dict.fromkeys(caveat for _, _, caveats in found for caveat in caveats))
        return replace(header, norm_pass={**header.norm_pass, "caveats": every})

    def _plan(self) -> Plan:
        units = (
            None
            if self._unit_ids is None or self._unit == "example"
            else pd.factorize(self._unit_ids)[0]
        )
        return Plan(
            run_id=self._run_id,
            ids=self._ids,
            exact=self._exact,
            policy=self._policy,
            levels=Levels(self._rounding, self._rounding_mode) if self._rounding else None,
            individual_clipping=self._individual_clipping,
            clip_headroom=self._clip_headroom,
            privacy_filter=self._filter,
            units=None if units is None else units.astype(np.int64),
            seeded=self._seeded,
            resume_at=self._resume_at,
            stops_on_write_error=self._on_write_error == "stop",
        )

    def _probe_test_set(self, run: OpacusRun, norm_pass: NormPass) -> None:
        """Find out before training whether the final losses of the test set can be taken."""
        if self._test_set is None:
            return
        try:
            with norm_pass.evaluation() as model:
                inputs, targets = next(self._test_examples(run).batches(2))
                check_losses(self._loss_fn(model(inputs), targets), targets)
        except StopIteration as error:
            raise InputError(
                "the test set is empty; pass test_set=None to record without one"
            ) from error
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise InputError(f"the model and loss_fn do not take the test set: {error}") from error

    def _test_examples(self, run: OpacusRun) -> Examples:
        if self._test_set is None:
            raise InputError("there is no test set")
        return Examples(self._test_set, run.loader.collate_fn, next(run.module.parameters()).device)

    def _header(self, ranks: Ranks, run: OpacusRun, norm_pass: NormPass) -> LogHeader:
        caveats = list(norm_pass.caveats)
        if self._seeded:
            caveats.append(SEEDED)
        optimizer = run.optimizer
        return LogHeader(
            rounding=self._rounding,
            rounding_mode=self._rounding_mode,
            unit=self._unit,
            neighbouring="add_remove",
            sampler=run.sampler,
            individually_clipped=self._individual_clipping,
            norm_pass={
                "backend": norm_pass.backend,
                "fallback": norm_pass.fallback,
                "slack": norm_pass.slack,
                "caveats": caveats,
            },
            policy=self._policy.in_steps(run.steps_per_epoch).to_dict(),
            privacy_filter={}
            if self._filter is None
            else {"order": self._filter.order, "rdp_cap": self._filter.rdp_cap},
            run={
                "optimizer": type(optimizer.original_optimizer).__name__,
                "id": self._run_id,
                "clipping": "individual" if self._individual_clipping else "flat",
                "clip_headroom": self._clip_headroom,
                "loss_reduction": optimizer.loss_reduction,
                "expected_batch_size": optimizer.expected_batch_size,
                "secure_mode": bool(optimizer.secure_mode),
                "seeded": self._seeded,
                "sampler_class": run.sampler_class,
                "ranks": ranks.size,
                "steps_per_epoch": run.steps_per_epoch,
                "n_parameters": sum(p.numel() for p in run.module.parameters() if p.requires_grad),
                "trainable": sorted(
                    name for name, p in run.module.named_parameters() if p.requires_grad
                ),
                "versions": {
                    "torch": torch.__version__,
                    "opacus": opacus.__version__,
                    "python": platform.python_version(),
                },
            },
        )

    def _write_examples(self, run: OpacusRun, norm_pass: NormPass, examples: Examples) -> None:
        with norm_pass.evaluation() as model:
            table = example_table(
                model,
                self._loss_fn,
                examples,
                None if self._test_set is None else self._test_examples(run),
                ids=self._ids,
                unit_ids=self._unit_ids,
                metadata=self._metadata,
                test_metadata=self._test_metadata,
            )
        table.to_parquet(self.run_dir / "examples.parquet")


def _policy(policy: RecordingPolicy | None, choices: Mapping[str, Any]) -> RecordingPolicy:
    """The policy that was given, or the default one but for the choices that are not None."""
    made = {name: value for name, value in choices.items() if value is not None}
    if policy is None:
        return RecordingPolicy(**made) if "every" in made else replace(DEFAULT_POLICY, **made)
    for name, value in made.items():
        raise InputError(
            f"the Recorder has both {name}={value!r} and a policy, which says so itself ({policy.describe()}); pass one "
            "of them"
        )
    return policy


def _step_of(state: Mapping[str, Any]) -> int:
    """The step of a checkpoint's state; InputError where it is not what `Recorder.state_dict` gave."""
    if set(state) != {"step", "run"} or not isinstance(state["run"], str):
        raise InputError(
            f"resume_at has {sorted(map(str, state))}; pass a step, or what Recorder.state_dict() gave"
        )
    return _checks.check_positive_int("resume_at", state["step"], minimum=0)


def _length(dataset: Any) -> int:
    try:
        return len(dataset)
    except TypeError as error:
        raise InputError(
            f"{type(dataset).__name__} has no length; a Recorder needs a map-style data set, since Poisson sampling does"
        ) from error
