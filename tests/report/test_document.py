from indpriv.report.document import Span, table


def test_columns_of_numbers_are_told_from_texts():
    made = table(
        ("Group", "Mean", "Interval", "Rows", "Status", "Finding"),
        [
            (
                "1",
                "0.5",
                "[0.10, 0.20]",
                "1,234 of 5,678 (< 1 %)",
                Span("passed", "status"),
                "x" * 50,
            ),
            ("2", "–", "49.3 to 50.8 %", "0", Span("failed", "status"), "1"),
        ],
    )
    assert made.kinds == ("name", "number", "number", "number", "word", "text")
    assert table(("From", "To"), [("0.0", "1e-5")], row_names=False).kinds == ("number", "number")


def test_columns_can_be_left_out():
    made = table(("a", "b", "c"), [("1", "2", "3")], caption="x", wide=frozenset({1}))
    kept = made.without(made.wide)
    assert kept.head == ("a", "c")
    assert kept.rows[0].cells == ("1", "3")
    assert kept.caption == "x"
