"""What the page says of attacks, whatever groups are called."""

import numpy as np
import pytest

from indpriv.analysis.attacks.rates import TRIED, rates_of, table
from indpriv.attack_scores import AttackScores
from indpriv.example_table import ExampleTable
from indpriv.report.document import plain
from indpriv.report.renderers.markdown import render_markdown
from indpriv.report.sections.attacks.membership import attacks
from summaries import NO_ATTACKS, summary_of


@pytest.mark.parametrize("column", ["unit", "length", "by", "part", "rate", "group"])
def test_groups_may_be_called_like_parts_and_rates(run, column):
    """Those of units, gradient canaries and all examples are told from groups of a column."""
    log, examples = run
    names = ["mean", "all examples", "longest canaries", "auc"]
    odd = examples.frame.assign(**{column: np.resize(names, len(examples.frame))})
    found = summary_of(log, ExampleTable(odd), by=[column])
    page = render_markdown(found)
    assert "Attacks by" not in page
    assert "Every noisy update" not in page
    rows = found.rates.query("rate == 'success' and model == 'dp'")
    assert sorted(rows["part"]) == sorted(["all examples", *names])
    table_of_groups = page[page.index(f"Success rate by {column}") :].split("\n\n")[1]
    assert table_of_groups.count("| all examples |") == 2
    assert all(f"| {name} |" in table_of_groups for name in names)


def tried(model="dp", above=True):
    """One attack that names every member, in an audit without groups."""
    member = np.arange(400) < 200
    scores = AttackScores(member.astype(float), member, "an attack")
    row = {"attack": "x", "title": "an attack", "model": model, "references": 0, "source": "paper"}
    row |= {"adversary": "final_model", "sees": "losses", "caveat": "", "above_worst_case": above}
    rates = rates_of(scores, attack="x", model=model, tests=1)
    tried = table(TRIED, [row | {"n_members": 200, "n_others": 200}])
    return NO_ATTACKS | {"attacks": tried, "rates": rates}


@pytest.mark.parametrize("above", [True, False])
def test_an_attack_is_shown_without_groups_and_a_finding_on_the_first_screen(summary, above):
    section = attacks(summary.replace(**tried(above=above)))
    lines = [block for entry in section.screen for block in entry.blocks]
    said = " ".join(plain(part) for line in lines for part in line.parts)
    assert ("above what the worst case allows: an attack." in said) == above
    assert "No attack was run" not in said
    page = render_markdown(summary.replace(**tried(above=above)))
    assert "| An attack | 0 | 1.000 |" in page


def test_no_attack_is_said_only_where_there_was_none(summary):
    assert "No attack was run" in render_markdown(summary.replace(**NO_ATTACKS))
