from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np
import pytest

from indpriv._plain import Count, Share, Via, from_json, json_schema, to_json
from indpriv.errors import InputError


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of something.

    Attributes:
        median: the middle one.
        most: the largest.
    """

    median: float
    most: float = field(metadata={"json": "max"})


@dataclass(frozen=True)
class Deep:
    """Two levels."""

    quantiles: Quantiles = field(metadata={"flatten": True})


@dataclass(frozen=True)
class Row:
    """One row.

    Attributes:
        n, share: how many there are,
            and what part of all that is.
    """

    n: Count
    share: Share | None
    epsilon: Quantiles = field(metadata={"flatten": True})
    loss: Quantiles | None = field(metadata={"flatten": "loss_"})
    deep: Deep = field(metadata={"flatten": {"median": "deep", "max": "deepest"}})
    pairs: tuple[tuple[int, str], ...]
    named: Mapping[str, Quantiles]
    anything: Any
    declared: tuple[str, ...] = field(
        metadata={"via": Via(str, ",".join, lambda text: tuple(text.split(",")))}
    )
    note: str = ""


ROW = Row(
    n=3,
    share=0.5,
    epsilon=Quantiles(1.0, 2.0),
    loss=None,
    deep=Deep(Quantiles(3.0, 4.0)),
    pairs=((1, "a"), (2, "b")),
    named={"x": Quantiles(0.0, 1.0)},
    anything={"free": [1, None]},
    declared=("a", "b"),
)


def test_nested_dataclasses_are_written_flat_and_read_back():
    written = to_json(ROW)
    assert written == {
        "n": 3,
        "share": 0.5,
        "median": 1.0,
        "max": 2.0,
        "loss_median": None,
        "loss_max": None,
        "deep": 3.0,
        "deepest": 4.0,
        "pairs": [[1, "a"], [2, "b"]],
        "named": {"x": {"median": 0.0, "max": 1.0}},
        "anything": {"free": [1, None]},
        "declared": "a,b",
        "note": "",
    }
    assert from_json(Row, written) == ROW
    del written["note"]
    assert from_json(Row, written) == ROW


def test_the_schema_fits_what_is_written():
    schema = json_schema(Row)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(to_json(ROW), schema)
    assert schema["description"] == "One row."
    assert schema["properties"]["n"] == {
        "description": "How many there are, and what part of all that is.",
        "type": "integer",
        "minimum": 0,
    }
    assert schema["properties"]["loss_max"]["type"] == ["number", "null"]
    assert schema["properties"]["max"] == {"description": "The largest.", "type": "number"}
    assert "note" not in schema["required"]
    for change in ({"share": 2}, {"n": -1}, {"other": 1}, {"declared": []}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**to_json(ROW), **change}, schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": "3"}, "audit.json: n='3' is not a int; make the audit again"),
        ({"n": True}, "n=True is not a int"),
        ({"pairs": [[1]]}, r"pairs\[0\] has 1 values, not 2"),
        (
            {"named": {"x": {"median": 1.0}}},
            r"audit.json lacks named\.x\.max; make the audit again",
        ),
        ({"median": None}, "median=None is not a"),
    ],
)
def test_what_is_of_another_kind_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_json(Row, {**to_json(ROW), **change})
    lacking = {key: value for key, value in to_json(ROW).items() if key != "median"}
    with pytest.raises(InputError, match=r"audit\.json lacks median"):
        from_json(Row, lacking)


def test_nothing_infinite_is_written():
    assert to_json({"a": np.float64(1.5)}) == {"a": 1.5}
    for value in (float("nan"), float("inf"), np.float64("nan")):
        with pytest.raises(InputError, match="cannot be written as JSON"):
            to_json({"a": [value]})
