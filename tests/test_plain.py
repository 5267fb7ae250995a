from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

import jsonschema
import numpy as np
import pandas as pd
import pytest

from indpriv._plain import Columns, Count, Share, Via, from_json, json_schema, to_json
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


PEOPLE = Columns(
    "Person",
    "One person.",
    {
        "name": (str, "Of the person."),
        "n": (Count, "Number of rows."),
        "share": (Share | None, "Of all rows."),
        "least": (Count | None, "Fewest rows."),
        "tall": (bool, "Whether tall."),
        "sizes": (tuple[str, ...], "Of clothes."),
        "range": (Quantiles | None, "Of epsilon."),
    },
    optional=["range"],
)


@dataclass(frozen=True)
class Table:
    """A table."""

    people: Annotated[pd.DataFrame, PEOPLE]


def people():
    values = {"name": ["a", "\udcff"], "n": [2.0, 0], "share": [0.5, np.nan], "least": [3, None]}
    return PEOPLE.frame(values | {"tall": [True, False], "sizes": [(), ("s",)]}, 2)


def test_a_frame_is_a_list_of_rows():
    content = to_json(Table(people()))
    first, second = content["people"]
    assert list(first) == list(PEOPLE.kinds)
    assert first == {
        **{"name": "a", "n": 2, "share": 0.5, "least": 3, "tall": True, "sizes": [], "range": None}
    }
    assert (second["name"], second["share"], second["least"]) == ("\udcff", None, None)
    assert {type(second[name]) for name in ("n", "tall")} == {int, bool}
    jsonschema.validate(content, json_schema(Table), cls=jsonschema.Draft202012Validator)
    first["range"] = {"median": 1.0, "max": 2.0}
    read = from_json(Table, content).people
    assert read["range"].tolist() == [Quantiles(1.0, 2.0), None]
    assert read.drop(columns="range").equals(people().drop(columns="range"))
    assert read.dtypes.drop("range").equals(people().dtypes.drop("range"))
    del first["range"], second["range"]
    assert from_json(Table, content).people["range"].tolist() == [None, None]
    assert from_json(Table, {"people": []}).people.dtypes.equals(people().dtypes)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"n": "2"}, r"people\[1\].n='2' is not a int"),
        ({"n": -1}, r"people\[1\].n=-1 is out of range"),
        ({"n": None}, r"people\[1\].n=None is not a int"),
        ({"share": 1.5}, r"people\[1\].share=1.5 is out of range"),
        ({"tall": 1}, r"people\[1\].tall=1 is not a bool"),
        ({"least": 0.5}, r"people\[1\].least=0.5 is not a int"),
        ({"sizes": None}, r"people\[1\].sizes=None is not a"),
    ],
)
def test_a_frame_with_another_kind_of_value_is_refused(change, said):
    content = to_json(Table(people()))
    content["people"][1] |= change
    with pytest.raises(InputError, match=said):
        from_json(Table, content)


def test_a_frame_that_lacks_something_is_refused():
    content = to_json(Table(people()))
    del content["people"][1]["share"]
    with pytest.raises(InputError, match=r"lacks people\[1\].share; make the audit again"):
        from_json(Table, content)
    for other, said in (({"people": 3}, "people=3"), ({"people": [3]}, r"people\[0\]=3")):
        with pytest.raises(InputError, match=said):
            from_json(Table, other)
    with pytest.raises(InputError, match="inf cannot be written"):
        to_json(people().assign(share=np.inf))
