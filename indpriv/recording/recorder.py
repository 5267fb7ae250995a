"""Recorder: attaches to an Opacus run and writes its NormLog and ExampleTable. Sensitive.

What flows: at the start, and right after the update before each step that the policy names, one
pass over the training set takes every example's gradient norm at the parameters that this step
starts from; at each step the optimizer's realised settings are read; at the end the final model's
losses are taken.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
from numpy.typing import ArrayLike
from torch import nn
from torch.utils.data import DataLoader, Dataset

from indpriv import _checks
from indpriv._facts import text
from indpriv._files import write_json
from indpriv._storage import bucket_to_write, location_on_disk
from indpriv._upload import uploaded
from indpriv.errors import EvidenceWarning, InputError
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.run_files import EXAMPLES, RUN_JSON
from indpriv.norm_log.sealing import seal, sign, signing_key
from indpriv.norm_log.writer import LogHeader
from indpriv.recording.clipping.filtered import Filter
from indpriv.recording.compared.findings import say
from indpriv.recording.compared.settings import PublicSettings
from indpriv.recording.data_passes import Examples, SharedPass, Unpack
from indpriv.recording.environment import environment_of
from indpriv.recording.losses import with_targets
from indpriv.recording.norms.batches import LossFn
from indpriv.recording.norms.model_checks import check_memory
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.recording.norms.shadow_model import autocast_anywhere
from indpriv.recording.opacus.ranks import Ranks
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.opacus.run_attack import AttackedRun, RunAttack
from indpriv.recording.plan import Beginning, Plan
from indpriv.recording.run_log import opened_log
from indpriv.recording.session import Session
from indpriv.recording.training_data import TrainingData

_CHECKED = 256  # number of examples that the norm pass is checked and timed on


class Recorder:
    """Records one Opacus run. Everything that can be checked before training is checked at once.

    If training uses `torch.autocast`, construct the Recorder under the same autocast.

    Args:
        run_dir: a new directory for the run (0700).
        dataset: the training set that the loader draws from, map-style, of (inputs, targets), or of
            dicts that the model takes by keyword, as Hugging Face's do.
        unpack: for other batches, of the test set too: a function from a batch of the loader to
            (arguments of the model, targets), e.g. `lambda b: ((b[0], b[1]), b[2])`. A tuple means
            model(*arguments), a dict model(**arguments), anything else model(it).
        loss_fn: `loss_fn(outputs, targets)` or `loss_fn(outputs)` -> per-example losses (batch,).
            Where batches are dicts, targets is the whole dict; see `CausalLMLoss`.
        every: K: full norm passes before steps 0, K, 2K, ...; or "epoch", "2 epochs", ...; or
            "once". With 1 the account is exact. Default: after gaps of 4, 8, 16, ... steps, at
            most an epoch.
        policy: when to take which norms, in one object, instead of every, reference_examples and
            batch_norms. A resumed run without any of them keeps the log's own policy.
        rounding: of norms, as a fraction of max_grad_norm; 0 keeps float64.
        rounding_mode: "up" (never under-reports) or "nearest" (as in the paper; the account is
            then an estimate).
        reference_examples: number of random examples (default 0) whose norms are recorded at every
            step, at one pass over them: they measure the error that a larger K causes.
        batch_norms: keep the norms that DP-SGD computes for each sampled batch (default False, but
            always kept if batches are no Poisson samples). They cost next to nothing, improve
            between_records="last" and "closest", and make participation="known" exact.
        individual_clipping: clip each example at its last recorded level instead of max_grad_norm,
            which makes the account exact for any K (Yu et al. 2023, Algorithm 3), at equal noise.
        clip_headroom: how far that level is above the example's norm, as a fraction of
            max_grad_norm in [0, 1] (default 0.1): room for norms to grow until the next record.
            The log records levels, so the account includes it.
        clipping_norm_epsilon: epsilon of the private release of these data that max_grad_norm was
            set to, e.g. of `indpriv.release.private_median_norm` (default 0: it was chosen without
            the data). Every epsilon of the run includes it.
        privacy_filter: an `indpriv.PrivacyFilter`. An example that would exceed its cap is clipped
            at 0 from then on, so the cap holds for every example; all rows of a unit are charged,
            and left out, together. With individual_clipping an example is charged for its level,
            otherwise for max_grad_norm.
        test_set: of (inputs, targets); its final losses serve attacks and accuracy by group.
        record_holdout: also record the norms of the test set, in RUN/holdout: they tell what its
            epsilon would have been on the same trajectory, which an attack judged by epsilon
            needs. Each full record then also takes a pass over the test set.
        metadata: one row per training example, indexed by example id, to compare groups by.
        test_metadata: the same for the test set, indexed 0..n_test-1.
        example_ids: (n,) unique ids in the order of the data set; default 0..n-1.
        unit_ids: (n,) the person or client each row belongs to; needed unless each example is a
            unit of its own.
        unit: "example", "user" or "client".
        seeded: sampling or noise use a published or reproducible seed: the run gives no privacy,
            and is labelled so.
        resume_at: continue the log in run_dir at this step, that of the checkpoint from which
            training resumes; or pass what `state_dict` returned for that checkpoint. Steps logged
            beyond it become void.
        on_write_error: if the log cannot be written (a full disk) or sent, "stop"
            training, or "continue" it without recording. What was logged before stays, and the log
            says that it was not closed.
        attack: attacks the run while it trains and writes its scores to the run directory:
            `GradientCanaries`, `MislabelledCanaries` or `WhiteBox`.
        upload_to: address to which the run is sent when it is closed, e.g. s3://bucket/runs/adult.
        bucket_is_private: say that only those who may see norms can read that bucket.
        start: what the first model was made from: "random", or e.g. "pretrained on public texts".
            Nobody can see it; unsaid, reports name it as on trust.
        public_settings: a law of your own that moves settings by the step alone: step -> e.g.
            {"lr": 0.1}. It is asked for steps to come, so that it cannot read what training sees.
            Without it, settings that no scheduler of torch or Opacus moves are declared, not
            verified.
        sign_with: path of an OpenSSH private key (ed25519, no passphrase) of whoever trains. It
            signs the log when it begins and when it is closed: RUN/journal.jsonl.sig.
        strict: raise, instead of warning, where something is seen at attach or while training that
            leaves the run's guarantee less than supported.
        run_info: what else to keep in run.json, e.g. the training configuration. The processor,
            the number of threads and the git commit of the working folder (`code_commit`, unless
            you pass your own) are always kept.

    Raises:
        InputError: an empty data set, metadata or ids that do not fit it, both a policy and an
            argument that it replaces, a run directory in use, a bucket that may not be private, or
            a key that cannot sign.

    >>> from indpriv.recording import Recorder
    >>> recorder = Recorder("runs/mine", dataset=train_set, loss_fn=loss_fn)  # doctest: +SKIP
    >>> with recorder.attach(model, optimizer, loader):                       # doctest: +SKIP
    ...     for inputs, targets in loader: ...
    """

    @_checks.accepts_former_names
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
        attack: RunAttack | None = None,
        upload_to: str | Path | None = None,
        bucket_is_private: bool = False,
        start: str | None = None,
        public_settings: PublicSettings | None = None,
        strict: bool = False,
        sign_with: str | Path | None = None,
        run_info: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = location_on_disk(run_dir, "a run is")
        self._upload_to = bucket_to_write(upload_to, bucket_is_private)
        loss_fn = with_targets(loss_fn)
        data = TrainingData(
            dataset, loss_fn, example_ids, unit, unit_ids, metadata, test_set, test_metadata, unpack
        )
        beginning = Beginning.of(self.run_dir, resume_at)
        policy = beginning.policy(
            policy, every=every, reference_examples=reference_examples, batch_norms=batch_norms
        )
        self._plan = Plan(
            self.run_dir,
            data,
            policy,
            run_id=beginning.run_id,
            reference_positions=beginning.reference_positions(self.run_dir, policy, len(data.ids)),
            rounding=_checks.check_rounding(rounding),
            rounding_mode=rounding_mode,
            individual_clipping=individual_clipping,
            clip_headroom=beginning.headroom(clip_headroom, individually=individual_clipping),
            privacy_filter=privacy_filter,
            record_holdout=record_holdout,
            seeded=seeded,
            on_write_error=on_write_error,
            resume_at=beginning.resume_at,
            attack=attack,
            clipping_norm_epsilon=clipping_norm_epsilon,
            start=start,
            strict=strict,
            public_settings=public_settings,
            sign_with=signing_key(sign_with),
        )
        self._autocast, self._run_info = autocast_anywhere(), dict(run_info or {})
        self._attached = self._draws_privately = False
        self._run: OpacusRun | None = None
        self._session: Session | None = None

    @contextmanager
    def attach(
        self, model: nn.Module, optimizer: Any, loader: DataLoader[Any]
    ) -> Iterator[Recorder]:
        """Record while the block trains. The loop, the loader and the optimizer are used unchanged.

        If several ranks train (Opacus's DPDDP, FSDP2), each attaches a Recorder made with the same
        arguments: full passes are divided between them, and the first rank writes the log. To
        resume, all ranks must see the run directory.

        Args:
            model: as returned by PrivacyEngine.make_private, as are optimizer and loader.
            optimizer: an Opacus DPOptimizer with flat clipping, in any grad_sample_mode, or with
                clipping per layer.
            loader: the loader that the loop draws from (BatchMemoryManager may wrap it inside the
                block).

        Raises:
            InputError: a set-up that cannot be accounted soundly; nothing has been trained yet.
            EvidenceError: during training, as soon as the log would be wrong (a replaced hook, an
                accountant that has stopped counting).
        """
        if self._attached:
            raise InputError(
                f"the Recorder of {self.run_dir} was attached before: a second block would begin "
                "at step 0 again; put the whole training into one block, or make a new Recorder "
                "with resume_at=STEP"
            )
        data = self._plan.data
        self._check_groups()
        self._run = run = OpacusRun(model, optimizer, loader, len(data.ids))
        if self._draws_privately:
            self.draw_privately()
        if run.guessable_seed and not self._plan.seeded:
            found = text("check.seeds", "at_attach")
            say(CHECKS["seeds"], found, refuted=True, strict=self._plan.strict)
        device = next(run.module.parameters()).device
        train, test = data.examples(loader.collate_fn, device)
        inputs, targets = next(train.batches(_CHECKED))
        with self._autocast():
            norm_pass = NormPass(
                run.whole.module, data.loss_fn, inputs, targets, backend=run.norm_backend
            )
        with norm_pass, closing(Ranks(optimizer)) as ranks:
            norm_pass.check_training(run.whole.in_training(model), inputs, targets)
            check_memory(run.whole.module, inputs)
            if test is not None:
                with norm_pass.evaluation() as evaluated:
                    data.check_test_set(evaluated, test)
            self._attached = True
            self._plan, header = self._plan.agreed(ranks, run, norm_pass)
            shared_pass = SharedPass(ranks, run.whole, norm_pass, train, data.ids)
            about = {**environment_of(device), **self._run_info, "recorder": dict(header.run)}
            upload_to = self._upload_to if ranks.writes else None
            recording = _recording(self._plan, header, run, shared_pass, test, about)
            try:
                with (
                    uploaded(self.run_dir, upload_to, self._plan.on_write_error),
                    recording as self._session,
                ):
                    yield self
            finally:
                self._session = self._run = None

    def draw_privately(self) -> None:
        """Draw noise and batches from a `private_generator` wherever torch's own would draw them.

        Generators that you passed stay, and so do those of a seeded run. Callbacks call it.
        """
        self._draws_privately = not self._plan.seeded
        if self._run is not None and self._draws_privately:
            self._run.draw_privately()

    def _check_groups(self) -> None:
        """Warn, or raise if strict, where run_info names groups that are no column."""
        data, groups = self._plan.data, self._run_info.get("groups") or ()
        columns = {"label", *(() if data.metadata is None else data.metadata.columns)}
        if unknown := [name for name in groups if name not in columns]:
            text = (
                f"run_info['groups'] names {unknown[0]!r}, which is no column of metadata (there "
                f"are {', '.join(sorted(map(str, columns)))}); no report can compare such groups"
            )
            if self._plan.strict:
                raise InputError(text)
            warnings.warn(text, EvidenceWarning, stacklevel=4)

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint, between two steps of the block; resume with resume_at=.

        The log is brought up to date first, so that it proves every step of the checkpoint even if
        training is killed right afterwards.

        Raises:
            InputError: the Recorder is not attached.
        """
        if self._session is None:
            raise InputError(
                "the Recorder is not attached; call state_dict() inside the block of attach(...)"
            )
        return {"step": self._session.bring_up_to_date(), "run": self._plan.run_id}


@contextmanager
def _recording(
    plan: Plan,
    header: LogHeader,
    run: OpacusRun,
    shared_pass: SharedPass,
    test: Examples | None,
    about: Mapping[str, Any],
) -> Iterator[Session]:
    """Open the log and watch the run while the block trains; then write the example table."""
    ranks, norm_pass = shared_pass.ranks, shared_pass.norm_pass
    attack = None
    if plan.attack is not None:
        levels = plan.individual_clipping or plan.privacy_filter is not None
        attack = plan.attack.start(
            AttackedRun(run, plan.data, shared_pass.examples, test, norm_pass, levels)
        )
    with opened_log(plan, header, writes=ranks.writes) as log:
        if log.writes:
            write_json(plan.run_dir / RUN_JSON, about)
            if plan.resume_at is None:
                sign(plan.run_dir, plan.sign_with)
        holdout = test if plan.record_holdout and log.writes else None
        caveats = header.norm_pass["caveats"]
        session = Session(
            plan, run, shared_pass, log, caveats=caveats, holdout=holdout, attack=attack
        )
        with session.recording():
            yield session
        log.finish(session.counts())  # the run is complete, whatever fails from here on
        run.whole.gather()
        if log.writes:
            with log.disk_errors_handled(), norm_pass.evaluation() as model:
                table = plan.data.example_table(model, shared_pass.examples, test)
                table.to_parquet(plan.run_dir / EXAMPLES)
                if attack is not None:
                    attack.scores(model).to_parquet(plan.run_dir / attack.file_name)
    if log.writes:
        with log.disk_errors_handled():
            seal(plan.run_dir, plan.sign_with)
