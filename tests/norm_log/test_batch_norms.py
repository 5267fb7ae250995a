import json
from functools import partial

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batch_norm_runs import (
    LEVELS,
    STEPS,
    N,
    as_dict,
    draws,
    expected,
    flat,
    write,
    writer_of,
)
from indpriv import EvidenceError, InputError, NormLog
from indpriv.norm_log import records
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.records import (
    BatchNormEntries,
    BatchNorms,
    RecordFile,
    _groups,
    file_bytes,
    read_entries,
)
from indpriv.norm_log.verify import verify
from synthetic import session_counts


@pytest.mark.parametrize("rounding", [0.01, 0])
def test_what_is_written_is_read(rounding, tmp_path):
    batches = draws()
    write(tmp_path, batches, rounding=rounding)
    free = NormLog.open(tmp_path).batch_norms
    assert free.steps.tolist() == list(range(STEPS))
    entries = free.read(0, N)
    assert as_dict(entries) == expected(batches, encode=bool(rounding))
    keys = entries.position.astype(int) * STEPS + entries.step
    assert np.all(np.diff(keys) > 0)
    assert as_dict(free.read(7, 23), 7) == {
        key: norm for key, norm in as_dict(entries).items() if 7 <= key[0] < 23
    }
    assert not [check for check in verify(open_run(tmp_path)) if check.status == "failed"]


def test_few_examples_stay_in_files_by_step(tmp_path):
    write(tmp_path, draws())
    assert len(list((tmp_path / "records").glob("free-*"))) == 3


def test_blocks_read_only_the_row_groups_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_ROW_GROUP", 16)
    rng = np.random.default_rng(0)
    position, step = np.divmod(rng.permutation(2000).astype(np.int32), np.int32(20))
    entries = BatchNormEntries(position, step, rng.integers(0, 100, 2000).astype(np.uint8))
    (tmp_path / "free").write_bytes(file_bytes(entries, 0))
    part = partial(read_entries, RecordFile(tmp_path / "free"), 0, 20, LEVELS)
    found = BatchNorms(np.arange(20), [part])
    whole = as_dict(entries)
    assert as_dict(found.read(0, 100)) == whole
    assert as_dict(found.read(33, 47), 33) == {
        key: norm for key, norm in whole.items() if 33 <= key[0] < 47
    }
    with pq.ParquetFile(tmp_path / "free") as parquet:
        assert len(_groups(parquet, 0, 100)) == 125
        assert len(_groups(parquet, 33, 47)) <= 14 * 20 / 16 + 2


def test_an_entry_takes_two_bytes():
    rng = np.random.default_rng(0)
    step, position = np.nonzero(rng.random((256, 5000)) < 0.08)
    norms = rng.gamma(2, 0.2, 5000)[position] * np.exp(rng.normal(0, 0.1, len(position)))
    entries = BatchNormEntries(
        position.astype(np.int32), step.astype(np.int32), LEVELS.encode(norms, 1.0)
    )
    assert len(file_bytes(entries, 0)) < 2.5 * len(entries)


def test_a_crash_loses_what_was_not_flushed(tmp_path):
    batches = draws()
    write(tmp_path, batches, close=False)
    lines = (tmp_path / "journal.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["kind"] for line in lines]
    last_free = len(kinds) - 1 - kinds[::-1].index("free")
    (tmp_path / "journal.jsonl").write_bytes(
        b"".join(lines[: last_free + 1])
    )  # its steps were never logged
    log = NormLog.open(tmp_path)
    assert log.total_steps == 20
    assert log.batch_norms.steps.tolist() == list(range(20))
    assert as_dict(log.batch_norms.read(0, N)) == expected(batches[:20])


def test_a_damaged_file_leaves_its_steps_without_free_records(tmp_path):
    write(tmp_path, draws())
    path = tmp_path / "records" / "free-000000000010.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(
        EvidenceError, match=r"free-000000000010\.parquet: record of step 10 was changed"
    ):
        NormLog.open(tmp_path)
    free = NormLog.open(tmp_path, unreadable="worst_case").batch_norms
    assert free.steps.tolist() == [*range(10), *range(20, 30)]
    assert not np.isin(free.read(0, N).step, range(10, 20)).any()


def test_steps_whose_batch_is_unknown_are_missing(tmp_path):
    batches = draws()
    write(tmp_path, [None if step in (3, 17) else batch for step, batch in enumerate(batches)])
    free = NormLog.open(tmp_path).batch_norms
    assert free.steps.tolist() == [step for step in range(STEPS) if step not in (3, 17)]


def test_resuming_voids_what_was_recorded_beyond(tmp_path):
    batches, again = draws(0), draws(1)
    write(tmp_path, batches, close=False)
    writer = writer_of(tmp_path)
    writer.truncate(13)
    writer.free(13, again[13:20], np.ones(7))
    writer.steps(
        13,
        7,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.2,
        counts=session_counts(20, N, 0.2),
    )
    writer.close()
    assert read_state(tmp_path).ends == [(-1, True)]  # killed, perhaps because of a batch
    free = NormLog.open(tmp_path).batch_norms
    assert free.steps.tolist() == list(range(20))
    assert as_dict(free.read(0, N)) == expected(batches[:13] + again[13:20])


def in_memory(batches, **options):
    settings_ = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "sample_rate": 0.2, **options}
    rows = np.ones((1, N)) / 2
    return NormLog.from_arrays(
        rows, [0], total_steps=len(batches), batch_norms=flat(batches), **settings_
    )


@settings(max_examples=30)
@given(st.integers(0, 1000), st.lists(st.integers(0, N - 1), unique=True, min_size=1))
def test_taking_examples_takes_their_entries(seed, positions):
    batches = draws(seed)
    whole = expected(batches)
    taken = in_memory(batches).take(positions)
    assert as_dict(taken.batch_norms.read(0, len(positions))) == {
        (new, step): norm
        for new, old in enumerate(positions)
        for (i, step), norm in whole.items()
        if i == old
    }


def test_each_entry_is_rounded_under_the_clipping_norm_of_its_step():
    batches = draws()
    clip = np.linspace(0.5, 2.0, STEPS)
    entries = in_memory(batches, max_grad_norm=clip).batch_norms.read(0, N)
    for (position, step), code in as_dict(entries).items():
        batch, norms = batches[step]
        assert code == LEVELS.encode(norms[batch == position], clip[step])[0]


def test_thinning_keeps_free_records_and_exact_examples_need_none():
    log = in_memory(draws())
    assert log.thin(10).batch_norms is log.batch_norms


@pytest.mark.parametrize(
    ("batch_norms", "message"),
    [
        (([0], [0]), "2 parts"),
        (([0, 1], [0], [1.0]), "shapes"),
        (([30], [0], [1.0]), "steps must be whole numbers from 0 to 29"),
        (([0], [-1], [1.0]), "positions must be whole numbers from 0 to 39"),
        (([0.5], [0], [1.0]), "steps must be whole numbers"),
        (([3, 3], [1, 1], [1.0, 2.0]), "several norms at one step"),
        (([3], [1], [np.nan]), r"NaN gradient norms for 1 examples, e\.g\. ids \[1\]"),
        (([3], [1], [-1.0]), "negative gradient norms"),
    ],
)
def test_bad_entries_are_refused(batch_norms, message):
    with pytest.raises(InputError, match=message):
        NormLog.from_arrays(
            np.ones((1, N)),
            [0],
            total_steps=STEPS,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.2,
            batch_norms=batch_norms,
        )


def there(run_dir):
    return {path.name for path in (run_dir / "records").iterdir()}


def test_only_records_that_no_line_counts_on_are_removed(tmp_path):
    write(tmp_path, draws())
    write(tmp_path, draws(), resume_at=10, flush=5, close=False)
    write(tmp_path, draws()[:20], resume_at=15, flush=5, close=False)  # voids two files
    before, records = there(tmp_path), tmp_path / "records"
    for name in ("free-000000000007", "exact-000000000099", "000000000007", "mine-1"):
        (records / f"{name}.parquet").write_bytes(b"left by a crash")
    (records / "notes.txt").write_text("mine")
    writer_of(tmp_path).close()
    assert "free-000000000025.parquet" in before  # a line names it that was declared void
    assert there(tmp_path) == before | {"mine-1.parquet", "notes.txt"}
    assert as_dict(NormLog.open(tmp_path).batch_norms.read(0, N)) == expected(draws()[:20])


def test_another_run_removes_nothing(tmp_path):
    write(tmp_path, draws(), close=False)
    left = tmp_path / "records" / "000000000007.parquet"
    left.write_bytes(b"left by a crash")
    with pytest.raises(EvidenceError, match="record another run in another directory"):
        writer_of(tmp_path, rounding=0.02)
    assert left.is_file()
