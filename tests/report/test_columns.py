"""One registry of columns: what each holds, its unit, its format, and whether it is private."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from audit_schema import audit_schema
from numpy.typing import NDArray

import indpriv
from indpriv._formatting import formatted
from indpriv._plain import column, columns_of, form_of, from_json, shown, to_json
from indpriv.analysis.attacks.rates import achieved
from indpriv.analysis.distribution import Distribution
from indpriv.analysis.fidelity import Tightness
from indpriv.analysis.statistics import Interval
from indpriv.analysis.summary import FIXED, RATES, column_at, keys
from indpriv.audit.gate import LIMITS
from indpriv.report.page import render_markdown
from synthetic import epsilon_table, parts

PACKAGE = Path(indpriv.__file__).parent
OURS = [
    file for of in ("analysis", "audit", "report", "cli") for file in (PACKAGE / of).rglob("*.py")
]
SAMPLES = {float: 0.25, int: 1, str: "a", bool: True, Interval: Interval(0.1, 0.2)}


def registry():
    """(table or class, name) -> column, of everything in audit.json."""
    found, left = {}, [("audit.json", name, column(kind)) for name, (kind, _) in keys().items()]
    while left:
        of, name, one = left.pop()
        if (of, name) not in found:
            found[of, name] = one
            own = columns_of(one.kind) if isinstance(one.kind, type | str) else {}
            left += [(one.kind, inner, each) for inner, each in own.items()]
    return found


REGISTRY = registry()
COUNTS = {"n": 9, "n_members": 4, "n_others": 5}
OF_A_RATE = {"attack": "a", "model": "dp", "by": "", "part": "p", **COUNTS}


def test_every_column_says_all_five():
    assert len(REGISTRY) > 400
    schema = audit_schema()
    for of, one in [("audit.json", schema), *schema["$defs"].items()]:
        for name, value in one["properties"].items():
            assert name in FIXED or value.get("description"), (of, name)
    for (of, name), one in REGISTRY.items():
        assert one.private in (True, False), (of, name)
        if one.kind in (int, float):
            assert one.unit, (of, name)
            assert one.form, (of, name)
        if one.form and one.form != "each":
            assert formatted(SAMPLES[one.kind], one.form), (of, name)
            assert formatted(None, one.form) == "–", (of, name)


@pytest.mark.parametrize("name", ["reference", "worst_case_reference"])
def test_limits_of_bins_are_rounded_up(name):
    assert formatted(0.20041, columns_of("EpsilonBin")[name].form) == "20.1 %"


def test_a_rate_is_shown_in_the_format_of_its_rate():
    rates = ("auc", "tpr_0.01", "success")
    found = RATES.of_rows([{**OF_A_RATE, "rate": rate, "value": 0.2034} for rate in rates])
    assert [shown(row, "value") for row in parts(found)["p"].values()] == [
        "0.203",
        "20.34 %",
        "20.3 %",
    ]
    assert form_of(achieved(found)[0], "auc") == RATES.each[1]["auc"]


def test_settings_and_the_guarantee_are_public_and_figures_of_the_data_private():
    private = {option: column_at(of["figure"]).private for option, of in LIMITS.items()}
    assert {option for option, hidden in private.items() if not hidden} == {
        *("unit", "verified", "exact", "max_worst_case_epsilon", "max_delta", "min_coverage")
    }
    for path in ("guarantee.delta_times_n", "run.n_examples", "groups", "rates", "unit_sizes"):
        assert column_at(path).private, path


FOUND = Distribution(1000, 1.0, 1.234, 1.5, 1.6, 1.7, 1.8, 0.1234, (0.0, 2.0), (1000,))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ found.n }}: {{ found.median }}, {{ found.edges[1] }}", "1,000: 1.24, 2.00"),
        ("{{ found.share_at_worst_case }} {{ (found.n / 3) | num }}", "12.3 % 333"),
        ('{{ "at most " ~ found.p95 }}', "at most 1.60"),
        ('{{ [found] | table({"Median": "median"}) }}', "| 1.24 |"),
    ],
)
def test_templates_show_a_column_in_its_format(tmp_path, text, expected):
    (tmp_path / "page.md.j2").write_text(text)
    assert expected in render_markdown(tmp_path / "page", found=FOUND)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{{ found.median | num }}", "leave out the filter"),
        ('{{ "%.3f" | format(found.median) }}', "leave out the filter"),
        ('{{ [found] | table({"Median": "median|num"}) }}', "leave out the filter"),
        ("{{ found.median / 2 }}", "a filter should give its format"),
        ('{{ [(found.median / 2,)] | table(["Half"]) }}', "a filter should give its format"),
    ],
)
def test_templates_format_no_column_by_hand_and_everything_else(tmp_path, text, error):
    (tmp_path / "page.md.j2").write_text(text)
    with pytest.raises(TypeError, match=error):
        render_markdown(tmp_path / "page", found=FOUND)


def test_the_content_of_audit_json_is_shown_too(tmp_path):
    """As `show` has it: values of JSON, which have no columns."""
    text = '{% from "worst_case.md.j2" import worst_case %}{{ worst_case(audit) | md }}'
    (tmp_path / "page.md.j2").write_text(text)
    audit = {"guarantee": {"worst_case_epsilon": 1.234, "status": "void"}}
    assert render_markdown(tmp_path / "page", audit=audit) == "1.24, no guarantee (void)\n"


@dataclass(frozen=True)
class Other:
    """What a template may get too, of other types than columns have."""

    table: NDArray[np.float64]
    rows: Sequence[int]
    later: "NotYet"  # noqa: F821


def test_values_of_any_class_are_shown(tmp_path):
    (tmp_path / "page.md.j2").write_text("{{ other.rows | length }} {{ other.later }}")
    other = Other(np.zeros(1), [1, 2], "x")
    assert render_markdown(tmp_path / "page", other=other) == "2 x\n"
    table = epsilon_table([1.0, 2.0], worst_case=2.0)
    (tmp_path / "page.md.j2").write_text("{{ table.worst_case_epsilon | eps }}")
    assert render_markdown(tmp_path / "page", table=table) == "2.00\n"


def test_what_a_study_of_models_found_is_shown():
    ends = {"low": 0.1, "high": 0.3}
    rates = [{**OF_A_RATE, **ends, "rate": one, "value": 0.2} for one in RATES.each[1]]
    shown_ = render_markdown("study", rows=achieved(RATES.of_rows(rates)))
    assert "| 0.200 |" in shown_
    assert "10.00 to 30.00 %" in shown_


def test_no_module_formats_a_column_by_hand():
    names = {name for (_, name), one in REGISTRY.items() if one.kind is float}
    found = [
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}"
        for file in OURS
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if any(isinstance(of, ast.Attribute) and of.attr in names for of in formatted_in(node))
    ]
    assert not found


def formatted_in(node):
    """What a call of a format, or an expression in a text with a format, shows."""
    if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
        return [node.value]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        edges = node.func.id == "format_edges"  # of bins, with as many decimals as they need
        return node.args if node.func.id.startswith("format") and not edges else []
    return []


def test_an_epsilon_may_be_more_than_twice_its_lower_end():
    """An audit of tiny epsilons could be written, but not read again."""
    found = Tightness(worst_case=1.0, n=1, median=1.0, median_told=1.0, n_bracketed=1, above=1.5001)
    assert from_json(Tightness, to_json(found)) == found
    assert shown(found, "above") == "150.1 %"
