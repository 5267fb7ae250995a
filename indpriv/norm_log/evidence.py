"""What a run's counts prove about the assumptions of its account, and which assumption each failure breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy import stats

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
# Chance that a sound run fails one of the sampling tests; small, since a failure costs the claim "exact".
FALSE_ALARM = 1e-6
_RECORDED_LEVEL = (
    "the recorded level of their example, which the account takes for its contribution"
)
_CHARGED_LEVEL = "what the privacy filter had charged their example for"
TRAINED_NORMS = "norms in training"
# Few norms that training clipped may be a trifle larger than recorded although all is alike: where a max-pool's inputs are equal
# to the last bits, either may pass the gradient on. Other examples, losses or modes are off by more, and in many norms.
NORM_PRECISION = "norm pass, precision"
_FEW = 1e-3  # of the norms compared
_TRIFLE = 1e-3  # of max_grad_norm
_LITTLE_EXCESS = 1e-4  # of max_grad_norm: less is lost where epsilons are rounded up to be shown
# Iterations over a loader that may end before their first step, besides one for each epoch: looks at the data, not choices.
_FEW_PEEKS = 2
SEEDED = "the run was seeded (reproducible: no privacy): anyone with the seed can regenerate noise and sampling"


@dataclass(frozen=True)
class Check:
    """One assumption held against the evidence: status is "passed", "failed" or "not checked"."""

    name: str
    status: str
    detail: str


def evidence_checks(
    sessions: Sequence[Mapping[str, Any]],
    *,
    n_examples: int,
    closed: bool,
    voided_steps: int,
    individually_clipped: bool = False,
    filtered: bool = False,
) -> list[Check]:
    """Hold the counts that a Recorder took against what its account assumes.

    Args:
        sessions: the last counts of every recording session (see recording.tally.Tally).
        n_examples: of the log.
        closed: the log was closed by its recorder.
        voided_steps: steps that were run and then declared void on resuming.
        individually_clipped: the log says that training clipped each example at its recorded level.
        filtered: a privacy filter charged each example before each step.
    """
    converted = next((evidence for evidence in sessions if "converted" in evidence), None)
    if converted is not None:
        return [_check_closed(closed), *_conversion_checks(n_examples, converted)]
    replayed = next((evidence for evidence in sessions if "replayed" in evidence), None)
    if replayed is not None:
        return [_check_closed(closed), *_replay_checks(replayed)]
    checks = [
        _check_closed(closed),
        _check_voided(voided_steps, resumed=len(sessions) > 1),
        *_check_sessions(sessions),
    ]
    for evidence in sessions:
        checks += [
            _check_sampler(evidence),
            *(
                [_check_seeds()]
                if evidence.get("guessable_seed") and not evidence["seeded"]
                else []
            ),
            *([_check_changed(evidence)] if evidence.get("changed_outside") else []),
            *([_check_repeated(evidence)] if evidence.get("repeated_draws") else []),
            *([_check_ranks(evidence)] if evidence.get("ranks", 1) > 1 else []),
            _check_steps(evidence),
            _check_pieces(evidence),
            _check_clipping(evidence),
            *([_check_clip_rounding(evidence)] if evidence.get("clip_rounding") else []),
            *(
                [_check_at_levels("individual clipping", evidence, _RECORDED_LEVEL)]
                if individually_clipped
                else []
            ),
            *([_check_at_levels("privacy filter", evidence, _CHARGED_LEVEL)] if filtered else []),
            _check_total_participation(n_examples, evidence),
            _check_each_participation(n_examples, evidence),
            _check_trained_norms(evidence),
            _check_accountant(evidence),
        ]
    return checks


def _check_closed(closed: bool) -> Check:
    if closed:
        return Check("log closed", PASSED, "its writer saw the end of the run")
    return Check(
        "log closed",
        FAILED,
        "the log was not closed (the run crashed or was interrupted): it proves its steps, and any later step is missing",
    )


def _check_voided(voided_steps: int, *, resumed: bool) -> Check:
    name = "no voided steps"
    if not voided_steps and resumed:
        return Check(
            name,
            PASSED,
            "every step that was logged is in the account; a process that was killed may have run up to 256 more, which are in "
            "none, so that nobody may have seen a checkpoint of those (Recorder.state_dict() logs all steps of its checkpoint)",
        )
    if not voided_steps:
        return Check(name, PASSED, "every step that was run is in the account")
    return Check(
        name,
        FAILED,
        f"{voided_steps} steps were run and declared void on resuming: they are in no account, and whoever saw their "
        "checkpoints saw more than it covers",
    )


def _check_sessions(sessions: Sequence[Mapping[str, Any]]) -> list[Check]:
    """Whether sessions of a run began with random numbers of their own; logs written before that was kept lack it."""
    first = [evidence["first_draw"] for evidence in sessions if evidence.get("first_draw")]
    if len(set(first)) == len(first):
        return []
    again = (
        "a resumed session drew its first batch from the same random state as an earlier one (the same seed set before "
        "both?): its steps have the batches and the noise of that one again, and whoever compares their updates takes the "
        "noise off; seed each session otherwise: torch.seed()"
    )
    return [Check("random numbers", FAILED, again)]


def _check_sampler(evidence: Mapping[str, Any]) -> Check:
    name = f"sampler ({evidence['sampler_class']})"
    if evidence["sampler"] == "poisson":
        return Check(name, PASSED, "Opacus's Poisson sampler draws every batch")
    return Check(
        name,
        FAILED,
        f"batches come from {evidence['sampler_class']}, not from Poisson sampling, which the analysis assumes",
    )


def _check_seeds() -> Check:
    return Check(
        "seeds",
        NOT_CHECKED,
        "noise or batches come from a generator with a chosen seed, such as torch.manual_seed(0) gives, or torch's default one: "
        "whoever guesses it regenerates them, and no epsilon holds; call torch.seed() before training, or pass seeded=True",
    )


def _check_changed(evidence: Mapping[str, Any]) -> Check:
    return Check(
        "parameters",
        NOT_CHECKED,
        f"before {evidence['changed_outside']} of {evidence['steps']} steps something else than the optimizer had changed "
        "parameters: projecting or loading them is no harm, but a gradient of these data that reached them so was neither "
        "clipped nor noised, and no epsilon holds",
    )


def _check_repeated(evidence: Mapping[str, Any]) -> Check:
    return Check(
        "random numbers",
        FAILED,
        f"{evidence['repeated_draws']} times noise or a batch was drawn from a generator that an earlier draw had left in the "
        "same state (torch.manual_seed while training?): whoever compares two updates with the same noise takes it off; seed "
        "before training only, and give what else needs a seed a torch.Generator of its own",
    )


def _check_ranks(evidence: Mapping[str, Any]) -> Check:
    """Ranks that differed stopped the run before the step: what is in the log has passed."""
    return Check(
        "ranks",
        PASSED,
        f"{evidence['ranks']} ranks trained one model: before each step their settings and shards were alike, none of the "
        "examples was drawn by two, and their sampling seeds differed",
    )


def _check_steps(evidence: Mapping[str, Any]) -> Check:
    name = "a batch for every step"
    steps, draws = evidence["steps"], evidence["draws"]
    undrawn = max(evidence["undrawn_steps"], steps - draws)
    if undrawn:
        return Check(
            name,
            FAILED,
            f"{undrawn:,} of {steps:,} steps used no batch of their own from the attached loader",
        )
    if evidence["unstepped_draws"]:
        return Check(
            name,
            FAILED,
            f"{evidence['unstepped_draws']} of {draws:,} drawn batches never became a step (skipped empty batches or "
            "accumulated gradients); the account assumes one Poisson batch for each step",
        )
    if (peeks := evidence.get("peeks", 0)) > _FEW_PEEKS + evidence.get("passes", 0):
        return Check(
            name,
            FAILED,
            f"{peeks} times a batch was drawn and the loop over the loader left without a step: if it chooses batches by looking "
            "at them, they are not Poisson samples; step on every batch",
        )
    if dropped := evidence.get(
        "dropped_batches", 0
    ):  # logs written before this was counted lack it
        return Check(
            name,
            FAILED,
            f"the sampler of a rank left out {dropped} local batches that were empty: the batches of the ranks do not belong "
            "together; take larger batches or fewer ranks",
        )
    if evidence.get("unmatched_steps", 0):  # logs written before this was counted lack it
        return Check(
            name,
            FAILED,
            f"{evidence['unmatched_steps']} of {steps:,} steps clipped another number of gradients than their batch has "
            "examples: draw every batch from the attached loader and step once on each",
        )
    return Check(name, PASSED, f"{steps:,} steps, {draws:,} batches drawn")


def _check_pieces(evidence: Mapping[str, Any]) -> Check:
    name = "whole batches"
    if evidence["interrupted_batches"]:
        return Check(
            name,
            FAILED,
            f"{evidence['interrupted_batches']} times the loop left a batch in pieces (a break inside BatchMemoryManager): "
            "the next step took its gradients in, and an example can count twice",
        )
    return Check(name, PASSED, "no epoch ended inside a batch")


def _check_clipping(evidence: Mapping[str, Any]) -> Check:
    name = "clipping"
    gradients = evidence.get("gradients")  # logs written before this was counted lack it
    if gradients is None:
        return Check(name, NOT_CHECKED, "the log does not say how many gradients were clipped")
    if evidence["misclipped_gradients"]:
        return Check(
            name,
            FAILED,
            f"{evidence['misclipped_gradients']} of {gradients:,} gradients were clipped at another max_grad_norm than the "
            "noise of their step was made for: change it between steps only",
        )
    if underestimated := evidence.get(
        "underestimated_norms", 0
    ):  # logs written before this was counted lack it
        return Check(
            name,
            FAILED,
            f"ghost mode clipped {underestimated} of {evidence['compared_norms']} gradients by norms smaller than recorded, "
            "which leaves them above max_grad_norm: the recorder's loss is not training's, or Opacus takes wrong norms of a "
            "layer; train in hooks mode to find out which",
        )
    excess = evidence.get("clip_excess", 0.0)  # logs written before this was measured lack it
    if excess > _LITTLE_EXCESS:
        return Check(
            name,
            FAILED if excess > _TRIFLE else NOT_CHECKED,
            f"on this machine Opacus takes the norms of gradients as long as this model's {100 * excess:.2g} % too small, since "
            "float32 sums fall short, and leaves clipped ones longer than max_grad_norm by so much: epsilons, the worst case "
            "too, are too small by about as much; train on a GPU, in ghost mode, or in float64",
        )
    return Check(
        name,
        PASSED,
        f"{gradients:,} gradients, all clipped at no more than the max_grad_norm of their step",
    )


def _check_clip_rounding(evidence: Mapping[str, Any]) -> Check:
    return Check(
        "clipping, precision",
        NOT_CHECKED,
        "Opacus clipped by norms in half precision: rounding may leave a clipped gradient longer than max_grad_norm by up to "
        f"{100 * evidence['clip_rounding']:.2g} %, and epsilons, the worst case too, too small by about as much; take that much "
        "more noise, or clip in float32",
    )


def _check_at_levels(name: str, evidence: Mapping[str, Any], level: str) -> Check:
    """Whether every gradient was clipped at the threshold of its own example."""
    gradients, at_levels = evidence.get("gradients", 0), evidence.get("gradients_at_levels", 0)
    if at_levels != gradients or evidence.get("gradients") is None:
        return Check(
            name, FAILED, f"only {at_levels:,} of {gradients:,} gradients were clipped at {level}"
        )
    return Check(name, PASSED, f"{gradients:,} gradients, each clipped at {level}")


def _check_total_participation(n_examples: int, evidence: Mapping[str, Any]) -> Check:
    name = "batch sizes"
    if evidence["sampler"] != "poisson" or not evidence["draws"]:
        return Check(name, NOT_CHECKED, "only Poisson sampling has an expected number of examples")
    trials = n_examples * evidence["draws"]
    rate = evidence["expected_participations"] / trials
    seen = evidence["participations"]
    chance = 2 * float(
        min(stats.binom.cdf(seen, trials, rate), stats.binom.sf(seen - 1, trials, rate))
    )
    detail = f"{seen:,} examples drawn where {rate * trials:,.0f} are expected"
    if chance < FALSE_ALARM:
        return Check(
            name, FAILED, f"{detail}: a Poisson sampler does so with probability {chance:.1g}"
        )
    return Check(name, PASSED, detail)


def _check_each_participation(n_examples: int, evidence: Mapping[str, Any]) -> Check:
    name = "participation of each example"
    n, draws = n_examples, evidence["draws"]
    if evidence["sampler"] != "poisson" or not draws:
        return Check(name, NOT_CHECKED, "only Poisson sampling has an expected participation")
    rate = evidence["expected_participations"] / (n * draws)
    least, most = evidence["participations_min"], evidence["participations_max"]
    detail = (
        f"each example was drawn {least:,} to {most:,} times in {draws:,} draws at rate {rate:.4g}"
    )
    if (evenness := _chance_of_evenness(n, evidence)) < FALSE_ALARM:
        return Check(
            name,
            FAILED,
            f"{detail}: so evenly as independent coins do with probability at most {evenness:.1g} (shuffled batches?)",
        )
    low = n * float(stats.binom.cdf(least, draws, rate))
    high = n * float(stats.binom.sf(most - 1, draws, rate))
    if min(low, high) < FALSE_ALARM:
        return Check(name, FAILED, f"{detail}: not what Binomial({draws}, {rate:.4g}) gives")
    return Check(name, PASSED, detail)


def _chance_of_evenness(n_examples: int, evidence: Mapping[str, Any]) -> float:
    """An upper bound of the chance that independent coins give participations that are spread so little.

    Spread is the sum over examples of Y = (participations - expected)**2 >= 0, so that
    P(sum <= E[sum] - t) <= exp(-t**2 / (2 n E[Y**2])) (Maurer 2003, A bound on the deviation probability for sums of
    non-negative random variables, Theorem 2.1), and E[Y**2] <= variance + 3 variance**2 for a sum of coins.
    """
    variance = evidence.get(
        "participations_variance", 0.0
    )  # logs written before this was counted lack it
    if not variance:
        return 1.0
    missing = max(0.0, n_examples * variance - evidence["participations_spread"])
    return math.exp(-(missing**2) / (2 * n_examples * (variance + 3 * variance**2)))


def _check_trained_norms(evidence: Mapping[str, Any]) -> Check:
    name = TRAINED_NORMS
    compared, larger = evidence["compared_norms"], evidence["larger_norms"]
    if 0 < larger <= _FEW * compared and evidence["largest_excess"] <= _TRIFLE:
        return Check(
            NORM_PRECISION,
            FAILED,
            f"{larger:,} of {compared:,} gradient norms that training clipped were larger than recorded, by up to "
            f"{evidence['largest_excess']:.2g} of max_grad_norm: too few and too little for other data or another loss, "
            "but more than the arithmetic of either was taken to be off by",
        )
    if larger:
        return Check(
            name,
            FAILED,
            f"{larger:,} of {compared:,} gradient norms that training clipped were larger than recorded, by up to "
            f"{evidence['largest_excess']:.2g} of max_grad_norm: the recorder's data, loss, mode or precision are not "
            "training's",
        )
    clipped = evidence.get(
        "larger_clipped_norms", 0
    )  # logs written before this was counted lack it
    if clipped > _FEW * compared:
        return Check(
            name,
            NOT_CHECKED,
            f"{clipped:,} of {compared:,} gradient norms were larger in training than recorded, though clipped either way: training "
            "saw other inputs or another loss than the recorder. Augmentation changes nothing; where examples are mixed with "
            "each other (mixup, contrastive losses), one contributes to several gradients and no epsilon holds",
        )
    if not compared:
        return Check(name, NOT_CHECKED, "no norms from training could be held against a record")
    return Check(
        name,
        PASSED,
        f"{compared:,} gradient norms that training clipped, none larger than recorded",
    )


def _check_accountant(evidence: Mapping[str, Any]) -> Check:
    name = "Opacus's accountant"
    counted, steps = evidence["accountant_steps"], evidence["steps"]
    if counted is None:
        return Check(
            name,
            FAILED,
            "the optimizer's step hook does not lead to an Opacus accountant: if it replaced one, Opacus's own epsilon "
            "is too small",
        )
    if evidence["earlier_steps"]:
        return Check(
            name,
            FAILED,
            f"Opacus's accountant had counted {evidence['earlier_steps']} steps before recording began: they are in no "
            "account here",
        )
    if counted != steps or not evidence["accountant_settings_match"]:
        return Check(
            name,
            FAILED,
            f"Opacus's accountant counted {counted:,} steps where {steps:,} were taken, or at other settings",
        )
    return Check(name, PASSED, f"its history holds the same {steps:,} steps and settings")


def _conversion_checks(n_examples: int, evidence: Mapping[str, Any]) -> list[Check]:
    """Of a log that another trainer's norms were converted into: only its own counts of draws can be checked."""
    source = evidence["converted"]["source"]
    checks = [
        _declared_sampler(evidence["sampler"], "run.json"),
        Check(
            "Opacus's accountant", NOT_CHECKED, "there was none; settings are declared by run.json"
        ),
        Check(
            "training",
            NOT_CHECKED,
            f"nobody watched: that the norms in {source} are what training clipped",
        ),
    ]
    if "participations" in evidence:
        checks += [
            _check_total_participation(n_examples, evidence),
            _check_each_participation(n_examples, evidence),
        ]
    return checks


def _declared_sampler(sampler: str, source: str) -> Check:
    if sampler == "poisson":
        return Check("sampler (declared)", NOT_CHECKED, f"Poisson sampling is declared by {source}")
    return Check(
        "sampler (declared)", FAILED, f"batches were {sampler}, which the analysis does not cover"
    )


def _replay_checks(evidence: Mapping[str, Any]) -> list[Check]:
    """Of a log replayed from checkpoints: nobody watched the training, so next to nothing can be checked."""
    sources = evidence["replayed"]["sources"]
    settings = ", ".join(
        f"{name} by {source}"
        for name, source in sources.items()
        if name not in ("delta", "sampler")
    )
    counted = PASSED if evidence["replayed"]["accountant_counted_all"] else NOT_CHECKED
    unseen = "nobody watched: that each step used one batch, that clipping was flat, and of the norms replayed here"
    return [
        _declared_sampler(evidence["sampler"], sources["sampler"]),
        Check("Opacus's accountant", counted, f"settings: {settings}"),
        Check("training", NOT_CHECKED, unseen),
    ]
