"""A log as an account reads it, and what its epsilons mean. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from indpriv import _checks
from indpriv._arrays import FloatArray
from indpriv.accountant.claims import uses_batch_norms
from indpriv.accountant.method import Method
from indpriv.accountant.relations.clipping_norm import clipping_norm_cost
from indpriv.epsilon_table import Account
from indpriv.errors import InputError
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.records import Records

_HISTOGRAM_BYTES = 1 << 26  # of one block of examples: memory does not grow with their number


def block_size(bytes_per_example: int) -> int:
    """The number of examples that are accounted at a time."""
    return max(1, _HISTOGRAM_BYTES // bytes_per_example)


def checked(log: NormLog, method: Method) -> NormLog:
    """The log as an account reads it: rounded as the preset needs it, with the norms that it uses.

    Raises:
        InputError: units of several rows, which only `indpriv.account` takes together, or a log
            that does not fit the preset.

    Warns:
        PrivacyWarning: delta is at least 1 / n_examples, or rows share units with unit="example".
    """
    log = as_read(log, method.preset)
    check_coins(log)
    _check_units(log)
    warn_of_delta(log, method)
    return with_norms_it_uses(log, method)


def with_norms_it_uses(log: NormLog, method: Method) -> NormLog:
    """The log without batch norms where its account does not use them."""
    if uses_batch_norms(log, method.between_records):
        return log
    return replace(log, batch_norms=None)


def check_coins(log: NormLog) -> None:
    """InputError if rows share coins, which then amplify nothing."""
    if log.sampler == "by_client":
        raise InputError(
            'sampler="by_client" with secret participation: all rows of a client share one coin, '
            "and the rest of its update tells whether it took part, so coins amplify nothing; pass "
            'participation="known"'
        )


def check_poisson_pairs(log: NormLog, relation: str, what: str) -> None:
    """InputError unless a step is the pair of adding an example to a Poisson sample.

    It is another one if rows share coins, batches were truncated, or an example is replaced.
    """
    check_coins(log)
    if relation == "replace_one":
        raise InputError(
            f"{what} with secret participation is of an added or removed example, and this log is "
            'of neighbouring="replace_one"; pass participation="known"'
        )
    if log.truncation is not None:
        raise InputError(
            f"{what} assumes Poisson sampling, and batches were truncated at "
            f"max_batch_size={log.truncation.max_batch_size}; indpriv.account allows for that"
        )


def owners_of(log: NormLog) -> NDArray[np.generic] | None:
    """(n_examples,) the unit of each row; None if each row is accounted for itself."""
    return None if log.unit == "example" else log.unit_ids


def warn_of_delta(log: NormLog, method: Method) -> None:
    """Warn with PrivacyWarning if delta is at least 1/n, of n examples or units."""
    owners = owners_of(log)
    n = log.n_examples if owners is None else len(pd.unique(owners))
    if method.delta * n >= 1:
        _checks.warn_caller(
            f"delta={method.delta:g} is at least 1/n = {1 / n:g}: it would allow publishing a "
            f"random {log.unit} in full; pass a delta well below 1/n"
        )


def account_of(log: NormLog, method: Method) -> Account:
    """What an epsilon of one row of this log by this method means."""
    return Account(
        delta=method.delta,
        unit=log.unit,
        neighbouring=method.relation_of(log.neighbouring),
        sampler=log.sampler,
        participation=method.participation,
        accountant=method.accountant,
        conversion=method.conversion,
        between_records=method.between_records,
        rounding=0.0 if log.levels is None else log.levels.rounding,
        rounding_mode="none" if log.levels is None else log.levels.rounding_mode,
        total_steps=log.total_steps,
        recorded_share=log.coverage,
        tolerance=method.tolerance if method.accountant == "pld" else 0.0,
        max_batch_size=None if log.truncation is None else log.truncation.max_batch_size,
        clipping_norm_epsilon=clipping_norm_cost(log, method.relation_of(log.neighbouring), 1),
    )


def _check_units(log: NormLog) -> None:
    """Refuse units of several rows; warn if rows of unit="example" share units."""
    if log.unit_ids is None:
        return
    n_units = len(pd.unique(log.unit_ids))
    if n_units == log.n_examples:
        return
    if log.unit == "example":
        _checks.warn_caller(
            f'unit="example", but the {log.n_examples} rows belong to {n_units} units (unit_ids): '
            "each epsilon is of one row, and that of a person with several rows is larger; declare "
            'unit="user" for the epsilon of people'
        )
        return
    raise InputError(
        f'unit="{log.unit}" has {n_units} units for {log.n_examples} rows: only indpriv.account '
        f'takes several rows of one {log.unit} together; account for rows with unit="example"'
    )


@dataclass(frozen=True)
class _Encoded:
    """Rows without rounding, read as codes."""

    records: Records
    levels: Levels
    max_grad_norm: FloatArray

    def read(self, rows: NDArray[np.int64], start: int, stop: int) -> NDArray[np.generic]:
        norms = self.records.read(rows, start, stop).astype(np.float64)
        codes = np.empty(norms.shape, self.levels.dtype)
        for index, row in enumerate(rows):
            codes[index] = self.levels.encode(norms[index], self.max_grad_norm[row])
        return codes


def as_read(log: NormLog, preset: str | None) -> NormLog:
    """The log as an account with this preset reads it.

    InputError where the preset's rounding is not that of the log.
    """
    return log if preset is None else _as_yu2023(log)


def _as_yu2023(log: NormLog) -> NormLog:
    """The log with the paper's rounding."""
    paper = Levels(0.01, "nearest")
    log = replace(log, batch_norms=None)  # the paper has full records only
    if log.levels == paper:
        return log
    if log.levels is not None:
        raise InputError(
            f'preset="yu2023" needs norms rounded to the nearest 0.01, but this log has '
            f'rounding={log.levels.rounding}, rounding_mode="{log.levels.rounding_mode}"; record '
            'with rounding=0.01, rounding_mode="nearest", or with rounding=0'
        )
    max_grad_norm = np.zeros(int(log.rows.max(initial=-1)) + 1)
    max_grad_norm[log.rows] = log.settings.max_grad_norm[log.recorded_steps]
    return replace(log, levels=paper, records=_Encoded(log.records, paper, max_grad_norm))
