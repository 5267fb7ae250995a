"""Recorder: attaches to an Opacus run and writes its NormLog and ExampleTable. Sensitive.

What flows: at the start, and right after the update before each step that the policy names, one
pass over the training set takes every example's gradient norm at the parameters that this step
starts from. It is written right after the step's update, since only then is it known which
max_grad_norm the step ran at (a scheduler may change it in between). At each step the optimizer's
realised settings are read; at the end the final model's losses are taken.
"""

import platform
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import opacus
import pandas as pd
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from indpriv import _checks
from indpriv._columns import RESULTS, asked_columns
from indpriv._facts import damaged, refused, text
from indpriv._files import write_json
from indpriv._folders import make_folder
from indpriv._storage import bucket_to_write, location_on_disk, uploaded
from indpriv._types import ArrayLike, IntArray
from indpriv.errors import EvidenceWarning, InputError, PrivacyWarning
from indpriv.norm_log import journal_state, run_files
from indpriv.norm_log.evidence import SEEDED
from indpriv.norm_log.fields import DEFAULT_POLICY, RecordingPolicy, StepSetting, check_norms
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.records import Levels
from indpriv.norm_log.session_counts import SessionCounts
from indpriv.norm_log.writer import LogHeader, NormLogWriter, fingerprint
from indpriv.recording import random_states
from indpriv.recording.attacks import AttackedRun, RunAttack
from indpriv.recording.checkpoints.safe_files import keep_model
from indpriv.recording.clipping import ClipThresholds, check_headroom
from indpriv.recording.compared.findings import say
from indpriv.recording.compared.updates import PublicSettings
from indpriv.recording.norms.batches import LossFn, described_loss, tensors_of, with_targets
from indpriv.recording.norms.model_checks import check_memory
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import autocast_now, described_parameters
from indpriv.recording.opacus.gradients import Thresholds
from indpriv.recording.opacus.run import Batch, OpacusRun, Ranks
from indpriv.recording.process import deferred_interrupts, environment_of
from indpriv.recording.training_data import Measured, TrainingData, Unpack, length, norms_of
from indpriv.recording.watch import Watch

_CHECKED = 256  # number of examples that the norm pass is checked on
FLUSH_STEPS = 256  # number of steps that a crash may lose
_AUGMENTED = text("sentence.claim", "augmented")
_ON_TRUST = ("rows",)  # a random data set is no reason for a warning


class Recorder:
    """Records one Opacus run. Everything that can be checked before training is checked at once.

    If training uses `torch.autocast`, construct the Recorder under the same autocast.

    Args:
        run_dir: a new directory for the run (0700).
        dataset: the training set that the loader draws from, map-style, of (inputs, targets), or of
            dicts that the model takes by keyword, as Hugging Face's do.
        unpack: for other batches, of the test set too: a function from a batch of the loader to
            (arguments of the model, targets), e.g. `lambda b: ((b[0], b[1]), b[2])`: a tuple, a
            dict by keyword, or one argument.
        loss_fn: `loss_fn(outputs, targets)` or `loss_fn(outputs)` -> per-example losses (batch,).
            Where batches are dicts, targets is the whole dict; see `CausalLMLoss`.
        every: K: full norm passes before steps 0, K, 2K, ...; or "epoch", "2 epochs", ...; or
            "once". 1 is exact. Default: gaps of 4, 8, 16, ... steps, at most an epoch.
        policy: a `RecordingPolicy`, instead of every, reference_examples and batch_norms. A resumed
            run without any of them keeps that of its log.
        rounding: of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports), or "nearest" (the paper's; an estimate).
        reference_examples: number of random examples (default 0) whose norms are recorded at every
            step: they measure the error that a larger K causes.
        batch_norms: keep the norms that DP-SGD computes for each sampled batch (default False, but
            always kept if batches are no Poisson samples). They improve estimates, and make
            participation="known" exact.
        individual_clipping: clip each example at its last recorded level instead of max_grad_norm,
            which is exact for any K (Yu et al. 2023, Algorithm 3), at equal noise.
        clip_headroom: how far that level is above the example's norm, as a fraction of
            max_grad_norm in [0, 1] (default 0.1). The account includes it.
        clipping_norm_epsilon: epsilon of the private release that max_grad_norm was set to, which
            every epsilon of the run includes; 0 if it was chosen without the data. A norm of
            `indpriv.release.private_median_norm` carries its own, and the larger of both counts.
        privacy_filter: an `indpriv.PrivacyFilter`. An example that would exceed its cap is clipped
            at 0 from then on; all rows of a unit together. With individual_clipping an example is
            charged for its level, otherwise for max_grad_norm.
        test_set: of (inputs, targets); its final losses serve attacks and accuracy by group.
        record_holdout: also record the norms of the test set, in RUN/holdout, by one more pass: an
            attack judged by epsilon needs them.
        keep_model: keep the final parameters in RUN/final, for attacks on the model itself and to
            see that reference models are trained on the inputs of the run. As sensitive as the run.
        metadata: one row per training example, indexed by example id, to compare groups by.
        test_metadata: the same for the test set, indexed 0..n_test-1.
        example_ids: (n,) unique ids in the order of the data set; default 0..n-1.
        unit_ids: (n,) the person or client of each row, unless each example is a unit of its own.
        unit: "example", "user" or "client".
        seeded: sampling or noise use a known seed: the run gives no privacy, and is labelled so.
        resume_at: continue the log in run_dir at this step of a checkpoint, or at what `state_dict`
            returned for it. Steps logged beyond it become void.
        on_write_error: if the log cannot be written (a full disk), "stop" training, or "continue"
            it without recording; the log then was not closed.
        attack: `GradientCanaries`, `MislabelledCanaries`, `InsertedCanaries` or `WhiteBox`, which
            attack the run while it trains.
        upload_to: address to which the run is sent when it is closed, e.g. s3://bucket/runs/adult.
            If that fails, a warning says how to send it later.
        bucket_is_private: say that only those who may see norms can read that bucket.
        start: what the first model was made from: "random", or e.g. "pretrained on public texts".
            Unsaid, it is on trust.
        public_settings: a law of your own that moves settings by the step alone: step -> e.g.
            {"lr": 0.1}, asked beforehand. Without it, settings that no scheduler of torch or Opacus
            moves are declared, not verified.
        sign_with: path of an OpenSSH private key (ed25519, no passphrase) that signs the log.
        strict: raise, instead of warning, where something leaves the guarantee less than supported.
        views: of each example, whose gradients the loop averages before they are clipped
            (augmentation multiplicity); an item of the data set holds them all.
        run_info: what else to keep in run.json, beside machine and git commit (`code_commit`).

    Raises:
        InputError: an empty data set, metadata or ids that do not fit it, a run directory in use, a
            bucket that may not be private, or a key that cannot sign.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        dataset: Dataset[Any],
        loss_fn: LossFn,
        unpack: Unpack | None = None,
        every: int | str | None = None,
        policy: RecordingPolicy | None = None,
        rounding: float = 0.01,
        rounding_mode: str = "up",
        reference_examples: int | None = None,
        batch_norms: bool | None = None,
        individual_clipping: bool = False,
        clip_headroom: float | None = None,
        clipping_norm_epsilon: float = 0.0,
        privacy_filter: Any = None,
        test_set: Dataset[Any] | None = None,
        record_holdout: bool = False,
        keep_model: bool = False,
        metadata: pd.DataFrame | None = None,
        test_metadata: pd.DataFrame | None = None,
        example_ids: ArrayLike | None = None,
        unit_ids: ArrayLike | None = None,
        unit: str = "example",
        seeded: bool = False,
        resume_at: int | Mapping[str, Any] | None = None,
        on_write_error: str = "stop",
        attack: RunAttack | None = None,
        upload_to: str | Path | None = None,
        bucket_is_private: bool = False,
        start: str | None = None,
        public_settings: PublicSettings | None = None,
        strict: bool = False,
        views: int = 1,
        sign_with: str | Path | None = None,
        run_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = location_on_disk(run_dir, "a run is")
        self._upload_to = bucket_to_write(upload_to, bucket_is_private)
        self.loss_fn = loss_fn = with_targets(loss_fn)
        self._data = TrainingData(
            dataset, loss_fn, example_ids, unit, unit_ids, metadata, test_set, test_metadata, unpack
        )
        step, run_id = _step_and_run(resume_at)
        state = journal_state.state_to_resume(self.run_dir, step)
        logged = {} if state is None else state.header["run"]
        if run_id is not None and run_id != logged.get("id", ""):
            raise refused("refusal.arguments", "another_run", run_dir=self.run_dir)
        self._resume_at, self._first = step, step or 0
        self._run_id = secrets.token_hex(8) if state is None else str(logged.get("id", ""))
        chosen = {"every": every, "reference_examples": reference_examples}
        self._policy = _policy(policy, state, **chosen, batch_norms=batch_norms)
        self._reference_positions = self._chosen_reference(state)
        self._counts_before = {} if state is None else journal_state.counts_at(state, step or 0)
        self._levels = Levels(rounding, rounding_mode)
        self._rounding, self._rounding_mode = float(rounding), rounding_mode
        self._individual_clipping = individual_clipping
        self._clip_headroom = check_headroom(
            clip_headroom,
            individually=individual_clipping,
            logged=None if state is None else logged.get("clip_headroom", 0.0),
        )
        ends = "stop", "continue"
        self._on_write_error = _checks.check_choice("on_write_error", on_write_error, ends)
        self._clipping_norm_epsilon = _checks.check_clipping_norm_epsilon(clipping_norm_epsilon)
        if not (privacy_filter is None or hasattr(privacy_filter, "rdp_cap")):
            raise refused("refusal.arguments", "filter", value=privacy_filter)
        self._filter, self._attack, self._start = privacy_filter, attack, start
        _checks.check_flags(record_holdout=record_holdout, keep_model=keep_model, strict=strict)
        self._seeded, self._strict, self._record_holdout = seeded, strict, record_holdout
        self._public_settings, self._key = public_settings, run_files.signing_key(sign_with)
        self._keep_model = keep_model
        self._views = _checks.check_positive_int("views", views)
        if individual_clipping and rounding_mode != "up":
            raise refused("refusal.arguments", "nearest", mode=rounding_mode)
        if attack is not None and step is not None:
            attack.check_resumes(self.run_dir)
        if record_holdout and test_set is None:
            raise refused("refusal.arguments", "holdout")
        self._run_info = run_files.checked_run_info(run_info)
        on = filter(torch.is_autocast_enabled, ("cpu", "cuda"))
        self._autocasts = {device: autocast_now(device) for device in on}  # by the model's device
        self._attached = self._draws_privately = False
        self._entered: list[bool] = []  # not empty once a block of attach was entered
        self._is_open = False  # inside the block of attach
        self._step = self._first
        self._records: list[Measured] = []  # of the coming step, if due: training's, the holdout's
        self._measured: Measured | None = None  # of the reference examples, before the coming step
        self._limits: tuple[float, ...] = ()  # per layer, at which these norms were taken
        self._batch: Batch | None = None  # of the current step
        # Of each step that is in no line yet: its setting, its batch, norms of reference examples.
        self._seen: list[tuple[StepSetting, Batch | None, Measured | None]] = []
        self._lines: list[partial[None]] = []  # of the log, that are still to be written
        self._writers: list[NormLogWriter] = []  # of training, then of test examples
        self._is_lost = False  # a disk error ended the log, and training goes on
        self._training_seconds = self._training_since = 0.0
        self._first_draw = ""

    def _chosen_reference(self, state: journal_state.LogState | None) -> IntArray:
        """Positions of the reference examples: those of the log, or new random ones."""
        if state is not None and state.header["n_exact"]:
            return journal_state.read_ids(state)[2]
        wanted, n_examples = self._policy.reference_examples, len(self._data.ids)
        if wanted > n_examples:
            raise refused("refusal.arguments", "references", wanted=wanted, n=n_examples)
        return np.sort(np.random.default_rng().choice(n_examples, wanted, replace=False))

    def attach(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]
    ) -> AbstractContextManager["Recorder"]:
        """Record while a `with` block trains; warn if none is entered. Your loop stays as it is.

        If several ranks train (Opacus's DPDDP, FSDP2), each attaches a Recorder made with the same
        arguments: full passes are divided between them, and the first rank writes the log. To
        resume, all ranks must see the run directory.

        Args:
            model: as returned by PrivacyEngine.make_private, as are optimizer and loader; your own
                after make_private(wrap_model=False).
            optimizer: an Opacus DPOptimizer with flat clipping, in any grad_sample_mode, or with
                clipping per layer.
            loader: the loader that the loop draws from (BatchMemoryManager may wrap it inside the
                block).

        Raises:
            InputError: a set-up that cannot be accounted soundly; nothing has been trained yet.
            EvidenceError: during training, as soon as the log would be wrong (a replaced hook, an
                accountant that has stopped counting).
        """
        block = self._attached_to(model, optimizer, loader)
        finalize(block, _say_if_unused, self._entered, self.run_dir)  # keeps no Recorder alive
        return block

    @contextmanager
    def _attached_to(self, model: nn.Module, optimizer: Any, loader: Any) -> "Iterator[Recorder]":
        self._entered.append(True)
        if self._attached:
            raise refused("refusal.arguments", "attached_before", run_dir=self.run_dir)
        data = self._data
        self._check_groups()
        self._run = run = OpacusRun(model, optimizer, loader, len(data.ids))
        if self._draws_privately:
            run.sources.draw_privately()
        if run.sources.is_guessable and not self._seeded:
            found = text("check.seeds", "at_attach")
            say("seeds", found, refuted=True, strict=self._strict)
        device = next(run.module.parameters()).device
        self._autocast = self._autocasts.get(device.type, nullcontext)
        self._train, self._test = train, test = data.examples(loader.collate_fn, device)
        with random_states.kept_random_state():  # the same examples in each session
            random_states.set_random_state(random_states.fixed_state())
            inputs, targets = next(train.batches(_CHECKED))
        with self._autocast():
            self._norm_pass = norm_pass = NormPass(
                run.whole.module, data.loss_fn, inputs, targets, backend=run.norm_backend
            )
        with norm_pass, closing(Ranks(optimizer)) as self._ranks:
            as_trained = run.whole.in_training(run.model)
            norm_pass.check_training(as_trained, self._views)
            check_memory(run.whole.module, inputs)
            data.check_test_set(norm_pass, test)
            self._attached = True
            header = self._agree()
            self._prepare(header)
            upload_to = self._upload_to if self._ranks.writes else None
            try:
                with uploaded(self.run_dir, upload_to, or_warn=True), self._recording(header):
                    self._is_open = True
                    yield self
            finally:
                self._is_open = False
                del self._watch, self._norm_pass, self._started  # which hold copies of the model

    def draw_privately(self) -> None:
        """Draw noise and batches from a `private_generator` wherever torch's own would draw them.

        Generators that you passed stay, and so do those of a seeded run. Callbacks call it.
        """
        self._draws_privately = not self._seeded
        if self._is_open and self._draws_privately:
            self._run.sources.draw_privately()

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint, between two steps of the block; resume with resume_at=.

        The log is brought up to date first, so that it proves every step of the checkpoint even if
        training is killed right afterwards.

        Raises:
            InputError: the Recorder is not attached.
        """
        if not self._is_open:
            raise refused("refusal.arguments", "not_attached")
        return {"step": self._flush(), "run": self._run_id}

    def _check_groups(self) -> None:
        """Warn, or raise if strict, where run_info names groups that are no column."""
        metadata = self._data.metadata
        columns = ["label", *RESULTS, *map(str, () if metadata is None else metadata.columns)]
        try:
            for by in self._run_info.get("groups") or ():
                asked_columns(str(by), columns)
        except InputError as error:
            said = text("refusal.arguments", "groups", error=error)
            if self._strict:
                raise InputError(said) from error
            warnings.warn(said, EvidenceWarning, stacklevel=4)

    def _agree(self) -> LogHeader:
        """The log's header, once all ranks agree; the first one's choices hold."""
        ranks, run = self._ranks, self._run
        if ranks.size > 1 and self._on_write_error != "stop":
            raise refused("refusal.attached", "lost_log", choice=self._on_write_error)
        chosen = ranks.gather("attach", (self._run_id, self._reference_positions))
        self._run_id, self._reference_positions = chosen[0]
        if not run.is_poisson:
            # What an account with known participation reads; no other is supported then.
            self._policy = replace(self._policy, batch_norms=True)
        header = self._header()
        shared = {
            "the coins of canaries": self._attack and self._attack.coins,
            **vars(header),
            **run.shared_by_ranks,
            "resume_at": self._resume_at,
            "example_ids": fingerprint(self._data.ids),
        }
        caveats = shared.pop("norm_pass")["caveats"]  # each rank may have found others
        seed = run.sources.seed_of_batches
        found = ranks.gather("attach", caveats, shared=shared, seed=seed)
        all_caveats = list(dict.fromkeys(caveat for each in found for caveat in each))
        return replace(header, norm_pass={**header.norm_pass, "caveats": all_caveats})

    def _header(self) -> LogHeader:
        run, norm_pass = self._run, self._norm_pass
        limit, individually = self._filter, self._individual_clipping
        if (run.clipping != "flat" or run.no_privacy) and (individually or limit or self._attack):
            raise refused("refusal.attached", "flat_only")
        moments = tensors_of(list(run.optimizer.original_optimizer.state.values()))
        if self._start == "random" and self._resume_at is None and any(map(torch.any, moments)):
            raise refused("refusal.attached", "not_random")
        void = [SEEDED] * bool(self._seeded) + [run.no_privacy] * bool(run.no_privacy)
        return LogHeader(
            rounding=self._rounding,
            rounding_mode=self._rounding_mode,
            unit=self._data.unit,
            neighbouring="add_remove",
            sampler=run.sampler,
            individually_clipped=individually,
            norm_pass=norm_pass.to_header([*norm_pass.caveats, *void]),
            policy=self._policy.in_steps(len(run.batch_sampler)).to_dict(),
            privacy_filter={"order": limit.order, "rdp_cap": limit.rdp_cap} if limit else {},
            run={
                "id": self._run_id,
                "clipping": "individual" if individually else run.clipping,
                "clip_headroom": self._clip_headroom,
                "clipping_norm_epsilon": max(self._clipping_norm_epsilon, run.clip_cost),
                "seeded": self._seeded,
                **({} if self._start is None else {"start": self._start}),
                "no_privacy": run.no_privacy,
                "ranks": self._ranks.size,
                "loss": described_loss(self._data.loss_fn),
                **_described(run),
            },
        )

    def _prepare(self, header: LogHeader) -> None:
        """Make ready to watch; nothing is changed yet."""
        run, data = self._run, self._data
        self._in_steps = self._policy.in_steps(len(run.batch_sampler))
        self._caveats = list(header.norm_pass["caveats"])  # why an account is an estimate
        self._clipping = ClipThresholds(
            len(data.ids),
            headroom=self._clip_headroom if self._individual_clipping else None,
            levels=self._levels,
            policy=self._filter,
            units=data.unit_numbers,
        )
        self._started: RunAttack | None = None
        if self._attack is not None:
            varies, of_passes = self._clipping.varies, (self._train, self._test, self._norm_pass)
            with self._autocast():  # gradients as training takes them
                self._started = self._attack.start(AttackedRun(run, data, *of_passes, varies))
        self._watch = Watch(
            run,
            self._train,
            data.loss_fn,
            self._ranks,
            self._norm_pass,
            public_settings=self._public_settings,
            steps_before=self._first,
            counts_before=self._counts_before,
            attack=self._started,
        )

    def _open_log(self, header: LogHeader, files: ExitStack) -> None:
        """Start or continue the log, and that of the test examples, on the rank that writes."""
        data = self._data
        few = self._reference_positions
        logs: list[tuple[Any, ...]] = [("", header, data.ids, data.ids_of_units, few)]
        if self._record_holdout:
            # A batch or the reference examples hold no test example, and no filter charges one.
            policy = {**header.policy, "free_records": False, "exact_examples": 0}
            drawn = {**header.run, "n_drawn_from": len(data.ids)}  # batches are those of training
            test_header = replace(header, policy=policy, privacy_filter={}, run=drawn)
            ids = np.arange(length(data.test_set, "test_set"))
            logs.append((run_files.HOLDOUT, test_header, ids))
        for folder, *arguments in logs if self._ranks.writes else ():
            path = make_folder(make_folder(self.run_dir), folder)
            self._writers.append(NormLogWriter(path, *arguments))
            files.callback(self._writers[-1].close)
        with self._disk_errors_handled():
            for writer in self._writers if self._resume_at is not None else ():
                writer.truncate(self._first)
        self._ranks.gather("the start", None)  # no rank reads the log before it was truncated

    @contextmanager
    def _disk_errors_handled(self) -> Iterator[None]:
        """Let a disk error in the block end training, or only the log: see on_write_error."""
        try:
            yield
        except OSError as error:
            if self._on_write_error == "stop":
                raise
            first = self._lines[0].args[0] if self._lines else self._step - len(self._seen)
            self._is_lost, self._writers, self._seen, self._lines = True, [], [], []
            # At this line: a warning at a line of torch, which calls us, would be filtered out.
            said = {"run_dir": self.run_dir, "error": error, "first": first}
            warnings.warn(text("sentence.warnings", "lost", **said), PrivacyWarning, stacklevel=1)

    @contextmanager
    def _recording(self, header: LogHeader) -> Iterator[None]:
        """Log what the run does while the block trains; then write what lies beside the log."""
        folder = self.run_dir
        with ExitStack() as files:
            self._open_log(header, files)
            if self._writers:
                machine = environment_of(next(self._run.module.parameters()).device)
                about = {**machine, **self._run_info, "recorder": dict(header.run)}
                write_json(folder / run_files.RUN_JSON, about)
                if self._resume_at is None:
                    if self._started is not None:
                        self._started.keep(folder)
                    run_files.sign(folder, self._key)
            if self._step and self._clipping.varies:
                resumed = open_run(folder)
                self._clipping.restore(resumed.log, journal_state.read_left_out(resumed))
            self._take()
            try:
                steps = self._before_step, self._after_step
                with self._watch.watching(*steps, thresholds=self._thresholds()):
                    self._training_since = time.perf_counter()
                    yield
                # What was drawn since the last step.
                self._watch.exchange("the end of the block")
            finally:  # also after Ctrl-C and errors, so that the steps that were taken are logged
                self._flush()
            with self._disk_errors_handled():
                for writer in self._writers:
                    writer.finish(self._counts())  # complete, whatever fails from here on
            self._run.whole.gather()
            if self._writers:
                with self._disk_errors_handled(), self._norm_pass.evaluation() as model:
                    table = self._data.example_table(model, self._train, self._test)
                    table.to_parquet(folder / run_files.EXAMPLES)
                    if self._keep_model:
                        keep_model(model, folder)
                    if self._started is not None:
                        self._started.scores(model).to_parquet(folder / self._started.file_name)
        if self._writers:
            with self._disk_errors_handled():
                run_files.seal(folder, self._key)

    def _flush(self) -> int:
        """Log every step that was taken, and return their number."""
        with deferred_interrupts(), self._disk_errors_handled():
            self._lines += self._new_lines() if self._seen else ()
            while self._lines:
                self._lines[0]()
                del self._lines[0]  # now, since a later one may fail, and none may come twice
        return self._step

    def _new_lines(self) -> Iterator[partial[None]]:
        """Of the steps that were seen: batch and reference norms, who was left out, settings."""
        writer, counts, first = self._writers[0], self._counts(), self._step - len(self._seen)
        settings, batches, measured = zip(*self._seen, strict=True)
        self._seen = []
        clips = np.array([setting.max_grad_norm for setting in settings])
        if self._in_steps.batch_norms:
            yield partial(writer.free, first, batches, clips)
        if few := [one for one in measured if one is not None]:
            rows, seconds = np.stack([one.norms for one in few]), sum(one.seconds for one in few)
            yield partial(writer.exact, first, rows, clips, seconds)
        if left_out := self._clipping.unlogged:
            positions = np.concatenate([positions for _, positions in left_out])
            steps = np.concatenate([np.full(len(positions), step) for step, positions in left_out])
            yield partial(writer.left_out, first, len(settings), positions, steps)
            left_out.clear()
        for setting, same in groupby(settings):
            equal = len(list(same))
            for each in self._writers:
                yield partial(each.steps, first, equal, **vars(setting), counts=counts)
            first += equal

    def _counts(self) -> SessionCounts:
        """What has been counted in this session."""
        self._first_draw = self._first_draw or random_states.fingerprint_of_state(
            self._run.sources.first, self._run_id
        )
        draws, training, noise = self._watch.counts()
        training.training_seconds = round(self._training_seconds, 6)
        training.ranks, training.first_draw = self._ranks.size, self._first_draw
        if training.items and training.weights:
            training.losses_after = self._norm_pass.held_still()
        if self._in_steps.batch_norms and self._ranks.size == 1:
            training.took_part = fingerprint(self._watch.tally.took_part)
        return SessionCounts(
            from_step=self._first,
            seeded=self._seeded,
            caveats=tuple(self._caveats),
            sampler=self._run.sampler,
            draws=draws,
            training=training,
            noise=noise,
        )

    def _thresholds(self) -> Thresholds | None:
        """What examples are clipped at, if it is not max_grad_norm."""

        def charged(positions: IntArray, max_grad_norm: float) -> Tensor:
            # Before the first batch of the step is clipped.
            self._clipping.charge(self._step, self._watch.coming_setting(max_grad_norm))
            return self._clipping.thresholds(positions, max_grad_norm)

        return charged if self._clipping.varies else None

    def _take(self) -> None:
        """Take norms for the coming step: of all examples if due, else of the reference ones."""
        due, few = self._in_steps.due(self._step), self._reference_positions
        filters = self._clipping.policy is not None  # which must see that they are finite
        self._watch.with_norms = due or self._in_steps.batch_norms or filters
        if not due and not len(few):
            return
        run, ids = self._run, self._data.ids
        self._limits = run.limits
        self._norm_pass.clip_each(self._limits, run.transforms)
        together = self._ranks, run.whole, f"the pass before step {self._step}"
        positions = None if due else few
        taken = norms_of(self._norm_pass, self._train, ids, positions, together=together)
        self._measured = taken if len(few) else None
        if not due:
            return
        if len(few):
            self._measured = replace(taken, norms=taken.norms[few], seconds=0.0)
        self._records = [taken]
        self._clipping.begin_record(taken.norms)
        if self._record_holdout and self._test is not None and self._writers:
            numbers = np.arange(len(self._test))
            self._records.append(norms_of(self._norm_pass, self._test, numbers))

    def _before_step(self, setting: StepSetting, batch: Batch | None) -> None:
        """Keep the norms that training clips at this step; compare them with the recorded ones."""
        self._batch = None
        recorded = self._records[0].norms if self._records else None
        taken = recorded is not None or self._measured is not None
        if taken and self._limits != self._watch.limits:
            raise refused("refusal.training", "layer_norms_moved")
        self._clipping.charge(self._step, setting)  # also if the batch is empty
        filters = self._clipping.policy is not None
        if filters and batch is not None and not np.isfinite(batch.norms).all():
            raise damaged("refusal.training", "not_finite", step=self._step)
        if batch is None or (recorded is None and not self._in_steps.batch_norms):
            return
        positions, norms = batch
        check_norms(norms, self._data.ids[positions])  # before NaN reaches the parameters
        norm_pass, random_rows = self._norm_pass, self._watch.deliveries.random_rows
        if random_rows and _AUGMENTED not in self._caveats:
            self._caveats.append(_AUGMENTED)
        # Norms of another draw of dropout or augmentation tell nothing about these.
        if recorded is not None and not (norm_pass.caveats or random_rows):
            self._watch.tally.compare(
                recorded[positions],
                norms,
                setting.max_grad_norm,
                slack=norm_pass.slack,
                is_ghost=self._run.is_ghost,
            )
        safe = norms * (1 + norm_pass.slack)
        self._batch = Batch(positions, self._run.contributions(safe, setting))

    def _after_step(self, setting: StepSetting) -> None:
        """Write the records taken before the step; keep the rest of it for the next flush."""
        clip, few = setting.max_grad_norm, self._measured
        self._training_seconds += time.perf_counter() - self._training_since
        with deferred_interrupts():
            self._clipping.end_record(clip)
            with self._disk_errors_handled():
                for writer, taken in zip(self._writers, self._records, strict=False):
                    writer.record(
                        self._step,
                        # Rounded when it is written.
                        self._run.contributions(taken.norms, setting) + self._clip_headroom * clip,
                        max_grad_norm=clip,
                        targets_fingerprint=taken.targets_fingerprint,
                        seconds=taken.seconds,
                    )
            if self._writers:
                few = few and replace(few, norms=self._run.contributions(few.norms, setting))
                self._seen.append((setting, self._batch, few))
            self._records, self._measured = [], None
            self._step += 1
            if self._in_steps.due(self._step) or len(self._seen) >= FLUSH_STEPS:
                self._flush()
        self._say(self._watch.news)
        if not self._is_lost:
            self._take()
        self._training_since = time.perf_counter()

    def _say(self, news: list[str]) -> None:
        """Warn at once of what makes the guarantee less than supported; strict stops training."""
        found, said = self._watch.findings.found, set[str]()
        for key in news:
            one = found[key]
            if (key in _ON_TRUST and not one.refuted) or one.detail in said:
                continue
            said.add(one.detail)
            say(key, one.detail, refuted=bool(one.refuted), strict=self._strict)


def _described(run: OpacusRun) -> dict[str, Any]:
    """What the header of a log says about the optimizer, the sampler and the model."""
    optimizer: Any = run.optimizer
    settings: dict[str, float | None] = {}
    for name in ("lr", "momentum", "weight_decay"):
        values = {group.get(name) for group in optimizer.param_groups}
        # None if the groups differ, or the optimizer has no such setting.
        (value,) = values if len(values) == 1 else (None,)
        settings[name] = float(value) if isinstance(value, int | float) else None
    truncated = run.sampler == "truncated_poisson"
    return {
        "optimizer": type(optimizer.original_optimizer).__name__,
        "learning_rate": settings.pop("lr"),
        **settings,
        "loss_reduction": optimizer.loss_reduction,
        "expected_batch_size": optimizer.expected_batch_size,
        "sample_rate": run.sample_rate,
        "secure_mode": run.sources.is_secure,
        "sampler_class": run.sampler_class,
        **({"max_batch_size": int(run.batch_sampler.max_batch_size)} if truncated else {}),
        "steps_per_epoch": len(run.batch_sampler),
        **described_parameters(run.whole.module),
        "versions": {
            "torch": torch.__version__,
            "opacus": opacus.__version__,
            "python": platform.python_version(),
        },
    }


def _step_and_run(resume_at: int | Mapping[str, Any] | None) -> tuple[int | None, str | None]:
    """The step to resume at, and the run that it is a step of, if the caller said which."""
    if resume_at is None:
        return None, None
    if not isinstance(resume_at, Mapping):
        return _checks.check_positive_int("resume_at", resume_at, minimum=0), None
    if set(resume_at) != {"step", "run"} or not isinstance(resume_at["run"], str):
        raise refused("refusal.arguments", "resume_at", names=sorted(map(str, resume_at)))
    return _checks.check_positive_int("resume_at", resume_at["step"], minimum=0), resume_at["run"]


def _policy(
    given: RecordingPolicy | None, state: journal_state.LogState | None, **choices: Any
) -> RecordingPolicy:
    """The given policy; else that of the log; else the default one with the choices made."""
    made = {name: value for name, value in choices.items() if value is not None}
    if given is not None:
        if not isinstance(given, RecordingPolicy):
            raise InputError(f"policy={given!r} is no RecordingPolicy; pass one, or every=")
        for name, value in made.items():
            values = {"name": name, "value": value, "policy": given.describe()}
            raise refused("refusal.arguments", "policy", **values)
        return given
    if state is not None and not made and state.header.get("policy"):
        return RecordingPolicy.from_header(state.header)
    return RecordingPolicy(**made) if "every" in made else replace(DEFAULT_POLICY, **made)


def _say_if_unused(entered: list[bool], run_dir: Path) -> None:
    if not entered:
        warnings.warn(text("refusal.arguments", "not_entered", run_dir=run_dir), EvidenceWarning, 3)
