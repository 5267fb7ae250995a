"""The page's script in a real browser: a second script clicks, and reports what is shown then."""

import base64
import hashlib
import html
import json
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from indpriv._formatting import format_epsilon, format_share_up
from indpriv.analysis.recorded_run import RecordedRun
from indpriv.attacks import Material
from indpriv.example_table import ExampleTable
from indpriv.norm_log.norm_log import NormLog
from indpriv.report import page as pages
from indpriv.report.report import CLIPPED, audit_page, norms_in_per_cent, search_data
from summaries import CHECKS, audit_of
from synthetic import epsilon_table, rows

BROWSER = pages.find_browser()
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason=f"none of {', '.join(pages.BROWSERS)} is installed"
)
HELPERS = """
const shown = () => [...document.querySelectorAll("#search dt")]
  .map(dt => [dt.textContent, dt.nextElementSibling.textContent]);
const type = id => {
  const input = document.querySelector("#search input");
  input.value = id;
  input.dispatchEvent(new Event("input", {bubbles: true}));
};
const answer = () => document.querySelector("#search output").textContent;
const column = (table, k) => [...table.tBodies[0].rows].map(row => row.cells[k].textContent);
const report = found => { document.title = JSON.stringify(found); };
"""


def clicked(folder, page, script, *more):
    """What the script reports of the page, and the browser's console.

    The page's policy stands: it is told the hash of this script besides the page's own.
    """
    code = HELPERS + script
    digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
    page = page.replace("script-src '", f"script-src 'sha256-{digest}' '", 1)
    path = folder / "page.html"
    path.write_text(page.replace("</body>", f"<script>{code}</script></body>"), encoding="utf-8")
    options = ("--enable-logging=stderr", "--virtual-time-budget=3000", "--dump-dom", *more)
    command = pages.browser_command(BROWSER, folder / "profile", *options, path.as_uri())
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = html.unescape(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    return json.loads(title), re.findall(r"CONSOLE.*", done.stderr)


def people(n, ids):
    """A run of n people with unequal norms, its epsilons and its summary."""
    rng = np.random.default_rng(3)
    log = NormLog.from_arrays(
        rng.uniform(0.0, 1.4, (40, n)),
        np.arange(0, 80, 2),
        total_steps=80,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        example_ids=ids,
    )
    city = np.array(["Bern</script><b>", "Ulm & 'Köln'"])[np.arange(n) % 2]
    frame = rows("train", np.arange(n) % 3, city=city).assign(example_id=ids, unit_id=ids)
    table = epsilon_table(rng.uniform(0.01, 1.8, n), worst_case=1.9, ids=ids)
    recorded = RecordedRun(Material(ExampleTable(frame)), checks=CHECKS)
    summary = audit_of(log, table, recorded, name="clicks", by=["city", "label"])
    return log, table, frame, summary


def page_of(log, table, frame, summary):
    return audit_page(summary).html(search_data=search_data(summary, log, table, frame))


@needs_browser
@pytest.mark.parametrize(
    "ids",
    [np.arange(300), np.array([f"<i>p{k}</i>" for k in range(300)])],
    ids=["numbers", "texts"],
)
def test_a_search_shows_the_figures_of_one_example(ids, tmp_path):
    log, table, frame, summary = found = people(300, ids)
    asked = [0, 17, 299]
    script = f"""const found = [];
    for (const id of {json.dumps([str(ids[k]) for k in asked])}) {{
      type(" " + id + " ");
      found.push([shown(), document.querySelector("svg.norms").getAttribute("aria-label")]);
    }}
    report(found);"""
    answers, console = clicked(tmp_path, page_of(*found), script)
    assert console == []
    norms = log.levels.norms(log.read(), 1.0)
    for position, (facts, label) in zip(asked, answers, strict=True):
        epsilon = table.epsilon[position]
        assert facts[0] == ["Id", str(ids[position])]
        assert facts[1] == ["Individual epsilon (exact)", format_epsilon(epsilon)]
        share = float(re.search(r"at most ([\d.]+) %", facts[2][1])[1]) / 100
        assert summary.guarantee.true_positive_limit(epsilon) <= share
        assert facts[2][1].endswith(format_share_up(share))
        row = frame.iloc[position]
        assert facts[3:] == [
            ["Group by city", row["city"]],
            ["Group by label", str(row["label"])],
        ]
        steps = [int(step.replace(",", "")) for step in re.findall(r"step ([\d,]+):", label)]
        assert (steps[0], steps[-1], len(steps)) == (0, 78, 16)
        for step, text in zip(steps, label.split(". ", 1)[1].split("; "), strict=True):
            norm = norms[step // 2, position]
            percent = re.search(r"at most (\d+) % of C", text)
            assert (percent is None) == (norm > 1)
            assert percent is None or round(100 * norm, 6) == int(percent[1])  # of 0.01 C


@needs_browser
def test_an_unknown_id_is_said_to_be_unknown(tmp_path):
    script = """const found = [];
    for (const id of ["300", "-1", "1e2", "x<b>", "07", ""]) { type(id); found.push(answer()); }
    report([found, document.querySelectorAll("#search b, #search dl").length]);"""
    (answers, markup), _ = clicked(tmp_path, page_of(*people(300, np.arange(300))), script)
    assert answers[-1] == ""
    assert all("No training example has the id" in text for text in answers[:-1])
    assert "Ids are 0 to 299." in answers[0]
    assert markup == 0


@needs_browser
def test_a_click_on_a_head_sorts_and_the_third_click_restores(summary, tmp_path):
    script = """const table = [...document.querySelectorAll("#groups .wide table")]
      .find(each => each.tBodies[0].rows.length > 3);
    const found = [], button = k => table.tHead.rows[0].cells[k].querySelector("button");
    const sorted = k => table.tHead.rows[0].cells[k].getAttribute("aria-sort");
    for (const k of [1, 1, 1, 0, 0]) { button(k).click(); found.push([sorted(k), column(table, k)]); }
    report([column(table, 1).length, found, document.querySelectorAll("[aria-sort]").length]);"""
    (n, found, marked), console = clicked(tmp_path, audit_page(summary).html(), script)
    assert console == []
    counts = [[int(text.replace(",", "")) for text in texts] for _, texts in found[:3]]
    assert [order for order, _ in found] == [
        "descending", "ascending", None, "ascending", "descending"
    ]  # fmt: skip
    assert counts[0] == sorted(counts[2], reverse=True)
    assert counts[1] == sorted(counts[2])
    assert counts[2] not in (counts[0], counts[1])
    assert found[3][1] == found[4][1][::-1]
    assert len(set(found[3][1])) == n
    assert marked == 1


@needs_browser
def test_a_bar_tells_its_count_under_the_pointer(summary, tmp_path):
    script = """const tips = [...document.querySelectorAll("#distribution .tip")], found = [];
    for (const tip of tips) {
      tip.querySelector("path").dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
      found.push(document.querySelector(".bubble").textContent);
    }
    document.body.dispatchEvent(new PointerEvent("pointerover", {bubbles: true}));
    report([found, document.querySelector(".bubble").hidden]);"""
    (texts, hidden), _ = clicked(tmp_path, audit_page(summary).html(), script)
    counts = [int(re.search(r": ([\d,]+) examples?$", text)[1]) for text in texts]
    assert counts == list(summary.individual.counts)
    assert hidden


@needs_browser
def test_no_text_of_a_figure_is_cut_off(summary, tmp_path):
    many = summary.individual.counts
    changed = tuple(count * 250_000 for count in many)
    summary = summary.replace(individual=replace(summary.individual, counts=changed))
    script = """report([...document.querySelectorAll("svg.figure")].flatMap(figure => {
      const box = figure.getBoundingClientRect();
      return [...figure.querySelectorAll("text")].filter(text => {
        const own = text.getBoundingClientRect();
        return own.left < box.left - 1 || own.right > box.right + 1;
      }).map(text => figure.id + text.textContent);
    }));"""
    assert clicked(tmp_path, audit_page(summary).html(), script)[0] == []


@needs_browser
@pytest.mark.parametrize(("medium", "width"), [("screen", 1200), ("print", 673)])
def test_no_table_is_cut_off(summary, medium, width, tmp_path):
    """673 pixels are the width of A4 without its margins; scrolling does not help on paper."""
    page = audit_page(summary).html()
    if medium == "print":
        page = page.replace("@media print", "@media screen")
    script = f"""const wide = [...document.querySelectorAll(".scroll table")]
      .filter(each => each.getBoundingClientRect().right > {width} + 1);
    report([innerWidth, wide.map(each => each.caption && each.caption.textContent)]);"""
    found = clicked(tmp_path, page, script, f"--window-size={width},2000", "--hide-scrollbars")[0]
    assert found == [width, []]


@needs_browser
def test_a_folded_section_opens_when_it_is_asked_for_and_words_tell_their_meaning(
    summary, tmp_path
):
    script = """const folded = document.querySelector("#hazards > details"), before = folded.open;
    location.hash = "#hazards";
    const word = document.querySelector("abbr"), bubble = document.querySelector(".bubble");
    setTimeout(() => {
      word.focus();
      const told = [bubble.hidden, bubble.textContent === word.title];
      word.blur();
      report([before, folded.open, ...told, bubble.hidden]);
    }, 200);"""
    found, console = clicked(tmp_path, audit_page(summary).html(), script)
    assert console == []
    assert found == [False, True, False, True, True]


@needs_browser
def test_the_policy_refuses_every_script_but_ours(summary, tmp_path):
    page = audit_page(summary).html()
    other = page.replace("</body>", "<script>document.title = '1'</script></body>")
    found, console = clicked(tmp_path, other, "report(document.title);")
    assert found.startswith("Privacy audit")
    assert "Content Security Policy" in " ".join(console)


def test_without_examples_the_page_has_no_search(summary):
    page = audit_page(summary).html()
    assert 'id="search"' not in page
    assert "epsilon.parquet" in page


def searched(*found):
    return json.loads(str(search_data(*found)))


def test_many_examples_are_left_to_the_table(summary):
    n = 100_001
    log = NormLog.from_arrays(
        np.ones((1, n), np.float32),
        [0],
        total_steps=1,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
    )
    assert search_data(summary, log, epsilon_table(np.ones(n)), None) is None
    fewer = log.take(np.arange(n - 1))
    kept = searched(summary, fewer, epsilon_table(np.ones(n - 1)), None)
    assert len(base64.b64decode(kept["norms"])) == n - 1


def test_norms_are_in_per_cent_rounded_up(summary):
    norms = [[0.0, 0.001, 0.25, 0.2501, 1.0, 1.0001]]
    log = NormLog.from_arrays(
        norms,
        [0],
        total_steps=1,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        rounding=0,
    )
    percent = [0, 1, 25, 26, 100, CLIPPED]
    assert norms_in_per_cent(log, [0])[:, 0].tolist() == percent
    found = searched(summary, log, epsilon_table(np.ones(6)), None)
    assert list(base64.b64decode(found["norms"])) == percent
    assert found["steps"] == [0]


def test_a_search_of_people_shows_their_rows_and_no_norms(summary):
    log = NormLog.from_arrays(
        np.ones((2, 3)),
        [0, 1],
        total_steps=2,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.1,
        unit="user",
        unit_ids=["ann", "ann", "bob"],
    )
    details = {"n_rows": np.array([2, 1]), "unit_worst_case": np.array([2.001, 1.0])}
    table = epsilon_table([0.5, 0.25], ids=["ann", "bob"], unit="user", rows_per_unit=2)
    table = replace(table, details=details)
    found = searched(summary, log, table, None)
    assert (found["steps"], found["norms"]) == ([], "")
    assert "Rows" in [name for coding in found["codings"] for name, _ in coding["facts"]]
