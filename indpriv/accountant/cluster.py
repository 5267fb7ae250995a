"""Blocks on a Ray cluster, and what decides whether a worker there computes the same bits."""

from __future__ import annotations

import errno
import hashlib
import os
import platform
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar, cast

from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv._files import sha256
from indpriv.errors import InputError

_RETRIES = 100  # of a task whose worker dies
_ANSWERS_WITHIN = 10.0  # seconds
_IN_WORKER = threading.Event()  # set in a Ray worker
_PACKAGES = ("indpriv", "numpy", "scipy", "pyarrow")  # that decide the bits of a result
_CODE = ("*.py", *(f"{name}/**/*.py" for name in ("accountant", "epsilon_table", "norm_log")))

Result = TypeVar("Result")


def n_cores() -> int:
    """Cores this process may use: one in a Ray worker, whose neighbours have the others."""
    if _IN_WORKER.is_set():
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_ahead(
    begin: Callable[..., Any],
    result: Callable[[Any], Result],
    cancel: Callable[[Any], object],
    tasks: Iterable[tuple[Any, ...]],
    n_at_once: int,
) -> Iterator[Result]:
    """Yield result(begin(*task)) in the order of the tasks; a few tasks run ahead.

    Twice as many as run at once are begun, and one more, so that no core waits.
    """
    running = deque[Any]()
    try:
        for task in tasks:
            running.append(begin(*task))
            if len(running) > 2 * n_at_once:
                yield result(running.popleft())
        while running:
            yield result(running.popleft())
    finally:  # after an error, or if the caller stops early
        for waiting in running:
            cancel(waiting)


class RayPool:
    """Runs tasks on a Ray cluster, each on one core.

    Nothing is kept in actors: a task whose worker or node dies runs again elsewhere.

    Attributes:
        n_tasks: that the cluster is expected to run at once; one with more cores runs more of them.
    """

    def __init__(self, ray: Any, n_tasks: int) -> None:
        self._ray, self.n_tasks = ray, n_tasks

    @classmethod
    def connect(cls, workers: int | None = None) -> RayPool:
        """The cluster at RAY_ADDRESS, the one of this machine, or a new one on this machine.

        Args:
            workers: n_tasks, by default the cores of the cluster.

        Raises:
            InputError: Ray is not installed, the cluster cannot be reached, or workers below 1.
        """
        try:
            import ray
        except ImportError as error:
            raise InputError('engine="ray" needs Ray: pip install "indpriv[ray]"') from error
        if not ray.is_initialized():
            _check_answers(os.environ.get("RAY_ADDRESS", ""))
            ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        return cls(
            ray, cores if workers is None else _checks.check_positive_int("workers", workers)
        )

    def sent(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """A function that begins work(*task) on a worker, and returns a reference to its result.

        The reference may stand in another task for the result. Results lie in Ray's object store,
        from which workers read them in place.
        """
        run = self._ray.remote(_run).options(num_cpus=1, max_retries=_RETRIES)
        shared = [self._ray.put(work)]  # in a list, Ray does not unpickle it
        return partial(run.remote, shared, versions())

    def in_order(
        self, work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """Yield the results of work(*task) in the order of the tasks; work is sent once.

        Both can be pickled.

        Raises:
            InputError: a worker has another version of Python or of a package, or lacks one; the
                disk of a node is full.
            Exception: whatever work raises.
        """
        yield from run_ahead(
            self.sent(work), self._result, self._ray.cancel, tasks, n_at_once=self.n_tasks
        )

    def _result(self, running: Any) -> Any:
        full = (
            "the disk of a Ray node is full: free it, or start Ray with another directory for what "
            "it spills (ray start --temp-dir)"
        )
        try:
            return self._ray.get(running)
        except self._ray.exceptions.OutOfDiskError as error:
            raise InputError(full) from error
        except self._ray.exceptions.RayTaskError as error:
            cause: BaseException = error
            while isinstance(cause, self._ray.exceptions.RayTaskError):  # of the task that read
                cause = cause.cause
            if isinstance(cause, ModuleNotFoundError):
                raise InputError(
                    f"a Ray worker cannot import {cause.name}: install indpriv on every node"
                ) from error
            if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:
                raise InputError(full) from error
            raise cause from error


def _check_answers(address: str) -> None:
    """InputError if nothing listens at an address with a port; Ray itself tries for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except OSError as error:
        raise InputError(
            f"no Ray cluster answers at RAY_ADDRESS={address} ({error}); start one with `ray start "
            "--head`, or unset RAY_ADDRESS to use this machine"
        ) from error


def _run(shared: list[Any], of_driver: dict[str, str], *task: Any) -> Any:
    """The result of one task; InputError if this worker has other versions than the driver."""
    for name, here in versions().items():
        if here != of_driver.get(name):
            raise InputError(
                f"a Ray worker has {name} {here}, and this process {of_driver.get(name)}: results "
                "could depend on where they are computed; install the same on every node"
            )
    if not _IN_WORKER.is_set():  # for good: the limit takes a while to set
        _IN_WORKER.set()
        threadpool_limits(1, user_api="blas")  # as in the process that prepared the work
    return _unpickled(shared[0])(*task)


@lru_cache(maxsize=2)  # what reads, and what computes
def _unpickled(shared: Any) -> Callable[..., Any]:
    """The work of the tasks, once in each worker process, with the tables that it has filled."""
    import ray

    return cast(Callable[..., Any], ray.get(shared))


@lru_cache
def versions() -> dict[str, str]:
    """Versions of all that decides the bits of a result."""
    packages = {name: version(name) for name in _PACKAGES}
    code = code_hash(Path(_checks.__file__).parent)
    return {"Python": platform.python_version(), **packages, "indpriv's code": code}


def code_hash(package: Path) -> str:
    """Hash of the sources that decide a result: in a checkout they change, the version does not."""
    found = hashlib.sha256()
    for path in sorted({path for pattern in _CODE for path in package.glob(pattern)}):
        found.update(f"{path.relative_to(package).as_posix()}\0{sha256(path)}\0".encode())
    return found.hexdigest()[:16]


versions()  # now: the files of a checkout may be others than those that were imported later
