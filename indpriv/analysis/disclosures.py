"""What was run, what a reader needs to judge its guarantee, how its account can be wrong.

And what an audit lacks, how exact its figures are, and how it is made again. Texts of facts, and
which of them are private, stand in indpriv/_facts: disclosures.toml and hazards.toml. Sensitive.
"""

import hashlib
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from indpriv import _columns, _facts
from indpriv._facts import Fact, fact, text
from indpriv._files import first_at
from indpriv._formatting import capitalised, format_cost, sentence
from indpriv._plain import shown
from indpriv._types import FloatArray, NDArray
from indpriv.analysis import statistics
from indpriv.analysis.attacks.membership import BY_GROUP
from indpriv.analysis.fidelity import MOST_COMPARED
from indpriv.analysis.guarantee import divisor_of
from indpriv.analysis.recorded_run import AuditedRun
from indpriv.analysis.summary import Audit, Finding, record
from indpriv.norm_log.evidence import CHECKS
from indpriv.norm_log.fields import CONTRIBUTIONS, SETTING_NAMES, RecordingPolicy
from indpriv.norm_log.norm_log import NormLog

_LIBRARIES = ("indpriv", "numpy", "scipy", "pandas", "pyarrow")
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
Exactness: Any = record("exactness")


def _fingerprint(ids: _columns.Ids) -> str:
    """Hex SHA-256 of the ids as texts with a null between them."""
    found = hashlib.sha256()
    for start in range(0, len(ids), _HASHED_AT_ONCE):
        texts = "\0".join(map(str, ids[start : start + _HASHED_AT_ONCE].tolist()))
        found.update(("\0" * (start > 0) + texts).encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _accuracy(rows: _columns.Rows | None) -> float | None:
    """The share of correct examples among those where that is known."""
    n, total = 0, 0.0
    for frame in [] if rows is None else _columns.frames_of(rows, ["correct"]):
        correct = _columns.to_floats(frame["correct"])
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
    values = _values(audit)
    return tuple(
        fact(f"disclosure.{key}", status, case, **values) for key, status, case in _decided(audit)
    )


def _decided(audit: Audit) -> Iterator[tuple[str, str, str]]:
    """The key of each, its status, and the case of its text or "": protection, training, origin."""
    run, account, guarantee, checks = audit.run, audit.account, audit.guarantee, audit.checks
    recorder, declared, lines = run.recorder, run.declared, guarantee.lines
    given = bool(recorder.get("converted"))
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
    yield "audit_versions", _facts.VERIFIED, ""
    versions = recorder.get("versions")
    yield "training_versions", _facts.VERIFIED if versions else _facts.UNKNOWN, ""
    yield "code_commit", _facts.DECLARED if declared.code_commit else _facts.UNKNOWN, ""
    data = "and_data" if declared.data_fingerprint else ""
    yield "data_fingerprint", status_of(checks, "records"), data
    yield "preprocessing", _facts.DECLARED if declared.preprocessing else _facts.UNKNOWN, ""
    yield "private_here", _facts.DECLARED, "" if guarantee.publishable else "withheld"


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


def _hazards(audited: AuditedRun) -> dict[str, Any]:
    """How this account can be wrong or misread, but for what the lines of evidence say."""
    audit = audited.audit
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
    by_group = audit.attacks["attack"].eq(BY_GROUP) & bool(audit.roc)
    said = " ".join(audit.attacks.loc[by_group, "caveat"].unique())
    promise = "guarantee" if guarantee.publishable else "withheld"
    cases = {"individual_epsilon": promise, "disclosure": ""} | ({"attack": ""} if said else {})
    cases |= {"beside_updates": ""} if run.recorder.get("rounds") else {}
    cases |= {"other_uses": "", "access": ""}
    values: dict[str, Any] = {"guarantee": guarantee, "caveats": said}
    beyond = (
        fact(f"hazard.{key}", _facts.NOT_COVERED, case, **values) for key, case in cases.items()
    )
    return {"hazards": (*found, *beyond)}


# --- signs that a person has several rows

# Words in a column's name that suggest it says whose row each is.
_LIKELY = re.compile(
    r"(?!.*_(size|type|count|income|age|status|role)$)"  # which many people share
    r"((^|_)(user|person|people|patient|client|customer|subject|owner|household|participant|speaker|"
    r"author|member)s?(_|$)|(^|_)(uuid|ssn|email|name)$|.+_id$)",
    re.IGNORECASE,
)
_MOST_REPEATED = 1 << 17  # rows with a repeated hash that are compared
_NAMED = 5  # number of groups of repeated rows that are named


def undeclared_people(log: NormLog, train: pd.DataFrame | _columns.Rows) -> list[str]:
    """Signs that a person has several rows, in sentences; fewer where unit_ids are known.

    `train` holds the training examples in the log's order.
    """
    rows = _columns.as_rows(train)
    return [*_likely_columns(log, rows), *_repeated_rows(log, rows)]


def _likely_columns(log: NormLog, rows: _columns.Rows) -> Iterator[str]:
    """Columns whose name says that they say whose row each is, and whose values repeat."""
    named = [
        one
        for one in rows.columns
        if one not in _columns.FIXED_COLUMNS and _LIKELY.search(str(one))
    ]
    for column in named if log.unit_ids is None else ():

        def numbers(column: str = column) -> Iterator[NDArray[np.uint64]]:
            for frame in _columns.frames_of(rows, [column]):
                yield _columns.numbers_of(frame[column].dropna().reset_index(drop=True))

        _, distinct, known = _columns.repeats(numbers, len(rows))
        if 1 < distinct < known:
            yield text("sentence.missing", "owner", column=column, distinct=distinct, known=known)


def _repeated_rows(log: NormLog, rows: _columns.Rows) -> list[str]:
    """Rows that agree in label, loss, metadata and every record, but not in their unit."""
    compared = [name for name in rows.columns if name not in ("example_id", "unit_id")]

    def hashes() -> Iterator[NDArray[np.uint64]]:
        for frame in _columns.frames_of(rows, compared):
            for start in range(0, len(frame), statistics.BLOCK):
                same = frame.iloc[start : start + statistics.BLOCK].apply(_alike)
                yield np.asarray(pd.util.hash_pandas_object(same, index=False), np.uint64)

    positions, *_ = _columns.repeats(hashes, len(rows), _MOST_REPEATED)
    repeated = _columns.rows_at(rows, positions, compared)
    known = repeated["loss"].notna().to_numpy()
    positions, repeated = positions[known], repeated[known]
    if not len(positions):
        return []
    codes, units = log.take(positions).read(), log.unit_ids
    seen: dict[tuple[object, ...], list[int]] = {}
    texts = zip(*(_columns.to_texts(repeated[name]) for name in compared), strict=True)
    for place, (position, values) in enumerate(zip(positions.tolist(), texts, strict=True)):
        seen.setdefault((*values, codes[:, place].tobytes()), []).append(position)
    groups = [
        same
        for same in seen.values()
        if len(same) > 1 and (units is None or len(pd.unique(units[same])) > 1)
    ]
    if not groups:
        return []
    ids = [" = ".join(map(str, log.example_ids[same].tolist())) for same in groups[:_NAMED]]
    named = "; ".join([*ids, *["..."] * (len(groups) > _NAMED)])
    n = f"{sum(map(len, groups)):,}"
    count = n if len(positions) < _MOST_REPEATED else f"At least {n}"
    return [text("sentence.missing", "repeats", count=count, named=named)]


def _alike(column: "pd.Series[Any]") -> NDArray[Any]:
    """The values in one type, whichever missing values other ranges of rows have."""
    numbers = is_numeric_dtype(column) and not is_bool_dtype(column)
    return _columns.to_floats(column) if numbers else _columns.to_texts(column)


# --- findings


def _run(run: AuditedRun) -> dict[str, Any]:
    log, recorded = run.log, run.recorded
    examples, levels, references = recorded.examples, log.levels, log.reference_positions
    train, test = (examples.rows(of) if examples else None for of in ("train", "test"))
    same = ("n_examples", "total_steps", "individually_clipped", "n_records", "caveats")
    found = RunFacts(
        **{name: getattr(log, name) for name in same},
        **{name: Range.of(getattr(log.settings, name)) for name in SETTING_NAMES},
        n_test_examples=0 if test is None else len(test),
        n_units=None if log.unit_ids is None else len(np.unique(log.unit_ids)),
        train_accuracy=_accuracy(train),
        test_accuracy=_accuracy(test),
        expected_epochs=float(log.settings.sample_rate.sum()),
        recorded_share=log.coverage,
        n_exact_examples=0 if references is None else len(references),
        rounding=levels.rounding,
        rounding_mode=levels.rounding_mode,
        example_ids_sha256=_fingerprint(log.example_ids),
        recorder=recorded.recorder,
        declared=recorded.declared,
    )
    return {"run": found}


def _exactness(run: AuditedRun) -> dict[str, Any]:
    attacked = run.recorded.attacked(run.seed)
    members, others = (None if found is None else len(found) for found in attacked)
    n, audit = len(run.epsilons), run.audit
    if n <= statistics.MOST_EXACT and members is None and others is None:
        return {}  # every figure comes from each example
    tried = len(audit.sensitivity) or audit.fidelity
    some = n > MOST_COMPARED and run.epsilons.account.rows_per_unit is None
    found = Exactness(
        most_exact=statistics.MOST_EXACT,
        quantile_error=statistics.BIN_WIDTH,
        related=statistics.MOST_EXACT if audit.loss and n > statistics.MOST_EXACT else None,
        attacked_members=members,
        attacked_nonmembers=others,
        compared=MOST_COMPARED if tried and some else None,
    )
    return {"exactness": found}


def _made(run: AuditedRun) -> dict[str, Any]:
    versions = dict.fromkeys(_LIBRARIES, "not installed (run from its source)")
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    return {
        "name": run.recorded.declared.name or run.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions | {"python": platform.python_version()},
        "command": run.command,
        "attack_seed": run.seed,
    }


def _missing(run: AuditedRun) -> dict[str, Any]:
    """What the audit lacks, in sentences."""
    found, recorded, account = [], run.recorded, run.epsilons.account
    examples, groups = recorded.examples, run.audit.groups
    test = None if examples is None else examples.rows("test")
    if test is None:
        of_rounds, imported = map(recorded.recorder.get, ("rounds", "converted"))
        ended = text("sentence.missing", "converted" if imported else "ended_early")
        why = text("sentence.missing", "rounds") if of_rounds else ended
        found.append(text("sentence.missing", "examples", why=why))
    elif not len(test):
        found.append(text("sentence.missing", "test"))
    elif recorded.non_dp.losses is None:
        found.append(text("sentence.missing", "baseline"))
    assumes_norms = not run.log.individually_clipped and account.participation == "secret"
    estimated = assumes_norms and run.epsilons.claim != "exact"
    if estimated and not run.audit.fidelity and run.audit.batch_norms is None:
        found.append(text("sentence.missing", "exact_values"))
    if run.rows is not None:
        found += [*undeclared_people(run.log, run.rows), *run.grouping[1]]
    if groups and (account.rows_per_unit or 1) > 1:
        found.append(text("sentence.missing", "differs", account=account, missing=_columns.MISSING))
    if test is not None and len(test):
        lacking = [
            name
            for name in dict.fromkeys(name for table in groups for name in table.columns)
            if name not in test.columns
            or all(frame[name].isna().all() for frame in _columns.frames_of(test, [name]))
        ]
        if lacking:
            found.append(text("sentence.missing", "columns", lacking=", ".join(lacking)))
    return {"missing": tuple(found)}


FINDINGS = (
    Finding("reproduce", _made),
    Finding("missing", _missing, notes=lambda audit: audit.missing),
    Finding("exactness", _exactness),
    Finding("run", _run),
    Finding("disclosures", lambda run: {"disclosures": disclosures(run.audit)}),
    Finding("hazards", _hazards),
)
