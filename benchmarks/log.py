"""What the log costs: bytes per example and full record, and writing a record as a share of the pass that takes its norms.

python benchmarks/log.py
python benchmarks/log.py --at-scale    # sizes and times of runs of 10^8 examples, extrapolated
python benchmarks/log.py --batch-norms    # those of many examples

A pass is timed on some examples and scaled to the data set, since its time is proportional to them; records are written
whole, fsync included. Times are those of this process on one thread; the time spent waiting for the disk is printed beside them. The small
network is the hardest case here: the cheaper the pass, the larger the share of writing.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pyarrow.parquet as pq
import torch
from made_up import COUNTS, HEADER
from numpy.typing import NDArray
from torch import nn

from audits.training.config import ModelConfig
from audits.training.models import build_model
from indpriv import NormLog
from indpriv._files import JournalWriter
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.records import PART_SIZE
from indpriv.norm_log.run_files import IDS, JOURNAL, RECORDS
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording.norms.norm_pass import NormPass

SIZES = (60_000, 1_000_000)
ROUNDS = 5
MAX_GRAD_NORM = 1.0
LARGEST_SHARE, LARGEST_BYTES = 0.05, 1.0  # targets
LOSS = nn.CrossEntropyLoss(reduction="none")
CASES: dict[
    str, tuple[Callable[[], nn.Module], tuple[int, ...], int]
] = {  # model, shape of an example, how many are timed
    "one hidden layer of 64, 105 features": (
        lambda: build_model(ModelConfig(architecture="mlp", hidden=(64,)), (105,), 2),
        (105,),
        60_000,
    ),
    "two-layer CNN, 28x28": (
        lambda: build_model(ModelConfig(architecture="tanh_cnn"), (1, 28, 28), 10),
        (1, 28, 28),
        4096,
    ),
}


def timed_pass(
    build: Callable[[], nn.Module], shape: tuple[int, ...], size: int
) -> tuple[float, NDArray[np.float64]]:
    """CPU seconds per example of the best of some passes, and the norms."""
    inputs = torch.randn(size, *shape)
    targets = torch.randint(0, 2, (size,))
    seconds = []
    with NormPass(build(), LOSS, inputs[:256], targets[:256]) as norm_pass:
        for _ in range(ROUNDS):
            start = time.process_time()
            norms, _ = norm_pass(inputs, targets)
            seconds.append(time.process_time() - start)
    return min(seconds) / size, norms.numpy()


def timed_write(norms: NDArray[np.float64]) -> tuple[float, float, float, float]:
    """CPU seconds and wall seconds of writing one record; bytes per example before and after compression."""
    with tempfile.TemporaryDirectory() as folder:
        writer = NormLogWriter(
            Path(folder), HEADER, np.arange(len(norms)), None, np.zeros(0, dtype=np.int64)
        )
        cpu, wall = [], []
        for step in range(ROUNDS):
            start = time.process_time(), time.perf_counter()
            writer.record(
                step, norms, max_grad_norm=MAX_GRAD_NORM, targets_fingerprint="", seconds=0.0
            )
            cpu.append(time.process_time() - start[0])
            wall.append(time.perf_counter() - start[1])
        writer.close()
        path = next((Path(folder) / RECORDS).glob("*.parquet"))
        metadata = pq.read_metadata(path)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        plain = sum(group.column(0).total_uncompressed_size for group in groups)
        return min(cpu), min(wall), plain / len(norms), path.stat().st_size / len(norms)


def at_scale() -> None:
    """A long record, and the journal of a run of weeks that was resumed often: measured, then extrapolated in print."""
    n, target = 10_000_000, 100_000_000
    norms = np.random.default_rng(0).lognormal(-0.5, 0.6, n)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        writer = NormLogWriter(run_dir, HEADER, np.arange(n), None, np.zeros(0, dtype=np.int64))
        start = time.process_time(), time.perf_counter()
        writer.record(0, norms, max_grad_norm=MAX_GRAD_NORM, targets_fingerprint="", seconds=0.0)
        cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
        writer.close()
        parts = list((run_dir / RECORDS).glob("*.parquet"))
        size, ids = sum(path.stat().st_size for path in parts), (run_dir / IDS).stat().st_size
    times = target / n
    print(
        f"a record of {n:,} examples: {len(parts)} files, {size / 2**20:.1f} MiB ({size / n:.3f} bytes per example), {cpu:.2f} CPU s, "
        f"{wall:.2f} s with the disk; ids {ids / 2**20:.1f} MiB once\n"
        f"of {target:,}, times {times:g}: {size * times / 2**30:.2f} GiB, {cpu * times:.0f} CPU s, {wall * times:.0f} s a record; 200 "
        f"records {200 * size * times / 2**30:.0f} GiB"
    )
    parts_of_target, steps, sessions = -(-target // PART_SIZE), 1_000_000, 100
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        writer = NormLogWriter(run_dir, HEADER, np.arange(4), None, np.zeros(0, dtype=np.int64))
        writer.close()
        with JournalWriter(run_dir) as journal:
            first = 0
            for record in range(200):
                pieces = [
                    [250_000, f"{record * parts_of_target + part:064x}"]
                    for part in range(parts_of_target)
                ]
                journal.append(
                    "record", wait=False, step=first, n_examples=4, max_grad_norm=1.0, ids_fingerprint="",
                    targets_fingerprint="", seconds=1.0, file=f"{first:012d}.parquet", parts=pieces,
                )  # fmt: skip
                for _ in range(10):  # flushes between records
                    count = steps // 2000
                    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.001}
                    journal.append(
                        "steps",
                        wait=False,
                        first=first,
                        count=count,
                        evidence=COUNTS.to_json(),
                        **settings,
                    )
                    first += count
                if record % (200 // sessions) == 1:  # killed, and resumed ten steps before
                    first -= 10
                    journal.append("truncate", wait=False, step=first)
        size = (run_dir / JOURNAL).stat().st_size
        start = time.process_time(), time.perf_counter()
        state = read_state(run_dir)
        cpu, wall = time.process_time() - start[0], time.perf_counter() - start[1]
    print(
        f"a journal of {state.total_steps:,} steps, {len(state.lines['record'])} records of {parts_of_target} parts, resumed {sessions} times: "
        f"{size / 2**20:.1f} MiB; to open it {cpu:.2f} CPU s, {wall:.2f} s"
    )


def batch_norms() -> None:
    """Batch norms of 2 x 10^6 examples: writing them, and reading those of 10,000."""
    n, steps, flush, rate = 2_000_000, 200, 20, 0.02
    rng = np.random.default_rng(0)
    base = rng.lognormal(-0.5, 0.6, n)
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        writer = NormLogWriter(run_dir, HEADER, np.arange(n), None, np.zeros(0, dtype=np.int64))
        cpu = 0.0
        for first in range(0, steps, flush):
            drawn = [np.flatnonzero(rng.random(n) < rate) for _ in range(flush)]
            batches = [(batch, base[batch]) for batch in drawn]
            start = time.process_time()
            writer.free(first, batches, np.full(flush, MAX_GRAD_NORM))
            cpu += time.process_time() - start
            settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": rate}
            writer.steps(first, flush, counts=COUNTS, **settings)
        writer.close()
        norms = NormLog.open(run_dir).batch_norms
        sizes = [path.stat().st_size for path in (run_dir / RECORDS).glob("*.parquet")]
        start = time.process_time()
        entries = len(norms.read(1_000_000, 1_010_000))
        read = time.process_time() - start
    print(
        f"batch norms of {n:,} examples in {steps} steps: {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB, written in {cpu:.1f} CPU s; "
        f"{entries:,} entries of 10,000 examples read in {read:.3f} CPU s"
    )


def verdict(value: float, limit: float) -> str:
    """Whether a target is reached."""
    return "ok" if value <= limit else "MISSED"


def main() -> None:
    """Print a line for each model and size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1:] == ["--at-scale"]:
        at_scale()
        return
    if sys.argv[1:] == ["--batch-norms"]:
        batch_norms()
        return
    for title, (build, shape, size) in CASES.items():
        per_example, found = timed_pass(build, shape, size)
        for n in SIZES:
            norms = np.random.default_rng(0).choice(found, n) * np.random.default_rng(1).uniform(
                0.9, 1.1, n
            )
            cpu, wall, plain, packed = timed_write(norms)
            share = cpu / (per_example * n)
            print(
                f"{title}, {n:,} examples: a pass {per_example * n:.2f} s, a record {cpu * 1e3:.1f} ms ({wall * 1e3:.1f} ms with "
                f"the disk), {share:.2%} of it, target at most {LARGEST_SHARE:.0%}: {verdict(share, LARGEST_SHARE)}; "
                f"{plain:.3f} bytes per example, {packed:.3f} compressed, target at most {LARGEST_BYTES:g}: "
                f"{verdict(plain, LARGEST_BYTES)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
