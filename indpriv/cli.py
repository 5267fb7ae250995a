"""The command line: one short command per arrow of the flow. What it prints is for the curator: sensitive.

Exit codes: 0 done, 1 a verification failed, 2 bad input (one message, no traceback), 130 interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from indpriv.analysis.attack_measures import measure_attack
from indpriv.attack_scores import AttackScores
from indpriv.audit import audit as audit_run
from indpriv.audit import compare_audits, comparison_json, groups_json, groups_of, read_summary
from indpriv.convert import convert as convert_norms
from indpriv.errors import InputError
from indpriv.evidence import FAILED, NOT_CHECKED, PASSED
from indpriv.files import read_json
from indpriv.formatting import format_delta, format_epsilon
from indpriv.journal import NAME as JOURNAL
from indpriv.norm_log import NormLog
from indpriv.report.attack import attack_document, print_attack
from indpriv.report.comparison import print_comparison
from indpriv.report.terminal import print_audit, print_groups
from indpriv.verify import verify as verify_run

app = typer.Typer(
    name="indpriv",
    help="How much privacy did each training example get in this DP-SGD run, and which groups are worse off?",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

statement_app = typer.Typer(name="statement", help="What one owner may be told.", no_args_is_help=True)
app.add_typer(statement_app)

DEMO = "adult.toml"
REPLAY = "For a folder of checkpoints"  # heading in --help

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON, for machines.")]
By = Annotated[
    list[str] | None,
    typer.Option(
        "--by",
        help="Column to compare groups by, e.g. race, age:bins=10, or race,sex for combinations. May be given several times.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Repeatable sampling and noise. Such a run has no privacy, and is labelled so everywhere."),
]


@app.callback(invoke_without_command=True)
def _options(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if show_version:
        typer.echo(f"indpriv {version('indpriv')}")
        raise typer.Exit


@app.command()
def demo(
    output_dir: Annotated[Path, typer.Option(help="Where the run and its audit go.")] = Path("reports/adult-demo"),
    seed: Seed = None,
    as_json: Json = False,
) -> None:
    """Train on UCI Adult with DP-SGD, recording every step, and audit the run.

    Example: indpriv demo --output-dir reports/adult-demo
    """
    _check_folder("--output-dir", output_dir)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dir = output_dir / "run"
    if run_dir.exists():
        _clear_old_demo(run_dir)
    _train(_demo_audit_file(), run_dir, seed, data_dir=None, device="cpu", quiet=as_json)
    _audit(run_dir, output_dir, quiet=as_json)


@app.command()
def train(
    audit_file: Annotated[Path, typer.Argument(metavar="AUDIT.toml", help="One audit, e.g. audits/adult.toml.")],
    run_dir: Annotated[Path | None, typer.Option(help="New directory of the run. [default: runs/NAME]")] = None,
    seed: Seed = None,
    data_dir: Annotated[
        Path | None, typer.Option(envvar="INDPRIV_DATA", help="Folder of data sets that do not ship with the package.")
    ] = None,
    device: Annotated[str, typer.Option(help="Where to train, e.g. cpu or cuda.")] = "cpu",
    canaries: Annotated[
        int, typer.Option(help="Mislabelled training examples that fair coins include, to audit the run by; 0 is none.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Train an audit's model with DP-SGD, record it and save its checkpoints.

    Example: indpriv train audits/digits.toml --run-dir runs/digits
    """
    facts = _train(audit_file, run_dir, seed, data_dir=data_dir, device=device, quiet=as_json, canaries=canaries)
    if as_json:
        typer.echo(json.dumps(facts, indent=2))


@app.command()
def audit(
    path: Annotated[
        Path, typer.Argument(metavar="RUN", help="Run directory that a Recorder wrote, or a folder of checkpoints.")
    ],
    output_dir: Annotated[Path | None, typer.Option(help="Audit directory to write. [default: RUN/audit]")] = None,
    delta: Annotated[float | None, typer.Option(help="Delta of the guarantee. [default: the run's own]")] = None,
    accountant: Annotated[str, typer.Option(help="rdp or pld.")] = "rdp",
    conversion: Annotated[
        str, typer.Option(help="From RDP to epsilon and delta: canonne2020 or mironov2017.")
    ] = "canonne2020",
    between_records: Annotated[
        str, typer.Option(help="Norms assumed between records: last, closest or worst-case.")
    ] = "last",
    preset: Annotated[
        str | None, typer.Option(help="yu2023: account as the paper did (needs a log rounded to nearest).")
    ] = None,
    by: By = None,
    unreadable: Annotated[
        str, typer.Option(help="Damaged or missing records: refuse, or count them at worst-case.")
    ] = "refuse",
    seed: Annotated[int, typer.Option(help="Of the attack's random choices; not of training.")] = 0,
    spec: Annotated[
        str | None, typer.Option(help="For checkpoints: the AuditSpec, package.module:spec or path/to/file.py:spec.")
    ] = None,
    noise_multiplier: Annotated[
        str | None, typer.Option(help="Of the run; 1.1,0.9@500 is 1.1, from step 500 on 0.9.", rich_help_panel=REPLAY)
    ] = None,
    max_grad_norm: Annotated[str | None, typer.Option(help="Likewise.", rich_help_panel=REPLAY)] = None,
    sample_rate: Annotated[str | None, typer.Option(help="Likewise; the Poisson rate.", rich_help_panel=REPLAY)] = None,
    steps: Annotated[int | None, typer.Option(help="Of the whole run.", rich_help_panel=REPLAY)] = None,
    sampler: Annotated[str | None, typer.Option(help="poisson, shuffled or other.", rich_help_panel=REPLAY)] = None,
    device: Annotated[str, typer.Option(help="Where to take norms, e.g. cuda.", rich_help_panel=REPLAY)] = "cpu",
    batch_size: Annotated[str, typer.Option(help="Of the norm pass, or auto.", rich_help_panel=REPLAY)] = "auto",
    processes: Annotated[int, typer.Option(help="Checkpoints to work on at a time.", rich_help_panel=REPLAY)] = 1,
    as_json: Json = False,
) -> None:
    """Account, analyse and attack a run, recorded or replayed; write epsilon.parquet, audit.json and report.html.

    Example: indpriv audit runs/adult --output-dir reports/adult --by race --by sex

    A run that was never recorded is replayed from its checkpoints: indpriv audit checkpoints --spec train.py:spec
    --max-grad-norm 1.0 --sampler poisson --delta 1e-5. An interrupted replay continues at the next checkpoint.
    """
    output_dir = output_dir or path / "audit"
    settings: dict[str, Any] = {
        "noise_multiplier": noise_multiplier,
        "max_grad_norm": max_grad_norm,
        "sample_rate": sample_rate,
        "steps": steps,
        "sampler": sampler,
    }
    if spec is not None:
        settings["delta"] = delta
        path = _replay(path, spec, output_dir, settings, device=device, batch_size=batch_size, processes=processes)
    elif given := [f"--{name.replace('_', '-')}" for name, value in settings.items() if value is not None]:
        raise InputError(f"{', '.join(given)}: only for a folder of checkpoints, and those need --spec")
    _audit(
        path,
        output_dir,
        quiet=as_json,
        delta=delta,
        accountant=accountant,
        conversion=conversion,
        between_records=between_records.replace("-", "_"),
        preset=preset,
        by=by or [],
        unreadable=unreadable.replace("-", "_"),
        seed=seed,
    )


@app.command()
def groups(
    audit_dir: Annotated[Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")],
    by: By = None,
    within: Annotated[str | None, typer.Option(help="label: show only the tables within each label.")] = None,
    min_size: Annotated[int, typer.Option(help="Groups with fewer training examples are too small to read.")] = 10,
    as_json: Json = False,
) -> None:
    """Compare groups of an audit: epsilon and accuracy, raw, within each label and label-standardised.

    Example: indpriv groups reports/adult --by race --by sex --by race,sex --by age:bins=10
    """
    tables = groups_of(audit_dir, by or [], within=within, min_size=min_size)
    summary = read_summary(audit_dir)
    if as_json:
        typer.echo(json.dumps(groups_json(tables, summary), indent=2, allow_nan=False))
    else:
        print_groups(tables, summary, Console(), raw=within is None)


@app.command()
def release(
    path: Annotated[
        Path, typer.Argument(metavar="AUDIT_DIR", help="An audit; or a RUN, for norms before its first step.")
    ],
    epsilon: Annotated[
        float, typer.Option(help="What this release may cost, e.g. 0.1, on top of the run's guarantee.")
    ],
    quantiles: Annotated[str, typer.Option(help='Each in (0, 1); "" for none.')] = "0.1,0.3,0.5,0.7,0.9",
    mean: Annotated[bool, typer.Option("--mean", help="Release the mean, and a noisy number of people.")] = False,
    delta: Annotated[float, typer.Option(help="For method descent only.")] = 0.0,
    method: Annotated[
        str,
        typer.Option(
            help="exponential, histogram (many quantiles at the price of one) or descent (Andrew et al. 2021)."
        ),
    ] = "exponential",
    by: Annotated[str, typer.Option(help="Column of groups, each named by --group.")] = "",
    group: Annotated[list[str] | None, typer.Option(help="A group to show; the list must be public.")] = None,
    public_n: Annotated[int | None, typer.Option(help="Number of people, if that is public anyway.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="Limit on all releases of this audit, set once: EPSILON or EPSILON,DELTA.")
    ] = None,
    spend: Annotated[
        bool, typer.Option("--spend", help="Draw afresh and pay again, though the answer is stored.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Release quantiles and the mean of individual epsilon with differential privacy, for others to see.

    Example: indpriv release reports/adult --quantiles 0.1,0.3,0.5,0.7,0.9 --mean --epsilon 0.1 --budget 0.5
    """
    from indpriv.release import Request, parse_budget, parse_quantiles
    from indpriv.release import release as release_figures
    from indpriv.release.page import print_release

    request = Request(
        parse_quantiles(quantiles),
        mean,
        epsilon=epsilon,
        delta=delta,
        method=method,
        by=by,
        groups=tuple(group or ()),
        public_n=public_n,
    )
    published = release_figures(path, request, budget=parse_budget(budget) if budget else None, spend=spend)
    if as_json:
        typer.echo(json.dumps(published.content, indent=2, allow_nan=False))
        return
    console = Console()
    print_release(published.content, console)
    drawn = "drawn now and paid for" if published.fresh else "stored: shown again at no cost; --spend draws afresh"
    console.print(f"\n[bold]{escape(str(published.folder))}[/] ({drawn})", soft_wrap=True, highlight=False)


@statement_app.command("create")
def create_statement(
    audit_dir: Annotated[Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")],
    example: Annotated[str | None, typer.Option(help="Id of the example whose owner is told.")] = None,
    unit: Annotated[str | None, typer.Option(help="Id of the person, where rows belong to people.")] = None,
    everybody: Annotated[bool, typer.Option("--all", help="One file for every owner.")] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="Folder of statements. [default: AUDIT_DIR/statements]")
    ] = None,
    as_json: Json = False,
) -> None:
    """Tell one owner, or each, their own epsilon, on a page in plain language. It is for that owner only.

    Example: indpriv statement create reports/adult --example 17
    """
    from indpriv.release.statement import owners, write_statements

    if (example is not None) + (unit is not None) + everybody != 1:
        raise InputError("pass one of --example ID, --unit ID and --all")
    chosen = owners(audit_dir, example=example, unit=unit)
    with _progress() as progress:
        paths = write_statements(audit_dir, chosen, output_dir, progress)
    if as_json:
        typer.echo(json.dumps([str(path) for path in paths], indent=2))
    elif everybody:
        typer.echo(f"{len(paths)} statements in {paths[0].parent}, each for one owner only")
    else:
        typer.echo(paths[0].read_text(encoding="utf-8"))
        typer.echo(f"{paths[0]}: for this owner only")


@app.command()
def attack(
    scores: Annotated[Path, typer.Option(help="CSV or Parquet: score (higher = member), member, optionally group.")],
    delta: Annotated[float, typer.Option(help="Delta of the (epsilon, delta) that is bounded from below.")] = 1e-5,
    fair_coins: Annotated[
        bool, typer.Option("--fair-coins", help="An independent fair coin decided each membership.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of the order of ties and of what is left out; not of training.")] = 0,
    as_json: Json = False,
) -> None:
    """Measure any attack's scores: AUC, low false-positive rates, and a lower bound on the worst-case epsilon.

    Example: indpriv attack --scores runs/adult/canaries.parquet
    """
    found = AttackScores.from_file(scores)
    measures = measure_attack(replace(found, fair_coins=fair_coins or found.fair_coins), delta=delta, seed=seed)
    if as_json:
        typer.echo(json.dumps(attack_document(measures), indent=2, allow_nan=False))
    else:
        print_attack(measures, Console())


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="AUDIT_DIR", help="A directory with an audit.json.")],
    second: Annotated[Path, typer.Argument(metavar="AUDIT_DIR", help="Another, of the same data.")],
    by: By = None,
    as_json: Json = False,
) -> None:
    """Compare two audits of the same data: who is better or worse off in the second, by group.

    Example: indpriv compare reports/adult reports/adult-clipped --by race
    """
    comparison, ours, theirs = compare_audits(first, second, by or [])
    if as_json:
        typer.echo(json.dumps(comparison_json(comparison, ours, theirs), indent=2, allow_nan=False))
    else:
        print_comparison(comparison, ours, theirs, Console())


@app.command()
def convert(
    norms: Annotated[Path, typer.Argument(metavar="NORMS", help="norms.parquet or norms.npz of any trainer.")],
    run_json: Annotated[Path, typer.Option("--run", help="run.json: steps, noise, clipping and sampling of that run.")],
    output_dir: Annotated[Path, typer.Option(help="New run directory.")],
    rounding: Annotated[
        float, typer.Option(help="Of norms, upwards, as a fraction of max_grad_norm; 0 is none.")
    ] = 0.01,
    as_json: Json = False,
) -> None:
    """Turn norms that another trainer wrote (JAX, TF, ...) into a run directory, wholly checked.

    Example: indpriv convert norms.npz --run run.json --output-dir runs/jax
    """
    _check_folder("--output-dir", output_dir)
    with _progress() as progress:
        convert_norms(norms, run_json, output_dir, rounding=rounding, progress=progress)
    log = NormLog.open(output_dir)
    if as_json:
        facts = {"run_dir": str(output_dir), "examples": log.n_examples, "records": log.n_records}
        typer.echo(json.dumps({**facts, "steps": log.total_steps}, indent=2))
    else:
        typer.echo(f"{output_dir}: {log.n_records} records of {log.n_examples} examples, {log.total_steps} steps")


@app.command()
def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory that a Recorder wrote.")],
    as_json: Json = False,
) -> None:
    """Check a run's log: hashes, coverage, sampling, Opacus's accountant. Exit code 1 where a check fails.

    Example: indpriv verify runs/adult
    """
    if not run_dir.is_dir():
        raise InputError(f"{run_dir} is not a directory; pass the run directory of a Recorder, e.g. runs/adult")
    if not (run_dir / JOURNAL).is_file():
        raise InputError(f"{run_dir} holds no {JOURNAL}; pass the run directory of a Recorder, e.g. runs/adult")
    checks = verify_run(run_dir)
    if as_json:
        typer.echo(json.dumps([vars(check) for check in checks], indent=2))
    else:
        table = Table("check", "status", "detail", title=f"Evidence in {escape(str(run_dir))}", title_justify="left")
        colours = {PASSED: "green", FAILED: "bold red", NOT_CHECKED: "yellow"}
        for check in checks:
            status = f"[{colours[check.status]}]{check.status}[/]"
            table.add_row(escape(check.name), status, escape(check.detail))
        Console().print(table)
    if any(check.status == FAILED for check in checks):
        raise typer.Exit(1)


def _train(
    audit_file: Path,
    run_dir: Path | None,
    seed: int | None,
    *,
    data_dir: Path | None,
    device: str,
    quiet: bool,
    canaries: int = 0,
) -> dict[str, Any]:
    from indpriv.training.canaries import train_with_canaries
    from indpriv.training.config import AuditConfig
    from indpriv.training.dp_sgd import train as train_run

    config = AuditConfig.from_toml(audit_file)
    run_dir = run_dir or Path("runs") / config.name
    _check_folder("--run-dir", run_dir)
    _check_device(device)
    with _progress() as progress:
        options: dict[str, Any] = {"seed": seed, "progress": progress, "device": device, "data_dir": data_dir}
        if canaries:
            run = train_with_canaries(config, run_dir, canaries, **options)
        else:
            run = train_run(config, run_dir, **options)
    if not quiet:
        claim = (
            "guarantee: worst-case epsilon"
            if seed is None
            else "no guarantee (seeded, reproducible: no privacy); unseeded its worst-case epsilon would be"
        )
        Console(highlight=False, soft_wrap=True).print(
            f"{escape(str(run.run_dir))}: {run.steps} steps, test accuracy {run.test_accuracy:.4f}; {claim} "
            f"{format_epsilon(run.worst_case_epsilon)} at delta {format_delta(config.training.delta)} "
            "(add/remove one example, Poisson sampling, Opacus's RDP accountant)"
        )
    return dict(read_json(run.run_dir / "run.json"))


def _check_folder(option: str, folder: Path) -> None:
    """InputError where a folder cannot be made because a file stands in its way."""
    for part in (folder, *folder.parents):
        if part.exists():
            if not part.is_dir():
                raise InputError(f"{option} {folder}: {part} is a file, and a directory is needed; choose another path")
            return


def _check_device(device: str) -> None:
    """InputError where PyTorch cannot compute on the device."""
    import torch

    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:  # which of them depends on how PyTorch was built
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"--device {device} cannot be used: {reason}; pass cpu, or a device that this build of PyTorch has"
        ) from error


def _replay(
    path: Path,
    spec: str,
    output_dir: Path,
    settings: dict[str, Any],
    *,
    device: str,
    batch_size: str,
    processes: int,
) -> Path:
    """Replay the checkpoints in a folder into OUTPUT_DIR/replay, a run directory, and return that."""
    from indpriv.recording import StepOptions, replay

    if (path / JOURNAL).is_file():
        raise InputError(f"{path} is a recorded run: audit it without --spec, or pass its checkpoints")
    _check_folder("--output-dir", output_dir)
    _check_device(device)
    output_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    told = Console(stderr=True, highlight=False, soft_wrap=True)
    with _progress() as progress:
        replay(
            path,
            spec,
            output_dir / "replay",
            options=StepOptions(**settings),
            device=device,
            batch_size=int(batch_size) if batch_size.isdecimal() else batch_size,
            processes=processes,
            progress=progress,
            tell=lambda text: told.print(escape(text)),
        )
    return output_dir / "replay"


def _audit(path: Path, output_dir: Path, *, quiet: bool, **options: Any) -> None:
    _check_folder("--output-dir", output_dir)
    with _progress() as progress:
        summary = audit_run(path, output_dir, progress=progress, **options)
    if quiet:
        typer.echo(json.dumps(summary.to_json(), indent=2, allow_nan=False))
        return
    console = Console()
    print_audit(summary, console)
    console.print(f"\n[bold]{escape(str(output_dir / 'report.html'))}[/]", soft_wrap=True, highlight=False)


def _demo_audit_file() -> Path:
    """audits/adult.toml: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).parent
    return next(path for path in (package.parent / "audits" / DEMO, package / "audits" / DEMO) if path.is_file())


def _clear_old_demo(run_dir: Path) -> None:
    """Remove the run of an earlier demo; refuse to remove anything else."""
    record = run_dir / "run.json"
    if not (record.is_file() and read_json(record).get("name") == Path(DEMO).stem):
        raise InputError(f"{run_dir} is not the run of an earlier demo; choose another --output-dir")
    shutil.rmtree(run_dir)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on standard error, one line per stage."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks: dict[str, Any] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total)
            bar.update(tasks[stage], completed=done)

        yield tell


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command line on arguments (default sys.argv) and return its exit code."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        app(arguments)
    except SystemExit as end:
        return int(end.code or 0)
    except InputError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}")
    except OSError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}; check the path, its permissions and the free space")
    return 2


def main() -> NoReturn:
    """Run the command line as a process of its own; the entry point `indpriv`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch starts its threads
    signal.signal(signal.SIGTERM, _interrupted)  # as Ctrl-C: temporary files go, exit code 130
    warnings.filterwarnings("ignore", module=r"(torch|opacus)(\.|$)")
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    warnings.showwarning = lambda message, *_, **__: errors.print(f"[yellow]warning:[/] {escape(str(message))}")
    sys.exit(run())
