"""Statements for owners: what one person may be told about their own records. Sensitive: for that owner only.

Telling owner i their own epsilon costs nobody else anything: given all states of the trained model, which count as released,
it is a function of their example (and of its own sampling) alone, so that outcome -> (value, outcome) is a bijection, the
condition of Theorem 3.4 of Yu et al. 2023. Nothing else of the data may enter a statement: no claim in the audit's own words, which
can count other examples, and no number of examples.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import pandas as pd

from indpriv.analysis.guarantee import SUPPORTED, UNPROVEN, VOID, true_positive_bound
from indpriv.audit import read_summary
from indpriv.audit.audit_directory import EPSILON
from indpriv.audit.run_directory import EXAMPLES
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.example_table import ExampleTable
from indpriv.files import read_parquet, write_atomically
from indpriv.formatting import format_delta, format_epsilon
from indpriv.release.assumptions import check_one_record, declared_choices
from indpriv.report.terminal import clean

STATEMENTS = "statements"
_WIDTH = 92
FALSE_POSITIVE_RATE = 0.01
_CLAIMS = {
    "exact": "exact: never too small for the training that happened",
    "estimate": "an estimate: the true value for this training can be larger",
}
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True)
class Owner:
    """A person and their rows: epsilons by example id."""

    kind: str
    name: str
    epsilons: Mapping[str, float]


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
    rows = pd.Series(table.epsilon, index=[str(item) for item in table.example_ids.tolist()])
    if example is not None:
        if example not in rows.index:
            raise InputError(f"--example {example}: the audit has no training example of that id")
        return [Owner("example", example, {example: float(rows[example])})]
    unit_ids = _unit_ids(audit_dir, table)
    if unit is not None:
        mine = rows[unit_ids == unit]
        if mine.empty:
            raise InputError(f"--unit {unit}: the audit has no training example of such a unit")
        return [Owner("unit", unit, _by_id(mine))]
    return [Owner("unit", str(name), _by_id(mine)) for name, mine in rows.groupby(unit_ids, sort=False)]


def statement(owner: Owner, summary: Mapping[str, Any]) -> str:
    """One page of plain text for one owner.

    Args:
        owner: whose rows they are.
        summary: the content of audit.json.
    """
    sections = [
        ("", _opening(owner, summary)),
        ("What everybody is promised", _promise(owner, summary)),
        ("What this training did with your record" + "s" * (len(owner.epsilons) > 1), _own(owner, summary)),
        ("What your number does not mean", _NOT_MEANT),
        ("Keep this page to yourself", _keep(summary)),
    ]
    blocks = [[title.upper()] * bool(title) + [fill(line, _WIDTH) for line in lines] for title, lines in sections]
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


def _by_id(rows: "pd.Series[float]") -> dict[str, float]:
    return {str(name): float(epsilon) for name, epsilon in rows.items()}


def _unit_ids(audit_dir: Path, table: EpsilonTable) -> "pd.Series[str]":
    """The unit of each row as text; its own example id where the audit holds no example table."""
    if (audit_dir / EXAMPLES).is_file():
        ids = ExampleTable.from_parquet(audit_dir / EXAMPLES).aligned(table.example_ids)["unit_id"].tolist()
    else:
        ids = table.example_ids.tolist()
    return pd.Series(map(str, ids), index=[str(item) for item in table.example_ids.tolist()], name="unit")


def _file_name(name: str) -> str:
    """The id itself where it is harmless as a file name, else a hash of it."""
    if _SAFE_NAME.fullmatch(name):
        return name
    return "sha256-" + hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def _opening(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    rows = f" ({len(owner.epsilons)} records)" if len(owner.epsilons) > 1 else ""
    return [
        f"CONFIDENTIAL: for the owner of {owner.kind} {clean(owner.name)}{rows}",
        "",
        f"A model, {clean(str(summary['name']))}, was trained on data in which you are. Noise was added in training, so that "
        "what can be learned from the model about any one person stays limited: differential privacy. A number called "
        "epsilon says how limited. Smaller is more private; at 0 nothing can be learned.",
    ]


def _promise(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    guarantee = summary["guarantee"]
    epsilon, delta = guarantee["worst_case_epsilon"], guarantee["delta"]
    meaning = f"epsilon {format_epsilon(epsilon)} ({summary['meaning']})"
    if guarantee["status"] == VOID:
        return ["Nothing. The random numbers of this training can be made again from a seed, which undoes the noise."]
    if guarantee["status"] == UNPROVEN:
        return [
            "Nothing that is proven: a check of what the promise rests on failed. Had all of it held, it would be "
            f"{meaning}."
        ]
    checked = "" if guarantee["status"] == SUPPORTED else " Its assumptions were declared, and not checked."
    odds = _percent(true_positive_bound(epsilon, delta, FALSE_POSITIVE_RATE))
    lines = [
        f"All states of the model during training together: {meaning}. This is the guarantee. It holds whatever your record "
        f"is, and whatever else somebody knows.{checked}",
        "In odds: somebody sees every state of the model, knows all data but yours, and tests whether one record of yours "
        f"was used. A test that wrongly says so {_percent(FALSE_POSITIVE_RATE)} of the times when it was not, rightly says so "
        f"at most {odds} of the times when it was.",
    ]
    return [*lines, *_group_promise(len(owner.epsilons), epsilon, delta)]


def _group_promise(k: int, epsilon: float, delta: float) -> list[str]:
    """Group privacy: k records together have k epsilon and delta (1 + e^epsilon + ... + e^((k-1) epsilon))."""
    if k == 1:
        return []
    together = k * epsilon
    risk = min(
        1.0, delta * math.fsum(math.exp(min(j * epsilon, 700.0)) for j in range(k))
    )  # e^700: near the largest float
    odds = _percent(true_positive_bound(together, risk, FALSE_POSITIVE_RATE))
    return [
        f"You have {k} records. For all of them together the guarantee is epsilon {format_epsilon(together)} at delta "
        f"{format_delta(risk)}, and the test above is right at most {odds} of the times."
    ]


def _own(owner: Owner, summary: Mapping[str, Any]) -> list[str]:
    guarantee = summary["guarantee"]
    worst, usual = format_epsilon(guarantee["worst_case_epsilon"]), _percent(FALSE_POSITIVE_RATE)
    several = len(owner.epsilons) > 1
    lines = []
    for name, epsilon in owner.epsilons.items():
        odds = _percent(true_positive_bound(epsilon, guarantee["delta"], FALSE_POSITIVE_RATE))
        which = f"Record {clean(name)}: epsilon" if several else "Your epsilon for this run:"
        lines.append(
            f"{which} {format_epsilon(epsilon)}, of at most {worst}. In the odds of the test above that would be {odds} rather "
            f"than {usual}, if it were a guarantee."
        )
    lines.append(f"It is {_CLAIMS[summary['claim']]} (stated at {summary['meaning']}).")
    if several:
        lines.append("No figure is known for all of your records together; it is larger than each of these.")
    return lines


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
        "follows from your own record and from when it was drawn. That is the condition of Theorem 3.4 of Yu et al. 2023: the "
        "map from the states to the states together with your number is a bijection. It would fail if settings of the training "
        "had been chosen by looking at everybody's data. "
        + ("Nobody declared whether they were." if silent else "It was declared that they were not."),
    ]


def _percent(share: float) -> str:
    """A share in per cent, rounded up."""
    return f"{math.ceil(share * 1000 * (1 - 1e-9)) / 10:g} %"
