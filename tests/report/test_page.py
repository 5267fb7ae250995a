"""The page and its Markdown: nothing from outside, nothing obeyed, readable by everybody."""

import base64
import hashlib
import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from markdown_it import MarkdownIt

from indpriv._formatting import format_epsilon, format_interval, format_share
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.analysis.summary import Audit
from indpriv.attacks import Material
from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.report.formats import TEMPLATES
from indpriv.report.page import escape, glossary, inline_html, plain
from indpriv.report.report import audit_page
from summaries import audit_of, summary_of
from synthetic import epsilon_table

VOID = {"meta", "link", "br", "img", "input"}
INLINE = {"abbr", "span", "strong", "em", "code", "a"}
SVG = "{http://www.w3.org/2000/svg}"


class Page(HTMLParser):
    """Tags, attributes and visible text of a page; unbalanced tags are an error."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.tags, self.attributes, self.words = [], Counter(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags[tag] += 1
        self.words.append(" " * (tag not in INLINE))
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
        return " ".join("".join(self.words).replace("\u00a0", " ").split())


@pytest.fixture(scope="module")
def html(summary):
    return audit_page(summary).html()


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def said(audit):
    """Text of the Markdown of an audit."""
    return " ".join(re.sub(r"\\(.)", r"\1", audit_page(audit).markdown().replace("**", "")).split())


# --- one page that asks for nothing


def test_it_is_one_page_that_asks_for_nothing(html, page):
    policy = re.search(r"script-src '(sha256-[^']+)';", html)[1]
    scripts = re.findall(r"<script>(.*?)</script>", html, flags=re.DOTALL)
    digest = hashlib.sha256(scripts[0].encode()).digest()
    assert policy == f"sha256-{base64.b64encode(digest).decode()}"
    assert page.tags["script"] == len(scripts) == 1
    assert not page.tags.keys() & {"iframe", "object", "embed", "form", "img", "base"}
    asked = {"src", "href", "xlink:href", "action", "data", "srcset", "poster"}
    links = [value for _, name, value in page.attributes if name in asked]
    assert all(link.startswith(("#", "data:")) for link in links)
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", html))
    assert "@import" not in html
    names = {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}
    assert set(re.findall(r"https?://[^\s\"'<>)]+", html)) <= names
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert "default-src 'none'" in html
    assert len(html) < 3e6


def test_no_individual_value_is_on_it_unless_it_is_passed(run):
    log, examples = run
    rng = np.random.default_rng(5)
    table = epsilon_table(rng.uniform(0.2, 1.8, log.n_examples), worst_case=2.0)
    html = audit_page(
        audit_of(log, table, RecordedRun(Material(examples)), name="tiny", by=["sex"])
    ).html()
    digits = [f"{value:.5f}" for value in [*table.epsilon, *examples.train["loss"]]]
    assert [value for value in digits if value in html] == []


def test_pictures_are_on_it_only_if_they_are_passed(audits):
    audit = audits["read"]
    drivers = audit.drivers
    pictures = {id: f"data:image/png;base64,{id}" for id in drivers.least_protected}
    pictures |= {id: f"data:image/png;base64,{id}" for id in drivers.most_protected}
    uri = "data:image/png;base64,AAAA"
    page = Page(audit_page(audit).html(pictures, reconstructed={"row": uri}))
    assert page.tags["img"] == len(pictures) + 1
    assert ("img", "src", uri) in page.attributes
    assert Page(audit_page(audit).html()).tags["img"] == 0


# --- no text of the data is obeyed


def test_hostile_texts_stay_texts_on_the_page(hostile):
    html = audit_page(hostile).html()
    page = Page(html)
    assert (page.tags["script"], page.tags["img"], page.tags["b"], page.tags["i"]) == (1, 0, 0, 0)
    assert not any(name.startswith("on") for _, name, _ in page.attributes)
    assert not {tag for tag, name, _ in page.attributes if name == "href"} - {"a", "link", "use"}
    for text in (
        "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "{{ 7 * 7 }}{% raw %}",
        "]]> --> </style>", "a|b `c` *d* _e_ [f](http://g) ![h](i) &lt; $x^2$", "[red]loud[/red]",
        "1. one", "> [!CAUTION]", "=cmd|'/c calc'!A1", "👩\u200d🔬", "<b>*col*</b>|[x]",
    ):  # fmt: skip
        assert text in page.text, text
    assert not set(page.text) & set("\x1b\x07\x00\x9b\u202e\u2066\ufdd0")
    figures = re.findall(r"<svg [^>]*>.*?</svg>", html, flags=re.DOTALL)
    assert all(ET.fromstring(figure) is not None for figure in figures)


def test_hostile_texts_stay_texts_in_markdown(hostile):
    """CommonMark, with HTML on, sees no tag, link, picture or code of the data."""
    text = audit_page(hostile).markdown()
    tokens = MarkdownIt("commonmark", {"html": True}).enable("table").parse(text)
    kinds = Counter()
    for token in tokens:
        kinds[token.type] += 1
        kinds.update(one.type for one in token.children or ())
    assert not kinds.keys() & {"html_inline", "html_block", "link_open", "image", "code_block"}
    outside = re.sub(r"```text\n.*?\n```", "", text, flags=re.DOTALL)
    assert kinds["heading_open"] == outside.count("\n#")
    assert not [one for one in tokens if one.type == "fence" and one.info == "block"]
    rows, width = [], 0
    for token in tokens:  # each row of a table has as many cells as its head
        if token.type == "tr_open":
            width = 0
        width += token.type in ("th_open", "td_open")
        if token.type == "table_open":
            rows.append([])
        if token.type == "tr_close":
            rows[-1].append(width)
    assert len(rows) > 10
    assert all(len(set(widths)) == 1 for widths in rows)
    assert not set(text) & set("\x1b\x07\x00\x9b\u202e\u2066")


@pytest.mark.parametrize(
    "text",
    ["a\n# b", "<img src=x>", "*x* _y_ `z`", "- a", "1) b", "=====", "a|b", "\\*", "&amp;", "~~a~~",
     "http://a.b", "<http://a.b>", "[!NOTE]", "**", "sample_rate", "__init__", "\u202ea", "$a$"],
)  # fmt: skip
def test_an_escaped_text_is_itself(text):
    shown = " ".join(text.replace("\u202e", "\ufffd").split())
    assert plain(escape(text)) == shown
    assert inline_html(escape(text)) == (
        shown.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    assert MarkdownIt("commonmark").render(escape(text)).count("<p>") == 1


@pytest.mark.slow
def test_no_backslash_of_an_escape_is_seen(audits):
    for name in ("groups", "units", "attributes", "estimate", "gradient canaries"):
        assert "\\" not in Page(audit_page(audits[name]).html()).text, name


# --- readable by everybody


def test_ids_are_unique_and_every_reference_resolves(page):
    ids = [value for _, name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for _, name, value in page.attributes if name in ("href", "xlink:href")]
    targets = {value[1:] for value in links if value[0] == "#"}
    labels = [value.split() for _, name, value in page.attributes if name == "aria-labelledby"]
    assert targets | {word for label in labels for word in label} <= set(ids)


def test_figures_are_well_formed_and_described(html):
    figures = re.findall(r'<svg [^>]*class="figure".*?</svg>', html, flags=re.DOTALL)
    assert len(figures) == 7  # histogram, norms, three groupings, loss, ROC
    for figure in figures:
        root = ET.fromstring(figure)
        assert root.get("role") == "img"
        assert root.find(f"{SVG}title").text
        assert len(root.find(f"{SVG}desc").text) > 40
        colours = re.findall(r"#[0-9a-f]{6}\b", figure)
        assert colours == [], "a colour that does not change with the theme"


def test_sections_stand_in_their_order_and_the_last_are_folded(html):
    order = ["verdict", "groups", "distribution", "loss", "attacks", "lookup"]
    folded = ["run", "fidelity", "hazards", "reproduce"]
    assert re.findall(r'<section id="(\w+)"', html) == order + folded
    assert re.findall(r'<a href="#(\w+)"', html) == order + folded
    found = re.findall(r'<section id="(\w+)">\s*<details class="section">', html)
    assert found == folded


def test_words_are_explained_once_in_a_section(html):
    sections = html.split("<section ")[1:]
    explained = [re.findall(r'<abbr tabindex="0" title="([^"]+)">', one) for one in sections]
    assert all(len(one) == len(set(one)) for one in explained)
    assert len({one for each in explained for one in each}) > 8
    assert "<abbr" not in "".join(re.findall(r"<h\d.*?</h\d>", html))
    entries = (TEMPLATES / "glossary.toml").read_text(encoding="utf-8").count("[[entry]]")
    assert len(set(glossary().values())) == entries


def test_there_is_a_table_beside_every_figure(html):
    for block in html.split("<figure>")[1:]:
        assert 'class="dots"' in block or "<table" in block.split("<figure>")[0]


@pytest.mark.slow
def test_ten_thousand_groups_stay_small():
    n = 20_000
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.1}
    log = NormLog.from_arrays(np.ones((2, n)), [0, 1], total_steps=2, **settings)
    frame = pd.DataFrame(
        {"example_id": range(n), "unit_id": range(n), "split": "train", "label": 0, "loss": 1.0}
    )
    frame = frame.assign(correct=True, street=[f"street {index // 2}" for index in range(n)])
    recorded = RecordedRun(Material(ExampleTable(frame)))
    found = audit_of(log, epsilon_table(np.linspace(0, 1, n)), recorded, name="x", by=["street"])
    html = audit_page(found).html()
    assert "9,960 more groups are in audit.json" in html
    assert len(html) < 3e6


# --- what it says, and what it never says


def test_no_epsilon_without_its_meaning(page):
    for words in (
        "SENSITIVE", DISCLAIMER, "delta 1e-5", "add/remove one example", "Poisson sampling",
        "RDP accountant", "exact", "not a guarantee", "95 %", "99 %", "largest",
        "An attack that fails is no evidence of privacy",
    ):  # fmt: skip
        assert words in page.text, words


def test_what_every_report_states(page):
    for item in (
        "Versions of this audit", "Versions in training", "Code commit", "Fingerprint of the data",
        "Unit of privacy", "Neighbouring relation", "What is released", "Trust model", "Sampler",
        "sample_rate", "Steps", "max_grad_norm", "noise_multiplier", "Normalisation of the gradient",
        "Clip mode", "Accountant", "Delta", "Delta times n", "Source of norms", "Tuning runs",
        "Private in this document", "Number of examples", "Hazard", "null calibration",
        "fixed before the attack was run", "Read and accepted by", "Open points",
    ):  # fmt: skip
        assert item in page.text, item


def test_rows_that_give_n_away_are_marked(html):
    def row(item):
        return re.search(rf'<th scope="row">{item}</th>.*?</tr>', html, flags=re.DOTALL)[0]

    for item in ("Delta and n", "Number of examples", "Fingerprint of the data"):
        assert "not for publication" in row(item)
    assert "not for publication" not in row("noise_multiplier")


PUBLISH = "You may publish this sentence"
QUOTE = "no guarantee to quote"
ABOVE = "A finding against the run"


@pytest.mark.parametrize(
    ("name", "present", "absent"),
    [
        ("plain", [PUBLISH, "Exact for this trajectory.", "No seed of its noise"], [QUOTE, ABOVE]),
        ("void", ["gives no privacy guarantee", QUOTE, "Do not publish any privacy guarantee",
                  "reproducible from its seed"], [PUBLISH, "Best test for membership"]),
        ("no noise", ["gives no privacy guarantee"], [PUBLISH, "reproducible from its seed"]),
        ("unproven", ["No guarantee is proven", "Too many.", QUOTE], [PUBLISH]),
        ("declared", ["declared, not supported", "0 of 5 lines verified"], ["status supported"]),
        ("guessed", ["whose seed can be guessed"], [PUBLISH]),
        ("system", ["No seed of its noise"], ["whose seed can be guessed"]),
        ("delta", ["Delta is too large:", "delta times n is 2.4"],
         [PUBLISH, "Guarantee: worst-case epsilon", "All model states of this training run"]),
        ("huge", ["true-positive rate is at most 10^63 times", "hardly any protection"], []),
        ("estimate", ["An estimate.", "Only 3 of 30 steps were recorded."], ["Exact for this"]),
        ("bare", ["examples.parquet is absent", "No attack was run"], ["Who is worse off"]),
        ("one", ["No correlation is defined: only 1 examples"], []),
        ("few", ["Too small to read (fewer than 10): 1 group."], []),
        ("streets", ["more groups are in audit.json"], []),
        ("holdout", ["Threshold for a false-positive rate of 10 %"], [ABOVE]),
        ("leaky", [ABOVE, "Individual epsilon is no guarantee"], []),
        ("canaries", ["a worst-case epsilon of at least 0 at delta", "Null calibration"], [ABOVE]),
        ("proven", [ABOVE, "The canaries prove a worst-case epsilon of at least"], []),
        ("attacked", ["above what the worst case allows: lira (online)", "Every noisy update",
                      "Attacks by example"], ["No attack was run"]),
        ("failed attack", ["An attack that fails is no evidence of privacy"], [ABOVE]),
        ("groups", ["Among 1 the order reverses", "Among 0 the order flips too", "may be chance",
                    "undefined (a mean of 0)"], []),
        ("moved", ["Noise and clipping over training", "First reached at epsilon"], []),
        ("void curve", ["Noise and clipping over training"], ["First reached at epsilon"]),
        ("exactness", ["within 0.1 % of the exact ones", "those of 1,000,000 random examples",
                       "1,000,000 random training examples and all test examples"], []),
        ("federated", ["every published model (outsider)", "Sensitivity to choices"], []),
        ("units", ["Rows of one user", "2 to 3"], []),
        ("attributes", ["what the model adds for training examples"], [ABOVE]),
        ("guessed attributes", [ABOVE], []),
        ("gradient canaries", ["lower bounds"], [ABOVE, "CONTRADICTED"]),
        ("contradicted", [ABOVE, "CONTRADICTED"], []),
        ("read", [ABOVE, "after 10 steps", "failed"], []),
        ("batch norms", ["1,234 norms of sampled examples"], []),
    ],
)  # fmt: skip
def test_what_is_said_of_an_audit(audits, name, present, absent):
    text = said(audits[name])
    for words in present:
        assert words in text, words
    for words in absent:
        assert words not in text, words


def test_nothing_invites_to_publish_where_there_is_no_guarantee(audits):
    for name in ("void", "unproven", "delta", "no noise"):
        text = Page(audit_page(audits[name]).html()).text
        assert PUBLISH not in text
        assert "What everybody is promised" not in text


def test_a_failed_attack_is_one_sentence(audits):
    text = said(audits["plain"])
    assert len(re.findall(r"guessing is right in 50 %", text)) == 1


def test_what_changed_since_an_audit_stands_in_a_table(audits):
    page = Page(audit_page(audits["plain"], since=audits["declared"]).html()).text
    assert f"Since the audit of {audits['declared'].created[:10]}" in page
    assert "Status declared supported" in page
    same = Page(audit_page(audits["plain"], since=audits["plain"]).html()).text
    assert "Everything compared same same" in same
    assert "Since the audit" not in Page(audit_page(audits["plain"]).html()).text


@pytest.mark.parametrize("column", ["unit", "length", "by", "part", "rate", "group"])
def test_groups_may_be_called_like_parts_and_rates(run, column):
    """Those of units, gradient canaries and all examples are told from groups of a column."""
    log, examples = run
    names = ["mean", "all examples", "longest canaries", "auc"]
    odd = examples.frame.assign(**{column: np.resize(names, len(examples.frame))})
    found = summary_of(log, ExampleTable(odd), by=[column], fidelity={})
    page = audit_page(found).markdown()
    assert "Attacks by" not in page
    assert "Every noisy update" not in page
    rows = found.rates.query("rate == 'success' and model == 'dp'")
    assert sorted(rows["part"]) == sorted(["all examples", *names])
    of_groups = page[page.index(f"Success rate by {column}") :].split("\n\n")[1]
    assert of_groups.count("| all examples |") == 2
    assert all(f"| {name} |" in of_groups for name in names)


# --- no figure is lost

REPORTS = Path(__file__).parents[2] / "reports"


@pytest.mark.parametrize("name", ["adult", "utkface_age"])
def test_every_figure_of_a_committed_audit_is_on_its_page(name):
    content = json.loads((REPORTS / name / "audit.json").read_text(encoding="utf-8"))
    text = said(Audit.from_json(content))
    expected = [format_epsilon(content["guarantee"]["worst_case_epsilon"])]
    quantiles = ("mean", "median", "p75", "p95", "p99", "max")
    expected += [format_epsilon(content["individual"][one]) for one in quantiles]
    for table in content["groups"]:
        for row in table["rows"]:
            ends = row["mean_interval"]
            parts = [row["name"], f"{row['n']:,}", format_epsilon(row["mean"])]
            parts += [format_interval(ends["low"], ends["high"])] if ends else ["–"]
            expected.append(f"| {' | '.join(parts)} |")
            expected += [format_epsilon(row[one]) for one in quantiles[1:] if one in row]
        expected.append(f"{table['ratio']['value']:.2f}")
    for row in content["rates"]:
        if row["rate"] == "auc" and row["part"] == "all examples":
            ends = format_interval(row["low"], row["high"], 3)
            expected.append(f"{row['value']:.3f} | {ends}")
        if row["rate"] == "success" and row["value"] is not None:
            expected.append(format_share(row["value"], 1))
    for one in ("pearson_log_loss", "spearman", "pearson_below_worst_case"):
        expected.append(f"{content['loss'][one]:.2f}")
    expected += [one["source"] for one in content["attacks"]]
    assert len(expected) > 60
    assert [one for one in expected if one not in text] == []


def test_the_unit_of_a_run_makes_no_link(summary):
    """Captions name the unit, which the run says."""
    odd = replace(summary.account, unit="[x](http://evil.example)", rows_per_unit=3)
    page = audit_page(summary.replace(account=odd)).html()
    assert '<a href="http' not in page
    assert "Each bar counts [x](http://evil.example)s" in unescape(page).replace("\xa0", " ")
