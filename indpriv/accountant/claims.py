"""What an account may be called, and why.

"exact": never too small for this trajectory. "estimate": anything else.
"""

from __future__ import annotations

from indpriv.norm_log.norm_log import NormLog

EXACT = "exact"
ESTIMATE = "estimate"


def claim_of(log: NormLog, between_records: str) -> tuple[str, str]:
    """The claim of an account of this log, and its reason in plain sentences.

    An exact account needs norms that are rounded up or not at all, Poisson sampling, no caveat from
    recording, and every step either recorded, counted at max_grad_norm, or individually clipped at
    its last recorded level.

    Args:
        log: the log.
        between_records: "last", "closest" or "worst_case".

    Returns:
        (claim, reason); the reason of an estimate names all that makes it one.
    """
    doubts = []
    if log.levels is not None and log.levels.rounding_mode != "up":
        doubts.append(_rounded_to(log.levels.rounding_mode))
    if log.sampler not in ("poisson", "truncated_poisson"):
        which = "another" if log.sampler == "other" else f"a {log.sampler}"
        doubts.append(
            f"batches were drawn by {which} sampler, and the analysis assumes Poisson sampling"
        )
    doubts.extend(log.caveats)
    by_batch = uses_batch_norms(log, between_records)
    covered = None if by_batch else _coverage(log, between_records)
    if covered is None:
        share = f"{log.n_records - log.n_unreadable} of {log.total_steps} steps"
        which = f"{between_records} record"
        if by_batch:
            which += " or batch norm of the example"
        doubts.append(
            f"only {share} were recorded in full, and the norms in between are taken from the "
            f"{which}"
        )
    unreadable = []
    if log.n_unreadable:
        unreadable.append(
            f"{log.n_unreadable} of the {log.n_records} records cannot be read: the steps that "
            "they govern count at max_grad_norm"
        )
    if doubts:
        return ESTIMATE, _sentences(doubts + unreadable)
    rounding = "not rounded" if log.levels is None else "rounded up"
    return EXACT, _sentences([f"{covered}, and norms are {rounding}", *unreadable])


def claim_if_known(log: NormLog) -> tuple[str, str]:
    """The claim of an account of this log with known participation, and its reason.

    It reads batch norms only. It is exact if they are rounded up or not at all, if who takes part
    is drawn without looking at data, and if nothing that was recorded speaks against that.
    """
    doubts = []
    if log.levels is not None and log.levels.rounding_mode != "up":
        doubts.append(_rounded_to(log.levels.rounding_mode))
    if log.sampler == "other":
        doubts.append(
            "batches were drawn by another sampler, and nothing shows that it looks at no data"
        )
    doubts.extend(log.known_caveats)
    known = 0 if log.batch_norms is None else len(log.batch_norms.steps)
    if known == log.total_steps:
        covered = "the norms of every batch were recorded as it was trained on, dropout included"
    elif known:
        covered = (
            f"the norms of {known:,} of {log.total_steps:,} batches were recorded, and every "
            "example counts at max_grad_norm in the others"
        )
    else:
        covered = (
            "no norms of batches were recorded, so that every example counts at max_grad_norm in "
            "as many steps as it can have taken part in"
        )
    if doubts:
        return ESTIMATE, _sentences(doubts)
    rounding = "not rounded" if log.levels is None else "rounded up"
    return EXACT, _sentences([f"{covered}, and norms are {rounding}" if known else covered])


def claim_of_worst_case(log: NormLog) -> tuple[str, str]:
    """The claim of an account that reads no norms, and its reason.

    Caveats that concern the sampler or full records do not matter to it.
    """
    if log.known_caveats:
        return ESTIMATE, _sentences(list(log.known_caveats))
    return EXACT, _sentences(
        [
            "every example has the worst case, at max_grad_norm in every step: with fixed-size "
            "batches and replaced examples, no smaller epsilon of one example is proven"
        ]
    )


def _rounded_to(mode: str) -> str:
    return f"norms were rounded to the {mode} level, which can under-report"


def uses_batch_norms(log: NormLog, between_records: str) -> bool:
    """Whether an account of this log uses its batch norms.

    It does not if steps without a full record count at max_grad_norm, or if training clipped each
    example at its last full record: such an account is exact without them.
    """
    some = log.batch_norms is not None and log.n_records < log.total_steps
    return some and between_records in ("last", "closest") and not log.individually_clipped


def _coverage(log: NormLog, between_records: str) -> str | None:
    """Why the norm of no step is too small, or None."""
    if log.n_records == 0:
        return "nothing was recorded, so that every step counts at max_grad_norm"
    unrecorded_start = int(log.recorded_steps[0])
    if log.n_records == log.total_steps - unrecorded_start:
        before = (
            ""
            if unrecorded_start == 0
            else f" from step {unrecorded_start} on, earlier ones count at max_grad_norm"
        )
        recorded = (
            "every step was recorded"
            if not log.n_unreadable
            else "every step has a record, readable or not"
        )
        return recorded + before
    if between_records == "worst_case":
        return "steps without a record count at max_grad_norm"
    if log.individually_clipped and between_records == "last":
        return "training clipped each example at its last recorded level"
    return None


def _sentences(reasons: list[str]) -> str:
    """Each reason as a sentence of its own."""
    ends = (reason.strip().rstrip(".") for reason in reasons)
    return " ".join(f"{reason[:1].upper()}{reason[1:]}." for reason in ends)
