"""The assumptions of an account, and Check: one of them compared with what a run recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from indpriv._plain import Limits

PASSED, FAILED, NOT_CHECKED = "passed", "failed", "not checked"
# What fails with a check: the worst-case epsilon too, individual epsilons only, or neither (how
# files are stored).
WORST_CASE, INDIVIDUAL, FILES = "worst_case", "individual", "files"
SEEDED = (
    "the run was seeded (reproducible: no privacy): anyone with the seed can regenerate noise and "
    "sampling"
)
LARGEST_NORM = (
    "the noise of a step is scaled by the largest norm in its batch (no privacy): anyone who sees "
    "the update sees that norm, in the size of the noise"
)


@dataclass(frozen=True)
class Check:
    """One assumption, compared with what the run recorded.

    Attributes:
        key: names the assumption; never changes. A run of several sessions has several checks with
            one key.
        title: shown to readers in place of the key.
        status: "passed", "failed" or "not checked".
        detail: what was found.
        bears_on: "worst_case" if the guarantee rests on it, "individual" if only individual
            epsilons do, else "files".
    """

    key: str
    title: str = field(metadata={"json": "name"})
    status: Annotated[str, Limits(texts=(PASSED, FAILED, NOT_CHECKED))]
    detail: str
    bears_on: Annotated[str, Limits(texts=(WORST_CASE, INDIVIDUAL, FILES))]


@dataclass(frozen=True)
class Assumption:
    """Something that an account assumes of a run and that a check can confirm or refute.

    Attributes:
        key, title, bears_on: see Check.
        holds: what a passed check has found. Markdown, as all three are.
        failure, advice: what it means if the check fails, and what to do then.
    """

    key: str
    title: str
    bears_on: str = WORST_CASE
    holds: str = field(kw_only=True)
    failure: str = field(kw_only=True)
    advice: str = field(kw_only=True)

    def passed(self, detail: str) -> Check:
        """It holds."""
        return self.check(PASSED, detail)

    def failed(self, detail: str) -> Check:
        """It does not hold."""
        return self.check(FAILED, detail)

    def not_checked(self, detail: str) -> Check:
        """What the run recorded neither confirms nor refutes it."""
        return self.check(NOT_CHECKED, detail)

    def check(self, status: str, detail: str) -> Check:
        """A check with this status."""
        return Check(self.key, self.title, status, detail, self.bears_on)


HASH_CHAIN = Assumption(
    "journal",
    "journal",
    holds="Every line of the journal continues the chain of hashes, from the header on.",
    failure="The journal was changed, cut or mixed with another one after it was written. Nothing "
    "in it can be trusted.",
    advice="Restore `journal.jsonl` from a copy. If you edited `run.json` only, that is no "
    "failure: the journal does not contain it.",
)
RECORDS = Assumption(
    "records",
    "records",
    INDIVIDUAL,
    holds="Every file that the journal names is there, with the hash it had, and with ids and "
    "labels in one order.",
    failure="A record was damaged, replaced or lost; its name and the fault are shown.",
    advice="Restore the file from a copy, or audit with `--unreadable worst_case`: the steps that "
    "it governs then count at the clipping norm.",
)
COVERAGE = Assumption(
    "coverage",
    "coverage",
    INDIVIDUAL,
    holds="How many steps have a record of all examples, and what the passes cost.",
    failure="It never fails. “Not checked” means that norms of other steps are assumed.",
    advice="Record every step, clip individually, or read the "
    "[fidelity](../explanation/exact-or-estimate.md) of the estimate.",
)
DECLARED_SETTINGS = Assumption(
    "declared_settings",
    "run.json",
    holds="The step settings in `run.json` are those that the optimizer used.",
    failure="`run.json` states something else than what was done. The account uses the optimizer's "
    "own values.",
    advice="Correct `run.json`, and find out why the training script used other settings.",
)
PERMISSIONS = Assumption(
    "permissions",
    "permissions",
    FILES,
    holds="Files with values of single examples can be read by their owner only.",
    failure="Other users of the machine can read individual norms or epsilons.",
    advice="`chmod -R go= RUN`.",
)
CLOSED = Assumption(
    "closed",
    "log closed",
    holds="The recorder saw the end of the run.",
    failure="The run crashed or was interrupted, or the process that wrote the log was killed: "
    "later steps may be missing.",
    advice="Resume it with `resume_at=`, or accept an estimate of the steps that were logged.",
)
NO_VOIDED_STEPS = Assumption(
    "no_voided_steps",
    "no voided steps",
    holds="The account covers every step that was run.",
    failure="The run was resumed from an earlier checkpoint; the steps after it were run twice, "
    "and the account holds the second time only.",
    advice="Make sure that no checkpoint and no output of the voided steps was seen by others. "
    "Next time save `recorder.state_dict()` with every checkpoint.",
)
RANDOM_NUMBERS = Assumption(
    "random_numbers",
    "random numbers",
    holds="No generator was set back while training, and no resumed session repeated the random "
    "state of an earlier one.",
    failure="The same noise was used twice: the difference of two updates shows gradients without "
    "noise.",
    advice="Train again. Seed only before training (`torch.seed()`), each session differently, "
    "and give everything else its own `torch.Generator`.",
)
TRAINING_WATCHED = Assumption(
    "training_watched",
    "training",
    holds="A recorder watched the training. Shown only for replayed, converted and federated "
    "runs, where it is “not checked”.",
    failure="It never fails; nothing confirms the settings of such a run.",
    advice="Attach a `Recorder` to the next run.",
)
SAMPLER = Assumption(
    "sampler",
    "sampler",
    holds="Opacus's Poisson sampler drew every batch.",
    failure="Batches were shuffled, weighted or drawn otherwise. The analysis does not cover that.",
    advice="`make_private(poisson_sampling=True)`, which is the default, and no sampler of your "
    "own.",
)
SEEDS = Assumption(
    "seeds",
    "seeds",
    holds="Noise and batches do not come from a generator whose seed can be guessed. Shown only "
    "where they do.",
    failure="It is “not checked”: anyone who guesses the seed can regenerate noise and batches, "
    "and then no epsilon holds.",
    advice="`torch.seed()` before training; `secure_mode=True` against attackers who search "
    "seeds; `seeded=True` if you want a reproducible run without privacy.",
)
PARAMETERS = Assumption(
    "parameters",
    "parameters",
    holds="Nothing but the optimizer changed the parameters. Shown only where something did.",
    failure="It is “not checked”: projecting or loading parameters does no harm, but gradients "
    "that reach them this way were neither clipped nor noised.",
    advice="Look for updates outside the optimizer: weight averaging, manual `param.data` edits, "
    "a second optimizer.",
)
RANKS = Assumption(
    "ranks",
    "ranks",
    holds="All ranks agreed on settings and shards before each step, and their sampling seeds "
    "differed.",
    failure="It never fails in a log: ranks that differ stop the run.",
    advice="See [several GPUs](../how-to/several-gpus.md).",
)
BATCH_FOR_EVERY_STEP = Assumption(
    "batch_for_every_step",
    "a batch for every step",
    holds="Each step used one batch of its own from the attached loader, and each drawn batch "
    "became a step.",
    failure="Batches were skipped, merged, chosen among or taken from another loader. They are "
    "then no Poisson samples.",
    advice="Draw every batch from the attached loader and step on each, empty ones included. Use "
    "`BatchMemoryManager` in place of gradient accumulation; larger batches or fewer ranks if a "
    "rank dropped empty ones.",
)
WHOLE_BATCHES = Assumption(
    "whole_batches",
    "whole batches",
    holds="No epoch ended in the middle of a batch.",
    failure="A `break` inside `BatchMemoryManager` left gradients behind, which entered the next "
    "step: an example can count twice.",
    advice="Leave the loop only where a logical batch is complete.",
)
CLIPPING = Assumption(
    "clipping",
    "clipping",
    holds="Every gradient was clipped at no more than the `max_grad_norm` that the noise of its "
    "step was made for.",
    failure="Gradients were longer than the noise covers. Not even the worst case holds.",
    advice="Change the clipping norm only between steps. If ghost mode clipped by norms that are "
    "too small, train in hooks mode to find the layer. If long float32 sums fall short, accounts "
    "count twice the measured share as less noise; a GPU, ghost mode or float64 avoids that.",
)
CLIPPING_PRECISION = Assumption(
    "clipping_precision",
    "clipping, precision",
    holds="Shown only where Opacus clipped by norms in half precision.",
    failure="It never fails: accounts count the stated share as less noise.",
    advice="Clip in float32, which avoids it.",
)
PRIVATE_CLIPPING_NORM = Assumption(
    "private_clipping_norm",
    "private clipping norm",
    holds="Shown only where the clipping norm is a private release, such as the median of the "
    "norms at the start. All steps were clipped at one norm, which epsilons count once.",
    failure="Sessions were clipped at different norms: each is a release, and one is counted.",
    advice="Resume a run at the clipping norm that it was begun with. “Not checked” means that the "
    "norm moved within a session: by a law that is public, or nothing is proven.",
)
INDIVIDUAL_CLIPPING = Assumption(
    "individual_clipping",
    "individual clipping",
    INDIVIDUAL,
    holds="Every gradient was clipped at the recorded level of its own example.",
    failure="The account's levels are not what training clipped at.",
    advice="Use one recorder and one optimizer, in float32, and do not change `max_grad_norm` "
    "while training.",
)
PRIVACY_FILTER = Assumption(
    "privacy_filter",
    "privacy filter",
    holds="Every gradient was clipped at what the filter had charged its example for.",
    failure="The cap of the filter is not claimed.",
    advice="The same as for individual clipping.",
)
NOISE = Assumption(
    "noise",
    "noise",
    holds="The noise of every step was measured as it was added: its variance in all parameters "
    "and in each, its correlation with the noise of the previous and of the first step and with "
    "the sum of the gradients, and its fourth power. A sound run fails with a chance of about one "
    "in 10⁸ for each parameter tensor; noise of half the size fails after some hundred values.",
    failure="The updates hold less noise than the account assumes, or noise that can be "
    "subtracted. Not even the worst case holds.",
    advice="Look for a changed `add_noise`, a parameter that gets no noise, and seeds that are "
    "set while training. “Not checked” means that the noise could not be measured, as in half "
    "precision.",
)
BATCH_SIZES = Assumption(
    "batch_sizes",
    "batch sizes",
    holds="The number of drawn examples fits Poisson sampling. A sound run fails with a chance "
    "of one in a million.",
    failure="The sampling rate is not the stated one.",
    advice="Look for filters in the loader or in the collate function, and for a sampler of your "
    "own.",
)
PARTICIPATION = Assumption(
    "participation",
    "participation of each example",
    holds="How often each example was drawn, and how unevenly, fits Poisson sampling. A sound "
    "run fails with a chance of one in a million.",
    failure="Some examples were preferred, or draws were too even, as when batches are shuffled "
    "behind a Poisson sampler's name.",
    advice="The same as for batch sizes.",
)
TOOK_PART = Assumption(
    "took_part",
    "who took part",
    holds="The batch norms in the log name the examples that the recorder counted at each step. "
    "Accounts with known participation (`--participation known`) rest on this.",
    failure="The log does not say who took part in which step, and neither its batch norms nor a "
    "guarantee can be trusted.",
    advice="Record the run again. If it fails again, report it: it is a fault of the recorder.",
)
OPACUS_ACCOUNTANT = Assumption(
    "opacus_accountant",
    "Opacus's accountant",
    holds="Opacus's accountant counted the same steps and settings.",
    failure="Opacus's own epsilon is wrong, or steps were taken before recording began, which no "
    "account here covers.",
    advice="Attach before the first step. A second `attach_step_hook` replaces the accountant's: "
    "keep the one of `make_private`.",
)
# Larger norms in training mean other data or another loss. A few that are barely larger mean that
# arithmetic differed, as where two inputs of a max-pool are almost equal.
NORM_PASS = Assumption(
    "norm_pass",
    "norm pass",
    INDIVIDUAL,
    holds="The recorded norms were compared with autograd, one example at a time, and nothing "
    "about them is in doubt.",
    failure="The forward pass is random (dropout), or another caveat is named: the norms are of "
    "another draw than training's.",
    advice="Record batch norms, which are of training's own draw, and account for them with known "
    "participation: exact at no cost. Or turn dropout off, or accept an estimate.",
)
NORM_PRECISION = Assumption(
    "norm_precision",
    "norm pass, precision",
    INDIVIDUAL,
    holds="Shown only where a few norms were slightly larger in training than recorded.",
    failure="Arithmetic differed between the norm pass and training, by more than the rounding "
    "errors allowed for.",
    advice="Usually harmless, and yet an estimate. Float64, or the same batch sizes and device, "
    "avoid it.",
)
NORMS_IN_TRAINING = Assumption(
    "norms_in_training",
    "norms in training",
    holds="The norms that training clipped are no larger than the recorded ones.",
    failure="The recorder's data, loss, mode or precision are not those of training: recorded "
    "norms, and individual epsilons, are too small.",
    advice="Pass the loss that training uses, with its weights and penalties; the same data, in "
    "the same order and without other transforms; construct the recorder under the same autocast. "
    "“Not checked” names larger norms that were clipped anyway: augmentation does no harm, mixing "
    "of examples does.",
)
# As the reference page lists them.
ASSUMPTIONS = {
    "Files of the run": (HASH_CHAIN, RECORDS, COVERAGE, DECLARED_SETTINGS, PERMISSIONS),
    "The run as a whole": (
        CLOSED, NO_VOIDED_STEPS, RANDOM_NUMBERS, TRAINING_WATCHED, PRIVATE_CLIPPING_NORM,
    ),
    "Each recording session": (
        SAMPLER, SEEDS, PARAMETERS, RANKS, BATCH_FOR_EVERY_STEP, WHOLE_BATCHES, CLIPPING,
        CLIPPING_PRECISION, INDIVIDUAL_CLIPPING, PRIVACY_FILTER, NOISE, BATCH_SIZES, PARTICIPATION,
        TOOK_PART, OPACUS_ACCOUNTANT,
    ),
    "Norms": (NORM_PASS, NORM_PRECISION, NORMS_IN_TRAINING),
}  # fmt: skip
