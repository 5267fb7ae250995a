"""Computes blocks of work as tasks of Ray, on this machine or on a cluster.

Nothing is kept in actors: a task whose worker or node dies runs again elsewhere.
"""

from __future__ import annotations

import os
import platform
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from importlib.metadata import version
from typing import Any, TypeVar, cast

from threadpoolctl import threadpool_limits

from indpriv import _checks
from indpriv.errors import InputError

_RETRIES = 100  # of a task whose worker dies
_ANSWERS_WITHIN = 10.0  # seconds
_PACKAGES = ("indpriv", "numpy", "scipy", "pyarrow")  # that decide the bits of a result

Result = TypeVar("Result")


class RayPool:
    """Runs tasks on a Ray cluster, at most `n_tasks` at once, each on one core.

    Attributes:
        n_tasks: that run at once.
    """

    def __init__(self, ray: Any, n_tasks: int) -> None:
        self._ray, self.n_tasks = ray, n_tasks

    @classmethod
    def connect(cls, workers: int | None = None) -> RayPool:
        """The cluster at RAY_ADDRESS, the one of this machine, or a new one on this machine.

        Args:
            workers: the number of tasks that run at once, by default the cores of the cluster.

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

    def in_order(
        self, work: Callable[..., Result], tasks: Iterable[tuple[Any, ...]]
    ) -> Iterator[Result]:
        """Yield the results of work(*task) in the order of the tasks; a few tasks run ahead.

        Args:
            work: can be pickled; it is sent once.
            tasks: arguments of each, which can be pickled.

        Raises:
            InputError: a worker has another version of Python or of a package, or lacks one.
            Exception: whatever work raises.
        """
        run = self._ray.remote(_run).options(num_cpus=1, max_retries=_RETRIES)
        shared, versions = [self._ray.put(work)], _versions()  # in a list, Ray does not unpickle it
        running: deque[Any] = deque()
        try:
            for task in tasks:
                running.append(run.remote(shared, versions, *task))
                if len(running) > 2 * self.n_tasks:
                    yield self._result(running.popleft())
            while running:
                yield self._result(running.popleft())
        finally:  # after an error, or if the caller stops early
            for waiting in running:
                self._ray.cancel(waiting)

    def _result(self, running: Any) -> Any:
        try:
            return self._ray.get(running)
        except self._ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, ModuleNotFoundError):
                raise InputError(
                    f"a Ray worker cannot import {error.cause.name}: install indpriv on every node"
                ) from error
            raise error.cause from error


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


def _run(shared: list[Any], versions: dict[str, str], *task: Any) -> Any:
    """The result of one task; InputError if this worker has other versions than the driver."""
    for name, here in _versions().items():
        if here != versions[name]:
            raise InputError(
                f"a Ray worker has {name} {here}, and this process {versions[name]}: results could "
                "depend on where they are computed; install the same versions on every node"
            )
    with threadpool_limits(1, user_api="blas"):  # as in the process that prepared the work
        return _unpickled(shared[0])(*task)


@lru_cache(maxsize=1)
def _unpickled(shared: Any) -> Callable[..., Any]:
    """The work of the tasks, once in each worker process, with the tables that it has filled."""
    import ray

    return cast(Callable[..., Any], ray.get(shared))


@lru_cache
def _versions() -> dict[str, str]:
    return {"Python": platform.python_version(), **{name: version(name) for name in _PACKAGES}}
