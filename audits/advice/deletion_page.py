"""The page of `python -m audits deletion`. Sensitive."""

from __future__ import annotations

from pathlib import Path

from audits.advice.deletion import BY_CHANCE, COMPARED, Deletion
from indpriv.epsilon_table import DISCLAIMER
from indpriv.report.formats import counted
from indpriv.report.page import Page

_ONE_SEED = "With one seed there is no interval, and nothing says what is chance: pass --seeds 2."


def deletion_page(found: Deletion) -> Page:
    """The page of a deletion."""
    name = f"{found.name} without {found.deleted}"
    values = {
        "found": found,
        "notes": (COMPARED, BY_CHANCE if found.n_seeds > 1 else _ONE_SEED),
        "disclaimer": DISCLAIMER,
    }
    return Page(
        Path(__file__).with_name("deletion"),
        title=name,
        eyebrow="Whose epsilon rises if records are deleted",
        name=name,
        meta=f"{found.n_deleted:,} of {found.n_deleted + found.n_left:,} {found.plural} deleted · "
        f"{counted(found.n_seeds, 'seeded run')} with and without them",
        values=values,
    )
