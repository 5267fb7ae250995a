"""Audits that are stopped, or that meet in one directory: nothing is computed twice, nothing is mixed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from every_account import ACCOUNTS, DELTA, QUICK, N
from indpriv import InputError, _files, account, epsilon_table
from indpriv._files import OneWriter, read_parquet
from indpriv.accountant import blocks
from indpriv.accountant.account import account_parts
from indpriv.accountant.method import Method, owners_of
from indpriv.accountant.units import first_rows
from indpriv.audit import audit
from indpriv.audit.audit_directory import in_progress
from indpriv.errors import PrivacyWarning
from synthetic import write_run

quick = pytest.mark.usefixtures("no_extras")


@pytest.fixture
def parts_of_50(monkeypatch):
    for module, name in (
        (epsilon_table, "PART_ROWS"),
        (_files, "ROW_GROUP_SIZE"),
        (blocks, "ROW_GROUP_SIZE"),
    ):
        monkeypatch.setattr(module, name, 50)


@pytest.fixture
def computed(monkeypatch):
    """The ids of the units that were computed: of examples, or of people."""
    found, plain = [], blocks.in_blocks

    def counted(log, work, **options):
        def seen(block):
            owners = owners_of(block)
            ids = block.example_ids if owners is None else owners
            found.extend(ids[first_rows(block)].tolist())
            return work(block)

        return plain(log, seen, **options)

    monkeypatch.setattr(blocks, "in_blocks", counted)
    return found


def stop_after(n_parts):
    """A progress that stops the account as Ctrl-C does, once so many parts are on disk."""

    def progress(done, total):
        if done > 50 * n_parts:
            raise KeyboardInterrupt

    return progress


def assert_same_bits(found, whole):
    for name in ("example_ids", "epsilon", "epsilon_lower", "epsilon_upper"):
        assert np.array_equal(getattr(found, name), getattr(whole, name))
    assert list(found.details) == list(whole.details)
    for name, values in whole.details.items():
        assert np.array_equal(found.details[name], values)
    assert (found.account, found.claim, found.claim_reason, found.worst_case_epsilon) == (
        whole.account,
        whole.claim,
        whole.claim_reason,
        whole.worst_case_epsilon,
    )


@pytest.mark.usefixtures("parts_of_50")
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind not in QUICK)) for kind in ACCOUNTS],
)
def test_every_stopped_account_goes_on_with_what_is_missing(kind, tmp_path, computed):
    make, options = ACCOUNTS[kind]
    log, method, folder, told = make(), Method(delta=DELTA, **options), tmp_path / "parts", []
    with pytest.raises(KeyboardInterrupt):
        account_parts(log, method, folder, {}, progress=stop_after(2), workers=1)
    kept = sorted(folder.glob("part-*"))
    assert 1 <= len(kept) < 5
    if len(kept) > 1:
        kept.pop(0).unlink()  # not only the last ones may be missing
    (folder / ".part-00003.parquet.9.tmp").write_bytes(b"half a part")
    before = {path: path.stat().st_mtime_ns for path in kept}
    computed.clear()
    found = account_parts(
        log, method, folder, {}, progress=lambda *step: told.append(step), workers=1
    )
    whole = account(log, delta=DELTA, **options)
    column = whole.account.id_column
    there = {unit for path in kept for unit in read_parquet(path)[column].tolist()}
    assert sorted(computed[:-N]) == sorted(set(whole.example_ids.tolist()) - there)
    assert told[-1] == (N, N)
    if method.participation == "secret":  # else parts learn the worst case of all
        assert {path: path.stat().st_mtime_ns for path in kept} == before
    assert found.path.is_dir()
    assert len(found) == N
    assert_same_bits(found.table(found.details), whole)
    assert not list(folder.glob(".part*"))
    computed.clear()
    account_parts(log, method, folder, {})
    assert not computed


@pytest.mark.usefixtures("parts_of_50")
@pytest.mark.parametrize("kind", QUICK)
def test_parts_change_no_epsilon_by_more_than_rounding(kind, monkeypatch):
    make, options = ACCOUNTS[kind]
    log = make()
    by_parts = account(log, delta=DELTA, **options)
    monkeypatch.undo()
    at_once = account(log, delta=DELTA, **options)
    assert by_parts.worst_case_epsilon == at_once.worst_case_epsilon
    np.testing.assert_allclose(by_parts.epsilon, at_once.epsilon, rtol=1e-6)
    assert np.all(by_parts.epsilon <= at_once.worst_case_epsilon)
    assert np.array_equal(by_parts.at_worst_case, at_once.at_worst_case)


def test_an_audit_of_known_participation_that_stops_while_parts_share_their_worst_case(
    tmp_path, parts_of_50, monkeypatch
):
    make, options = ACCOUNTS["known, people"]
    log, method, folder = make(), Method(delta=DELTA, **options), tmp_path / "parts"
    plain, written = epsilon_table.EpsilonTable.with_worst_case, []

    def stop(table, epsilon):
        written.append(epsilon)
        if len(written) == 3:
            raise KeyboardInterrupt
        return plain(table, epsilon)

    monkeypatch.setattr(epsilon_table.EpsilonTable, "with_worst_case", stop)
    with pytest.raises(KeyboardInterrupt):
        account_parts(log, method, folder, {})
    monkeypatch.setattr(epsilon_table.EpsilonTable, "with_worst_case", plain)
    assert len(list(folder.glob("part-*"))) == 5
    found = account_parts(log, method, folder, {})
    assert_same_bits(found.table(found.details), account(log, delta=DELTA, **options))


@quick
@pytest.mark.usefixtures("parts_of_50")
def test_a_stopped_audit_goes_on_or_begins_anew(artifacts, tmp_path, computed):
    run, output = write_run(tmp_path / "run", *artifacts), tmp_path / "audits" / "tiny"

    def stop(stage, done, total):
        if stage == "analysing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(run, output, delta=DELTA, progress=stop)
    assert sorted(computed) == list(range(240))
    (output / ".in-progress" / "part-00001.parquet").unlink()
    computed.clear()
    audit(run, output, delta=DELTA)
    assert sorted(computed[:-1]) == list(range(50, 100))  # and one, of which tightness is found
    assert not (output / ".in-progress").exists()
    whole = read_parquet(output / "epsilon.parquet")
    assert np.array_equal(whole["epsilon"], account(artifacts[0], delta=DELTA).epsilon)

    with pytest.raises(KeyboardInterrupt):
        audit(run, output, delta=DELTA, progress=stop)
    computed.clear()
    with pytest.warns(PrivacyWarning, match=r"parts of another account, which was stopped.*\(5\)"):
        audit(run, output, delta=1e-6)
    assert sorted(computed[:-1]) == list(range(240))
    found = read_parquet(output / "epsilon.parquet")["epsilon"]
    assert np.array_equal(found, account(artifacts[0], delta=1e-6).epsilon)


@quick
@pytest.mark.usefixtures("parts_of_50")
def test_parts_by_other_code_of_the_same_version_are_not_kept(
    artifacts, tmp_path, computed, monkeypatch
):
    run, output = write_run(tmp_path / "run", *artifacts), tmp_path / "audit"
    package = tmp_path / "indpriv"
    shutil.copytree(Path(blocks.__file__).parents[1], package)
    assert blocks.code_hash(package) == blocks.versions()["indpriv's code"]
    (package / "report" / "pdf.py").write_text("")  # decides no epsilon
    assert blocks.code_hash(package) == blocks.versions()["indpriv's code"]

    def stop(stage, done, total):
        if stage == "analysing":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit(run, output, delta=DELTA, progress=stop)
    computed.clear()
    changed = package / "accountant" / "steps.py"
    changed.write_text("another way")
    monkeypatch.setattr(blocks._checks, "__file__", str(package / "_checks.py"))
    blocks.versions.cache_clear()
    with pytest.warns(PrivacyWarning, match=r"parts of another account, which was stopped.*\(5\)"):
        audit(run, output, delta=DELTA)
    blocks.versions.cache_clear()
    assert sorted(computed[:-1]) == list(range(240))


@quick
def test_two_audits_do_not_write_to_one_directory(artifacts, tmp_path):
    run, output = write_run(tmp_path / "run", *artifacts), tmp_path / "audit"
    with in_progress(output):
        with pytest.raises(InputError, match=rf"audit is being written by process {os.getpid()};"):
            audit(run, output, delta=DELTA)
        assert (output / ".in-progress").exists()
    assert not output.exists()
    audit(run, output, delta=DELTA)


@pytest.mark.skipif(os.name == "nt", reason="no SIGKILL on Windows")
def test_the_writer_of_a_folder_that_died_is_forgotten(tmp_path):
    code = (
        "import os, pathlib, signal\n"
        "from indpriv._files import OneWriter\n"
        f"OneWriter(pathlib.Path({str(tmp_path)!r}))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == -signal.SIGKILL
    assert (tmp_path / ".lock").exists()
    OneWriter(tmp_path).close()


@quick
def test_an_audit_that_fails_leaves_no_directory(artifacts, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise InputError("no account")

    monkeypatch.setattr("indpriv.audit.pipeline.account_parts", broken)
    with pytest.raises(InputError, match="no account"):
        audit(write_run(tmp_path / "run", *artifacts), tmp_path / "new" / "audit", delta=DELTA)
    assert not (tmp_path / "new").exists()
