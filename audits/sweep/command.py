"""The command sweep: one audit file under several settings and seeds, on one page."""

from __future__ import annotations

import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from audits.options import AuditFile, DataDir, Device, Json, checked_audit_file, show
from audits.trials import Trial, make_trials
from indpriv.cli.common import check_device, check_folder
from indpriv.errors import InputError

if TYPE_CHECKING:
    from audits.sweep.findings import Sweep, TrialResult

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

    Example: python -m audits sweep audits/adult.toml --over max_grad_norm=0.1,0.3,0.5,1.5 --seeds 3

    Stopped, the same command goes on, also within the runs that have not ended. All runs are
    seeded, so their models have no privacy; choosing settings by the page costs privacy too.
    """
    from audits.sweep.page import page_of

    path, combinations = checked_audit_file(audit_file, "sweep"), _combinations(over or [])
    tables = _tables(path)
    output_dir = output_dir or Path("sweeps") / str(tables.get("name"))
    check_folder("--output-dir", output_dir)
    check_device(device)
    trials = [(values, _trials(tables, values, seeds, output_dir)) for values in combinations]
    every = [trial for _, row in trials for trial in row]
    if len({trial.run_dir for trial in every}) < len(every):
        raise InputError("--over has the same value twice; list each once")
    make_trials(every, output_dir, _NAME, jobs=jobs, data_dir=data_dir, device=device)
    found = _compare(trials, at_epsilon, at_accuracy)
    show(found, page_of(found), output_dir / _NAME, as_json=as_json)


def _tables(path: Path) -> dict[str, Any]:
    """The tables of an audit file, which is one as it stands."""
    from audits.training.config import AuditConfig

    AuditConfig.from_toml(path)
    return tomllib.loads(path.read_text(encoding="utf-8"))


def _compare(
    trials: Sequence[tuple[Mapping[str, Any], Sequence[Trial]]],
    at_epsilon: float | None,
    at_accuracy: float | None,
) -> Sweep:
    from audits.sweep.findings import sweep_of

    return sweep_of(
        trials[0][1][0].config.name,
        [(values, [_result(trial.audit_dir) for trial in row]) for values, row in trials],
        at_epsilon=at_epsilon,
        at_accuracy=at_accuracy,
    )


def _result(audit_dir: Path) -> TrialResult:
    """What an audit found."""
    from audits.sweep.findings import TrialResult
    from indpriv.analysis.summary import Audit
    from indpriv.audit.audit_directory import EPSILON, read_summary
    from indpriv.epsilon_table import EpsilonTable

    summary = Audit.from_json(read_summary(audit_dir))
    parts = EpsilonTable.open(audit_dir / EPSILON).tables()
    return TrialResult(summary, min(float(part.epsilon.min()) for part in parts))


def _combinations(over: Sequence[str]) -> list[dict[str, Any]]:
    """Every combination of the values of all keys."""
    if not over:
        raise InputError("sweep needs --over, e.g. --over max_grad_norm=0.1,0.3,1")
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
) -> list[Trial]:
    """The runs of one setting; InputError where it is no audit that can be swept."""
    from audits.training.config import AuditConfig

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
    config.check_central("sweep")
    if config.training.allow_no_privacy:
        raise InputError(f"{config.name} has no privacy, and a sweep compares epsilons")
    setting = re.sub(r"[^\w.=-]+", "-", "_".join(f"{key}={value}" for key, value in values.items()))
    names = [f"{setting}_seed={seed}" for seed in range(seeds)]
    return [
        Trial(config, seed, output_dir / "runs" / name, output_dir / "audits" / name)
        for seed, name in enumerate(names)
    ]
