"""How an account can be wrong or misread. The texts here hold no individual value."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from indpriv._formatting import capitalised, format_epsilon, sentence
from indpriv._plain import Limits
from indpriv.analysis.disclosures import (
    DECLARED,
    NOT_COVERED,
    UNKNOWN,
    VERIFIED,
    Knowledge,
    declared_or_unknown,
    status_of,
    word_of,
)
from indpriv.analysis.divisor import divisor_of
from indpriv.analysis.guarantee import Guarantee
from indpriv.analysis.run_facts import RunFacts
from indpriv.epsilon_table import Account
from indpriv.norm_log.evidence import (
    FAILED,
    NORM_PASS,
    NORM_PRECISION,
    Check,
)
from indpriv.norm_log.lines import Line

ASSUMPTION, READING, SCOPE = "assumption", "reading", "scope"


@dataclass(frozen=True)
class Hazard:
    """One way in which an account can be wrong or misread.

    Attributes:
        key: identifies it in code and files; never shown.
        kind: "assumption" (the account relies on it; status says whether it holds), "reading" (a
            way to misread the figures) or "scope" (what is not counted).
        short: two words for a first screen.
        title, detail: as shown.
        status: as for `Disclosure`.
    """

    key: str
    kind: Annotated[str, Limits(texts=(ASSUMPTION, READING, SCOPE))]
    short: str
    title: str = field(metadata={"json": "hazard"})
    status: Knowledge
    detail: str


# Assumptions that `indpriv check` checks too.
DELTA = Hazard(
    "delta",
    ASSUMPTION,
    "delta",
    "Delta is well below 1/n",
    FAILED,
    "With a delta of 1/n or more, a mechanism may publish a random record outright and still "
    "satisfy the definition.",
)
SAMPLING = Hazard(
    "sampler",
    ASSUMPTION,
    "sampler",
    "Batches are Poisson-sampled",
    UNKNOWN,
    "The account relies on amplification by Poisson sampling. Shuffled or weighted batches do not "
    "give it.",
)
TAKING_PART = Hazard(
    "participation",
    ASSUMPTION,
    "participation",
    "Who takes part in which step depends on no data",
    UNKNOWN,
    "The account fixes who took part. Weights by label or loss, curricula and clients that select "
    "themselves look at data. It claims no amplification by sampling.",
)
SEEDS = Hazard(
    "seeds",
    ASSUMPTION,
    "seeds",
    "Noise and sampling come from no known seed",
    UNKNOWN,
    "Anyone with the seed can subtract the noise. The recorder relies on its argument `seeded`.",
)


def hazards(
    run: RunFacts,
    account: Account,
    guarantee: Guarantee,
    checks: Sequence[Check],
    *,
    caveats: Iterable[str],
) -> tuple[Hazard, ...]:
    """How this account can be wrong or misread; caveats are those of the attacks that were run."""
    return (
        *assumptions(run, account.delta, checks, guarantee.lines, account.participation == "known"),
        *_of_divisor(run, account),
        *_readings(guarantee, " ".join(caveats)),
        *([_BESIDE_UPDATES] if run.recorder.get("rounds") else []),
        *_SCOPE,
    )


def _of_divisor(run: RunFacts, account: Account) -> list[Hazard]:
    """Whether updates tell the number of examples, and whether the relation allows for that."""
    steps, rows = run.settings.total_steps, account.rows_per_unit or 1
    found = divisor_of(run.n_examples, steps, run.recorder, rows=rows)
    if found is None:
        return []
    same_n = account.neighbouring != "add_remove"
    return [
        _assumption(
            "divisor",
            "The divisor of gradients does not tell the number of examples",
            FAILED if found.tells_n and not same_n else VERIFIED,
            f"{found.describe()}."
            + (" Neighbouring data sets have the same number of examples here." if same_n else ""),
        )
    ]


def delta_is_too_large(delta: float, n_examples: int) -> bool:
    """Whether a delta allows publishing a random record outright (Dwork and Roth 2014, p. 18)."""
    return delta * n_examples >= 1


def assumptions(
    run: RunFacts, delta: float | None, checks: Sequence[Check], lines: Sequence[Line], known: bool
) -> list[Hazard]:
    """What the account assumes; run.json may declare more, or say something about these.

    known: the account is one with known participation, which assumes no Poisson sampling.
    """
    declared = {_key(item): (item, text) for item, text in run.declared.on_trust.items()}
    found = []
    for hazard in _assumed(run, delta, checks, lines, known):
        if text := declared.pop(hazard.key, ("", ""))[1]:
            status = DECLARED if hazard.status == UNKNOWN else hazard.status
            detail = f"{hazard.detail} Declared: {sentence(text)}"
            hazard = replace(hazard, status=status, detail=detail)
        found.append(hazard)
    return found + [
        Hazard(key, ASSUMPTION, item, capitalised(item), DECLARED, sentence(text))
        for key, (item, text) in declared.items()
    ]


def _assumed(
    run: RunFacts, delta: float | None, checks: Sequence[Check], lines: Sequence[Line], known: bool
) -> list[Hazard]:
    """Each assumption with its status."""
    sampling = replace(TAKING_PART if known else SAMPLING, status=word_of(lines, "batch"))
    source = word_of(lines, "source")
    too_large = delta is not None and delta_is_too_large(delta, run.n_examples)
    return [
        *([DELTA] if too_large else []),
        sampling,
        _assumption(
            "norms",
            "The norm pass computes the norms that training clips",
            status_of(checks, NORM_PASS, NORM_PRECISION),
            "Reduced precision or non-determinism can make a recorded norm smaller than the one "
            "that was clipped.",
        ),
        replace(SEEDS, status=source),
        _assumption(
            "random_generator",
            "The random generator cannot be predicted",
            source,
            "The account assumes perfect randomness. Opacus uses a cryptographic generator only "
            "with secure_mode=True.",
        ),
        *_assumed_of_data(run),
    ]


def _assumption(key: str, title: str, status: str, detail: str) -> Hazard:
    return Hazard(key, ASSUMPTION, key.replace("_", " "), title, status, detail)


def _assumed_of_data(run: RunFacts) -> list[Hazard]:
    return [
        _assumption(
            "duplicates",
            "No person has several units",
            UNKNOWN if run.n_units is None else DECLARED,
            "If a person's rows have different ids, the person's epsilon is larger than each "
            "row's.",
        ),
        _assumption(
            "tuning",
            "The settings were not chosen on these data",
            NOT_COVERED,
            "Tuning, early stopping and choosing the best of several runs or checkpoints spend "
            "privacy that is not counted here.",
        ),
        _assumption(
            "preprocessing",
            "Preprocessing was not fitted on the data",
            declared_or_unknown(run.declared.preprocessing),
            "Standardisation, vocabularies or a clipping norm computed from the data are not "
            "covered by the account.",
        ),
    ]


def _readings(guarantee: Guarantee, caveats: str) -> list[Hazard]:
    worst = format_epsilon(guarantee.worst_case_epsilon)
    promise = (
        f"The guarantee for every example is the worst case of {worst}."
        if guarantee.publishable
        else f"There is no guarantee: {guarantee.withheld}."
    )
    found = [
        Hazard(
            "individual_epsilon",
            READING,
            "individual epsilon",
            "An individual epsilon is taken for a guarantee",
            NOT_COVERED,
            f"It describes the run that happened. {promise}",
        ),
        Hazard(
            "disclosure",
            READING,
            "disclosure",
            "Individual epsilons or group figures are shared",
            NOT_COVERED,
            "They are computed from the data without noise. Share only a private release of them.",
        ),
    ]
    if caveats:
        title = "A failed attack is taken for safety"
        found.append(Hazard("attack", READING, "attack", title, NOT_COVERED, caveats))
    return found


_BESIDE_UPDATES = Hazard(
    "beside_updates",
    SCOPE,
    "metrics of clients",
    "Clients send more than their updates",
    NOT_COVERED,
    "Metrics, numbers of examples, statistics of batch norms and ids that clients send beside "
    "their updates have no noise. Averages weighted by private numbers tell these numbers.",
)
_SCOPE = (
    Hazard(
        "other_uses",
        SCOPE,
        "other uses",
        "The same data are used elsewhere",
        NOT_COVERED,
        "Other models or statistics from the same data add to every example's epsilon.",
    ),
    Hazard(
        "access",
        SCOPE,
        "access",
        "Collection, storage and access",
        NOT_COVERED,
        "Differential privacy of a model does not limit who can read the data, the logs or this "
        "page.",
    ),
)


def _key(text: str) -> str:
    return text.lower().replace(" ", "_")
