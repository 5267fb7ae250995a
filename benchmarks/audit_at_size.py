"""A whole audit at size: python benchmarks/audit_at_size.py [--examples 1000000] [--keep DIR].

A made-up run of 200 steps with 20 records, labels, three metadata columns, and a test set of a hundredth of its size is
written by the package's own writer; `indpriv.audit.audit` then accounts, analyses and reports it in this process. Each stage
prints its wall and CPU seconds, the memory it left in use, and the peak so far. Exit code 1 where a target is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pandas as pd

from indpriv import ExampleTable
from indpriv.audit import audit
from indpriv.norm_log.run_files import EXAMPLES
from indpriv.norm_log.session_counts import Conversion, SessionCounts
from indpriv.norm_log.writer import LogHeader, NormLogWriter

STEPS, EVERY = 200, 10
SETTINGS = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.001}
DELTA = 1e-9  # below 1/n of every size
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
MOST_GIB, MOST_MINUTES = 4.0, 10.0  # targets for 10^7 examples


def examples_of(n: int, rng: np.random.Generator) -> ExampleTable:
    """Training examples, and a hundredth as many test examples."""
    frames = []
    for split, size in (("train", n), ("test", n // 100)):
        label = rng.integers(0, 2, size)
        loss = rng.gamma(2.0, 0.3, size) * (1 + label)
        columns = {
            "example_id": np.arange(size),
            "unit_id": np.arange(size),
            "split": split,
            "label": label,
            "loss": loss,
            "correct": loss < 1.0,
            "sex": np.array(["Female", "Male"], object)[rng.integers(0, 2, size)],
            "race": np.array(list("abcde"), object)[rng.integers(0, 5, size)],
            "age": rng.integers(17, 90, size),
        }
        frames.append(pd.DataFrame(columns))
    return ExampleTable(pd.concat(frames, ignore_index=True))


def write_run(run_dir: Path, n: int) -> None:
    """A finished run of n examples whose norms grow with their losses."""
    rng = np.random.default_rng(0)
    run_dir.mkdir(parents=True, mode=0o700)
    examples = examples_of(n, rng)
    loss = examples.frame["loss"].to_numpy()[:n]
    writer = NormLogWriter(run_dir, HEADER, np.arange(n), None, np.zeros(0, np.int64))
    for first in range(0, STEPS, EVERY):
        norms = loss * (1.2 - 0.4 * first / STEPS) * rng.uniform(0.8, 1.2, n) + 0.01
        writer.record(first, norms, max_grad_norm=1.0, targets_fingerprint="", seconds=0.0)
        writer.steps(first, EVERY, **SETTINGS, counts=COUNTS)
    writer.finish(COUNTS)
    writer.close()
    examples.to_parquet(run_dir / EXAMPLES)
    settings = {"name": "benchmark", "delta": DELTA, "groups": ["sex", "race", "label"]}
    (run_dir / "run.json").write_text(json.dumps(settings), encoding="utf-8")


def in_use() -> float:
    """GiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**30


def peak() -> float:
    """GiB of memory that this process held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class Stages:
    """Prints a line when the next stage begins; progress within a stage is not shown."""

    def __init__(self) -> None:
        self._name, self._start = "", (0.0, 0.0)

    def __call__(self, name: str, done: int, total: int) -> None:
        """What `audit` calls as its progress."""
        if name != self._name:
            self.end()
            self._name, self._start = name, (time.perf_counter(), time.process_time())

    def end(self) -> None:
        """Print the stage under way."""
        if self._name:
            wall, cpu = time.perf_counter() - self._start[0], time.process_time() - self._start[1]
            print(
                f"  {self._name:<40} {wall:8.1f} s  {cpu:8.1f} CPU s  {in_use():6.2f} GiB in use"
                f"  {peak():6.2f} GiB at the peak",
                flush=True,
            )


def main() -> int:
    """Make the run in a process of its own, whose memory does not count, and audit it here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--keep", type=Path, help="where the run is kept, or found, for next time")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run_dir = (chosen.keep or Path(folder)) / f"run-{chosen.examples}"
        if not run_dir.exists():
            made = get_context("spawn").Process(target=write_run, args=(run_dir, chosen.examples))
            made.start()
            made.join()
            if made.exitcode:
                return 1
        print(
            f"{chosen.examples:,} examples, {STEPS // EVERY} records of {STEPS} steps", flush=True
        )
        stages, start = Stages(), time.perf_counter()
        audit(run_dir, Path(folder) / "audit", progress=stages)
        stages.end()
        minutes = (time.perf_counter() - start) / 60
    good = peak() <= MOST_GIB and minutes <= MOST_MINUTES
    print(
        f"whole audit: {minutes:.2f} minutes, target at most {MOST_MINUTES:g}; "
        f"{peak():.2f} GiB, target at most {MOST_GIB:g}: {'ok' if good else 'MISSED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
