"""The attacker of the analysis: sees every noisy update and knows all other examples. Sensitive.

At each step it computes what every example of the batch should have contributed, from the model,
the data and max_grad_norm alone; it subtracts this from the noisy sum, except for the contribution
of the example that it attacks, and projects the rest on that example's gradient. The sum over steps
of the log-likelihood ratios is the strongest test there is, so its distribution is what individual
epsilons claim to know.

<g_i, v> for all attacked examples i takes two backward passes: the gradient of the sum over i of
w_i loss_i, times v, is linear in w, and its derivative in w_i is <g_i, v>.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import starmap

import numpy as np
import torch
from torch import Tensor, nn

from indpriv._checks import check_positive_int
from indpriv._facts import refused
from indpriv._types import BoolArray, FloatArray
from indpriv.attack_scores import AttackScores, log_likelihood_ratio
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.run_files import WHITE_BOX
from indpriv.recording.norms.batches import Batch
from indpriv.recording.norms.shadow_model import ModelInTraining, make_shadow
from indpriv.recording.opacus.draws import Draw
from indpriv.recording.random_states import kept_random_state
from indpriv.recording.watch import AttackedRun

METHOD = "likelihood ratio of every noisy update"
_STABILISER = 1e-6  # Opacus's clip factor is max_grad_norm / (norm + 1e-6)


@dataclass(frozen=True)
class WhiteBox:
    """Attack some training examples, and as many test examples, through every noisy update.

    Each step costs about four passes over its batch and the attacked examples.

    Args:
        examples: number of random training examples, and of test examples, or all there are.
        seed: makes the choice reproducible; None draws it from the operating system.
    """

    examples: int = 1000
    seed: int | None = None

    def __post_init__(self) -> None:
        check_positive_int("examples", self.examples)

    def start(self, attacked: AttackedRun) -> WhiteBoxAttack:
        """Choose the examples."""
        attacked.check_one_rank_of_poisson("white-box attacks")
        if attacked.clips_at_levels:
            raise refused("refusal.attacks", "at_levels")
        if attacked.norm_pass.caveats:
            raise refused("refusal.attacks", "random", why=attacked.norm_pass.caveats[0])
        return WhiteBoxAttack(self, attacked)


class WhiteBoxAttack:
    """The evidence that the updates so far leave on each attacked example."""

    file_name = WHITE_BOX
    n_canaries = 0

    def __init__(self, asked: WhiteBox, attacked: AttackedRun) -> None:
        """Choose positions in the training set and in the test set."""
        rng, sets = np.random.default_rng(asked.seed), (attacked.train, attacked.test or ())
        self._members, self._others = (
            np.sort(rng.choice(len(each), min(asked.examples, len(each)), replace=False))
            for each in sets
        )
        self._attacked = attacked
        self._model = ModelInTraining(attacked.run.model, attacked.data.loss_fn)
        self._shadow = make_shadow(attacked.run.module)
        self._parameters = [p for p in self._shadow.parameters() if p.requires_grad]
        self._evidence = np.zeros(len(self._members) + len(self._others))

    def before_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Nothing: what the optimizer says it summed up is not trusted."""

    def after_noise(self, setting: StepSetting, draw: Draw) -> None:
        """Score what the update says about each attacked example."""
        self._model.update(self._shadow)
        with kept_random_state():
            unexplained = self._unexplained(setting.max_grad_norm, draw)
            drawn = np.isin(self._members, draw.positions)
            drawn = np.pad(drawn, (0, len(self._others)))  # no test example is ever drawn
            start = 0
            for batch in self._attacked_batches():
                part = slice(start, start := start + len(batch))
                self._evidence[part] += self._ratio(batch, unexplained, setting, drawn[part])

    def scores(self, model: nn.Module) -> AttackScores:
        """The evidence on every attacked example, training examples first."""
        ids = np.asarray(self._attacked.data.ids)[self._members]
        others = self._others if np.issubdtype(ids.dtype, np.number) else self._others.astype(str)
        return AttackScores(
            scores=self._evidence.copy(),
            member=np.arange(len(self._evidence)) < len(self._members),
            method=METHOD,
            example_ids=np.concatenate([ids, others]),
            adversary="full",
        )

    def _attacked_batches(self) -> Iterator[Batch]:
        attacked, size = self._attacked, self._attacked.norm_pass.batch_size
        yield from starmap(Batch, attacked.train.batches(size, self._members))
        if attacked.test is not None:
            yield from starmap(Batch, attacked.test.batches(size, self._others))

    def _norms(self, batch: Batch) -> FloatArray:
        """Gradient norms (n,) before clipping."""
        norm_pass = self._attacked.norm_pass
        norms, _ = norm_pass(batch.inputs, batch.targets)
        return norms.cpu().numpy() / (1 + norm_pass.slack)

    def _unexplained(self, max_grad_norm: float, draw: Draw) -> list[Tensor]:
        """The noisy sum less what the examples of the batch should have added."""
        trained = (p for p in self._attacked.run.module.parameters() if p.requires_grad)
        left = [torch.zeros_like(p) if p.grad is None else p.grad.detach().clone() for p in trained]
        size = self._attacked.norm_pass.batch_size
        for batch in starmap(Batch, self._attacked.train.batches(size, draw.positions)):
            if not len(batch):
                continue
            factors = _clip_factors(self._norms(batch), max_grad_norm)
            for value, added in zip(left, self._gradient(batch, factors), strict=True):
                value -= added
        return left

    def _gradient(self, batch: Batch, weights: FloatArray) -> Sequence[Tensor]:
        """Gradient of the weighted sum of losses."""
        with torch.enable_grad():
            losses = self._model.losses(self._shadow, batch)
            total = losses @ torch.as_tensor(weights).to(losses)
        return torch.autograd.grad(total, self._parameters, materialize_grads=True)

    def _products(self, batch: Batch, direction: Sequence[Tensor]) -> FloatArray:
        """Inner products (n,) of each example's gradient, before clipping, with a direction."""
        with torch.enable_grad():
            losses = self._model.losses(self._shadow, batch)
            weights = torch.ones_like(losses, requires_grad=True)
            gradients = torch.autograd.grad(
                losses @ weights, self._parameters, create_graph=True, materialize_grads=True
            )
            parts = [(g * v).sum() for g, v in zip(gradients, direction, strict=True)]
            total = torch.stack(parts).sum()
        (products,) = torch.autograd.grad(total, weights, materialize_grads=True)
        return products.double().cpu().numpy()

    def _ratio(
        self, batch: Batch, unexplained: list[Tensor], setting: StepSetting, drawn: BoolArray
    ) -> FloatArray:
        """Log-likelihood ratios (n,) of one step; drawn: (n,) whether each was in the batch."""
        clip = setting.max_grad_norm
        norms = self._norms(batch)
        products = self._products(batch, unexplained)
        scale = np.where(norms > 0, norms, 1.0) * clip * setting.noise_multiplier
        relative = norms * _clip_factors(norms, clip) / clip
        return log_likelihood_ratio(
            products / scale + drawn * relative / setting.noise_multiplier,
            relative_norm=relative,
            noise_multiplier=setting.noise_multiplier,
            sample_rate=setting.sample_rate,
        )


def _clip_factors(norms: FloatArray, max_grad_norm: float) -> FloatArray:
    return np.minimum(1.0, max_grad_norm / (norms + _STABILISER))
