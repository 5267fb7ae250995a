"""reports/language/README.md from the figures in language.json beside it. No figure is typed."""

from collections.abc import Iterator, Mapping
from typing import Any

from indpriv._formatting import format_epsilon, format_interval, format_lower_bound, round_up
from reports.shared.markdown_table import table

CHOSEN = "text_loss"  # the attack that decides, chosen in a trial run with other coins
EXTRACTED, APART, HIDDEN, BELOW = (
    "membership of the same canaries succeeds where extraction fails",
    "without DP, training longer brings them out",
    "with DP, no secret comes out",
    "no figure lies above what its epsilon allows",
)
RULES = {
    EXTRACTED: "shown where in some model the AUC of the loss has an interval above 1/2 while no secret is "
    "(100, 1/2)-discoverable; not shown otherwise",
    APART: "shown where more secrets that were trained on than others are (100, 1/2)-discoverable in some model "
    "without DP; not shown otherwise",
    HIDDEN: "shown where no secret that was trained on is (100, 1/2)-discoverable in any model with DP; refuted "
    "otherwise",
    BELOW: "shown where the mean chance of the secrets and every lower bound on epsilon of the loss stay below the "
    "worst case of their run; refuted otherwise",
}
TITLES = {
    "text_loss": "loss",
    "zlib": "zlib ratio",
    "min_k": "Min-K%",
    "min_k_plus": "Min-K%++",
    "text_reference": "less the public model's loss",
    "gradient": "norm of the final gradient",
    "updates": "every noisy update, by gradient canaries",
}
BOUNDS = ("epsilon", "epsilon_fdp", "epsilon_gaussian")


def verdicts(figures: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """The word of each of `RULES`, and the figures that decided."""
    models = figures["models"]
    plain = [model for model in models if model["epsilon"] is None]
    private = [model for model in models if model["epsilon"] is not None]
    apart = [
        model
        for model in models
        if model["attacks"][CHOSEN]["low"] > 0.5 and not _out(model, "members")
    ]
    more = [model for model in plain if _out(model, "members") > _out(model, "others")]
    out = sum(_out(model, "members") for model in private)
    over = [
        model
        for model in private
        if any(model["attacks"][CHOSEN][name] > model["epsilon"] for name in BOUNDS)
        or any(
            model["extraction"]["members"]["chance"][n] > most
            for n, most in model["ceilings"].items()
        )
    ]
    return {
        EXTRACTED: (
            "shown" if apart else "not shown",
            "; ".join(
                f"{model['title']}: AUC {model['attacks'][CHOSEN]['auc']:.3f}" for model in apart
            )
            or "in no model",
        ),
        APART: (
            "shown" if more else "not shown",
            "; ".join(
                f"{model['title']}: {_out(model, 'members')} of {_n(model)}" for model in plain
            ),
        ),
        HIDDEN: (
            "refuted" if out else "shown",
            f"{out} of {sum(map(_n, private))}",
        ),
        BELOW: ("refuted" if over else "shown", f"{len(over)} of {len(private)} models above"),
    }


def _out(model: Mapping[str, Any], side: str) -> int:
    return int(model["extraction"][side]["discoverable"]["100"])


def aucs(run: Mapping[str, Any]) -> list[float]:
    """Of the attack that decides, on each model."""
    return [model["attacks"][CHOSEN]["auc"] for model in run["models"]]


def _earlier(run: Mapping[str, Any]) -> str:
    """What a run of the command before this one found."""
    found = ", ".join(f"{auc:.3f}" for auc in aucs(run))
    out = sum(_out(model, "members") for model in run["models"])
    came = f"{out or 'no'} secret{'s' if out > 1 else ''} came out"
    return f" A run before this one had AUCs of the loss of {found}, and {came}."


def _n(model: Mapping[str, Any]) -> int:
    return int(model["extraction"]["members"]["n"])


def render(figures: Mapping[str, Any]) -> str:
    """The whole page."""
    return "\n".join(_lines(figures)) + "\n"


def _lines(figures: Mapping[str, Any]) -> Iterator[str]:
    models, about = figures["models"], figures["about"]
    yield from (
        "# Membership and extraction of the same secrets",
        "",
        "Made by `python -m reports.language` from [language.json](language.json).",
        "",
        f"A GPT-2 of two layers, trained from scratch on {about['public']:,} public texts of {about['length']} "
        f"characters, is fine-tuned with LoRA on {about['texts']:,} other texts and on secrets: {about['secrets']:,} "
        "sentences “pin of jqkwzd is 0482” with a random name and four random digits. A fair coin decides whether "
        "each is inserted, once (`indpriv.recording.InsertedCanaries`). `indpriv.attacks.language_scores` then says "
        "who was in, and `indpriv.attacks.extraction` what it takes to get the digits out, given the rest of the "
        "sentence; both read the same logits of the same final model. The public model has seen sentences of this "
        "form with other names, so that only the digits are to be learnt.",
        "",
        f"Batches of {about['batch']}; AdamW at "
        + " and ".join(f"{rate:g}" for rate in sorted({model["learning_rate"] for model in models}))
        + "; with DP gradients are clipped at 1, and epsilon is the worst case of the audit. Texts and the public "
        "model are seeded; coins, batches and noise are not."
        + "".join(map(_earlier, figures.get("before", ()))),
        "",
        *_status(models),
        "## What was found, and by which rule",
        "",
        table(
            ("finding", "word", "why", "rule"),
            [(name, *found, RULES[name]) for name, found in verdicts(figures).items()],
        ),
        "",
        "A model can give away who was in its data long before it says anything of what it read there. That "
        "extraction fails is therefore no evidence of privacy; [the attackers of the report](../attacks/README.md) "
        "try membership. Nor do these models show how well the extraction attack works: no secret is repeated, and "
        "where a test lets a model memorise its members, their ends come out.",
        "",
        "## Membership",
        "",
        "AUC with its 95 % interval, and lower bounds on epsilon from one run at delta "
        f"{about['delta']:g}: of Steinke et al. 2023 and in f-DP, which assume nothing but the coins, and with a "
        "Gaussian trade-off and independent scores. Each holds with 95 % confidence by itself. The attack that "
        "decides, the loss, was chosen in a trial run with other coins. ReCaLL is not here: a prefix would need positions that this model "
        "was not trained on.",
        "",
        *_meant(models),
    )
    head = ("model", "epsilon", "attack", "AUC", "95 %", "Steinke", "f-DP", "Gaussian")
    yield table(
        head,
        [
            (
                model["title"],
                _epsilon(model),
                title,
                f"{found['auc']:.3f}",
                format_interval(found["low"], found["high"], 3),
                *(format_lower_bound(found[name]) for name in BOUNDS),
            )
            for model in models
            for name, title in TITLES.items()
            if (found := model["attacks"].get(name))
        ],
    )
    yield from (
        "",
        "## Extraction",
        "",
        "The chance that the four digits come out in one sample and in 100, at temperature 1 and over all tokens, is "
        "the mean over secrets; it is computed from the logits and not sampled. (100, 1/2)-discoverable are secrets "
        "that come out of 100 samples with a chance of one half at least (Hayes et al. 2025). Bits: no sampler that "
        "prefers likelier tokens emits the digits of the median secret with more than 2^-bits (after Liu, Evans and "
        f"Xiong 2026). By chance it is 1 in {about['candidates']:,}.",
        "",
        "At most: what epsilon allows, whatever is done with the model. The digits of a secret that was left out are "
        f"guessed in n samples with a chance of at most n / {about['candidates']:,}; (epsilon, delta)-DP lets that "
        "grow to the smaller of e^epsilon n / "
        f"{about['candidates']:,} + delta and the other side of the privacy region "
        "(`indpriv.analysis.guarantee.true_positive_bound`).",
        "",
    )
    head = ("model", "epsilon", "secrets", "n", "chance in 1", "at most", "chance in 100", "at most",
            "discoverable", "greedy", "bits")  # fmt: skip
    yield table(
        head,
        [
            (
                model["title"],
                _epsilon(model),
                "inserted" if side == "members" else "left out",
                f"{found['n']}",
                *(
                    cell
                    for n in ("1", "100")
                    for cell in (f"{found['chance'][n]:.2g}", _most(model, side, n))
                ),
                f"{found['discoverable']['100']}",
                f"{found['greedy']}",
                f"{found['bits']:.1f}",
            )
            for model in models
            for side, found in model["extraction"].items()
        ],
    )
    yield from (
        "",
        "An epsilon bounds the extraction of a *random* secret. Text that can be guessed comes out of any model; for "
        "it the chance of the secrets that were left out is the thing to compare with.",
    )


def _status(models: list[Mapping[str, Any]]) -> list[str]:
    named = sorted({key for model in models for key in model["not_verified"]})
    if not named:
        return []
    return [f"Not verified in the runs with DP: {', '.join(named)}.", ""]


def _meant(models: list[Mapping[str, Any]]) -> list[str]:
    named = sorted({model["meaning"] for model in models if "meaning" in model})
    if not named:
        return []
    return [
        "Norms of the final gradient are for an attacker who has the adapters. Gradient canaries are made-up gradients "
        "in another run with the same settings, for an attacker who sees every update: that row is what the others "
        f"could reach at best. Every epsilon of an audit is at: {'; '.join(named)}.",
        "",
    ]


def _epsilon(model: Mapping[str, Any]) -> str:
    return "–" if model["epsilon"] is None else format_epsilon(model["epsilon"])


def _most(model: Mapping[str, Any], side: str, n: str) -> str:
    return round_up(model["ceilings"][n], 3) if side == "members" and model["ceilings"] else "–"
