"""What the report says of an audit of more examples than are analysed one by one."""

from dataclasses import replace

from indpriv.analysis.exactness import Exactness
from indpriv.report.renderers.markdown import render_markdown
from summaries import summary_of
from synthetic import small_run

FOUND = Exactness(1_000_000, 2**-10, 2**-8, 4.1e-5, 0.0032, 1_000_000, None, 0.00098, 20_000)


def test_the_errors_are_told_and_rounded_up():
    summary = summary_of(*small_run())
    assert "This audit has more than" not in render_markdown(summary)
    page = " ".join(render_markdown(summary.replace(exactness=FOUND)).split())
    assert "within 0.1 % of the exact ones" in page
    assert "at most 5e-05 off, the rank correlation at most 0.004." in page
    assert "Attacks used 1,000,000 random training examples and all test examples." in page
    assert "would each differ by at most 0.1 % (95 % confidence)" in page
    found = replace(FOUND, attacked_nonmembers=2_000)
    page = " ".join(render_markdown(summary.replace(exactness=found)).split())
    assert "1,000,000 random training examples and 2,000 random test examples." in page
    assert "tried on 20,000 random examples" in page


def test_what_was_not_sampled_is_not_said():
    found = replace(
        FOUND,
        pearson_error=None,
        spearman_error=None,
        attacked_members=None,
        attack_error=None,
        compared=None,
    )
    page = render_markdown(replace(summary_of(*small_run()), exactness=found))
    assert "This audit has more than 1,000,000 examples." in page
    for words in ("Pearson's r of epsilon and loss is at most", "Attacks used", "Other choices of"):
        assert words not in page
