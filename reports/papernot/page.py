"""reports/papernot/README.md, from papernot.json beside it and what the tutorial's README states. No figure is typed."""

from collections.abc import Mapping
from typing import Any

from indpriv._formatting import format_epsilon, format_interval
from reports.shared.markdown_table import table
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

COMMAND = "python -m reports.papernot"
EPSILON, ACCURACY, ABOVE = 1.19, 0.95, 0.99  # of the first setting; "> 99 %" without DP
OTHERS = {"second": (3.01, 0.966), "third": (7.10, 0.97)}  # epsilon and accuracy
CLOSE_EPSILON, CLOSE_ACCURACY, FAIR_ACCURACY = 0.0042, 0.005, 0.02
NEAR = f"the worst case by the conversion of 2017 is {{:g}} within {CLOSE_EPSILON:.2%}"
LEAST = (
    f"the test accuracy is at least {{:.1%}} less {CLOSE_ACCURACY:.1%}; differs where it is less by at most "
    f"{FAIR_ACCURACY:.1%}"
)
RULES = {
    "epsilon": f"reproduced where {NEAR.format(EPSILON)}",
    "accuracy": f"reproduced where {LEAST.format(ACCURACY)}",
    "without DP": f"reproduced where the same network without DP has more than {ABOVE:.0%}; differs where it has less by at most "
    f"{FAIR_ACCURACY:.1%}",
} | {
    f"{name} setting": f"not reproduced unless {NEAR.format(epsilon)}; then reproduced where {LEAST.format(accuracy)}"
    for name, (epsilon, accuracy) in OTHERS.items()
}


def verdicts(known: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The word of each of `RULES`, and the figure that decided."""
    epsilon, accuracy = known["preset"]["worst_case_epsilon"], known["test_accuracy"]
    bare = known["non_private_test_accuracy"]
    return {
        "epsilon": (_same(epsilon, EPSILON), f"{epsilon:.4f}"),
        "accuracy": (_near(accuracy, ACCURACY - CLOSE_ACCURACY), f"{accuracy:.2%}"),
        "without DP": (NOT_RUN, "–") if bare is None else (_near(bare, ABOVE), f"{bare:.2%}"),
        **{f"{name} setting": _other(known.get(name), *OTHERS[name]) for name in OTHERS},
    }


def _other(found: Mapping[str, Any] | None, epsilon: float, accuracy: float) -> tuple[str, str]:
    """Of the second or the third setting, which is judged as the first."""
    if found is None:
        return NOT_RUN, "–"
    ours, right = found["preset"]["worst_case_epsilon"], found["test_accuracy"]
    same = _same(ours, epsilon)
    word = _near(right, accuracy - CLOSE_ACCURACY) if same == REPRODUCED else same
    return word, f"{right:.2%} at {ours:.4f}"


def _same(epsilon: float, printed: float) -> str:
    return REPRODUCED if abs(epsilon / printed - 1) <= CLOSE_EPSILON else NOT_REPRODUCED


def _near(accuracy: float, least: float) -> str:
    if accuracy > least:
        return REPRODUCED
    return DIFFERS if accuracy >= least - FAIR_ACCURACY else NOT_REPRODUCED


def render(known: Mapping[str, Any]) -> str:
    """The page."""
    found, settings = (
        verdicts(known),
        {"first": known} | {n: known[n] for n in OTHERS if n in known},
    )
    means = sorted(known["groups"].items(), key=lambda pair: pair[1]["mean"])
    statuses = {each["status"] for each in settings.values()}
    lines = [
        "# The tutorial of Papernot, 2019",
        "",
        f"Made by `{COMMAND}` from [papernot.json](papernot.json). The runs are `audits/mnist_papernot.toml`,",
        "`audits/mnist_papernot_second.toml` and `audits/mnist_papernot_third.toml`, the settings of the",
        "tutorial's README: [what is the same and what is not](../../audits/docs/papernot.md). "
        f"Their guarantees are {' or '.join(sorted(statuses))}.",
        "Individual epsilon describes a run. It is no guarantee.",
        "",
        table(
            ["claim", "ours", "word", "rule"],
            [[name, why, word, RULES[name]] for name, (word, why) in found.items()],
        ),
        "",
        "The tutorial's epsilons are those of a sampling rate of 256/60,000; Opacus draws at 1/235, so ours are smaller. The rule for",
        f"epsilon was stated as 0.005 for the first setting, which is {CLOSE_EPSILON:.2%}; before any result of the others was seen it was made",
        "a share for all. They have no model without DP beside them and a norm pass every 15 epochs, so that their individual epsilons",
        "are coarse estimates.",
        "",
        table(
            ["setting", "steps", "training, s", "norm passes, s", "versions"],
            [
                [
                    name,
                    f"{each['total_steps']:,}",
                    f"{each['training_seconds']:,.0f}",
                    f"{each['pass_seconds']:,.0f}",
                    each["versions"],
                ]
                for name, each in settings.items()
            ],
        ),
        "",
        "Wall time, on a machine that did other work too.",
        "",
        "## Individual epsilon",
        "",
        table(
            ["setting", "account", "worst case", "median", "largest", "at the worst case", "claim"],
            [
                [
                    name,
                    title,
                    *(
                        format_epsilon(each[key][figure])
                        for figure in ("worst_case_epsilon", "median", "largest")
                    ),
                    f"{each[key]['share_at_worst_case']:.1%}",
                    f"{each[key]['claim']}; not a guarantee",
                ]
                for name, each in settings.items()
                for title, key in (("sound default", "default"), ("preset yu2023", "preset"))
            ],
        ),
        "",
        f"At {known['default']['meaning']}. In the first setting, on {known['fidelity']['n']} reference examples the estimate is off by "
        f"{known['fidelity']['mean_absolute']:.3f} on average and {known['fidelity']['largest_absolute']:.3f} at most.",
        "",
        "Digits in the first setting, by mean epsilon (sound default):",
        "",
        table(
            ["digit", "examples", "mean epsilon", "at the worst case", "test accuracy"],
            [
                [
                    name,
                    f"{row['n']:,}",
                    format_epsilon(row["mean"]),
                    f"{row['share_at_worst_case']:.1%}",
                    f"{row['test_accuracy']:.1%}",
                ]
                for name, row in means
            ],
        ),
        "",
        f"The loss threshold is right in {100 * known['attack']['value']:.1f} % "
        f"{format_interval(100 * known['attack']['low'], 100 * known['attack']['high'], 1)} of its guesses on the model with DP; chance is "
        "50 %. An attack that fails is no evidence of privacy.",
    ]
    return "\n".join(lines) + "\n"
