"""Four audits of stored runs, and attacks without an audit: every figure of rates that they give.

rates.json holds those of commit 79fdd3e, in which twelve dataclasses held rates, put in the form of
tables by reports/tidy_rates.py of commit 5b2af2c: a table is a list of columns and one list for
each row, with "not said" for no value.
"""

import json
import sys
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[2]
sys.path[:0] = [str(TESTS), str(TESTS.parent / "reports")]

from baseline.figures import command, private_copy  # noqa: E402
from indpriv._plain import to_json  # noqa: E402
from indpriv.attack_scores import AttackScores  # noqa: E402
from indpriv.attack_signals import AttackSignals, from_losses  # noqa: E402
from indpriv.audit.attacks import attack_study  # noqa: E402
from indpriv.example_table import ExampleTable  # noqa: E402
from indpriv.norm_log.run_files import (  # noqa: E402
    CANARIES,
    EXAMPLES,
    EXAMPLES_NON_DP,
    GRADIENT_CANARIES,
)
from synthetic import signals_with_effect  # noqa: E402

EXPECTED = Path(__file__).with_name("rates.json")
NONE = "not said"
KEYS = (
    *("attacks", "rates", "ceilings", "unchecked", "roc", "most_exposed", "attack_seed"),
    *("attack_by_epsilon", "canaries"),
)


def signals_of(examples, path, seed):
    """Signals of five references, on which being trained on raises the confidence."""
    rng = np.random.default_rng(seed)
    train, test = examples.train, examples.test
    own = from_losses(np.concatenate([part["loss"].to_numpy(float) for part in (train, test)]))
    n, m = len(own), len(train)
    member = np.concatenate([[np.arange(n) < m], rng.random((5, n)) < 0.5])
    others = own + rng.normal(0, 0.2, (5, n)) + member[1:] * 0.1
    ids = np.concatenate([train["example_id"], test["example_id"]])
    found = AttackSignals.from_arrays(
        np.concatenate([[own], others]), member, ids, audited=0, coins=True, share=0.5
    )
    found.save(path)
    return path


def canary_scores(n, seed, groups=None, **options):
    """Scores that tell members a little."""
    rng = np.random.default_rng(seed)
    member = rng.random(n) < 0.5
    values = np.round(rng.normal(0.8 * member, 1.0), 2)  # with ties
    return AttackScores(values, member, "canaries", groups, **options)


def audits(folder):
    """(name, audit.json) of each: by group; units of several rows; by epsilon; and with all else."""
    rng = np.random.default_rng(0)
    plain = {
        "adult": ["race", "sex", "age_band", "label"],
        "units": ["site", "age:bins=3"],
        "digits": ["label"],
    }
    for name, columns in plain.items():
        run = private_copy(name, folder)
        yield name, audit(run, folder / f"{name}-audit", columns)
    run = (folder / "digits").rename(folder / "attacked")
    tables = {one: ExampleTable.from_parquet(run / one) for one in (EXAMPLES, EXAMPLES_NON_DP)}
    more = []
    for option, table in zip(("signals", "baseline_signals"), tables.values(), strict=True):
        path = signals_of(table, folder / f"{option.replace('_', '-')}.npz", len(more))
        more += ["--set", f"{option}={path}"] if more else [f"--{option}", path]
    canary_scores(300, 1, fair_coins=True).to_parquet(run / CANARIES)
    lengths = np.repeat(np.array(["1", "0.5"], dtype=object), [300, 100])
    lengths = lengths[rng.permutation(400)]
    canary_scores(400, 2, lengths, fair_coins=True, adversary="updates").to_parquet(
        run / GRADIENT_CANARIES
    )
    yield "attacked", audit(run, folder / "attacked-audit", ["label"], *more)


def audit(run, output, columns, *more):
    """audit.json of an audit with the seed 3."""
    words = [word for column in columns for word in ("--by", column)]
    words += ["--delta", 1e-5, "--set", "seed=3", *more]
    return json.loads(command("audit", run, "--output-dir", output, "--json", *words))


def without_audit(folder):
    """Scores of another attack with groups, and a study of many models."""
    groups = np.array(["a", "b", "few"], dtype=object)[np.repeat([0, 1, 2], [500, 85, 15])]
    canary_scores(600, 4, groups).to_parquet(folder / "scores.parquet")
    words = (folder / "scores.parquet", "--json", "--set", "seed=5")
    study = attack_study({"confidence": signals_with_effect(0.5, 12, 600, spread=1.0)})
    return json.loads(command("attack", *words)), to_json(study)
