"""Accuracy and time of private releases, beside the non-private values: for the curator only, what it prints is sensitive.

python benchmarks/release.py [AUDIT_DIR ...]     default: the demo's audit (make demo)

For each audit, in the layout of Table 2 of Yu et al. 2023: the non-private values; one release at epsilon 0.1 by each method;
its mean absolute error over many draws; that of a single quantile at epsilon 0.1; and the peer, OpenDP's make_private_quantile
at the same share of the budget on the same candidates. Exit code 1 where a target is missed.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import numpy as np
import opendp.prelude as dp

from indpriv.epsilon_table import EpsilonTable
from indpriv.release import Request, release
from indpriv.release.mechanisms import N_CELLS
from indpriv.release.publish import draw
from indpriv.release.sources import to_cells

EPSILON, DELTA, PEOPLE, DRAWS = 0.1, 1e-6, 50_000, 20
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
QUANTILE_TARGET, MEAN_TARGET, SECONDS_TARGET = 0.01, 0.005, 2.0
DEMO = Path("reports/adult-demo")


def line(name: str, values: np.ndarray, note: str = "") -> None:
    """One row: average, then the quantiles."""
    print(
        f"  {name:<38}"
        + "".join(f"{value:>9.4f}" if np.isfinite(value) else f"{'':>9}" for value in values)
        + f"  {note}"
    )


def errors(
    request: Request, counts: np.ndarray, grid: np.ndarray, truth: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """One draw, and mean absolute errors of DRAWS of them, each in the order of Table 2."""
    drawn = []
    for _ in range(DRAWS):
        figures = draw(request, counts, grid)
        mean = np.nan if figures["mean"] is None else figures["mean"]
        drawn.append(
            [mean, *(figures["quantiles"].get(f"{quantile:g}", np.nan) for quantile in QUANTILES)]
        )
    return np.array(drawn[0]), np.abs(np.array(drawn) - truth).mean(axis=0)


def peer(values: np.ndarray, grid: np.ndarray, epsilon: float) -> np.ndarray:
    """Mean absolute errors of OpenDP's own private quantile."""
    dp.enable_features("contrib")
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    found = []
    for quantile in QUANTILES:

        def make(scale: float, quantile: float = quantile) -> dp.Measurement:
            return dp.m.make_private_quantile(
                *space, dp.max_divergence(), candidates=grid.tolist(), alpha=quantile, scale=scale
            )

        mechanism = dp.binary_search_chain(make, d_in=1, d_out=epsilon, T=float)
        data = values.tolist()
        truth = np.quantile(values, quantile)
        found.append(np.mean([abs(mechanism(data) - truth) for _ in range(DRAWS)]))
    return np.array([np.nan, *found])


def benchmark(audit_dir: Path) -> bool:
    """Print the table of one audit; whether it hits the targets."""
    table = EpsilonTable.open(audit_dir / "epsilon.parquet").table()
    values, upper = table.epsilon[:PEOPLE], table.worst_case_epsilon
    counts = np.bincount(to_cells(values, upper), minlength=N_CELLS)
    grid = upper * np.arange(1, N_CELLS + 1) / N_CELLS
    truth = np.array([values.mean(), *np.quantile(values, QUANTILES)])
    print(
        f"{audit_dir}: {len(values):,} epsilons, worst case {upper:.4f}; releases at epsilon {EPSILON} in all"
    )
    print(
        f"  {'':<38}"
        + "".join(f"{name:>9}" for name in ("average", "0.1", "0.3", "median", "0.7", "0.9"))
    )
    line("non-private (curator only)", truth)
    requests = {
        "exponential (default)": Request(QUANTILES, mean=True, epsilon=EPSILON),
        "histogram": Request(QUANTILES, mean=True, epsilon=EPSILON, method="histogram"),
        f"descent, 20 rounds, step 0.5, delta {DELTA:g}": Request(
            QUANTILES, mean=True, epsilon=EPSILON, delta=DELTA, method="descent"
        ),
    }
    missed = []
    for name, request in requests.items():
        one, error = errors(request, counts, grid, truth)
        line(name, one, "one release")
        line("", error, f"mean absolute error of {DRAWS}")
        if request.method == "exponential":
            missed = [
                f"quantile {q:g}"
                for q, value in zip(QUANTILES, error[1:], strict=True)
                if value > QUANTILE_TARGET
            ]
            missed += ["average"] * bool(error[0] > MEAN_TARGET)
    single = [
        errors(Request((q,), epsilon=EPSILON), counts, grid, truth)[1][1 + i]
        for i, q in enumerate(QUANTILES)
    ]
    line("one quantile alone", np.array([np.nan, *single]), "mean absolute error")
    line("peer: OpenDP, same share", peer(values, grid, EPSILON / 6), "mean absolute error")
    seconds = time_release(audit_dir)
    print(f"  a whole release: {seconds:.2f} s (target {SECONDS_TARGET:g})")
    missed += ["time"] * (seconds > SECONDS_TARGET)
    targets = f"quantiles within {QUANTILE_TARGET:g}, average within {MEAN_TARGET:g}, under {SECONDS_TARGET:g} s"
    print(f"  targets ({targets}): {'missed by ' + ', '.join(missed) if missed else 'met'}\n")
    return not missed


def time_release(audit_dir: Path) -> float:
    """Seconds of a release from files to files, on a copy, so that the audit's own ledger spends nothing."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "audit"
        copy.mkdir()
        for name in ("audit.json", "epsilon.parquet"):
            shutil.copy(audit_dir / name, copy / name)
        start = time.perf_counter()
        release(copy, Request(QUANTILES, mean=True, epsilon=EPSILON))
        return time.perf_counter() - start


def main() -> int:
    """Benchmark each audit given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("audit_dirs", nargs="*", type=Path, metavar="AUDIT_DIR")
    audit_dirs = parser.parse_args().audit_dirs
    if not audit_dirs and not (DEMO / "audit.json").is_file():
        print(f"{DEMO} holds no audit: run `make demo` first, or pass an audit directory")
        return 0
    return 0 if sum(not benchmark(audit_dir) for audit_dir in audit_dirs or [DEMO]) == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
