"""CPU seconds of 16 references, and of as many for the baseline, for a run of the how-to's script.

python benchmarks/references.py          6,000 rows of a CSV, half of them training examples
"""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd

PAGE = Path(__file__).parents[1] / "docs/how-to/own-references.md"
ROWS, FEATURES, MODELS = 6_000, 20, 16
LINES = (
    ("training and recording the run", "-W ignore train.py"),
    ("references", f"-m indpriv attack runs/own --references train.py:fit --models {MODELS}"),
    (
        "the baseline",
        f"-m indpriv attack runs/own --set baseline=train.py:fit_plain --models {MODELS}",
    ),
    ("audit", "-m indpriv audit runs/own"),
    ("study", "-m indpriv attack runs/own/references --set epsilon=runs/own/audit"),
)


def made_up(path: Path) -> None:
    """Write rows with a label that half of the features tell, and noise."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(ROWS, FEATURES))).add_prefix("x")
    told = frame.iloc[:, : FEATURES // 2].sum(axis=1)
    frame["income"] = (told + 2 * rng.normal(size=ROWS) > 0).astype(int)
    frame.to_csv(path, index=False)


def main() -> None:
    """Run the commands of the page, and print what each took and the last lines of the study."""
    found = re.search(r'^```python title="train.py"\n(.*?)^```$', PAGE.read_text(), re.M | re.S)
    if found is None:
        raise SystemExit(f"{PAGE} has no train.py")
    with tempfile.TemporaryDirectory() as folder:
        made_up(Path(folder) / "people.csv")
        (Path(folder) / "train.py").write_text(found[1])
        env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "140"}
        before, out = 0.0, ""
        for title, line in LINES:
            command = [sys.executable, *line.split()]
            out = subprocess.run(
                command, cwd=folder, env=env, check=True, capture_output=True
            ).stdout.decode()
            used = resource.getrusage(resource.RUSAGE_CHILDREN)
            print(f"{title:32s} {used.ru_utime + used.ru_stime - before:6.1f} CPU s", flush=True)
            before = used.ru_utime + used.ru_stime
            if "-v" in sys.argv:
                print(out)


if __name__ == "__main__":
    main()
