"""Run the code of README.md and of the pages in docs/ as a reader would, each page in one folder.

    python docs/tools/pages.py PAGE FOLDER            run it
    python docs/tools/pages.py PAGE FOLDER --update   run it, and write what it prints into it

The blocks of a page run in order. Blocks of Python share their names, as the cells of a notebook
do; a block with a title that is a file name is written to that file instead. A block titled
"Output" is what the block before it prints, exactly; "Output of one run" is compared word by word
with every number masked, since training is random. `<!-- not run: why -->` above a block leaves it
out. `<!-- first: NAME -->` runs docs/tools/first/NAME.py, which readers do not see; `<!-- first
python` or `bash` opens a few such lines on the page. `<!-- source: FILE -->` above a block
says that it is that file of the checkout, `FILE:NAME` a function in it, which --update writes into
the page; it is not run, and an output is compared all the same. From `<!-- needs: MODULES -->` on,
a page runs only where these are installed. Lines between `---` above the title say what a whole
page needs: `given: digits` (a run and its audit), `needs: MODULES`, `test: slow, why`, and
`supported: RUNS`, those that must have every line of evidence that a Recorder can verify.
`python -m audits` runs the experiments of this checkout.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from indpriv._facts import REFUTED
from indpriv.norm_log.evidence import lines_of, unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

EXACT, ALIKE = "Output", "Output of one run"
_BLOCK = re.compile(
    r"^(?:<!-- (?P<skip>not run): (?P<why>.+?) -->\n)?"
    r"(?:<!-- source: (?P<source>\S+) -->\n)?"
    r'(?:```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<code>.*?)^```$'
    r"|<!-- first (?P<hidden>python|bash)\n(?P<before>.*?)^-->$"
    r"|<!-- first: (?P<unseen>\w+) -->$)",
    re.MULTILINE | re.DOTALL,
)
_LEFT_OUT = re.compile(r"^(make|git clone|pip install|cd indpriv)\b")  # checked by other tests
_NEEDS = re.compile(r"^<!-- needs: (.+?) -->$", re.MULTILINE)
_WORD = re.compile(r"\w+…|(?P<number>\d(?:[\d.,]*\d)?(?:e-?\d+)?)|[^\W\d_]+")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page.

    Attributes:
        language: python, bash, text, toml, ...
        title: a file name, EXACT, ALIKE or "".
        code: what stands between the fences.
        not_run: why the block is not run; "" if it is.
        shown: whether readers see it.
        source: the file of the checkout, or function in it, that it is; "" if it is its own.
        span: where `code` stands in the page.
    """

    language: str
    title: str
    code: str
    not_run: str
    shown: bool
    source: str
    span: tuple[int, int]

    @property
    def is_file(self) -> bool:
        """Whether the block is the content of a file."""
        return "." in self.title

    @property
    def is_output(self) -> bool:
        """Whether the block is what the block before it prints."""
        return self.title in (EXACT, ALIKE)


ROOT = Path(__file__).parents[2]
FIRST = Path(__file__).parent / "first"
GIVEN_DIGITS = """
python -m audits train audits/digits.toml --run-dir runs/digits
indpriv audit runs/digits --output-dir reports/digits
"""


def facts_of(page: Path) -> dict[str, str]:
    """The lines above the title of a page."""
    head = re.match(r"---\n(.*?)\n---\n", page.read_text(encoding="utf-8"), re.DOTALL)
    lines = head[1].splitlines() if head else []
    return dict(line.split(": ", 1) for line in lines)


def make_digits(folder: Path) -> None:
    """Make the folder that a page with `given: digits` starts from."""
    shutil.copytree(ROOT / "audits", folder / "audits")
    subprocess.run(
        ["bash", "-euc", GIVEN_DIGITS],
        cwd=folder,
        env=_environment(),
        check=True,
        stdout=subprocess.DEVNULL,
    )


def blocks(text: str) -> list[Block]:
    """The blocks of a page, in order."""
    found = []
    for match in _BLOCK.finditer(text):
        shown = match["hidden"] is None and match["unseen"] is None
        code = match["code"] if shown else match["before"]
        if match["unseen"]:
            code = (FIRST / f"{match['unseen']}.py").read_text(encoding="utf-8")
        found.append(
            Block(
                language=match["language"] if shown else match["hidden"] or "python",
                title=match["title"] or "",
                code=code,
                not_run=match["why"] or "",
                shown=shown,
                source=match["source"] or "",
                span=match.span("code" if shown else "before" if match["hidden"] else "unseen"),
            )
        )
    return found


def run(page: Path, folder: Path, *, update: bool = False) -> None:
    """Run the blocks of a page in a folder.

    Raises:
        RuntimeError: a block fails, or prints something else than the page says.
    """
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed, changes = "", []
    end = end_of(text)
    for block in blocks(text):
        if block.span[0] > end:
            break
        if block.source and not is_its_source(block):
            if not update:
                raise RuntimeError(f"{page.name}: a block is not {block.source} any more")
            changes.append((block.span, source_of(block)))
        if block.not_run or (block.source and not block.is_output):
            continue
        if block.is_output:
            if not update:
                _compare(block, printed, page)
            elif not block.source:
                changes.append((block.span, printed))
        elif block.is_file:
            target = folder / block.title
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            printed = _python(block, names, page)
        elif block.language == "bash":
            printed = _bash(block, folder, page)
    for name in facts_of(page).get("supported", "").split():
        check_supported(folder / name)
    for (start, end), output in reversed(changes):
        text = text[:start] + output + text[end:]
    if changes:
        page.write_text(text, encoding="utf-8")


def end_of(text: str) -> int:
    """Where a page ends for a reader who lacks modules that its rest needs."""
    for marker in _NEEDS.finditer(text):
        if any(importlib.util.find_spec(module) is None for module in marker[1].split()):
            return marker.start()
    return len(text)


def source_of(block: Block) -> str:
    """The text of the file, or of the function in it, that a block is."""
    file, _, name = block.source.partition(":")
    text = (ROOT / file).read_text(encoding="utf-8")
    for node in ast.parse(text).body if name else ():
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return "".join(text.splitlines(keepends=True)[node.lineno - 1 : node.end_lineno])
    return text


def is_its_source(block: Block) -> bool:
    """Whether a block is the file that it says it is."""
    return block.code == source_of(block)


def check_supported(run_dir: Path) -> None:
    """Check that the guarantee of a run is supported.

    Raises:
        RuntimeError: a line of evidence is not verified, or the source of the noise is refuted.
    """
    opened = open_run(run_dir)
    lines = lines_of(verify(opened), {})
    amiss = unverified(lines) + [line for line in lines if line.status == REFUTED]
    if amiss:
        told = "\n".join(f"{line.key}: {line.status}: {line.detail}" for line in amiss)
        raise RuntimeError(f"{run_dir}: its guarantee is not supported\n{told}")


def _python(block: Block, names: dict[str, Any], page: Path) -> str:
    printed = io.StringIO()
    line = page.read_text(encoding="utf-8")[: block.span[0]].count("\n")
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * line + block.code, str(page), "exec"), names)
    except Exception as error:
        raise RuntimeError(f"{page.name}:\n{traceback.format_exc()}") from error
    return _plain(printed.getvalue())


def _bash(block: Block, folder: Path, page: Path) -> str:
    lines = [line for line in block.code.splitlines() if not _LEFT_OUT.match(line)]
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", "\n".join(lines)],
        cwd=folder,
        env=_environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(
            f"{page.name}: exit code {done.returncode}\n{block.code}{done.stdout}{done.stderr}"
        )
    return _plain(done.stdout)


def _environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    clone = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": clone,
        "COLUMNS": "80",
        "PYTHONWARNINGS": "ignore",
    }


def _plain(printed: str) -> str:
    return re.sub(r"[ \t]+$", "", printed, flags=re.MULTILINE).strip("\n") + "\n"


def masked(output: str) -> list[str]:
    """The words of an output, with a # for each number; a word that was cut off is none."""
    found = _WORD.finditer(output)
    return ["#" if word["number"] else word[0] for word in found if word[0][-1] != "…"]


def _compare(block: Block, printed: str, page: Path) -> None:
    seen = str if block.title == EXACT else masked
    if seen(block.code) != seen(printed):
        raise RuntimeError(
            f"{page.name}: the page shows\n{block.code}\nbut this is printed:\n{printed}\n"
            "`python docs/tools/pages.py PAGE FOLDER --update` writes it into the page"
        )


def main() -> None:
    """Run one page, in its folder as the working directory."""
    parser = argparse.ArgumentParser()
    parser.add_argument("page", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    page, folder = arguments.page.resolve(), arguments.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        run(page, folder, update=arguments.update)
    except RuntimeError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
