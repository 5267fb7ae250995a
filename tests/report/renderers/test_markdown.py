import numpy as np
import pytest

from indpriv._formatting import format_share
from indpriv.analysis.summary import FidelityFindings
from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from indpriv.report.renderers.markdown import escape, render_markdown
from summaries import CHECKS, summary_of


@pytest.fixture(scope="module")
def text(summary):
    return render_markdown(summary)


def test_it_says_first_what_it_is_and_then_the_verdict(text):
    assert text.startswith(
        "**SENSITIVE: for the curator only**\n\n# Privacy audit of tiny\n\nTake any one example"
    )
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles[:3] == [
        "What you may publish",
        "Run and assumptions",
        "Distribution of individual epsilon",
    ]
    assert titles[-3:] == ["Attacks", "Hazards", "Reproduce"]
    assert sum(title.startswith("Groups by ") for title in titles) == 3
    verdict = text.split("## ")[0]
    for words in ("1.90 at delta 1e-5", "exact; median", "99 %", "add/remove one example", "declared poisson; observed",
                  "RDP accountant", "Delta times n", "Best test for membership", DISCLAIMER):  # fmt: skip
        assert words in verdict, words


def test_every_table_has_as_many_cells_in_each_row(run):
    log, examples = run
    names = np.array(
        ["a|b", "<script>alert(1)</script>", "*x* `y`", "[l](http://x)", "two\nlines"], dtype=object
    )
    frame = examples.frame.assign(group=names[np.arange(len(examples.frame)) % 5])
    text = render_markdown(summary_of(log, ExampleTable(frame), by=["group"], name="# *x* <b>"))
    bare = text.replace("\\|", "").replace("\\<", "").replace("\\>", "")
    blocks = [block.splitlines() for block in bare.split("\n\n") if block.startswith("|")]
    assert len(blocks) >= 6
    for block in blocks:
        assert len({line.count("|") for line in block}) == 1, block[0]
    body = bare.replace("\n> ", "\n")
    assert "<" not in body.replace("< 1 %", "").replace("< 0.1 %", "")
    assert "](" not in bare.replace("\\](", "")
    assert "# Privacy audit of \\# \\*x\\*" in text


def test_what_may_be_published_agrees_with_the_table(text, run):
    assert "first table below that are not marked “no”; nothing else" in text
    assert "declared and not checked" not in text
    assert "declared and not checked" in render_markdown(
        summary_of(*run, evidence={"checks": ()}, fidelity=FidelityFindings())
    )


def test_both_models_stand_among_the_attacks(text, summary):
    attacks = text.split("## Attacks")[1].split("## ")[0]
    assert attacks.count("Chance is 50 %") == 1
    for model, attack in (
        ("this model", summary.attacks.by_group[0]),
        ("without DP", summary.attacks.by_group[1]),
    ):
        row = attack.overall
        limits = f"{format_share(row.interval.low, 1)} to {format_share(row.interval.high, 1)}"
        assert (
            f"| all examples | {model} | {format_share(row.success_rate, 1)} | {limits} |"
            in attacks
        )
    assert attacks.count("| all examples |") == 2


def test_no_guarantee_is_said_first_and_not_quoted(run):
    void = render_markdown(summary_of(*run, evidence={"recorder": {"seeded": True}}))
    assert "**This run gives nobody a guarantee.**" in void.split("## ")[0]
    assert "This run has none to quote." in void
    assert "Best test for membership" not in void
    assert "Nothing that speaks of a guarantee." in void


def test_without_examples(run):
    text = render_markdown(
        summary_of(
            *run,
            evidence={"examples": None, "non_dp": None, "checks": CHECKS},
            fidelity=FidelityFindings(),
        )
    )
    assert "No attack was run" in text
    assert "Groups by" not in text


def test_escape_is_one_line_of_text():
    assert escape("a\n# b") == "a \\# b"
    assert escape("<img src=x>") == "\\<img src=x\\>"
