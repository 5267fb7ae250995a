"""The command lint: settings of an audit file or a run, compared with what the literature says."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from indpriv._shown import Console
from indpriv.cli.first_contact import checked_run, shipped_audits, typed
from indpriv.cli.options import DataDir, Json, print_json
from indpriv.errors import InputError

if TYPE_CHECKING:
    from indpriv.analysis.lint.training_facts import TrainingFacts
    from indpriv.training.config import AuditConfig

_AUDIT_FILE = ".toml"


def lint(
    path: Annotated[
        Path | None, typer.Argument(metavar="AUDIT.toml|RUN", help="Audit file or run directory.")
    ] = None,
    data_dir: DataDir = None,
    delta: Annotated[
        float | None,
        typer.Option(help="Delta of a run's guarantee.", show_default="the run's own"),
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit with code 1 on warnings too, not only on errors.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare settings of DP-SGD with the literature: batch size, clipping, learning rate, delta...

    Example: indpriv lint audits/adult.toml

    An audit file is judged before any training, a run by what it recorded. Exit code 1 if a rule of
    severity "error" fails.
    """
    from indpriv.analysis.lint.registry import lint as apply_rules
    from indpriv.analysis.lint.rule import ERROR, WARNING
    from indpriv.norm_log.evidence import FAILED
    from indpriv.report.screens.lint import lint_document, print_lint

    if path is None:
        raise InputError(
            "indpriv lint needs an audit file or a run directory; type: "
            f"{typed('lint', shipped_audits() / 'adult.toml')}"
        )
    if path.suffix == _AUDIT_FILE and not path.is_dir():
        facts = _facts_of_file(path, data_dir, delta)
    else:
        facts = _facts_of_run(checked_run(path, "lint"), delta)
    findings = apply_rules(facts)
    if as_json:
        print_json(lint_document(str(path), findings))
    else:
        print_lint(str(path), findings, Console(highlight=False))
    stopping = (ERROR, WARNING) if strict else (ERROR,)
    if any(each.status == FAILED and each.severity in stopping for each in findings):
        raise typer.Exit(1)


def _facts_of_file(path: Path, data_dir: Path | None, delta: float | None) -> TrainingFacts:
    from indpriv.analysis.lint.training_facts import facts_of_plan
    from indpriv.training.architectures import layer_counts
    from indpriv.training.config import AuditConfig

    if delta is not None:
        raise InputError(f"--delta is for runs; {path} says its delta itself, in [training]")
    config = AuditConfig.from_toml(path)
    config.check_central("indpriv lint")
    n_examples = _n_examples(config, data_dir)
    return facts_of_plan(config.to_dict(), n_examples, layer_counts(config.model))


def _n_examples(config: AuditConfig, data_dir: Path | None) -> int | None:
    """Number of training rows, from the data if a folder is given or they ship with a package."""
    from indpriv.training.datasets import DATASETS, load_dataset
    from indpriv.training.datasets.rows import chosen_rows

    kind = DATASETS[config.data.dataset]
    if not config.data.chooses and data_dir is None:
        return kind.n_train
    if kind.from_files and data_dir is None:
        return None
    return len(chosen_rows(load_dataset(config.data.dataset, data_dir), config.data).train)


def _facts_of_run(run_dir: Path, delta: float | None) -> TrainingFacts:
    from indpriv._checks import check_delta
    from indpriv.analysis.lint.training_facts import facts_of_run
    from indpriv.audit.run_directory import recorded_run
    from indpriv.norm_log.norm_log import open_run

    if delta is not None:
        check_delta(delta)
    opened = open_run(run_dir, unreadable="worst_case")
    run = recorded_run(opened, unreadable="worst_case")
    return facts_of_run(opened.log, run.recorder, run.declared, run.checks, delta)
