"""A stranger's directory has nothing of the auditor's overwritten, whichever link it holds.

Every name that a command writes is collected on a clean directory; then a link out of the directory is planted
at it, and the command is run again: what lies outside stays as it was, and there is a right result or one message.
"""

import json
import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
import pytest
import torch

import plain_opacus
from audits.training.config import AuditConfig
from audits.training.datasets.base import Dataset, Split
from audits.training.dp_sgd import train
from indpriv import _folders
from indpriv._files import (
    JournalWriter,
    OneWriter,
    read_parquet,
    write_atomically,
    write_json,
    writer_of,
    written_atomically,
)
from indpriv._folders import make_folder, named_by_person
from indpriv.analysis import fidelity
from indpriv.attack_signals import add_model, new_folder
from indpriv.attacks.train_references import train_references
from indpriv.audit import pipeline
from indpriv.cli import run
from indpriv.errors import InputError
from indpriv.recording import AuditSpec, StepOptions, replay
from indpriv.report.page import Page
from indpriv.round_recorder import RoundRecorder
from runs import PER_EXAMPLE, blobs, mlp
from synthetic import signals_with_effect, small_run, write_run

PRECIOUS = b"what the auditor wrote in years"
linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
CONFIG = {
    "name": "toy",
    "data": {"dataset": "digits"},
    "model": {"architecture": "mlp", "hidden": [4]},
    "training": {"epochs": 2, "batch_size": 30, "learning_rate": 0.5, "max_grad_norm": 1.0, "delta": 1e-4,
                 "noise_multiplier": 1.0, "non_private_baseline": True},
    "recording": {"every": 1},
    "checkpoints": {"every": 2},
}  # fmt: skip


def toy() -> Dataset:
    inputs = np.random.default_rng(0).normal(size=(90, 6)).astype(np.float32)
    splits = [Split(part, np.arange(len(part)) % 3) for part in (inputs, inputs[:30])]
    return Dataset("toy", *splits, tuple("abc"), "none", "made here")


def code_of(*words: object) -> int:
    """The exit code of a command, whose messages are where the screen is; audits are of the quick sort."""
    return run([*map(str, words), *(["--participation", "known"] if words[0] == "audit" else [])])


def command(*words: object) -> None:
    code = code_of(*words)
    assert code in (0, 2), code
    if code:
        raise InputError("see the screen")


def a_run(folder: Path, seed: int = 0, steps: int = 4) -> None:
    log, examples = small_run(n=40, steps=steps, seed=seed)
    write_run(folder, log, examples)
    write_json(folder / "run.json", {"name": "tiny", "training": {"delta": 1e-5}})


def an_audit(folder: Path) -> None:
    a_run(folder / "run", steps=1)
    assert run(["audit", str(folder / "run"), "--output-dir", str(folder / "audit")]) == 0
    shutil.rmtree(folder / "run")
    for path in list((folder / "audit").iterdir()):
        path.rename(folder / path.name)
    (folder / "audit").rmdir()


def publish(folder: Path) -> None:
    command("publish", "quantiles", folder, "--epsilon", "1", "--quantiles", "0.5")
    command("publish", "statement", folder, "--example", 0)
    command("publish", "card", folder)


def a_stopped_run(folder: Path) -> None:
    def crash(_stage: str, done: int, _total: int) -> None:
        if done == 4:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train(AuditConfig.from_dict(CONFIG), folder, dataset=toy(), progress=crash)


def stopped_rounds(folder: Path) -> None:
    with RoundRecorder(folder, ["a", "b"], sampler="fixed_size") as recorder:
        recorder.round(["a"], [0.3], noise_multiplier=1.0, max_grad_norm=0.5)
        recorder.round(["b"], [0.3], noise_multiplier=1.0, max_grad_norm=0.5)


def more_rounds(folder: Path) -> None:
    with RoundRecorder(
        folder, ["a", "b"], sampler="fixed_size", resume_at=1, run_info={}
    ) as recorder:
        recorder.round(["a"], [0.3], noise_multiplier=1.0, max_grad_norm=0.5)


def saved(folder: Path) -> None:
    plain_opacus.train(
        mlp(), blobs(), folder.parent / "saved", epochs=2, batch_size=12, save_every=10
    )
    folder.mkdir()


def replayed(folder: Path) -> None:
    spec = AuditSpec(model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE, test_set=blobs())
    options = StepOptions(max_grad_norm="1.0", sampler="poisson", delta=1e-5)
    replay(folder.parent / "saved", spec, folder, options=options)


def references(folder: Path, n_models: int = 2) -> None:
    def signal(seed: int, positions: np.ndarray) -> dict[str, np.ndarray]:
        return {name: np.full(len(positions), seed % 997.0) for name in ("confidence", "labels")}

    train_references(
        lambda _, seed: seed, n_models, signal_fn=signal, pool=20, output=folder, seed=1
    )


@dataclass(frozen=True)
class Scene:
    """What writes a directory, and how it is before."""

    write: Callable[[Path], None]
    before: Callable[[Path], None] = Path.mkdir


SCENES = {
    "audit": Scene(lambda folder: command("audit", folder, "--output-dir", folder / "audit"), a_run),
    "publish": Scene(publish, an_audit),
    "train": Scene(lambda folder: train(AuditConfig.from_dict(CONFIG), folder, dataset=toy()) and None),
    "resume": Scene(
        lambda folder: train(AuditConfig.from_dict(CONFIG), folder, dataset=toy(), resume=True) and None,
        a_stopped_run,
    ),
    "rounds": Scene(more_rounds, stopped_rounds),
    "replay": Scene(replayed, saved),
    "compose": Scene(
        lambda folder: command("compose", folder.parent / "other", folder.parent / "third", "--output-dir", folder),
        lambda folder: [a_run(folder.parent / name, seed) for seed, name in enumerate(("other", "third"))] and folder.mkdir(),
    ),
    "references": Scene(references),
    "more references": Scene(lambda folder: references(folder, 3), references),
}  # fmt: skip


@pytest.fixture(autouse=True)
def short_audits(monkeypatch):
    """Without further accounts and figures, which take long and write no other files; but a long page."""
    for name in ("COARSER", "RULES", "FIDELITY_EPOCHS"):
        monkeypatch.setattr(fidelity, name, ())
    monkeypatch.setattr(Page, "html", lambda *_: "a page" * 20_000)


_watched: list[tuple[Path, set[str]]] = []


def _see(event: str, arguments: tuple) -> None:
    if not _watched or event not in ("os.rename", "os.mkdir"):
        return
    path, descriptor = arguments[1:4:2] if event == "os.rename" else arguments[0:3:2]
    if descriptor in (-1, None):
        found = Path(os.fsdecode(path)).absolute()
    else:
        found = Path(os.readlink(f"/proc/self/fd/{descriptor}"), os.fsdecode(path))
    root, names = _watched[-1]
    if found.is_relative_to(root) and found != root:
        names.add(str(found.relative_to(root)))


@pytest.fixture(scope="session")
def written() -> Callable[[str, Path], list[str]]:
    """Names that a scene writes below its directory, those that are gone at the end included."""
    sys.addaudithook(_see)

    def names_of(scene: str, folder: Path) -> list[str]:
        copied(scene, folder)
        before = {path: path.stat() for path in folder.rglob("*")}
        names: set[str] = set()
        _watched.append((folder.resolve(), names))
        SCENES[scene].write(folder)
        _watched.pop()
        for path in folder.rglob("*"):
            if path not in before or path.stat().st_mtime_ns != before[path].st_mtime_ns:
                names.add(str(path.relative_to(folder)))
        assert names
        return sorted(names)

    return names_of


_clean: dict[str, Path] = {}


def copied(scene: str, folder: Path) -> None:
    """The directory of a scene as it is before, made once."""
    if scene not in _clean:
        _clean[scene] = folder.parents[1] / f"clean-{scene.replace(' ', '-')}" / "run"
        _clean[scene].parent.mkdir(parents=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SCENES[scene].before(_clean[scene])
    shutil.copytree(_clean[scene].parent, folder.parent, dirs_exist_ok=True, symlinks=True)


def state_of(folder: Path) -> dict[str, object]:
    """Everything about files, but for the times of reading."""
    return {
        str(path): (
            path.lstat().st_mode,
            path.lstat().st_mtime_ns,
            path.is_file() and path.read_bytes(),
        )
        for path in [folder, *folder.rglob("*")]
    }


def plant(link: Path, outside: Path, kind: str) -> None:
    """Put a link at a name, to a copy of what lay there if that was of the same kind."""
    for parent in reversed(link.parents):
        parent.mkdir(exist_ok=True)
    target = outside / "target"
    was_folder = link.is_dir()
    if link.exists():
        link.rename(outside / "was")
    if kind == "file":
        target.write_bytes(
            (outside / "was").read_bytes() if (outside / "was").is_file() else PRECIOUS
        )
    elif kind == "folder":
        shutil.copytree(outside / "was", target) if was_folder else target.mkdir()
        for name in (
            "precious",
            ".lock",
            ".writer",
            "part-00009.parquet",
            ".part-00009.parquet.1.tmp",
        ):
            if not (target / name).exists():
                (target / name).write_bytes(PRECIOUS)
    link.symlink_to(target)


def check_planted(
    scene: str, name: str, kind: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> str:
    """Plant, run, and see what came of it: "named" in a message, "refused" by another one, or "right"."""
    copied(scene, folder)
    outside = folder.parents[1] / "outside"
    outside.mkdir()
    plant(folder / name, outside, kind)
    before = state_of(outside)
    capsys.readouterr()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            SCENES[scene].write(folder)
        found, message = "right", ""
    except (InputError, OSError) as error:
        found, message = "refused", str(error)
    shown = capsys.readouterr().err + message
    assert state_of(outside) == before, f"{scene}: {name} -> {kind}"
    assert "Traceback" not in shown
    if found == "refused":
        assert str(folder.parent) in shown, shown
        assert shown.count("error:") <= 1
        found = "named" if f"{folder / name} is a link" in shown else found
    return found


SAMPLE = (
    ("audit", "audit", "folder"),
    ("audit", "audit/.in-progress", "folder"),
    ("audit", "audit/.in-progress/.writer", "file"),
    ("audit", "audit/.in-progress/.lock", "file"),
    ("publish", "ledger", "folder"),
    ("publish", "ledger/.writer", "file"),
    ("publish", "ledger/journal.jsonl", "nowhere"),
    ("publish", "paid.json", "file"),
    ("publish", "shareable", "folder"),
    ("publish", "statements", "folder"),
    ("rounds", "journal.jsonl", "file"),
    ("rounds", "records", "folder"),
    ("more references", "confidence.f32", "file"),
    ("more references", "labels.f32", "nowhere"),
)


@pytest.mark.parametrize(("scene", "name", "kind"), SAMPLE, ids=[" ".join(one) for one in SAMPLE])
def test_a_link_in_a_directory_is_refused_by_name(scene, name, kind, tmp_path, capsys):
    folder = tmp_path / "in" / "run"
    assert check_planted(scene, name, kind, folder, capsys) == "named"


@linux
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "folder", "nowhere"])
@pytest.mark.parametrize("scene", SCENES)
def test_nothing_outside_changes_whichever_name_is_a_link(scene, kind, tmp_path, written, capsys):
    names = written(scene, tmp_path / "collect" / "run")
    found = {}
    for number, name in enumerate(names):
        place = tmp_path / str(number)
        found[name] = check_planted(scene, name, kind, place / "in" / "run", capsys)
        shutil.rmtree(place, ignore_errors=True)
    if scene != "references":  # which refuses any folder that holds something else
        assert list(found.values()).count("named") >= len(found) / 3, found


@pytest.mark.parametrize("by_descriptor", [True, False], ids=["by descriptor", "as on Windows"])
def test_links_that_a_person_names_are_followed_and_no_others(tmp_path, monkeypatch, by_descriptor):
    monkeypatch.setattr(_folders, "_BY_DESCRIPTOR", by_descriptor)
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk")
    folder = make_folder(tmp_path / "run", "records", "more")
    write_atomically(folder / "a", b"1")
    write_atomically(folder / "a", b"2")
    assert (tmp_path / "disk/records/more/a").read_bytes() == b"2"
    assert [path.name for path in folder.iterdir()] == ["a"]
    if os.name != "nt":
        assert stat.S_IMODE((folder / "a").stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (tmp_path / "outside").mkdir()
    folder.rename(tmp_path / "outside/was")
    folder.symlink_to(tmp_path / "outside")
    for write in (
        lambda: write_atomically(folder / "a", b"3"),
        lambda: make_folder(tmp_path / "run", "records", "more"),
        lambda: make_folder(folder),
        lambda: JournalWriter(folder),
        lambda: OneWriter(folder),
        lambda: _folders.remove_file(folder / "was"),
        lambda: writer_of(folder / "was"),
    ):
        (tmp_path / "outside/was/.lock").touch()
        before = state_of(tmp_path / "outside")
        with pytest.raises(InputError, match="more is a link"):
            write()
        assert state_of(tmp_path / "outside") == before


def test_a_link_that_is_planted_while_a_file_is_written_is_refused(tmp_path):
    folder = make_folder(tmp_path / "run", "records")
    (tmp_path / "outside").mkdir()
    with (
        pytest.raises(InputError, match="records is a link"),
        written_atomically(folder / "a") as file,
    ):
        file.write(b"1")
        folder.rename(tmp_path / "moved")
        folder.symlink_to(tmp_path / "outside")
    assert not list((tmp_path / "outside").iterdir())


@pytest.mark.parametrize("name", [".writer", ".lock", "journal.jsonl"])
@pytest.mark.parametrize("kind", ["another name", "pipe"])
def test_other_names_of_a_file_and_pipes_neither_change_nor_hang(tmp_path, name, kind):
    (tmp_path / "precious").write_bytes(b"")
    (tmp_path / "run").mkdir()
    if kind == "pipe":
        os.mkfifo(tmp_path / "run" / name)
    else:
        os.link(tmp_path / "precious", tmp_path / "run" / name)
    try:
        JournalWriter(tmp_path / "run").close()
    except (InputError, OSError) as error:
        assert name in str(error)
    assert (tmp_path / "precious").read_bytes() == b""


def test_who_writes_is_no_text_from_a_file(tmp_path):
    (tmp_path / "run").mkdir()
    holder = OneWriter(tmp_path / "run")
    assert writer_of(tmp_path / "run") == str(os.getpid())
    (tmp_path / "run/.writer").write_bytes(b"\x1b]0;owned\x07 77")
    assert writer_of(tmp_path / "run") == "unknown"
    (tmp_path / "run/.writer").unlink()
    (tmp_path / "secret").write_bytes(b"77")
    (tmp_path / "run/.writer").symlink_to(tmp_path / "secret")
    named_by_person(tmp_path / "run")
    with pytest.raises(InputError, match="writer is a link"):
        writer_of(tmp_path / "run")
    holder.close()


def test_a_temporary_name_is_never_used_twice(tmp_path):
    """Whatever lies at guessable names, or at those of a crash before, is not touched."""
    planted = [tmp_path / f".a.{number}.tmp" for number in (os.getpid(), 1)]
    for path in planted:
        path.symlink_to(tmp_path / "absent")
    write_atomically(tmp_path / "a", b"1")
    assert not (tmp_path / "absent").exists()
    names = set()
    for _ in range(3):
        with (
            pytest.raises(ZeroDivisionError),
            in_temporary(tmp_path, names),
        ):
            raise ZeroDivisionError
    assert len(names) == 3
    assert not [path for path in tmp_path.iterdir() if path.name in names]


@contextmanager
def in_temporary(folder, names):
    before = {path.name for path in folder.iterdir()}
    with written_atomically(folder / "b"):
        names |= {path.name for path in folder.iterdir()} - before
        yield


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    a_run(tmp_path / "given" / "tiny")
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    return tmp_path / "given" / "tiny"


def is_whole(folder: Path) -> bool:
    return {"audit.json", "report.html", "audit.md", "epsilon.parquet"} <= {
        path.name for path in folder.iterdir()
    }


@linux
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a directory away"
)
def test_the_audit_of_anothers_run_is_outside_it(tiny, capsys):
    for path in [tiny, *tiny.rglob("*")]:
        os.chown(path, 12345, 12345)
    before = state_of(tiny)
    command("audit", tiny)
    assert state_of(tiny) == before
    assert is_whole(Path("tiny-audit"))
    shown = capsys.readouterr()
    assert "is another user's, came from elsewhere, had its modes changed" in shown.err
    assert "the audit is written to tiny-audit" in shown.err
    assert "tiny-audit/report.html" in shown.out


def unpacked(folder: Path, to: Path) -> Path:
    """A folder as whoever unpacks an archive of it has it: their own, with the times of the archive."""
    subprocess.run(
        ["tar", "cpf", to.with_suffix(".tar"), "-C", folder.parent, folder.name], check=True
    )
    to.mkdir(parents=True)
    subprocess.run(["tar", "xpf", to.with_suffix(".tar"), "-C", to], check=True)
    return to / folder.name


def epsilons(folder: Path) -> np.ndarray:
    return read_parquet(folder / "epsilon.parquet")["epsilon"].to_numpy()


def stopped(audit_of: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit that ends before it is written, and leaves its parts."""

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_audit", stop)
        with pytest.raises(KeyboardInterrupt):
            audit_of()


@linux
def test_an_audit_goes_on_with_its_own_parts_and_with_none_that_came_with_a_run(tiny, monkeypatch):
    stopped(lambda: pipeline.audit(tiny, tiny / "audit", participation="known"), monkeypatch)
    (part,) = (tiny / "audit/.in-progress").glob("part-*.parquet")
    forged = pq.read_table(part)
    for name in ("epsilon", "epsilon_lower", "epsilon_upper"):
        place = forged.column_names.index(name)
        forged = forged.set_column(place, name, pa.compute.multiply(forged[name], 0.1))
    pq.write_table(forged, part)
    given = unpacked(tiny, tiny.parents[1] / "given-away")
    shutil.copytree(tiny, "copied")
    pipeline.audit(tiny, tiny / "audit", participation="known")  # as whoever made them
    for number, run_dir in enumerate((given, Path("copied"))):
        pipeline.audit(run_dir, Path("new"), participation="known")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipeline.audit(run_dir, run_dir / "audit", participation="known")
        assert np.array_equal(epsilons(run_dir / "audit"), epsilons(Path("new"))), number
        shutil.rmtree("new")
        assert np.allclose(epsilons(tiny / "audit"), 0.1 * epsilons(run_dir / "audit"))


@linux
def test_an_audit_that_came_with_a_run_is_not_ones_own(tiny, capsys):
    other = tiny.parent / "other"
    a_run(other)
    for run_dir in (tiny, other):
        command("audit", run_dir)
    command("show", tiny, other)  # one's own
    given = unpacked(tiny, tiny.parents[1] / "unpacked")
    before = state_of(given / "audit")
    assert code_of("show", given, other) == 2
    assert "came with the run" in capsys.readouterr().err
    command("show", given / "audit", other)  # named
    command("audit", given)
    assert state_of(given / "audit") == before
    assert "came from elsewhere" in capsys.readouterr().err
    assert is_whole(Path("tiny-audit"))
    command("audit", given)  # again
    command("audit", tiny)
    assert "came from elsewhere" not in capsys.readouterr().err.split("tiny-audit")[-1]
    (given / "audit/.here.json").write_text("[]")
    (given / "audit/.here").unlink()
    command("audit", given)
    assert state_of(given / "audit/epsilon.parquet") == {
        name: found for name, found in before.items() if name.endswith("epsilon.parquet")
    }


@linux
@pytest.mark.parametrize("kind", ["link", "directory", "dangling"])
def test_what_lies_where_an_audit_goes_by_default_is_not_overwritten(tiny, tmp_path, kind, capsys):
    """Whoever gives a run away may put a link beside it, where an audit outside the run goes."""
    command("audit", tiny)
    given = unpacked(tiny, tmp_path / "unpacked")
    mine = Path("tiny-audit") if kind == "directory" else tmp_path / "elsewhere"
    if kind != "dangling":
        (mine / "epsilon.parquet").mkdir(parents=True)
        (mine / "epsilon.parquet/thesis.txt").write_text("mine")
    if kind != "directory":
        Path("tiny-audit").symlink_to(mine)
    before = state_of(tmp_path)
    capsys.readouterr()
    assert code_of("audit", given) == 2
    shown = capsys.readouterr().err
    assert shown.count("error:") == 1
    assert "tiny-audit, where the audit of" in shown
    assert "is not known to be an audit of yours; name a directory with --output-dir" in shown
    assert state_of(tmp_path) == before


@linux
def test_the_modes_of_a_run_are_mended_as_the_audit_says_and_its_audit_stays_ones_own(tiny, capsys):
    command("audit", tiny)
    (tiny / "audit/epsilon.parquet").chmod(0o644)
    capsys.readouterr()
    assert code_of("check", tiny, "--set", "only=log", "--json") == 1
    said = [
        one
        for one in json.loads(capsys.readouterr().out)["parts"][0]["checks"]
        if "chmod" in one["detail"]
    ]
    subprocess.run(said[0]["detail"].split("; run ")[1], shell=True, check=True)
    assert not [path for path in (tiny, *tiny.rglob("*")) if path.stat().st_mode & 0o077]
    command("audit", tiny)
    assert is_whole(tiny / "audit")
    assert not Path("tiny-audit").exists()
    subprocess.run(["chmod", "-R", "go=", tiny], check=True)  # as people do
    capsys.readouterr()
    command("audit", tiny)
    assert f"If {tiny} is yours, --output-dir {tiny}/audit writes there" in capsys.readouterr().err
    (tiny / "audit/.here.json").write_text("{")
    command("audit", tiny, "--output-dir", tiny / "audit")
    shutil.rmtree("tiny-audit")
    command("audit", tiny)
    assert not Path("tiny-audit").exists()


@linux
def test_what_the_system_says_is_shown_with_the_file_alone(tiny, capsys):
    (tiny / "audit/.here").mkdir(parents=True)
    assert code_of("audit", tiny, "--output-dir", tiny / "audit") == 2
    shown = capsys.readouterr().err
    assert f"'{tiny}/audit/.here'; check the path" in " ".join(shown.split())


@linux
def test_two_runs_of_one_name_do_not_share_an_audit(tiny, capsys):
    command("audit", tiny)
    first = unpacked(tiny, tiny.parents[1] / "first")
    shutil.rmtree(tiny)
    a_run(tiny, seed=1)
    command("audit", tiny)
    second = unpacked(tiny, tiny.parents[1] / "second")
    command("audit", first)
    before = state_of(Path("tiny-audit"))
    capsys.readouterr()
    assert code_of("audit", second) == 2
    shown = capsys.readouterr()
    assert shown.err.count("error:") == 1
    assert "holds the audit of another run; name a directory with --output-dir" in shown.err
    assert state_of(Path("tiny-audit")) == before
    command("audit", second, "--output-dir", "another")
    assert is_whole(Path("another"))


@linux
def test_the_audit_of_a_run_that_cannot_be_written_is_outside_it(tiny):
    for path in [*tiny.rglob("*"), tiny]:
        path.chmod(path.stat().st_mode & 0o500)
    try:
        if os.geteuid() == 0:  # whom no mode stops: another user, in a process of its own
            os.chmod(tiny.parents[1], 0o777)
            for path in (tiny.parents[1], *tiny.parents[1].rglob("*")):
                os.chown(path, 12345, 12345)
            for parent in tiny.parents[2:5]:
                parent.chmod(parent.stat().st_mode | 0o011)
            code = as_user(12345, "audit", tiny)
        else:
            code = code_of("audit", tiny)
        assert code == 0
        assert is_whole(Path("tiny-audit"))
        assert not (tiny / "audit").exists()
    finally:
        tiny.chmod(0o700)


def as_user(number: int, *words: object) -> int:
    """The exit code of a command of another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgid(number)
            os.setuid(number)
            os._exit(code_of(*words))
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_ones_own_run_holds_its_audit_and_may_be_a_link(tiny):
    (tiny.parent / "link").symlink_to(tiny)
    command("audit", tiny.parent / "link")
    assert is_whole(tiny / "audit")
    (tiny.parent / "reports").mkdir(mode=0o700)
    (tiny.parent / "out").symlink_to(tiny.parent / "reports")
    command("audit", tiny, "--output-dir", tiny.parent / "out")
    assert is_whole(tiny.parent / "reports")


@linux
@pytest.mark.parametrize(("limit", "earlier"), [(200, False), (60_000, True), (119_000, False)])
def test_a_full_disk_ends_an_audit_with_one_message_and_no_audit(tiny, capsys, limit, earlier):
    """A limit on the size of files stands for the disk: the first file above it cannot be written."""
    import resource

    if earlier:
        command("audit", tiny)
    capsys.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        code = code_of("audit", tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    shown = capsys.readouterr()
    assert code == 2
    assert shown.err.count("error:") == 1
    assert str(tiny / "audit") in shown.err
    assert "report.html" not in shown.out
    check_no_audit(tiny / "audit", capsys)
    command("audit", tiny)
    assert is_whole(tiny / "audit")


def check_no_audit(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is there that a person or a command takes for an audit."""
    if folder.exists():
        assert not {"audit.json", "report.html", "audit.md"} & {
            path.name for path in folder.iterdir()
        }
        assert not list(folder.rglob("*.tmp"))
    assert run(["gate", str(folder), "--max", "delta=1"]) == 2
    assert run(["publish", "quantiles", str(folder), "--epsilon", "1"]) == 2
    assert capsys.readouterr().err.count("error:") == 2


FULL = """
set -e
mount -t tmpfs -o size={size}k tmpfs {folder}
set +e
{python} -m indpriv audit {run} --participation known --output-dir {folder}/audit
echo "code $?"
ls -a {folder}/audit
{python} -m indpriv gate {folder}/audit --max delta=1
echo "code $?"
"""


@linux
@pytest.mark.slow
@pytest.mark.parametrize("size", [4, 12, 24, 48, 400])
def test_a_full_file_system_ends_an_audit_with_one_message(tiny, size):
    full = Path("full").absolute()
    full.mkdir()
    script = FULL.format(size=size, folder=full, run=tiny, python=sys.executable)
    alone = ["unshare", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    done = subprocess.run([*alone, "sh", "-c", script], capture_output=True, text=True, check=False)
    if "code" not in done.stdout:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    assert done.stdout.count("code 2") == 2, done
    assert "audit.json" not in done.stdout.split("code 2")[1].split()
    assert done.stderr.count("error:") == 2
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr


@linux
def test_a_planted_repository_runs_nothing(tmp_path, monkeypatch):
    """What git would run: a monitor, hooks, filters, a pager, an editor, an alias."""
    from indpriv.recording.process import environment_of

    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'ran'}\n")
    program.chmod(0o755)
    work = tmp_path / "work"
    subprocess.run(["git", "init", "-q", work], check=True)
    (work / "a").write_text("1")
    (work / ".gitattributes").write_text("* filter=planted\n")
    mine = ["git", "-C", work, "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*mine, "add", "a"], check=True)
    subprocess.run([*mine, "commit", "-qm", "1"], check=True)
    keys = (
        "core.fsmonitor",
        "core.pager",
        "filter.planted.clean",
        "filter.planted.process",
        "core.sshCommand",
    )
    for key in keys:
        subprocess.run([*mine, "config", key, program], check=True)
    for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction"):
        shutil.copy(program, work / ".git/hooks" / hook)
    (work / "a").write_text("2")
    monkeypatch.chdir(work)
    assert len(environment_of(torch.device("cpu"))["code_commit"].split(",")[0]) == 40
    assert not (tmp_path / "ran").exists()
    subprocess.run(["git", "-C", work, "status"], check=False, capture_output=True)
    assert (tmp_path / "ran").exists()  # what was planted would have run


def test_signals_are_not_written_through_links(tmp_path):
    signals = signals_with_effect(1.0, 1, 8)
    new_folder(tmp_path / "s", signals.example_ids, signals.facts)
    (tmp_path / "precious").write_bytes(PRECIOUS)
    (tmp_path / "s/member.u8").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match="u8 is a link"):
        add_model(tmp_path / "s", {"confidence": np.zeros(8, "f4")}, np.zeros(8, bool))
    assert (tmp_path / "precious").read_bytes() == PRECIOUS
