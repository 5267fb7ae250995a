"""Rules about the model and its inputs: normalisation, activations, augmentation."""

from __future__ import annotations

from collections.abc import Mapping

from indpriv.analysis.lint.rule import ERROR, NOTE, WARNING, Judgement, Rule
from indpriv.analysis.lint.training_facts import TrainingFacts

_MIXING = frozenset({"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm", "BatchNorm"})
_PER_EXAMPLE = frozenset(
    {"GroupNorm", "LayerNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"}
)
_CONVOLUTIONS = frozenset({"Conv2d", "StandardisedConv2d", "Conv3d"})
_WEIGHTS = _CONVOLUTIONS | {"Linear", "Conv1d"}
_UNBOUNDED = frozenset({"ReLU", "LeakyReLU", "PReLU", "ELU", "GELU", "SiLU"})
_DEEP = 8  # layers with weights


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _count(layers: Mapping[str, int], names: frozenset[str]) -> int:
    return sum(layers.get(name, 0) for name in names)


def _batch_norm(facts: TrainingFacts) -> Judgement | None:
    if facts.layers is None:
        return None
    mixing = _count(facts.layers, _MIXING)
    return Judgement(not mixing, f"The model has {_layers(mixing)} of batch normalisation.")


def _normalisation(facts: TrainingFacts) -> Judgement | None:
    if facts.layers is None:
        return None
    weights, norms = _count(facts.layers, _WEIGHTS), _count(facts.layers, _PER_EXAMPLE)
    figures = (
        f"The model has {_layers(weights)} with weights (linear or convolutional) and "
        f"{_layers(norms)} that normalise each example by itself."
    )
    return Judgement(norms > 0 or weights <= _DEEP, figures)


def _activations(facts: TrainingFacts) -> Judgement | None:
    if facts.layers is None:
        return None
    unbounded, norms = _count(facts.layers, _UNBOUNDED), _count(facts.layers, _PER_EXAMPLE)
    figures = (
        f"The model has {_layers(unbounded)} of unbounded activations and {_layers(norms)} that "
        "normalise each example by itself."
    )
    return Judgement(norms > 0 or not unbounded, figures)


def _augmentation(facts: TrainingFacts) -> Judgement | None:
    if facts.layers is None or facts.views is None:
        return None
    if not _count(facts.layers, _CONVOLUTIONS):
        return Judgement(True, "The model has no convolutions, so the inputs may be no pictures.")
    views = "one view" if facts.views == 1 else f"{facts.views} views"
    figures = f"The gradient of each picture is taken on {views} of it."
    return Judgement(facts.views > 1, figures)


RULES = (
    Rule(
        key="batch_norm",
        severity=ERROR,
        title="No layer mixes the examples of a batch",
        literature="Batch normalisation makes the output for one example depend on the others: "
        "clipping per example then bounds nothing. De et al. replace it by group normalisation.",
        source="De et al. 2022 (arXiv:2204.13650); Opacus refuses such layers",
        advice="Replace it by GroupNorm or LayerNorm (opacus.validators.ModuleValidator.fix).",
        needs="the layers of the model",
        judge=_batch_norm,
    ),
    Rule(
        key="normalisation",
        severity=WARNING,
        title="A deep model normalises each example by itself",
        literature="Group normalisation and weight standardisation are among the changes that took "
        "De et al. to 81.4 % on CIFAR-10 at an epsilon of 8. That a model is deep from 9 layers "
        "on is a rule of thumb of ours.",
        source="De et al. 2022 (arXiv:2204.13650)",
        advice="Add GroupNorm or LayerNorm, or take a shallower model.",
        needs="the layers of the model",
        judge=_normalisation,
    ),
    Rule(
        key="activations",
        severity=NOTE,
        title="Activations are bounded, or layers are normalised",
        literature="Bounded activations (tanh and other tempered sigmoids) keep gradients small "
        "and consistently did better than ReLU under DP-SGD on MNIST, FashionMNIST and CIFAR-10. "
        "The networks there are small and have no normalisation.",
        source="Papernot et al. 2021 (arXiv:2007.14191)",
        advice='Try tanh (activation = "tanh" for an mlp).',
        needs="the layers of the model",
        judge=_activations,
    ),
    Rule(
        key="augmentation",
        severity=NOTE,
        title="Gradients of pictures are averaged over several views before clipping",
        literature="Augmentation multiplicity: the gradients of several augmentations of one "
        "picture (16 on CIFAR-10) are averaged before clipping. It costs no epsilon and made De "
        "et al.'s models more accurate.",
        source="De et al. 2022 (arXiv:2204.13650)",
        advice="Try it where accuracy matters, in a training loop of your own. Say "
        "augmentation_multiplicity in run.json.",
        needs="the layers of the model, and augmentation_multiplicity in run.json",
        judge=_augmentation,
    ),
)
