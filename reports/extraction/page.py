"""reports/extraction/README.md from the figures in extraction.json beside it. No figure is typed."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from audits.exposure.findings import CHANCE
from audits.exposure.text import CANDIDATES
from audits.training.datasets.topics import SOURCE
from indpriv._formatting import format_epsilon, format_interval, formatted
from indpriv.analysis.attacks.attributes import BY_EPSILON
from indpriv.analysis.statistics import Interval, holm
from indpriv.attacks.attributes import GUESSERS
from reports.extraction.attributes import CONTROL_EPOCHS, CONTROL_ROWS
from reports.extraction.secrets import SETTINGS
from reports.shared.markdown_table import table
from reports.shared.rates import limit
from reports.shared.recorded import SEEDED

_NONE = "–"
SIGNIFICANCE = 0.05
MEMORISED, HIDDEN, NULL, ATTRIBUTES, ATTRIBUTES_HIDDEN = (
    "a secret in 16 rows comes out without DP",
    "no secret comes out with DP",
    "secrets that no row holds rank by chance",
    "attributes come out of a model that overfits",
    "no attribute comes out with DP",
)
RULES = {
    MEMORISED: "shown where every such secret is at rank 1 in every model without DP; in part where in some",
    HIDDEN: "shown where none is at rank 1 and no mean exposure exceeds the ceiling of the worst case (Holm's "
    f"correction, {SIGNIFICANCE:g}); refuted where one does; not shown otherwise",
    NULL: f"passed where the smallest corrected p of all models (Holm) is above {SIGNIFICANCE:g}; failed "
    "otherwise: exposures may then be off by as much as the controls' mean is from chance",
    ATTRIBUTES: "shown where the interval of the advantage lies above 0 for at least half of the attacks on the "
    "1,000 rows; in part where for some",
    ATTRIBUTES_HIDDEN: "refuted where an interval lies above the ceiling; shown where none lies above 0, and one does on the same rows "
    "without DP, so that the attacks have power there; not shown otherwise",
}


def verdicts(figures: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The word of each of `RULES`, and the figures that decided."""
    runs = figures["secrets"]
    bare = [run for run in runs if run["target_epsilon"] is None]
    private = [run for run in runs if run["target_epsilon"] is not None]
    most = [row for run in bare for row in run["rows"] if row["rows"] == 16]
    out, of = sum(row["extracted"] for row in most), sum(row["n_secrets"] for row in most)
    held = [row for run in private for row in run["rows"] if row["rows"]]
    taken, least = (
        sum(row["extracted"] for row in held),
        min(holm([row["p_value"] for row in held])),
    )
    nulls = [run["control_p_value"] for run in runs]
    low = sum(p_value <= SIGNIFICANCE for p_value in nulls)
    null = min(holm(nulls))
    means = [row["mean"] for run in runs for row in run["rows"] if not row["rows"]]
    control = [row["low"] > 0 for row in figures["control"]]
    ours, without = (
        [row for row in figures["attributes"] if not row["by"] and row["model"] == model]
        for model in ("dp", "non_dp")
    )
    above, power = (sum(row["low"] > 0 for row in rows) for rows in (ours, without))
    over = sum(row["low"] > row["ceiling"] for row in ours)
    return {
        MEMORISED: (_in_part(out, of), f"{out} of {of}"),
        HIDDEN: (
            "refuted" if least <= SIGNIFICANCE else "not shown" if taken else "shown",
            f"{taken} of {sum(row['n_secrets'] for row in held)} at rank 1; smallest corrected p {least:.2g}",
        ),
        NULL: (
            "passed" if null > SIGNIFICANCE else "failed",
            f"{low} of {len(nulls)} below {SIGNIFICANCE:g}, smallest corrected p {null:.2g}; controls' mean "
            f"exposures {min(means):.2f} to {max(means):.2f}, by chance {CHANCE:.2f}",
        ),
        ATTRIBUTES: (
            "shown" if 2 * sum(control) >= len(control) else _in_part(sum(control), len(control)),
            f"{sum(control)} of {len(control)} intervals above 0",
        ),
        ATTRIBUTES_HIDDEN: (
            "refuted" if over else "shown" if power and not above else "not shown",
            f"{above} of {len(ours)} intervals above 0, {over} above the ceiling; without DP {power} above 0",
        ),
    }


def _in_part(found: int, of: int) -> str:
    return "shown" if found == of else "in part" if found else "not shown"


def render(figures: Mapping[str, Any]) -> str:
    """The whole page."""
    return "\n".join([*_head(figures), *_secrets(figures["secrets"]), *_attributes(figures)]) + "\n"


def _head(figures: Mapping[str, Any]) -> Iterator[str]:
    yield from (
        "# Secrets and attributes",
        "",
        "Made by `python -m reports.extraction` from [extraction.json](extraction.json); "
        "[secrets and attributes](../../audits/docs/secrets-and-attributes.md) says how to run these attacks.",
        "",
        SEEDED,
        "",
        "## What was found, and by which rule",
        "",
    )
    found = verdicts(figures)
    yield table(
        ("finding", "word", "why", "rule"),
        [(name, *found[name], rule) for name, rule in RULES.items()],
    )
    yield ""


def _secrets(runs: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    first = SETTINGS[0]
    yield from (
        "## Secrets in character models",
        "",
        f"{first.text_rows:,} rows of text from {SOURCE}, and {first.secrets} random pins of four "
        "digits in each of 1, 4 and 16 rows; "
        f"{first.controls} more are inserted nowhere. Exposure is in bits: {CHANCE:.2f} on average "
        "by chance, 13.29 at rank 1 of "
        f"{CANDIDATES:,}. Ranks are exact. {first.epochs} epochs, batches of {first.batch_size}, "
        f"Adam at {first.learning_rate:g}; epsilon at delta {first.delta:g}. The epsilon of an "
        "owner is that of all rows of the secret together: a person of 16 rows has no epsilon of "
        "3. A ceiling is the largest mean exposure that an epsilon allows; p tests the worst case.",
        "",
    )
    head = ("model", "epsilon of a row", "rows", "mean exposure", "95 %", "rank 1",
            "epsilon of owners", "ceiling", "worst case", "ceiling of it", "p")  # fmt: skip
    rows = [
        (
            run["model"],
            "without DP" if run["target_epsilon"] is None else f"{run['target_epsilon']:g}",
            f"{row['rows']}" if row["rows"] else "none",
            f"{row['mean']:.2f}",
            format_interval(row["interval"]["low"], row["interval"]["high"]),
            f"{row['extracted']} of {row['n_secrets']}",
            *(
                _NONE if row[name] is None else limit(row[name], 2)
                for name in (
                    "mean_epsilon",
                    "individual_ceiling",
                    "worst_case_epsilon",
                    "ceiling",
                )
            ),
            _NONE if row["p_value"] is None else f"{row['p_value']:.2f}",
        )
        for run in runs
        for row in run["rows"]
    ]
    yield table(head, rows)
    controls = ", ".join(f"{run['control_p_value']:.2g}" for run in runs)
    findings = sum(row["above_ceiling"] for run in runs for row in run["rows"])
    yield from (
        "",
        f"Findings against a guarantee: {findings}. Ranks of the secrets that no row holds are "
        f"compared with the uniform law: p = {controls}; the same pins are used in all runs, so "
        "these are not independent: one set of pins that a model takes for likely fails in several. Intervals are over the secrets of one model.",
        "",
    )


def _attributes(figures: Mapping[str, Any]) -> Iterator[str]:
    found, control = figures["attributes"], figures["control"]
    whole = [each for each in found if not each["by"]]
    ours = [each for each in whole if each["model"] == "dp"]
    parts = [
        each
        for each in found
        if each["by"] and each["model"] == "dp" and each["guesser"] == "with_imputation"
    ]
    yield from (
        "## Attributes of Adult",
        "",
        "An attacker who knows the label and all other columns guesses one attribute. Imputation, a "
        "logistic regression on half of the test examples, does so without the model. The "
        "advantage is what the model adds for training examples less what it adds for test "
        "examples, in percentage points; intervals are exact and simultaneous over four rates. The "
        f"worst case (epsilon {format_epsilon(figures['worst_case_epsilon'])}) allows "
        f"{limit(100 * ours[0]['ceiling'])} points.",
        "",
    )
    yield _attribute_table([("epsilon 3", each) for each in ours]
                           + [("without DP", each) for each in whole if each not in ours])  # fmt: skip
    yield from (
        "",
        "Adult hardly memorises, with DP or without. The same network trained without DP on the "
        f"first {CONTROL_ROWS:,} rows for {CONTROL_EPOCHS} epochs does, and shows that the attacks "
        "work:",
        "",
        _attribute_table([(f"{CONTROL_ROWS:,} rows, without DP", each) for each in control]),
        "",
        "By individual epsilon of the DP run, imputation times the model’s confidence:",
        "",
    )
    head = ("attribute", "individual epsilon", "members", "others", "advantage", "95 %",
            "individual ceiling")  # fmt: skip
    rows = [
        (
            row["attribute"],
            row["name"],
            f"{row['n_members']:,}",
            f"{row['n_others']:,}",
            *_advantage(row),
            limit(100 * row["individual_ceiling"]),
        )
        for row in parts
        if row["by"] == BY_EPSILON
    ]
    yield table(head, rows)
    yield from ("", "By group of the DP run, the same attack:", "")
    rows = [
        (
            row["attribute"],
            row["by"],
            row["name"],
            f"{row['n_members']:,}",
            f"{row['n_others']:,}",
            *_advantage(row),
        )
        for row in parts
        if row["by"] != BY_EPSILON
    ]
    yield table(("attribute", "column", "group", "members", "others", "advantage", "95 %"), rows)


def _attribute_table(found: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    head = ("model", "attribute", "attack", "imputed", "with the model", "others imputed",
            "others with the model", "advantage", "95 %")  # fmt: skip
    names = ("imputed", "guessed", "others_imputed", "others_guessed")
    rows = [
        (
            name,
            each["attribute"],
            GUESSERS[each["guesser"]].title.replace("'", "’"),
            *(f"{100 * each[key]:.1f} %" for key in names),
            *_advantage(each),
        )
        for name, each in found
    ]
    return table(head, rows)


def _advantage(row: Mapping[str, Any]) -> tuple[str, str]:
    ends = formatted(Interval(row["low"], row["high"]), "points_span").removesuffix(" %")
    return f"{100 * row['advantage']:+.2f}", ends
