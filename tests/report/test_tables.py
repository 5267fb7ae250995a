import io

import numpy as np
from rich.console import Console

from indpriv.analysis.groups import group_tables
from indpriv.report.page import Table, print_page, render_markdown
from synthetic import epsilon_table, rows


def test_columns_of_numbers_are_told_from_texts():
    head = ("Group", "Mean", "Interval", "Rows", "Status", "Finding")
    rows = [
        ("1", "0.5", "[0.10, 0.20]", "1,234 of 5,678 (< 1 %)", "passed", "x" * 50),
        ("2", "–", "49.3 to 50.8 %", "0", "failed", "1"),
    ]
    assert Table(rows, head).kinds == ["name", "number", "number", "number", "word", "text"]
    assert Table([("0.0", "1e-5")], ("From", "To"), row_names=False).kinds == ["number", "number"]


def test_columns_can_be_left_out():
    made = Table([("1", "2", "3")], ("a", "b", "c"), caption="x").only((0, 2))
    assert made.head == ["a", "c"]
    assert made.rows == [("", ["1", "3"])]
    assert made.caption == "x"


def test_a_narrow_terminal_cuts_no_figure():
    made = Table([("1" * 20, "2" * 20, "3" * 20)], ("a", "b", "c"))
    for width in (80, 50, 10):
        out = io.StringIO()
        made.print(Console(file=out, width=width))
        assert out.getvalue().split() == ["a", "b", "c", "1" * 20, "2" * 20, "3" * 20]


def test_a_long_name_of_a_condition_has_a_line_of_its_own():
    row = {"passed": True, "found": "2.10", "asked": "at most 3", "known": "recomputed"}
    conditions = [row | {"name": name} for name in ("guarantee", "mean epsilon " * 4 + "by sex")]
    out = io.StringIO()
    console = Console(file=out, width=80)
    print_page("gate", console, key_width=40, passed=True, conditions=conditions)
    _, short, _, name, found, _ = out.getvalue().splitlines()
    assert short.index("passed") == found.index("passed") == 40
    assert name == conditions[1]["name"]


def test_show_names_groups_without_training_examples_in_one_line():
    train = rows("train", [0, 1] * 20, group=["a", "b", "b", "a"] * 10)
    test = rows("test", [0] * 8, group=list("abcdefgh"))
    tables = group_tables(epsilon_table(np.arange(40.0)), train, test, ["group"])
    guarantee = {"worst_case_epsilon": 2.0, "status": "supported"}
    audit = {"claim": "exact", "meaning": "delta 1e-5", "guarantee": guarantee}
    text = render_markdown("group_tables", tables=tables, audit=audit, raw=True, vulnerability=())
    assert text.count("Without training examples: c, d, e, f, g and 1 more.") == 3  # labels too
    assert "| c" not in text
    assert text.count("| a |") == 3
