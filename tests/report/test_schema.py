import json
from pathlib import Path

import jsonschema
import pytest
from audit_schema import audit_schema

import indpriv.report
from indpriv.analysis.summary import Audit
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import InputError
from summaries import summary_of

SCHEMA = json.loads(
    (Path(indpriv.report.__file__).parent / "audit.schema.json").read_text(encoding="utf-8")
)

REPORTS = Path(__file__).parents[2] / "reports"
COMMITTED = sorted(
    path for at in ("*", "yu2023/preset/*") for path in REPORTS.glob(f"{at}/audit.json")
)


def check(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)


def test_the_schema_file_is_what_the_dataclasses_say():
    assert audit_schema() == SCHEMA, "run `make schema`"


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: str(path.parent.relative_to(REPORTS)))
def test_committed_audits_fit_and_are_read_back(path):
    document = json.loads(path.read_text(encoding="utf-8"))
    check(document)
    again = json.loads(json.dumps(Audit.from_json(document).to_json()))
    if "lines" not in document["guarantee"]:  # "supported" stood for: no check had failed
        assert again["guarantee"]["status"] in ("declared", document["guarantee"]["status"])
        assert again["guarantee"]["status"] != "supported"
        for name in ("status", "reasons"):
            again["guarantee"][name] = document["guarantee"][name]
    assert said_in(again, document) == document


def said_in(read, document):
    """What was read back, without keys that an audit of an earlier version lacks."""
    if isinstance(document, list) and isinstance(read, list) and len(document) == len(read):
        return [said_in(*pair) for pair in zip(read, document, strict=True)]
    if not isinstance(document, dict):
        return read
    return {key: said_in(read[key], value) for key, value in document.items()}


def test_what_is_written_is_read_back(summary):
    document = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert Audit.from_json(document).to_json() == document


def test_an_audit_of_another_version_is_refused(summary):
    with pytest.raises(InputError, match="schema_version=1, not 2; make the audit again"):
        Audit.from_json({**summary.to_json(), "schema_version": 1})
    lacking = summary.to_json()
    del lacking["guarantee"]["delta"]
    with pytest.raises(InputError, match=r"audit.json lacks guarantee\.delta; make the audit"):
        Audit.from_json(lacking)
    older = summary.to_json()
    del older["rates"]  # which had its attacks elsewhere: a finding of theirs must not be lost
    with pytest.raises(InputError, match="lacks rates; make the audit again"):
        Audit.from_json(older)


def test_audit_json_is_what_the_schema_says(summary):
    document = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    check(document)
    assert document["disclaimer"] == DISCLAIMER
    assert document["sensitive"].startswith("SENSITIVE")
    for words in ("delta 1e-5", "one example", "add/remove", "Poisson sampling"):
        assert words in document["meaning"]


def test_the_schema_refuses_what_it_does_not_know(summary):
    document = summary.to_json()
    for change in (
        {"secret": 1},
        {"claim": "certain"},
        {"guarantee": {**document["guarantee"], "delta": None}},
    ):
        with pytest.raises(jsonschema.ValidationError):
            check({**document, **change})
    del document["disclaimer"]
    with pytest.raises(jsonschema.ValidationError):
        check(document)


def test_a_run_without_examples_fits_too(run):
    log, examples = run
    bare = summary_of(
        log,
        examples,
        evidence={"examples": None, "non_dp": None, "checks": ()},
        fidelity={},
    )
    document = bare.to_json()
    check(document)
    assert document["loss"] is None
    assert document["groups"] == document["attacks"] == document["fidelity"] == []
    assert any("examples.parquet is absent" in text for text in document["missing"])
