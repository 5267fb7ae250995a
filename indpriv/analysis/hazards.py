"""How an account can be wrong or misread. Texts stand in indpriv/_facts/hazards.toml."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from indpriv._facts import (
    ASSUMPTION,
    DECLARED,
    FAILED,
    NOT_COVERED,
    UNKNOWN,
    VERIFIED,
    Fact,
    fact,
)
from indpriv._formatting import capitalised, sentence
from indpriv.analysis.disclosures import declared_or, status_of, word_of
from indpriv.analysis.divisor import divisor_of
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.run_facts import RunFacts
from indpriv.epsilon_table import Account


def hazards(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Fact],
    *,
    caveats: Iterable[str],
) -> tuple[Fact, ...]:
    """How this account can be wrong or misread; caveats are those of the attacks that were run."""
    known = account.participation == "known"
    return (
        *assumptions(run, account.delta, checks, guarantee.lines, known),
        *_of_divisor(run, account),
        *_others(run, guarantee, " ".join(caveats)),
    )


def delta_is_too_large(delta: float, n_examples: int) -> bool:
    """Whether a delta allows publishing a random record outright (Dwork and Roth 2014, p. 18)."""
    return delta * n_examples >= 1


def assumptions(
    run: RunFacts, delta: float | None, checks: Sequence[Fact], lines: Sequence[Fact], known: bool
) -> list[Fact]:
    """What the account assumes; run.json may declare more, or say something about these.

    known: the account is one with known participation, which assumes no Poisson sampling.
    """
    declared = {_key(item): (item, text) for item, text in run.declared.on_trust.items()}
    found = []
    for hazard in _assumed(run, delta, checks, lines, known):
        if text := declared.pop(hazard.key, ("", ""))[1]:
            status = DECLARED if hazard.status == UNKNOWN else hazard.status
            hazard = replace(hazard, status=status, detail=f"Declared: {sentence(text)}")
        found.append(hazard)
    return found + [
        Fact(key, ASSUMPTION, capitalised(item), DECLARED, sentence(text))
        for key, (item, text) in declared.items()
    ]


def _assumed(
    run: RunFacts, delta: float | None, checks: Sequence[Fact], lines: Sequence[Fact], known: bool
) -> Iterator[Fact]:
    """Each assumption with its status."""
    source = word_of(lines, "source")
    if delta is not None and delta_is_too_large(delta, run.n_examples):
        yield fact("hazard.delta", FAILED)
    yield fact("hazard.participation" if known else "hazard.sampler", word_of(lines, "batch"))
    yield fact("hazard.norms", status_of(checks, "norm_pass", "norm_precision"))
    yield fact("hazard.seeds", source)
    yield fact("hazard.random_generator", source)
    yield fact("hazard.duplicates", UNKNOWN if run.n_units is None else DECLARED)
    yield fact("hazard.tuning", NOT_COVERED)
    yield fact("hazard.preprocessing", declared_or(UNKNOWN, run.declared.preprocessing))


def _of_divisor(run: RunFacts, account: Account) -> list[Fact]:
    """Whether updates tell the number of examples, and whether the relation allows for that."""
    steps, rows = run.settings.total_steps, account.rows_per_unit or 1
    found = divisor_of(run.n_examples, steps, run.recorder, rows=rows)
    if found is None:
        return []
    same_n = account.neighbouring != "add_remove"
    status = FAILED if found.tells_n and not same_n else VERIFIED
    return [fact("hazard.divisor", status, "same_n" if same_n else "", found=found.describe())]


def _others(run: RunFacts, guarantee: Guarantee, caveats: str) -> Iterator[Fact]:
    """How figures are misread, and what is not counted."""
    promise = "guarantee" if guarantee.publishable else "withheld"
    yield fact("hazard.individual_epsilon", NOT_COVERED, promise, guarantee=guarantee)
    yield fact("hazard.disclosure", NOT_COVERED)
    if caveats:
        yield fact("hazard.attack", NOT_COVERED, caveats=caveats)
    if run.recorder.get("rounds"):
        yield fact("hazard.beside_updates", NOT_COVERED)
    yield fact("hazard.other_uses", NOT_COVERED)
    yield fact("hazard.access", NOT_COVERED)


def _key(text: str) -> str:
    return text.lower().replace(" ", "_")
