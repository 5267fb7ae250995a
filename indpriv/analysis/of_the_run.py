"""Findings about a run as a whole, about its norms, and about how exact its account is."""

from collections import Counter
from typing import Any

import numpy as np

from indpriv._facts import Fact
from indpriv.accountant.method import Method
from indpriv.analysis.attacks.membership import BY_GROUP
from indpriv.analysis.audited_run import AuditedRun
from indpriv.analysis.disclosures import disclosures
from indpriv.analysis.distribution import Distribution, UnitSizes, describe, unit_sizes
from indpriv.analysis.exactness import Exactness, exactness_of
from indpriv.analysis.fidelity import (
    BatchNormFidelity,
    Fidelity,
    Sensitivity,
    Spacing,
    free_fidelity,
)
from indpriv.analysis.hazards import hazards
from indpriv.analysis.loss import LossRelation, relate_to_loss
from indpriv.analysis.norms_over_training import Drivers, describe_drivers
from indpriv.analysis.run_facts import RunFacts, run_facts
from indpriv.analysis.schedule import ScheduleFindings, schedule_of
from indpriv.analysis.summary import Finding
from indpriv.analysis.variants import (
    MOST_COMPARED,
    compared_groups,
    effect_of_spacing,
    fidelity_against_k,
    sensitivity,
)
from indpriv.epsilon_table import Epsilons, EpsilonTable


def _run(run: AuditedRun) -> dict[str, Any]:
    recorded = run.recorded
    return {"run": run_facts(run.log, recorded.examples, recorded.recorder, recorded.declared)}


def _loss(run: AuditedRun) -> dict[str, Any]:
    return {} if run.train is None else {"loss": relate_to_loss(run.epsilons, run.train)}


def _schedule(run: AuditedRun) -> dict[str, Any]:
    return {"schedule": schedule_of(run.log, run.epsilons.account.delta, run.recorded.curve)}


def _exactness(run: AuditedRun) -> dict[str, Any]:
    attacked = (run.recorded.attacked(run.seed), run.recorded.attacked_others(run.seed))
    members, others = (None if found is None else len(found) for found in attacked)
    audit = run.audit
    tried = audit.sensitivity or audit.spacing or audit.fidelity
    some = len(run.epsilons) > MOST_COMPARED and run.epsilons.account.rows_per_unit is None
    compared = MOST_COMPARED if tried and some else None
    return {"exactness": exactness_of(len(run.epsilons), audit.loss, members, others, compared)}


def _other_accounts(run: AuditedRun) -> Method | None:
    """How to account for the run in other ways; None if nothing is assumed between records."""
    known = run.method is not None and run.method.participation == "known"
    return None if known else run.method


def _fidelity(run: AuditedRun) -> dict[str, Any]:
    if (method := _other_accounts(run)) is None:
        return {}
    log, epsilons, groups = run.log, run.epsilons, compared_groups(run)
    against_k = fidelity_against_k(log, method, epsilons, run.tell, groups)
    spacing = None if against_k else effect_of_spacing(log, method, epsilons, run.tell)
    return {"fidelity": against_k, "spacing": spacing}


def _batch_norms(run: AuditedRun) -> dict[str, Any]:
    method, one_row = _other_accounts(run), run.epsilons.account.rows_per_unit is None
    return {} if method is None or not one_row else {"batch_norms": free_fidelity(run.log, method)}


def _sensitivity(run: AuditedRun) -> dict[str, Any]:
    if (method := _other_accounts(run)) is None:
        return {}
    return {"sensitivity": sensitivity(run.log, method, run.epsilons, run.tell)}


def _disclosures(run: AuditedRun) -> dict[str, Any]:
    audit, brackets = run.audit, _brackets(run.epsilons)
    basis = (audit.run, audit.account, audit.guarantee, audit.checks)
    return {"disclosures": disclosures(*basis, audit.versions, brackets)}


def _brackets(epsilons: Epsilons) -> Counter[str]:
    """How many examples have which kind of bracket; empty where there are no kinds."""
    if isinstance(epsilons, EpsilonTable):
        return Counter(epsilons.details.get("bracket", np.array([])).tolist())
    found: Counter[str] = Counter()
    if "bracket" in epsilons.details:
        for frame in epsilons.frames(["bracket"]):
            found.update(frame["bracket"].tolist())
    return found


def _hazards(run: AuditedRun) -> dict[str, Any]:
    audit = run.audit
    tried = audit.attacks["attack"].eq(BY_GROUP) & bool(audit.roc)
    caveats = audit.attacks.loc[tried, "caveat"].unique()
    basis = (audit.run, audit.account, audit.guarantee, audit.checks)
    return {"hazards": hazards(*basis, caveats=caveats)}


FINDINGS = (
    Finding("run", 70, _run, run=(RunFacts, "What was run.")),
    Finding(
        "distribution",
        10,
        lambda run: {"individual": describe(run.epsilons)},
        individual=(Distribution, "Distribution of individual epsilon."),
    ),
    Finding(
        "units",
        15,
        lambda run: {"unit_sizes": unit_sizes(run.log, run.epsilons)},
        unit_sizes=(
            tuple[UnitSizes, ...],
            "Units by their number of rows, and what a cap on it would cost; empty where each has "
            "one row.",
        ),
    ),
    Finding(
        "norms",
        75,
        lambda run: {"drivers": describe_drivers(run.log, run.epsilons, run.rows)},
        drivers=(Drivers, "Norms over training by class, and the examples at both ends."),
    ),
    Finding(
        "schedule",
        72,
        _schedule,
        schedule=(ScheduleFindings | None, "Noise, clipping and accuracy over training."),
    ),
    Finding(
        "loss",
        20,
        _loss,
        loss=(LossRelation | None, "Epsilon and loss; null without an example table."),
    ),
    Finding(
        "fidelity",
        80,
        _fidelity,
        fidelity=(
            tuple[Fidelity, ...],
            "What larger K would have given, where exact values exist.",
        ),
        spacing=(
            Spacing | None,
            "How far the estimate still moves with the spacing of records, where no exact values "
            "exist.",
        ),
    ),
    Finding(
        "batch_norms",
        82,
        _batch_norms,
        batch_norms=(
            BatchNormFidelity | None,
            "What batch norms prove about the estimate; null where the account uses none.",
        ),
    ),
    Finding(
        "sensitivity",
        84,
        _sensitivity,
        sensitivity=(
            tuple[Sensitivity, ...],
            "How far epsilons move with the rounding of norms and with what is assumed between "
            "records.",
        ),
    ),
    Finding(
        "exactness",
        86,
        _exactness,
        exactness=(
            Exactness | None,
            "How exact the figures are; null if each comes from every example by itself.",
        ),
    ),
    Finding(
        "disclosures",
        88,
        _disclosures,
        disclosures=(tuple[Fact, ...], "Facts of the run, each with how it is known."),
    ),
    Finding(
        "hazards",
        90,
        _hazards,
        hazards=(tuple[Fact, ...], "How this account can be wrong or misread."),
    ),
)
