"""Audits whose epsilons and examples are read part by part, beside those of the same run in memory."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from indpriv import _files, epsilon_table, example_table
from indpriv._files import write_json
from indpriv._plain import to_json
from indpriv.accountant import blocks
from indpriv.analysis import disclosures, fidelity, recorded_run, schedule, statistics
from indpriv.audit import audit, pipeline
from indpriv.epsilon_table import EpsilonTable
from indpriv.example_table import ExampleTable
from indpriv.norm_log import records
from synthetic import small_run, write_run

ROWS, MOST = 64, 150  # of a part, and of examples that are analysed one by one
OF_ROWS = (
    (_files, "ROW_GROUP_SIZE"),
    (blocks, "ROW_GROUP_SIZE"),
    (schedule, "ROW_GROUP_SIZE"),
    (disclosures, "_HASHED_AT_ONCE"),
    (recorded_run, "ROW_GROUP_SIZE"),
    (epsilon_table, "PART_ROWS"),
    (records, "PART_SIZE"),
)
LIMITS = (
    (epsilon_table, "LARGEST_FILE"),
    (pipeline, "LARGEST_FILE"),
    (records, "LARGEST_FILE"),
    (example_table, "LARGEST_IN_MEMORY"),
)


def lower(patch, limit=4 * ROWS):
    """Parts of ROWS examples, above `limit` examples."""
    patch.setattr(statistics, "MOST_EXACT", MOST)
    patch.setattr(recorded_run, "MOST_ATTACKED", MOST)
    for module, name in OF_ROWS:
        patch.setattr(module, name, ROWS)
    for module, name in LIMITS:
        patch.setattr(module, name, limit)


def run_of(folder, n, *, n_test=40, ids=None, every=3, **columns):
    """A run of n examples, with texts, numbers and gaps; n_test: at most n // 2."""
    log, examples = small_run(n=n)
    rng = np.random.default_rng(1)
    frame = pd.concat([examples.train, examples.test[:n_test]], ignore_index=True)
    size = len(frame)
    frame = frame.assign(
        town=rng.choice(["Rome", "Oslo", None], size), income=rng.gamma(2.0, 1e4, size), **columns
    )
    frame = frame.astype({"correct": object, "age": float})
    frame.loc[rng.integers(0, size, 9), "age"] = np.nan
    frame.loc[7:9, ["loss", "correct"]] = [np.nan, None]
    repeated = ["label", "loss", "correct", "sex", "age", "town", "income"]
    frame.loc[n - 3, repeated] = frame.loc[4, repeated]
    if ids is not None:
        frame["example_id"] = [*ids, *map(str, range(size - n))]
    norms = log.levels.norms(log.read(), 1.0)
    norms[:, n - 3] = norms[:, 4]
    log = (
        type(log)
        .from_arrays(
            norms,
            log.recorded_steps,
            total_steps=log.total_steps,
            noise_multiplier=1.1,
            max_grad_norm=1.0,
            sample_rate=0.1,
            example_ids=ids,
        )
        .thin(every)
    )
    run_dir = write_run(folder, log, ExampleTable(frame), exact=30)
    others = replace(log.take(range(size - n)), example_ids=np.arange(size - n))
    write_run(run_dir / "holdout", others, None)
    ExampleTable(frame.assign(loss=0.9 * frame["loss"])).to_parquet(
        run_dir / "examples-non-dp.parquet"
    )
    groups = ["sex", "label", "town", "age:bins=3", "income:bins=4", "town,sex", "correct"]
    declared = {"config": {"audit": {"groups": groups}}, "training": {"delta": 1e-5}}
    write_json(run_dir / "run.json", {**declared, "data": {"class_names": ["poor", "rich"]}})
    return run_dir


@pytest.fixture(scope="module", params=["numbers", pytest.param("texts", marks=pytest.mark.slow)])
def both(request, tmp_path_factory):
    """Audit directories of one run: in memory, and in parts."""
    folder, found = tmp_path_factory.mktemp("parts"), []
    ids = None if request.param == "numbers" else [f"p{k:04d}" for k in range(400)][::-1]
    n_test = 40 if request.param == "numbers" else 190  # attacked whole, and sampled
    for limit in (1 << 20, 4 * ROWS):
        with pytest.MonkeyPatch.context() as patch:
            lower(patch, limit)
            patch.setattr(records, "LARGEST_FILE", 1 << 20)  # the same log for both
            run_dir = run_of(folder / f"{limit}/run", 400, n_test=n_test, ids=ids)
            patch.setattr(records, "LARGEST_FILE", limit)
            audit(run_dir, folder / f"{limit}/audit")
            found.append(folder / f"{limit}/audit")
    return found


def assert_same(one, two, where):
    """Equal values; sums of floats may be added in another order."""
    if isinstance(one, dict):
        assert one.keys() == two.keys(), where
        for key, value in one.items():
            assert_same(value, two[key], f"{where}.{key}")
    elif isinstance(one, list):
        assert len(one) == len(two), where
        for number, values in enumerate(zip(one, two, strict=True)):
            assert_same(*values, f"{where}[{number}]")
    else:
        equal = pytest.approx(one, rel=1e-12) if isinstance(one, float) else one
        assert two == equal, where


def test_the_figures_are_those_of_an_audit_in_memory(both):
    whole, in_parts = (json.loads((folder / "audit.json").read_text("utf-8")) for folder in both)
    assert whole.keys() == in_parts.keys()
    for name in whole.keys() - {"command", "created", "individual"}:
        assert_same(whole[name], in_parts[name], name)
    for name, value in whole["individual"].items():
        exact = name in ("n", "max", "share_at_worst_case", "edges", "counts")
        close = value if exact else pytest.approx(value, rel=whole["exactness"]["quantile_error"])
        assert in_parts["individual"][name] == close, name
    assert in_parts["individual"]["mean"] == pytest.approx(whole["individual"]["mean"], rel=1e-12)
    assert any("2 rows repeat each other" in text for text in in_parts["missing"])
    assert len(in_parts["groups"]) == 7


def test_the_tables_are_those_of_an_audit_in_memory(both):
    assert [(folder / "epsilon.parquet").is_dir() for folder in both] == [False, True]
    for name in ("epsilon.parquet", "examples.parquet", "examples-non-dp.parquet"):
        one, two = (pd.read_parquet(folder / name) for folder in both)
        pd.testing.assert_frame_equal(one, two, check_dtype=False)


@pytest.mark.usefixtures("no_extras")
@pytest.mark.slow
def test_no_step_holds_more_rows_the_more_there_are(tmp_path, monkeypatch):
    lower(monkeypatch)
    monkeypatch.setattr(fidelity, "MOST_COMPARED", 100)
    held, plain_frame, plain_table = [], _files.frame_of, EpsilonTable.__post_init__
    attacked, plain_examples = [], ExampleTable.__init__

    def frame(table):
        held.append(table.num_rows)
        return plain_frame(table)

    def checked(table):
        held.append(len(table) if table.in_memory else 0)
        plain_table(table)

    def known(examples, frame):
        attacked.append(len(frame))
        plain_examples(examples, frame)

    most = []
    for n in (600, 1200):
        run_dir = run_of(tmp_path / f"run-{n}", n, n_test=n // 2)
        with monkeypatch.context() as patch:
            patch.setattr(_files, "frame_of", frame)
            patch.setattr(EpsilonTable, "__post_init__", checked)
            patch.setattr(ExampleTable, "__init__", known)
            held.clear()
            attacked.clear()
            audit(run_dir, tmp_path / f"audit-{n}")
            most.append((max(held), max(attacked)))
    assert most == [(MOST, 2 * MOST)] * 2  # the members, and as many others, that are attacked


@pytest.mark.usefixtures("no_extras")
def test_rows_in_another_order_than_the_log_are_audited_in_memory(tmp_path, monkeypatch):
    lower(monkeypatch)
    run_dir = run_of(tmp_path / "run", 400)
    table = ExampleTable.from_parquet(run_dir / "examples.parquet")
    mixed = table.frame.sample(frac=1, random_state=0).reset_index(drop=True)
    found = []
    for name, frame in (("plain", table.frame), ("mixed", mixed)):
        ExampleTable(frame).to_parquet(run_dir / "examples.parquet")
        found.append(audit(run_dir, tmp_path / name, by=["sex"]))
    groups = [to_json(summary.groups) for summary in found]
    assert_same(*groups, "groups")
    assert found[0].loss == found[1].loss
