"""Which assumptions an account with known participation makes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from indpriv.norm_log.evidence import (
    BATCH_FOR_EVERY_STEP,
    BATCH_SIZES,
    INDIVIDUAL_CLIPPING,
    NORM_PASS,
    NORM_PRECISION,
    NORMS_IN_TRAINING,
    NOT_CHECKED,
    PARTICIPATION,
    PRIVACY_FILTER,
    SAMPLER,
    Check,
)

# Assumptions of accounts with secret participation alone: those of Poisson sampling.
OF_SECRECY = frozenset(check.key for check in (SAMPLER, BATCH_SIZES, PARTICIPATION))
# Assumptions of accounts that use full records or clip levels, which those with known participation
# do not read.
OF_FULL_RECORDS = frozenset(
    check.key
    for check in (
        NORM_PASS,
        NORM_PRECISION,
        NORMS_IN_TRAINING,
        INDIVIDUAL_CLIPPING,
        PRIVACY_FILTER,
    )
)
# Of batches that were chosen in a way that no recorder knows.
ANY_CHOICE = BATCH_FOR_EVERY_STEP.not_checked(
    "nothing shows that whatever chose the examples of a batch looks at no data"
)


def if_known(checks: Iterable[Check]) -> tuple[Check, ...]:
    """Checks of a run as an account with known participation reads them."""
    detail = "not assumed, since who took part counts as known"
    return tuple(
        replace(check, status=NOT_CHECKED, detail=detail) if check.key in OF_SECRECY else check
        for check in checks
    )
