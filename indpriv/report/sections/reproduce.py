"""How to reproduce the audit, and what was declared of the run."""

import json
import math

from indpriv._formatting import format_share_up
from indpriv.analysis.exactness import Exactness
from indpriv.analysis.summary import Audit
from indpriv.norm_log.evidence import PASSED, SEEDS
from indpriv.report.document import Block, Code, Details, Section, paragraph


def reproduce(summary: Audit) -> Section:
    """The command, the versions, the fingerprint of the ids, and run.json as declared."""
    versions = " · ".join(f"{name} {version}" for name, version in summary.versions.items())
    guessed = {check.key for check in summary.checks if check.status != PASSED}
    training = (
        "The training is reproducible from its seed, which is why it gives no privacy."
        if summary.run.recorder.get("seeded")
        else "The training was seen to draw from a generator whose seed can be guessed: whoever "
        "guesses it can repeat the training and subtract the noise."
        if SEEDS.key in guessed
        else "The training itself must not be reproducible. No seed of its noise and its sampling "
        "was declared; without one, a second run gives other epsilons."
    )
    blocks: list[Block] = [
        paragraph(
            "The same log gives the same epsilons on any machine, without the model or the data:"
        ),
        Code(summary.command or "indpriv audit RUN --output-dir DIR"),
        paragraph(training),
        paragraph(
            f"{versions} · example ids, SHA-256: {summary.run.example_ids_sha256}", style="note"
        ),
    ]
    if summary.exactness is not None:
        blocks.append(paragraph(_exactness(summary.exactness), style="note"))
    if summary.run.declared.content:
        content = json.dumps(
            summary.run.declared.content, indent=2, ensure_ascii=False, default=str
        )
        blocks.append(Details("run.json, as declared", (Code(content),)))
    return Section("reproduce", "Reproduce", tuple(blocks))


def _exactness(found: Exactness) -> str:
    """What does not come from every example by itself, in plain sentences."""
    texts = [
        f"This audit has more than {found.most_exact:,} examples. Counts, means, shares and "
        "largest values are exact; medians and other quantiles are read from histograms "
        f"and lie within {format_share_up(found.quantile_error)} of the exact ones."
    ]
    if found.pearson_error is not None and found.spearman_error is not None:
        texts.append(
            f"Pearson's r of epsilon and loss is at most {_up(found.pearson_error)} off, the rank "
            f"correlation at most {_up(found.spearman_error)}."
        )
    if found.attack_error is not None:
        sides = ((found.attacked_members, "training"), (found.attacked_nonmembers, "test"))
        used = [
            f"all {side} examples" if n is None else f"{n:,} random {side} examples"
            for n, side in sides
        ]
        texts.append(
            f"Attacks used {' and '.join(used)}. On all examples, the AUC of an attack, and the "
            "share of all members or of all test examples above a given threshold, would each "
            f"differ by at most {format_share_up(found.attack_error)} (95 % confidence). Attacks "
            "on groups and on bins of epsilon, rates at a false-positive rate, and the advantage "
            "are less exact: see their intervals. Small groups have few examples in such a sample, "
            "or none."
        )
    if found.compared is not None:
        texts.append(
            f"Other choices of the account were tried on {found.compared:,} random examples."
        )
    return " ".join(texts)


def _up(bound: float) -> str:
    """A bound with one digit, rounded up."""
    if bound == 0:
        return "0"
    unit = 10.0 ** math.floor(math.log10(bound))
    return f"{math.ceil(bound / unit) * unit:.1g}"
