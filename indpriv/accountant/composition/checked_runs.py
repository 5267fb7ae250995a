"""Which logs can be composed, under which relation, and how each of them is accounted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from indpriv._arrays import FloatArray, IntArray
from indpriv.accountant.account import checked
from indpriv.accountant.clipping_norm import clipping_norm_cost
from indpriv.accountant.method import Method, check_poisson_pairs, warn_of_delta
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog


def methods_of(
    runs: Sequence[NormLog], method: Method, participation: str | Sequence[str]
) -> list[Method]:
    """How each run is accounted, all under one relation.

    A run with secret Poisson sampling has one account under add/remove and zero-out, so zero-out
    is the relation of all runs where one of them needs it.

    Args:
        runs: two or more logs.
        method: of the composition; its relation, if it has one, is that of all runs.
        participation: of all runs, or one for each.

    Raises:
        InputError: fewer than two runs, another number of participations, or runs that differ in
            unit or relation.
    """
    if len(runs) < 2:
        raise InputError(f"{len(runs)} runs; pass two or more to compose")
    each = [participation] * len(runs) if isinstance(participation, str) else list(participation)
    if len(each) != len(runs):
        raise InputError(
            f"{len(each)} participations for {len(runs)} runs; pass one of all runs, or one for "
            "each"
        )
    _check_same("unit", [log.unit for log in runs])
    methods = [replace(method, participation=one) for one in each]
    relations = [one.relation_of(log.neighbouring) for one, log in zip(methods, runs, strict=True)]
    if "known" in each and set(relations) == {"add_remove", "zero_out"}:
        relations = ["zero_out"] * len(runs)
    _check_same("neighbouring", relations)
    return [replace(one, neighbouring=relations[0]) for one in methods]


def checked_logs(runs: Sequence[NormLog], methods: Sequence[Method], by: str) -> list[NormLog]:
    """The logs as they are accounted; InputError where they cannot be composed."""
    found = []
    for number, (log, method) in enumerate(zip(runs, methods, strict=True), start=1):
        if by == "unit_id" and log.unit_ids is None:
            raise InputError(
                f"run {number} has no unit ids; record it with unit_ids, or compose by example_id"
            )
        log = replace(log, neighbouring=method.relation_of(log.neighbouring))
        if method.participation == "secret":
            check_poisson_pairs(log, log.neighbouring, "a composition of runs")
        if method.participation == "known" or by == "unit_id":
            warn_of_delta(log, method)
            secret = method.participation == "secret"
            found.append(replace(log, batch_norms=None) if secret else log)
        else:
            found.append(checked(log, method))
    return found


def clipping_norm_costs(
    logs: Sequence[NormLog], methods: Sequence[Method], n_rows: IntArray
) -> FloatArray:
    """(n_runs, n) what private clipping norms cost people with n_rows[i, j] rows in run i."""
    every = [
        clipping_norm_cost(log, method.relation_of(log.neighbouring), rows.astype(np.float64))
        for log, method, rows in zip(logs, methods, n_rows, strict=True)
    ]
    return np.stack(every)


def _check_same(name: str, found: Sequence[str]) -> None:
    if len(set(found)) > 1:
        raise InputError(
            f"the runs differ in {name}: {', '.join(map(repr, found))}; only runs that protect the "
            "same can be composed"
        )
