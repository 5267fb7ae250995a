"""Audits that are stopped, or that meet in one directory: nothing is computed twice, nothing is mixed."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from indpriv import InputError, _files, account
from indpriv._files import OneWriter, read_parquet
from indpriv.accountant import blocks, per_example, prepared
from indpriv.accountant.method import Method
from indpriv.accountant.per_example import account_parts
from indpriv.audit import audit
from indpriv.audit.audit_directory import in_progress
from indpriv.epsilon_table import parts
from indpriv.errors import PrivacyWarning
from synthetic import write_run

from .conftest import DELTA

quick = pytest.mark.usefixtures("no_extras")
METHOD = Method(delta=DELTA)


@pytest.fixture
def parts_of_50(monkeypatch):
    for module, name in (
        (parts, "PART_ROWS"),
        (_files, "ROW_GROUP_SIZE"),
        (blocks, "ROW_GROUP_SIZE"),
    ):
        monkeypatch.setattr(module, name, 50)


@pytest.fixture
def computed(monkeypatch):
    """The examples whose epsilons were computed, in order."""
    rows, plain = [], prepared._epsilons

    def counted(engine, block):
        rows.extend(block.example_ids.tolist())
        return plain(engine, block)

    monkeypatch.setattr(prepared, "_epsilons", counted)
    return rows


def stop_after(n_parts):
    """A progress that stops the account as Ctrl-C does, once so many parts are on disk."""

    def progress(done, total):
        if done > 50 * n_parts:
            raise KeyboardInterrupt

    return progress


@pytest.mark.usefixtures("parts_of_50")
@pytest.mark.parametrize("accountant", ["rdp", "pld"])
def test_an_account_in_parts_has_the_bits_of_one_in_memory(artifacts, tmp_path, accountant):
    log = artifacts[0].part(0, 120) if accountant == "pld" else artifacts[0]
    whole = account(log, delta=DELTA, accountant=accountant)
    method = Method(delta=DELTA, accountant=accountant)
    found = account_parts(log, method, tmp_path / "parts", {})
    table = found.table(found.details)
    for name in ("example_ids", "epsilon", "epsilon_lower", "epsilon_upper"):
        assert np.array_equal(getattr(table, name), getattr(whole, name))
    assert table.details.keys() == whole.details.keys()
    for name, values in whole.details.items():
        assert np.array_equal(table.details[name], values)
    assert (table.account, table.claim, table.claim_reason, table.worst_case_epsilon) == (
        whole.account,
        whole.claim,
        whole.claim_reason,
        whole.worst_case_epsilon,
    )


@pytest.mark.usefixtures("parts_of_50")
def test_a_stopped_account_goes_on_with_what_is_missing(artifacts, tmp_path, computed):
    log, folder, told = artifacts[0], tmp_path / "parts", []
    with pytest.raises(KeyboardInterrupt):
        account_parts(log, METHOD, folder, {}, progress=stop_after(2), workers=1)
    kept = sorted(folder.glob("part-*"))
    assert 1 <= len(kept) < 5
    (folder / "part-00000.parquet").unlink()  # not only the last ones may be missing
    (folder / ".part-00003.parquet.9.tmp").write_bytes(b"half a part")
    before = {path: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    computed.clear()
    found = account_parts(
        log, METHOD, folder, {}, progress=lambda *step: told.append(step), workers=1
    )
    there = {row for path in before for row in read_parquet(path)["example_id"]}
    assert sorted(computed) == [row for row in range(240) if row not in there]
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    assert told[-1] == (240, 240)
    assert np.array_equal(found.table().epsilon, account(log, delta=DELTA).epsilon)
    assert not list(folder.glob(".part*"))
    computed.clear()
    account_parts(log, METHOD, folder, {})
    assert not computed


@pytest.mark.usefixtures("parts_of_50")
def test_units_of_several_rows_are_written_when_their_account_ends(artifacts, tmp_path):
    log = artifacts[0]
    people = per_example.replace(log, unit="user", unit_ids=np.arange(240) // 3)
    found = account_parts(people, METHOD, tmp_path / "parts", {})
    whole = account(people, delta=DELTA)
    assert found.path.is_dir()
    assert len(found) == 80
    assert np.array_equal(found.table().epsilon, whole.epsilon)
    assert np.array_equal(found.table().details["n_rows"], whole.details["n_rows"])


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
    assert sorted(computed) == list(range(50, 100))
    assert not (output / ".in-progress").exists()
    whole = read_parquet(output / "epsilon.parquet")
    assert np.array_equal(whole["epsilon"], account(artifacts[0], delta=DELTA).epsilon)

    with pytest.raises(KeyboardInterrupt):
        audit(run, output, delta=DELTA, progress=stop)
    computed.clear()
    with pytest.warns(PrivacyWarning, match="5 parts of another account, which was stopped"):
        audit(run, output, delta=1e-6)
    assert sorted(computed) == list(range(240))
    found = read_parquet(output / "epsilon.parquet")["epsilon"]
    assert np.array_equal(found, account(artifacts[0], delta=1e-6).epsilon)


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
