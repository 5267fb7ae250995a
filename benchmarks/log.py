"""What the log costs: bytes per example and full record, and writing a record as a share of the pass that takes its norms.

python benchmarks/log.py

A pass is timed on some examples and scaled to the data set, since its time is proportional to them; records are written
whole, fsync included. Times are those of this process on one thread; the time spent waiting for the disk is printed beside them. The small
network is the hardest case here: the cheaper the pass, the larger the share of writing.
"""

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from torch import nn

from indpriv.norm_log.run_files import RECORDS
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from indpriv.recording.norms.norm_pass import NormPass
from indpriv.training.config import ModelConfig
from indpriv.training.models import build_model

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
HEADER = LogHeader(
    rounding=0.01,
    rounding_mode="up",
    unit="example",
    neighbouring="add_remove",
    sampler="poisson",
    individually_clipped=False,
    norm_pass={"caveats": []},
)


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


def verdict(value: float, limit: float) -> str:
    """Whether a target is reached."""
    return "ok" if value <= limit else "MISSED"


def main() -> None:
    """Print a line for each model and size."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
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
