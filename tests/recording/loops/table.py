"""Print what each loop gets, as Markdown: python tests/recording/loops/table.py [words of names]."""

import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[3]), str(Path(__file__).parents[2])]

from recording.loops.harness import LINES, LOOPS, Judged, run  # noqa: E402
from recording.loops.test_loops import TOPICS, check  # noqa: E402


def words_of(got: Judged | Exception) -> list[str]:
    if isinstance(got, Exception):
        message = " ".join(str(got).split()).replace("|", "/")
        return [f"{type(got).__name__}: {message[:160]}", "", *[""] * len(LINES)]
    return [got.status, got.claim, *(got.words.get(key, "") for key in LINES)]


def main() -> None:
    torch.set_num_threads(1)
    assert TOPICS
    head = ["topic", "loop", "must be", "mode", "status", "claim", *LINES, "as it must", "CPU s"]
    print("|", " | ".join(head), "|\n|", " | ".join("---" for _ in head), "|")  # noqa: T201
    for loop in LOOPS.values():
        for mode in (
            loop.modes if not sys.argv[1:] or any(a in loop.name for a in sys.argv[1:]) else ()
        ):
            start = time.process_time()
            with tempfile.TemporaryDirectory() as folder:
                got = run(loop, mode, Path(folder) / "run")
            try:
                check(loop, got)
                right = "yes"
            except Exception:  # noqa: BLE001
                right = "NO"
            seconds = f"{time.process_time() - start:.2f}"
            must = loop.expect + (f": {', '.join(loop.lines)}" if loop.lines else "")
            cells = [loop.topic, loop.name, must, mode, *words_of(got), right, seconds]
            print("|", " | ".join(cells), "|", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
