"""Reference runs of federated learning, recorded.

What they write is sensitive, except for the models under their guarantee.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from torch import nn

from audits.training.baseline import example_table
from audits.training.checkpoints import checkpoint_path, load_checkpoint, save_checkpoint
from audits.training.config import AuditConfig, FederatedConfig
from audits.training.curve import Curve
from audits.training.datasets import Dataset, load_dataset
from audits.training.dp_sgd import TrainedRun
from audits.training.federated.partition import CLIENT, ORIGINAL, copied, partitioned
from audits.training.federated.progress import PROGRESS, Progress
from audits.training.federated.rounds import Clients, Federation
from audits.training.leakage import leak_after_training
from audits.training.models import first_parameters
from audits.training.randomness import SEEDED_LABEL, Randomness
from audits.training.run_record import (
    check_complete,
    complete_record,
    finish_record,
    first_record,
    noise_and_clipping,
)
from audits.training.step_plan import epsilons_after, planned_steps
from audits.training.steps import stop_requests
from indpriv._files import write_json
from indpriv._folders import make_folder
from indpriv._storage import location_on_disk
from indpriv._types import FloatArray, IntArray, StageProgress, silent
from indpriv.accountant import account
from indpriv.accountant.laws import gaussian_epsilons
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.fields import StepSettings
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import EXAMPLES, RUN_JSON, signing_key
from indpriv.round_recorder import RoundRecorder

BY_CLIENT = "by_client"


def train_federated(
    config: AuditConfig,
    run_dir: str | Path,
    *,
    seed: int | None = None,
    progress: StageProgress | None = None,
    device: str = "cpu",
    data_dir: str | Path | None = None,
    dataset: Dataset | None = None,
    resume: bool = False,
    sign_with: str | Path | None = None,
) -> TrainedRun:
    """Train an audit's model in rounds of clients, and record them.

    Writes what `audits.training.dp_sgd.train` writes, and stops as it does. The log is of clients,
    or of rows if they are protected, with the norms of all who took part; there is none if nobody
    is protected. Arguments, errors and result are those of `train`; steps are rounds.

    resume: go on with the run in run_dir after its last checkpoint, with new coins and noise.
        Rounds after it, which only a crash leaves, become void; the audit says so. InputError if
        nothing can be resumed, or the run is seeded or of another audit.
    """
    if config.federated is None:
        raise InputError(f"{config.name} has no table [federated]; train it with `train`")
    run_dir, settings = location_on_disk(run_dir, "a run is"), config.federated
    started, randomness, begun, rows = time.monotonic(), Randomness.from_seed(seed), None, None
    if resume:
        begun = Progress.read(run_dir, config)
        randomness, rows = replace(randomness, shuffling=begun.shuffling), begun.curve
    dataset = dataset or load_dataset(config.data.dataset, data_dir)
    dataset = replace(dataset, train=copied(dataset.train, settings.copies))
    order = np.random.default_rng(randomness.shuffling)
    dataset, clients = _divided(dataset, *partitioned(dataset.train, settings, order))
    module = first_parameters(
        config.model, dataset.input_shape, dataset.n_classes, randomness.first_parameters
    ).to(device)
    run = Federation(settings, config.training.clipping, clients, module, dataset.train, randomness)
    planned = planned_steps(config.training, settings.rounds, settings.client_rate)
    facts = _training_facts(config, settings, clients, planned, device)
    about = first_record(config, dataset, module, facts, seeded=randomness.seeded)
    if settings.protect == "client":
        about["groups"] = []
    curve = Curve(module, 1 / settings.client_rate, dataset.test, device, rows)
    tell = progress or silent
    key = signing_key(sign_with)
    with _recording(run_dir, config, dataset, clients, about, begun, sign_with) as recorder:
        rounds = _Rounds(run, module, config, planned, curve, run_dir, randomness.shuffling)
        done, mus = rounds.take(recorder, begun, tell)
    curve.write(run_dir, planned, _epsilons(config, planned, mus))
    examples = _examples(module, dataset, device, settings)
    examples.to_parquet(run_dir / EXAMPLES)
    accuracy = float(examples.test["correct"].mean())
    guarantee = _guarantee(run_dir, config, seeded=randomness.seeded)
    spent = time.monotonic() - started
    complete_record(run_dir, guarantee, accuracy, done, settings.rounds, spent, key)
    check_complete(run_dir, done, settings.rounds, "rounds")
    leak_after_training(config, run_dir, dataset, seed, tell)
    finish_record(run_dir, PROGRESS, key)
    return TrainedRun(
        run_dir, module, done, guarantee["epsilon"] or np.inf, accuracy, guarantee["account"]
    )


def _examples(
    module: nn.Module, dataset: Dataset, device: str, settings: FederatedConfig
) -> ExampleTable:
    """Losses of all rows; labels and metadata of its rows are not those of a protected client."""
    names = dataset.train.units(_owner(settings)).to_numpy()
    if settings.protect != "client":
        return example_table(module, dataset, device, unit_ids=names)
    bare = replace(dataset, train=replace(dataset.train, metadata=None))
    frame = example_table(module, bare, device, unit_ids=names).frame
    return ExampleTable(frame.assign(label=frame["label"].mask(frame["split"] == "train")))


def _divided(
    dataset: Dataset, names: NDArray[np.generic], rows: list[IntArray]
) -> tuple[Dataset, Clients]:
    """The data set without rows of no client, and with a metadata column of clients."""
    owner = np.full(len(dataset.train), -1)
    for number, own in enumerate(rows):
        owner[own] = number
    train, owner = dataset.train.take(owner >= 0), owner[owner >= 0]
    metadata = pd.DataFrame(index=range(len(train))) if train.metadata is None else train.metadata
    train = replace(train, metadata=metadata.assign(**{CLIENT: names[owner]}))
    held = [np.flatnonzero(owner == number) for number in range(len(names))]
    originals = np.arange(len(train))
    if ORIGINAL in metadata:
        originals = np.unique(metadata[ORIGINAL], return_inverse=True)[1]
    left_over = len(dataset.train) - len(train)
    return replace(dataset, train=train), Clients(names, held, originals, left_over)


def _owner(settings: FederatedConfig) -> str:
    """The metadata column of unit ids: the client of a row, or the row that it is a copy of."""
    return ORIGINAL if settings.protect == "row" and settings.copies > 1 else CLIENT


def _training_facts(
    config: AuditConfig,
    settings: FederatedConfig,
    clients: Clients,
    planned: StepSettings,
    device: str,
) -> dict[str, Any]:
    """What run.json says of training."""
    sizes = [len(rows) for rows in clients.rows]
    return {
        "sampler": settings.sampler,
        "sample_rate": settings.client_rate,
        "planned_steps": settings.rounds,
        "clients": len(clients),
        "rows_per_client": [min(sizes), max(sizes)],
        "rows_left_over": clients.left_over,
        **noise_and_clipping(planned, config.training),
        "clipping": config.training.clipping,
        "delta": config.training.delta,
        "secure_mode": False,
        "device": device,
    }


def _sampler(settings: FederatedConfig) -> str:
    """The word of the log; coins of clients are secret only where the server adds all noise."""
    if settings.noise_place == "server":
        return settings.sampler
    return BY_CLIENT


@contextmanager
def _recording(
    run_dir: Path,
    config: AuditConfig,
    dataset: Dataset,
    clients: Clients,
    about: Mapping[str, Any],
    begun: Progress | None,
    sign_with: str | Path | None,
) -> Iterator[RoundRecorder | None]:
    """The recorder of the run; None, and run.json alone, if nobody is protected."""
    settings = config.federated
    if settings is None or settings.protect == "nobody":
        if begun is None and run_dir.exists():
            raise InputError(f"{run_dir} exists; choose another directory, or remove it")
        make_folder(run_dir)
        write_json(run_dir / RUN_JSON, about)
        yield None
        return
    by_row = settings.protect == "row"
    of_row = "example" if settings.copies == 1 else "row"
    steps_per_round = settings.local_steps if by_row else 1
    with RoundRecorder(
        run_dir,
        np.arange(len(clients.originals)) if by_row else clients.names,
        sampler=_sampler(settings),
        rounding=config.recording.rounding,
        unit=of_row if by_row else "client",
        unit_ids=dataset.train.units(_owner(settings)).to_numpy() if by_row else None,
        clipping=config.training.clipping,
        seeded=bool(about["seeded"]),
        resume_at=None if begun is None else begun.rounds * steps_per_round,
        sign_with=sign_with,
        run_info=about,
    ) as recorder:
        yield recorder


@dataclass
class _Rounds:
    """The rounds of a run, and what is kept at its checkpoints."""

    run: Federation
    module: nn.Module
    config: AuditConfig
    planned: StepSettings
    curve: Curve
    run_dir: Path
    shuffling: int
    mus: dict[int, float] = field(default_factory=dict)

    def take(
        self, recorder: RoundRecorder | None, begun: Progress | None, progress: StageProgress
    ) -> tuple[int, dict[int, float]]:
        """Train until the last round, or until a stop is asked for.

        Returns the number of rounds, and the largest mu under known participation at each
        checkpoint.
        """
        every, total = self.config.checkpoints.every, len(self.planned)
        epoch = max(1, round(1 / self.planned.at(0).sample_rate))
        gap = epoch if isinstance(every, str) else every
        done = self._go_on(begun)
        with stop_requests() as stop_asked:
            while done < total and not stop_asked():
                self.run.round(self.planned.at(done), recorder)
                done += 1
                progress("training", done, total)
                if done % gap == 0 or done == total:
                    self._save(done)
            if done not in self.mus:
                self._save(done)
        return done, self.mus

    def _go_on(self, begun: Progress | None) -> int:
        """The number of rounds that are done."""
        if begun is None:
            self._save(0)
            return 0
        path = checkpoint_path(self.run_dir, begun.rounds)
        self.module.load_state_dict(load_checkpoint(path).model_state_dict)
        self.run.read_parameters(self.module)
        self.run.squared_mu, self.mus = begun.squared_mu, begun.mus
        return begun.rounds

    def _save(self, done: int) -> None:
        self.run.write_parameters(self.module)
        self.mus[done] = self.run.largest_mu
        self.curve.add(done)
        save_checkpoint(self.run_dir, self.module, done, None)
        Progress(done, self.shuffling, self.run.squared_mu, self.mus, self.curve.rows).write(
            self.run_dir
        )


def _epsilons(config: AuditConfig, planned: StepSettings, mus: Mapping[int, float]) -> FloatArray:
    """Worst-case epsilon at each checkpoint; NaN if nobody is protected."""
    settings, delta = config.federated, config.training.delta
    steps = np.array(sorted(mus))
    if settings is None or settings.protect == "nobody":
        return np.full(len(steps), np.nan)
    if _sampler(settings) == "poisson":
        return epsilons_after(steps, planned, delta)
    return gaussian_epsilons(np.array([mus[step] for step in steps.tolist()]), delta)[1]


def _guarantee(run_dir: Path, config: AuditConfig, *, seeded: bool) -> dict[str, Any]:
    """What run.json says of the guarantee, from the log."""
    settings, delta = config.federated, config.training.delta
    if settings is None or settings.protect == "nobody":
        return {"epsilon": None, "claim": "none (nobody is protected)", "account": "no noise"}
    participation = "secret" if _sampler(settings) == "poisson" else "known"
    table = account(NormLog.open(run_dir), delta=delta, participation=participation)
    meaning = table.account
    return {
        "epsilon": table.worst_case_epsilon,
        "delta": delta,
        "claim": f"none ({SEEDED_LABEL})" if seeded else "worst_case",
        "unit": meaning.unit,
        "neighbouring": meaning.neighbouring,
        "sampler": meaning.sampler,
        "participation": participation,
        "account": f"{meaning.relation}, {meaning.sampling}, {meaning.method}",
    }
