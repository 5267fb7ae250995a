"""A finding is two files, its module and its template, and a table of columns.toml."""

import json
import shutil

import pytest

import indpriv.analysis
from indpriv.analysis import summary as registry
from indpriv.analysis.summary import Audit, findings, keys
from indpriv.audit.gate import judge
from indpriv.report import page
from indpriv.report.report import audit_page
from summaries import summary_of
from synthetic import small_run

MODULE = """
from indpriv.analysis.summary import Finding

FINDING = Finding(
    "shortest",
    lambda run: {"shortest": float(run.audit.groups[0].rows["mean"].min())},
    alarms=lambda audit: ["Somebody lost no privacy."] * (audit.shortest == 0),
    watched="somebody has a privacy loss",
    notes=lambda audit: [f"The smallest is {audit.shortest:.1f}."],
)
"""


@pytest.fixture
def another_finding(tmp_path, monkeypatch):
    (tmp_path / "shortest.py").write_text(MODULE)
    templates = shutil.copytree(page.TEMPLATES, tmp_path / "templates")
    (templates / "shortest.md.j2").write_text("The shortest has {{ shortest | eps }}.\n")
    paths = [*indpriv.analysis.__path__, str(tmp_path)]
    monkeypatch.setattr(indpriv.analysis, "__path__", paths)
    monkeypatch.setattr(page, "TEMPLATES", templates)
    own = {"shortest": ["Epsilon", "The smallest mean epsilon of a group."]}
    of_findings = [*registry._TABLES["audit"].items()]
    of_findings.insert(3, ("shortest", own))
    monkeypatch.setitem(registry._TABLES, "audit", dict(of_findings))
    caches = (registry.findings, registry.keys, registry.finding_of, registry.document)
    for cached in caches:
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("another_finding")
def test_a_new_finding_is_found_stored_shown_and_watched():
    found = summary_of(*small_run(n=60))
    assert [one.name for one in findings()][:4] == ["missing", "verdict", "checks", "shortest"]
    assert found.shortest == found.groups[0].rows["mean"].min() > 0  # it asked for the groups
    content = json.loads(json.dumps(found.to_json()))
    assert Audit.from_json(content).shortest == found.shortest
    assert "The shortest has" in audit_page(found).markdown()
    assert f"The smallest is {found.shortest:.1f}." in registry.notes_of(found)
    name = "somebody has a privacy loss"
    failed = [one.name for one in judge({**content, "shortest": 0.0}, {}) if not one.passed]
    assert failed == [name]


def test_keys_and_names_are_of_one_finding_each():
    every = [key for one in findings() for key in one.keys]
    assert len(every) == len(set(every)) == len(keys())
    assert len({one.name for one in findings()}) == len(findings())
