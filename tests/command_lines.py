"""Both command lines: `indpriv` and, where the first word is "audits", `python -m audits`."""

import sys
from pathlib import Path

from audits.__main__ import app as experiments
from audits.options import PROGRAM
from indpriv.cli import app
from indpriv.cli import run as run_command

INDPRIV = Path(sys.executable).with_name("indpriv")


def run(words):
    """The exit code of a command within this process."""
    words = [str(word) for word in words]
    if words[:1] == ["audits"]:
        return run_command(words[1:], experiments, PROGRAM)
    return run_command(words, app)


def words_of(*words):
    """The arguments of a process of its own."""
    words = [str(word) for word in words]
    if words[:1] == ["audits"]:
        return [sys.executable, "-m", *words]
    return [str(INDPRIV), *words]
