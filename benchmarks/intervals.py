"""Coverage of 95 % intervals over the models of a study, whose models are each other's references.

    python benchmarks/intervals.py          400 studies of each setting, a quarter of an hour on one core

Signals are Gaussian: each of 800 examples has a difficulty, and an effect of membership that is drawn
from an exponential law; `shared` is the share of the noise that all examples of a model have in
common. The truth is the mean over all studies. Beside it, Student's interval without the jackknife.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import numpy as np

from indpriv.analysis.attacks.rates import rates_over_models
from indpriv.attack_scores import AttackScores
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.references import lira, rmia

N = 800
ATTACKS: dict[str, Callable[[AttackSignals, int], AttackScores]] = {"LiRA": lira, "RMIA": rmia}
CASES = (
    ("LiRA", 0.3, 0.0),
    ("LiRA", 1.0, 0.0),
    ("LiRA", 0.3, 0.5),
    ("LiRA", 0.0, 0.0),
    ("RMIA", 0.3, 0.0),
)
SETTINGS = [(models, *case) for models in (8, 16, 45) for case in CASES]
RATES = ("auc", "tpr_0.01", "tpr_0.001")


def study(rng: np.random.Generator, models: int, effect: float, shared: float) -> AttackSignals:
    """The signals of one study; examples are the same in all studies of a setting."""
    of_examples = np.random.default_rng(7)
    difficulty, own = 2 * of_examples.normal(size=N), effect * of_examples.exponential(size=N)
    direction = of_examples.normal(size=N)
    member = rng.random((models, N)) < 0.5
    noise = np.sqrt(1 - shared**2) * rng.normal(size=(models, N))
    noise += shared * rng.normal(size=(models, 1)) * direction
    return AttackSignals.from_arrays(difficulty + own * member + noise, member, coins=True)


def scores(signals: AttackSignals, attack: str, models: np.ndarray) -> Iterator[AttackScores]:
    """Scores of each of these models, with the others of them as references."""
    kept = AttackSignals.from_arrays(signals.signal[models], signals.member[models], coins=True)
    return (ATTACKS[attack](kept, target) for target in range(len(models)))


def coverage(
    models: int, attack: str, effect: float, shared: float, studies: int = 400
) -> tuple[np.ndarray, np.ndarray]:
    """Means of rates over all studies, and how often they lie in each interval: (2, n_rates).

    The first row is of the jackknife, the second one of Student's interval alone.
    """
    values, spans = [], []
    for number in range(studies):
        signals = study(np.random.default_rng([1, number]), models, effect, shared)

        def again(kept: np.ndarray, signals: AttackSignals = signals) -> Iterator[AttackScores]:
            return scores(signals, attack, kept)

        full = list(again(np.arange(models)))
        found = [rates_over_models(full, how) for how in (again, None)]
        both = [one.set_index("rate").loc[list(RATES)] for one in found]
        values.append(both[0]["value"].to_numpy())
        spans.append([one[["low", "high"]].to_numpy() for one in both])
    truth, ends = np.mean(values, axis=0), np.array(spans)  # (studies, 2, rates, 2)
    return truth, ((ends[..., 0] <= truth) & (truth <= ends[..., 1])).mean(axis=0)


def line(setting: tuple[int, str, float, float], truth: np.ndarray, held: np.ndarray) -> str:
    """What came out, in one line."""
    models, attack, effect, shared = setting
    cells = (
        f"{rate} {of:.4f}: {100 * jackknife:.1f} % (Student {100 * student:.1f} %)"
        for rate, of, jackknife, student in zip(RATES, truth, *held, strict=True)
    )
    return f"{attack}, {models} models, effect {effect:g}, shared {shared:g}: {'; '.join(cells)}"


def main() -> None:
    """Print the coverage in every setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=400)
    parser.add_argument("--models", type=int, nargs="*", default=[8, 16, 45])
    options = parser.parse_args()
    for setting in SETTINGS:
        if setting[0] in options.models:
            print(line(setting, *coverage(*setting, options.studies)), flush=True)


if __name__ == "__main__":
    main()
