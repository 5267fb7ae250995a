"""Statements for owners: what one person may be told about their own records. Sensitive: for that owner only.

Telling owner i their own epsilon costs nobody else anything: given all states of the trained model, which count as released,
it is a function of their example (and of its own sampling) alone, so that outcome -> (value, outcome) is a bijection, the
condition of Theorem 3.2 of Yu et al. 2023 (section 3.4; arXiv:2206.02617v7). Nothing else of the data may enter a statement:
no claim in the audit's own words, which can count other examples, and no number of examples.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd

from indpriv._files import read_parquet, write_atomically
from indpriv._formatting import format_epsilon, format_share_up
from indpriv.analysis.guarantee import (
    FALSE_POSITIVE_RATE,
    SUPPORTED,
    UNPROVEN,
    VOID,
    true_positive_bound,
)
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES
from indpriv.release.assumptions import check_one_record, declared_choices
from indpriv.report.renderers.terminal import clean

STATEMENTS = "statements"
_WIDTH = 92
_CLAIMS = {
    "exact": "exact: never too small for the training that happened",
    "estimate": "an estimate: the true value for this training can be larger",
}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Owner:
    """A person: how many rows are theirs, their epsilon for all of them together, and what so many rows have at most."""

    kind: str
    name: str
    n_rows: int
    epsilon: float
    worst_case_epsilon: float


def owners(audit_dir: Path, *, example: str | None = None, unit: str | None = None) -> list[Owner]:
    """The owner of one example or of one unit, or every owner of an audit.

    Args:
        audit_dir: the audit.
        example: id of an example.
        unit: id of a unit: a person with one row or several. Where neither is given: everybody, one owner a unit.

    Raises:
        InputError: no such example or unit, or both asked for.
    """
    if example is not None and unit is not None:
        raise InputError("both --example and --unit were given; pass one of them")
    table = EpsilonTable.from_frame(read_parquet(audit_dir / EPSILON))
    by_unit = table.account.rows_per_unit is not None
    n_rows = table.details["n_rows"].tolist() if "n_rows" in table.details else [1] * len(table)
    worst = table.details.get(
        "unit_worst_case", pd.Series(table.worst_case_epsilon, range(len(table)))
    ).tolist()
    names = [str(item) for item in table.example_ids.tolist()]
    figures = dict(zip(names, zip(n_rows, table.epsilon.tolist(), worst, strict=True), strict=True))
    if example is not None:
        if by_unit:
            raise InputError(
                f"--example {example}: this audit is of people, not of rows; pass --unit ID of the person"
            )
        if example not in figures:
            raise InputError(f"--example {example}: the audit has no training example of that id")
        return [Owner("example", example, *figures[example])]
    unit_ids = names if by_unit else _unit_ids(audit_dir, table)
    rows_of: dict[str, list[str]] = {}
    for name, owner in zip(names, unit_ids, strict=True):
        rows_of.setdefault(owner, []).append(name)
    if unit is not None and unit not in rows_of:
        raise InputError(f"--unit {unit}: the audit has no training example of such a unit")
    chosen = rows_of if unit is None else {unit: rows_of[unit]}
    for owner, rows in chosen.items():
        if len(rows) > 1:
            raise InputError(
                f"unit {owner} has {len(rows)} rows, and this audit counts rows: their epsilons do not add up to a figure for the "
                'person. Audit by people (a run recorded with unit="user", or indpriv audit RUN --unit-column NAME)'
            )
    return [Owner("unit", owner, *figures[rows[0]]) for owner, rows in chosen.items()]


def statement(owner: Owner, summary: Mapping[str, Any]) -> str:
    """One page of plain text for one owner.

    Args:
        owner: whose rows they are.
        summary: the content of audit.json.
    """
    sections = [
        ("", _opening(owner, summary)),
        ("What everybody is promised", _promise(owner, summary)),
        (
            "What this training did with your record" + "s" * (owner.n_rows > 1),
            _own(owner, summary),
        ),
        ("What your number does not mean", _NOT_MEANT),
        ("Keep this page to yourself", _keep(summary)),
    ]
    blocks = [
        [title.upper()] * bool(title) + [fill(line, _WIDTH) for line in lines]
        for title, lines in sections
    ]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def write_statements(
    audit_dir: Path,
    chosen: Sequence[Owner],
    output_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Write one file an owner (0600), by default in AUDIT_DIR/statements; the paths in the order of `chosen`.

    Raises:
        InputError: a run whose values may not be told: see `assumptions.check_one_record`.
    """
    summary = read_summary(audit_dir)
    check_one_record(summary)
    folder = output_dir or audit_dir / STATEMENTS
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    paths = []
    for number, owner in enumerate(chosen, 1):
        path = folder / f"{owner.kind}-{_file_name(owner.name)}.txt"
        write_atomically(path, statement(owner, summary).encode("utf-8", "replace"))
        paths.append(path)
        if progress is not None:
            progress("writing statements", number, len(chosen))
    return paths


def _unit_ids(audit_dir: Path, table: EpsilonTable) -> list[str]:
    """The unit of each row as text; its own example id where the audit holds no example table."""
    if not (audit_dir / EXAMPLES).is_file():
        return [str(item) for item in table.example_ids.tolist()]
    examples = ExampleTable.from_parquet(audit_dir / EXAMPLES)
    return [str(item) for item in examples.aligned(table.example_ids)["unit_id"].tolist()]


def _file_name(name: str) -> str:
    """The id itself where it is harmless as a file name, else a hash of it."""
    if _SAFE_NAME.fullmatch(name):
        return name
    return "sha256-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _opening(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    rows = f" ({owner.n_rows} records)" if owner.n_rows > 1 else ""
    return [
        f"CONFIDENTIAL: for the owner of {owner.kind} {clean(owner.name)}{rows}",
        "",
        f"A model, {clean(str(summary['name']))}, was trained on data in which you are. Noise was added in training, so that "
        "what can be learned from the model about any one person stays limited: differential privacy. A number called "
        "epsilon says how limited. Smaller is more private; at 0 next to nothing can be learned.",
    ]


def _promise(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    guarantee = summary["guarantee"]
    epsilon = guarantee["worst_case_epsilon"]
    meaning = f"epsilon {format_epsilon(epsilon)} ({summary['meaning']})"
    if guarantee["status"] == VOID:
        return [
            "Nothing. The random numbers of this training can be made again from a seed, which undoes the noise."
        ]
    if guarantee["status"] == UNPROVEN:
        return [
            "Nothing that is proven: a check of what the promise rests on failed. Had all of it held, it would be "
            f"{meaning}."
        ]
    checked = (
        ""
        if guarantee["status"] == SUPPORTED
        else " Its assumptions were declared, and not checked."
    )
    odds = format_share_up(_true_positive_rate(epsilon, summary))
    which, pronoun, verb = (
        ("one record of yours", "it", "was")
        if owner.n_rows == 1
        else ("your records", "they", "were")
    )
    lines = [
        f"All states of the model during training together: {meaning}. This is the guarantee. It holds whatever your record "
        f"is, and whatever else somebody knows.{checked}",
        f"In odds: somebody sees every state of the model, knows all data but yours, and tests whether {which} "
        f"{verb} used. A test that wrongly says so {format_share_up(FALSE_POSITIVE_RATE)} of the times when {pronoun} {verb} not, "
        f"rightly says so at most {odds} of the times when {pronoun} {verb}.",
    ]
    if owner.worst_case_epsilon < epsilon:
        lines.append(
            f"That counts people with more records than your {owner.n_rows}. To all of yours together it is epsilon "
            f"{format_epsilon(owner.worst_case_epsilon)} at the same delta."
        )
    return lines


def _true_positive_rate(epsilon: float, summary: Mapping[str, Any]) -> float:
    """Of a test at FALSE_POSITIVE_RATE: what an epsilon allows, and at most what the run's whole privacy curve does."""
    guarantee = summary["guarantee"]
    bound = true_positive_bound(epsilon, guarantee["delta"], FALSE_POSITIVE_RATE)
    membership = guarantee.get("membership")
    return bound if membership is None else min(bound, float(membership["true_positive_rate"]))


def _own(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    worst, usual = format_epsilon(owner.worst_case_epsilon), format_share_up(FALSE_POSITIVE_RATE)
    odds = format_share_up(_true_positive_rate(owner.epsilon, summary))
    whose = (
        f"Your epsilon for this run, of all {owner.n_rows} records together:"
        if owner.n_rows > 1
        else "Your epsilon for this run:"
    )
    told = f" In the odds of the test above that would be at most {odds} rather than {usual}, if it were a guarantee."
    promised = summary["guarantee"]["status"] not in (VOID, UNPROVEN)  # or there is no test above
    return [
        f"{whose} {format_epsilon(owner.epsilon)}, of at most {worst}.{told if promised else ''}",
        f"It is {_CLAIMS[summary['claim']]} (stated at {summary['meaning']}).",
    ]


_NOT_MEANT = (
    "It is not a guarantee. It describes the one training that happened; another would have given another number. Rely on "
    "what everybody is promised.",
    "A small number is no reason to skip asking for your consent, and no limit on every attack.",
    "It says nothing of other models or statistics made from your data: each adds to what can be learned.",
)


def _keep(summary: Mapping[str, Any]) -> list[str]:
    silent = declared_choices(summary) is None
    return [
        "The number was computed from your record without noise, and is sensitive itself: whoever sees it learns something "
        "about your record, for instance that it is an unusual one.",
        "Telling you costs nobody else any privacy. All states of the model count as published; given them, your number "
        "follows from your own record and from when it was drawn. That is the condition of Theorem 3.2 (section 3.4) of Yu et "
        "al. 2023, arXiv:2206.02617v7: the map from the states to the states together with your number is a bijection. It would fail if settings of the training "
        "had been chosen by looking at everybody's data. "
        + (
            "Nobody declared whether they were."
            if silent
            else "It was declared that they were not."
        ),
    ]
