"""Attacks on a run while it trains: a Recorder's argument `attack=`. Sensitive."""

import copy
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset

from indpriv._checks import check_positive_int, check_row
from indpriv._facts import refused
from indpriv._files import read_json, write_json
from indpriv._reading import named
from indpriv._types import BoolArray, FloatArray, IntArray
from indpriv.attack_scores import AttackScores, CanaryEvidence, log_likelihood_ratio
from indpriv.errors import InputError
from indpriv.norm_log import run_files
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.writer import fingerprint
from indpriv.recording.norms.batches import Batch, call, precise_losses
from indpriv.recording.norms.norm_pass import AT_ONCE, FunctorchNorms, NormPass
from indpriv.recording.norms.shadow_model import ModelInTraining
from indpriv.recording.opacus.draws import Draw
from indpriv.recording.opacus.gradients import STABILISER
from indpriv.recording.opacus.run import OpacusRun
from indpriv.recording.random_states import kept_random_state
from indpriv.recording.training_data import Examples, TrainingData, length

_CHECKED = 16  # examples on which gradients are checked


@dataclass(frozen=True)
class AttackedRun:
    """A run that is about to train."""

    run: OpacusRun
    data: TrainingData
    train: Examples  # the same, as passes read it
    test: Examples | None
    norm_pass: NormPass
    clips_at_levels: bool  # examples have clip thresholds of their own

    def check_one_rank_of_poisson(self, attack: str) -> None:
        """Raise InputError unless one rank trains on Poisson batches."""
        if type(self.run.batch_sampler) is not UniformWithReplacementSampler:
            values = {"attack": attack, "sampler": self.run.sampler_class}
            raise refused("refusal.attached", "poisson_only", **values)


class RunAttack:
    """An attack on one run.

    Attributes:
        file_name: of its scores, in the run directory.
        method: its name there.
        n_canaries: number of canaries that the run's sampler draws besides the examples.
        coins: a hash of what all ranks must have chosen alike.
    """

    file_name: str
    method: str
    n_canaries = 0
    coins = ""

    def start(self, attacked: AttackedRun) -> Self:
        """A copy that watches a run; InputError if the attack does not fit it."""
        started = copy.copy(self)
        started._begin(attacked)
        return started

    def _begin(self, attacked: AttackedRun) -> None:
        raise NotImplementedError

    def before_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Called when the clipped gradients of a step are summed up."""

    def after_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Called when p.grad holds the noisy sum, before it is divided by the batch size."""

    def check_resumes(self, run_dir: Path) -> None:
        """Raise InputError unless the attack can go on where the run in run_dir is resumed."""
        raise refused("refusal.arguments", "attack_resumed")

    def keep(self, run_dir: Path) -> None:
        """Write what a resumed run needs."""

    def scores(self, model: nn.Module) -> AttackScores:
        """Scores at the end; model: the final model in eval mode."""
        raise NotImplementedError


@dataclass
class GradientCanaries(RunAttack):
    """Insert gradient canaries, made-up gradients, into any Opacus run to audit it in one run.

    Each canary is a gradient along one coordinate of its own, so canaries are orthogonal and their
    scores are independent. A fair coin makes it a member; the run's own sampler draws it as it
    draws examples; if it is a member, its gradient is added to the sum of clipped gradients, before
    the noise. At the end its score is the log-likelihood ratio of all noisy updates along its
    coordinate.

    Canaries are no data: the guarantee of the examples stays. The noise on a canary's coordinate is
    perturbed by at most max_grad_norm in the steps that drew it. They do not test clipping.

    Args:
        count: number of canaries, at most the number of trainable parameters.
        lengths: norms of their gradients over max_grad_norm, in (0, 1], taken in turn. Canaries of
            full length test the worst case, shorter ones the epsilon of an example of that norm.
        seed: makes coordinates and coins reproducible, for tests.

    >>> from indpriv.recording import GradientCanaries, Recorder
    >>> recorder = Recorder("runs/mine", dataset=train_set, loss_fn=loss_fn,  # doctest: +SKIP
    ...                     attack=GradientCanaries(1000))
    """

    file_name = run_files.GRADIENT_CANARIES
    method = "likelihood ratio of gradient canaries"
    count: int
    lengths: Sequence[float] = (1.0,)
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("count", self.count)
        check_row("lengths", self.lengths, "(0, 1]")
        self.n_canaries = self.count

    def _begin(self, attacked: AttackedRun) -> None:
        """Choose coordinates, counted through all parameters, and flip the coins."""
        attacked.check_one_rank_of_poisson("gradient canaries")
        # Opacus adds grad_sample.
        parameters: list[Any] = [p for p in attacked.run.module.parameters() if p.requires_grad]
        total = sum(p.numel() for p in parameters)
        if self.count > total:
            raise refused("refusal.attacks", "too_many", count=self.count, n=total)
        rng = np.random.default_rng(self.seed)
        coordinates = rng.choice(total, self.count, replace=False)
        self._canaries = CanaryEvidence(self.count, self.lengths, rng)
        self._before = np.zeros(self.count)
        # Where they live: a parameter, its canaries, and an index of their coordinates in it.
        self._places: list[tuple[Any, IntArray, tuple[Tensor, ...]]] = []
        ends = np.cumsum([p.numel() for p in parameters])
        owner = np.searchsorted(ends, coordinates, side="right")
        for k, p in enumerate(parameters):
            numbers = np.flatnonzero(owner == k)
            positions = torch.as_tensor(coordinates[numbers] - ends[k] + p.numel())
            index = torch.unravel_index(positions.to(p.device), p.shape)
            self._places += [(p, numbers, index)] if len(numbers) else []

    def before_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Add the gradients of the members that were drawn to the clipped sum."""
        added = np.zeros(self.count)
        added[draw.canaries] = setting.max_grad_norm
        added *= self._canaries.lengths * self._canaries.member
        self._before = self._read("summed_grad")
        for p, canaries, index in self._places:
            p.summed_grad[index] += torch.as_tensor(added[canaries]).to(p.summed_grad)

    def _read(self, name: str) -> FloatArray:
        """Values (n_canaries,) of the parameters' summed_grad or grad at the coordinates."""
        seen = np.zeros(self.count)
        for p, canaries, index in self._places:
            seen[canaries] = getattr(p, name).detach()[index].double().cpu().numpy()
        return seen

    def after_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Score what the update says along each coordinate."""
        self._canaries.observe(self._read("grad") - self._before, vars(setting))

    def scores(self, model: nn.Module) -> AttackScores:
        """The evidence for each canary's membership; groups are lengths."""
        return self._canaries.scores(self.method)


@dataclass
class WhiteBox(RunAttack):
    """Attack some training examples, and as many test examples, through every noisy update.

    This is the attacker of the analysis, who knows all other examples. At each step it computes
    what every example of the batch should have contributed, from the model, the data and
    max_grad_norm alone; it subtracts this from the noisy sum, except for the contribution of the
    example that it attacks, and projects the rest on that example's gradient. The sum over steps of
    the log-likelihood ratios is the strongest test there is, so its distribution is what individual
    epsilons claim to know. Each step takes the gradient of every example of its batch and of every
    attacked one.

    Args:
        examples: number of random training examples, and of test examples, or all there are.
        seed: makes the choice reproducible; None draws it from the operating system.
    """

    file_name = run_files.WHITE_BOX
    method = "likelihood ratio of every noisy update"
    examples: int = 1000
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("examples", self.examples)

    def _begin(self, attacked: AttackedRun) -> None:
        """Choose positions in the training set and in the test set."""
        attacked.check_one_rank_of_poisson("white-box attacks")
        if attacked.clips_at_levels:
            raise refused("refusal.attacks", "at_levels")
        if attacked.norm_pass.caveats:
            raise refused("refusal.attacks", "random", why=attacked.norm_pass.caveats[0])
        rng, sets = np.random.default_rng(self.seed), (attacked.train, attacked.test or ())
        self._members, self._others = (
            np.sort(rng.choice(len(each), min(self.examples, len(each)), replace=False))
            for each in sets
        )
        self._attacked = attacked
        of_run = attacked.run.module, attacked.data.loss_fn
        few = next(attacked.train.batches(_CHECKED))
        NormPass(*of_run, *few, backend="functorch").close()  # whose gradients can be taken
        self._passes = FunctorchNorms(ModelInTraining(*of_run))
        self._evidence = np.zeros(len(self._members) + len(self._others))

    def after_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Score what the update says about each attacked example."""
        attacked, passes, clip = self._attacked, self._passes, setting.max_grad_norm
        trained = [p for p in attacked.run.module.parameters() if p.requires_grad]
        # The noisy sum less what the examples of the batch should have added.
        noisy = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        left = torch.cat([grad.detach().flatten() for grad in noisy])
        size, start = max(1, AT_ONCE // len(left)), 0
        drawn = np.pad(np.isin(self._members, draw.positions), (0, len(self._others)))
        with kept_random_state():
            passes.update()
            for rows in attacked.train.batches(size, draw.positions):
                if len(batch := Batch(*rows)):
                    _, factors = _clipped(gradients := passes.flat_gradients(batch), clip)
                    left = left - torch.as_tensor(factors).to(left) @ gradients
            others = attacked.test.batches(size, self._others) if attacked.test else ()
            for rows in chain(attacked.train.batches(size, self._members), others):
                gradients = passes.flat_gradients(Batch(*rows))
                norms, factors = _clipped(gradients, clip)
                part = slice(start, start := start + len(norms))
                products = (gradients @ left).double().cpu().numpy()
                scale = np.where(norms > 0, norms, 1.0) * clip * setting.noise_multiplier
                relative = norms * factors / clip
                self._evidence[part] += log_likelihood_ratio(
                    products / scale + drawn[part] * relative / setting.noise_multiplier,
                    relative_norm=relative,
                    noise_multiplier=setting.noise_multiplier,
                    sample_rate=setting.sample_rate,
                )

    def scores(self, model: nn.Module) -> AttackScores:
        """The evidence on every attacked example, training examples first."""
        ids = np.asarray(self._attacked.data.ids)[self._members]
        others = self._others if np.issubdtype(ids.dtype, np.number) else self._others.astype(str)
        return AttackScores(
            scores=self._evidence.copy(),
            member=np.arange(len(self._evidence)) < len(self._members),
            method=self.method,
            example_ids=np.concatenate([ids, others]),
            adversary="full",
        )


def _clipped(gradients: Tensor, clip: float) -> tuple[FloatArray, FloatArray]:
    """Norms (n,) of gradients (n, parameters), and what clipping multiplies them by."""
    norms = torch.linalg.vector_norm(gradients.double(), dim=1).cpu().numpy()
    return norms, np.minimum(1.0, clip / (norms + STABILISER))


def draw_canaries(
    rng: np.random.Generator, n_examples: int, count: int, n_classes: int
) -> tuple[IntArray, BoolArray, IntArray]:
    """Random positions in ascending order, whether each is trained on, and shifts of its class.

    Coins are fair and independent, and no shift gives the right class.
    """
    positions = np.sort(rng.choice(n_examples, count, replace=False))
    return positions, rng.integers(0, 2, count) == 1, rng.integers(1, n_classes, count)


class InsertedCanaries(RunAttack):
    """Insert items of your own, each only if a fair coin says so; used as `MislabelledCanaries`.

    For a language model they are texts that nothing else predicts, such as a sentence with a random
    number (Carlini et al. 2019, arXiv:1802.08232): `indpriv.attacks.language_scores` attacks them
    with the same coins, and `indpriv.attacks.extraction` tells whether they come out. For a small
    model on numbers, `indpriv.recording.crafted_canaries` makes them.
    """

    file_name = run_files.CANARIES
    method = "final loss of inserted canaries"

    def __init__(
        self,
        dataset: Dataset[Any],
        canaries: Any,
        *,
        seed: int | None = None,
        resumes: str | Path | None = None,
    ) -> None:
        """Flip the coins.

        Args:
            dataset: map-style.
            canaries: items as of the dataset, in a list or a map-style data set; one at least.
            seed: makes the coins reproducible; None draws them from the operating system.
            resumes: the directory of a run that goes on, whose coins are taken.
        """
        count = check_positive_int("the number of canaries", length(canaries, "canaries"))
        self._insert(canaries, self._generator(seed, resumes).random(count) < 0.5, dataset)

    def _generator(self, seed: int | None, resumes: str | Path | None) -> np.random.Generator:
        self._seed = secrets.randbits(63) if seed is None else int(seed)
        if resumes is not None:
            self._seed = int(_coins_of(Path(resumes))["seed"])
        return np.random.default_rng(self._seed)

    def check_resumes(self, run_dir: Path) -> None:
        """Raise InputError unless the coins are those of the run."""
        if _coins_of(run_dir) != {"seed": self._seed, "coins": self.coins}:
            raise refused("refusal.arguments", "other_coins", run_dir=run_dir)

    def keep(self, run_dir: Path) -> None:
        """Write the seed of the coins, and a hash of them: more canaries begin with the same."""
        write_json(run_dir / run_files.COINS, {"seed": self._seed, "coins": self.coins})

    def _insert(self, canaries: Any, member: BoolArray, dataset: Dataset[Any]) -> None:
        inserted = Subset(canaries, np.flatnonzero(member).tolist())
        self.member, self._canaries, self.coins = member, canaries, fingerprint(member)
        self.train_set: Dataset[Any] = ConcatDataset([dataset, inserted])
        self._n = length(dataset, "dataset") + len(member)
        self._loader: PlannedLoader | None = None

    def loader(self, batch_size: int, **options: Any) -> DataLoader[Any]:
        """A loader of train_set, for make_private; options as of a DataLoader.

        Its number of batches is that of all examples, so that neither the sampling rate nor the
        divisor of gradients tells how many canaries were left out.
        """
        self._loader = PlannedLoader(
            self.train_set, n_planned=self._n, batch_size=batch_size, **options
        )
        return self._loader

    def _begin(self, attacked: AttackedRun) -> None:
        """Check that the run trains on the canaries, at a rate that no coin decided.

        Averages are over the planned number of examples.
        """
        if attacked.data.dataset is not self.train_set:
            raise refused("refusal.attacks", "train_set")
        run = attacked.run
        planned = None if self._loader is None else 1 / len(self._loader)
        if planned is None or not math.isclose(run.sample_rate, planned, rel_tol=1e-9):
            raise refused("refusal.attacks", "sample_rate")
        ranks = getattr(run.optimizer, "world_size", 1)
        run.optimizer.expected_batch_size = int(self._n * planned) / ranks
        self._loss_fn = attacked.data.loss_fn
        device = next(run.module.parameters()).device
        collate, unpack = run.loader.collate_fn, attacked.data.unpack
        self._examples = Examples(self._canaries, collate, device, unpack)

    def scores(self, model: nn.Module) -> AttackScores:
        """Minus the final loss of every canary."""
        losses = [
            precise_losses(self._loss_fn, call(model, inputs), targets)
            for inputs, targets in self._examples.batches(1024)
        ]
        return AttackScores(
            scores=-torch.cat(losses).cpu().numpy(),
            member=self.member.copy(),
            method=self.method,
            fair_coins=True,
        )


class MislabelledCanaries(InsertedCanaries):
    """Mislabel some examples of a data set, and keep each in it only if a fair coin says so.

    After Steinke, Nasr and Jagielski 2023 (arXiv:2305.08846). They cost some accuracy.

    Make the loader with `loader`, which fixes the sampling rate from all examples, so that only
    sums of gradients depend on the coins. Pass this object to the Recorder of the run:

    >>> from indpriv.recording import MislabelledCanaries, Recorder
    >>> canaries = MislabelledCanaries(data, 1000, n_classes=10)               # doctest: +SKIP
    >>> loader = canaries.loader(batch_size=256)                               # doctest: +SKIP
    >>> recorder = Recorder("runs/mine", dataset=canaries.train_set,           # doctest: +SKIP
    ...                     loss_fn=loss_fn, attack=canaries)

    Attributes:
        train_set: what to train on: all examples but the canaries that were left out.
        member: (count,) the coins, whether each canary is in it.
    """

    method = "final loss of mislabelled canaries"

    def __init__(
        self,
        dataset: Dataset[Any],
        count: int,
        *,
        n_classes: int,
        seed: int | None = None,
        resumes: str | Path | None = None,
    ) -> None:
        """Choose canaries, wrong labels and coins.

        Args:
            dataset: map-style, of (inputs, class).
            count: number of canaries.
            n_classes: at least 2; classes are 0, 1, ..., n_classes - 1.
            seed: makes the choices reproducible; None draws them from the operating system.
            resumes: the directory of a run that goes on, whose choices are taken.

        Raises:
            InputError: more canaries than examples, or one class.
        """
        n = length(dataset, "dataset")
        check_positive_int("count", count)
        check_positive_int("n_classes", n_classes, minimum=2)
        if count > n:
            raise InputError(f"{count} canaries are more than the {n} examples; insert fewer")
        rng = self._generator(seed, resumes)
        positions, member, shifts = draw_canaries(rng, n, count, n_classes)
        items = zip(map(dataset.__getitem__, positions.tolist()), shifts.tolist(), strict=True)
        canaries = [(inputs, (target + shift) % n_classes) for (inputs, target), shift in items]
        others = np.setdiff1d(np.arange(n), positions)
        self._insert(canaries, member, Subset(dataset, others.tolist()))


def _coins_of(run_dir: Path) -> dict[str, Any]:
    if not (path := run_dir / run_files.COINS).is_file():
        raise refused("refusal.arguments", "no_coins", run_dir=run_dir)
    with named(path):
        kept = read_json(path)
        return {"seed": int(kept["seed"]), "coins": str(kept["coins"])}


class PlannedLoader(DataLoader[Any]):
    """A DataLoader with the number of batches of n_planned examples, not of those that it has.

    Opacus samples at one over the number of batches of the loader that make_private is given.
    """

    def __init__(self, dataset: Dataset[Any], *, n_planned: int, batch_size: int, **options: Any):
        super().__init__(dataset, batch_size=batch_size, **options)
        self._planned = math.ceil(n_planned / batch_size)

    def __len__(self) -> int:
        return self._planned
