"""What a release is about: one value for each person on a public grid, and what it assumes.

    EpsilonTable -> individual epsilons in [0, worst case]
    NormLog -> gradient norms before the first step, to choose a clipping norm by

Given all states of the model, one person more or less changes one record of {epsilon_i}, and the
costs of training and release add up (Yu et al. 2023, Theorem 3.2; arXiv:2206.02617v7).
docs/explanation/releases.md proves it, and says where it fails: such runs are refused, and what
run.json does not declare is on trust. Everything but the grid and the texts is sensitive.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, UndefinedError

from indpriv._checks import warn_caller
from indpriv._columns import grouping_of
from indpriv._facts import refused, text
from indpriv._formatting import clean, format_delta, format_epsilon
from indpriv._types import FloatArray, IntArray, NDArray
from indpriv.accountant.method import NUMERICAL_NOISE
from indpriv.analysis.guarantee import STANDS
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON, SUMMARY
from indpriv.epsilon_table import DISCLAIMER, EpsilonTable, relation_words
from indpriv.errors import InputError
from indpriv.norm_log.fields import CONTRIBUTIONS
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.records import Levels
from indpriv.norm_log.run_files import holds_log
from indpriv.norm_log.writer import fingerprint
from indpriv.release.ledger import Budget, Request
from indpriv.release.mechanisms import N_CELLS, norm_grid, to_norm_cells
from indpriv.report.formats import JINJA
from indpriv.report.formats import TEMPLATES as PAGE_TEMPLATES

TEMPLATES = Path(__file__).parent / "templates"
# Changes of an epsilon by more than this share can show in an answer.
_LAST_DIGITS = 1e-12
_NARROWEST = 1e-6  # tolerance up to which an accountant keeps its `numerical_noise`
# Relations under which a neighbouring data set has one record more or less
_ONE_RECORD_LESS = ("add_remove", "zero_out")
# Key of run.json: a list of the settings that were computed from the data, [] for none
CHOSEN_FROM_DATA = "chosen_from_data"


@dataclass(frozen=True)
class Source:
    """One value for each person, and what may be said about them."""

    # Sensitive: people at each value of the public grid by group ("" without a partition), and the
    # fingerprint of the values
    counts: Mapping[str, IntArray]
    fingerprint: str
    grid: FloatArray
    training: Budget | None  # the guarantee to compose with; None if values do not depend on it
    public: Mapping[str, Any]  # what release.json says of the source


def open_source(path: Path, request: Request) -> Source:
    """The individual epsilons of an audit directory, or the first norms of a run directory."""
    if (path / SUMMARY).is_file():
        return _epsilons(path, request)
    if holds_log(path):
        return _norms(path, request)
    raise refused("refusal.source", "no_audit", path=path, summary=SUMMARY)


def to_cells(values: FloatArray, upper: float, n_cells: int = N_CELLS) -> IntArray:
    """Cell of each value on the grid upper * (1, 2, ..., n_cells) / n_cells, rounded up.

    Values are clamped to [0, upper]. InputError for NaN or infinite ones, or a range without width.
    """
    odd = ~np.isfinite(values)
    if odd.any():
        raise refused("refusal.source", "not_finite", n=int(odd.sum()))
    if not (np.isfinite(upper) and upper > 0):
        raise refused("refusal.source", "no_range", worst=upper)
    cells = np.ceil(values / upper * n_cells - 1e-9)  # a value on the grid stays there
    clamped: IntArray = (np.clip(cells, 1, n_cells) - 1).astype(np.int64)
    return clamped


def check_releasable(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose persons are not one record each, or that a release cannot compose with."""
    check_one_record(summary)
    guarantee, account = summary["guarantee"], summary["account"]
    if account.get("participation", "secret") != "secret":
        raise refused("refusal.source", "known")
    relation = account.get("neighbouring", "add_remove")
    if relation not in _ONE_RECORD_LESS:
        raise refused("refusal.source", "relation", relation=relation)
    status = guarantee.get("status")
    if status not in STANDS:
        reasons = "; ".join(map(str, guarantee.get("reasons", ())))
        said = {"status": status, "reasons": reasons or "the audit does not say that it holds"}
        raise refused("refusal.source", "guarantee", **said)
    if guarantee.get("delta_times_n", 0) >= 1:
        warn_caller(text("sentence.warnings", "training_delta", delta=guarantee["delta"]))
    accountant, tolerance = account["accountant"], account.get("tolerance", 0)
    if tolerance > _NARROWEST:
        raise refused("refusal.source", "tolerance", tolerance=tolerance)
    if float(NUMERICAL_NOISE[accountant]) > _LAST_DIGITS:
        warn_caller(text("sentence.warnings", "numerical", accountant=accountant.upper()))
    n, n_units = summary["run"]["n_examples"], summary["run"]["n_units"]
    if n_units is not None and n_units != n and account.get("rows_per_unit") is None:
        raise refused("refusal.source", "people", n=n, n_units=n_units)


def check_one_record(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose epsilons, by run.json, depend on others' data beyond the trajectory."""
    check_noise(summary["run"].get("recorder") or {})
    account = summary["account"]
    if (account.get("sampler"), account.get("neighbouring")) == ("truncated_poisson", "add_remove"):
        raise refused("refusal.source", "truncated")  # how often a batch is full depends on n
    if chosen := declared_choices(summary):
        raise refused("refusal.source", "chosen", chosen=", ".join(chosen), key=CHOSEN_FROM_DATA)


def check_noise(recorder: Mapping[str, Any]) -> None:
    """Refuse a run that the recorder marks as not private, whatever its noise."""
    if reason := recorder.get("no_privacy"):
        raise InputError(f"nothing of this run may be published: {reason}; train it another way")


def declared_choices(summary: Mapping[str, Any]) -> list[str] | None:
    """The settings that were chosen from the data by run.json: [] for none, None if undeclared."""
    declared = summary["run"]["declared"].get(CHOSEN_FROM_DATA)
    if declared is None:
        return None
    if not (isinstance(declared, list) and all(isinstance(item, str) for item in declared)):
        raise refused("refusal.source", "no_list", key=CHOSEN_FROM_DATA, declared=declared)
    return declared


def paragraphs(template: str, **values: Any) -> list[str]:
    """The paragraphs of a text, which an empty line divides; no value in it divides one."""
    parts = filled(template, **values).split("\n\n")
    return [part.strip().replace("\n", " ") for part in parts if part.strip()]


def filled(template: str, **values: Any) -> str:
    """A template with its values, each on one line and harmless; LookupError if one is missing."""
    try:
        return _templates(template.endswith(".html.j2")).get_template(template).render(**values)
    except UndefinedError as error:
        raise LookupError(str(error)) from error


@cache
def _templates(autoescape: bool) -> Environment:
    made = Environment(
        loader=FileSystemLoader([TEMPLATES, PAGE_TEMPLATES]),  # the latter holds the style
        autoescape=autoescape,
        finalize=lambda value: clean(value) if type(value) is str else value,
        **JINJA,
    )
    filters = {"json": partial(json.dumps, ensure_ascii=False)}
    made.filters |= filters | {"epsilon": format_epsilon, "delta": format_delta}
    return made


def _epsilons(audit_dir: Path, request: Request) -> Source:
    summary = read_summary(audit_dir)
    check_releasable(summary)
    parts, guarantee = EpsilonTable.open(audit_dir / EPSILON), summary["guarantee"]
    table = parts.table()
    upper, account = table.worst_case_epsilon, table.account
    if (upper, vars(account)) != (guarantee["worst_case_epsilon"], summary["account"]):
        said = {"audit_dir": audit_dir, "epsilon": EPSILON, "summary": SUMMARY}
        raise refused("refusal.source", "different", **said)
    cells, own = to_cells(table.epsilon, upper), np.full(len(table), "", dtype=object)
    if request.by:
        frame = parts.to_frame()
        groups = grouping_of(frame, None, request.by, max_values=None)
        own = np.array(groups.names, dtype=object)[groups.codes(frame)]
    # By name, which combinations can share; an empty group is counted like any other.
    names = request.groups or ("",)
    counts = {name: np.bincount(cells[own == name], minlength=N_CELLS) for name in names}
    training = Budget.of(upper, account.delta)
    assumptions = paragraphs(
        "assumptions.txt.j2",
        account={"clipping_norm_epsilon": 0, **summary["account"]},
        guarantee=guarantee,
        training=training,
        request=request,
        cost=request.cost,
        relation=relation_words(account.neighbouring),
        rows=account.rows_per_unit or 1,
        clipping=summary["run"]["max_grad_norm"],
        claim=summary["claim"],
        undeclared=declared_choices(summary) is None,
        numerical_noise=NUMERICAL_NOISE[account.accountant],
    )
    return Source(
        counts=counts,
        fingerprint=fingerprint(table.example_ids) + fingerprint(table.epsilon),
        grid=upper * np.arange(1, N_CELLS + 1) / N_CELLS,
        training=training,
        public={
            "name": str(summary["name"]),
            "quantity": "individual epsilon",
            "meaning": f"Individual epsilon ({summary['claim']}) at {account.describe()}. "
            f"{DISCLAIMER}",
            "unit": account.unit,
            "neighbouring": account.neighbouring,
            "values": f"{N_CELLS:,} equally spaced values up to the worst case, "
            f"{format_epsilon(upper)}; epsilons are rounded up to them",
            "assumptions": assumptions,
        },
    )


def _norms(run_dir: Path, request: Request) -> Source:
    if request.by or request.mean:
        raise refused("refusal.source", "norms_only")
    run = open_run(run_dir)
    log, recorder = run.log, run.header["run"]
    check_noise(recorder)
    if log.n_records == 0 or log.recorded_steps[0] != 0:
        raise refused("refusal.source", "no_record", run_dir=run_dir)
    if log.unit_ids is not None and len(np.unique(log.unit_ids)) != log.n_examples:
        raise refused("refusal.source", "rows", run_dir=run_dir)
    row = log.records[:1].read(0, log.n_examples)[0]
    clipping = str(recorder.get("clipping", "flat"))
    meaning = "Norm of one example's gradient at the initial parameters, before clipping"
    meaning += ", and the headroom of individual clipping." if clipping == "individual" else "."
    if clipping in CONTRIBUTIONS:
        meaning = f"Of the first step: {CONTRIBUTIONS[clipping]}."
    grid, codes, grid_text = _norm_grid(row, log.levels, float(log.settings.max_grad_norm[0]))
    replaced = log.neighbouring not in _ONE_RECORD_LESS  # which changes two counts
    relation = "add_remove" if replaced else log.neighbouring
    return Source(
        counts={"": np.bincount(codes, minlength=len(grid))},
        fingerprint=fingerprint(np.asarray(log.example_ids)) + fingerprint(codes),
        grid=grid,
        training=None,
        public={
            "name": run_dir.resolve().name,
            "quantity": "gradient norm before the first step",
            "meaning": meaning,
            "unit": log.unit,
            "neighbouring": relation,
            "values": grid_text,
            "assumptions": paragraphs(
                "assumptions.txt.j2",
                relation=relation_words(relation),
                replaced=replaced,
                unit=log.unit,
                cost=request.cost,
            ),
        },
    )


def _norm_grid(
    row: NDArray[np.generic], levels: Levels, max_grad_norm: float
) -> tuple[FloatArray, IntArray, str]:
    """A public grid of norms, the cell of each norm (rounded up), and the grid in words.

    Norms kept in full are put on values in equal ratios, those of a log with levels on its levels.
    """
    if not levels.rounding:
        grid = norm_grid(max_grad_norm)
        ends = f"{N_CELLS:,} values in equal ratios from {grid[0]:.4g} to {grid[-1]:.4g}"
        cells = to_norm_cells(row.astype(np.float64), grid)
        return grid, cells, f"{ends}; norms are rounded up to them"
    every_code = np.arange(levels.max_code + 1, dtype=np.int64)
    grid = levels.norms(every_code.astype(levels.dtype), max_grad_norm)
    found = {"n": len(grid), "levels": levels, "clip": max_grad_norm, "last": grid[-1]}
    return grid, row.astype(np.int64), text("sentence.released", "grid", **found)
