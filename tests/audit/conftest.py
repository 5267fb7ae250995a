import pytest

import indpriv.analysis.fidelity
from indpriv._files import write_json
from indpriv.audit import audit
from indpriv.report.page import Page
from synthetic import small_run, write_run

DELTA = 1e-5


@pytest.fixture
def no_extras(monkeypatch):
    """Leave out what takes long and is of no interest to most tests: more accounts, and the page's figures."""
    monkeypatch.setattr(indpriv.analysis.fidelity, "COARSER", ())
    monkeypatch.setattr(indpriv.analysis.fidelity, "RULES", ())
    monkeypatch.setattr(indpriv.analysis.fidelity, "FIDELITY_EPOCHS", ())
    monkeypatch.setattr(indpriv.analysis.fidelity, "_DRAWN", 1)
    monkeypatch.setattr(Page, "html", lambda page, *_: page.name)


@pytest.fixture(scope="package")
def artifacts():
    return small_run()


@pytest.fixture(scope="package")
def run_dir(artifacts, tmp_path_factory):
    log, examples = artifacts
    folder = write_run(tmp_path_factory.mktemp("runs") / "tiny", log, examples)
    examples.to_parquet(folder / "examples-non-dp.parquet")
    declared = {"config": {"audit": {"groups": ["sex", "label"]}}, "training": {"delta": DELTA}}
    declared["data"] = {"class_names": ["poor", "rich"], "preprocessing": "public constants"}
    write_json(
        folder / "run.json",
        {"name": "tiny", **declared, "on_trust": {"duplicates": "not looked for"}},
    )
    return folder


@pytest.fixture(scope="package")
def audited(run_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audits") / "tiny"
    return folder, audit(run_dir, folder)
