"""Benchmarks of the tight accountant: python benchmarks/pld.py [NAME ...] [--full] [--list].

Speed against dp_accounting's privacy loss distributions in the same run, and what brackets reach on hard cases.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
import warnings
from dataclasses import dataclass

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from indpriv.accountant.histogram.counts import DenseCounts
from indpriv.accountant.histogram.mechanisms import Mechanisms, Participations
from indpriv.accountant.pld.brackets import CERTIFIED, CHECKED, FALLBACK, pld_epsilon

from accountant import benchmark, main, report, synthetic_log
from indpriv import EpsilonTable, NormLog, account
from indpriv.accountant.method import Method
from indpriv.accountant.rdp import RdpAccountant

DELTA = 1e-5
# Where people train: noise multiplier, sample rate, steps, delta
ORDINARY = [
    (3.0, 4096 / 50000, 3660, 1e-5),
    (1.4, 1 / 34, 680, 1e-5),
    (1.13, 1 / 75, 600, 1e-6),
    (0.8, 1 / 75, 600, 1e-6),
    (0.7, 256 / 60000, 3000, 1e-5),
    (0.6, 1e-3, 10_000, 1e-6),
]


def relative_width(lower: np.ndarray, upper: np.ndarray) -> float:
    """The widest bracket, relative to its upper end."""
    return float(((upper - lower) / np.maximum(upper, 1e-300)).max())


@dataclass(frozen=True)
class Peer:
    """Epsilon of one example by dp_accounting, its levels composed one after the other, and the seconds it took."""

    epsilon: float
    seconds: float

    @classmethod
    def of(cls, log: NormLog, example: int, interval: float, delta: float = DELTA) -> Peer:
        """Of an example of a log of one setting without gaps."""
        noise, rate = log.settings.noise_multiplier[0], log.settings.sample_rate[0]
        codes = log.read(example, example + 1)[:, 0]
        steps = np.diff(np.append(log.recorded_steps, log.total_steps))
        start = time.perf_counter()
        composed = None
        for code in np.unique(codes[codes > 0]):
            part = privacy_loss_distribution.from_gaussian_mechanism(
                float(noise) / min(code * 0.01, 1.0),
                sampling_prob=float(rate),
                value_discretization_interval=interval,
            ).self_compose(int(steps[codes == code].sum()))
            composed = part if composed is None else composed.compose(part)
        epsilon = 0.0 if composed is None else float(composed.get_epsilon_for_delta(delta))
        return cls(epsilon, time.perf_counter() - start)


@benchmark
def pld_against_dp_accounting(full: bool) -> list[bool]:
    """50,000 examples x 300 records, 101 levels, against dp_accounting at interval 1e-4, one example at a time."""
    log = synthetic_log(300, 50_000)
    start, busy = time.perf_counter(), time.process_time()
    table = account(log, delta=DELTA, accountant="pld")
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    sample = np.argsort(table.epsilon)[[5_000, 25_000, 45_000]]
    peers = [Peer.of(log, int(example), 1e-4) for example in sample]
    finer = Peer.of(log, int(sample[1]), 1e-5)
    agreement = abs(finer.epsilon / table.epsilon[sample[1]] - 1)
    theirs = float(np.mean([peer.seconds for peer in peers])) * log.n_examples
    certified = float(np.mean(table.details["bracket"] == CERTIFIED))
    return [
        report("50,000 examples x 300 records, all cores", seconds, "s", at_most=20.0),
        report("  the same, time of cores", busy, "s"),
        report(
            "  dp_accounting at 1e-4 (extrapolated from 3 examples) over ours",
            theirs / seconds,
            "times",
            at_least=1e4,
        ),
        report("  difference from dp_accounting at 1e-5", agreement, "relative", at_most=1e-4),
        report(
            "  widest bracket",
            relative_width(table.epsilon_lower, table.epsilon_upper),
            "relative",
            at_most=1e-4,
        ),
        report("  share certified", certified, "", at_least=1.0),
    ]


def seconds_of(log: NormLog, delta: float) -> tuple[float, EpsilonTable]:
    """One thread's own seconds for the tight account of a log."""
    busy = time.process_time()
    table = account(log, delta=delta, accountant="pld", workers=1)
    return time.process_time() - busy, table


@benchmark
def pld_at_ordinary_noise(full: bool) -> list[bool]:
    """50,000 examples x 200 records under six settings, against dp_accounting on one example (three with --full)."""
    figures = []
    for noise, rate, steps, delta in ORDINARY:
        run = {"noise_multiplier": noise, "sample_rate": rate, "total_steps": steps}
        log = synthetic_log(200, 50_000, **run)
        few, _ = seconds_of(synthetic_log(200, 5_000, **run), delta)
        seconds, table = seconds_of(log, delta)
        ranking = np.argsort(table.epsilon)
        sample = ranking[[5_000, 25_000, 45_000] if full else [25_000]]
        peers = [Peer.of(log, int(example), 1e-4, delta) for example in sample]
        theirs = float(np.mean([peer.seconds for peer in peers])) * log.n_examples
        below = max(
            1 - peer.epsilon / table.epsilon_lower[k] for k, peer in zip(sample, peers, strict=True)
        )
        width = relative_width(table.epsilon_lower, table.epsilon_upper)
        certified = float(np.mean(table.details["bracket"] == CERTIFIED))
        what = f"sigma {noise:g}, q {rate:.4g}, {steps} steps, delta {delta:g}, one core"
        figures += [
            report(what, seconds, "s", at_most=5.0),
            report("  over 5,000 examples", seconds / few, "times", at_most=8.0),
            report("  dp_accounting at 1e-4 over ours", theirs / seconds, "times", at_least=2e4),
            report("  its epsilon below our lower end, at most", below, "relative", at_most=0.0),
            report("  widest bracket", width, "relative", at_most=1e-4),
            report("  share certified", certified, "", at_least=1.0),
        ]
    return figures


@benchmark
def pld_of_the_demo(full: bool) -> list[bool]:
    """32,561 examples recorded at each of 680 steps; of the demo's own log where a path is in INDPRIV_DEMO_LOG."""
    path = os.environ.get("INDPRIV_DEMO_LOG")
    settings = {"total_steps": 680, "sample_rate": 1 / 34, "noise_multiplier": 1.0}
    log = NormLog.open(path) if path else synthetic_log(680, 32_561, **settings)
    start, busy = time.perf_counter(), time.process_time()
    table = account(log, delta=DELTA, accountant="pld")
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return [
        report(
            f"{log.n_examples:,} examples x {log.n_records} records, all cores",
            seconds,
            "s",
            at_most=20.0,
        ),
        report("  the same, time of cores", busy, "s"),
        report(
            "  widest bracket",
            relative_width(table.epsilon_lower, table.epsilon_upper),
            "relative",
            at_most=1e-4,
        ),
    ]


def seconds_of_peer(log: NormLog, example: int, n_laws: int = 8) -> float:
    """What dp_accounting takes to compose all laws of an example, extrapolated from the first few."""
    unit = 1.0 if log.levels is None else 0.01
    relative = np.minimum(log.read(example, example + 1)[:, 0] * unit, 1.0)
    record = np.searchsorted(log.recorded_steps, np.arange(log.total_steps), "right") - 1
    settings = log.settings
    met = np.stack([relative[record], settings.noise_multiplier, settings.sample_rate], axis=1)
    laws, steps = np.unique(met[met[:, 0] > 0], axis=0, return_counts=True)
    start, composed = time.process_time(), None
    for (norm, noise, rate), count in zip(laws[:n_laws], steps, strict=False):
        part = privacy_loss_distribution.from_gaussian_mechanism(
            noise / norm, sampling_prob=rate, value_discretization_interval=1e-4
        ).self_compose(int(count))
        composed = part if composed is None else composed.compose(part)
    return (time.process_time() - start) / min(n_laws, len(laws)) * len(laws)


@benchmark
def pld_of_many_settings(full: bool) -> list[bool]:
    """50,000 examples without rounding, and under 1,500 noise multipliers or sample rates."""
    rng = np.random.default_rng(0)
    run = {"total_steps": 3000}
    noise, rate = rng.uniform(2, 4, 1500).repeat(2), rng.uniform(0.06, 0.1, 1500).repeat(2)
    figures = []
    for what, settings in (
        ("without rounding", {"rounding": 0}),
        ("under 1,500 noise multipliers", {**run, "noise_multiplier": noise}),
        ("under 1,500 sample rates", {**run, "sample_rate": rate}),
    ):
        log = synthetic_log(60, 50_000, **settings)
        busy, table = seconds_of(log, DELTA)
        theirs = seconds_of_peer(log, 0) * log.n_examples
        width = relative_width(table.epsilon_lower, table.epsilon_upper)
        certified = float(np.mean(table.details["bracket"] == CERTIFIED))
        figures += [
            report(f"50,000 examples x 60 records {what}, one core", busy, "s", at_most=20.0),
            report("  dp_accounting at 1e-4 over ours", theirs / busy, "times", at_least=2e4),
            report("  widest bracket", width, "relative", at_most=1e-3),
            report("  share certified", certified, "", at_least=1.0),
        ]
    return figures


@dataclass(frozen=True)
class HardCase:
    """Every step of a run alike, and the bracket of its epsilon."""

    steps: float
    sample_rate: float
    noise_multiplier: float
    relative_norm: float
    delta: float
    lower: float
    upper: float
    bracket: str
    seconds: float

    @classmethod
    def of(cls, steps: float, rate: float, noise: float, norm: float, delta: float) -> HardCase:
        """Account one example."""
        law = tuple(np.array([value]) for value in (norm, noise, rate))
        counts = np.array([[float(steps)]])
        rdp = RdpAccountant(Mechanisms(*law), Method(delta=delta))
        bound = rdp.epsilons(DenseCounts(counts)).epsilon
        start = time.process_time()
        found = pld_epsilon(Participations(*law, counts), delta=delta, rdp_upper=bound)
        seconds = time.process_time() - start
        ends = float(found.epsilon_lower[0]), float(found.epsilon_upper[0])
        return cls(steps, rate, noise, norm, delta, *ends, str(found.bracket[0]), seconds)

    @property
    def width(self) -> float:
        """Of the bracket, relative."""
        return (self.upper - self.lower) / max(self.upper, 1e-300)


@benchmark
def pld_hard_cases(full: bool) -> list[bool]:
    """1,000 hard cells (a tenth unless --full): T x sample rate x noise x norm x delta; warnings are errors."""
    cells = list(
        itertools.product(
            (1, 2, 10, 1e3, 1e6),
            (1e-5, 1e-3, 0.05, 0.5, 1.0),
            (0.3, 0.5, 1.0, 5.0, 50.0),
            (0.01, 0.1, 0.5, 1.0),
            (1e-5, 1e-9),
        )
    )
    chosen = (
        cells
        if full
        else [cells[k] for k in np.random.default_rng(0).permutation(len(cells))[:100]]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cases = [HardCase.of(*cell) for cell in chosen]
    kinds = {
        kind: sum(case.bracket == kind for case in cases) for kind in (CERTIFIED, CHECKED, FALLBACK)
    }
    often = [case.width for case in cases if case.steps * case.sample_rate >= 10]
    exact = [case.width for case in cases if case.steps <= 2 or case.sample_rate == 1]
    rare = [case.width for case in cases if case.steps * case.sample_rate < 10 and case.steps > 2]
    zero = sum(case.upper == 0 for case in cases)
    print(f"  {len(cases)} cells: {kinds}; {zero} with epsilon 0")
    return [
        report(
            "share that falls back to the RDP bound", kinds[FALLBACK] / len(cases), "", at_most=0.18
        ),
        report(
            "widest bracket where 10 participations are expected",
            max(often),
            "relative",
            at_most=1e-4,
        ),
        report(
            "widest bracket of a run of one step, two steps or a Gaussian",
            max(exact),
            "relative",
            at_most=1e-6,
        ),
        report("widest bracket elsewhere", max(rare, default=0.0), "relative"),
        report("  their share within 1e-4", float(np.mean(np.array(rare) <= 1e-4)), ""),
        report("slowest cell, one core's own time", max(case.seconds for case in cases), "s"),
        report("mean cell", float(np.mean([case.seconds for case in cases])), "s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
