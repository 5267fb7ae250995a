"""The assumptions of a private release of individual epsilons, stated with every release.

Runs for which they are known to fail are refused.

Another person's epsilon depends on the trained model, and the model on all people. Why one person
is one record all the same: all model states of the run count as released already, under the run's
own (epsilon, delta). Given them (and each person's own sampling), an epsilon is a function of its
own example alone: the condition of Theorem 3.2 of Yu et al. 2023 (section 3.4; arXiv:2206.02617v7),
that outcome -> (value, outcome) is a bijection, holds since the outcome itself stays part of the
pair. So adding or removing one person changes one record of {epsilon_i}, and a mechanism that is
(epsilon', delta')-private in these records composes with training: condition on trajectory and
sampling, replace the release from all records by that without person i at a factor e^epsilon' (and
delta'), then use training's own guarantee. Together (epsilon + epsilon', delta + delta').
Under zero-out, a person's data is replaced by none: their gradient is zero, and they are no record.
That is one record less too, while the number that the run divides by stays. Where one person is
replaced by another, a record changes its value, which costs more; such audits are refused.

It fails if a record depends on other people's data beyond the trajectory: a clipping norm set to
the median norm, recording interval, Rényi orders or accounting chosen by looking at the norms,
groups found in the data. What run.json declares of this is refused; what is not declared is on
trust, and stated so. A clipping norm set to a *private* median is part of the trajectory, as its
first state, and the run's own epsilon contains its cost. Texts here are releasable: they contain
settings only.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from indpriv._formatting import format_delta, format_epsilon
from indpriv.accountant.engines import ENGINES
from indpriv.analysis.guarantee import STANDS
from indpriv.epsilon_table import relation_words
from indpriv.errors import InputError, PrivacyWarning
from indpriv.release.request import Budget, Request

# Changes of an epsilon by more than this share can show in an answer.
_LAST_DIGITS = 1e-12
_NARROWEST = 1e-6  # tolerance up to which an accountant keeps its `numerical_noise`
# Relations under which a neighbouring data set has one record more or less
_ONE_RECORD_LESS = ("add_remove", "zero_out")
# Key of run.json: a list of the settings that were computed from the data, [] for none
CHOSEN_FROM_DATA = "chosen_from_data"


def check_releasable(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose persons are not one record each, or that has no guarantee to compose with.

    Raises:
        InputError: no guarantee, several rows of one person, known participation, a relation
            under which a person is replaced by another, an account with a wide tolerance, or
            settings that were chosen from the data according to run.json.
    """
    check_one_record(summary)
    guarantee = summary["guarantee"]
    if summary["account"].get("participation", "secret") != "secret":
        raise InputError(
            "epsilons of an account with known participation also depend on who took part when, "
            "which a release does not count: audit with --participation secret"
        )
    relation = summary["account"].get("neighbouring", "add_remove")
    if relation not in _ONE_RECORD_LESS:
        raise InputError(
            f"this audit is of neighbouring={relation!r}, under which one person's record changes "
            "its value; a release is private where it is added or removed: audit with "
            "--neighbouring add-remove or zero-out"
        )
    status = guarantee.get("status")
    if status not in STANDS:
        reasons = "; ".join(map(str, guarantee.get("reasons", ())))
        raise InputError(
            f"this run's guarantee is {status}: "
            f"{reasons or 'the audit does not say that it holds'}. A release composes with the "
            "guarantee of training, and this run has none; train again without what broke it"
        )
    if guarantee.get("delta_times_n", 0) >= 1:
        warnings.warn(
            f"delta {format_delta(guarantee['delta'])} of training is at least 1/n: its guarantee "
            "promises next to nothing, and so does the total of training and release",
            PrivacyWarning,
            stacklevel=2,
        )
    accountant, tolerance = summary["account"]["accountant"], summary["account"].get("tolerance", 0)
    if tolerance > _NARROWEST:
        raise InputError(
            f"this audit was made with tolerance {tolerance:g}, within which each person's epsilon "
            "depends on the other people in the data; for a release, audit with the RDP accountant "
            f"or with --tolerance {_NARROWEST:g}"
        )
    if float(ENGINES[accountant].numerical_noise) > _LAST_DIGITS:
        warnings.warn(
            f"with the {accountant.upper()} accountant each person's epsilon depends on the other "
            "people in the data within its numerical error, which can move another person from one "
            "answer to the next; for releases audit with the RDP accountant, where this affects "
            "the last digits only",
            PrivacyWarning,
            stacklevel=2,
        )
    n, n_units = summary["run"]["n_examples"], summary["run"]["n_units"]
    if n_units is not None and n_units != n and summary["account"].get("rows_per_unit") is None:
        raise InputError(
            f"the {n} rows belong to {n_units} people, and this audit counts rows; a release needs "
            'one record for each person. Audit by people: a run recorded with unit="user" and '
            "unit_ids, or indpriv audit RUN --unit-column NAME"
        )


def check_one_record(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose epsilons, by run.json, depend on others' data beyond the trajectory.

    Raises:
        InputError: settings that were chosen from the data, or noise that protects no example.
    """
    check_noise(summary["run"].get("recorder") or {})
    chosen = declared_choices(summary)
    if chosen:
        raise InputError(
            f"run.json says that {', '.join(chosen)} was chosen from the data "
            f"({CHOSEN_FROM_DATA}). Then all epsilons depend on each person's data beyond the "
            "trained model: neither a release of them nor a statement to one owner is private at "
            "the cost that it would state. Choose such settings without the data, or privately "
            '(in an audit file, max_grad_norm = "median" is a private median of gradient norms), '
            "and train again"
        )


def check_noise(recorder: Mapping[str, Any]) -> None:
    """Refuse a run that the recorder marks as not private, whatever its noise."""
    if reason := recorder.get("no_privacy"):
        raise InputError(f"nothing of this run may be published: {reason}; train it another way")


def declared_choices(summary: Mapping[str, Any]) -> list[str] | None:
    """The settings that were chosen from the data by run.json: [] for none, None if undeclared."""
    declared = summary["run"]["declared"].get(CHOSEN_FROM_DATA)
    if declared is None:
        return None
    if not (isinstance(declared, list) and all(isinstance(item, str) for item in declared)):
        raise InputError(
            f"run.json: {CHOSEN_FROM_DATA}={declared!r} is not a list of texts; write e.g. "
            '["max_grad_norm"] or []'
        )
    return declared


def epsilon_assumptions(summary: Mapping[str, Any], request: Request) -> list[str]:
    """What a release of individual epsilons assumes, in sentences."""
    account, guarantee = summary["account"], summary["guarantee"]
    unit, relation = account["unit"], relation_words(account["neighbouring"])
    worst, delta = guarantee["worst_case_epsilon"], guarantee["delta"]
    total = describe(Budget.of(worst, delta) + request.cost)
    accountant = account["accountant"]
    left = (
        "A person whose data is left out has no record, while the number that updates are divided "
        "by stays. "
        if account["neighbouring"] == "zero_out"
        else ""
    )
    return [
        f"Neighbouring relation: {relation} one {unit}. {left}Each person counts as one record, "
        f"their own epsilon; this release by itself is {describe(request.cost)} private in these "
        "records.",
        "Each epsilon also depends on the trained model. All states of the model during training "
        f"count as released, under the run's own guarantee of epsilon {format_epsilon(worst)} and "
        f"delta {format_delta(delta)} (evidence for it: {guarantee['evidence']}). Given them, "
        "one person more or less changes one record (Yu et al. 2023, Theorem 3.2; section 3.4 of "
        f"arXiv:2206.02617v7), so that training and this release together are {total} private.",
        _independence(summary),
        _public_facts(summary, request),
        "Numerically an epsilon also depends on the other people in the data, since computers sum "
        f"in blocks: by about {ENGINES[accountant].numerical_noise} with the {accountant.upper()} "
        "accountant. That this moves no other person from one answer to the next is on trust.",
        *common_assumptions(),
    ]


def _independence(summary: Mapping[str, Any]) -> str:
    """That nothing but the trajectory ties a record to other people's data."""
    clipping = summary["run"]["max_grad_norm"]
    text = (
        "That fails if epsilons were computed with choices that follow the data beyond the trained "
        "model: a clipping norm set to the median norm, a recording interval or accounting chosen "
        "by looking at norms or epsilons, groups found in the data. "
    )
    if declared_choices(summary) is None:
        text += "That there were none is on trust: run.json does not say."
    else:
        text += "According to run.json there were none."
    if summary["account"].get("clipping_norm_epsilon"):
        text += (
            " The clipping norm itself is a private release: it counts as the first state of the "
            "model, and the guarantee contains its cost."
        )
    if clipping["min"] != clipping["max"]:
        text += (
            " The clipping norm changed during training; that it followed a fixed schedule is on "
            "trust."
        )
    return text


def _public_facts(summary: Mapping[str, Any], request: Request) -> str:
    """What a release gives away without noise."""
    account = summary["account"]
    rows = account["rows_per_unit"] or 1
    facts = [
        "Taken as public: the settings of the run",
        "its worst case",
        f"that its epsilons are called {summary['claim']}",
    ]
    if rows > 1:
        facts.append(
            f"that one {account['unit']} has at most {rows:,} rows (on which the worst case and "
            "the range of answers depend: unless this is a cap set before training, it is a fact "
            "of the data, and this release is not private in it)"
        )
    if request.by:
        facts.append("the column and its list of groups")
    if request.public_n:
        facts.append(
            f"that there are {request.public_n:,} people (not checked: a check would give it away)"
        )
    return f"{', '.join(facts)}, and the values that an answer can take."


def norm_assumptions(unit: str, neighbouring: str, request: Request) -> list[str]:
    """What a release of gradient norms before the first step assumes, in sentences."""
    return [
        f"Neighbouring relation: {relation_words(neighbouring)} one {unit}. Each person counts "
        "as one record, the norm of their gradient at the initial parameters; this release by "
        f"itself is {describe(request.cost)} private.",
        "The initial parameters contain nothing of the data (on trust: those of a model that was "
        "trained on this data before do), so that a norm depends on its own example alone. "
        "Training is not part of this release: add its own guarantee, and add the cost of this "
        "release to that of every run whose clipping norm is chosen by it.",
        "Taken as public: the clipping norm of the run, and the values that an answer can take.",
        *common_assumptions(),
    ]


def common_assumptions() -> list[str]:
    """What holds for every release."""
    return [
        "Noise and selection are OpenDP's, with randomness of the operating system, which is "
        "assumed to be secret.",
        "The budget counts the releases in one ledger. A copy of the audit with a ledger of its "
        "own is not noticed: its releases, and others from the same people's data, add to it.",
    ]


def describe(cost: Budget) -> str:
    """(epsilon, delta) as text, rounded up."""
    delta = format_delta(float(cost.delta)) if cost.delta else "0"
    return f"(epsilon {format_epsilon(float(cost.epsilon))}, delta {delta})"
