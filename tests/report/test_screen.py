"""The first screen: 16 lines of 80 columns for any data set, and no word that was not earned."""

import io
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from indpriv._facts import templates
from indpriv._formatting import format_epsilon
from indpriv.analysis.summary import alarms_of
from indpriv.report.formats import shorten
from indpriv.report.report import _brief, _group_lines, print_audit

PAGE = "reports/credit/report.html"
LETTERS = st.characters(categories=("L", "N"), include_characters=" -_<>=/.()")
NAMES = st.text(LETTERS, min_size=1, max_size=24).filter(str.strip)
BASES = (
    "plain", "void", "unproven", "declared", "partly", "delta", "huge", "bare", "units", "groups",
    "leaky", "proven", "attacked", "estimate", "federated", "contradicted", "read", "older", "one",
)  # fmt: skip
SAMPLING = [
    ({"sampler": "poisson"}, "secret"),
    ({"sampler": "poisson"}, "known in some runs"),
    ({"sampler": "poisson"}, "known"),
    ({"sampler": "fixed_size"}, "secret"),
    ({"sampler": "with_replacement"}, "secret"),
    ({"sampler": "truncated_poisson", "max_batch_size": 123_456}, "secret"),
]


def screen(audit, width=80, **options):
    buffer = io.StringIO()
    print_audit(audit, Console(file=buffer, width=width), **{"report": PAGE} | options)
    return buffer.getvalue()


def words(text):
    return " ".join(text.split())


def renamed(table, by, names, sizes, ratio):
    """A grouping of other columns, groups and sizes; the worst group is still the worst."""
    rows = [
        row | {"name": f"{name}{k}", "n": n, "too_small": n < 10}
        for k, (row, name, n) in enumerate(zip(table["rows"], names, sizes, strict=False))
    ]
    worst, best = rows[0]["name"], rows[-1]["name"]
    comparable = len(rows) > 1 and not (rows[0]["too_small"] or rows[-1]["too_small"])
    found = table["ratio"] | {"worst": worst, "best": best, "value": ratio}
    odd = {"by": by, "rows": rows, "ratio": found if comparable else None, "within_label": []}
    return table | odd | {"lowest_accuracy_ratio": None}


@pytest.mark.slow
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data(), base=st.sampled_from(BASES), name=NAMES)
def test_it_fits_16_lines_of_80_columns(audits, with_content, data, base, name):
    audit = audits[base]
    table = audits["plain"].to_json()["groups"][1]
    size = st.one_of(st.integers(1, 20), st.integers(10, 99_999_999))
    tables = []
    for _ in range(data.draw(st.integers(0, 6))):
        names = data.draw(st.lists(NAMES, min_size=2, max_size=2))
        sizes = data.draw(st.lists(size, min_size=2, max_size=2))
        ratio = data.draw(st.floats(1, 999))
        tables.append(renamed(table, data.draw(NAMES), names, sizes, ratio))
    missing = data.draw(st.lists(st.text(LETTERS, min_size=1, max_size=400), max_size=5))
    epsilon = data.draw(st.floats(0.001, 500))
    sampler, participation = data.draw(st.sampled_from(SAMPLING))
    audit = with_content(
        audit,
        name=name,
        groups=tables,
        missing=missing,
        guarantee={"worst_case_epsilon": epsilon},
        account={"participation": participation, **sampler},
    )
    text = screen(audit)
    lines = text.splitlines()
    assert len(lines) <= 16, text
    assert max(map(cell_len, lines)) <= 80, text
    assert "SENSITIVE" in lines[0]
    assert lines[-1] == f"More              {PAGE} | --verbose"
    promise = words(text[text.index("You may promise") : text.index("What happened")])
    found = audit.guarantee
    assert ("Supported." in promise) == (found.status == "supported" and found.publishable)
    assert ("promise nothing:" in promise) == (not found.publishable)
    declared = found.publishable and found.status != "supported"
    assert promise.startswith("You may promise declared, not supported:") == declared
    assert f"epsilon {format_epsilon(epsilon)} at delta" in promise
    assert f"; {shorten(audit.account.sampling, 48)}" in promise
    comparable = [one for one in tables if one["ratio"]]
    if comparable:
        largest = max(one["ratio"]["value"] for one in comparable)
        at = next(k for k, line in enumerate(lines) if line.startswith("Worst-off groups"))
        first = " ".join(lines[at : at + 1 + lines[at].endswith(" vs")])
        assert f"x{largest:.2f}" in first
        assert re.search(r"\(n [\d,.]+( M)?\)(?: vs|,) .* \([\d,.]+( M)?\)", first)
    # What makes the guarantee void or unproven is the first line itself.
    assert "Please look at" in text or not alarms_of(audit) or not found.publishable


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "plain",
            "at delta 1e-5 to everyone (one example added or removed; Poisson sampling; every checkpoint)",
        ),
        ("void", "nothing: the noise was seeded, so anyone with the seed can take it away"),
        ("unproven", "nothing: odd batch sizes: look for filters"),
        ("declared", "nothing was checked. Train with a Recorder attached."),
        ("partly", "contribution not verified. To verify it, record"),
        ("delta", "nothing: delta is at least 1/n. Audit again with a smaller --delta."),
        ("older", "Recorded by an earlier version. Train with today's Recorder."),
        ("huge", "at most 100 % of members"),
        ("units", "(one user of at most 3 rows zeroed out; Poisson sampling; every checkpoint)"),
        ("bare", "none was run; it needs losses of training and test examples"),
        ("streets", "street"),
        ("few", "too few to compare: few (3)"),
        ("attacked", "finds 100.00 % of members at 1 % false alarms (AUC 1.000; 0.5 is guessing)"),
        ("leaky", "an attack beats the worst case"),
        ("proven", "canaries contradict the account"),
        ("contradicted", "canaries contradict the account"),
    ],
)
def test_the_reason_and_the_remedy_stand_in_it(audits, name, said):
    text = screen(audits[name])
    assert said.lower() in words(text).lower()
    assert len(text.splitlines()) <= 16


def test_a_delta_that_is_too_large_is_said_once(audits):
    assert "Delta is not below 1/n" in " ".join(alarms_of(audits["delta"]))
    assert screen(audits["delta"]).lower().count("1/n") == 1


def test_the_number_of_small_groups_is_never_cut():
    days = [f"2024-02-{day:02d} (2)" for day in range(1, 30)]
    for small, said in [
        (days[:2], "2024-02-01 (2), 2024-02-02 (2)"),
        (days * 70, "2024-02-01 (2) and 2,029 more"),
        (["north by north-west of the islands (2)"] * 9, "9 groups"),
    ]:
        values = {"compared": [], "small": small, "groups": [None]}
        assert _group_lines(values, 3) == [f"too few to compare: {said}"]


@pytest.mark.parametrize(
    ("by", "names", "groups"),
    [
        ("household_size", ["6 or more", "one"], ['"6 or more0" ', '"one1" ']),
        (
            "highest_education_of_both",
            ["never went to a school", "university"],
            ['" ', '"university1" '],
        ),
    ],
)
def test_a_column_keeps_its_name_and_its_sizes(audits, with_content, by, names, groups):
    table = audits["plain"].to_json()["groups"][1]
    one = renamed(table, by, names, [24_720, 7_841], 2.4)
    lines = screen(with_content(audits["plain"], groups=[one])).splitlines()
    at = next(k for k, line in enumerate(lines) if line.startswith("Worst-off groups"))
    shown = " ".join(line[18:] for line in lines[at : at + 2])
    assert shown.startswith(f'{by} "{names[0][:5]}'), shown
    assert "(n 24,720)" in shown, shown
    assert "(7,841) x2.40" in shown, shown
    assert all(name in shown for name in groups), shown


def test_the_verdict_of_an_audit_without_alarm_has_none(audits):
    text = screen(audits["plain"])
    assert "promises nothing" in text
    assert not alarms_of(audits["plain"])
    assert "! " not in text.split("Evidence")[1]


@pytest.mark.parametrize("width", [30, 50, 80, 200])
def test_no_figure_is_cut_off_at_any_width(summary, width):
    text = words(screen(summary, width, verbose=True))
    table = next(one for one in summary.groups if one.by == "sex")
    for row in table.rows.itertuples():
        assert f"{row.name} {row.n:,} {format_epsilon(row.mean)}" in text
        assert f"{100 * row.test_accuracy:.1f} %" in text


def test_markup_and_control_characters_are_text(hostile):
    for verbose in (False, True):
        text = screen(hostile, verbose=verbose)
        assert "[bold]x" in text
        assert not set(text) & {"\x1b", "\x07", "\u202e", "\u2066", "\x00", "\x9b"}
    assert "[red]loud[/red]" in text


def test_colours_only_where_there_is_a_terminal(summary):
    buffer = io.StringIO()
    colours = {"force_terminal": True, "color_system": "truecolor"}
    print_audit(summary, Console(file=buffer, width=80, **colours))
    assert "\x1b[" in buffer.getvalue()
    assert "\x1b" not in screen(summary)


def test_why_epsilons_are_estimates_begins_a_line_of_its_own(audits):
    for audit in (audits["tight beside"], audits["estimate"]):
        audit = audit.replace(claim="estimate", claim_reason="Only 11 of 120 steps have records.")
        lines = [line.strip() for line in screen(audit, 200, verbose=True).splitlines()]
        assert "Only 11 of 120 steps have records." in lines


def test_what_was_cut_already_has_one_ellipsis():
    assert shorten("a, b and 2…; 1 more grouping", 12) == "a, b and 2…"


def test_a_failed_check_says_once_what_to_do(audits):
    text = screen(audits["own loader"])
    assert "nothing: the loop must draw from the DataLoader that make_private gave." in words(text)
    assert words(text).count("make_private gave") == 1
    assert "refuted: " not in text.partition("Please look at")[2]  # neither repeated nor cut


@pytest.mark.parametrize(
    "check",
    [
        ("batch_for_every_step", "unstepped"),
        ("batch_for_every_step", "looks"),
        ("batch_for_every_step", "unmatched"),
        ("whole_batches", "failed"),
        ("clipping", "other_norm"),
        ("clipping", "ghost"),
        ("noise", "small"),
        ("gradient_taken", "other"),
        ("loss", "factor"),
        ("loss", "tokens"),
        ("loss", "differ"),
        ("rows", "other_rows"),
        ("fed", "other_rows"),
        ("alone", "changes"),
        ("state", "other_weights"),
    ],
)
def test_a_failed_check_has_a_line_that_fits(check):
    key, case = check
    found = templates("check")[key]
    line = _brief(f"{found.title}: {found.texts[case]}", 100)
    assert line not in found.texts.values()
    assert cell_len(line) <= 62
