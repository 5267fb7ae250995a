from dataclasses import replace

import pytest
from indpriv.report.document import Section, paragraph
from indpriv.report.renderers.html import render_html
from indpriv.report.renderers.markdown import render_markdown
from indpriv.report.sections import SECTIONS, sections_of

from indpriv.epsilon_table import DISCLAIMER
from indpriv.norm_log.evidence import CHECKS
from indpriv.report import sections
from summaries import summary_of


def test_sections_have_ids_of_their_own_and_begin_with_the_verdict(summary):
    found = sections_of(summary)
    assert len({section.id for section in found}) == len(found)
    assert found[0].id == "verdict"
    assert not found[0].nested


def test_a_section_in_the_list_is_on_every_page(summary, monkeypatch):
    added = Section("added", "Added <section>", (paragraph("A sentence & a <tag>."),))
    monkeypatch.setattr(sections, "SECTIONS", (*SECTIONS, lambda summary: added, lambda _: None))
    page, text = render_html(summary), render_markdown(summary)
    assert '<section id="added">' in page
    assert "A sentence &amp; a &lt;tag&gt;." in page
    assert "## Added \\<section\\>\n\nA sentence \\& a \\<tag\\>." in text


def test_the_worst_case_stands_with_what_it_means(summary):
    key = next(
        block for block in sections_of(summary)[0].blocks if getattr(block, "style", "") == "key"
    )
    assert key.rows[0].cells == (
        "Guarantee: worst-case epsilon",
        "1.90",
        "delta 1e-5, add/remove one example, Poisson sampling",
    )
    assert key.rows[1].cells[2] == "exact; not a guarantee"
    assert DISCLAIMER in render_markdown(summary).split("## ")[0]


@pytest.mark.parametrize(
    ("seeded", "seen", "text"),
    [
        (True, (), "reproducible from its seed"),
        (
            False,
            (CHECKS["seeds"].fact("failed", "torch.manual_seed(0)"),),
            "whose seed can be guessed",
        ),
        (
            False,
            (CHECKS["seeds"].fact("not checked", "torch.manual_seed(0)"),),
            "whose seed can be guessed",
        ),
        (False, (), "No seed of its noise and its sampling was declared"),
    ],
)
def test_what_is_said_of_seeds_is_what_was_seen(summary, seeded, seen, text):
    checks = (*summary.checks, *seen)
    facts = replace(summary.run, recorder={**summary.run.recorder, "seeded": seeded})
    page = render_markdown(summary.replace(checks=checks, run=facts))
    assert text in page
    assert "unseeded" not in page


def test_noise_that_protects_nobody_is_not_said_to_come_from_a_seed(run):
    page = render_markdown(summary_of(*run, evidence={"recorder": {"no_privacy": "no noise"}}))
    assert "from its seed" not in page
