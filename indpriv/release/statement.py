"""Statements for owners: what one person may be told about their own records.

Sensitive: for that owner only. Telling owner i their own epsilon costs no one else any privacy:
given all states of the trained model, which count as released, it is a function of their example
(and of its own sampling) alone, so that outcome -> (value, outcome) is a bijection, the condition
of Theorem 3.2 of Yu et al. 2023 (section 3.4; arXiv:2206.02617v7). Nothing else of the data may
enter a statement: not the audit's reason for its claim, which can count other examples, and no
number of examples.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np

from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv._formatting import format_epsilon, format_share_up
from indpriv._shown import clean
from indpriv.analysis.guarantee import (
    SUPPORTED,
    UNPROVEN,
    VOID,
    true_positive_bound,
)
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonParts, EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES
from indpriv.release.assumptions import check_one_record, declared_choices

STATEMENTS = "statements"
_WIDTH = 92
_CLAIMS = {
    "exact": "exact: never too small for the training that happened",
    "estimate": "an estimate: the true value for this training can be larger",
}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Owner:
    """A person who owns records.

    Attributes:
        kind: "example" or "unit".
        name: id of the example or unit.
        n_rows: number of their rows.
        epsilon: for all of their rows together.
        worst_case_epsilon: of this number of rows.
        true_positive_limit: of a test at FALSE_POSITIVE_RATE, by the account of all of their rows.
    """

    kind: str
    name: str
    n_rows: int
    epsilon: float
    worst_case_epsilon: float
    true_positive_limit: float


def owners(audit_dir: Path, *, example: str | None = None, unit: str | None = None) -> list[Owner]:
    """The owner of one example or of one unit, or all owners of an audit.

    Args:
        audit_dir: the audit.
        example: id of an example.
        unit: id of a unit: a person with one row or several. If neither is passed, all units.

    Raises:
        InputError: no such example or unit, or both were passed.
    """
    if example is not None and unit is not None:
        raise InputError("both --example and --unit were passed; pass one of them")
    table = EpsilonParts.open(audit_dir / EPSILON).table()
    by_unit = table.account.rows_per_unit is not None
    names = [str(item) for item in table.example_ids.tolist()]

    def detail(name: str, otherwise: float) -> list[Any]:
        values: list[Any] = table.details.get(name, np.full(len(table), otherwise)).tolist()
        return values

    figures = zip(
        detail("n_rows", 1),
        table.epsilon.tolist(),
        detail("unit_worst_case", table.worst_case_epsilon),
        detail("true_positive_limit", 1.0),
        strict=True,
    )
    figures_of = dict(zip(names, figures, strict=True))
    if example is not None:
        if by_unit:
            raise InputError(
                f"--example {example}: this audit counts people, not rows; pass --unit with the id "
                "of the person"
            )
        if example not in figures_of:
            raise InputError(f"--example {example}: the audit has no training example of that id")
        return [Owner("example", example, *figures_of[example])]
    rows_of: dict[str, list[str]] = {}
    unit_ids = names if by_unit else _unit_ids(audit_dir, table)
    for name, owner in zip(names, unit_ids, strict=True):
        rows_of.setdefault(owner, []).append(name)
    if unit is not None and unit not in rows_of:
        raise InputError(f"--unit {unit}: the audit has no training example of that unit")
    chosen = rows_of if unit is None else {unit: rows_of[unit]}
    for owner, rows in chosen.items():
        if len(rows) > 1:
            raise InputError(
                f"unit {owner} has {len(rows)} rows, and this audit counts rows: their epsilons do "
                "not add up to a figure for the person. Audit by people (a run recorded with "
                'unit="user", or indpriv audit RUN --unit-column NAME)'
            )
    return [Owner("unit", owner, *figures_of[rows[0]]) for owner, rows in chosen.items()]


def statement(owner: Owner, summary: Mapping[str, Any]) -> str:
    """One page of plain text for one owner, from the content of audit.json."""
    own_title = f"What this training did with your record{'s' * (owner.n_rows > 1)}"
    sections = [
        ("", _opening(owner, summary)),
        ("What everyone in the data is promised", _promise(owner, summary)),
        (own_title, _own(owner, summary)),
        ("What your number does not mean", _NOT_MEANT),
        ("Keep this page to yourself", _keep(summary)),
    ]
    blocks = [
        [title.upper()] * bool(title) + [fill(line, _WIDTH) for line in lines]
        for title, lines in sections
    ]
    return clean("\n\n".join("\n".join(block) for block in blocks), kept="\n") + "\n"


def write_statements(
    audit_dir: Path,
    chosen: Sequence[Owner],
    output_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Write one file (0600) for each owner, by default in AUDIT_DIR/statements.

    Returns:
        the paths, in the order of `chosen`.

    Raises:
        InputError: a run whose owners may not be told; see `assumptions.check_one_record`.
    """
    summary = read_summary(audit_dir)
    check_one_record(summary)
    folder = make_folder(output_dir) if output_dir else make_folder(audit_dir, STATEMENTS)
    paths = []
    for number, owner in enumerate(chosen, 1):
        path = folder / f"{owner.kind}-{_file_name(owner.name)}.txt"
        write_atomically(path, statement(owner, summary).encode("utf-8", "replace"))
        paths.append(path)
        if progress is not None:
            progress("writing statements", number, len(chosen))
    return paths


def _unit_ids(audit_dir: Path, table: EpsilonTable) -> list[str]:
    """The unit of each row as text; its own example id if the audit has no example table."""
    if not (audit_dir / EXAMPLES).is_file():
        return [str(item) for item in table.example_ids.tolist()]
    examples = ExampleTable.from_parquet(audit_dir / EXAMPLES)
    return [str(item) for item in examples.aligned(table.example_ids)["unit_id"].tolist()]


def _file_name(name: str) -> str:
    """The id itself if it is harmless as a file name, else a hash of it."""
    if _SAFE_NAME.fullmatch(name):
        return name
    return "sha256-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _opening(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    rows = f" ({owner.n_rows} records)" if owner.n_rows > 1 else ""
    return [
        f"CONFIDENTIAL: for the owner of {owner.kind} {clean(owner.name)}{rows}",
        "",
        f"A model, {clean(str(summary['name']))}, was trained on data that include yours. Noise "
        "was added during training, to limit what anyone can learn from the model about any one "
        "person. This is called differential privacy. A number called epsilon says how strict the "
        "limit is. A smaller epsilon is more private; at 0 next to nothing can be learned.",
    ]


def _promise(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    guarantee = summary["guarantee"]
    epsilon = guarantee["worst_case_epsilon"]
    meaning = f"epsilon {format_epsilon(epsilon)} ({summary['meaning']})"
    if guarantee["status"] == VOID:
        return [f"Nothing: {'; '.join(guarantee['reasons'])}."]
    if guarantee["status"] == UNPROVEN:
        return [
            "Nothing that is proven: a check of the assumptions behind the promise failed. If all "
            f"of them had held, it would be {meaning}."
        ]
    checked = " Not everything that it rests on was verified; some of it was only declared."
    if guarantee["status"] == SUPPORTED:
        checked = ""
    odds = format_share_up(_true_positive_rate(epsilon, summary))
    usual = format_share_up(FALSE_POSITIVE_RATE)
    which, pronoun, verb = "your records", "they", "were"
    if owner.n_rows == 1:
        which, pronoun, verb = "one record of yours", "it", "was"
    lines = [
        f"All states of the model during training together: {meaning}. This is the guarantee. It "
        f"holds whatever your record is, and whatever else an attacker knows.{checked}",
        "In odds: suppose that an attacker sees every state of the model, knows all data but "
        f"yours, and tests whether {which} {verb} used. A test that says so {usual} of the times "
        f"when {pronoun} {verb} not used says so at most {odds} of the times when {pronoun} "
        f"{verb}.",
    ]
    if owner.worst_case_epsilon < epsilon:
        lines.append(
            f"This guarantee covers people with more records than your {owner.n_rows}. For all of "
            f"your records together it is epsilon {format_epsilon(owner.worst_case_epsilon)} at "
            "the same delta."
        )
    return lines


def _true_positive_rate(epsilon: float, summary: Mapping[str, Any], own: float = 1.0) -> float:
    """Bound for a test at FALSE_POSITIVE_RATE: by an epsilon, the run's curve and an owner's."""
    guarantee = summary["guarantee"]
    bound = min(own, true_positive_bound(epsilon, guarantee["delta"], FALSE_POSITIVE_RATE))
    membership = guarantee.get("membership")
    return bound if membership is None else min(bound, float(membership["true_positive_rate"]))


def _own(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    worst, usual = format_epsilon(owner.worst_case_epsilon), format_share_up(FALSE_POSITIVE_RATE)
    whose = f", for all {owner.n_rows} records together" if owner.n_rows > 1 else ""
    in_odds = ""
    if summary["guarantee"]["status"] not in (VOID, UNPROVEN):  # else there is no test above
        limit = _true_positive_rate(owner.epsilon, summary, owner.true_positive_limit)
        odds = format_share_up(limit)
        in_odds = (
            f" In the odds of the test above that would be at most {odds} rather than {usual}, if "
            "it were a guarantee."
        )
    return [
        f"Your epsilon for this run{whose}: {format_epsilon(owner.epsilon)}, of at most {worst}."
        f"{in_odds}",
        f"It is {_CLAIMS[summary['claim']]} (stated at {summary['meaning']}).",
    ]


_NOT_MEANT = (
    "It is not a guarantee. It describes the one training that happened; another would have given "
    "another number. Rely on what everyone in the data is promised.",
    "A small number is no reason to skip asking for your consent, and it does not limit every "
    "attack.",
    "It says nothing about other models or statistics made from your data: each of them adds to "
    "what can be learned.",
)


def _keep(summary: Mapping[str, Any]) -> list[str]:
    declared = "It was declared that they were not."
    if declared_choices(summary) is None:
        declared = "It was not declared whether they were."
    if summary["account"].get("clipping_norm_epsilon"):
        declared += (
            " One setting, the size to which contributions are cut, was drawn from the data of all "
            "people by a private method: it counts as published too, and what everyone is promised "
            "contains its cost, and so does your number."
        )
    return [
        "The number was computed from your record without noise, and is sensitive itself: anyone "
        "who sees it learns something about your record, for instance that it is an unusual one.",
        "Telling you takes no privacy from anyone else. All states of the model count as "
        "published; given them, your number follows from your own record and from when it was "
        "sampled. That is the condition of Theorem 3.2 (section 3.4) of Yu et al. 2023, "
        "arXiv:2206.02617v7: the map from the states to the states together with your number is a "
        "bijection. It would fail if settings of the training had been chosen by looking at the "
        f"data of all people. {declared}",
    ]
