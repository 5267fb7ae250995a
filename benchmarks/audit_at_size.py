"""A whole audit at size: python benchmarks/audit_at_size.py [--examples 1000000] [--keep DIR].

A made-up run of 200 steps with 20 records, labels, three metadata columns, and a test set of a hundredth of its size (or
of --test-examples) is written by the package's own writer; `indpriv.audit.audit` then accounts, analyses and reports it in
this process. Each stage prints its wall and CPU seconds, the memory it left in use, and the peak so far. Exit code 1 where
a target is missed.

With --parts N nothing is written or accounted: the statistics of N parts of a million made-up examples (two group tables and
the relation to loss) are added up as they come, and a line shows what memory they take.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pandas as pd
import pyarrow as pa
from made_up import COUNTS, HEADER
from numpy.typing import NDArray

from indpriv._columns import Rows
from indpriv._files import write_private_frames
from indpriv.analysis.distribution import relate_to_loss
from indpriv.analysis.groups import group_table
from indpriv.audit import audit
from indpriv.norm_log.run_files import EXAMPLES
from indpriv.norm_log.writer import NormLogWriter

STEPS, EVERY = 200, 10
SETTINGS = {"noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.001}
DELTA = 1e-9  # below 1/n of every size
LARGEST_WITH_A_TIME = 10**7  # examples; of more, only memory has a target
MOST_GIB, MOST_MINUTES = 4.0, 10.0  # targets up to there
MOST_GIB_OF_DRIVER = 1.0  # of more examples, and of statistics of parts
PART = 1_000_000
SPLITS = ("train", "test")


def examples_of(split: str, n: int, losses: NDArray[np.float64]) -> Iterator[pd.DataFrame]:
    """Yield rows of n examples in parts; their losses are kept in the first of losses, too."""
    for start in range(0, n, PART):
        rng = np.random.default_rng([SPLITS.index(split), start])
        size = min(PART, n - start)
        label = rng.integers(0, 2, size)
        loss = rng.gamma(2.0, 0.3, size) * (1 + label)
        losses[start : start + size] = loss
        columns = {
            "example_id": np.arange(start, start + size),
            "unit_id": np.arange(start, start + size),
            "split": split,
            "label": label,
            "loss": loss,
            "correct": loss < 1.0,
            "sex": np.array(["Female", "Male"], object)[rng.integers(0, 2, size)],
            "race": np.array(list("abcde"), object)[rng.integers(0, 5, size)],
            "age": rng.integers(17, 90, size),
        }
        yield pd.DataFrame(columns)


def write_run(run_dir: Path, n: int, n_test: int) -> None:
    """A finished run of n examples whose norms grow with their losses, and n_test test examples.

    Of arrays of all examples it holds ids, losses and the norms of one record.
    """
    unfinished = run_dir.with_name(f"{run_dir.name}.unfinished")
    unfinished.mkdir(parents=True, mode=0o700)
    losses, unused = np.empty(n), np.empty(n_test)
    every = chain(examples_of("train", n, losses), examples_of("test", n_test, unused))
    write_private_frames(every, unfinished / EXAMPLES, pa.schema([]))
    writer = NormLogWriter(unfinished, HEADER, np.arange(n), None, np.zeros(0, np.int64))
    rng, norms = np.random.default_rng(0), np.empty(n)
    for first in range(0, STEPS, EVERY):
        for start in range(0, n, PART):
            loss = losses[start : start + PART]
            noise = rng.uniform(0.8, 1.2, len(loss))
            norms[start : start + PART] = loss * (1.2 - 0.4 * first / STEPS) * noise + 0.01
        writer.record(first, norms, max_grad_norm=1.0, targets_fingerprint="", seconds=0.0)
        writer.steps(first, EVERY, **SETTINGS, counts=COUNTS)
    writer.finish(COUNTS)
    writer.close()
    settings = {"name": "benchmark", "delta": DELTA, "groups": ["sex", "race", "label"]}
    (unfinished / "run.json").write_text(json.dumps(settings), encoding="utf-8")
    unfinished.rename(run_dir)
    print(f"made in {peak():.2f} GiB at the peak", flush=True)


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


@dataclass(frozen=True)
class Part:
    """Epsilons of a part of made-up examples."""

    epsilon: NDArray[np.float64]
    worst_case_epsilon: float = 0.25

    @property
    def at_worst_case(self) -> NDArray[np.bool_]:
        """Which are at the worst case."""
        return self.epsilon >= self.worst_case_epsilon

    def __len__(self) -> int:
        return len(self.epsilon)


@dataclass(frozen=True)
class Parts:
    """Epsilons and rows of parts of made-up examples, each made when it is read."""

    n_parts: int
    worst_case_epsilon: float = 0.25
    account: ClassVar[Any] = SimpleNamespace(rows_per_unit=None)
    columns: tuple[str, ...] = ("label", "loss", "correct", "race", "sex")

    def __len__(self) -> int:
        return self.n_parts * PART

    def ranges(self) -> list[tuple[int, int]]:
        """The examples of each part."""
        return [(start, start + PART) for start in range(0, len(self), PART)]

    def read(self, start: int, stop: int, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The rows of one part."""
        return self._made(start)[0][list(columns or self.columns)]

    def tables(self) -> Iterator[Part]:
        """The epsilons of each part."""
        for number, (start, _) in enumerate(self.ranges(), 1):
            yield Part(self._made(start)[1])
            if number in (1, 3, 10, 30, 100, self.n_parts):
                used = f"{in_use():6.2f} GiB in use  {peak():6.2f} GiB at the peak"
                print(f"  {number * PART:>14,} examples  {used}", flush=True)

    def _made(self, start: int) -> tuple[pd.DataFrame, NDArray[np.float64]]:
        rng = np.random.default_rng(start)
        label = rng.integers(0, 2, PART)
        loss = rng.gamma(2.0, 0.3, PART) * (1 + label)
        epsilon = np.minimum(0.2 * loss**0.3 * rng.uniform(0.9, 1.1, PART), self.worst_case_epsilon)
        groups = {"race": rng.integers(0, 5, PART), "sex": rng.integers(0, 2, PART)}
        return pd.DataFrame(
            {"label": label, "loss": loss, "correct": loss < 1.0, **groups}
        ), epsilon


def statistics_of_parts(n_parts: int) -> None:
    """Make group tables and the relation to loss of parts of a million examples."""
    parts: Any = Parts(n_parts)
    rows = Rows(parts.columns, range(0, len(parts) + 1, PART), parts.read)
    nobody = rows.read(0, PART)[:0]
    for by in ("race", "sex"):
        start = time.process_time()
        found = group_table(parts, rows, nobody, by)
        print(f"{by}: {len(found.rows)} groups in {time.process_time() - start:.1f} CPU s")
    relation = relate_to_loss(parts, rows)
    print(
        f"tables made: {peak():.2f} GiB at the peak; Pearson's r {relation.pearson_log_loss:.4f};"
        f" ranks {relation.spearman:.4f}"
    )


def main() -> int:
    """Make the run in a process of its own, whose memory does not count, and audit it here."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=1_000_000)
    parser.add_argument("--test-examples", type=int, help="default: a hundredth of --examples")
    parser.add_argument("--keep", type=Path, help="where the run is kept, or found, for next time")
    parser.add_argument(
        "--parts", type=int, help="statistics of this number of parts, and no audit"
    )
    parser.add_argument("--make", action="store_true", help="only make the run that --keep keeps")
    chosen = parser.parse_args()
    if chosen.make and not chosen.keep:
        parser.error("--make makes a run to keep; say where: --keep DIR")
    if chosen.parts:
        statistics_of_parts(chosen.parts)
        return 0 if peak() <= MOST_GIB_OF_DRIVER else 1
    with tempfile.TemporaryDirectory() as folder:
        n_test = chosen.examples // 100 if chosen.test_examples is None else chosen.test_examples
        run_dir = (chosen.keep or Path(folder)) / f"run-{chosen.examples}-{n_test}"
        if not run_dir.exists():
            made = get_context("spawn").Process(
                target=write_run, args=(run_dir, chosen.examples, n_test)
            )
            made.start()
            made.join()
            if made.exitcode:
                return 1
        if chosen.make:
            return 0
        print(
            f"{chosen.examples:,} examples, {n_test:,} test examples, {STEPS // EVERY} records of"
            f" {STEPS} steps",
            flush=True,
        )
        stages, start = Stages(), time.perf_counter()
        audit(run_dir, Path(folder) / "audit", progress=stages)
        stages.end()
        minutes = (time.perf_counter() - start) / 60
    return _judged(chosen.examples, minutes)


def _judged(n: int, minutes: float) -> int:
    """Print what a whole audit of n examples took beside its targets; the exit code."""
    many = n > LARGEST_WITH_A_TIME
    most_gib, most_minutes = (MOST_GIB_OF_DRIVER, math.inf) if many else (MOST_GIB, MOST_MINUTES)
    good = peak() <= most_gib and minutes <= most_minutes
    limit = "no target" if many else f"target at most {most_minutes:g}"
    print(
        f"whole audit: {minutes:.2f} minutes, {limit}; "
        f"{peak():.2f} GiB, target at most {most_gib:g}: {'ok' if good else 'MISSED'}"
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
