"""On what a private release of individual epsilons rests, said with every release; and where it does not hold, refused.

Another person's epsilon depends on the trained model, and the model on everybody. Why one person is one record all the
same: all model states of the run count as released already, under the run's own (epsilon, delta). Given them (and each
person's own sampling), an epsilon is a function of its own example alone: the condition of Theorem 3.2 of Yu et al. 2023
(section 3.4; arXiv:2206.02617v7), that outcome -> (value, outcome) is a bijection, holds since the outcome itself stays part
of the pair. So adding or removing one person changes one record of {epsilon_i}, and a mechanism that is (epsilon', delta')-private in these records
composes with training: condition on trajectory and sampling, replace the release from all records by that without person i at
a factor e^epsilon' (and delta'), then use training's own guarantee. Together (epsilon + epsilon', delta + delta').

It fails where a record depends on other people's data beyond the trajectory: a clipping norm set to the median norm, K,
Rényi orders or the accounting chosen by looking at the norms, groups found in the data. What run.json declares so is
refused; what nobody declared is on trust, and said. Texts here are releasable: they hold settings only.
"""

import warnings
from collections.abc import Mapping
from typing import Any

from indpriv._formatting import format_delta, format_epsilon
from indpriv.errors import InputError, PrivacyWarning
from indpriv.release.request import Budget, Request

# By how much the epsilons of others were seen to move when one person, or half of all, left the log; rounded up.
_WOBBLE = {"rdp": "1e-14", "pld": "1e-9"}
CHOSEN_FROM_DATA = (
    "chosen_from_data"  # key of run.json: a list of what was computed from the data, [] for nothing
)


def check_releasable(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose epsilons cannot be taken for one record a person, or that has no guarantee to compose with.

    Args:
        summary: the content of audit.json.

    Raises:
        InputError: no guarantee, several rows of one person, or settings that run.json says were chosen from the data.
    """
    check_one_record(summary)
    guarantee = summary["guarantee"]
    status = guarantee.get("status")
    if status not in ("supported", "declared"):
        reasons = "; ".join(map(str, guarantee.get("reasons", ())))
        raise InputError(
            f"this run's guarantee is {status}: {reasons or 'the audit does not say that it holds'}. A release composes "
            "with the guarantee of training, and here there is none; train again without what broke it"
        )
    if guarantee.get("delta_times_n", 0) >= 1:
        warnings.warn(
            f"delta {format_delta(guarantee['delta'])} of training is at least 1/n: its guarantee promises next to nothing, "
            "and so does the total of training and release",
            PrivacyWarning,
            stacklevel=2,
        )
    if summary["account"]["accountant"] == "pld":
        warnings.warn(
            "with the PLD accountant everybody's epsilon moves by up to its numerical error with who else is there, which can "
            "carry somebody else from one answer to the next; audit with the RDP accountant for releases, where that is a "
            "rounding of the last digits",
            PrivacyWarning,
            stacklevel=2,
        )
    n, n_units = summary["run"]["n_examples"], summary["run"]["n_units"]
    if n_units is not None and n_units != n and summary["account"].get("rows_per_unit") is None:
        raise InputError(
            f"{n_units} people stand behind {n} rows, and this audit counts rows; a release takes each record for one person. "
            'Audit by people: a run recorded with unit="user" and unit_ids, or indpriv audit RUN --unit-column NAME'
        )


def check_one_record(summary: Mapping[str, Any]) -> None:
    """Refuse a run whose epsilons depend on other people's data beyond the trajectory, as far as run.json says so.

    Raises:
        InputError: settings that were chosen from the data, or an audit that does not say what is needed.
    """
    missing = [name for name in ("name", "account", "guarantee", "run") if name not in summary]
    if missing:
        raise InputError(f"audit.json lacks {', '.join(missing)}; make the audit again")
    chosen = declared_choices(summary)
    if chosen:
        raise InputError(
            f"run.json says that {', '.join(chosen)} was chosen from the data ({CHOSEN_FROM_DATA}). Then everybody's epsilon "
            "depends on each person's data beyond the trained model: neither a release of them nor a statement to one owner "
            "is private at the cost that it would state. Choose such settings without the data, or privately (indpriv release "
            "RUN --quantiles 0.5 gives a private median of gradient norms), and train again"
        )


def declared_choices(summary: Mapping[str, Any]) -> list[str] | None:
    """What run.json says was chosen from the data: [] for nothing, None where it does not say."""
    declared = summary["run"]["declared"].get(CHOSEN_FROM_DATA)
    if declared is None:
        return None
    if not (isinstance(declared, list) and all(isinstance(item, str) for item in declared)):
        raise InputError(
            f'run.json: {CHOSEN_FROM_DATA}={declared!r} is not a list of texts; write e.g. ["max_grad_norm"] or []'
        )
    return declared


def epsilon_assumptions(summary: Mapping[str, Any], request: Request) -> list[str]:
    """What a release of individual epsilons rests on, in sentences."""
    account, guarantee = summary["account"], summary["guarantee"]
    unit, relation = account["unit"], account["neighbouring"].replace("_", "/")
    worst, delta = guarantee["worst_case_epsilon"], guarantee["delta"]
    total = Budget.of(worst, delta) + request.cost
    clipping = summary["run"]["max_grad_norm"]
    moved = clipping["min"] != clipping["max"]
    silent = declared_choices(summary) is None
    rows = account["rows_per_unit"] or 1
    return [
        f"Neighbouring relation: {relation} one {unit}. Each person counts as one record, their own epsilon; this release "
        f"by itself is {describe(request.cost)} private in these records.",
        "Everybody's epsilon also depends on the trained model. All states of the model during training count as "
        f"released, under the run's own guarantee of epsilon {format_epsilon(worst)} and delta {format_delta(delta)} "
        f"({'its assumptions were checked' if guarantee['status'] == 'supported' else 'declared, not checked'}). Given them, "
        "one person more or less changes one record (Yu et al. 2023, Theorem 3.2; section 3.4 of arXiv:2206.02617v7), so "
        f"that training and this release together are {describe(total)} private.",
        "That fails where epsilons were computed with choices that follow the data beyond the trained model: a clipping "
        "norm set to the median norm, a recording interval or accounting chosen by looking at norms or epsilons, groups "
        "found in the data. "
        + (
            "That there were none is on trust: run.json does not say."
            if silent
            else "According to run.json there were none."
        )
        + (
            " The clipping norm changed during training; that it followed a fixed schedule is on trust."
            if moved
            else ""
        ),
        f"Taken as public: the settings of the run, its worst case, that its epsilons are called {summary['claim']}, "
        + (
            f"that the most rows of one {unit} are {rows:,} (on which the worst case and the range of answers rest: where that "
            "is no cap set before training, it is a fact of the data, and this release is not private in it), "
            if rows > 1
            else ""
        )
        + ("the column and its list of groups, " if request.by else "")
        + (
            f"that there are {request.public_n:,} people (not checked: a check would tell), "
            if request.public_n
            else ""
        )
        + "and the values that an answer can take.",
        "Numerically an epsilon also moves with who else is there, since computers sum in blocks: by about "
        f"{_WOBBLE[account['accountant']]} with the {account['accountant'].upper()} accountant. That this moves nobody else "
        "from one answer to the next is on trust.",
        *common_assumptions(),
    ]


def norm_assumptions(unit: str, neighbouring: str, request: Request) -> list[str]:
    """What a release of gradient norms before the first step rests on."""
    return [
        f"Neighbouring relation: {neighbouring.replace('_', '/')} one {unit}. Each person counts as one record, the norm of "
        f"their gradient at the initial parameters; this release by itself is {describe(request.cost)} private.",
        "The initial parameters hold nothing of the data (on trust: a model trained before on this data does), so that a "
        "norm depends on its own example alone. Training is not part of this release: add its own guarantee, and this "
        "cost to that of every run whose clipping norm is chosen by it.",
        "Taken as public: the clipping norm of the run, and the values that an answer can take.",
        *common_assumptions(),
    ]


def common_assumptions() -> list[str]:
    """What holds for every release."""
    return [
        "Noise and selection are OpenDP's, on randomness of the operating system, and nobody knows it.",
        "The budget counts the releases made from this directory; others from the same people's data add to it.",
    ]


def describe(cost: Budget) -> str:
    """(epsilon, delta) as text, rounded up."""
    delta = float(cost.delta)
    return f"(epsilon {format_epsilon(float(cost.epsilon))}, delta {format_delta(delta) if delta else '0'})"
