"""The page of `python -m audits subsets`. Sensitive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from audits.advice.records import MOST_DATA, RISES, UNKNOWN, RecordsNeeded
from audits.advice.subsets import LINE_GOES_ON, AdviceOnRecords, GroupOnRecords
from indpriv._formatting import FORMATS, format_epsilon
from indpriv.analysis.groups import MIN_GROUP
from indpriv.report.page import Page
from indpriv.report.report import advice_page


def records_page(found: AdviceOnRecords) -> Page:
    """The page of an advice that rests on runs on subsets."""
    page = advice_page(found, Path(__file__).with_name("records"))
    percent = FORMATS["percent"]
    shares = sorted({one.share for one in found.groups[0].records.readings})
    values = {
        "line_goes_on": LINE_GOES_ON,
        "on_shares": {f"On {percent(share)}": partial(_mean_on, share) for share in shares},
        "runs": list(_runs(found)),
        "needed": lambda needed: _needed(needed, lambda x: f"{math.ceil(x * found.groups[0].n):,}"),
        "times": lambda needed: _needed(needed, lambda factor: f"{factor:.2f}"),
    }
    return replace(page, values={**page.values, **values})


def _mean_on(share: float, group: GroupOnRecords) -> str:
    """The mean figure of a group over the runs on one share of the data."""
    on_share = [one for one in group.records.readings if one.share == share]
    values = [one.quantile for one in on_share if one.quantile is not None]
    mean = format_epsilon(sum(values) / len(values)) if values else "–"
    return mean + " (too few)" * any(one.n < MIN_GROUP for one in on_share)


def _runs(found: AdviceOnRecords) -> Iterator[dict[str, Any]]:
    """The figure of each group in every run."""
    for group in found.groups:
        for one in group.records.readings:
            yield {"group": group, **vars(one)}


def _needed(needed: RecordsNeeded, form: Callable[[float], str]) -> str:
    """A number of records with its interval, or why there is none."""
    beyond = f"> {form(MOST_DATA)}"
    if needed.status == UNKNOWN:
        return "unknown"
    if needed.status == RISES:
        return "does not fall"
    text = beyond if needed.factor is None else form(needed.factor)
    if needed.factor_high == 1:
        return "as now"
    ends = [beyond if end is None else form(end) for end in (needed.factor_low, needed.factor_high)]
    return text if ends == [text] * 2 else f"{text} [{ends[0]}, {ends[1]}]"
