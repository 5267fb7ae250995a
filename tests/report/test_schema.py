import json
from pathlib import Path

import jsonschema
import pytest

import indpriv.report
from indpriv.analysis.summary import to_plain
from indpriv.epsilon_table import DISCLAIMER
from indpriv.errors import InputError
from summaries import summary_of

SCHEMA = json.loads(
    (Path(indpriv.report.__file__).parent / "audit.schema.json").read_text(encoding="utf-8")
)


def check(document):
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    jsonschema.validate(document, SCHEMA, cls=jsonschema.Draft202012Validator)


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
        log, examples, evidence={"examples": None, "non_dp": None, "checks": ()}, fidelity=[]
    )
    document = bare.to_json()
    check(document)
    assert document["loss"] is None
    assert document["groups"] == document["attacks"] == document["fidelity"] == []
    assert any("examples.parquet is absent" in text for text in document["missing"])


def test_nothing_infinite_is_written():
    for value in (float("nan"), float("inf")):
        with pytest.raises(InputError, match="has no place in a report"):
            to_plain({"a": [value]})
