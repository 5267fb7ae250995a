"""What a reader must be told: what was verified, what was declared, what is unknown, and how the account can be wrong.

After NIST SP 800-226 (2025), "How to DP-fy ML" (Ponomareva et al. 2023, section 5.3.3) and the OpenDP deployments
registry. The texts here hold no individual value.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from indpriv._files import first_at
from indpriv._formatting import (
    format_cost,
    format_delta,
    format_epsilon,
    format_number,
    format_share,
)
from indpriv.analysis.summary import Disclosure, Guarantee, Hazard, Range, RunFacts
from indpriv.epsilon_table import Account
from indpriv.norm_log.evidence import (
    BATCH_FOR_EVERY_STEP,
    BATCH_SIZES,
    CLOSED,
    FAILED,
    INDIVIDUAL_CLIPPING,
    NORM_PASS,
    NORM_PRECISION,
    OPACUS_ACCOUNTANT,
    PARTICIPATION,
    PASSED,
    RECORDS,
    SAMPLER,
    Assumption,
    Check,
)
from indpriv.norm_log.recording_policy import RecordingPolicy

VERIFIED, DECLARED, UNKNOWN, NOT_COVERED = "verified", "declared", "unknown", "not covered"


def status_of(checks: Sequence[Check], *assumptions: Assumption) -> str:
    """Verified if all checks of these assumptions passed, failed if one failed, else declared."""
    keys = {assumption.key for assumption in assumptions}
    states = {check.status for check in checks if check.key in keys}
    if FAILED in states:
        return FAILED
    return VERIFIED if states == {PASSED} else DECLARED


def disclosures(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Check],
    versions: Mapping[str, str],
    brackets: Mapping[str, int] | None = None,
) -> tuple[Disclosure, ...]:
    """Every item that a reader needs to judge the guarantee, in the order of the report.

    Args:
        run: what was run.
        account: what its epsilons mean.
        guarantee: its worst case, and whether the evidence supports it.
        checks: evidence held against the assumptions.
        versions: of this audit.
        brackets: how many examples the tight accountant bracketed in which way; None for another accountant.
    """
    return (
        *_what(run, account, guarantee),
        *_how(run, account, checks),
        *_brackets(brackets or {}),
        *_provenance(run, guarantee, checks, versions),
    )


def _what(run: RunFacts, account: Account, guarantee: Guarantee) -> list[Disclosure]:
    units = f"; {run.n_units:,} distinct units" if run.n_units is not None else ""
    too_large = guarantee.delta_times_n >= 1
    return [
        Disclosure("unit", "Unit of privacy", f"one {account.one_unit}", DECLARED),
        Disclosure(
            "neighbouring",
            "Neighbouring relation",
            f"{account.neighbouring.replace('_', '/')} one {account.one_unit}",
            DECLARED,
        ),
        _released(run, guarantee),
        Disclosure(
            "trust_model",
            "Trust model",
            run.declared.trust_model
            or "assumed central: the curator holds the data and runs the training",
            DECLARED,
            publishable=True,
        ),
        Disclosure("delta", "Delta", format_delta(account.delta), DECLARED),
        Disclosure(
            "delta_times_n",
            "Delta and n",
            f"delta times n is {guarantee.delta_times_n:.2g}"
            + (": too large, a mechanism may expose somebody outright" if too_large else ""),
            FAILED if too_large else VERIFIED,
            private=True,
        ),
        Disclosure(
            "tuning",
            "Tuning runs",
            run.declared.tuning or "only this one run is accounted",
            NOT_COVERED,
            publishable=True,
        ),
        Disclosure(
            "n_examples",
            "Number of examples",
            f"{run.n_examples:,}{units}; under add/remove neighbours this number is itself private",
            VERIFIED,
            private=True,
        ),
        *_rows_per_unit(run, account),
    ]


def _rows_per_unit(run: RunFacts, account: Account) -> list[Disclosure]:
    """The most rows of one unit: public where a cap was set before training, else a fact of the data."""
    if (account.rows_per_unit or 1) == 1:
        return []
    cap = first_at(run.declared.content, ("config", "data", "max_rows_per_unit"))
    most = f"at most {account.rows_per_unit:,}"
    text = (
        f"{most}; a cap of {cap} was set before training"
        if cap
        else f"{most} in this data; no cap was declared"
    )
    return [
        Disclosure("rows_per_unit", f"Rows of one {account.unit}", text, VERIFIED, private=not cap)
    ]


def _released(run: RunFacts, guarantee: Guarantee) -> Disclosure:
    """What whoever trained declares as released, unless no guarantee covers it."""
    why = _withheld(guarantee)
    if why:
        return Disclosure(
            "released",
            "What is released",
            f"nothing may be published under a guarantee: {why}",
            FAILED,
            publishable=True,
        )
    assumed = "assumed: every model state of this run, checkpoints and final model"
    return Disclosure(
        "released", "What is released", run.declared.released or assumed, DECLARED, publishable=True
    )


def _withheld(guarantee: Guarantee) -> str:
    """Why nothing may be published under the guarantee; "" where it may."""
    if guarantee.publishable:
        return ""
    return {
        "void": "the run was seeded (reproducible: no privacy)",
        "unproven": "a check of its assumptions failed",
    }.get(guarantee.status, "delta is at least 1/n")


def _how(run: RunFacts, account: Account, checks: Sequence[Check]) -> list[Disclosure]:
    observed = run.recorder.get("sampler_class")
    settings = status_of(checks, OPACUS_ACCOUNTANT)
    return [
        Disclosure(
            "sampler",
            "Sampler",
            account.sampler + (f"; observed: {observed}" if observed else "; not observed"),
            status_of(checks, SAMPLER, BATCH_SIZES, PARTICIPATION),
            publishable=True,
        ),
        Disclosure(
            "steps",
            "Steps",
            f"{run.settings.total_steps:,}, about {format_number(run.settings.expected_epochs)} epochs"
            + (f", each taken by {_ranks(run)} ranks together" if _ranks(run) > 1 else ""),
            status_of(checks, BATCH_FOR_EVERY_STEP, CLOSED),
            publishable=True,
        ),
        Disclosure(
            "sample_rate",
            "sample_rate",
            format_range(run.settings.sample_rate),
            settings,
            publishable=True,
        ),
        Disclosure(
            "noise_multiplier",
            "noise_multiplier",
            format_range(run.settings.noise_multiplier),
            settings,
            publishable=True,
        ),
        Disclosure(
            "max_grad_norm",
            "max_grad_norm",
            format_range(run.settings.max_grad_norm),
            DECLARED
            if run.recorder.get("replayed") or run.recorder.get("converted")
            else _read_from(run, "clipping"),
            publishable=True,
        ),
        Disclosure(
            "clip_mode", "Clip mode", _clip_mode(run), _clip_status(run, checks), publishable=True
        ),
        Disclosure(
            "normalisation",
            "Normalisation of the gradient",
            _normalisation(run),
            _read_from(run, "loss_reduction"),
            private=True,
        ),
        Disclosure(
            "accountant",
            "Accountant",
            f"{account.accountant.upper()}, conversion {account.conversion}",
            VERIFIED,
            publishable=True,
        ),
        Disclosure(
            "source_of_norms",
            "Source of norms",
            _norm_source(run, account),
            status_of(checks, RECORDS, NORM_PASS, NORM_PRECISION),
        ),
        Disclosure("recording", "Recording", recording(run), _read_from(run, "policy")),
        Disclosure(
            "random_generator",
            "Random generator",
            _generator(run),
            _read_from(run, "secure_mode"),
            publishable=True,
        ),
    ]


def _brackets(brackets: Mapping[str, int]) -> list[Disclosure]:
    """Of the tight accountant: proven ends, ends on which two quadratures agree, and Renyi above with 0 below."""
    if not brackets:
        return []
    found = ", ".join(f"{count:,} {name}" for name, count in sorted(brackets.items()))
    return [
        Disclosure(
            "brackets",
            "Brackets of individual epsilon",
            f"{found}; fallback is the Rényi bound",
            VERIFIED,
            private=True,
        )
    ]


def _normalisation(run: RunFacts) -> str:
    reduction, batch = run.recorder.get("loss_reduction"), run.recorder.get("expected_batch_size")
    if reduction == "mean" and batch is not None:
        return f"sum of clipped gradients and noise over the expected batch size, {round(batch * _ranks(run))}"
    return "sum of clipped gradients and noise, not divided" if reduction == "sum" else ""


def _ranks(run: RunFacts) -> int:
    """Processes that trained together; Opacus's expected batch size is that of one."""
    return int(run.recorder.get("ranks", 1))


def _norm_source(run: RunFacts, account: Account) -> str:
    norms = (
        f"rounded {run.records.rounding_mode} to {run.records.rounding:g} of max_grad_norm"
        if run.records.rounding
        else "in full precision"
    )
    between = (
        ""
        if run.records.recorded_share == 1
        else f"; between records: {account.between_records.replace('_', ' ')}"
    )
    share = format_share(run.records.recorded_share)
    return f"{run.records.n_records:,} of {run.settings.total_steps:,} steps recorded ({share}), {norms}{between}"


def _clip_mode(run: RunFacts) -> str:
    if run.settings.individually_clipped:
        headroom = run.recorder.get("clip_headroom") or 0.0
        above = f" ({headroom:g} of max_grad_norm above its norm)" if headroom else ""
        return (
            f"individual: each example at its last recorded level{above}, noise for max_grad_norm"
        )
    return _text(run.recorder, "clipping") or ""


def _clip_status(run: RunFacts, checks: Sequence[Check]) -> str:
    return (
        status_of(checks, INDIVIDUAL_CLIPPING)
        if run.settings.individually_clipped
        else _read_from(run, "clipping")
    )


def recording(run: RunFacts) -> str:
    """When norms were taken and what that cost, in one line; "" where the log does not say."""
    policy, seconds = run.recorder.get("policy"), run.recorder.get("pass_seconds")
    if not policy or seconds is None:
        return ""
    return f"{RecordingPolicy.from_header({'policy': policy}).describe()}; {format_cost(seconds, run.recorder.get('training_seconds'))}"


def _generator(run: RunFacts) -> str:
    secure = run.recorder.get("secure_mode")
    if secure is None:
        return ""
    return "cryptographically secure (secure_mode)" if secure else "not cryptographically secure"


def _read_from(run: RunFacts, name: str) -> str:
    """The recorder reads this from the optimizer itself; a log made elsewhere may not say."""
    return UNKNOWN if run.recorder.get(name) is None else VERIFIED


def _provenance(
    run: RunFacts, guarantee: Guarantee, checks: Sequence[Check], versions: Mapping[str, str]
) -> list[Disclosure]:
    training = run.recorder.get("versions", {})
    return [
        Disclosure("audit_versions", "Versions of this audit", _pairs(versions), VERIFIED),
        Disclosure(
            "training_versions",
            "Versions in training",
            _pairs(training),
            VERIFIED if training else UNKNOWN,
            publishable=True,
        ),
        Disclosure(
            "code_commit",
            "Code commit",
            run.declared.code_commit or "",
            _said(run.declared.code_commit),
            publishable=True,
        ),
        Disclosure(
            "data_fingerprint",
            "Fingerprint of the data",
            f"SHA-256 of the example ids in order: {run.example_ids_sha256}"
            + (
                f"; declared for the data: {run.declared.data_fingerprint}"
                if run.declared.data_fingerprint
                else ""
            ),
            status_of(checks, RECORDS),
            private=True,
        ),
        Disclosure(
            "preprocessing",
            "Preprocessing",
            run.declared.preprocessing or "",
            _said(run.declared.preprocessing),
            publishable=True,
        ),
        Disclosure(
            "private_here",
            "Private in this document",
            "every individual epsilon, quantile, group mean, group size, loss and attack result, and every row marked "
            "so here; "
            + (
                "only the worst case and the other settings may be published"
                if guarantee.publishable
                else f"nothing may be published under a guarantee: {_withheld(guarantee)}"
            ),
            DECLARED,
        ),
    ]


def hazards(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Check],
    *,
    caveats: Iterable[str],
) -> tuple[Hazard, ...]:
    """How this account can be wrong or misread: assumptions, misreadings, and what is not counted."""
    found = [*_assumptions(run, account, checks), *_readings(guarantee)]
    if text := " ".join(caveats):
        found.append(
            Hazard(
                "attack",
                "reading",
                "attack",
                "A failed attack is taken for safety",
                NOT_COVERED,
                text,
            )
        )
    return (*found, *_SCOPE)


def _assumptions(run: RunFacts, account: Account, checks: Sequence[Check]) -> list[Hazard]:
    seeded, secure = run.recorder.get("seeded"), run.recorder.get("secure_mode")
    table = [
        (
            "sampler",
            "Batches are Poisson-sampled",
            status_of(checks, SAMPLER, BATCH_FOR_EVERY_STEP, BATCH_SIZES, PARTICIPATION),
            "Shuffled or weighted batches break the amplification by sampling that the account relies on.",
        ),
        (
            "norms",
            "The norm pass takes the norms that training clips",
            status_of(checks, NORM_PASS, NORM_PRECISION),
            "Reduced precision or non-determinism can make a recorded norm smaller than the one that was clipped.",
        ),
        (
            "seeds",
            "Noise and sampling come from no known seed",
            UNKNOWN if seeded is None else FAILED if seeded else DECLARED,
            "Anyone with the seed can subtract the noise. The recorder notes what it was told.",
        ),
        (
            "random generator",
            "The random generator cannot be predicted",
            VERIFIED if secure else UNKNOWN if secure is None else NOT_COVERED,
            "The account assumes perfect randomness; Opacus uses a cryptographic generator only with secure_mode=True.",
        ),
        (
            "duplicates",
            "No person stands behind several units",
            UNKNOWN if run.n_units is None else DECLARED,
            "Where rows repeat a person under different ids, that person's epsilon is larger than each row's.",
        ),
        (
            "tuning",
            "The data did not choose the settings",
            NOT_COVERED,
            "Tuning, early stopping and picking the best of several runs or checkpoints spend privacy not counted here.",
        ),
        (
            "preprocessing",
            "Preprocessing was not fitted on the data",
            _said(run.declared.preprocessing),
            "Standardisation, vocabularies or a clipping norm taken from the data are outside the account.",
        ),
    ]
    if account.delta * run.n_examples >= 1:
        text = "At such a delta a mechanism may publish a random record outright and still satisfy the definition."
        table.insert(0, ("delta", "Delta is well below 1/n", FAILED, text))
    told = {_key(item): (item, text) for item, text in run.declared.on_trust.items()}
    found = [
        Hazard(
            _key(short),
            "assumption",
            short,
            hazard,
            DECLARED if status == UNKNOWN and _key(short) in told else status,
            f"{detail} Declared: {_sentence(told[_key(short)][1])}"
            if _key(short) in told
            else detail,
        )
        for short, hazard, status, detail in table
    ]
    known = {hazard.key for hazard in found}
    return found + [
        Hazard(key, "assumption", item, f"{item[:1].upper()}{item[1:]}", DECLARED, _sentence(text))
        for key, (item, text) in told.items()
        if key not in known
    ]


def _readings(guarantee: Guarantee) -> list[Hazard]:
    withheld = _withheld(guarantee)
    worst = f"What everybody is promised is the worst case of {format_epsilon(guarantee.worst_case_epsilon)}."
    return [
        Hazard(
            "individual_epsilon",
            "reading",
            "individual epsilon",
            "An individual epsilon is taken for a guarantee",
            NOT_COVERED,
            "It describes the run that happened. "
            + (f"Nobody is promised anything: {withheld}." if withheld else worst),
        ),
        Hazard(
            "disclosure",
            "reading",
            "disclosure",
            "Individual epsilons or group figures are shared",
            NOT_COVERED,
            "They are computed from the data without noise. Share only a private release of them.",
        ),
    ]


_SCOPE = (
    Hazard(
        "other_uses",
        "scope",
        "other uses",
        "The same data is used elsewhere",
        NOT_COVERED,
        "Other models or statistics from the same data add to everybody's epsilon.",
    ),
    Hazard(
        "access",
        "scope",
        "access",
        "Collection, storage and access",
        NOT_COVERED,
        "Differential privacy of a model says nothing about who can read the data, the logs or this page.",
    ),
)


def format_range(values: Range) -> str:
    """One value, or the smallest and the largest."""
    if values.min == values.max:
        return f"{values.min:.6g}"
    return f"{values.min:.6g} to {values.max:.6g}"


def _key(text: str) -> str:
    return text.lower().replace(" ", "_")


def _said(text: str | None) -> str:
    return DECLARED if text else UNKNOWN


def _text(source: Mapping[str, Any], name: str) -> str | None:
    value = source.get(name)
    return str(value) if value else None


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
