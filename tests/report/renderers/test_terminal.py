import io
import re
from dataclasses import replace

import numpy as np
import pytest
from indpriv.report.renderers.terminal import clean, print_audit
from indpriv.report.screens.groups import print_groups
from rich.console import Console

from indpriv.epsilon_table import DISCLAIMER
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import CHECKS as TEMPLATES
from summaries import CHECKS, summary_of
from synthetic import sound_checks


def screen(summary, width=80, show=print_audit, *arguments):
    buffer = io.StringIO()
    show(summary, *arguments, Console(file=buffer, width=width))
    return buffer.getvalue()


def words(text):
    return " ".join(text.split())


def test_the_first_screen_has_its_parts_in_order(summary):
    text = screen(summary)
    parts = [
        "SENSITIVE",
        "GUARANTEE",
        "THIS RUN",
        "WHO IS WORSE OFF",
        "ATTACK",
        "FIDELITY",
        "CHECKED",
        "NOT CHECKED",
        "ON TRUST",
    ]
    assert [text.index(part) for part in parts] == sorted(text.index(part) for part in parts)
    assert DISCLAIMER in words(text)
    for part in (
        "worst-case epsilon 1.90 (delta 1e-5, add/remove one example, Poisson sampling",
        "EXACT",
        "75 % at most",
    ):
        assert part in words(text)
    assert "An attack that fails is no evidence of privacy." in text or "Above chance" in text
    assert len(text.splitlines()) <= 40
    assert "\x1b" not in text


def test_the_table_has_the_figures_of_the_summary(summary):
    table = next(table for table in summary.groups if table.by == "sex")
    text = screen(summary)
    for row in table.rows.itertuples():
        line = next(line for line in text.splitlines() if line.startswith(f"  {row.name} "))
        assert line.split()[1] == f"{np.ceil(row.mean * 100 - 1e-6) / 100:.2f}"
        assert line.endswith(f"{100 * row.test_accuracy:.1f} %")


@pytest.mark.parametrize("width", [30, 50, 60, 80, 200])
def test_no_figure_is_cut_off_at_any_width(summary, width):
    text = screen(summary, width)
    table = next(table for table in summary.groups if table.by == "sex")
    for row in table.rows.itertuples():
        assert re.search(
            rf"^  {row.name} .* {100 * row.test_accuracy:.1f} %$", text, flags=re.MULTILINE
        )
    groups = screen([table], width, print_groups, summary.to_json())
    assert all(f"{row.n:,}" in groups for row in table.rows.itertuples())
    assert "…" not in groups


def test_the_reversal_is_said(run):
    log, examples = run
    train = examples.train
    women, one = train["sex"] == "Female", train["label"] == 1
    loss = (
        0.04 + 0.36 * one + 0.05 * women
    )  # epsilon is 2 * sqrt(loss): women have more within each label
    summary = summary_of(log, ExampleTable(train.assign(loss=loss)), by=["sex"])
    assert "! The order reverses among 0" in words(screen(summary))


def test_a_group_that_lacks_a_label_is_said(run):
    log, examples = run
    frame = examples.frame.assign(label=np.where(examples.frame["sex"] == "Male", 1, 0))
    assert "label-standardised undefined" in words(
        screen(summary_of(log, ExampleTable(frame), by=["sex"]))
    )


def test_markup_and_control_characters_are_text(run):
    log, examples = run
    names = np.array(
        ["[red]loud[/red]", "[link=file:///etc]x[/link]", "\x1b[31mred\x07", "\u202eevil", "a\nb"],
        dtype=object,
    )
    frame = examples.frame.assign(group=names[np.arange(len(examples.frame)) % 5])
    text = screen(summary_of(log, ExampleTable(frame), by=["group"], name="[bold]x[/bold]"))
    assert "[red]loud[/red]" in text
    assert "[bold]x[/bold]" in text
    assert not set(text) & {"\x1b", "\x07", "\u202e"}
    assert "a\ufffdb" in text


def test_one_group_is_not_called_groups(run):
    log, examples = run
    rows = np.arange(len(examples.frame))
    seven = ExampleTable(examples.frame.assign(group=rows % 7))
    assert "1 group between them is in the report" in words(
        screen(summary_of(log, seven, by=["group"]))
    )
    few = ExampleTable(examples.frame.assign(group=np.where(rows < 3, "few", "many")))
    assert "Too small to read (fewer than 10): 1 group." in words(
        screen(summary_of(log, few, by=["group"]))
    )


def test_clean_keeps_what_people_read():
    assert clean("Zoë 👩\u200d🔬 <=50K") == "Zoë 👩\u200d🔬 <=50K"
    assert clean("a\tb\rc\x00") == "a\ufffdb\ufffdc\ufffd"


def test_void_unproven_and_declared(run):
    void = words(screen(summary_of(*run, evidence={"recorder": {"seeded": True}})))
    assert "NONE: the run was seeded (reproducible: no privacy)" in void
    failed = TEMPLATES["batch_sizes"].fact("failed", "too many")
    unproven = words(screen(summary_of(*run, evidence={"checks": (*CHECKS, failed)})))
    assert "NOT PROVEN: too many" in unproven
    assert "FAILED batch sizes: too many" in unproven
    declared = words(screen(summary_of(*run, evidence={"checks": ()})))
    first = "Declared, not supported: nothing was checked: sampler, steps and settings are as"
    assert declared.split("GUARANTEE")[1].lstrip(" !").startswith(first)
    assert "to verify them, record training as it runs, with today's Recorder" in declared
    one = (*sound_checks(replay="not checked"),)
    declared = words(screen(summary_of(*run, evidence={"checks": one})))
    first = (
        "Declared, not supported: contribution is not verified (training repeated: as found); to"
    )
    assert declared.split("GUARANTEE")[1].lstrip(" !").startswith(first)
    assert "Evidence: 4 of 5 lines verified; contribution declared;" in declared


def test_without_a_guarantee_there_is_none_to_quote(run, summary):
    void = summary_of(*run, evidence={"recorder": {"seeded": True}})
    assert "This run has no guarantee to quote." in words(screen(void))
    assert "worst case 1.90, no guarantee (void)" in screen([], 80, print_groups, void.to_json())
    assert "no guarantee to quote" not in words(screen(summary))
    assert "no guarantee" not in screen([], 80, print_groups, summary.to_json())


def test_a_large_delta_is_said(summary):
    large = summary.replace(guarantee=replace(summary.guarantee, delta=0.01, delta_times_n=2.4))
    assert "DO NOT PUBLISH: delta is at least 1/n (delta times n is 2.4)" in words(screen(large))
    assert "DO NOT PUBLISH" not in screen(summary)


def test_missing_parts_are_said(run):
    text = words(screen(summary_of(*run, evidence={"examples": None, "non_dp": None}, fidelity={})))
    assert "MISSING examples.parquet is absent" in text
    assert "ATTACK No attack was run" in text


def test_groups_say_what_their_epsilons_mean(summary):
    text = words(screen(list(summary.groups), 120, print_groups, summary.to_json()))
    for part in (
        "SENSITIVE",
        DISCLAIMER,
        "individual epsilon (exact), delta 1e-5",
        "worst case 1.90",
        "sex among 1",
    ):
        assert part in text


def test_colours_only_where_there_is_a_terminal(summary):
    buffer = io.StringIO()
    print_audit(
        summary, Console(file=buffer, width=80, force_terminal=True, color_system="truecolor")
    )
    assert "\x1b[" in buffer.getvalue()


def test_groupings_without_a_table_are_named_largest_ratio_first(summary):
    tables = {found.by: found for found in summary.groups}
    shown = words(screen(summary)).split("largest ratio first: ")
    assert len(shown) == 2
    left_out = [name for name in tables if f"WHO IS WORSE OFF by {name} " not in shown[0]]
    assert [name for name in left_out if name in shown[1].split(". ")[0]] == left_out

    def renamed(value, name):
        ratio = replace(tables["sex"].ratio, value=value)
        return replace(tables["sex"], by=name, columns=("label",), ratio=ratio)

    many = [renamed(1 + k / 10, f"c{k}") for k in (3, 1, 5, 2, 7, 6, 4)]
    bare = replace(many[0], by="bare", ratio=None)
    crowded = summary.replace(groups=(tables["sex"], tables["label"], bare, *many))
    text = words(screen(crowded)).split("largest ratio first: ")[1]
    assert re.findall(r"(\w+) \([^()]*: ([\d.]+)\)", text)[:5] == [
        (f"c{k}", f"{1 + k / 10:.2f}") for k in (7, 6, 5, 4, 3)
    ]
    assert "; and 3 more." in text
