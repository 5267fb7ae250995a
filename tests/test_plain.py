from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import jsonschema
import numpy as np
import pandas as pd
import pytest
from audit_schema import fields_schema

from indpriv._plain import Columns, Count, Share, from_json, to_json
from indpriv._types import OneOf
from indpriv.errors import InputError


@dataclass(frozen=True)
class Quantiles:
    """Quantiles of something.

    Attributes:
        median: the middle one.
        max: the largest.
    """

    median: float
    max: float


@dataclass(frozen=True)
class Row(Quantiles):
    """One row.

    Attributes:
        n, share: how many there are,
            and what part of all that is.
    """

    n: Count
    share: Share | None
    kind: Annotated[str, OneOf("exact", "estimate")]
    pairs: tuple[tuple[int, str], ...]
    named: Mapping[str, Quantiles]
    anything: Any
    note: str = ""


ROW = Row(
    median=1.0,
    max=2.0,
    n=3,
    share=0.5,
    kind="exact",
    pairs=((1, "a"), (2, "b")),
    named={"x": Quantiles(0.0, 1.0)},
    anything={"free": [1, None]},
)


def test_nested_dataclasses_are_written_and_read_back():
    written = to_json(ROW)
    assert written == {
        "median": 1.0,
        "max": 2.0,
        "n": 3,
        "share": 0.5,
        "kind": "exact",
        "pairs": [[1, "a"], [2, "b"]],
        "named": {"x": {"median": 0.0, "max": 1.0}},
        "anything": {"free": [1, None]},
        "note": "",
    }
    assert from_json(Row, written) == ROW
    del written["note"]
    assert from_json(Row, written | {"max": 2, "unknown": 1}) == ROW


def test_the_schema_fits_what_is_written():
    schema = fields_schema({"row": (Row, "A row."), "rows": (tuple[Row, ...], "Rows.")})
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate({"row": to_json(ROW), "rows": [to_json(ROW)]}, schema)
    assert schema["required"] == ["row", "rows"]
    row = schema["$defs"]["Row"]
    assert row["description"] == "One row."
    assert row["properties"]["n"] == {
        "description": "How many there are, and what part of all that is.",
        "type": "integer",
        "minimum": 0,
        "unit": "1",
        "shown": ",",
    }
    assert row["properties"]["max"] == {"description": "The largest.", "type": "number"}
    assert row["properties"]["kind"]["enum"] == ["exact", "estimate"]
    assert "note" not in row["required"]
    for change in ({"share": 2}, {"n": -1}, {"other": 1}, {"kind": "known"}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"row": {**to_json(ROW), **change}, "rows": []}, schema)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": "3"}, "audit.json: n='3' is not right: it should be a valid integer"),
        ({"n": True}, "n=True is not right"),
        ({"n": 3.0}, "n=3.0 is not right"),
        ({"n": -1}, "n=-1 is not .* it should be greater than or equal to 0; make the audit again"),
        ({"share": True}, "share=True is not"),
        ({"share": float("nan")}, "share=nan is not .* a finite number"),
        ({"kind": "known"}, "kind='known' is not .* 'exact' or 'estimate'"),
        ({"note": 3}, "note=3 is not .* instance of text"),
        ({"pairs": [[1]]}, r"pairs\.0\.1"),
        ({"pairs": "ab"}, "pairs='ab' is not .* valid tuple"),
        (
            {"named": {"x": {"median": 1.0}}},
            r"audit.json lacks named\.x\.max; make the audit again",
        ),
        ({"named": {"x": 3}}, r"named\.x=3 is not .* JSON object"),
        ({"median": None}, "median=None is not"),
    ],
)
def test_what_is_of_another_kind_is_refused(change, message):
    with pytest.raises(InputError, match=message):
        from_json(Row, {**to_json(ROW), **change})
    lacking = {key: value for key, value in to_json(ROW).items() if key != "median"}
    with pytest.raises(InputError, match=r"audit\.json lacks median"):
        from_json(Row, lacking)
    with pytest.raises(InputError, match=r"the content=\[\] is not .* JSON object"):
        from_json(Row, [])


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
    schema = fields_schema({"people": (Annotated[pd.DataFrame, PEOPLE], "All.")})
    jsonschema.validate(content, schema, cls=jsonschema.Draft202012Validator)
    assert schema["$defs"]["Person"]["description"] == "One person."
    assert schema["$defs"]["Person"]["properties"]["tall"] == {
        "description": "Whether tall.",
        "type": "boolean",
    }
    assert "range" not in schema["$defs"]["Person"]["required"]
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
        ({"n": "2"}, r"people\.1\.n='2' is not right"),
        ({"n": -1}, r"people\.1\.n=-1 is not right"),
        ({"n": None}, r"people\.1\.n=None is not right"),
        ({"share": 1.5}, r"people\.1\.share=1.5 is not right"),
        ({"tall": 1}, r"people\.1\.tall=1 is not right"),
        ({"least": 0.5}, r"people\.1\.least=0.5 is not right"),
        ({"sizes": None}, r"people\.1\.sizes=None is not right"),
        ({"n": 2**63}, "people=.*9223372036854775808.*whole numbers should have 64 bits"),
        ({"least": 10**30}, "people=.*1000000.*whole numbers should have 64 bits"),
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
    with pytest.raises(InputError, match=r"lacks people\.1\.share; make the audit again"):
        from_json(Table, content)
    for other, said in (({"people": 3}, "people=3"), ({"people": [3]}, r"people\.0=3")):
        with pytest.raises(InputError, match=said):
            from_json(Table, other)
    with pytest.raises(InputError, match="inf cannot be written"):
        to_json(people().assign(share=np.inf))
