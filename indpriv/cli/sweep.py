"""The command sweep: one audit file under several settings and seeds, on one page."""

from __future__ import annotations

import itertools
import multiprocessing
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from filelock import FileLock, Timeout
from rich.console import Console
from rich.markup import escape

from indpriv.cli.first_contact import checked_audit_file
from indpriv.cli.options import (
    AuditFile,
    DataDir,
    Device,
    Json,
    check_device,
    check_folder,
    print_json,
    progress_bar,
)
from indpriv.cli.run import filter_for
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.analysis.sweep.findings import Sweep, TrialResult
    from indpriv.training.config import AuditConfig

_NAME = "sweep"  # of its files
_TABLE = "training"  # of a key that names none

AtEpsilon = Annotated[
    float | None,
    typer.Option(
        help="Worst case at which accuracies are compared.",
        show_default="the largest that all runs reach",
    ),
]
AtAccuracy = Annotated[
    float | None,
    typer.Option(
        help="Test accuracy at which worst cases are compared.",
        show_default="the largest that all runs reach",
    ),
]


@dataclass(frozen=True)
class _Trial:
    """One run of a sweep.

    values: by key; run_dir, audit_dir: where its finished run and audit lie.
    """

    config: AuditConfig
    values: Mapping[str, Any]
    seed: int
    run_dir: Path
    audit_dir: Path

    def train_and_audit(self, data_dir: Path | None, device: str) -> None:
        """Do what is not done yet. A run has its final name only once it has ended."""
        from indpriv.audit import audit
        from indpriv.training.checkpoints import can_resume
        from indpriv.training.dp_sgd import train

        if not self.run_dir.exists():
            part = self.run_dir.with_name(f"{self.run_dir.name}.part")
            begun = can_resume(part, self.config)
            if part.exists() and not begun:
                shutil.rmtree(part)
            train(
                self.config,
                part,
                seed=self.seed,
                privacy_filter=filter_for(self.config),
                device=device,
                data_dir=data_dir,
                resume=begun,
            )
            part.rename(self.run_dir)
        audit(self.run_dir, self.audit_dir)

    @property
    def done(self) -> bool:
        """Whether its audit lies there.

        Raises:
            InputError: its run was trained from another audit file.
        """
        from indpriv._files import read_json
        from indpriv.audit.audit_directory import SUMMARY
        from indpriv.norm_log.run_files import RUN_JSON

        if not self.run_dir.exists():
            return False
        if read_json(self.run_dir / RUN_JSON)["config"] != self.config.to_dict():
            raise InputError(
                f"{self.run_dir} was trained from another version of the audit file; choose "
                "another --output-dir"
            )
        return (self.audit_dir / SUMMARY).is_file()

    def result(self) -> TrialResult:
        """What its audit found."""
        from indpriv.analysis.summary import AuditSummary
        from indpriv.analysis.sweep.findings import TrialResult
        from indpriv.audit.audit_directory import EPSILON, read_summary
        from indpriv.epsilon_table import EpsilonParts

        summary = AuditSummary.from_json(read_summary(self.audit_dir))
        parts = EpsilonParts.open(self.audit_dir / EPSILON).frames(["epsilon"])
        return TrialResult(summary, min(float(part["epsilon"].min()) for part in parts))


def sweep(
    audit_file: AuditFile = None,
    over: Annotated[
        list[str] | None,
        typer.Option(
            help="Key and values, e.g. max_grad_norm=0.1,0.3,1; of [training], or as "
            "model.hidden=[32],[64]. Can be given several times: all combinations are run. Keys "
            "that change together: max_grad_norm+learning_rate=0.5:0.4,1:0.2."
        ),
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs of each setting, with the seeds 0, 1, ...")
    ] = 3,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="Directory of runs, audits and the page.", show_default="sweeps/NAME"),
    ] = None,
    at_epsilon: AtEpsilon = None,
    at_accuracy: AtAccuracy = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Runs at the same time.", show_default="number of cores"),
    ] = None,
    data_dir: DataDir = None,
    device: Device = "cpu",
    as_json: Json = False,
) -> None:
    """Train and audit one file under several settings and seeds, and compare them on one page.

    Example: indpriv sweep audits/adult.toml --over max_grad_norm=0.1,0.3,0.5,1.5 --seeds 3

    Stopped, the same command goes on, also within the runs that have not ended. All runs are
    seeded, so their models have no privacy; choosing settings by the page costs privacy too.
    """
    from indpriv.report.renderers.page_files import write_page
    from indpriv.report.screens.sweep import page_of, print_sweep

    path, combinations = checked_audit_file(audit_file, "sweep"), _combinations(over or [])
    tables = _tables(path)
    output_dir = output_dir or Path("sweeps") / str(tables.get("name"))
    check_folder("--output-dir", output_dir)
    check_device(device)
    trials = [(values, _trials(tables, values, seeds, output_dir)) for values in combinations]
    _run([trial for _, row in trials for trial in row], output_dir, jobs, data_dir, device)
    found = _compare(trials, at_epsilon, at_accuracy)
    write_page(page_of(found), found.to_json(), output_dir, _NAME)
    if as_json:
        print_json(found.to_json())
        return
    console = Console(highlight=False)
    print_sweep(found, console)
    console.print(f"\n[bold]{escape(str(output_dir / f'{_NAME}.html'))}[/]", soft_wrap=True)


def _tables(path: Path) -> dict[str, Any]:
    """The tables of an audit file, which is one as it stands."""
    from indpriv.training.config import AuditConfig

    AuditConfig.from_toml(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _compare(
    trials: Sequence[tuple[Mapping[str, Any], Sequence[_Trial]]],
    at_epsilon: float | None,
    at_accuracy: float | None,
) -> Sweep:
    from indpriv.analysis.sweep.findings import sweep_of

    return sweep_of(
        trials[0][1][0].config.name,
        [(values, [trial.result() for trial in row]) for values, row in trials],
        at_epsilon=at_epsilon,
        at_accuracy=at_accuracy,
    )


def _combinations(over: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the values of all keys."""
    if not over:
        raise InputError("indpriv sweep needs --over, e.g. --over max_grad_norm=0.1,0.3,1")
    axes: list[list[dict[str, Any]]] = []
    seen: set[str] = set()
    for text in over:
        keys, separator, values = text.partition("=")
        names = keys.split("+")
        if not (separator and all(names) and values):
            raise InputError(f"--over {text}: pass KEY=VALUE,VALUE, e.g. max_grad_norm=0.1,0.3")
        for name in names:
            if name in seen:
                raise InputError(f"--over {name} is given twice; list all its values once")
            seen.add(name)
        axes.append(_points(names, values))
    return [
        {key: value for point in points for key, value in point.items()}
        for points in itertools.product(*axes)
    ]


def _points(names: Sequence[str], text: str) -> list[dict[str, Any]]:
    """What each place of one --over sets; several keys change together, as A:B,A:B says."""
    if len(names) == 1:
        return [{names[0]: value} for value in _values(text)]
    points = []
    for place in text.split(","):
        values = [value for part in place.split(":") for value in _values(part)]
        if len(values) != len(names):
            raise InputError(
                f"--over {'+'.join(names)}: {place} is not {len(names)} values with : between them"
            )
        points.append(dict(zip(names, values, strict=True)))
    return points


def _values(text: str) -> list[Any]:
    """Values as TOML has them; words need no quotation marks."""
    try:
        return list(tomllib.loads(f"values = [{text}]")["values"])
    except tomllib.TOMLDecodeError:
        return text.split(",")


def _trials(
    tables: Mapping[str, Any], values: Mapping[str, Any], seeds: int, output_dir: Path
) -> list[_Trial]:
    """The runs of one setting; InputError where it is no audit that can be swept."""
    from indpriv.training.config import AuditConfig

    changed = {
        name: dict(table) if isinstance(table, dict) else table for name, table in tables.items()
    }
    for key, value in values.items():
        table, _, name = key.rpartition(".")
        keys = changed.setdefault(table or _TABLE, {})
        if not isinstance(keys, dict):
            raise InputError(f"--over {key}: {table} is no table of the audit file")
        keys[name] = value
    config = AuditConfig.from_dict(changed)
    config.check_central("indpriv sweep")
    if config.training.allow_no_privacy:
        raise InputError(f"{config.name} has no privacy, and a sweep compares epsilons")
    setting = re.sub(r"[^\w.=-]+", "-", "_".join(f"{key}={value}" for key, value in values.items()))
    names = [f"{setting}_seed={seed}" for seed in range(seeds)]
    return [
        _Trial(config, values, seed, output_dir / "runs" / name, output_dir / "audits" / name)
        for seed, name in enumerate(names)
    ]


def _run(
    trials: Sequence[_Trial],
    output_dir: Path,
    jobs: int | None,
    data_dir: Path | None,
    device: str,
) -> None:
    """Train and audit what is not done yet, while no other sweep is at work in the directory."""
    if len({trial.run_dir for trial in trials}) < len(trials):
        raise InputError("--over has the same value twice; list each once")
    for folder in (output_dir, output_dir / "runs", output_dir / "audits"):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    try:
        with FileLock(output_dir / f"{_NAME}.lock", timeout=0):
            _run_all([one for one in trials if not one.done], jobs, data_dir, device)
    except Timeout as error:
        raise InputError(f"another sweep is at work in {output_dir}; wait until it ends") from error


def _run_all(
    trials: Sequence[_Trial], jobs: int | None, data_dir: Path | None, device: str
) -> None:
    """Several at once, each on its share of the cores."""
    from indpriv.accountant.blocks import n_cores

    jobs = min(jobs or n_cores(), len(trials))
    with progress_bar() as progress:
        progress("runs", 0, len(trials))
        if jobs < 2:
            for ended, trial in enumerate(trials, 1):
                trial.train_and_audit(data_dir, device)
                progress("runs", ended, len(trials))
            return
        pool = ProcessPoolExecutor(
            jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_use_threads,
            initargs=(max(1, n_cores() // jobs),),
        )
        try:
            work = [pool.submit(trial.train_and_audit, data_dir, device) for trial in trials]
            for ended, future in enumerate(as_completed(work), 1):
                future.result()
                progress("runs", ended, len(trials))
        finally:
            pool.shutdown(cancel_futures=True)


def _use_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)
