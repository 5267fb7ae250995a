"""Kinds of values in an audit file."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

KNOWN_KEYS_ONLY = ConfigDict(extra="forbid")

Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
AtLeastZero = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1)]
Name = Annotated[
    str,
    Field(
        strict=True,
        pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$",
        description="a name of at most 64 letters, digits, - and _",
    ),
]
Epochs = Annotated[
    str,
    Field(
        strict=True,
        pattern="^([2-9]|[1-9][0-9]{1,5}) epochs$",
        description="a number of epochs such as '2 epochs'",
    ),
]
Condition = Annotated[
    str,
    Field(
        strict=True,
        pattern="^[A-Za-z0-9][A-Za-z0-9_-]{0,63}=.+$",
        description="a column and a value, such as 'race=Black'",
    ),
]
