"""Kinds of columns: the type of a value, its limits, its unit, how it is shown; and `Public`.

A column is private, since it is computed from the data, unless it or what holds it is `Public`.
"""

from typing import Annotated, Any, TypeVar

from pydantic import Field

T = TypeVar("T")


def figure(form: str, unit: str = "1", **limits: Any) -> Any:
    """A kind of numbers: the format of `formatted` that shows it, its unit and its limits."""
    return Field(json_schema_extra={"unit": unit, "shown": form}, **limits)


Public = Annotated[T, Field(json_schema_extra={"private": False})]
Epsilon = Annotated[float, figure("eps", "nats", ge=0)]
LowerBound = Annotated[float, figure("least", "nats", ge=0)]
Shift = Annotated[float, figure("+.3f", "nats")]  # of epsilons
Error = Annotated[float, figure(".3f", "nats", ge=0)]  # of epsilons
Delta = Annotated[float, figure("delta", "probability", ge=0)]
PValue = Annotated[float, figure("p", "probability", ge=0, le=1)]
Share = Annotated[float, figure("share1", ge=0, le=1)]
RoundShare = Annotated[float, figure("share", ge=0, le=1)]
Ceiling = Annotated[float, figure("up", ge=0, le=1)]  # of a share
Loss = Annotated[float, figure("num", "nats")]
Number = Annotated[float, figure("num")]
AtLeastZero = Annotated[float, figure("num", ge=0)]
Correlation = Annotated[float, figure(".4f")]
Rounded = Annotated[float, figure(".2f")]
Percent = Annotated[float, figure("percent", ge=0)]
BinError = Annotated[float, figure("digit_up", ge=0)]
Points = Annotated[float, figure("points")]  # a difference of shares
OfRate = Annotated[float, figure("each")]
Count = Annotated[int, figure(",", ge=0)]
Seed = Annotated[int, figure("text")]
