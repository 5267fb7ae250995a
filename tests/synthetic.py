"""Artifacts made by hand, for tests of analysis and reports: small, fixed, and no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import log_softmax

from indpriv._facts import PASSED, Fact
from indpriv._plain import records
from indpriv.analysis import summary
from indpriv.analysis.attacks import rates
from indpriv.attack_signals import AttackSignals
from indpriv.attacks.attributes import AttributeKnowledge
from indpriv.epsilon_table import Account, EpsilonTable
from indpriv.example_table import ExampleTable
from indpriv.norm_log.evidence import CHECKS, COMPARISONS
from indpriv.norm_log.fields import RecordingPolicy
from indpriv.norm_log.norm_log import NormLog
from indpriv.norm_log.session_counts import (
    Found,
    SessionCounts,
    TrainingCounts,
)
from indpriv.norm_log.writer import LogHeader, NormLogWriter


def discriminate(members: Any, others: Any, **options: Any) -> pd.DataFrame:
    """Value, low and high by rate of an attack with these scores; empty without one side."""
    rows = rates.separation(members, others, **options)
    return summary.RATES.of_rows(rows).set_index("rate")[["value", "low", "high"]]


def epsilon_table(
    epsilon: Any, *, worst_case: float | None = None, ids: Any = None, **account: Any
) -> EpsilonTable:
    """A table of these epsilons."""
    values = np.asarray(epsilon, dtype=np.float64)
    settings: dict[str, Any] = {
        "delta": 1e-5,
        "unit": "example",
        "neighbouring": "add_remove",
        "sampler": "poisson",
        "accountant": "rdp",
        "conversion": "canonne2020",
        "between_records": "last",
        "rounding": 0.01,
        "rounding_mode": "up",
        "total_steps": 30,
        "recorded_share": 1.0,
    }
    return EpsilonTable(
        example_ids=np.arange(len(values)) if ids is None else np.asarray(ids),
        epsilon=values,
        epsilon_lower=np.zeros_like(values),
        epsilon_upper=values,
        worst_case_epsilon=float(values.max()) if worst_case is None else worst_case,
        claim="exact",
        claim_reason="Every step was recorded.",
        account=Account(**{**settings, **account}),
    )


def rows(
    split: str, label: Any, *, loss: Any = None, correct: Any = None, **metadata: Any
) -> pd.DataFrame:
    """Rows of one split; everything not given is plain."""
    n = len(label)
    frame = pd.DataFrame(
        {"example_id": np.arange(n), "unit_id": np.arange(n), "split": split, "label": label}
    )
    frame["loss"] = np.linspace(0.1, 2.0, n) if loss is None else loss
    frame["correct"] = True if correct is None else correct
    return frame.assign(**metadata)


def people(n: int, split: str, seed: int) -> pd.DataFrame:
    """People with a label, a sex and an age; women with label 1 are the hardest to learn."""
    rng = np.random.default_rng(seed)
    sex = np.where(rng.random(n) < 0.6, "Male", "Female")
    label = (rng.random(n) < np.where(sex == "Male", 0.5, 0.1)).astype(int)
    hard = (
        rng.gamma(2.0, 0.4, n)
        * (1 + 2 * label)
        * np.where((sex == "Female") & (label == 1), 1.4, 1.0)
    )
    age = rng.integers(17, 90, n)
    frame = rows(split, label, loss=0.4 * hard, correct=hard < 1.5, sex=sex, age=age)
    return frame.assign(hard=hard)


def small_run(
    n: int = 240, steps: int = 30, seed: int = 0, **settings: float
) -> tuple[NormLog, ExampleTable]:
    """A log with every step, and its examples."""
    train, test = people(n, "train", seed), people(n // 2, "test", seed + 1)
    rng = np.random.default_rng(seed)
    norms = (
        train["hard"].to_numpy()
        * np.linspace(0.9, 0.5, steps)[:, None]
        * np.exp(rng.normal(0, 0.2, (steps, n)))
    )
    log = NormLog.from_arrays(
        norms,
        np.arange(steps),
        total_steps=steps,
        **{"noise_multiplier": 1.1, "max_grad_norm": 1.0, "sample_rate": 0.1} | settings,
    )
    return log, ExampleTable(pd.concat([train, test], ignore_index=True).drop(columns="hard"))


def session_counts(steps: int, n: int, rate: float, **changes: Any) -> SessionCounts:
    """Counts of a sound Poisson run that was compared at every step; changes by the names of the fields or of their parts."""
    expected = steps * n * rate
    content: dict[str, Any] = {
        "from_step": 0,
        "seeded": False,
        "caveats": [],
        "sampler": "poisson",
        "draws": steps,
        "expected_participations": expected,
        "participations": round(expected),
        "participations_min": 0,
        "participations_max": steps // 2,
        "participations_variance": 0.0,
        "participations_spread": 0.0,
        **TrainingCounts(left_batches=0).model_dump(),
        "sampler_class": "UniformWithReplacementSampler",
        "training_seconds": 2.0,
        "steps": steps,
        "gradients": round(expected),
        "accountant_steps": steps,
        "noise": {
            "values": 7000 * steps,
            "variance": 1.0,
            "least_variance": 1.0,
            "least_values": 10 * steps,
            "fourth_moment": 3.0,
            "previous": 0.0,
            "first": 0.0,
            "along_sum": 0.0,
        },
        "compared": {"found": {key: Found(steps=steps).model_dump() for key in COMPARISONS}},
    }
    return SessionCounts.from_json(content | changes)


def sound_checks(**changes: str) -> tuple[Fact, ...]:
    """A check of every assumption that has a line of evidence: passed, or as changed by its key."""
    found = [each for each in CHECKS.values() if each.line not in ("", "source")]
    return tuple(each.fact(changes.get(each.key, PASSED), "as found") for each in found)


def write_run(
    run_dir: Path,
    log: NormLog,
    examples: ExampleTable | None,
    *,
    exact: int = 0,
    close: bool = True,
    recorder: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
) -> Path:
    """A run directory as a Recorder leaves it."""
    assert log.levels.rounding
    recorder = {"clipping": "flat", "loss_reduction": "mean", "expected_batch_size": 24} | (
        recorder or {}
    )
    every = int(log.recorded_steps[1]) if log.n_records > 1 else 1
    policy = RecordingPolicy(every=every, reference_examples=exact).to_dict()
    header = LogHeader(
        0.01,
        "up",
        "example",
        log.neighbouring,
        log.sampler,
        log.individually_clipped,
        {},
        run=recorder,
        policy=policy,
    )
    positions = np.arange(exact, dtype=np.int64)
    writer = NormLogWriter(run_dir, header, log.example_ids, None, positions)
    norms = log.levels.norms(log.read(), 1.0)
    everything = log.total_steps
    for row, step in enumerate(log.recorded_steps.tolist()):
        writer.record(step, norms[row], max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    if exact:
        writer.exact(0, np.tile(norms[0, :exact], (everything, 1)), np.ones(everything), 0.0)
    settings = {
        name: float(getattr(log.settings, name)[0]) for name in ("noise_multiplier", "sample_rate")
    }
    counts = session_counts(
        everything,
        log.n_examples,
        settings["sample_rate"],
        **{"sampler": log.sampler, **(changes or {})},
    )
    writer.steps(0, everything, max_grad_norm=1.0, counts=counts, **settings)
    if close:
        writer.finish(counts)
    writer.close()
    if examples is not None:
        examples.to_parquet(run_dir / "examples.parquet")
    return run_dir


def signals_with_effect(
    effect: Any,
    n_models: int = 16,
    n_examples: int = 2000,
    *,
    seed: int = 0,
    spread: float = 2.0,
    **facts: Any,
) -> AttackSignals:
    """Normal signals around a level of each example, moved by `effect` where the example is in."""
    rng = np.random.default_rng(seed)
    member = rng.random((n_models, n_examples)) < facts.get("share", 0.5)
    level = rng.normal(0, spread, n_examples)
    signal = level + effect * member + rng.normal(size=member.shape)
    return AttackSignals.from_arrays(signal, member, **{"coins": True, **facts})


def knowledge(
    n: int = 4000, leak: float = 0.0, seed: int = 0, name: str = "colour", **changes: Any
) -> AttributeKnowledge:
    """Values follow from other columns in part; the model prefers the true value of members."""
    rng = np.random.default_rng(seed)
    prior = log_softmax(rng.normal(0, 1.5, (n, 3)), axis=1)
    truth = (prior + rng.gumbel(size=(n, 3))).argmax(axis=1)
    member = np.arange(n) < n // 2
    likelihood = np.minimum(0, rng.normal(-1, 0.2, (n, 3)))
    likelihood[member, truth[member]] = np.minimum(0, likelihood[member, truth[member]] + leak)
    ids = np.concatenate([np.arange(n // 2), np.arange(n - n // 2)])
    fields: dict[str, Any] = {"truth": truth, "member": member, "example_ids": ids, "prior": prior}
    fields |= {"values": ("red", "green", "blue"), "likelihood": likelihood, "imputed": prior}
    return AttributeKnowledge(name, **(fields | changes))


def parts(rates: Any, **of: str) -> dict[str, dict[str, Any]]:
    """Part -> rate -> row, of those rows whose columns have these values; None for unknown."""
    found: dict[str, dict[str, Any]] = {}
    for name, value in of.items():
        rates = rates[rates[name] == value]
    for row in records(rates):
        found.setdefault(row.part, {})[row.rate] = row
    return found
