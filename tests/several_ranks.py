"""Runs of two ranks, each in a process of its own, for tests/recording/opacus/test_ranks.py."""

from __future__ import annotations

import errno
import math
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.utils.fsdp_utils import FSDP2Wrapper
from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.data import TensorDataset

from indpriv import InputError, PrivacyFilter
from indpriv.norm_log.writer import NormLogWriter
from indpriv.recording import InsertedCanaries, Recorder
from runs import PER_EXAMPLE, Run, blobs, make_run, mlp

SIZE = 2
N = 240
# A fork server imports torch, and what optimizers need, once for all tests.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch._dynamo", "opacus", "indpriv.recording"])


def launch(
    scenario: Callable[..., Any],
    folder: Path,
    *arguments: Any,
    size: int = SIZE,
    timeout: float = 120,
) -> list[Any]:
    """What a scenario returns or raises on each rank; None for a rank that was killed."""
    place = folder / f"ranks-{len(list(folder.glob('ranks-*')))}"
    place.mkdir()
    ranks = [
        _processes.Process(target=_rank, args=(rank, size, scenario, place, arguments))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(timeout)
            if process.is_alive():
                raise TimeoutError(f"a rank hangs in {scenario.__name__}")
    finally:
        for process in ranks:
            process.kill()
    outcomes = [place / f"outcome-{rank}" for rank in range(size)]
    return [pickle.loads(path.read_bytes()) if path.exists() else None for path in outcomes]


def _rank(
    rank: int,
    size: int,
    scenario: Callable[..., Any],
    place: Path,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{place}/rendezvous", rank=rank, world_size=size
    )
    try:
        outcome = scenario(*arguments)
    except (ValueError, OSError, RuntimeError) as error:
        outcome = error
    (place / f"outcome-{rank}").write_bytes(pickle.dumps(outcome))
    sys.stdout.flush()
    os._exit(0)  # a rank that waits for one that is gone would take gloo's half hour to end


def make(dataset: Any = None, *, batch_size: int = 60, mode: str = "hooks", **options: Any) -> Run:
    """As tests.runs.make_run, on this rank."""
    sharded = mode == "ghost_fsdp"
    wrapper = FSDP2Wrapper if sharded else DifferentiallyPrivateDistributedDataParallel
    model = wrapper(mlp())  # seeds torch alike on every rank
    torch.seed()
    return make_run(dataset or blobs(N), model, batch_size=batch_size, mode=mode, **options)


@contextmanager
def recorded(run: Run, run_dir: Path, **options: Any) -> Iterator[Recorder]:
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **{"every": 3} | options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        yield recorder


def train(
    run: Run, epochs: int, each: Callable[[int], None] = lambda step: None, loader: Any = None
) -> None:
    step = 0
    for epoch in range(epochs):
        run.loader.batch_sampler.set_epoch(epoch)
        for batch in loader or run.loader:
            each(step)
            run.step(*batch)
            step += 1


def with_expected_norms(run_dir: Path, mode: str) -> NDArray[np.float64]:
    """Norms (steps, N) by autograd of the first rank's model before each step, one by one."""
    copy = mlp()
    limits = [0.4, 0.1, 0.3, 0.2] if mode == "per_layer" else [math.inf] * 4
    layers = {"clipping": "per_layer", "max_grad_norm": limits}
    run = make(**(layers if mode == "per_layer" else {"mode": mode}))
    inputs, targets = run.dataset.tensors
    expected: list[list[float]] = []

    def note(_: int) -> None:
        for mine, theirs in zip(copy.parameters(), run.model.parameters(), strict=True):
            whole = theirs.full_tensor() if mode == "ghost_fsdp" else theirs
            mine.data = whole.detach().clone()
        if dist.get_rank() > 0:
            return
        norms = []
        for example, target in zip(inputs, targets, strict=True):
            loss = PER_EXAMPLE(copy(example), target)
            gradients = torch.autograd.grad(loss, list(copy.parameters()))
            each = zip(gradients, limits, strict=True)
            norms.append(math.hypot(*(min(float(g.double().norm()), c) for g, c in each)))
        expected.append(norms)

    with recorded(run, run_dir, every=1, rounding=0, batch_norms=True):
        train(run, 2, note)
    return np.array(expected)


def in_small_batches(run_dir: Path) -> None:
    run = make()
    with (
        recorded(run, run_dir, batch_norms=True),
        BatchMemoryManager(
            data_loader=run.loader, max_physical_batch_size=7, optimizer=run.optimizer
        ) as loader,
    ):
        train(run, 2, loader=loader)


def filtered(run_dir: Path, mode: str) -> None:
    run = make(noise_multiplier=0.7, mode=mode)

    def evaluate(_: int) -> None:
        with torch.no_grad():  # after which FSDP2 keeps parameters whole
            run.model(run.dataset.tensors[0][:4])

    options = {
        "individual_clipping": True,
        "clip_headroom": 0.0,
        "privacy_filter": PrivacyFilter(3.0, 3.0),
    }
    with recorded(run, run_dir, **options):
        train(run, 3, evaluate)


def one_trains_otherwise(run_dir: Path, mode: str) -> None:
    """The second rank trains another loss at some steps."""
    run = make(mode=mode)
    with recorded(run, run_dir, every="once"):
        for epoch in range(2):
            run.loader.batch_sampler.set_epoch(epoch)
            for step, (inputs, targets) in enumerate(run.loader):
                factor = 3.0 if dist.get_rank() == 1 and step % 3 == 2 else 1.0
                run.optimizer.zero_grad()
                run.criterion(factor * run.model(inputs), targets).backward()
                run.optimizer.step()


def one_is_killed(run_dir: Path, moment: str) -> None:
    run = make()
    dies = dist.get_rank() == 1

    def loss(outputs: Any, targets: Any) -> Any:
        if dies and moment == "in a comparison" and state["step"] == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return PER_EXAMPLE(outputs, targets)

    def each(step: int) -> None:
        state["step"] = step
        if dies and moment == "between steps" and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    state = {"step": 0}
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=loss, every=3)
    with recorder.attach(run.model, run.optimizer, run.loader):
        train(run, 3, each)


def disk_is_full(run_dir: Path) -> None:
    """Where the first rank writes."""

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run = make()
    with recorded(run, run_dir):
        train(run, 1)
        NormLogWriter.record = fails  # type: ignore[method-assign]
        train(run, 3)


def differ(run_dir: Path, what: str) -> None:
    """The second rank does something of its own."""
    dataset = blobs(N)
    alone = dist.get_rank() == 1
    if what == "a NaN":
        dataset = TensorDataset(dataset.tensors[0].clone(), dataset.tensors[1])
    canaries = InsertedCanaries(blobs(N), blobs(40), seed=dist.get_rank() if what == "coins" else 0)
    if what == "coins":
        dataset = canaries.train_set
    run = make(dataset, **({"noise_multiplier": 0.5} if alone and what == "noise" else {}))
    if what == "seed":
        torch.manual_seed(2**40 + 3)
    if alone and what == "divisor":
        run.optimizer.expected_batch_size /= 2
    options: dict[str, Any] = {"rounding": 0.02} if alone and what == "rounding" else {}
    options |= {"attack": canaries} if what == "coins" else {}

    def each(step: int) -> None:
        if step == 4 and what == "reseeded":
            torch.manual_seed(2**40 + 3)
        if alone and step == 4 and what == "parameters":
            next(run.model.parameters()).data[0, 0] += 1e-3
        if (
            step == 2 and what == "a NaN"
        ):  # the last batch before the pass of step 3 is fetched: training never sees it
            dataset.tensors[0][N - 1] = float("nan")
        if alone and step == 4 and what == "an end":
            raise StopIteration

    with recorded(run, run_dir, **options):
        if alone and what == "epoch":
            run.loader.batch_sampler.shuffle_seed = 1
        try:
            train(run, 2, each)
        except StopIteration:
            return


def half_a_shard_is_lost(run_dir: Path) -> None:
    """The sampler of the second rank never draws the second half of its shard."""
    draw = DistributedUniformWithReplacementSampler.__iter__

    def lossy(sampler: Any) -> Iterator[Any]:
        lost = set(torch.arange(N)[sampler.rank :: sampler.num_replicas][N // 4 :].tolist())
        for batch in draw(sampler):
            yield (
                batch
                if sampler.rank == 0
                else torch.tensor([i for i in batch.tolist() if i not in lost])
            )

    DistributedUniformWithReplacementSampler.__iter__ = lossy
    run = make(batch_size=N // 2)
    run.loader.batch_sampler.shuffle = False
    with recorded(run, run_dir):
        train(run, 16)


def a_batch_is_dropped(run_dir: Path) -> None:
    """As Opacus's sampler drops an empty batch; here on all ranks, so that they stay in step."""
    draw = DistributedUniformWithReplacementSampler.__iter__

    def dropping(sampler: Any) -> Iterator[Any]:
        yield from (batch for number, batch in enumerate(draw(sampler)) if number != 2)

    DistributedUniformWithReplacementSampler.__iter__ = dropping
    run = make()
    with recorded(run, run_dir):
        train(run, 2)


def resumed(run_dir: Path) -> dict[str, Any]:
    """Five steps, and then the same log again from there."""
    run = make()
    with recorded(run, run_dir, individual_clipping=True) as recorder:
        train(run, 1)
        state = recorder.state_dict()
    with recorded(run, run_dir, individual_clipping=True, resume_at=state):
        train(run, 1)
    return state


def _divided_otherwise(model: Any) -> None:
    for part in FSDP2Wrapper(model).modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)


SHARDED_OTHERWISE: dict[str, Callable[[Any], None]] = {
    "half precision": lambda model: FSDP2Wrapper(
        model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    ),
    "a sum over ranks": _divided_otherwise,
    "one parameter whole": lambda model: fully_shard(model, ignored_params={model[2].bias}),
    "in each rank": lambda model: fully_shard(
        model, mesh=init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("a", "b"))["b"]
    ),
}


def sharded_otherwise(run_dir: Path) -> dict[str, str]:
    """What is said of each model that FSDP2 does not shard as Opacus's noise assumes."""
    said = {}
    for what, shard in SHARDED_OTHERWISE.items():
        model = mlp()
        shard(model)
        torch.seed()
        run = make_run(blobs(N), model, batch_size=60, mode="ghost_fsdp")
        try:
            with recorded(run, run_dir):
                said[what] = ""
        except InputError as error:
            said[what] = str(error)
    return said


def without_shards(run_dir: Path, what: str) -> None:
    """Set-ups that several ranks cannot be accounted in."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if what == "small batches":
            run = make(batch_size=12)
        elif what == "shuffled":
            run = make(poisson_sampling=False)
        elif what == "plain DDP":
            model = torch.nn.parallel.DistributedDataParallel(mlp())
            run = make_run(blobs(N), model, batch_size=60)
        else:
            run = make()
    options = {"on_write_error": "continue"} if what == "continue" else {}
    with recorded(run, run_dir, **options):
        train(run, 1)
