import base64
import hashlib
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest
from indpriv.report.document import plain
from indpriv.report.renderers.html import render_html
from indpriv.report.sections.verdict import lead

from indpriv.analysis.declared import Declared
from indpriv.analysis.groups import Reversal
from indpriv.attack_scores import AttackScores
from indpriv.audit import RecordedRun
from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import CHECKS as TEMPLATES
from indpriv.norm_log.norm_log import NormLog
from summaries import CHECKS, NO_ATTACKS, audit_of, summary_of
from synthetic import epsilon_table

SHORT = {"by": ["sex"], "fidelity": {}}  # fewer figures to draw
VOID = {"meta", "link", "br"}
HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "=cmd|'/c calc'!A1",
    "$x^2$",
    "[red]x[/]",
    "👩‍🔬",
]


class Page(HTMLParser):
    """Tags, attributes and visible text of a page; unbalanced tags are an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], Counter(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, *attribute) for attribute in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags[tag] += 1
        self.attributes += [(tag, *attribute) for attribute in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def html(summary):
    return render_html(summary)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def test_it_is_one_page_that_asks_for_nothing(html, page):
    policy = re.search(r"script-src '(sha256-[^']+)';", html)[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = hashlib.sha256(scripts[0].encode()).digest()
    assert policy == f"sha256-{base64.b64encode(digest).decode()}"
    assert page.tags["script"] == len(scripts) == 1
    assert not page.tags.keys() & {"iframe", "object", "embed", "form", "img", "base"}
    links = [
        value
        for _, name, value in page.attributes
        if name in ("src", "href", "xlink:href", "action", "data")
    ]
    assert all(link.startswith(("#", "data:")) for link in links)
    outside = re.findall(r"url\(([^)]*)\)", html)
    assert all(target.startswith("#") for target in outside)
    assert "@import" not in html
    assert set(re.findall(r"https?://[^\s\"'<>)]+", html)) <= {
        "http://www.w3.org/2000/svg",
        "http://www.w3.org/1999/xlink",
    }
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert "default-src 'none'" in html
    assert len(html) < 3e6


def test_sections_stand_in_their_order(html):
    ids = re.findall(r'<section id="(\w+)"', html)
    assert ids == [
        "verdict", "evidence", "publish", "run", "distribution", "lookup", "groups", "loss", "attacks", "fidelity", "hazards", "reproduce"
    ]  # fmt: skip


def test_no_epsilon_without_its_meaning(page):
    for words in (
        "SENSITIVE", DISCLAIMER, "delta 1e-5", "add/remove one example", "Poisson sampling", "RDP accountant", "exact",
        "not a guarantee", "95 %", "99 %", "largest", "An attack that fails is no evidence of privacy",
    ):  # fmt: skip
        assert words in page.text.replace("\u00a0", " "), words


def test_what_every_report_states(page):
    text = page.text.replace("\u00a0", " ")
    for item in (
        "Versions of this audit", "Versions in training", "Code commit", "Fingerprint of the data", "Unit of privacy",
        "Neighbouring relation", "What is released", "Trust model", "Sampler", "sample_rate", "Steps", "max_grad_norm",
        "noise_multiplier", "Normalisation of the gradient", "Clip mode", "Accountant", "Delta", "delta times n",
        "Source of norms", "Tuning runs", "Private in this document", "Number of examples", "Hazards",
        "fixed before the attack was run", "null calibration",
    ):  # fmt: skip
        assert item in text, item


def test_ids_are_unique_and_every_reference_resolves(page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    targets = {
        value[1:]
        for _, name, value in page.attributes
        if name in ("href", "xlink:href") and value[0] == "#"
    }
    described = {
        word
        for _, name, value in page.attributes
        if name == "aria-labelledby"
        for word in value.split()
    }
    assert targets | described <= set(ids)


def test_figures_are_well_formed_and_described(html):
    figures = re.findall(r'<svg [^>]*class="figure".*?</svg>', html, flags=re.DOTALL)
    assert len(figures) == 8  # histogram, norms, three groupings, loss, ROC, fidelity
    for figure in figures:
        root = ET.fromstring(figure)
        namespace = "{http://www.w3.org/2000/svg}"
        assert root.get("role") == "img"
        assert root.find(f"{namespace}title").text
        assert len(root.find(f"{namespace}desc").text) > 40
        colours = set(re.findall(r"#[0-9a-f]{6}\b", figure))
        assert colours == set(), "a colour that does not change with the theme"


def test_there_is_a_table_behind_every_figure(html):
    for block in html.split("<figure>")[1:]:
        assert "<table" in block.split("<figure>")[0]


def test_a_reversal_that_may_be_chance_is_no_second_one(summary):
    chance, sure = Reversal("0", 0.4), Reversal("1", 0.001)
    table = next(table for table in summary.groups if table.ratio)

    def with_reversals(*found):
        changed = replace(table, reversals=found)
        return Page(render_html(summary.replace(groups=(changed,)))).text

    found = with_reversals(chance)
    sentence = f"Among 0, {table.ratio.worst} has a smaller mean epsilon than {table.ratio.best}"
    assert f"{sentence}, but by no more than chance" in found
    found = with_reversals(chance, sure)
    assert f"{sentence} too, but by no more than chance" in found


def test_hostile_names_are_text(run):
    log, examples = run
    names = np.array(HOSTILE, dtype=object)
    frame = examples.frame.assign(
        group=names[np.arange(len(examples.frame)) % len(names)], label=names[0]
    )
    hostile = summary_of(log, ExampleTable(frame), by=["group"], name=HOSTILE[0])
    html = render_html(hostile)
    page = Page(html)
    assert (page.tags["script"], page.tags["img"]) == (1, 0)
    for name in HOSTILE:
        assert name in page.text
    ET.fromstring(
        re.search(r'<svg [^>]*aria-labelledby="groups0.*?</svg>', html, flags=re.DOTALL)[0]
    )


def test_no_individual_value_is_embedded_unless_it_is_passed(run):
    log, examples = run
    rng = np.random.default_rng(5)
    table = epsilon_table(rng.uniform(0.2, 1.8, log.n_examples), worst_case=2.0)
    html = render_html(audit_of(log, table, RecordedRun(examples), name="tiny", by=["sex"]))
    digits = [f"{value:.5f}" for value in [*table.epsilon, *examples.train["loss"]]]
    leaked = [value for value in digits if value in html]
    assert leaked == []


def test_a_seeded_run_promises_nothing(run):
    html = render_html(summary_of(*run, evidence={"recorder": {"seeded": True}}, **SHORT))
    text = Page(html).text
    assert "This run gives no privacy guarantee" in text
    assert "reproducible: no privacy" in text
    assert "Do not publish any privacy guarantee for this run" in text


def test_rows_that_give_n_away_are_marked(html):
    for item in (
        "Delta and n",
        "Number of examples",
        "Normalisation of the gradient",
        "Fingerprint of the data",
    ):
        row = re.search(rf"<tr><th scope=\"row\">{item}</th>.*?</tr>", html, flags=re.DOTALL)[0]
        assert "not for publication" in row
    row = re.search(r"<tr><th scope=\"row\">noise_multiplier</th>.*?</tr>", html, flags=re.DOTALL)[
        0
    ]
    assert "not for publication" not in row


def test_no_status_but_a_good_one_invites_to_publish(run):
    failed = TEMPLATES["batch_sizes"].fact("failed", "odd")
    declared = Declared(released="every checkpoint may be published under the worst-case epsilon")
    for evidence in ({"recorder": {"seeded": True}}, {"checks": (*CHECKS, failed)}):
        text = Page(
            render_html(summary_of(*run, evidence={"declared": declared, **evidence}, **SHORT))
        ).text
        assert "may be published under the worst-case" not in text
        assert "settings may be published" not in text
        assert "nothing may be published under a guarantee" in text
        assert "You may publish this sentence" not in text
        assert "What everybody is promised" not in text
        assert "This run has no guarantee to quote." in text


def test_the_verdict_says_what_the_bound_is(page, summary):
    text = page.text.replace("\u00a0", " ")
    assert "if at most 1 % of accusations against non-members are tolerated" in text
    shown = float(re.search(r"identify a training example in at most ([\d.]+) %", text)[1]) / 100
    limit = (
        summary.guarantee.membership.true_positive_rate
    )  # of the whole curve: below e^1.9 / 100 + 1e-5
    assert limit <= shown < limit + 0.002
    assert shown < 0.0668
    bare = summary.replace(guarantee=replace(summary.guarantee, membership=None))
    assert "in at most 6.7 % of cases" in " ".join(map(plain, lead(bare)))
    assert "true-positive rate is at most 6.7 times that rate, plus 1e-5" in text
    assert "odds" not in text
    assert "hardly any protection" not in text


def test_a_huge_epsilon_reads_well(summary):
    huge = replace(summary.guarantee, worst_case_epsilon=143.2, membership=None)
    text = Page(
        render_html(
            summary.replace(
                guarantee=huge,
                groups=(),
                **NO_ATTACKS,
                loss=None,
                fidelity={},
            )
        )
    ).text
    text = text.replace("\u00a0", " ")
    assert "true-positive rate is at most 10^63 times that rate" in text
    assert "in at most 100 % of cases" in text
    assert "hardly any protection" in text
    assert "more than" not in text[: text.index("What you may publish", 400)]


def test_a_large_delta_withholds_the_sentence(summary):
    large = replace(summary.guarantee, delta=0.01, delta_times_n=2.4)
    text = Page(
        render_html(
            summary.replace(
                guarantee=large,
                groups=(),
                **NO_ATTACKS,
                loss=None,
                fidelity={},
            )
        )
    ).text
    assert "Delta is too large: 0.01 is at least 1/n (delta times n is 2.4)" in text
    assert large.statement not in text
    assert "You may publish this sentence" not in text
    assert "Guarantee: worst-case epsilon" not in text


def test_edges_of_bins_are_rounded_up(summary):
    small = replace(summary.individual, edges=(0.0, 0.00121, 0.00242), counts=(1, 2))
    page = render_html(
        summary.replace(
            individual=small,
            groups=(),
            **NO_ATTACKS,
            loss=None,
            fidelity={},
        )
    )
    assert '<td class="n">0.0013</td><td class="n">0.0025</td>' in page


def test_a_failed_check_unproves_the_guarantee(run):
    failed = TEMPLATES["sampler"].fact("failed", "batches come from RandomSampler")
    text = Page(render_html(summary_of(*run, evidence={"checks": (*CHECKS, failed)}, **SHORT))).text
    assert "No guarantee is proven" in text
    assert "Batches come from RandomSampler." in text


def test_a_run_without_examples_has_a_page(run):
    bare = summary_of(*run, evidence={"examples": None, "non_dp": None}, fidelity={})
    text = Page(render_html(bare)).text
    assert "examples.parquet is absent" in text
    assert "No attack was run" in text


def test_one_example_and_nothing_to_correlate(run):
    log, examples = run
    one = ExampleTable(examples.frame[examples.frame["example_id"] == 0].assign(loss=0.0))
    summary = audit_of(
        log.take([0]), epsilon_table([0.0], worst_case=0.0), RecordedRun(one, one), name="one"
    )
    text = Page(render_html(summary)).text
    assert "No correlation is defined: only 1 examples" in text


@pytest.mark.slow
def test_ten_thousand_groups_stay_small():
    n = 20_000
    log = NormLog.from_arrays(
        np.ones((2, n)),
        [0, 1],
        total_steps=2,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
    )
    frame = pd.DataFrame(
        {"example_id": range(n), "unit_id": range(n), "split": "train", "label": 0, "loss": 1.0}
    )
    frame = frame.assign(correct=True, street=[f"street {index // 2}" for index in range(n)])
    summary = audit_of(
        log,
        epsilon_table(np.linspace(0, 1, n)),
        RecordedRun(ExampleTable(frame)),
        name="x",
        by=["street"],
    )
    html = render_html(summary)
    assert "9,960 more groups are in audit.json" in html
    assert len(html) < 3e6


def test_an_estimate_says_so(summary):
    text = Page(
        render_html(
            summary.replace(
                groups=(),
                **NO_ATTACKS,
                fidelity={},
                claim="estimate",
                claim_reason="Only 3 of 30 steps were recorded.",
            )
        )
    ).text
    assert "An estimate. Only 3 of 30 steps were recorded." in text
    assert "Exact for this trajectory" not in text


def test_bins_of_epsilon_stand_beside_their_line(run):
    log, examples = run
    rng = np.random.default_rng(0)
    holdout = epsilon_table(rng.uniform(0.1, 1.9, len(examples.test)), worst_case=1.9)
    summary = summary_of(*run, holdout=holdout, **SHORT)
    text = Page(render_html(summary)).text.replace("\u00a0", " ")
    assert "Threshold for a false-positive rate of 10 %" in text
    assert "Individual epsilon is no guarantee" in text
    leaky = examples.frame.assign(loss=np.where(examples.frame["split"] == "train", 0.001, 2.0))
    table = epsilon_table(np.full(log.n_examples, 0.02))
    found = audit_of(
        log, table, RecordedRun(ExampleTable(leaky)), name="x", by=["sex"], holdout=holdout
    )
    assert found.attack_by_epsilon["above_worst_case"].any()
    assert "A finding against the run" in Page(render_html(found)).text


def test_canaries_that_prove_too_much_are_a_finding(run):
    member = np.arange(400) % 2 == 0
    canaries = AttackScores(member.astype(float), member, "canaries", fair_coins=True)
    text = Page(
        render_html(summary_of(*run, evidence={"canaries": canaries}, **SHORT))
    ).text.replace("\u00a0", " ")
    assert "Null calibration" in text
    assert "The canaries prove a worst-case epsilon of at least" in text
    assert "above the 1.90 accounted" in text
    blind = AttackScores(np.zeros(400), member, "canaries", fair_coins=True)
    text = Page(render_html(summary_of(*run, evidence={"canaries": blind}, **SHORT))).text
    assert "A finding against the run" not in text
    assert "a worst-case epsilon of at least 0 at delta" in text
