"""What the paper prints: Yu, Kamath, Kulkarni, Liu, Yin, Zhang 2023, TMLR 09/2023, arXiv:2206.02617v7. The one place for its numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

SOURCE = "arXiv:2206.02617v7"
DELTA = 1e-5  # of every epsilon in the paper (section 4)
RELEASE_EPSILON = 0.1  # of Table 2 and footnote 3, with the same delta
GAMMAS = (0.5, 1.0, 3.0)  # full passes an epoch in Figure 4
TABLE_2_COLUMNS = ("average", "0.1", "0.3", "median", "0.7", "0.9")
INDIVIDUAL_CLIPPING_SEEDS = 4  # of Table 3


@dataclass(frozen=True)
class Attack:
    """Figure 11: success rates of the loss threshold in per cent, in the order of the groups of the data set."""

    without_dp: tuple[float, ...]
    with_dp: tuple[float, ...]


@dataclass(frozen=True)
class Release:
    """Table 2: statistics of individual epsilon, without and with privacy, and the average error rate in per cent."""

    non_private: tuple[float, ...]
    private: tuple[float, ...]
    error_rate: float


@dataclass(frozen=True)
class PaperRun:
    """One data set of the paper.

    Attributes:
        title: its name in the paper; name: ours, of the audit file.
        setting: how it was trained (section 4).
        test_accuracy, max_epsilon, min_epsilon, share_at_worst_case: Figure 1; shares in per cent.
        by: the column of its groups; order: by mean epsilon, the lowest first (Figures 2 and 6).
        order_figure: the number of that figure.
        worst_served, best_served: groups of the lowest and the highest test accuracy; excess: by how much per cent the mean
            epsilon of the one lies above that of the other. None where the text does not say.
        fidelity: gamma -> Pearson's r, mean and largest absolute error (Figure 4).
        attack: Figure 11; release: Table 2; None where the paper shows none.
    """

    name: str
    title: str
    setting: str
    test_accuracy: float
    max_epsilon: float
    by: str
    order_figure: str
    order: tuple[str, ...]
    fidelity: Mapping[float, tuple[float, float, float]]
    min_epsilon: float | None = None
    share_at_worst_case: float | None = None
    worst_served: str | None = None
    best_served: str | None = None
    excess: float | None = None
    attack: Attack | None = None
    release: Release | None = None


_UTKFACE = (
    "about 15,000 (White 7,000, Black 3,500, Asian 2,000, Indian 2,800), each race balanced in the label; ResNet-20 with "
    "GroupNorm, pre-trained on ImageNet; C = median norm at initialisation, batch 1,024, 100 epochs"
)

RUNS = (
    PaperRun(
        name="cifar10",
        title="CIFAR-10",
        setting="50,000; WRN16-4 of De et al. 2022 without augmentation multiplicity; C = 1, batch 4,096, 300 epochs",
        test_accuracy=74.2,
        max_epsilon=7.8,
        min_epsilon=1.0,
        share_at_worst_case=35,
        by="label",
        order_figure="2",
        order=(
            "ship",
            "automobile",
            "truck",
            "frog",
            "horse",
            "airplane",
            "dog",
            "deer",
            "bird",
            "cat",
        ),
        worst_served="cat",
        best_served="automobile",
        excess=44.2,
        fidelity={0.5: (0.998, 0.09, 0.54), 1.0: (0.999, 0.06, 0.35), 3.0: (1.0, 0.04, 0.32)},
        attack=Attack(
            without_dp=(61.4, 59.2, 62.6, 66.4, 65.8, 67.9, 71.3, 70.9, 73.1, 79.7),
            with_dp=(52.0, 52.4, 51.4, 51.7, 52.5, 52.1, 52.2, 52.4, 52.8, 52.8),
        ),
        release=Release(
            non_private=(5.942, 2.713, 4.892, 6.730, 7.692, 7.815),
            private=(5.939, 2.801, 4.876, 6.744, 7.672, 7.923),
            error_rate=0.91,
        ),
    ),
    PaperRun(
        name="mnist",
        title="MNIST",
        setting="60,000; ResNet-20 with GroupNorm; C = median norm at initialisation, batch 1,024, 100 epochs",
        test_accuracy=97.1,
        max_epsilon=2.4,
        share_at_worst_case=3,
        by="label",
        order_figure="6",
        order=("1", "7", "6", "4", "0", "2", "3", "9", "5", "8"),
        fidelity={0.5: (0.995, 0.07, 0.25), 1.0: (0.998, 0.04, 0.17), 3.0: (0.999, 0.01, 0.07)},
        release=Release(
            non_private=(0.686, 0.236, 0.318, 0.431, 0.697, 1.682),
            private=(0.681, 0.238, 0.317, 0.436, 0.708, 1.647),
            error_rate=1.13,
        ),
    ),
    PaperRun(
        name="utkface_gender",
        title="UTKFace-Gender",
        setting=_UTKFACE,
        test_accuracy=88.2,
        max_epsilon=4.5,
        min_epsilon=0.1,
        by="race",
        order_figure="2",
        order=("Indian", "Black", "White", "Asian"),
        worst_served="Asian",
        best_served="Indian",
        excess=35.1,
        fidelity={0.5: (0.999, 0.05, 0.35), 1.0: (1.0, 0.02, 0.14), 3.0: (1.0, 0.01, 0.06)},
        attack=Attack(without_dp=(57.1, 57.8, 57.8, 60.4), with_dp=(50.7, 51.8, 50.4, 51.2)),
    ),
    PaperRun(
        name="utkface_age",
        title="UTKFace-Age",
        setting=_UTKFACE,
        test_accuracy=80.4,
        max_epsilon=4.2,
        by="race",
        order_figure="6",
        order=("Asian", "White", "Indian", "Black"),
        fidelity={0.5: (0.999, 0.05, 0.29), 1.0: (1.0, 0.02, 0.19), 3.0: (1.0, 0.01, 0.17)},
    ),
)

LEAST_PEARSON = 0.9  # of epsilon and log loss "on all four" (Figure 5), and with individual clipping (Figures 7, 8)
STRATIFIED = ("automobile", "airplane", "cat")  # classes of Figure 3, in the order of Figure 2
FOOTNOTE_3 = (15.73, 15.82)  # median gradient norm of UTKFace-Gender, without and with privacy
TABLE_1 = {"with rounding": ("1e2", "< 3 s"), "without rounding": ("1e7", "about 2.6e4 s")}
TABLE_3 = {  # test accuracy in per cent, and its standard deviation: individual clipping, ordinary clipping
    "cifar10": ((74.0, 0.19), (74.1, 0.24)),
    "mnist": ((97.17, 0.12), (97.26, 0.11)),
}
FIGURE_14_FIDELITY = (
    0.999,
    0.05,
    0.28,
)  # the two-layer CNN of Papernot et al. 2020 on CIFAR-10, gamma 1
FIGURE_14_ORDER = (
    "automobile",
    "ship",
    "truck",
    "horse",
    "frog",
    "airplane",
    "dog",
    "deer",
    "bird",
    "cat",
)

MAX_EPSILON_SWEPT = 7.5  # worst case of Figures 9, 10, 12 and 13, all of CIFAR-10


@dataclass(frozen=True)
class Swept:
    """Figures 9 and 10: at each clipping norm, as a multiple of the median norm (ResNet-20).

    Attributes:
        multiples: of the median norm.
        test_accuracy: per cent; accuracy_gap: points between the classes of most and least.
        smallest: epsilon; epsilon_gap: largest less smallest class average.
        share_at_worst_case: in words, as far as the paper says.
    """

    multiples: tuple[float, ...] = (0.1, 0.3, 0.5, 1.5)
    test_accuracy: tuple[float, ...] = (60.7, 64.9, 65.6, 63.2)
    accuracy_gap: tuple[float, ...] = (34.3, 41.0, 36.5, 33.6)
    smallest: tuple[float, ...] = (1.6, 1.0, 0.9, 0.5)
    epsilon_gap: tuple[float, ...] = (1.33, 1.78, 1.87, 0.91)
    share_at_worst_case: str = "nearly 70 % at 0.1, about 2 % at 1.5"


FIGURES_9_10 = Swept()
APPENDIX_C = {
    "cat": (4.8, 7.4),
    "ship": (4.2, 5.5),
}  # mean epsilon at 1.5 and at 0.5 of the median norm
APPENDIX_F = {"WRN16-4": 7.3, "two-layer CNN": 7.7}  # mean epsilon of Cat by model
FIGURE_12 = {5.0: 0.89, 10.0: 0.9}  # clipping norm -> Pearson's r of epsilon and log loss
FIGURE_13_FIDELITY = (0.999, 0.06, 0.37)  # hinge loss, gamma 1
FIGURE_13_ORDER = (
    "ship",
    "automobile",
    "truck",
    "frog",
    "horse",
    "airplane",
    "deer",
    "bird",
    "dog",
    "cat",
)
EASIER, HARDER = (
    "mnist",
    "cifar10",
)  # "easier tasks have fewer examples at the worst case" (Figure 1)


def run_named(name: str) -> PaperRun | None:
    """The run of the paper that an audit of this name is compared with, or None."""
    return next((run for run in RUNS if run.name == name), None)
