"""An account on Ray beside threads: python benchmarks/cluster.py [--examples 1000000] [--records 200].

A made-up run is written by the package's own writer, in parts where it is long, and accounted by RDP from disk: by one thread, by
two, and by one and two Ray workers on this machine, once Ray has started. Wall seconds say little where other programs are at work,
whose load is printed; so ratios are of CPU seconds: those of the busiest process, and of all together. Targets: the busiest of two
workers has at least 1.6 times less to do than the only one, and Ray takes at most 10 % more in all than two threads. Every table
must have the same bits. Exit code 1 where something is missed. Linux only: CPU seconds of workers are read from /proc.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import ray

from indpriv import NormLog
from indpriv.accountant.blocks import RayPool
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import table_for
from indpriv.norm_log.session_counts import Conversion, SessionCounts
from indpriv.norm_log.writer import LogHeader, NormLogWriter

LEAST_SPEEDUP, LARGEST_OVERHEAD = 1.6, 1.1
METHOD = Method(delta=1e-10)
HEADER = LogHeader(
    rounding=0.01,
    rounding_mode="up",
    unit="example",
    neighbouring="add_remove",
    sampler="poisson",
    individually_clipped=False,
    norm_pass={"caveats": []},
)
COUNTS = SessionCounts(0, False, (), "poisson", conversion=Conversion("made up"))
SETTINGS = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.001}


def write_run(run_dir: Path, n: int, records: int) -> None:
    """A run with a record at every step."""
    rng = np.random.default_rng(0)
    base = rng.gamma(2.0, 0.3, n)
    writer = NormLogWriter(run_dir, HEADER, np.arange(n), None, np.zeros(0, np.int64))
    for step in range(records):
        norms = np.roll(base, 7 * step) * (0.3 - 0.1 * step / records) + 0.8 * base
        writer.record(step, norms, max_grad_norm=1.0, targets_fingerprint="", seconds=0.0)
        writer.steps(step, 1, **SETTINGS, counts=COUNTS)
    writer.finish(COUNTS)
    writer.close()


def of_workers() -> dict[str, float]:
    """CPU seconds of each Ray process on this machine that runs tasks."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::"):
                fields = (process / "stat").read_text().rpartition(")")[2].split()
                found[process.name] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        except OSError:  # it ended
            continue
    return found


def started(n_workers: int) -> RayPool:
    """Ray on this machine with so many cores."""
    ray.shutdown()
    ray.init(num_cpus=n_workers, include_dashboard=False, log_to_driver=False)
    return RayPool.connect(n_workers)


def main() -> int:
    """Print a line for each kind of workers, and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--records", type=int, default=200)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        write_run(run_dir, chosen.examples, chosen.records)
        log = NormLog.open(run_dir)
        kinds = {"1 thread": 1, "2 threads": 2, "1 Ray worker": 1, "2 Ray workers": 2}
        several = log.part(0, 100_000)  # blocks for both workers
        busiest, together, first = {}, {}, None
        for kind, number in kinds.items():
            workers = number if "thread" in kind else started(number)
            table_for(several, METHOD, workers=workers)  # each imports what it needs
            before, here, start = of_workers(), time.process_time(), time.perf_counter()
            epsilon = table_for(log, METHOD, workers=workers).epsilon
            wall, here = time.perf_counter() - start, time.process_time() - here
            each = [cpu - before.get(pid, 0.0) for pid, cpu in of_workers().items()]
            busiest[kind], together[kind] = max(each, default=0.0), here + sum(each)
            first = epsilon if first is None else first
            same = np.array_equal(epsilon, first)
            print(
                f"  {kind:<14} {wall:7.1f} s  {together[kind]:7.1f} CPU s, of the busiest worker {busiest[kind]:.1f}"
                f"  load {os.getloadavg()[0]:5.1f}  {'same bits' if same else 'OTHER BITS'}",
                flush=True,
            )
            if not same:
                return 1
    speedup = busiest["1 Ray worker"] / busiest["2 Ray workers"]
    overhead = together["2 Ray workers"] / together["2 threads"]
    good = speedup >= LEAST_SPEEDUP and overhead <= LARGEST_OVERHEAD
    print(
        f"{chosen.examples:,} x {chosen.records} by RDP: the busiest of 2 Ray workers has {speedup:.2f} times less to do, target at "
        f"least {LEAST_SPEEDUP}; all together {overhead:.2f} of 2 threads, target at most {LARGEST_OVERHEAD}: "
        f"{'ok' if good else 'MISSED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
