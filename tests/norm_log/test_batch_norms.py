import json

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indpriv import EvidenceError, InputError, NormLog, _files
from indpriv._journal import JournalWriter
from indpriv.norm_log import batch_norms, reader
from indpriv.norm_log.batch_norms import (
    ArrayBatchNorms,
    BatchNormEntries,
    BatchNormFile,
    FileBatchNorms,
    _groups,
    examples_per_file,
    file_bytes,
)
from indpriv.norm_log.levels import Levels
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.reader import divide_batch_norms
from indpriv.norm_log.records import RecordFile
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from synthetic import session_counts

N, STEPS = 40, 30
LEVELS = Levels(0.01, "up")


def draws(seed=0, n=N, steps=STEPS, rate=0.2):
    """Positions and norms of the batch of each step; some are empty."""
    rng = np.random.default_rng(seed)
    batches = [np.flatnonzero(rng.random(n) < rate * (step % 5 != 0)) for step in range(steps)]
    return [(batch, rng.exponential(0.5, len(batch))) for batch in batches]


def flat(batches):
    steps = np.repeat(np.arange(len(batches)), [len(batch) for batch, _ in batches])
    return steps, *(np.concatenate([batch[part] for batch in batches]) for part in (0, 1))


def write(run_dir, batches, *, flush=10, close=True, rounding=0.01, resume_at=None):
    """A run with one full record, whose batch norms are flushed every so many steps."""
    header = LogHeader(rounding, "up", "example", "add_remove", "poisson", False, {"caveats": []})
    writer = NormLogWriter(run_dir, header, np.arange(N), None, np.zeros(0, np.int64))
    if resume_at is None:
        writer.record(0, np.ones(N) / 2, max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    else:
        writer.truncate(resume_at)
    for first in range(resume_at or 0, len(batches), flush):
        part = batches[first : first + flush]
        writer.free(first, part, np.ones(len(part)))
        counts = session_counts(first + len(part), N, 0.2)
        writer.steps(
            first,
            len(part),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.2,
            counts=counts,
        )
    try:
        if close:
            divide_batch_norms(writer)
            writer.finish(counts)
    finally:
        writer.close()


def as_dict(entries, offset=0):
    columns = (entries.position.tolist(), entries.step.tolist(), entries.norm.tolist())
    return {(position + offset, step): norm for position, step, norm in zip(*columns, strict=True)}


def expected(batches, encode=True):
    return {
        (int(i), step): LEVELS.encode(np.array([norm]), 1.0)[0] if encode else norm
        for step, (batch, norms) in enumerate(batches)
        for i, norm in zip(batch, norms, strict=True)
    }


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


@pytest.fixture
def many(monkeypatch):
    """N examples are many, and a file of batch norms has about 60 entries."""
    monkeypatch.setattr(reader, "LARGEST_FILE", N - 1)
    monkeypatch.setattr(batch_norms, "_FILE_ENTRIES", 60)


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("rounding", [0.01, 0])
def test_many_examples_share_files_by_position_once_the_log_is_closed(
    rounding, tmp_path, monkeypatch
):
    batches = draws()
    write(tmp_path, batches, rounding=rounding)
    free, read = NormLog.open(tmp_path).batch_norms, []
    per_file = free.parts[0].examples[1]
    assert 1 < per_file < N // 2
    names = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert names[0] == "000000000000.parquet"
    assert [name[:7] for name in names[1:]] == ["divided"] * (-(-N // per_file))
    assert free.steps.tolist() == list(range(STEPS))
    assert as_dict(free.read(0, N)) == expected(batches, encode=bool(rounding))
    plain = FileBatchNorms._read

    def noted(self, part, start, stop):
        read.append(part.examples)
        return plain(self, part, start, stop)

    monkeypatch.setattr(FileBatchNorms, "_read", noted)
    some = as_dict(free.read(per_file, 2 * per_file), per_file)
    assert some == {
        key: norm
        for key, norm in expected(batches, encode=bool(rounding)).items()
        if per_file <= key[0] < 2 * per_file
    }
    assert read == [(per_file, 2 * per_file)]
    assert not [check for check in verify(open_run(tmp_path)) if check.status == "failed"]


@pytest.mark.usefixtures("many")
def test_a_divided_log_goes_on_and_is_divided_again(tmp_path):
    write(tmp_path, draws())
    other = draws(seed=1, steps=40)
    write(tmp_path, other, resume_at=17)
    free = NormLog.open(tmp_path).batch_norms
    assert free.steps.tolist() == list(range(40))
    assert as_dict(free.read(0, N)) == expected([*draws()[:17], *other[17:]])
    first = {part.file.path.name for part in free.parts}
    there = {path.name for path in (tmp_path / "records").iterdir()}
    assert there - {"000000000000.parquet"} == first


@pytest.mark.usefixtures("many")
@pytest.mark.parametrize("moment", [0, 2, "divided", "close"])
def test_a_crash_while_dividing_loses_nothing(moment, tmp_path, monkeypatch):
    class Crash(BaseException):
        pass

    written, plain, append = [], NormLogWriter._write, JournalWriter.append

    def crash_at_file(self, name, content):
        if name.startswith("divided"):
            written.append(name)
            if len(written) - 1 == moment:
                raise Crash
        return plain(self, name, content)

    def crash_at_line(self, kind, **values):
        if kind == moment:
            raise Crash
        append(self, kind, **values)

    monkeypatch.setattr(NormLogWriter, "_write", crash_at_file)
    monkeypatch.setattr(JournalWriter, "append", crash_at_line)
    with pytest.raises(Crash):
        write(tmp_path, draws())
    monkeypatch.setattr(NormLogWriter, "_write", plain)
    monkeypatch.setattr(JournalWriter, "append", append)
    opened = open_run(tmp_path)
    assert not opened.state.closed
    assert not opened.faults
    assert as_dict(opened.log.batch_norms.read(0, N)) == expected(draws())
    write(tmp_path, draws(), resume_at=20)
    assert as_dict(NormLog.open(tmp_path).batch_norms.read(0, N)) == expected(draws())


@pytest.mark.usefixtures("many")
def test_steps_without_batch_norms_stay_missing(tmp_path):
    batches = draws()
    batches[3] = batches[22] = None
    write(tmp_path, batches)
    assert np.setdiff1d(np.arange(STEPS), NormLog.open(tmp_path).batch_norms.steps).tolist() == [
        3,
        22,
    ]


@pytest.mark.usefixtures("many")
def test_a_changed_divided_file_is_named(tmp_path):
    write(tmp_path, draws())
    path = sorted((tmp_path / "records").glob("divided-*"))[1]
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(bytes(content))
    with pytest.raises(EvidenceError, match=rf"{path.name} was changed"):
        NormLog.open(tmp_path).batch_norms.read(0, N)
    assert NormLog.open(tmp_path, unreadable="worst_case").batch_norms is None


@pytest.mark.usefixtures("many")
def test_a_changed_file_of_training_is_not_divided(tmp_path):
    write(tmp_path, draws(), close=False)
    path = tmp_path / "records" / "free-000000000010.parquet"
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    write(tmp_path, draws(), resume_at=20)
    with pytest.raises(EvidenceError, match=path.name):
        NormLog.open(tmp_path)


def test_few_examples_stay_in_files_by_step(tmp_path):
    write(tmp_path, draws())
    assert len(list((tmp_path / "records").glob("free-*"))) == 3


def test_a_file_has_few_enough_entries():
    assert examples_per_file(10**8, 10**8) == 1 << 18
    assert examples_per_file(200 * 10**8, 10**8) == 1 << 15
    assert examples_per_file(10**12, 10) == 1


def test_blocks_read_only_the_row_groups_they_need(tmp_path, monkeypatch):
    monkeypatch.setattr(_files, "ROW_GROUP_SIZE", 16)
    rng = np.random.default_rng(0)
    position, step = np.divmod(rng.permutation(2000).astype(np.int32), np.int32(20))
    entries = BatchNormEntries(position, step, rng.integers(0, 100, 2000).astype(np.uint8))
    (tmp_path / "free").write_bytes(file_bytes(entries, 0))
    found = FileBatchNorms(
        np.arange(20), (BatchNormFile(RecordFile(tmp_path / "free"), 0, 20),), LEVELS
    )
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
    header = LogHeader(0.01, "up", "example", "add_remove", "poisson", False, {"caveats": []})
    writer = NormLogWriter(tmp_path, header, np.arange(N), None, np.zeros(0, np.int64))
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
    assert isinstance(log.batch_norms, ArrayBatchNorms)


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
