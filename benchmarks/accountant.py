"""Benchmarks of the accountant: python benchmarks/accountant.py [NAME ...] [--full] [--list].

Each benchmark is a function that measures a peer in the same run and prints one line a figure: what, ours, the peer's,
the ratio, the target. Peers too slow to run whole are measured on a sample and extrapolated, which the line says.
Exit code 1 where a target is missed. To add one, write a function with the decorator `benchmark`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
from dp_accounting.pld import privacy_loss_distribution
from opacus.accountants.analysis import rdp as opacus_rdp

from indpriv import NormLog, account, membership_risk
from indpriv.accountant import Method
from indpriv.accountant.account import row_account
from indpriv.accountant.blocks import in_blocks
from indpriv.norm_log.records import BatchNormEntries, BatchNorms, Records

CIFAR = {
    "total_steps": 3660,
    "noise_multiplier": 3.0,
    "max_grad_norm": 1.0,
    "sample_rate": 4096 / 50000,
}
DELTA = 1e-9  # below 1/n of every benchmark
OPACUS_ORDERS = [1 + x / 10.0 for x in range(1, 100)] + list(range(12, 64))
PAPER_ORDERS = np.arange(2, 1024)

_BENCHMARKS: dict[str, Callable[[bool], list[bool]]] = {}


def benchmark(function: Callable[[bool], list[bool]]) -> Callable[[bool], list[bool]]:
    """Register a benchmark of the script that runs.

    It takes whether to run in full, prints its figures, and returns which targets it hit.
    """
    if function.__module__ == "__main__":
        _BENCHMARKS[function.__name__] = function
    return function


def report(
    what: str,
    value: float,
    unit: str,
    *,
    at_most: float | None = None,
    at_least: float | None = None,
) -> bool:
    """Print one figure beside its target; return whether it is hit."""
    good = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    target = (
        f"at most {at_most:g}"
        if at_most is not None
        else f"at least {at_least:g}"
        if at_least is not None
        else ""
    )
    print(
        f"  {what:<74} {value:>12.6g} {unit:<12} {target:<18} {'ok' if good else 'MISSED'}",
        flush=True,
    )
    return good


def best_time(work: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest of several runs, after one to warm up."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def synthetic_norms(n_records: int, n_examples: int) -> np.ndarray:
    """(n_records, n_examples) norms: log-normal over examples, a third of it within, a drift over time."""
    rng = np.random.default_rng(0)
    own = np.exp(rng.normal(-1.5, 1.2, n_examples)).astype(np.float32)
    drift = np.linspace(1.2, 0.8, n_records)
    rows = (own * np.exp(rng.normal(0, 0.3, n_examples)).astype(np.float32) * d for d in drift)
    return np.stack(list(rows))


def synthetic_log(
    n_records: int, n_examples: int, rounding: float = 0.01, **settings: object
) -> NormLog:
    """A CIFAR-sized run recorded n_records times."""
    run = {**CIFAR, **settings}
    recorded = np.arange(n_records) * (int(run["total_steps"]) // n_records)
    return NormLog.from_arrays(
        synthetic_norms(n_records, n_examples), recorded, rounding=rounding, **run
    )


def tiled(log: NormLog) -> Records:
    """Records of very many examples that repeat those of a small log: what a log on disk is to the accountant."""
    codes = log.read()

    def read(rows: np.ndarray, start: int, stop: int) -> np.ndarray:
        return codes[rows][:, np.arange(start, stop) % log.n_examples]

    return Records(np.arange(log.n_records), read)


@benchmark
def rdp_against_the_papers_method(full: bool) -> list[bool]:
    """50,000 examples x 200 records, 101 levels, against one process of the paper's method.

    The paper's method: RDP at 1,022 whole orders for one norm at a time (100 of them), its row added to each example's
    at every record, and one conversion an example. Ours is compared with it although its additions are vectorised
    here and made once a record rather than once a step, which its own code does not do.
    """
    log = synthetic_log(200, 50_000)
    ours = best_time(lambda: account(log, delta=1e-6))
    start = time.perf_counter()
    table = np.stack(
        [
            opacus_rdp.compute_rdp(
                q=0.08192, noise_multiplier=3.0 / s, steps=1, orders=PAPER_ORDERS
            )
            for s in (0.3, 0.9)
        ]
    )
    one_norm = (time.perf_counter() - start) / len(table)
    codes = np.random.default_rng(0).integers(0, 2, 50_000)
    total, start = np.zeros((50_000, len(PAPER_ORDERS)), np.float32), time.perf_counter()
    total += 18 * table.astype(np.float32)[codes]
    one_record = time.perf_counter() - start
    start = time.perf_counter()
    for row in total[:200]:
        opacus_rdp.get_privacy_spent(orders=PAPER_ORDERS, rdp=row, delta=1e-6)
    conversions = (time.perf_counter() - start) / 200 * 50_000
    peer = 100 * one_norm + 200 * one_record + conversions
    print(
        f"  the paper's method (extrapolated): {100 * one_norm:.0f} s of divergences for 100 norms, "
        f"{200 * one_record:.0f} s of additions, {conversions:.0f} s of conversions"
    )
    return [
        report("50,000 examples x 200 records, 101 levels", ours, "s", at_most=3.0),
        report("  the paper's method over ours", peer / ours, "times", at_least=100),
    ]


@benchmark
def rdp_of_the_demo(full: bool) -> list[bool]:
    """32,561 examples recorded at each of 680 steps."""
    log = synthetic_log(680, 32_561, total_steps=680)
    return [
        report(
            "32,561 examples x 680 records",
            best_time(lambda: account(log, delta=1e-6)),
            "s",
            at_most=2.0,
        )
    ]


@benchmark
def rdp_throughput(full: bool) -> list[bool]:
    """Codes a second, from codes to epsilons, with all cores."""
    log = synthetic_log(200, 400_000)
    seconds = best_time(lambda: account(log, delta=DELTA), repeats=2)
    start = time.process_time()
    account(log, delta=DELTA, workers=1)
    busy = time.process_time() - start
    codes = log.n_examples * 200 / 1e6
    return [
        report(
            "400,000 examples x 200 records: codes a second",
            codes / seconds,
            "million/s",
            at_least=50,
        ),
        report(
            "  codes a second of one core's own time, whatever else runs", codes / busy, "million/s"
        ),
    ]


@benchmark
def rdp_memory(full: bool) -> list[bool]:
    """Peak memory of a process that accounts 10^7 examples x 200 records."""
    n_examples = 10_000_000
    command = [sys.executable, __file__, "--child-memory", str(n_examples)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    gigabytes, seconds = map(float, run.stdout.split())
    print(
        f"  {n_examples:,} examples in {seconds:.1f} s: {n_examples * 200 / seconds / 1e6:.0f} million codes a second"
    )
    return [
        report(f"{n_examples:,} examples x 200 records, peak memory", gigabytes, "GiB", at_most=4.0)
    ]


def _child_memory(n_examples: int) -> None:
    small = synthetic_log(200, 50_000)
    log = replace(small, example_ids=np.arange(n_examples), records=tiled(small))
    start = time.perf_counter()
    table = account(log, delta=DELTA)
    seconds = time.perf_counter() - start
    if len(table) != n_examples:
        raise SystemExit(f"{len(table)} epsilons for {n_examples} examples")
    status = Path("/proc/self/status").read_text(
        encoding="utf-8"
    )  # ru_maxrss would count the parent, too
    print(int(status.split("VmHWM:")[1].split()[0]) / 2**20, seconds)


@benchmark
def rdp_without_rounding(full: bool) -> list[bool]:
    """Ten million distinct norms against one call of Opacus's compute_rdp for each, at the same orders."""
    log = synthetic_log(200, 50_000, rounding=0)
    ours = best_time(lambda: account(log, delta=1e-6, orders=OPACUS_ORDERS), repeats=2)
    searched = best_time(lambda: account(log, delta=1e-6), repeats=1)
    peer = seconds_a_norm(log) * log.n_examples * 200
    few = log.take(np.arange(0, 50_000, 25_000))
    theirs = np.array(
        [_opacus_epsilon(few.read(i, i + 1)[:, 0], 1e-6) for i in range(few.n_examples)]
    )
    excess = account(few, delta=1e-6, orders=OPACUS_ORDERS).epsilon / theirs - 1
    return [
        report("50,000 examples x 200 records without rounding, Opacus's orders", ours, "s"),
        report("  the same, best order searched for", searched, "s"),
        report(
            "  one call of Opacus a norm (extrapolated) over ours",
            peer / ours,
            "times",
            at_least=10_000,
        ),
        report("  largest epsilon above Opacus's", float(excess.max()), "relative", at_most=1e-6),
        report(
            "  smallest epsilon above Opacus's (none below)",
            float(excess.min()),
            "relative",
            at_least=-1e-12,
        ),
    ]


def seconds_a_norm(log: NormLog, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds of one call of Opacus's compute_rdp for one norm of a log without rounding, at its own orders."""
    sample = np.random.default_rng(1).choice(
        np.minimum(log.read(0, 2000), 1.0).ravel(), 40, replace=False
    )
    start = clock()
    for norm in sample:
        opacus_rdp.compute_rdp(
            q=CIFAR["sample_rate"], noise_multiplier=3.0 / norm, steps=1, orders=OPACUS_ORDERS
        )
    return (clock() - start) / len(sample)


def table_1() -> dict[str, float]:
    """Table 1 of Yu et al. 2023 (arXiv:2206.02617v7): what rounding norms saves on 50,000 examples x 200 records.

    Seconds of one core's own time: of one call of Opacus a norm, extrapolated to 100 levels and to all ten million norms, which
    is the paper's method; and of our whole account of the same norms, rounded and not.
    """
    whole, rounded = synthetic_log(200, 50_000, rounding=0), synthetic_log(200, 50_000)
    seconds = {"call": seconds_a_norm(whole, time.process_time)}
    seconds["paper_with_rounding"] = 100 * seconds["call"]
    seconds["paper_without_rounding"] = 200 * whole.n_examples * seconds["call"]
    for name, log in (("ours_with_rounding", rounded), ("ours_without_rounding", whole)):
        start = time.process_time()
        account(log, delta=1e-6, workers=1)
        seconds[name] = time.process_time() - start
    return seconds


def _opacus_epsilon(norms: np.ndarray, delta: float) -> float:
    steps = np.diff(np.append(np.arange(200) * (3660 // 200), 3660))
    rdp = sum(
        opacus_rdp.compute_rdp(
            q=CIFAR["sample_rate"],
            noise_multiplier=3.0 / min(norm, 1),
            steps=int(k),
            orders=OPACUS_ORDERS,
        )
        for norm, k in zip(norms, steps, strict=True)
    )
    return float(opacus_rdp.get_privacy_spent(orders=OPACUS_ORDERS, rdp=rdp, delta=delta)[0])


@benchmark
def rdp_of_many_settings(full: bool) -> list[bool]:
    """Thousands of distinct noise multipliers or sample rates; and ten million steps."""
    rng = np.random.default_rng(0)
    noise, rate = rng.uniform(2.5, 3.5, 3660), rng.uniform(0.06, 0.1, 3660)
    constant, noisy = synthetic_log(200, 50_000), synthetic_log(200, 50_000, noise_multiplier=noise)
    rated = synthetic_log(200, 50_000, sample_rate=rate)
    long = synthetic_log(
        200, 50_000, total_steps=10_000_000, sample_rate=1e-4, noise_multiplier=1.0
    )
    base = best_time(lambda: account(constant, delta=1e-6), repeats=1)
    times = [
        best_time(lambda log=log: account(log, delta=1e-6), repeats=1)
        for log in (noisy, rated, long)
    ]
    return [
        report("50,000 x 200, 3,660 distinct noise multipliers", times[0], "s"),
        report("  over one setting", times[0] / base, "times"),
        report("50,000 x 200, 3,660 distinct sample rates", times[1], "s"),
        report("50,000 x 200, ten million steps", times[2], "s"),
    ]


@benchmark
def known_participation(full: bool) -> list[bool]:
    """Shuffled epochs: 20 batch norms of each example; time of the account beside reading them."""
    n, epochs = 10_000_000 if full else 1_000_000, 20
    rng = np.random.default_rng(0)
    steps = rng.integers(0, 50, (n, epochs), np.int32) + 50 * np.arange(epochs, dtype=np.int32)
    entries = BatchNormEntries(
        np.repeat(np.arange(n, dtype=np.int32), epochs),
        steps.ravel(),
        rng.integers(1, 101, n * epochs, np.uint8),
    )
    empty = NormLog.from_arrays(
        np.zeros((0, n)), [], sampler="shuffled", **{**CIFAR, "total_steps": 50 * epochs}
    )
    log = replace(empty, batch_norms=BatchNorms(np.arange(50 * epochs), [entries.block]))

    def read() -> list[int]:
        return list(in_blocks(log, lambda block: block.n_examples, size=1 << 15, workers=1))

    def busy(work: Callable[[], object]) -> float:
        start = time.process_time()
        work()
        return time.process_time() - start

    runs = [
        busy(lambda: account(log, delta=DELTA, participation="known", workers=1)) - busy(read)
        for _ in range(2)
    ]
    what = f"{n:,} examples x {epochs} batch norms, beside reading: one core's own time"
    return [
        report(f"{what}, in memory that is new to the process", runs[0], "s"),
        report(f"{what}, once more", runs[1], "s", at_most=2e-7 * n),
    ]


@benchmark
def rdp_cores(full: bool) -> list[bool]:
    """What the second core brings."""
    log = synthetic_log(200, 200_000)
    found = row_account(log, Method(delta=DELTA))
    one = best_time(lambda: list(found.blocks(workers=1)), repeats=2)
    two = best_time(lambda: list(found.blocks(workers=2)), repeats=2)
    return [report("200,000 x 200: one thread over two threads", one / two, "times")]


@benchmark
def risk_of_the_demo(full: bool) -> list[bool]:
    """Advantage, a true-positive rate and mu of 32,561 examples x 680 records; dp_accounting for one held level."""
    log = synthetic_log(
        680, 32_561 if full else 8_000, total_steps=680, noise_multiplier=1.5, sample_rate=0.03
    )
    start, busy = time.perf_counter(), time.process_time()
    table = membership_risk(log, delta=1e-6, false_positive_rate=1e-3)
    seconds, busy = time.perf_counter() - start, time.process_time() - busy
    start = time.perf_counter()
    peer = privacy_loss_distribution.from_gaussian_mechanism(
        1.5, sampling_prob=0.03, value_discretization_interval=1e-4
    ).self_compose(680)
    theirs = peer.get_delta_for_epsilon(0.0)
    one = time.perf_counter() - start
    return [
        report(f"{log.n_examples:,} examples x 680 records", seconds, "s", at_most=180),
        report("  cores' own time", busy, "s"),
        report(
            "  dp_accounting, one advantage an example (extrapolated), over ours",
            one * len(table) / seconds,
            "times",
        ),
        report(
            "  worst case's advantage over dp_accounting's, less 1",
            float(table.worst_case.advantage[0] / theirs - 1),
            "relative",
            at_most=1e-3,
        ),
    ]


def main() -> int:
    """Run the named benchmarks, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="benchmarks to run; default all")
    parser.add_argument(
        "--full", action="store_true", help="full sizes where the default is smaller"
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks")
    parser.add_argument("--child-memory", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child_memory:
        _child_memory(arguments.child_memory)
        return 0
    if arguments.list:
        print("\n".join(_BENCHMARKS))
        return 0
    hit = []
    for name in arguments.names or _BENCHMARKS:
        print(f"{name}: {(_BENCHMARKS[name].__doc__ or '').splitlines()[0]}", flush=True)
        hit.extend(_BENCHMARKS[name](arguments.full))
    print(
        f"{sum(hit)} of {len(hit)} figures within target; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    return 0 if all(hit) else 1


if __name__ == "__main__":
    sys.exit(main())
