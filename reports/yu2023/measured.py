"""What no audit holds and has to be measured or drawn, once, into yu2023.json: it describes public data sets only.

Each part is kept with what it came from, and made again where that has changed or a release was refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import multiprocessing
import os
import platform
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from indpriv.audit.audit_directory import EPSILON
from indpriv.epsilon_table import EpsilonTable
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.run_files import JOURNAL
from indpriv.release import Request, release
from indpriv.release.ledger import DEFAULT_QUANTILES, DESCENT, EXPONENTIAL, HISTOGRAM
from indpriv.release.mechanisms import ROUNDS
from reports.yu2023.audits import PAPERS, ROOT, folder_of, read_audits, values_of
from reports.yu2023.paper import DELTA, INDIVIDUAL_CLIPPING_SEEDS, RELEASE_EPSILON
from reports.yu2023.sweeps import SWEEPS, SWEPT, found_in

FILE = "yu2023/yu2023.json"
PUBLIC_RELEASES = ("mnist", "cifar10")  # of Table 2
NORM_RELEASES = ("utkface_gender", "mnist")  # of footnote 3, and one more
METHODS = {
    EXPONENTIAL: "private selection (the default)",
    HISTOGRAM: "noisy histogram",
    DESCENT: f"descent of Andrew et al. 2021, {ROUNDS} rounds",
}
DISTRIBUTION, TABLE_1, TABLE_2, TABLE_3, TABLE_3_WHOLE, FOOTNOTE_3, MACHINE = (
    "distribution",
    "table_1",
    "table_2",
    "table_3",
    "table_3_whole",
    "footnote_3",
    "machine",
)


def read_measured(reports: Path) -> dict[str, Any]:
    """The content of yu2023.json; nothing where it does not exist yet."""
    path = reports / FILE
    return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}


def machine() -> dict[str, Any]:
    """The machine: processor, cores, threads and versions."""
    import torch

    from indpriv.recording.process import processor

    return {
        "processor": processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.now(UTC).date().isoformat(),
        "versions": {
            name: version(name) for name in ("indpriv", "torch", "opacus", "numpy", "opendp")
        }
        | {"python": platform.python_version()},
    }


def statistics_of(values: np.ndarray[Any, np.dtype[np.float64]]) -> list[float]:
    """The six statistics of Table 2: average, then the quantiles."""
    return [
        float(values.mean()),
        *(float(value) for value in np.quantile(values, DEFAULT_QUANTILES)),
    ]


def distribution(audit_dir: Path) -> dict[str, Any]:
    """Smallest individual epsilon, and the statistics of Table 2 without privacy."""
    epsilon = EpsilonTable.open(audit_dir / EPSILON).table().epsilon
    return {"smallest": float(epsilon.min()), "statistics": statistics_of(epsilon)}


def table_2(audit_dir: Path) -> dict[str, Any]:
    """One release at (0.1, 0), or (0.1, 1e-5) where noise is Gaussian, by each method, paid for in the audit's ledger."""
    requests = {
        name: Request(
            mean=True, epsilon=RELEASE_EPSILON, delta=DELTA if name == DESCENT else 0.0, method=name
        )
        for name in METHODS
    }
    try:
        drawn = {name: release(audit_dir, request).content for name, request in requests.items()}
    except InputError as error:
        return {"refused": str(error)}
    return {
        "methods": {
            name: [
                content["mean"],
                *(content["quantiles"][f"{quantile:g}"] for quantile in DEFAULT_QUANTILES),
            ]
            for name, content in drawn.items()
        },
        "descent": drawn[DESCENT]["method_description"],
        "spent": drawn[DESCENT]["spent"],
    }


def footnote_3(run_dir: Path) -> dict[str, Any]:
    """Median gradient norm before the first step, without and with privacy."""
    log = NormLog.open(run_dir)
    row = log.records[:1].read(0, log.n_examples)[0]
    clip = float(log.settings.max_grad_norm[0])
    norms = log.levels.norms(row.astype(log.levels.dtype), clip) if log.levels.rounding else row
    found = {"max_grad_norm": clip, "non_private": float(np.median(norms))}
    try:
        content = release(run_dir, Request((0.5,), epsilon=RELEASE_EPSILON)).content
    except InputError as error:
        return {**found, "refused": str(error)}
    return {**found, "private": content["quantiles"]["0.5"], "values": content["values"]}


def table_1() -> dict[str, float]:
    """Seconds with and without rounding; see benchmarks/accountant.py."""
    return dict(_benchmark("accountant").table_1())


@dataclass(frozen=True)
class Pairs:
    """How the seeded runs of Table 3 are trained.

    Attributes:
        whole: of all images, as audits/<name>.toml says, with and without individual clipping; else of few images, and
            without headroom as well.
        device: as `python -m audits train` takes it.
        jobs: number of runs at a time.
    """

    whole: bool = False
    device: str = "cpu"
    jobs: int = 1


def table_3(
    name: str, data_dir: Path, tell: Callable[[str], None], pairs: Pairs = Pairs()
) -> dict[str, Any]:
    """The same seeded runs with ordinary and with individual clipping; see benchmarks/individual_clipping.py."""
    clipping = _benchmark("individual_clipping")
    _, _, setting = clipping.prepare(name, str(data_dir), None, full=pairs.whole)
    seeds = clipping.SEEDS[:INDIVIDUAL_CLIPPING_SEEDS]
    arms = (_ORDINARY, _INDIVIDUAL) if pairs.whole else (_ORDINARY, _INDIVIDUAL, _NO_HEADROOM)
    spawned = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    with ProcessPoolExecutor(pairs.jobs, mp_context=spawned) as pool:
        begun = {
            (arm, seed): pool.submit(_arm, name, data_dir, pairs, seed, arm)
            for seed in seeds
            for arm in arms
        }
        for (arm, seed), one in begun.items():
            tell(f"{TABLE_3}: {name}, seed {seed}, {arm}: {one.result()['accuracy']:.2f} %")
    return {
        "setting": setting,
        "headroom": clipping.COMPARED[1].headroom,
        "seeds": list(seeds),
        **{arm: [begun[arm, seed].result() for seed in seeds] for arm in arms},
    } | ({"device": pairs.device} if pairs.whole else {})


_ORDINARY, _INDIVIDUAL, _NO_HEADROOM = "ordinary", "individual", "no_headroom"


def _arm(name: str, data_dir: Path, pairs: Pairs, seed: int, arm: str) -> dict[str, Any]:
    """One run, in a process of its own."""
    import torch

    torch.set_num_threads(1)
    clipping = _benchmark("individual_clipping")
    config, dataset, _ = clipping.prepare(name, str(data_dir), None, full=pairs.whole)
    ordinary, individual = clipping.COMPARED
    how = {_ORDINARY: ordinary, _INDIVIDUAL: individual, _NO_HEADROOM: clipping.NO_HEADROOM}[arm]
    return asdict(clipping.train_arm(config, dataset, seed, how, pairs.device))


class _Kept:
    """The content of yu2023.json, written after each part that is made."""

    def __init__(self, reports: Path, tell: Callable[[str], None]) -> None:
        self._path, self._tell, self._content = reports / FILE, tell, read_measured(reports)

    def keep(self, part: str, key: str, source: str, make: Callable[[], Any]) -> None:
        """Make what is missing, of another source or was refused."""
        content = self._content
        known = content.get(part, {}).get(key, {})
        if known.get("source") == source and "refused" not in known["found"]:
            return
        self._tell(f"{part}: {key}")
        content.setdefault(part, {})[key] = {"source": source, "found": make()}
        if part == TABLE_1 or MACHINE not in content:  # whose seconds are of one machine
            content[MACHINE] = machine()
        self._path.write_text(
            json.dumps(content, indent=1, sort_keys=True, allow_nan=False) + "\n", encoding="utf-8"
        )


def measure_seeds(
    reports: Path, data_dir: Path, tell: Callable[[str], None], names: Sequence[str], pairs: Pairs
) -> None:
    """Add to yu2023.json what is missing of seeded pairs of whole runs; a data set is kept when all its runs have ended."""
    kept, clipping = _Kept(reports, tell), _benchmark("individual_clipping")
    for name in names:
        audit = (ROOT / "audits" / f"{name}.toml").read_bytes()
        source = hashlib.sha256(audit + repr(clipping.COMPARED).encode()).hexdigest()
        kept.keep(TABLE_3_WHOLE, name, source, partial(table_3, name, data_dir, tell, pairs))


def measure(reports: Path, data_dir: Path | None, tell: Callable[[str], None]) -> None:
    """Add to yu2023.json what is missing or of another run; it is written after each part.

    Args:
        reports: folder of the audits, and of the runs in runs/.
        data_dir: folder of the data sets, or None.
        tell: called with what is being measured.
    """
    keep = _Kept(reports, tell).keep
    for name, audit in read_audits(reports).items():
        for account, summary in audit.accounts.items():
            key = folder_of(name, account)
            folder = reports / key
            if not (folder / EPSILON).is_file():
                continue  # a checkout holds the summaries only
            keep(DISTRIBUTION, key, values_of(summary), partial(distribution, folder))
            if name in PUBLIC_RELEASES:
                keep(TABLE_2, key, values_of(summary), partial(table_2, folder))
        run_dir = reports / "runs" / name
        if (run_dir / JOURNAL).is_file() and name in NORM_RELEASES:
            keep(FOOTNOTE_3, name, audit.run_id, partial(footnote_3, run_dir))
    for name, planned in SWEEPS.items():
        page = reports / "runs" / planned.folder / "sweep.json"
        if page.is_file():
            source = hashlib.sha256(page.read_bytes()).hexdigest()
            keep(SWEPT, name, source, partial(found_in, page.parent))
    keep(TABLE_1, "cifar10", "benchmarks/accountant.py", table_1)
    if data_dir is not None:
        clipping = _benchmark("individual_clipping")
        for name in PAPERS:
            settings = (clipping.SHORT[name], *clipping.COMPARED, clipping.NO_HEADROOM)
            source = hashlib.sha256(repr(settings).encode()).hexdigest()
            try:
                keep(TABLE_3, name, source, partial(table_3, name, data_dir, tell))
            except InputError as error:  # its files are not there
                tell(f"{TABLE_3}: {name}: {error}")


def _benchmark(name: str) -> ModuleType:
    """A script of benchmarks/ as a module."""
    spec = importlib.util.spec_from_file_location(
        f"benchmarks_{name}", ROOT / "benchmarks" / f"{name}.py"
    )
    if spec is None or spec.loader is None:
        raise InputError(f"benchmarks/{name}.py is missing; run this in a whole checkout")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
