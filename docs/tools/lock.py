"""Write constraints.txt again: packages, versions and hashes of their files, in three parts.

    make lock              # the versions that stand there, and what pyproject.toml needs besides
    make lock UV=--upgrade # the newest ones

The Makefile cuts the file before a part that it does not install. CUDA's libraries are left out:
only PyPI's build of torch needs them, and it names their exact versions. The builds for the CPU lie
in an index of their own. Their hashes are kept as long as torch's version stays; when it changes,
add them by hand, from https://download.pytorch.org/whl/cpu/torch/.
"""

import re
import subprocess
import sys
from pathlib import Path

CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"
HEAD = "# Versions that the tests ran with, and hashes of their files: `make lock` writes them."
PARTS = {
    "make demo": ("opacus", "release"),
    "make test": ("dev",),
    "integrations": ("dev", "integrations"),
}
CUDA = re.compile(r"(cuda|nvidia)-|triton$")


def entries(text: str) -> dict[str, str]:
    """Name of a package -> its lines."""
    blocks = [block for block in re.split(r"\n(?=\S)", text.strip()) if block[0] != "#"]
    return {re.split(r"[=\[ ]", block)[0]: block for block in blocks}


def version(block: str) -> str:
    """The version that the lines of a package name."""
    return block.split("==")[1].split()[0]


def hashes(block: str) -> set[str]:
    """The hashes in the lines of a package."""
    return set(re.findall(r"--hash=(\S+)", block))


def compiled(extras: tuple[str, ...], options: list[str]) -> dict[str, str]:
    """What indpriv and extras of it need, with hashes, on every system."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "pyproject.toml", "-", "--universal"]
    command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
    command += [f"--extra={extra}" for extra in extras]
    if "--upgrade" not in options:
        command += ["--constraint", str(CONSTRAINTS)]
    build = "hatchling\n"  # what pip builds indpriv with
    done = subprocess.run(
        command + options, cwd=CONSTRAINTS.parent, input=build, stdout=-1, text=True, check=True
    )
    return entries(done.stdout)


def main(options: list[str]) -> None:
    """Write it."""
    before = entries(CONSTRAINTS.read_text(encoding="utf-8"))
    lines, written = [HEAD], set()
    for title, extras in PARTS.items():
        lines.append(f"# {title}")
        for name, block in sorted(compiled(extras, options).items()):
            first = block.split("\n")[0].removesuffix("\\").strip()
            if first in written or CUDA.match(name):
                continue
            written.add(first)  # a package may stand twice, for Windows and for all
            kept = hashes(block)
            if name in before and version(before[name]) == version(block):
                kept |= hashes(before[name])
            elif name == "torch":
                print(f"torch {version(block)}: add the hashes of its builds for the CPU by hand")
            lines.append(" \\\n".join([first, *(f"    --hash={item}" for item in sorted(kept))]))
    CONSTRAINTS.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
