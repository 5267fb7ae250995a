"""Facts that a reader needs to judge a guarantee, each with how it is known: see `Disclosure`.

After NIST SP 800-226 (2025), "How to DP-fy ML" (Ponomareva et al. 2023, section 5.3.3) and the
OpenDP deployments registry. The texts here hold no individual value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from indpriv._files import first_at
from indpriv._formatting import format_cost, format_delta, format_number, format_share
from indpriv._plain import Limits
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.run_facts import RunFacts
from indpriv.epsilon_table import Account
from indpriv.norm_log.evidence import (
    BATCH_FOR_EVERY_STEP,
    CLOSED,
    FAILED,
    INDIVIDUAL_CLIPPING,
    NORM_PASS,
    NORM_PRECISION,
    PASSED,
    RECORDS,
    Assumption,
    Check,
)
from indpriv.norm_log.lines import ON_TRUST, REFUTED, Line
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.validation import CONTRIBUTIONS

VERIFIED, DECLARED, UNKNOWN, NOT_COVERED = "verified", "declared", "unknown", "not covered"
ASSUMED = "assumed"  # nobody stated it, so this tool's default stands
# How a statement is known.
_STATUSES = (VERIFIED, DECLARED, ASSUMED, ON_TRUST, UNKNOWN, NOT_COVERED, FAILED)
Knowledge = Annotated[str, Limits(texts=_STATUSES)]

# Keys of the settings and declarations that a model card shows. None of them says anything about
# the data.
_PUBLISHED = (
    "released trust_model tuning sampler steps sample_rate noise_multiplier max_grad_norm "
    "clip_mode accountant random_generator preprocessing training_versions code_commit"
)


@dataclass(frozen=True)
class Disclosure:
    """One fact that a reader needs to judge the guarantee.

    Attributes:
        key: identifies it in code and files; never shown.
        title, value: as shown.
        status: "verified", "declared", "assumed", "on trust", "unknown", "not covered" or
            "failed".
        private: the value says something about the data, so it must not be published.
        publishable: the value may appear on a model card, if the run's guarantee may be published.
    """

    key: str
    title: str = field(metadata={"json": "item"})
    value: str
    status: Knowledge
    private: bool = False
    publishable: bool = False


def status_of(checks: Sequence[Check], *assumptions: Assumption) -> str:
    """Failed if a check failed, verified if those that are not optional passed, else declared."""
    keys = {assumption.key for assumption in assumptions}
    found = {(check.key, check.status) for check in checks if check.key in keys}
    states = {status for _, status in found}
    if FAILED in states:
        return FAILED
    passed = {each.key for each in assumptions if each.optional} | {key for key, _ in found}
    return VERIFIED if states == {PASSED} and passed >= keys else DECLARED


def word_of(lines: Sequence[Line], *keys: str) -> str:
    """The weakest word of these lines of evidence; unknown where there are none."""
    words = {line.word for line in lines if line.key in keys}
    if REFUTED in words:
        return FAILED
    return next((word for word in (ON_TRUST, DECLARED, VERIFIED) if word in words), UNKNOWN)


def declared_or_unknown(text: str | None) -> str:
    """The status of what run.json may say."""
    return DECLARED if text else UNKNOWN


def disclosures(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Check],
    versions: Mapping[str, str],
    brackets: Mapping[str, int] | None = None,
) -> tuple[Disclosure, ...]:
    """Every fact that a reader needs to judge the guarantee, in the order of the report.

    `versions` are those of this audit; `brackets` the number of examples by the way in which the
    PLD accountant bracketed them, None for another accountant.
    """
    found = (
        *_guaranteed(run, account, guarantee),
        *_training(run, account, checks, guarantee.lines),
        *_norms(run, account, checks, brackets or {}),
        *_provenance(run, guarantee, checks, versions),
    )
    return tuple(replace(item, publishable=item.key in _PUBLISHED.split()) for item in found)


def _guaranteed(run: RunFacts, account: Account, guarantee: Guarantee) -> list[Disclosure]:
    """What is protected, and what is released."""
    units = f"; {run.n_units:,} distinct units" if run.n_units is not None else ""
    too_large = guarantee.delta_times_n >= 1
    times_n = f"delta times n is {guarantee.delta_times_n:.2g}" + (
        ": too large, since a mechanism may expose someone outright" if too_large else ""
    )
    n = f"{run.n_examples:,}{units}; under add/remove neighbours this number is itself private"
    tuning = run.declared.tuning or "only this one run is accounted"
    declared, relation = run.declared, account.relation
    if account.neighbouring == "zero_out":
        relation += ": it counts as 0, and the number of examples and the batches stay"
    given = bool(run.recorder.get("converted"))
    chosen = given or declared.neighbouring or account.neighbouring == "replace_one"
    unit = DECLARED if given or account.unit != "example" else ASSUMED
    central = "central: the curator holds the data and runs the training"
    found = [
        Disclosure("unit", "Unit of privacy", f"one {account.one_unit}", unit),
        _stated("neighbouring", "Neighbouring relation", relation if chosen else None, relation),
        _released(run, guarantee),
        _stated("trust_model", "Trust model", declared.trust_model, central),
        Disclosure("delta", "Delta", format_delta(account.delta), DECLARED),
        Disclosure(
            "delta_times_n", "Delta and n", times_n, FAILED if too_large else VERIFIED, private=True
        ),
        Disclosure("tuning", "Tuning runs", tuning, NOT_COVERED),
        Disclosure("n_examples", "Number of examples", n, VERIFIED, private=True),
    ]
    if (account.rows_per_unit or 1) > 1:
        found.append(_rows_per_unit(run, account))
    return found


def _rows_per_unit(run: RunFacts, account: Account) -> Disclosure:
    """The largest number of rows of a unit: public if a cap was set before training."""
    cap = first_at(run.declared.content, ("config", "data", "max_rows_per_unit"))
    most = f"at most {account.rows_per_unit:,}"
    text = (
        f"{most}; a cap of {cap} was set before training"
        if cap
        else f"{most} in this data; no cap was declared"
    )
    title = f"Rows of one {account.unit}"
    return Disclosure("rows_per_unit", title, text, VERIFIED, private=not cap)


def _released(run: RunFacts, guarantee: Guarantee) -> Disclosure:
    """What is declared as released, unless no guarantee covers it."""
    key, title = "released", "What is released"
    if not guarantee.publishable:
        text = f"nothing may be published under a guarantee: {guarantee.withheld}"
        return Disclosure(key, title, text, FAILED)
    every = "every model state of this run, checkpoints and final model"
    return _stated(key, title, run.declared.released, every)


def _stated(key: str, title: str, declared: str | None, default: str) -> Disclosure:
    """What was declared, else what this tool assumes."""
    return Disclosure(key, title, declared or default, DECLARED if declared else ASSUMED)


def _training(
    run: RunFacts, account: Account, checks: Sequence[Check], lines: Sequence[Line]
) -> list[Disclosure]:
    observed = run.recorder.get("sampler_class")
    sampler = account.sampler + (f"; observed: {observed}" if observed else "; not observed")
    if account.participation == "known":
        sampler += "; who took part in which step counts as known to the attacker"
    steps = (
        f"{run.settings.total_steps:,}, about {format_number(run.settings.expected_epochs)} epochs"
    )
    if _ranks(run) > 1:
        steps += f", each taken by {_ranks(run)} ranks together"
    clipping = _read_from(run, "clipping")
    if clipping == VERIFIED:
        clipping = word_of(lines, "contribution", "settings")
    return [
        Disclosure("sampler", "Sampler", sampler, word_of(lines, "batch")),
        Disclosure("steps", "Steps", steps, status_of(checks, BATCH_FOR_EVERY_STEP, CLOSED)),
        Disclosure(
            "sample_rate", "sample_rate", str(run.settings.sample_rate), word_of(lines, "settings")
        ),
        Disclosure(
            "noise_multiplier", "noise_multiplier", _noise(run), word_of(lines, "noise", "settings")
        ),
        Disclosure("max_grad_norm", "max_grad_norm", _clipping_norm(run), clipping),
        _clip_mode(run, checks, clipping),
        Disclosure(
            "normalisation",
            "Normalisation of the gradient",
            _normalisation(run),
            _read_from(run, "loss_reduction"),
            private=True,
        ),
        Disclosure(
            "random_generator",
            "Random generator",
            "; ".join(
                ["cryptographically secure (secure_mode)"] * bool(run.recorder.get("secure_mode"))
                + [line.detail for line in lines if line.key == "source"]
            ),
            word_of(lines, "source"),
        ),
        Disclosure(
            "accountant",
            "Accountant",
            account.method
            if account.conversion == "none"
            else f"{account.accountant.upper()}, conversion {account.conversion}",
            VERIFIED,
        ),
    ]


def _noise(run: RunFacts) -> str:
    """The noise multiplier that accounts use, which is smaller where clipping is not exact."""
    counted, excess = str(run.settings.noise_multiplier), run.recorder.get("clip_excess")
    if not excess:
        return counted
    return f"{counted}: the optimizer's over {1 + excess:.6g}, since clipped gradients are longer"


def _clipping_norm(run: RunFacts) -> str:
    """The clipping norm, and that it is a private release if it is one."""
    cost = run.recorder.get("clipping_norm_epsilon") or 0.0
    released = f": a private release of these data, of epsilon {cost:g} for a row"
    return f"{run.settings.max_grad_norm}{released if cost else ''}"


def _clip_mode(run: RunFacts, checks: Sequence[Check], clipping: str) -> Disclosure:
    key, title = "clip_mode", "Clip mode"
    if not run.settings.individually_clipped:
        text = str(run.recorder.get("clipping") or "")
        if text in CONTRIBUTIONS:
            text = f"{text}; the log holds {CONTRIBUTIONS[text]}"
        return Disclosure(key, title, text, clipping)
    headroom = run.recorder.get("clip_headroom") or 0.0
    above = f" ({headroom:g} of max_grad_norm above its norm)" if headroom else ""
    text = f"individual: each example at its last recorded level{above}, noise for max_grad_norm"
    return Disclosure(key, title, text, status_of(checks, INDIVIDUAL_CLIPPING))


def _normalisation(run: RunFacts) -> str:
    reduction, batch = run.recorder.get("loss_reduction"), run.recorder.get("expected_batch_size")
    if reduction == "mean" and batch is not None:
        return (
            "sum of clipped gradients and noise over the expected batch size, "
            f"{round(batch * _ranks(run))}"
        )
    return "sum of clipped gradients and noise, not divided" if reduction == "sum" else ""


def _ranks(run: RunFacts) -> int:
    """Number of processes that trained; Opacus counts the batch of one of them."""
    return int(run.recorder.get("ranks", 1))


def _norms(
    run: RunFacts, account: Account, checks: Sequence[Check], brackets: Mapping[str, int]
) -> list[Disclosure]:
    """Where the recorded norms come from, and how tightly individual epsilon is bracketed."""
    records, total = run.records, run.settings.total_steps
    norms = (
        f"rounded {records.rounding_mode} to {records.rounding:g} of max_grad_norm"
        if records.rounding
        else "in full precision"
    )
    source = (
        f"{records.n_records:,} of {total:,} steps recorded "
        f"({format_share(records.recorded_share)}), {norms}"
    )
    if account.participation == "known":
        source = f"batches of {format_share(account.recorded_share)} of {total:,} steps, {norms}"
    elif records.recorded_share < 1:
        source += f"; between records: {account.between_records.replace('_', ' ')}"
    status = status_of(checks, RECORDS, NORM_PASS, NORM_PRECISION)
    found = [
        Disclosure("source_of_norms", "Source of norms", source, status),
        Disclosure("recording", "Recording", recording(run), _read_from(run, "policy")),
    ]
    if brackets:
        counts = ", ".join(f"{count:,} {name}" for name, count in sorted(brackets.items()))
        text = f"{counts}; upper: over 1 % wide, its upper end counts; fallback: Rényi's bound"
        title = "Brackets of individual epsilon"
        found.append(Disclosure("brackets", title, text, VERIFIED, private=True))
    return found


def recording(run: RunFacts) -> str:
    """When norms were taken and what that cost, in one line; "" where the log does not say."""
    policy, seconds = run.recorder.get("policy"), run.recorder.get("pass_seconds")
    if not policy or seconds is None:
        return ""
    cost = format_cost(seconds, run.recorder.get("training_seconds"))
    return f"{RecordingPolicy.from_header({'policy': policy}).describe()}; {cost}"


def _read_from(run: RunFacts, name: str) -> str:
    """Verified if the recorder read this from the optimizer; a log made elsewhere may lack it."""
    return UNKNOWN if run.recorder.get(name) is None else VERIFIED


def _provenance(
    run: RunFacts, guarantee: Guarantee, checks: Sequence[Check], versions: Mapping[str, str]
) -> list[Disclosure]:
    training, declared = run.recorder.get("versions", {}), run.declared
    fingerprint = f"SHA-256 of the example ids in order: {run.example_ids_sha256}"
    if declared.data_fingerprint:
        fingerprint += f"; declared for the data: {declared.data_fingerprint}"
    publish = (
        "only the worst case and the other settings may be published"
        if guarantee.publishable
        else f"nothing may be published under a guarantee: {guarantee.withheld}"
    )
    trained_with = VERIFIED if training else UNKNOWN
    commit, preprocessing = declared.code_commit or "", declared.preprocessing or ""
    return [
        Disclosure("audit_versions", "Versions of this audit", _pairs(versions), VERIFIED),
        Disclosure("training_versions", "Versions in training", _pairs(training), trained_with),
        Disclosure("code_commit", "Code commit", commit, declared_or_unknown(commit)),
        Disclosure(
            "data_fingerprint",
            "Fingerprint of the data",
            fingerprint,
            status_of(checks, RECORDS),
            private=True,
        ),
        Disclosure(
            "preprocessing", "Preprocessing", preprocessing, declared_or_unknown(preprocessing)
        ),
        Disclosure(
            "private_here",
            "Private in this document",
            "every individual epsilon, quantile, group mean, group size, loss and attack result, "
            f"and every row marked as private; {publish}",
            DECLARED,
        ),
    ]


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
