import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import synthetic
from indpriv import EvidenceError, InputError, NormLog, _files
from indpriv._files import JournalWriter, read_journal
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.norm_log.writer import LogHeader, NormLogWriter
from processes import running

HEADER = LogHeader(0.01, "up", "example", "add_remove", "poisson", False, {"backend": "none"})
NORMS = np.array([[0.1, 0.5, 3.0, np.inf], [0.2, 0.4, 1.0, 0.0], [0.0, 0.3, 2.0, 0.7]])


def counts(steps):
    return synthetic.session_counts(steps, n=4, rate=0.5)


def write(run_dir, *, close=True, header=HEADER, ids=None):
    writer = NormLogWriter(
        run_dir, header, np.arange(4) if ids is None else ids, None, np.array([1], dtype=np.int64)
    )
    for row, step in enumerate((0, 2, 4)):
        writer.record(step, NORMS[row], max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
        writer.exact(step, NORMS[[row, row]][:, [1]], np.ones(2), 0.0)
        writer.steps(
            step,
            2,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            sample_rate=0.5,
            counts=counts(step + 2),
        )
    if close:
        writer.finish(counts(6))
    writer.close()
    return run_dir


@pytest.fixture
def run_dir(tmp_path):
    return write(tmp_path / "run")


def record_files(run_dir):
    return sorted(path for path in (run_dir / "records").glob("0*.parquet"))


def test_what_was_written_is_read(run_dir):
    log = NormLog.open(run_dir)
    assert np.array_equal(log.read(), log.levels.encode(NORMS, 1.0))
    assert log.recorded_steps.tolist() == [0, 2, 4]
    assert log.total_steps == 6
    assert log.reference_examples().read()[:, 0].tolist() == [50, 50, 40, 40, 30, 30]
    assert {check.status for check in verify(open_run(run_dir))} == {"passed", "not checked"}


def test_string_ids_and_full_precision(tmp_path):
    header = LogHeader(0, "up", "example", "add_remove", "poisson", False, {})
    log = NormLog.open(write(tmp_path / "run", header=header, ids=np.array(["a", "b", "c", "d"])))
    assert log.example_ids.tolist() == ["a", "b", "c", "d"]
    assert np.array_equal(log.read(), NORMS)


@given(sizes=st.tuples(st.integers(1, 40), st.integers(1, 7), st.integers(1, 9)))
@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_blocks_are_slices_of_the_whole_at_any_row_group_size(sizes, tmp_path, monkeypatch):
    n, block, group = sizes
    monkeypatch.setattr(_files, "ROW_GROUP_SIZE", group)
    run_dir = tmp_path / "blocks"
    shutil.rmtree(run_dir, ignore_errors=True)
    writer = NormLogWriter(run_dir, HEADER, np.arange(n), None, np.zeros(0, dtype=np.int64))
    norms = np.linspace(0, 1.5, n)
    writer.record(0, norms, max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    writer.steps(0, 1, noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.5, counts=counts(1))
    writer.close()
    log = NormLog.open(run_dir)
    parts = range(0, n, block)
    joined = np.concatenate([log.read(at, min(at + block, n)) for at in parts], axis=1)
    assert np.array_equal(joined[0], log.levels.encode(norms, 1.0))


def test_a_torn_last_line_is_dropped_and_said(run_dir):
    journal = run_dir / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])  # the "close" line
    assert any("not closed" in caveat for caveat in NormLog.open(run_dir).caveats)
    assert "torn last line was dropped" in verify(open_run(run_dir))[0].detail


def test_writing_on_after_a_torn_line_keeps_the_chain(run_dir):
    journal = run_dir / "journal.jsonl"
    journal.write_bytes(journal.read_bytes()[:-20])
    with JournalWriter(run_dir) as writer:
        writer.append("close", evidence=counts(6).to_json())
    assert read_state(run_dir).closed


@pytest.mark.parametrize("seed", range(25))
def test_a_flipped_bit_never_passes(run_dir, seed):
    rng = np.random.default_rng(seed)
    target = rng.choice(
        [run_dir / "journal.jsonl", run_dir / "ids.parquet", *record_files(run_dir)]
    )
    content = bytearray(target.read_bytes())
    bit = int(rng.integers(8 * len(content)))
    content[bit // 8] ^= 1 << (bit % 8)
    target.write_bytes(content)
    before = NormLog.open(write(run_dir.parent / "copy"))
    try:
        log = NormLog.open(run_dir)
    except InputError as error:
        assert target.name in str(error)
        return
    # Only the end of the journal's last line may go unseen, as a torn line: then the log says it was not closed.
    assert np.array_equal(log.read(), before.read())
    assert any("not closed" in caveat for caveat in log.caveats)


def test_a_damaged_record_is_named_and_the_others_stay_usable(run_dir):
    path = record_files(run_dir)[1]
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(EvidenceError, match=rf"{path.name}: record of step 2 was changed"):
        NormLog.open(run_dir)
    log = NormLog.open(run_dir, unreadable="worst_case")
    codes = log.levels.encode(NORMS, 1.0)
    assert np.array_equal(log.read()[[0, 2]], codes[[0, 2]])
    assert np.all(log.read()[1] > log.levels.top)
    assert log.unreadable_steps == (2,)
    assert log.coverage == pytest.approx(2 / log.total_steps)
    assert log.reference_examples() is not None  # kept in files of their own


def test_a_missing_record_is_never_a_zero(run_dir):
    record_files(run_dir)[1].unlink()
    with pytest.raises(EvidenceError, match="record of step 2 is missing"):
        NormLog.open(run_dir)
    assert np.all(NormLog.open(run_dir, unreadable="worst_case").read()[1] > 100)
    assert [check.title for check in verify(open_run(run_dir)) if check.status == "failed"] == [
        "record 000000000002.parquet"
    ]


def test_a_lost_line_breaks_the_chain(run_dir):
    journal = run_dir / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(EvidenceError, match="line 4 was changed, or a line before it is lost"):
        NormLog.open(run_dir)


def forge(run_dir, change):
    """Rewrite the journal with a valid chain, as another program might."""
    entries, _ = read_journal(run_dir)
    (run_dir / "journal.jsonl").unlink()
    with JournalWriter(run_dir) as writer:
        for entry in change(entries):
            writer.append(**{key: value for key, value in entry.items() if key != "seq"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda lines: [{**lines[0], "schema": 99}, *lines[1:]],
            "log schema 99; this indpriv reads up to 1",
        ),
        (lambda lines: lines[1:], "without a header"),
        (
            lambda lines: [*lines[:2], lines[1], *lines[2:]],
            "record at step 0 follows one at step 0",
        ),
        (lambda lines: [*lines[:5], *lines[6:]], None),
        (
            lambda lines: [line for line in lines if line["kind"] != "steps" or line["first"] != 2],
            "steps from 4 follow 2",
        ),
        (lambda lines: [line for line in lines if line["kind"] != "steps"], "proves no step"),
        (
            lambda lines: [
                {**line, "file": "../../etc/passwd"} if line["kind"] == "record" else line
                for line in lines
            ],
            "points outside the run directory",
        ),
        (
            lambda lines: [
                {**line, "max_grad_norm": 0.5} if line["kind"] == "record" else line
                for line in lines
            ],
            "taken at max_grad_norm=0.5, but the step ran at 1.0",
        ),
        (
            lambda lines: [
                {**line, "n_examples": 3} if line["kind"] == "record" else line for line in lines
            ],
            "has 3 examples, the log has 4",
        ),
        (
            lambda lines: [
                {**line, "sample_rate": 1.5} if line["kind"] == "steps" else line for line in lines
            ],
            "sample_rate=1.5",
        ),
        (lambda lines: [{**lines[0], "kind": "song"}], "without a header"),
    ],
)
def test_contradictions_are_refused(run_dir, change, message):
    forge(run_dir, change)
    if message is None:  # an exact record left out: the rest stands
        assert NormLog.open(run_dir).reference_examples() is None
        return
    with pytest.raises(InputError, match=message):
        NormLog.open(run_dir)


def test_a_code_above_the_scale_is_refused(run_dir):
    header = LogHeader(0.5, "up", "example", "add_remove", "poisson", False, {})
    coarse = write(
        run_dir.parent / "coarse", header=header
    )  # two levels and the sizes of clipped norms
    fine = {entry["file"]: entry for entry in read_state(run_dir).lines["record"]}
    wide = np.array([250, 0, 0, 0], dtype=np.uint8)
    content = _files.parquet_bytes(pa.table({"norm": wide}))
    (coarse / "records" / next(iter(fine))).write_bytes(content)

    def rehash(lines):
        digest = hashlib.sha256(content).hexdigest()
        return [
            {**line, "sha256": digest, "bytes": len(content)}
            if line.get("file") == next(iter(fine))
            else line
            for line in lines
        ]

    forge(coarse, rehash)
    with pytest.raises(EvidenceError, match="code 250 is above the top"):
        NormLog.open(coarse).read()


def test_one_writer_at_a_time(run_dir):
    code = (
        "import sys; from pathlib import Path; from indpriv._files import JournalWriter\n"
        "writer = JournalWriter(Path(sys.argv[1])); print('held', flush=True); input()"
    )
    with running(
        [sys.executable, "-c", code, str(run_dir)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=f"being written by process {other.pid}"):
            JournalWriter(run_dir)
        other.communicate("\n")
    JournalWriter(run_dir).close()


def test_a_directory_without_a_log_is_refused(tmp_path):
    with pytest.raises(EvidenceError, match=r"holds no journal\.jsonl; pass the run directory"):
        NormLog.open(tmp_path)
    (tmp_path / "people.csv").write_text("a\n1\n")
    with pytest.raises(EvidenceError, match=r"people\.csv holds no journal\.jsonl"):
        NormLog.open(tmp_path / "people.csv")


def test_a_file_readable_by_others_fails_verification(run_dir):
    record_files(run_dir)[0].chmod(0o644)
    check = next(check for check in verify(open_run(run_dir)) if check.title == "permissions")
    assert check.status == "failed"
    assert "chmod" in check.detail


def test_a_full_disk_leaves_committed_records_intact(run_dir, monkeypatch):
    writer = NormLogWriter(run_dir, HEADER, np.arange(4), None, np.zeros(0, dtype=np.int64))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(_files.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.record(6, NORMS[0], max_grad_norm=1.0, targets_fingerprint="same", seconds=0.1)
    monkeypatch.undo()
    writer.close()
    assert len(record_files(run_dir)) == 3
    assert not list((run_dir / "records").glob(".*"))
    assert NormLog.open(run_dir).total_steps == 6


def test_a_run_json_that_contradicts_the_optimizer_is_found(run_dir):
    for noise_multiplier, status in ((1.0, "passed"), (2.0, "failed")):
        (run_dir / "run.json").write_text(
            json.dumps({"training": {"noise_multiplier": noise_multiplier}})
        )
        check = next(check for check in verify(open_run(run_dir)) if check.title == "run.json")
        assert check.status == status
    assert "declares noise_multiplier=2.0, the optimizer used 1 to 1" in check.detail


def test_journal_lines_are_plain_json(run_dir):
    for line in (run_dir / "journal.jsonl").read_text().splitlines():
        assert json.loads(line)["kind"] in ("header", "record", "exact", "steps", "close")


@pytest.mark.parametrize(
    "ids", [np.arange(4) / 2, np.arange(4) > 1, np.arange(4).astype("datetime64[D]"), np.array([b"a", b"b", b"c", b"d"])]
)  # fmt: skip
def test_ids_that_could_not_be_read_again_are_refused_before_anything_is_written(ids, tmp_path):
    """Else a whole run is recorded that nothing opens."""
    with pytest.raises(InputError, match="pass whole numbers or texts"):
        write(tmp_path / "run", ids=ids)
    assert not (tmp_path / "run").exists()
    for n, sound in enumerate((np.arange(4), np.array([*"abcd"]), np.array([*"abcd"], object))):
        log = NormLog.open(write(tmp_path / str(n), ids=sound))
        assert log.example_ids.tolist() == sound.tolist()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("header", {"n_examples": 0}),
        ("header", {"n_examples": 1 << 31}),
        ("header", {"policy": {"a": 1}}),
        ("header", {"privacy_filter": {"order": 8.0}}),
        ("exact", {"bytes": None}),
        ("exact", {"bytes": None, "parts": [[1, "a"]]}),
    ],
)
def test_strange_lines_of_a_journal_are_one_message(kind, changes, run_dir):
    lines, _ = read_journal(run_dir)
    next(line for line in lines if line["kind"] == kind).update(changes)
    (run_dir / "journal.jsonl").unlink()
    with JournalWriter(run_dir) as journal:
        for line in lines:
            journal.append(**{key: value for key, value in line.items() if key != "seq"})
    with pytest.raises(EvidenceError):
        verify(open_run(run_dir))
