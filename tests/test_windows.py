"""The audit side asks for nothing that only POSIX systems have."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import indpriv

MODULES = sorted(Path(indpriv.__file__).parent.rglob("*.py"))
POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
MISSING = {
    "os": {
        *("fork", "forkpty", "getgid", "getpgid", "geteuid", "getuid", "kill", "killpg", "mkfifo"),
        *("nice", "sched_getaffinity", "setsid", "statvfs", "sysconf", "uname", "wait3", "O_SYNC"),
    },
    "signal": {"SIGALRM", "SIGHUP", "SIGKILL", "SIGQUIT", "SIGUSR1", "SIGUSR2", "alarm"},
}  # os.kill exists on Windows, where it ends the process whatever the signal


def asked_for(path):
    """Names of modules, and of members of os and signal, that a file uses without asking first."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {
        (node.args[0].id, node.args[1].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "hasattr"
        and isinstance(node.args[0], ast.Name)
        and isinstance(node.args[1], ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and (node.value.id, node.attr) not in names
        ):
            yield f"{node.value.id}.{node.attr}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_file_needs_posix(path):
    forbidden = POSIX | {f"{module}.{name}" for module, names in MISSING.items() for name in names}
    assert not forbidden & set(asked_for(path))


def test_the_rule_sees_what_it_forbids(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "import fcntl\nfrom os import fork\nos.uname()\nhasattr(os, 'nice') and os.nice(1)\n"
    )
    assert set(asked_for(path)) == {"fcntl", "os", "os.fork", "os.uname"}


WITHOUT_POSIX = """
import os, signal, sys
import numpy as np
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name in {posix!r} - {{"posix"}}:
            raise ImportError(name + " is blocked")
sys.meta_path.insert(0, Blocked())
for name in {posix!r} - {{"posix"}}:
    sys.modules.pop(name, None)
for module, names in {missing!r}.items():
    for name in names:
        if hasattr(sys.modules[module], name):
            delattr(sys.modules[module], name)
from pathlib import Path
from indpriv.cli import run
np.savez("norms.npz", norms=np.full((2, 30), 0.5), recorded_steps=[0, 5])
Path("run.json").write_text('{{"steps": 9, "noise_multiplier": 1.0, "max_grad_norm": 1.0, '
    '"sample_rate": 0.5, "sampler": "poisson", "unit": "example", "neighbouring": "add_remove"}}')
for words in ("--help", "import norms.npz --run run.json --output-dir run", "check run --set only=log",
              "audit run --delta 1e-5", "gate run/audit --max delta=1e-5", "publish card run/audit"):
    declared = words.startswith("check")  # no recorder saw the training
    assert run(words.split()) == (3 if declared else 0), words
"""


def test_an_audit_without_what_only_posix_has(tmp_path):
    code = WITHOUT_POSIX.format(posix=POSIX, missing=MISSING)
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
