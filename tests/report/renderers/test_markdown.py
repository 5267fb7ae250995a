import numpy as np
import pytest

from indpriv._formatting import format_share
from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from indpriv.report.renderers.markdown import escape, render_markdown
from summaries import CHECKS, summary_of


@pytest.fixture(scope="module")
def text(summary):
    return render_markdown(summary)


def test_it_says_first_what_it_is_and_then_the_verdict(text):
    assert text.startswith(
        "**SENSITIVE: for the curator only**\n\n# Privacy audit of tiny\n\nAn attacker who sees"
    )
    titles = [line[3:] for line in text.splitlines() if line.startswith("## ")]
    assert titles[:4] == [
        "What this rests on",
        "What you may publish",
        "Run and assumptions",
        "Distribution of individual epsilon",
    ]
    assert titles[-4:] == ["Attacks", "Fidelity", "Hazards", "Reproduce"]
    assert sum(line.startswith("### By ") for line in text.splitlines()) == 3
    verdict = text.split("## ")[0]
    for words in ("| 1.90 | delta 1e-5, add/remove one example", "exact; not a guarantee", "99 %", "declared poisson; observed",
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
    assert "first table of the next section that are not marked “not for publication”" in text
    trusted = "source of the noise on trust; start and rows on trust."
    assert f"Evidence for it: 5 of 5 lines verified; {trusted}" in text
    declared = render_markdown(summary_of(*run, evidence={"checks": ()}, fidelity={}))
    assert (
        "Evidence for it: 0 of 5 lines verified; batch declared; contribution declared" in declared
    )


def test_both_models_stand_among_the_attacks(text, summary):
    attacks = text.split("## Attacks")[1].split("## ")[0]
    assert attacks.count("Chance is 50 %") == 1
    rows = summary.rates.query("rate == 'success' and by == ''")
    assert rows["model"].tolist() == ["dp", "non_dp"]
    cells = ["all examples", f"{rows['n'].iloc[0]:,}"]
    for row in rows.itertuples():
        cells += [format_share(row.value, 1), f"{100 * row.low:.1f} to {100 * row.high:.1f} %"]
    assert f"| {' | '.join(cells)} |" in attacks


def test_no_guarantee_is_said_first_and_not_quoted(run):
    void = render_markdown(summary_of(*run, evidence={"recorder": {"seeded": True}}))
    assert "**This run gives no privacy guarantee.**" in void.split("## ")[0]
    assert "This run has no guarantee to quote." in void
    assert "Best test for membership" not in void
    assert "Do not publish any privacy guarantee for this run." in void


def test_without_examples(run):
    text = render_markdown(
        summary_of(
            *run,
            evidence={"examples": None, "non_dp": None, "checks": CHECKS},
            fidelity={},
        )
    )
    assert "No attack was run" in text
    assert "Who is worse off" not in text


def test_escape_is_one_line_of_text():
    assert escape("a\n# b") == "a \\# b"
    assert escape("<img src=x>") == "\\<img src=x\\>"
