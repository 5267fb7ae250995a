"""Facts that a reader needs to judge a guarantee, each with how it is known.

Their texts, and which of them are private, stand in indpriv/_facts/disclosures.toml.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from indpriv._facts import (
    ASSUMED,
    DECLARED,
    FAILED,
    NOT_COVERED,
    ON_TRUST,
    PASSED,
    REFUTED,
    UNKNOWN,
    VERIFIED,
    Fact,
    fact,
    text,
)
from indpriv._files import first_at
from indpriv._formatting import format_cost
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.run_facts import RunFacts
from indpriv.epsilon_table import Account
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.recording_policy import RecordingPolicy
from indpriv.norm_log.validation import CONTRIBUTIONS


def status_of(checks: Sequence[Fact], *keys: str) -> str:
    """Failed if a check failed, verified if those that are not optional passed, else declared."""
    found = {(check.key, check.status) for check in checks if check.key in keys}
    states = {status for _, status in found}
    if FAILED in states:
        return FAILED
    passed = {key for key in keys if CHECKS[key].optional} | {key for key, _ in found}
    return VERIFIED if states == {PASSED} and passed >= set(keys) else DECLARED


def word_of(lines: Sequence[Fact], *keys: str) -> str:
    """The weakest word of these lines of evidence; unknown where there are none."""
    words = {line.status for line in lines if line.key in keys}
    if REFUTED in words:
        return FAILED
    return next((word for word in (ON_TRUST, DECLARED, VERIFIED) if word in words), UNKNOWN)


def declared_or(otherwise: str, said: str | None) -> str:
    """The status of what run.json may say."""
    return DECLARED if said else otherwise


def disclosures(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Fact],
    versions: Mapping[str, str],
    brackets: Mapping[str, int] | None = None,
) -> tuple[Fact, ...]:
    """Every fact that a reader needs to judge the guarantee, in the order of the report.

    `versions` are those of this audit; `brackets` the number of examples by the way in which the
    PLD accountant bracketed them, None for another accountant.
    """
    values = values_of(run, account, guarantee, versions, brackets or {})
    decided = (
        *_guaranteed(run, account, guarantee),
        *_training(run, account, checks, guarantee.lines),
        *_norms(run, account, checks),
        *([("brackets", VERIFIED, "")] if brackets else []),
        *_provenance(run, guarantee, checks),
    )
    return tuple(fact(f"disclosure.{key}", status, case, **values) for key, status, case in decided)


_Decided = Iterator[tuple[str, str, str]]  # key, status, and the case of its text or ""


def _guaranteed(run: RunFacts, account: Account, guarantee: Guarantee) -> _Decided:
    """What is protected, and what is released."""
    declared, given = run.declared, bool(run.recorder.get("converted"))
    chosen = given or declared.neighbouring or account.neighbouring == "replace_one"
    yield "unit", DECLARED if given or account.unit != "example" else ASSUMED, ""
    zero_out = "zero_out" if account.neighbouring == "zero_out" else ""
    yield "neighbouring", DECLARED if chosen else ASSUMED, zero_out
    released = declared_or(ASSUMED, declared.released)
    yield "released", released if guarantee.publishable else FAILED, ""
    yield "trust_model", declared_or(ASSUMED, declared.trust_model), ""
    yield "delta", DECLARED, ""
    yield "delta_times_n", FAILED if guarantee.delta_times_n >= 1 else VERIFIED, ""
    yield "tuning", NOT_COVERED, "declared" if declared.tuning else ""
    yield "n_examples", VERIFIED, "" if run.n_units is None else "units"
    if (account.rows_per_unit or 1) > 1:  # public if a cap was set before training
        yield "rows_per_unit", VERIFIED, "capped" if _cap(run) else "uncapped"


def _training(
    run: RunFacts, account: Account, checks: Sequence[Fact], lines: Sequence[Fact]
) -> _Decided:
    recorder, individual = run.recorder, run.settings.individually_clipped
    seen = "observed" if recorder.get("sampler_class") else "unobserved"
    if account.participation == "known":
        seen = "observed_known" if seen == "observed" else "unobserved_known"
    yield "sampler", word_of(lines, "batch"), seen
    steps = status_of(checks, "batch_for_every_step", "closed")
    yield "steps", steps, "ranks" if _ranks(run) > 1 else ""
    yield "sample_rate", word_of(lines, "settings"), ""
    excess = "excess" if recorder.get("clip_excess") else ""  # accounts use less noise
    yield "noise_multiplier", word_of(lines, "noise", "settings"), excess
    clipping = _read_from(run, "clipping")
    if clipping == VERIFIED:
        clipping = word_of(lines, "contribution", "settings")
    yield "max_grad_norm", clipping, "released" if recorder.get("clipping_norm_epsilon") else ""
    if individual:
        case = "headroom" if recorder.get("clip_headroom") else "individual"
        yield "clip_mode", status_of(checks, "individual_clipping"), case
    else:
        case = "contributions" if recorder.get("clipping") in CONTRIBUTIONS else ""
        yield "clip_mode", clipping, case
    divided = recorder.get("loss_reduction")
    if divided != "sum" and (divided != "mean" or recorder.get("expected_batch_size") is None):
        divided = "unknown"
    yield "normalisation", _read_from(run, "loss_reduction"), divided
    secure = "secure" if recorder.get("secure_mode") else ""
    yield "random_generator", word_of(lines, "source"), secure
    yield "accountant", VERIFIED, "" if account.conversion == "none" else "conversion"


def _norms(run: RunFacts, account: Account, checks: Sequence[Fact]) -> _Decided:
    """Where the recorded norms come from."""
    case = "partial" if run.records.recorded_share < 1 else "all"
    if account.participation == "known":
        case = "known"
    yield "source_of_norms", status_of(checks, "records", "norm_pass", "norm_precision"), case
    yield "recording", _read_from(run, "policy"), ""


def _provenance(run: RunFacts, guarantee: Guarantee, checks: Sequence[Fact]) -> _Decided:
    declared = run.declared
    yield "audit_versions", VERIFIED, ""
    yield "training_versions", VERIFIED if run.recorder.get("versions") else UNKNOWN, ""
    yield "code_commit", declared_or(UNKNOWN, declared.code_commit), ""
    data = "and_data" if declared.data_fingerprint else ""
    yield "data_fingerprint", status_of(checks, "records"), data
    yield "preprocessing", declared_or(UNKNOWN, declared.preprocessing), ""
    yield "private_here", DECLARED, "" if guarantee.publishable else "withheld"


def values_of(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    versions: Mapping[str, str],
    brackets: Mapping[str, int],
) -> dict[str, object]:
    """What texts of disclosures name."""
    recorder = run.recorder
    clipping = str(recorder.get("clipping") or "")
    return {
        "run": run,
        "account": account,
        "guarantee": guarantee,
        "accountant": account.accountant.upper(),
        "audit_versions": _pairs(versions),
        "batch": round((recorder.get("expected_batch_size") or 0) * _ranks(run)),
        "brackets": ", ".join(f"{count:,} {name}" for name, count in sorted(brackets.items())),
        "cap": _cap(run),
        "clipping": clipping,
        "contributions": CONTRIBUTIONS.get(clipping, ""),
        "longer": 1 + (recorder.get("clip_excess") or 0.0),
        "norms": text(
            "disclosure.source_of_norms",
            "rounded" if run.records.rounding else "not_rounded",
            records=run.records,
        ),
        "ranks": _ranks(run),
        "recording": recording(run),
        "source": "; ".join(line.detail for line in guarantee.lines if line.key == "source"),
        "training_versions": _pairs(recorder.get("versions") or {}),
    }


def _ranks(run: RunFacts) -> int:
    """Number of processes that trained; Opacus counts the batch of one of them."""
    return int(run.recorder.get("ranks", 1))


def _cap(run: RunFacts) -> Any:
    """The largest number of rows of a unit that was declared before training, if any."""
    return first_at(run.declared.content, ("config", "data", "max_rows_per_unit"))


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


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
