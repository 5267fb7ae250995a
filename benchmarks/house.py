"""The size of the house beside its targets: lines, folders, longest file, class and function.

    python benchmarks/house.py

Everything is measured from the source; "before" is what this script printed before the redesign,
when lines were formatted at 120 columns. The same source formatted at 100 columns had 33,169 lines.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "indpriv"
WIDE = 100

# Accounts a rounded log by RDP and prints what runs in the package: files, and classes with a method.
DEFAULT_PATH = """
import inspect, sys, threading
import numpy as np
import indpriv
account = indpriv.account  # whose import runs code of the package, too
log = indpriv.NormLog.from_arrays(
    np.full((2, 3), 0.5), [0, 5], total_steps=10, noise_multiplier=1.0, max_grad_norm=1.0,
    sample_rate=0.1,
)
ran = set()
def watch(frame, event, _):
    code = frame.f_code
    is_function = bool(code.co_flags & inspect.CO_OPTIMIZED)  # not the body of a module or class
    if event == "call" and is_function and "/indpriv/" in code.co_filename:
        ran.add((code.co_filename.split("/indpriv/")[-1], code.co_qualname))
threading.setprofile(watch)
sys.setprofile(watch)
account(log, delta=1e-5)
sys.setprofile(None)
for file, name in sorted(ran):
    print(file, name)
"""


@dataclass(frozen=True)
class Measure:
    """One line of the table: what is measured, the figure, where it was found, before, target."""

    name: str
    value: int
    where: str
    before: str
    target: int | None


def sources() -> dict[Path, str]:
    """Every module of the package and its text."""
    return {
        path.relative_to(PACKAGE): path.read_text(encoding="utf-8")
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def definitions(
    texts: dict[Path, str], kinds: type | tuple[type, ...]
) -> Iterator[tuple[int, str]]:
    """(number of lines, where) of every class or function."""
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, kinds):
                yield node.end_lineno - node.lineno + 1, f"{path}: {node.name}"


def default_path() -> tuple[set[str], set[str]]:
    """Files of the package that run in `account` with default arguments, and their classes."""
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DEFAULT_PATH],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    calls = [line.split(" ", 1) for line in found.stdout.splitlines()]
    names = {name.split(".")[0] for _, name in calls if "." in name and "<locals>" not in name}
    return {file for file, _ in calls}, names


def measures() -> list[Measure]:
    """The table of targets."""
    texts = sources()
    lines = {path: text.count("\n") for path, text in texts.items()}
    folders = Counter(path.parent for path in texts if path.name != "__init__.py")
    folder, n_files = folders.most_common(1)[0]
    longest = max(lines, key=lambda path: lines[path])
    class_lines, class_where = max(definitions(texts, ast.ClassDef))
    function_lines, function_where = max(
        definitions(texts, (ast.FunctionDef, ast.AsyncFunctionDef))
    )
    wide = Counter(
        {path: sum(len(line) > WIDE for line in text.splitlines()) for path, text in texts.items()}
    )
    widest, _ = wide.most_common(1)[0]
    files, classes = default_path()
    return [
        Measure("lines of Python", sum(lines.values()), f"{len(texts)} modules", "29,414", 24_000),
        Measure("files in the largest folder", n_files, str(folder), "31", 17),
        Measure("lines of the longest file", lines[longest], str(longest), "488", 350),
        Measure("lines of the longest class", class_lines, class_where, "365", 200),
        Measure("lines of the longest function", function_lines, function_where, "112", 60),
        Measure(f"lines over {WIDE} characters", wide.total(), str(widest), "3,111", 0),
        Measure(
            "files that run in a default account", len(files), ", ".join(sorted(files)), "21", None
        ),
        Measure(
            "classes that run in a default account",
            len(classes),
            ", ".join(sorted(classes)),
            "22",
            14,
        ),
    ]


def main() -> None:
    """Print the table."""
    print(f"{'':46} {'now':>7} {'before':>15} {'target':>7}")
    for row in measures():
        missed = "" if row.target is None or row.value <= row.target else "  missed"
        target = "" if row.target is None else f"{row.target:,}"
        print(f"{row.name:46} {row.value:>7,} {row.before:>15} {target:>7}{missed}  {row.where}")


if __name__ == "__main__":
    main()
