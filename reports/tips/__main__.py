"""reports/tips/README.md and tips.json beside it: three tips on training with DP, three runs of each setting.

python -m reports.tips [--write-only | --runs-only]

The figures of a finished run are kept, so the command goes on where it was stopped. MNIST is read from the
folder in INDPRIV_DATA. All takes seven minutes on one core that is idle.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from opacus.accountants import RDPAccountant
from scipy.optimize import brentq

from audits.training.checkpoints import checkpoint_path
from audits.training.config import AuditConfig
from audits.training.dp_sgd import train
from indpriv import NormLog, account
from indpriv._files import read_json, write_json
from indpriv.accountant import compose
from indpriv.norm_log.run_files import RUN_JSON
from reports import REPORTS
from reports.shared.page_command import write_page
from reports.tips.page import DELTA, EPSILON, FIRST, PHASES, RUNS, VIEWS, WEIGHT_DECAYS, render
from reports.tips.views import train_on_views

N_ADULT = 32_561
AUDIT = REPORTS.parent / "audits" / "adult_weight_decay.toml"
TIME = "seconds.json"


def runs() -> dict[str, Callable[[Path], object]]:
    """How each run is made, by its name: SETTING-NUMBER, and of a schedule in two phases also its first."""
    made: dict[str, Callable[[Path], object]] = {}
    for run in range(RUNS):
        made |= {
            f"decay_{value:g}-{run}": partial(_train, weight_decay=value) for value in WEIGHT_DECAYS
        }
        for name, phases in PHASES.items():
            made[f"batch_{name}-{run}{FIRST}"] = partial(_train_phase, phases, 0)
            made[f"batch_{name}-{run}"] = partial(_train_phase, phases, 1)
        made |= {f"views_{name}-{run}": partial(train_on_views, name) for name in VIEWS}
    return {name: partial(_timed, make) for name, make in made.items()}


def _timed(make: Callable[[Path], object], path: Path) -> None:
    begun = time.process_time()
    make(path)
    write_json(path / TIME, time.process_time() - begun)


def _train(path: Path, pretrained: Path | None = None, **training: Any) -> None:
    config = AuditConfig.from_toml(AUDIT)
    model = replace(config.model, pretrained=pretrained and str(pretrained))
    train(replace(config, model=model, training=replace(config.training, **training)), path)


def _train_phase(phases: tuple[tuple[int, str], ...], number: int, path: Path) -> None:
    """Half of the epochs; the second half starts from the last parameters of the first."""
    config = AuditConfig.from_toml(AUDIT).training
    rates = [1 / -(-N_ADULT // batch) for batch, _ in phases]
    epochs, (batch, schedule) = config.epochs // 2, phases[number]

    def spent(noise: float) -> float:
        both = RDPAccountant()  # type: ignore[no-untyped-call]
        both.history = [(noise, rate, epochs * round(1 / rate)) for rate in rates]
        return float(both.get_epsilon(config.delta))

    noise = float(brentq(lambda noise: spent(noise) - EPSILON + 1e-3, 0.5, 20.0))
    first = path.with_name(path.name + FIRST)
    start = checkpoint_path(first, epochs * round(1 / rates[0])) if number else None
    _train(
        path,
        start,
        epochs=epochs,
        batch_size=batch,
        schedule=schedule,
        weight_decay=0.0,
        target_epsilon=None,
        noise_multiplier=noise,
    )


def figures_of(path: Path) -> dict[str, Any]:
    """Test accuracy, CPU seconds and worst case of a run; of one in two phases, that of both together."""
    first = path.with_name(path.name + FIRST)
    logs = [NormLog.open(run) for run in (first, path) if run.exists()]
    found = compose(logs, delta=DELTA) if logs[1:] else account(logs[0], delta=DELTA)
    return {
        "test_accuracy": read_json(path / RUN_JSON)["test_accuracy"],
        "epsilon": found.worst_case_epsilon,
        "seconds": read_json(path / TIME),
    }


if __name__ == "__main__":
    write_page("tips", __doc__ or "", runs(), figures_of, dict, render)
