"""One attachment of a Recorder: from what Opacus does at each step to the log. Sensitive.

Norms are taken right after an update and written right after the next one, since only then is it
known which max_grad_norm their step ran at (a scheduler may change it in between).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import numpy as np
from torch import Tensor

from indpriv._arrays import IntArray
from indpriv.errors import EvidenceError, InputError
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.reader import read_left_out
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.step_settings import StepSetting
from indpriv.norm_log.validation import check_norms
from indpriv.norm_log.writer import fingerprint
from indpriv.recording.clipping.filtered import FilteredClipping
from indpriv.recording.clipping.individual import ClipLevels
from indpriv.recording.compared.findings import say
from indpriv.recording.compared.training import Comparison
from indpriv.recording.data_passes import Examples, SharedPass, norms_of
from indpriv.recording.interrupts import deferred_interrupts
from indpriv.recording.opacus.clipping_watch import Thresholds
from indpriv.recording.opacus.ranks import Batch, check_together, whole_batch
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.run_attack import StartedAttack
from indpriv.recording.opacus.watch import TrainedBatch, Watch
from indpriv.recording.plan import Plan
from indpriv.recording.random_states import fingerprint_of_state
from indpriv.recording.run_log import RunLog, TakenNorms

_AUGMENTED = (
    "items of the data set are random (augmentation?), so the recorded norms belong to another "
    "random draw than training's; batch norms and known participation make an exact account"
)
_ON_TRUST = ("rows",)  # a random data set is no reason for a warning


class Session:
    """Takes norms between updates, compares them with training's, and hands them to the log."""

    def __init__(
        self,
        plan: Plan,
        run: OpacusRun,
        shared_pass: SharedPass,
        log: RunLog,
        *,
        caveats: list[str],
        holdout: Examples | None,
        attack: StartedAttack | None,
    ) -> None:
        """Prepare to record; nothing is changed yet.

        The caveats say why an account of this session is an estimate, as far as known now; holdout
        is the test examples, if this rank records their norms; attack watches every update.
        """
        self._plan, self._run, self._pass, self._log = plan, run, shared_pass, log
        self._caveats, self._holdout = list(caveats), holdout
        self._policy = plan.policy.in_steps(run.steps_per_epoch)
        first = plan.resume_at or 0
        compared = partial(
            Comparison,
            run,
            shared_pass.examples,
            plan.data.loss_fn,
            plan.public_settings,
            first,
            shared_pass.ranks,
        )
        self._watch = Watch(run, compared, steps_before=first, attack=attack)
        self._step = plan.resume_at or 0
        self._taken: TakenNorms | None = None  # before the coming step
        self._batch: Batch | None = None  # of the current step
        self._limits: tuple[float, ...] = ()  # per layer, at which norms were taken
        self._clip_levels: ClipLevels | None = None
        if plan.individual_clipping:
            self._clip_levels = ClipLevels(plan.levels, plan.clip_headroom)
        self._filtered: FilteredClipping | None = None
        if plan.privacy_filter is not None:
            self._filtered = FilteredClipping(
                plan.privacy_filter, self._clip_levels, len(plan.data.ids), plan.data.unit_numbers
            )
        self._training_seconds = self._training_since = 0.0
        self._first_draw = ""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Watch the run while the block trains; what was seen is logged when it ends."""
        if self._plan.resume_at is not None:
            self._resume()
        self._take()
        try:
            with self._watch.watching(
                self._before_step, self._after_step, thresholds=self._thresholds()
            ):
                self._training_since = time.perf_counter()
                yield
            # What was drawn since the last step.
            self._exchange("the end of the block", None, None)
        finally:  # also after Ctrl-C and errors, so that the steps that were taken are logged
            self.bring_up_to_date()

    def _resume(self) -> None:
        self._log.truncate(self._step)
        self._pass.ranks.gather("the start", None)  # no rank reads the log before it was truncated
        if self._clip_levels is not None and self._step:
            self._clip_levels.restore(self._plan.run_dir)
        if self._filtered is not None and self._step:
            run_dir = self._plan.run_dir
            resumed = open_run(run_dir)
            self._filtered.restore(resumed.log, read_left_out(resumed.state))

    def bring_up_to_date(self) -> int:
        """Log every step that was taken, and return their number."""
        with deferred_interrupts():
            self._log.flush(self.counts, self._filtered)
        return self._step

    def counts(self) -> SessionCounts:
        """What has been counted in this session."""
        self._first_draw = self._first_draw or fingerprint_of_state(
            self._watch.first_random_state, self._plan.run_id
        )
        draws, training = self._watch.counts()
        training.training_seconds = round(self._training_seconds, 6)
        training.ranks, training.first_draw = self._pass.ranks.size, self._first_draw
        if self._policy.batch_norms and training.ranks == 1:
            training.took_part = fingerprint(self._watch.tally.took_part)
        return SessionCounts(
            from_step=self._plan.resume_at or 0,
            seeded=self._plan.seeded,
            caveats=tuple(self._caveats),
            sampler=self._run.sampler,
            draws=draws,
            training=training,
            noise=self._watch.noise,
        )

    def _thresholds(self) -> Thresholds | None:
        """What examples are clipped at, if it is not max_grad_norm."""
        filtered = self._filtered
        if filtered is None:
            return None if self._clip_levels is None else self._clip_levels.thresholds

        def charged(positions: IntArray, max_grad_norm: float) -> Tensor:
            # Before the first batch of the step is clipped.
            filtered.charge(self._step, self._watch.coming_setting(max_grad_norm))
            return filtered.thresholds(positions, max_grad_norm)

        return charged

    def _before_step(self, setting: StepSetting, trained: TrainedBatch | None) -> None:
        """Keep the norms that training clips at this step; compare them with the recorded ones."""
        self._batch = None
        if self._taken is not None and self._limits != self._watch.limits:
            raise InputError(
                "the clipping norms per layer moved after the norms of this step were recorded, "
                "which are of what clipping leaves; move them in the optimizer's step hook, before "
                "the update ends"
            )
        recorded = None if self._taken is None else self._taken.full
        needed = recorded is not None or self._policy.batch_norms
        batch = self._exchange(
            f"step {self._step}", setting, trained, with_norms=needed or self._filtered is not None
        )
        if self._filtered is not None:
            self._filtered.charge(self._step, setting)  # also if the batch is empty
            if batch is not None and not np.isfinite(batch[1]).all():
                raise EvidenceError(
                    f"a gradient of step {self._step} is infinite or NaN: even clipped at 0 it "
                    "would reach the parameters; look at the loss, or clamp it"
                )
        if batch is None or not needed:
            return
        positions, norms = batch
        check_norms(norms, self._plan.data.ids[positions])  # before a NaN reaches the parameters
        norm_pass = self._pass.norm_pass
        if self._watch.random_rows and _AUGMENTED not in self._caveats:
            self._caveats.append(_AUGMENTED)
        # Norms of another draw of dropout or augmentation tell nothing about these.
        if recorded is not None and not (norm_pass.caveats or self._watch.random_rows):
            self._watch.tally.compare(
                recorded.norms[positions],
                norms,
                setting.max_grad_norm,
                ghost_slack=norm_pass.slack if self._run.is_ghost else None,
            )
        safe = norms * (1 + norm_pass.slack)
        self._batch = positions, self._run.contributions(safe, setting)

    def _exchange(
        self,
        moment: str,
        setting: StepSetting | None,
        trained: TrainedBatch | None,
        *,
        with_norms: bool = False,
    ) -> Batch | None:
        """Exchange what the ranks saw; return the whole batch, if norms were asked for."""
        ranks = self._pass.ranks
        norms = trained.norms.cpu().numpy() if trained is not None and with_norms else None
        positions = None if trained is None else trained.positions
        parts = ranks.gather(moment, self._watch.to_message(setting, positions, norms))
        check_together(
            moment, [part.shared for part in parts], [part.sampling_seed for part in parts]
        )
        others = [part for rank, part in enumerate(parts) if rank != ranks.rank]
        self._watch.found_by_others = [part.found for part in others]
        for part in others:
            self._watch.tally.add(part.counted)
        return whole_batch(moment, parts)

    def _after_step(self, setting: StepSetting) -> None:
        self._training_seconds += time.perf_counter() - self._training_since
        with deferred_interrupts():
            if self._clip_levels is not None:
                self._clip_levels.end_record(setting.max_grad_norm)
            taken, self._taken = self._taken, None
            if taken is not None:
                taken = taken.map(lambda norms: self._run.contributions(norms, setting))
                self._log.add_record(self._step, taken, setting)
            self._log.add_step(setting, self._batch)
            self._step += 1
            if self._policy.due(self._step) or self._log.is_due:
                self._log.flush(self.counts, self._filtered)
        self._say(self._watch.news)
        if not self._log.is_lost:
            self._take()
        self._training_since = time.perf_counter()

    def _say(self, news: list[str]) -> None:
        """Warn at once of what makes the guarantee less than supported; strict stops training."""
        found, said = self._watch.compared, set[str]()
        for key in news:
            one = found[key]
            if (key in _ON_TRUST and not one.refuted) or one.detail in said:
                continue
            said.add(one.detail)
            say(CHECKS[key], one.detail, refuted=bool(one.refuted), strict=self._plan.strict)

    def _take(self) -> None:
        """Take norms for the coming step: of all examples if due, else of the reference ones."""
        due, reference = self._policy.due(self._step), self._plan.reference_positions
        if not due and not len(reference):
            return
        moment = f"the pass before step {self._step}"
        self._limits = self._run.limits
        self._pass.norm_pass.clip_each(self._limits, self._run.transforms)
        taken = self._pass.norms(moment, None if due else reference)
        if not due:
            self._taken = TakenNorms(taken.norms, None, None, taken.seconds)
            return
        if self._clip_levels is not None:
            self._clip_levels.begin_record(taken.norms)
        holdout = None
        if self._holdout is not None:
            ids = np.arange(len(self._holdout))
            holdout = norms_of(self._pass.norm_pass, self._holdout, ids)
        self._taken = TakenNorms(taken.norms[reference], taken, holdout, taken.seconds)
