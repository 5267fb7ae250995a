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

from indpriv._facts import refused
from indpriv._files import write_atomically
from indpriv._folders import make_folder
from indpriv._formatting import format_share_up
from indpriv._plain import from_json
from indpriv.analysis.guarantee import Guarantee
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON
from indpriv.epsilon_table import FALSE_POSITIVE_RATE, EpsilonParts
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.norm_log.run_files import EXAMPLES
from indpriv.release.sources import check_one_record, declared_choices, paragraphs

STATEMENTS = "statements"
_WIDTH = 92
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Owner:
    """A person who owns records: an example or a unit, by its id.

    epsilon is of all of their rows together, worst_case_epsilon of this number of rows, and
    true_positive_limit of a test at FALSE_POSITIVE_RATE, by the account of all of their rows.
    """

    kind: str
    name: str
    n_rows: int
    epsilon: float
    worst_case_epsilon: float
    true_positive_limit: float


def owners(audit_dir: Path, *, example: str | None = None, unit: str | None = None) -> list[Owner]:
    """The owner of one example or of one unit, or all owners of an audit.

    A unit is a person with one row or several; if neither is passed, all of them. InputError for an
    id that is not there, or both.
    """
    if example is not None and unit is not None:
        raise InputError("both --example and --unit were passed; pass one of them")
    table = EpsilonParts.open(audit_dir / EPSILON).table()
    by_unit = table.account.rows_per_unit is not None
    names = [str(item) for item in table.example_ids.tolist()]
    n, details = len(table), table.details
    figures = zip(
        details.get("n_rows", np.ones(n, np.int64)).tolist(),
        table.epsilon.tolist(),
        details.get("unit_worst_case", np.full(n, table.worst_case_epsilon)).tolist(),
        details.get("true_positive_limit", np.ones(n)).tolist(),
        strict=True,
    )
    figures_of = dict(zip(names, figures, strict=True))
    if example is not None:
        if by_unit:
            raise refused("refusal.source", "of_people", example=example)
        if example not in figures_of:
            raise InputError(f"--example {example}: the audit has no training example of that id")
        return [Owner("example", example, *figures_of[example])]
    unit_ids = names
    if not by_unit and (audit_dir / EXAMPLES).is_file():
        examples = ExampleTable.from_parquet(audit_dir / EXAMPLES).aligned(table.example_ids)
        unit_ids = [str(item) for item in examples["unit_id"].tolist()]
    rows_of: dict[str, list[str]] = {}
    for name, owner in zip(names, unit_ids, strict=True):
        rows_of.setdefault(owner, []).append(name)
    if unit is not None and unit not in rows_of:
        raise InputError(f"--unit {unit}: the audit has no training example of that unit")
    chosen = rows_of if unit is None else {unit: rows_of[unit]}
    for owner, rows in chosen.items():
        if len(rows) > 1:
            raise refused("refusal.source", "several_rows", owner=owner, n=len(rows))
    return [Owner("unit", owner, *figures_of[rows[0]]) for owner, rows in chosen.items()]


def statement(owner: Owner, summary: Mapping[str, Any]) -> str:
    """One page of plain text for one owner, from the content of audit.json."""
    guarantee, own_odds = from_json(Guarantee, summary["guarantee"]), None
    odds = guarantee.true_positive_limit(guarantee.worst_case_epsilon)
    if guarantee.stands:  # else there is no test to compare with
        limit = guarantee.true_positive_limit(owner.epsilon, owner.true_positive_limit)
        own_odds = format_share_up(limit)
    parts = paragraphs(
        "statement.txt.j2",
        owner=owner,
        guarantee=guarantee,
        account={"clipping_norm_epsilon": 0, **summary["account"]},
        usual=format_share_up(FALSE_POSITIVE_RATE),
        odds=format_share_up(odds),
        own_odds=own_odds,
        undeclared=declared_choices(summary) is None,
        **{key: str(summary[key]) for key in ("name", "meaning", "claim")},
    )
    lines = [fill(parts[0], _WIDTH) + "\n"]
    for part in parts[1:]:
        title = part.startswith("# ")
        lines.append(f"\n{part[2:].upper()}" if title else fill(part, _WIDTH))
    return "\n".join(lines) + "\n"


def write_statements(
    audit_dir: Path,
    chosen: Sequence[Owner],
    output_dir: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[Path]:
    """Write one file (0600) for each owner, by default in AUDIT_DIR/statements; their paths.

    InputError for a run whose owners may not be told; see `sources.check_one_record`.
    """
    summary = read_summary(audit_dir)
    check_one_record(summary)
    folder = make_folder(output_dir) if output_dir else make_folder(audit_dir, STATEMENTS)
    paths = []
    for number, owner in enumerate(chosen, 1):
        name = owner.name
        if not _SAFE_NAME.fullmatch(name):  # as a file name
            digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
            name = f"sha256-{digest[:32]}"
        path = folder / f"{owner.kind}-{name}.txt"
        write_atomically(path, statement(owner, summary).encode("utf-8", "replace"))
        paths.append(path)
        if progress is not None:
            progress("writing statements", number, len(chosen))
    return paths
