"""reports/papernot/README.md, from papernot.json beside it and what the tutorial's README states. No figure is typed."""

from collections.abc import Mapping
from typing import Any

from indpriv._formatting import format_epsilon
from reports.shared.markdown_table import table
from reports.shared.verdicts import DIFFERS, NOT_REPRODUCED, NOT_RUN, REPRODUCED

COMMAND = "python -m reports.papernot"
EPSILON, ACCURACY, ABOVE = 1.19, 0.95, 0.99  # of the first setting; "> 99 %" without DP
CLOSE_EPSILON, CLOSE_ACCURACY, FAIR_ACCURACY = 0.005, 0.005, 0.02
RULES = {
    "epsilon": f"reproduced where the worst case by the conversion of 2017 is {EPSILON:g} within {CLOSE_EPSILON:g}",
    "accuracy": f"reproduced where the test accuracy is at least {ACCURACY:.1%} less {CLOSE_ACCURACY:.1%}; differs where it is less "
    f"by at most {FAIR_ACCURACY:.1%}",
    "without DP": f"reproduced where the same network without DP has more than {ABOVE:.0%}; differs where it has less by at most "
    f"{FAIR_ACCURACY:.1%}",
}


def verdicts(known: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The word of each of `RULES`, and the figure that decided."""
    epsilon, accuracy = known["preset"]["worst_case_epsilon"], known["test_accuracy"]
    bare = known["non_private_test_accuracy"]
    return {
        "epsilon": (
            REPRODUCED if abs(epsilon - EPSILON) <= CLOSE_EPSILON else NOT_REPRODUCED,
            f"{epsilon:.4f}",
        ),
        "accuracy": (_near(accuracy, ACCURACY - CLOSE_ACCURACY), f"{accuracy:.2%}"),
        "without DP": (NOT_RUN, "–") if bare is None else (_near(bare, ABOVE), f"{bare:.2%}"),
    }


def _near(accuracy: float, least: float) -> str:
    if accuracy > least:
        return REPRODUCED
    return DIFFERS if accuracy >= least - FAIR_ACCURACY else NOT_REPRODUCED


def render(known: Mapping[str, Any]) -> str:
    """The page."""
    found, preset = verdicts(known), known["preset"]
    means = sorted(known["groups"].items(), key=lambda pair: pair[1]["mean"])
    lines = [
        "# The tutorial of Papernot, 2019",
        "",
        f"Made by `{COMMAND}` from [papernot.json](papernot.json). The run is `audits/mnist_papernot.toml`, the first setting of the",
        "tutorial's README: [what is the same and what is not](../../audits/docs/papernot.md). "
        f"Its guarantee is {known['status']}.",
        "Individual epsilon describes the run. It is no guarantee.",
        "",
        table(
            ["claim", "ours", "word", "rule"],
            [[name, why, word, RULES[name]] for name, (word, why) in found.items()],
        ),
        "",
        f"{known['total_steps']:,} steps; training took {known['training_seconds']:,.0f} s and norm passes {known['pass_seconds']:,.0f} s",
        f"of wall time on a machine that did other work too ({known['versions']}). The other two settings",
        "have not been run: [commands and hours](../claims/README.md).",
        "",
        "## Individual epsilon",
        "",
        table(
            ["account", "worst case", "median", "largest", "at the worst case", "claim"],
            [
                [
                    title,
                    *(
                        format_epsilon(each[key])
                        for key in ("worst_case_epsilon", "median", "largest")
                    ),
                    f"{each['share_at_worst_case']:.1%}",
                    f"{each['claim']}; not a guarantee",
                ]
                for title, each in (
                    ("sound default", known["default"]),
                    ("preset yu2023", preset),
                )
            ],
        ),
        "",
        f"At {known['default']['meaning']}. On {known['fidelity']['n']} reference examples the estimate is off by "
        f"{known['fidelity']['mean_absolute']:.3f} on average and {known['fidelity']['largest_absolute']:.3f} at most.",
        "",
        "Digits, by mean epsilon (sound default):",
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
        f"[{100 * known['attack']['low']:.1f}, {100 * known['attack']['high']:.1f}] of its guesses on the model with DP; chance is "
        "50 %. An attack that fails is no evidence of privacy.",
    ]
    return "\n".join(lines) + "\n"
