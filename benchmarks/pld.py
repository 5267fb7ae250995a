"""Benchmarks of the tight accountant: python benchmarks/pld.py [NAME ...] [--full] [--list].

CPU seconds of one thread, and how far epsilons lie above dp_accounting's privacy loss distributions at interval 1e-4, whose
optimistic estimates they must not be below.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from dp_accounting.pld import privacy_loss_distribution

from accountant import benchmark, main, report, synthetic_log
from indpriv import EpsilonTable, NormLog, account

INTERVAL = 1e-4
# Where people train: noise multiplier, sample rate, steps, delta
ORDINARY = (
    (3.0, 4096 / 50000, 3660, 1e-5),
    (1.4, 1 / 34, 680, 1e-5),
    (1.13, 1 / 75, 600, 1e-6),
    (0.8, 1 / 75, 600, 1e-6),
    (0.7, 256 / 60000, 3000, 1e-5),
    (0.6, 1e-3, 10_000, 1e-6),
)
# Fine-tuning: about an epoch, little noise
SHORT = (
    (0.5, 1e-3, 500, 1e-5),
    (0.6, 1e-3, 1000, 1e-5),
    (0.55, 5e-3, 200, 1e-6),
    (0.7, 1e-2, 100, 1e-6),
)
Result = TypeVar("Result")


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    """CPU seconds, and what was found."""
    start = time.process_time()
    found = work()
    return time.process_time() - start, found


def tight(log: NormLog, delta: float, **settings: object) -> tuple[float, EpsilonTable]:
    """CPU seconds of the tight account of a log by one thread, and its table."""
    return timed(lambda: account(log, delta=delta, accountant="pld", workers=1, **settings))


def laws_of(log: NormLog, example: int) -> list[tuple[float, float, int]]:
    """What an example of a log met: noise over norm, sample rate, and in how many steps."""
    unit = log.levels.rounding or 1.0
    relative = np.minimum(log.read(example, example + 1)[:, 0] * unit, 1.0)
    record = np.searchsorted(log.recorded_steps, np.arange(log.total_steps), "right") - 1
    settings = log.settings
    met = np.stack([relative[record], settings.noise_multiplier, settings.sample_rate], axis=1)
    laws, steps = np.unique(met[met[:, 0] > 0], axis=0, return_counts=True)
    return [(law[1] / law[0], law[2], int(n)) for law, n in zip(laws, steps, strict=True)]


def peer(laws: list[tuple[float, float, int]], delta: float, *, above: bool = True) -> float:
    """Epsilon by dp_accounting, laws composed one after the other; from above, or an optimistic estimate."""
    composed = None
    for noise, rate, steps in laws:
        part = privacy_loss_distribution.from_gaussian_mechanism(
            noise,
            sampling_prob=rate,
            value_discretization_interval=INTERVAL,
            pessimistic_estimate=above,
        ).self_compose(steps)
        composed = part if composed is None else composed.compose(part)
    return 0.0 if composed is None else float(composed.get_epsilon_for_delta(delta))


@dataclass(frozen=True)
class Beside:
    """Epsilons beside dp_accounting's, of some examples.

    Attributes:
        excess: over its epsilons, relative.
        least: over its optimistic estimates.
        seconds: of its CPU for one epsilon.
    """

    excess: np.ndarray
    least: np.ndarray
    seconds: float

    @classmethod
    def of(cls, log: NormLog, table: EpsilonTable, examples: np.ndarray, delta: float) -> Beside:
        """The examples are of a log."""
        each = [laws_of(log, int(example)) for example in examples]
        seconds, theirs = timed(lambda: [peer(laws, delta) for laws in each])
        least = np.array([peer(laws, delta, above=False) for laws in each])
        own = np.maximum(table.epsilon[examples], 1e-12)
        return cls(
            own / np.maximum(theirs, 1e-12) - 1,
            own / np.maximum(least, 1e-12) - 1,
            seconds / len(each),
        )

    def report(self, at_most: float) -> list[bool]:
        """Lines of the distances."""
        return [
            report("  median over dp_accounting", float(np.median(self.excess)), "relative"),
            report(
                "  most over dp_accounting", float(self.excess.max()), "relative", at_most=at_most
            ),
            report(
                "  least over its optimistic epsilon",
                float(self.least.min()),
                "relative",
                at_least=0.0,
            ),
        ]


def of_settings(settings: tuple, n_peers: int, seconds: float, *, ratio: bool) -> list[bool]:
    """50,000 examples x 200 records under each setting."""
    figures = []
    for noise, rate, steps, delta in settings:
        run = {"noise_multiplier": noise, "sample_rate": rate, "total_steps": steps}
        log = synthetic_log(min(200, steps), 50_000, **run)
        busy, table = tight(log, delta)
        ranking = np.argsort(table.epsilon)
        chosen = ranking[np.linspace(2_000, 49_000, n_peers).astype(int)]
        beside = Beside.of(log, table, chosen, delta)
        what = f"sigma {noise:g}, q {rate:.4g}, {steps} steps, delta {delta:g}"
        figures += [report(what, busy, "CPU s", at_most=seconds), *beside.report(1e-3)]
        if ratio:
            times = beside.seconds * log.n_examples / busy
            figures.append(report("  dp_accounting over ours", times, "times", at_least=2e4))
    return figures


@benchmark
def pld_at_ordinary_noise(full: bool) -> list[bool]:
    """50,000 examples x 200 records under six settings, against dp_accounting on three examples (nine with --full)."""
    return of_settings(ORDINARY, 9 if full else 3, 5.0, ratio=True)


@benchmark
def pld_of_short_runs(full: bool) -> list[bool]:
    """50,000 examples of runs of about an epoch, against dp_accounting on five examples (40 with --full)."""
    return of_settings(SHORT, 40 if full else 5, 4.0, ratio=False)


@benchmark
def pld_of_many_settings(full: bool) -> list[bool]:
    """50,000 examples x 60 records without rounding, and under 1,500 noise multipliers or sample rates."""
    rng = np.random.default_rng(0)
    run = {"total_steps": 3000}
    noise, rate = rng.uniform(2, 4, 1500).repeat(2), rng.uniform(0.06, 0.1, 1500).repeat(2)
    figures = []
    for what, settings, seconds, excess in (
        ("without rounding", {"rounding": 0}, 6.0, 2e-3),
        ("1,500 noise multipliers", {**run, "noise_multiplier": noise}, 20.0, 3e-3),
        ("1,500 sample rates", {**run, "sample_rate": rate}, 20.0, 3e-3),
    ):
        log = synthetic_log(60, 50_000, **settings)
        busy, table = tight(log, 1e-5)
        figures.append(report(f"50,000 x 60, {what}", busy, "CPU s", at_most=seconds))
        if full or "rounding" in settings:  # 3,000 laws an example take minutes
            chosen = np.argsort(table.epsilon)[[25_000]]
            figures += Beside.of(log, table, chosen, 1e-5).report(excess)
        else:
            reference = account(
                log.take(np.arange(0, 50_000, 5_000)), delta=1e-5, accountant="pld", brackets=True
            )
            width = reference.epsilon / reference.epsilon_lower - 1
            figures.append(
                report("  over its own lower ends, median", float(np.median(width)), "relative")
            )
    return figures


@benchmark
def pld_in_corners(full: bool) -> list[bool]:
    """One law in every step: T x sample rate x noise x norm x delta (a tenth unless --full); warnings are errors."""
    cells = list(
        itertools.product(
            (1, 10, 1000, 10**6),
            (1e-5, 1e-3, 0.05, 1.0),
            (0.3, 1.0, 50.0),
            (0.0, 0.01, 1.0),
            (1e-5, 1e-12),
        )
    )
    if not full:
        cells = [cells[k] for k in np.random.default_rng(0).permutation(len(cells))[::10]]
    excess, seconds, vacuous, right = [], [], 0, True
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps, rate, noise, norm, delta in cells:
            log = NormLog.from_arrays(
                [[norm]],
                [0],
                total_steps=steps,
                noise_multiplier=noise,
                max_grad_norm=1.0,
                sample_rate=rate,
            )
            busy, table = tight(log, delta, brackets=True)
            epsilon, lower = float(table.epsilon[0]), float(table.epsilon_lower[0])
            seconds.append(busy)
            vacuous += not np.isfinite(epsilon)
            if norm == 0 or (rate < 1 and rate * steps <= delta):
                right = right and epsilon == 0
            elif epsilon > 1e-3:
                excess.append(epsilon / max(lower, 1e-300) - 1)
    return [
        report(f"{len(cells)} corners: vacuous", vacuous, "", at_most=0),
        report("  nothing revealed has epsilon 0", float(right), "", at_least=1),
        report("  over a proven lower end, median", float(np.median(excess)), "relative"),
        report("  over a proven lower end, most", max(excess), "relative", at_most=2e-3),
        report("  slowest", max(seconds), "CPU s"),
    ]


@benchmark
def pld_of_units(full: bool) -> list[bool]:
    """People of 2 to 50 rows, each of 30 records."""
    rng = np.random.default_rng(0)
    n_rows = np.arange(2, 51).repeat(8 if full else 2)
    person = np.repeat(np.arange(len(n_rows)), n_rows)
    size = rng.lognormal(-1.0, 0.6, len(n_rows))[person]
    norms = size * np.linspace(1.5, 0.3, 30)[:, None] * rng.lognormal(0, 0.3, (30, len(person)))
    log = NormLog.from_arrays(
        norms, np.arange(0, 3000, 100), total_steps=3000, noise_multiplier=2.0, max_grad_norm=1.0, sample_rate=0.01,
        unit="user", unit_ids=person,
    )  # fmt: skip
    busy, table = tight(log, 1e-6)
    ratio = np.median(table.epsilon / table.details["rdp_epsilon"])
    return [
        report(
            f"{len(table)} units of 2 to 50 rows", busy / len(table), "CPU s each", at_most=0.02
        ),
        report(
            "  median epsilon over that by Rényi divergences", float(ratio), "times", at_most=1.0
        ),
    ]


@benchmark
def pld_of_replaced_and_truncated(full: bool) -> list[bool]:
    """The worst case of runs whose examples are replaced, or whose batches are cut off."""
    rng = np.random.default_rng(0)
    figures = []
    for what in ("replaced", "truncated"):
        seconds = []
        for _ in range(50 if full else 5):
            rate, steps = 10 ** rng.uniform(-2.5, -1), int(rng.integers(50, 2000))
            n = 1000
            cap = int(n * rate + 2 * np.sqrt(n * rate)) + 1
            settings = {"neighbouring": "replace_one"} if what == "replaced" else {}
            if what == "truncated":
                settings = {"sampler": "truncated_poisson", "max_batch_size": cap}
            log = NormLog.from_arrays(
                np.ones((1, n)), [0], total_steps=steps, noise_multiplier=rng.uniform(0.7, 3), max_grad_norm=1.0,
                sample_rate=rate, **settings,
            )  # fmt: skip
            seconds.append(tight(log, 1e-6)[0])
        figures.append(report(f"{what}, mean", float(np.mean(seconds)), "CPU s each", at_most=0.5))
    return figures


if __name__ == "__main__":
    sys.exit(main())
