"""Runs on MNIST at the epsilon of the paper, in a tenth of its steps: three of each setting.

1,000 steps at the rate 0.01 with noise multiplier 2.07 have the epsilon of the paper's 10,000 steps
with 6 (by its moments accountant). The learning rate times the clipping norm is 0.5.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from audits.training.config import AuditConfig
from audits.training.dp_sgd import train
from audits.training.step_plan import epsilons_after, with_noise
from indpriv import NormLog, account
from indpriv._files import read_parquet
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.run_files import CURVE

STEPS, RATE, NOISE, DELTA = 1000, 0.01, 2.07, 1e-5
WORST_CASE = 0.657  # of these settings, by RDP
RUNS = 3  # of each setting; their noise is drawn from the operating system, as in any run
CLIPPING_NORMS = (1.0, 4.0, 32.0)
_STEP_LENGTH = 0.5  # learning rate times clipping norm


@dataclass(frozen=True)
class Method:
    """A way of clipping and adding noise: its name in the paper, and keys of [training].

    Attributes:
        name: of its folders and in the JSON file.
        title: in the paper.
        keys: of [training], for a clipping norm.
        clipping_norms: with which it is trained.
    """

    name: str
    title: str
    keys: Callable[[float], dict[str, Any]]
    clipping_norms: tuple[float, ...] = CLIPPING_NORMS


METHODS = (
    Method("baseline", "DP-baseline", lambda norm: {"max_grad_norm": norm}),
    Method(
        "cdecay",
        "dynS[Cdecay]",
        lambda norm: {"max_grad_norm": {"law": "linear", "start": norm, "end": norm / 2}},
    ),
    Method(
        "l2max",
        "dynS[l2-max], not private",
        lambda norm: {
            "max_grad_norm": norm,
            "noise_scale": "largest_norm",
            "allow_no_privacy": True,
        },
    ),
    Method(
        "dyns",
        "dynS, not private",
        lambda norm: {
            "max_grad_norm": {"law": "linear", "start": norm, "end": norm / 2},
            "noise_scale": "largest_norm",
            "allow_no_privacy": True,
        },
    ),
    Method(
        "quantile",
        "quantile clipping",
        lambda norm: {"max_grad_norm": norm, "clipping": "quantile"},
    ),
    Method("adaclip", "AdaClip", lambda norm: {"max_grad_norm": norm, "clipping": "adaclip"}),
)
FIXED_STD = Method(
    "cdecay_std",
    "dynS[Cdecay]",
    lambda norm: {
        "max_grad_norm": {"law": "linear", "start": norm, "end": norm / 2},
        "noise_std": NOISE * norm,
    },
    clipping_norms=(4.0,),
)  # of Table VII: its noise multiplier rises while its clipping norm falls
_LAWS = {"linear": 3.7, "exponential": 3.0}  # of the published code: from 15.8 to this
_N_EXAMPLES = 60_000
SCHEDULED = tuple(
    Method(
        f"sigma_{law}",
        f"dynsigma, {law}",
        lambda norm, law=law, end=end: {  # type: ignore[misc]
            "max_grad_norm": norm,
            "target_epsilon": WORST_CASE,
            "noise_multiplier": {"law": f"inverse_{law}", "start": 15.8, "end": end},
        },
        clipping_norms=(4.0,),
    )
    for law, end in _LAWS.items()
)
MOVING = tuple(  # of Tables IX and XI
    Method(
        f"moving_{law}",
        f"dyn[S,sigma], {law}, not private",
        lambda norm, scheduled=scheduled: {  # type: ignore[misc]
            "max_grad_norm": {"law": "linear", "start": norm, "end": norm / 2},
            "noise_scale": "largest_norm",
            "allow_no_privacy": True,
            "noise_multiplier": _scaled(scheduled, norm),
        },
        clipping_norms=(4.0,),
    )
    for law, scheduled in zip(_LAWS, SCHEDULED, strict=True)
)


def _scaled(scheduled: Method, norm: float) -> Any:
    """The falling noise multiplier of a method with a target, as it is trained with."""
    return with_noise(config_of(scheduled, norm).training, _N_EXAMPLES).noise_multiplier


def config_of(method: Method, norm: float, **training: Any) -> AuditConfig:
    """The audit of one run; keys of [training] replace its own."""
    return AuditConfig.from_dict(
        {
            "name": f"wei2021_{method.name}_{norm:g}",
            "data": {"dataset": "mnist"},
            "model": {"architecture": "tanh_cnn"},
            "training": {
                "epochs": round(STEPS * RATE),
                "batch_size": 600,
                "learning_rate": _STEP_LENGTH / norm,
                "delta": DELTA,
                **_noise(method.keys(norm)),
                **training,
            },
            "recording": {"every": 250},
            "checkpoints": {"every": 50},
        }
    )


def _noise(keys: dict[str, Any]) -> dict[str, Any]:
    """With the noise multiplier of the baseline, unless they name another noise."""
    own = "noise_std" in keys or "noise_multiplier" in keys
    return keys if own else {"noise_multiplier": NOISE, **keys}


def _make(method: Method, norm: float, path: Path) -> None:
    train(config_of(method, norm), path)


def runs() -> dict[str, Callable[[Path], object]]:
    """How each run is made, by its name: METHOD-NORM-RUN."""
    return {
        f"{method.name}-{norm:g}-{run}": partial(_make, method, norm)
        for methods in ((*METHODS, FIXED_STD), SCHEDULED, MOVING)
        for run in range(RUNS)
        for method in methods
        for norm in method.clipping_norms
    }


def figures_of(path: Path) -> dict[str, Any]:
    """Accuracy and epsilon at every checkpoint of a run, and individual epsilons at its end."""
    curve, state = read_parquet(path / CURVE), read_state(path)
    epsilons: list[float | None] = [None] * len(curve)
    if not state.no_privacy:
        found = epsilons_after(curve["step"].to_numpy(), state.settings(), DELTA)
        epsilons = [round(value, 6) for value in found.tolist()]
    table = account(NormLog.open(path), delta=DELTA)
    return {
        "step": curve["step"].tolist(),
        "test_accuracy": curve["test_accuracy"].tolist(),
        "worst_case_epsilon": epsilons,
        "seconds_per_step": float(curve["seconds"].iloc[-1] / curve["step"].iloc[-1]),
        "worst_case": table.worst_case_epsilon,
        "median_epsilon": float(np.median(table.epsilon)),
        "at_worst_case": float(np.mean(table.at_worst_case)),
        "claim": table.claim,
    }
