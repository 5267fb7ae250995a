"""What was run, what a reader needs to judge its guarantee, and how its account can be wrong.

Texts of facts, and which of them are private, stand in indpriv/_facts: disclosures.toml and
hazards.toml.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from indpriv import _facts
from indpriv._columns import Ids, Rows, frames_of, to_floats
from indpriv._facts import Fact, fact, text
from indpriv._files import first_at
from indpriv._formatting import capitalised, format_cost, sentence
from indpriv._plain import shown
from indpriv._types import FloatArray
from indpriv.analysis.attacks.membership import BY_GROUP
from indpriv.analysis.guarantee import divisor_of
from indpriv.analysis.recorded_run import AuditedRun, Declared
from indpriv.analysis.summary import Audit, Finding, record
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.fields import CONTRIBUTIONS, RecordingPolicy
from indpriv.norm_log.norm_log import NormLog

_HASHED_AT_ONCE = 1 << 17  # ids, whose texts take ten times their memory


class _Range:
    @classmethod
    def of(cls: Any, values: FloatArray) -> "Range":
        """The range of a value at each step."""
        return cls(float(values.min()), float(values.max()))

    def __str__(self: Any) -> str:
        least, most = shown(self, "min"), shown(self, "max")
        return least if self.min == self.max else f"{least} to {most}"


Range: Any = record("range", _Range)


RunFacts: Any = record("run_facts")


def run_facts(
    log: NormLog, examples: ExampleTable | None, recorder: Mapping[str, Any], declared: Declared
) -> RunFacts:
    """Collect what is known about a run; see `RunFacts`."""
    settings, levels, references = log.settings, log.levels, log.reference_positions
    train, test = (
        None if examples is None else examples.rows(split) for split in ("train", "test")
    )
    return RunFacts(
        n_examples=log.n_examples,
        n_test_examples=0 if test is None else len(test),
        n_units=None if log.unit_ids is None else len(np.unique(log.unit_ids)),
        train_accuracy=_accuracy(train),
        test_accuracy=_accuracy(test),
        total_steps=log.total_steps,
        expected_epochs=float(settings.sample_rate.sum()),
        noise_multiplier=Range.of(settings.noise_multiplier),
        max_grad_norm=Range.of(settings.max_grad_norm),
        sample_rate=Range.of(settings.sample_rate),
        individually_clipped=log.individually_clipped,
        n_records=log.n_records,
        recorded_share=log.coverage,
        n_exact_examples=0 if references is None else len(references),
        rounding=levels.rounding,
        rounding_mode=levels.rounding_mode,
        example_ids_sha256=_fingerprint(log.example_ids),
        caveats=log.caveats,
        recorder=recorder,
        declared=declared,
    )


def _fingerprint(ids: Ids) -> str:
    """Hex SHA-256 of the ids as texts with a null between them."""
    found = hashlib.sha256()
    for start in range(0, len(ids), _HASHED_AT_ONCE):
        texts = "\0".join(map(str, ids[start : start + _HASHED_AT_ONCE].tolist()))
        found.update(("\0" * (start > 0) + texts).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _accuracy(rows: Rows | None) -> float | None:
    """The share of correct examples among those where that is known."""
    n, total = 0, 0.0
    for frame in [] if rows is None else frames_of(rows, ["correct"]):
        correct = to_floats(frame["correct"])
        known = correct[~np.isnan(correct)]
        n, total = n + len(known), total + float(known.sum())
    return total / n if n else None


def status_of(checks: Sequence[Fact], *keys: str) -> str:
    """Failed if a check failed, verified if those that are not optional passed, else declared."""
    found = {(check.key, check.status) for check in checks if check.key in keys}
    states = {status for _, status in found}
    if _facts.FAILED in states:
        return _facts.FAILED
    passed = {key for key in keys if CHECKS[key].optional} | {key for key, _ in found}
    return _facts.VERIFIED if states == {_facts.PASSED} and passed >= set(keys) else _facts.DECLARED


def word_of(lines: Sequence[Fact], *keys: str) -> str:
    """The weakest word of these lines of evidence; unknown where there are none."""
    words = {line.status for line in lines if line.key in keys}
    if _facts.REFUTED in words:
        return _facts.FAILED
    return next(
        (word for word in (_facts.ON_TRUST, _facts.DECLARED, _facts.VERIFIED) if word in words),
        _facts.UNKNOWN,
    )


def disclosures(audit: Audit) -> tuple[Fact, ...]:
    """Every fact that a reader needs to judge the guarantee, in the order of the report."""
    decided = (*_guaranteed(audit), *_training(audit), *_provenance(audit))
    values = _values(audit)
    return tuple(fact(f"disclosure.{key}", status, case, **values) for key, status, case in decided)


_Decided = Iterator[tuple[str, str, str]]  # key, status, and the case of its text or ""


def _guaranteed(audit: Audit) -> _Decided:
    """What is protected, and what is released."""
    run, account, guarantee = audit.run, audit.account, audit.guarantee
    declared, given = run.declared, bool(run.recorder.get("converted"))
    chosen = given or declared.neighbouring or account.neighbouring == "replace_one"
    yield "unit", _facts.DECLARED if given or account.unit != "example" else _facts.ASSUMED, ""
    zero_out = "zero_out" if account.neighbouring == "zero_out" else ""
    yield "neighbouring", _facts.DECLARED if chosen else _facts.ASSUMED, zero_out
    released = _facts.DECLARED if declared.released else _facts.ASSUMED
    yield "released", released if guarantee.publishable else _facts.FAILED, ""
    yield "trust_model", _facts.DECLARED if declared.trust_model else _facts.ASSUMED, ""
    yield "delta", _facts.DECLARED, ""
    yield "delta_times_n", _facts.FAILED if guarantee.delta_times_n >= 1 else _facts.VERIFIED, ""
    yield "tuning", _facts.NOT_COVERED, "declared" if declared.tuning else ""
    yield "n_examples", _facts.VERIFIED, "" if run.n_units is None else "units"
    if (account.rows_per_unit or 1) > 1:  # public if a cap was set before training
        yield "rows_per_unit", _facts.VERIFIED, "capped" if _cap(run) else "uncapped"


def _training(audit: Audit) -> _Decided:
    run, account, checks, lines = audit.run, audit.account, audit.checks, audit.guarantee.lines
    recorder = run.recorder
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
    if clipping == _facts.VERIFIED:
        clipping = word_of(lines, "contribution", "settings")
    yield "max_grad_norm", clipping, "released" if recorder.get("clipping_norm_epsilon") else ""
    if run.individually_clipped:
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
    yield "accountant", _facts.VERIFIED, "" if account.conversion == "none" else "conversion"
    case = "partial" if run.recorded_share < 1 else "all"
    if account.participation == "known":
        case = "known"
    yield "source_of_norms", status_of(checks, "records", "norm_pass", "norm_precision"), case
    yield "recording", _read_from(run, "policy"), ""


def _provenance(audit: Audit) -> _Decided:
    run, declared, checks = audit.run, audit.run.declared, audit.checks
    yield "audit_versions", _facts.VERIFIED, ""
    versions = run.recorder.get("versions")
    yield "training_versions", _facts.VERIFIED if versions else _facts.UNKNOWN, ""
    yield "code_commit", _facts.DECLARED if declared.code_commit else _facts.UNKNOWN, ""
    data = "and_data" if declared.data_fingerprint else ""
    yield "data_fingerprint", status_of(checks, "records"), data
    yield "preprocessing", _facts.DECLARED if declared.preprocessing else _facts.UNKNOWN, ""
    yield "private_here", _facts.DECLARED, "" if audit.guarantee.publishable else "withheld"


def _values(audit: Audit) -> dict[str, object]:
    """What texts of disclosures name."""
    run, account, guarantee = audit.run, audit.account, audit.guarantee
    recorder, clipping = run.recorder, str(run.recorder.get("clipping") or "")
    return {
        "run": run,
        "account": account,
        "guarantee": guarantee,
        "accountant": account.accountant.upper(),
        "audit_versions": _pairs(audit.versions),
        "batch": round((recorder.get("expected_batch_size") or 0) * _ranks(run)),
        "cap": _cap(run),
        "clipping": clipping,
        "contributions": CONTRIBUTIONS.get(clipping, ""),
        "longer": 1 + (recorder.get("clip_excess") or 0.0),
        "norms": text(
            "disclosure.source_of_norms", "rounded" if run.rounding else "not_rounded", records=run
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
    return _facts.UNKNOWN if run.recorder.get(name) is None else _facts.VERIFIED


def _pairs(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


# --- how an account can be wrong or misread


def hazards(audit: Audit, caveats: Iterable[str]) -> tuple[Fact, ...]:
    """How this account can be wrong or misread; caveats are those of the attacks that were run.

    What the lines of evidence say is not said again; run.json may declare more.
    """
    run, account, guarantee = audit.run, audit.account, audit.guarantee
    rows, in_lines = account.rows_per_unit or 1, run.declared.of_lines
    found = [fact("hazard.norms", status_of(audit.checks, "norm_pass", "norm_precision"))]
    if account.participation == "known":
        found.append(fact("hazard.participation", word_of(guarantee.lines, "batch")))
    found += [
        Fact(key, _facts.ASSUMPTION, capitalised(item), _facts.DECLARED, sentence(words))
        for item, words in run.declared.on_trust.items()
        if in_lines.get(key := item.lower().replace(" ", "_")) != words
    ]
    divisor = divisor_of(run.n_examples, run.total_steps, run.recorder, rows=rows)
    if divisor is not None:
        same_n = "same_n" if account.neighbouring != "add_remove" else ""
        status = _facts.FAILED if divisor.tells_n and not same_n else _facts.VERIFIED
        found.append(fact("hazard.divisor", status, same_n, found=divisor.describe()))
    promise, said = "guarantee" if guarantee.publishable else "withheld", " ".join(caveats)
    cases = {"individual_epsilon": promise, "disclosure": ""} | ({"attack": ""} if said else {})
    cases |= {"beside_updates": ""} if run.recorder.get("rounds") else {}
    cases |= {"other_uses": "", "access": ""}
    values: dict[str, Any] = {"guarantee": guarantee, "caveats": said}
    beyond = (
        fact(f"hazard.{key}", _facts.NOT_COVERED, case, **values) for key, case in cases.items()
    )
    return (*found, *beyond)


# --- findings


def _run(run: AuditedRun) -> dict[str, Any]:
    recorded = run.recorded
    return {"run": run_facts(run.log, recorded.examples, recorded.recorder, recorded.declared)}


def _hazards(run: AuditedRun) -> dict[str, Any]:
    attacks, roc = run.audit.attacks, run.audit.roc
    caveats = attacks.loc[attacks["attack"].eq(BY_GROUP) & bool(roc), "caveat"].unique()
    return {"hazards": hazards(run.audit, caveats)}


FINDINGS = (
    Finding("run", _run),
    Finding("disclosures", lambda run: {"disclosures": disclosures(run.audit)}),
    Finding("hazards", _hazards),
)
