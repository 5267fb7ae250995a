"""Rates of four audits, of scores and of a study are those of the code before they were tables."""

import json

import pytest

from analysis.attacks import make_rates

EXPECTED = json.loads(make_rates.EXPECTED.read_text())
KEY = ("attack", "model", "by", "part", "rate", "target_fpr", "up_to")
FURTHER = {"tpr_0.001", "tpr_0.01", "advantage"}  # of groups and units, which had an AUC only


def same(found, expected, where):
    """Whether all figures are equal to 1e-12; a table may have further rows, of these rates."""
    if isinstance(expected, dict) and "columns" in expected:
        key = [name for name in KEY if name in expected["columns"]]
        left = {tuple(row[name] for name in key): row for row in found}
        assert len(left) == len(found), where
        for values in expected["rows"]:
            row = dict(zip(expected["columns"], values, strict=True))
            said = {name: value for name, value in row.items() if value != make_rates.NONE}
            of = tuple(row[name] for name in key)
            same(left.pop(of), said, f"{where} {of}")
        assert {row["rate"] for row in left.values()} <= FURTHER, where
    elif isinstance(expected, dict):
        for name, value in expected.items():
            same(found[name], value, f"{where}.{name}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for one, two in zip(found, expected, strict=True):
            same(one, two, where)
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-12), where
    else:
        assert found == expected, where


@pytest.mark.slow
def test_figures_are_those_of_the_code_before(tmp_path):
    for name, found in make_rates.audits(tmp_path):
        same(found, EXPECTED[name], name)
    scores, study = make_rates.without_audit(tmp_path)
    same(scores, EXPECTED["scores"], "scores")
    for row in study:
        row["n_scores"] = row["n_members"] + row["n_others"]
    same(study, EXPECTED["study"], "study")
