"""A process that forks others, each of which writes files until it is stopped at a random moment.

python killed.py KIND FOLDER TIMES: FOLDER/base holds what all begin with, FOLDER/000 and so on what each left. In
FOLDER/000/told stands what it was told to be kept, a line each; in FOLDER/000/said what it printed.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plain_opacus
from audits.__main__ import app as experiments
from audits.options import PROGRAM
from indpriv.audit import audit
from indpriv.cli import main
from indpriv.recording import AuditSpec, Recorder, StepOptions, replay
from indpriv.release import Request, release
from runs import PER_EXAMPLE, blobs, make_run, mlp, record

Tell = Callable[[str], None]
STEPS, RESUMED_AT = 40, 10  # four epochs
TOLD = {"max_grad_norm": 1.0, "sampler": "poisson", "delta": 1e-5}
SPEC = AuditSpec(model=mlp, dataset=blobs(), loss_fn=PER_EXAMPLE, test_set=blobs())
TRAINED = """
name = "tiny"
data = {dataset = "digits"}
model = {architecture = "mlp", hidden = [4]}
recording = {every = 1}
checkpoints = {every = "epoch"}
[training]
epochs = 40
batch_size = 256
learning_rate = 0.5
max_grad_norm = 1.0
noise_multiplier = 1.0
delta = 1e-5
"""


def trained(run_dir: Path, tell: Tell, epochs: int, **options: Any) -> None:
    """A run whose log holds, each time that this is told, the steps that were told."""
    run = make_run()
    options |= {"dataset": run.dataset, "loss_fn": PER_EXAMPLE, "every": 2, "batch_norms": True}
    recorder = Recorder(run_dir, **options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _ in range(epochs):
            for batch in run.loader:
                run.step(*batch)
                tell(str(recorder.state_dict()["step"]))
    tell("closed")


def nothing(folder: Path) -> None:
    """Begin with nothing."""


def half_a_run(folder: Path) -> None:
    run = make_run()
    recorder = Recorder(
        folder / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=2, batch_norms=True
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(RESUMED_AT * 12 // 120)
        recorder.state_dict()
        os._exit(0)  # as by kill -9


def a_run(folder: Path) -> None:
    record(make_run(), folder / "run", epochs=2)


def an_audit(folder: Path) -> None:
    a_run(folder)
    audit(folder / "run", folder / "audit", delta=1e-5)


def checkpoints(folder: Path) -> None:
    plain_opacus.train(mlp(), blobs(), folder / "saved", epochs=4, batch_size=12, save_every=2)
    (folder / "my_spec.py").write_text("from killed import SPEC as spec\n", encoding="utf-8")


def an_audit_file(folder: Path) -> None:
    (folder / "tiny.toml").write_text(TRAINED, encoding="utf-8")


def audited(folder: Path, tell: Tell) -> None:
    audit(folder / "run", folder / "audit", delta=1e-5)
    tell("audited")


def released(folder: Path, tell: Tell) -> None:
    for tenth in range(1, 10):
        content = release(folder / "audit", Request((tenth / 10,), epsilon=0.1)).content
        tell(json.dumps([tenth / 10, content["quantiles"][f"{tenth / 10:g}"]]))


def replayed(folder: Path, tell: Tell) -> None:
    replay(folder / "saved", SPEC, folder / "replay", options=StepOptions(**TOLD))
    tell("replayed")


def command(line: str, *program: Any) -> Callable[[Path, Tell], None]:
    def work(folder: Path, _: Tell) -> None:
        os.chdir(folder)
        sys.argv = ["indpriv", *line.split()]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        main(*program)

    return work


REPLAY = (
    "audit saved --spec my_spec.py:spec --set max_grad_norm=1 --set sampler=poisson --delta 1e-5"
)
KINDS: dict[str, tuple[Callable[[Path], None], Callable[[Path, Tell], None], int]] = {
    "record": (nothing, lambda folder, tell: trained(folder / "run", tell, 4), signal.SIGKILL),
    "resume": (
        half_a_run,
        lambda folder, tell: trained(folder / "run", tell, 3, resume_at=RESUMED_AT),
        signal.SIGKILL,
    ),
    "audit": (a_run, audited, signal.SIGKILL),
    "release": (an_audit, released, signal.SIGKILL),
    "replay": (checkpoints, replayed, signal.SIGKILL),
    "ctrl-c train": (
        an_audit_file,
        command("train tiny.toml --run-dir run", experiments, PROGRAM),
        signal.SIGINT,
    ),
    "ctrl-c audit": (a_run, command("audit run --delta 1e-5 --output-dir audit"), signal.SIGINT),
    "ctrl-c replay": (
        checkpoints,
        command(f"{REPLAY} --output-dir audit"),
        signal.SIGINT,
    ),
}


def forked(folder: Path, work: Callable[[Path], None], number: int, after: float | None) -> float:
    """Do it in a session of its own, and send that a signal after so many seconds; how long it lived."""
    began = time.monotonic()
    process = os.fork()
    if not process:
        os.setsid()
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(said, stream)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # until the command begins
        code = 1
        try:
            work(folder)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        finally:
            if code == 1:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if after is not None:
        time.sleep(after)
        if os.waitpid(process, os.WNOHANG) == (0, 0):
            os.killpg(process, number)
        else:
            return time.monotonic() - began
    _, status = os.waitpid(process, 0)
    lived = time.monotonic() - began
    left = sessions().get(process, [])
    for _ in range(100 if number == signal.SIGINT else 0):
        if not left:
            break
        time.sleep(0.1)  # they were told to end, and take a moment
        left = sessions().get(process, [])
    (folder / "end").write_text(json.dumps({"status": status, "left": left}), encoding="utf-8")
    for child in left:
        os.kill(child, signal.SIGKILL)
    return lived


def sessions() -> dict[int, list[int]]:
    """Session -> the processes that are in it and live."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] not in "ZX":
            found.setdefault(int(fields[3]), []).append(int(path.parent.name))
    return found


def start(kind: str, folder: Path, times: int) -> None:
    warnings.simplefilter("ignore")
    prepare, work, number = KINDS[kind]

    def told(at: Path) -> None:
        descriptor = os.open(at / "told", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        work(at, lambda text: os.write(descriptor, f"{text}\n".encode()) and None)

    (folder / "base").mkdir(mode=0o700)
    forked(folder / "base", prepare, number, None)
    lives = 0.0
    for index in (-1, *range(times)):  # the first is left alone, and says how long it takes
        at = folder / ("whole" if index < 0 else f"{index:03d}")
        shutil.copytree(folder / "base", at)
        after = None if index < 0 else random.Random(index).triangular(0, 1.1 * lives, 0.8 * lives)
        lived = forked(at, told, number, after)
        lives = lived if index < 0 else lives


if __name__ == "__main__":
    start(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
