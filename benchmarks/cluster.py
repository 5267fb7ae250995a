"""An account on Ray beside threads: python benchmarks/cluster.py [--examples 1000000 2000000] [--records 200] [--accountant pld].

A made-up run is written by the package's own writer, in parts where it is long, and accounted from disk: by one thread, by two, and
by one and two Ray workers on this machine, once Ray has started and its workers have imported what they need, which is printed
apart. Wall seconds say little where other programs are at work, whose load is printed; so ratios are of CPU seconds: those of the
busiest process, and of all that compute together. Ray's servers (raylet, GCS, agents), which take CPU time as long as Ray runs
whatever it computes, are printed apart. Two sizes give the fixed part, and that of each example. Targets: the busiest of two
workers has at least 1.6 times less to do than the only one, and Ray takes at most 10 % more in all than two threads. Every table
must have the same bits. Exit code 1 where something is missed, 0 where Ray is not installed. Linux only: CPU seconds of workers are
read from /proc.
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
from made_up import COUNTS, HEADER

from indpriv import NormLog
from indpriv.accountant.account import table_for
from indpriv.accountant.blocks import RayPool
from indpriv.accountant.method import Method
from indpriv.norm_log.writer import NormLogWriter

try:
    import ray
except ImportError:
    ray = None

LEAST_SPEEDUP, LARGEST_OVERHEAD = 1.6, 1.1
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


def of_ray() -> tuple[dict[str, float], float, int]:
    """Of Ray on this machine: CPU seconds of each process that runs tasks, and of its servers; most memory of the former."""
    stats = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            status = (process / "status").read_text()
            peak = next((int(x.split()[1]) for x in status.splitlines() if "VmHWM" in x), 0)
            runs_tasks = (process / "cmdline").read_bytes().startswith((b"ray::_run", b"ray::IDLE"))
            stats[process.name] = (fields[1], cpu, peak << 10, runs_tasks)
        except OSError:  # it ended
            continue
    family, size = {str(os.getpid())}, 0
    while size < len(family):
        size = len(family)
        family |= {name for name, stat in stats.items() if stat[0] in family}
    mine = {name: stats[name] for name in family - {str(os.getpid())} if name in stats}
    workers = {name: cpu for name, (_, cpu, _, runs_tasks) in mine.items() if runs_tasks}
    servers = sum(cpu for name, (_, cpu, _, _) in mine.items() if name not in workers)
    return workers, servers, max((mine[name][2] for name in workers), default=0)


def started(n_workers: int) -> RayPool:
    """Ray on this machine with so many cores."""
    ray.shutdown()
    ray.init(num_cpus=n_workers, include_dashboard=False, log_to_driver=False)
    return RayPool.connect(n_workers)


def imported(log: NormLog, method: Method) -> None:
    """Do what an account imports in this process."""
    table_for(log, method, workers=1)


def measured(run_dir: Path, method: Method) -> tuple[bool, dict[str, float], dict[str, float]]:
    """Print a line for each kind of workers: whether all bits are the same, CPU seconds of the busiest process and of all."""
    log = NormLog.open(run_dir)
    kinds = {"1 thread": 1, "2 threads": 2, "1 Ray worker": 1, "2 Ray workers": 2}
    one = log.part(0, 1)
    busiest, together, first, alike = {}, {}, None, True
    for kind, number in kinds.items():
        workers = number if "thread" in kind else started(number)
        if "thread" in kind:
            imported(one, method)
        else:  # so many that each worker has some
            list(workers.in_order(imported, [(one, method)] * 2 * number))
        (before, idle, _), here, start = of_ray(), time.process_time(), time.perf_counter()
        epsilon = table_for(log, method, workers=workers).epsilon
        wall, here = time.perf_counter() - start, time.process_time() - here
        after, servers, peak = of_ray()
        each = [cpu - before.get(pid, 0.0) for pid, cpu in after.items()]
        busiest[kind], together[kind] = max(each, default=0.0), here + sum(each)
        first = epsilon if first is None else first
        alike = alike and np.array_equal(epsilon, first)
        ray_only = (
            f", of the busiest worker {busiest[kind]:.1f} ({peak / 2**30:.2f} GiB at its peak, "
            f"{sum(before.values()) / number:.1f} CPU s to start), of Ray's servers {servers - idle:.1f} more"
        )
        print(
            f"  {kind:<14} {wall:7.1f} s  {together[kind]:7.1f} CPU s{ray_only if each else ''}"
            f"  load {os.getloadavg()[0]:.1f}  {'same bits' if alike else 'OTHER BITS'}",
            flush=True,
        )
    ray.shutdown()
    return alike, busiest, together


def main() -> int:
    """Print lines for each number of examples, and the two ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--records", type=int, default=200)
    parser.add_argument("--accountant", choices=("rdp", "pld"), default="rdp")
    chosen = parser.parse_args()
    if ray is None:
        print('skipped: Ray is not installed (pip install "indpriv[ray]")')
        return 0
    good, found = True, []
    for n in chosen.examples:
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            write_run(run_dir, n, chosen.records)
            method = Method(delta=1e-10, accountant=chosen.accountant)
            alike, busiest, together = measured(run_dir, method)
        found.append(together)
        speedup = busiest["1 Ray worker"] / busiest["2 Ray workers"]
        overhead = together["2 Ray workers"] / together["2 threads"]
        reached = alike and speedup >= LEAST_SPEEDUP and overhead <= LARGEST_OVERHEAD
        good = good and reached
        print(
            f"{n:,} x {chosen.records} by {chosen.accountant}: the busiest of 2 Ray workers has {speedup:.2f} times less to do, "
            f"target at least {LEAST_SPEEDUP}; all together {overhead:.2f} of 2 threads, target at most {LARGEST_OVERHEAD}: "
            f"{'ok' if reached else 'MISSED'}",
            flush=True,
        )
    if len(found) > 1:
        for kind in found[0]:
            each = (found[-1][kind] - found[0][kind]) / (chosen.examples[-1] - chosen.examples[0])
            fixed = found[0][kind] - each * chosen.examples[0]
            print(
                f"  {kind:<14} {fixed:.2f} CPU s, and {each * 1e6:.2f} more for each million examples"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
