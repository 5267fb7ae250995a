"""How an audit accounts a run: what its caller asks for, else what the run declares or needs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from indpriv._facts import FAILED, Fact
from indpriv._formatting import format_delta, sentence
from indpriv.accountant.method import ESTIMATE, Method
from indpriv.analysis.guarantee import usual_participation, usual_relation
from indpriv.analysis.recorded_run import Declared, RecordedRun
from indpriv.epsilon_table import Stated
from indpriv.errors import ChainError, EvidenceError, InputError
from indpriv.norm_log.evidence import ANY_CHOICE, CHECKS, OF_SECRECY, if_known, lines_of
from indpriv.norm_log.norm_log import NormLog, OpenedRun
from indpriv.norm_log.run_files import read_run_json
from indpriv.norm_log.verify import verify

Epsilons = TypeVar("Epsilons", bound=Stated)


class MethodOptions(TypedDict, total=False):
    """Arguments of `indpriv.account` that an audit hands on; left out or None, they are as follows.

    Attributes:
        delta: the one in run.json.
        accountant, conversion, between_records, preset: those in run.json, else as
            `indpriv.account` has them.
        participation: the one in run.json, else "known" if batches were no Poisson samples and the
            log says who took part.
        neighbouring: the one in run.json, else that of the log, or "zero_out" where updates tell
            the number of examples.
    """

    delta: float | None
    accountant: str
    conversion: str
    between_records: str
    preset: str | None
    participation: str | None
    neighbouring: str | None


def method_of_run(
    log: NormLog, recorded: RecordedRun, path: Path, options: MethodOptions
) -> tuple[Method, list[str]]:
    """How to account the log of a run, and the words that say so on the command line.

    Raises:
        InputError: a bad value, or no delta.
    """
    declared = recorded.declared
    given = {**declared.account, **{key: one for key, one in options.items() if one is not None}}
    participation = usual_participation(log, given.get("preset"))
    relation = usual_relation(log, recorded.recorder)
    settings: dict[str, Any] = {
        "participation": participation,
        "neighbouring": relation,
        **given,
        "delta": _delta(given.get("delta"), path, log.n_examples),
    }
    method = Method(**settings)
    words = _words(method)
    if method.participation != participation:
        words += ["--participation", method.participation]
    if method.neighbouring is not None and method.neighbouring != relation:
        words += ["--set", f"neighbouring={method.neighbouring}"]
    return method, words


def as_checked(table: Epsilons, checks: Sequence[Fact]) -> Epsilons:
    """The account of a run as an estimate, if it rests on who took part and a check refutes that.

    With known participation, checks are those of `if_known`.
    """
    refuted = [one for one in checks if (one.key, one.status) == ("took_part", FAILED)]
    if not refuted or table.account.participation == "secret":
        return table
    return replace(table, claim=ESTIMATE, claim_reason=sentence(refuted[0].detail))


def _words(method: Method) -> list[str]:
    """Options of the command line, with all digits of delta."""
    words = ["--delta", repr(float(method.delta))]
    if method.preset is not None:
        words += ["--set", f"preset={method.preset}"]
    elif method.participation == "secret":
        names = ["accountant", "conversion", "between_records"]
        words += [word for name in names for word in ("--set", f"{name}={getattr(method, name)}")]
    return words


def _delta(delta: float | None, path: Path, n_examples: int) -> float:
    if delta is None:
        example = format_delta(10.0 ** -len(str(10 * n_examples)))  # below 1 / (10 n)
        raise InputError(
            "delta is not given, and run.json names none; pass a value well below 1/n, with "
            f"n = {n_examples:,} examples, e.g. type: indpriv audit {path} --delta {example}"
        )
    return delta


def evidence_of_run(
    open_it: Callable[[], OpenedRun], signed_by: Path | None
) -> tuple[Sequence[Fact], Sequence[Fact]]:
    """Checks and lines as an audit of the run has them: fewer if participation counts as known.

    open_it: opens the run, with all of its files hashed.
    """
    try:
        opened = replace(open_it(), unreadable="refuse")
        checks, state, known = verify(opened, signed_by), opened.state, False
    except ChainError as error:
        checks = [CHECKS["journal"].fact("failed", str(error))]
        return checks, lines_of(checks, {})
    with suppress(EvidenceError):  # as a check says
        known = usual_participation(opened.log, None) == "known"
    if known:
        checks = [*if_known(checks), *([ANY_CHOICE] if state.sampler == "other" else [])]
    declared = Declared.from_run_json(read_run_json(state.run_dir))
    recorder = {**state.header["run"], "seeded": state.seeded}
    left_out = OF_SECRECY if known else frozenset[str]()
    return checks, lines_of(checks, recorder, declared.of_lines, left_out)
