"""CPU seconds to start: `import indpriv` and `indpriv --help`, beside `import numpy, pandas`.

    python benchmarks/startup.py

Each command runs in a fresh process, several times in turn; the table shows medians and their ratio
to the import of numpy and pandas, which changes less between machines than seconds do.
"""

from __future__ import annotations

import os
import statistics
import sys

REPEATS = 7
REFERENCE = "import numpy, pandas"
COMMANDS = {
    "python": "pass",
    REFERENCE: "import numpy, pandas",
    "import indpriv": "import indpriv",
    "from indpriv import account": "from indpriv import account",
    "indpriv --help": "import sys; sys.argv = ['indpriv', '--help']; "
    "from indpriv.cli import main; main()",
    "indpriv audit --help": "import sys; sys.argv = ['indpriv', 'audit', '--help']; "
    "from indpriv.cli import main; main()",
}


def cpu_seconds(code: str) -> float:
    """CPU seconds, user and system, that a fresh interpreter spends on `code`."""
    silenced = [(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)]
    process = os.posix_spawn(
        sys.executable, [sys.executable, "-c", code], os.environ, file_actions=silenced
    )
    _, status, usage = os.wait4(process, 0)
    if status != 0:
        raise SystemExit(f"{code!r} failed with status {status}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Measure every command and print the table."""
    found: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(REPEATS):
        for name, code in COMMANDS.items():
            found[name].append(cpu_seconds(code))
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    print(f"{'':30} {'CPU seconds':>11} {'ratio':>6}")
    for name, seconds in medians.items():
        print(f"{name:30} {seconds:11.2f} {seconds / medians[REFERENCE]:6.2f}")


if __name__ == "__main__":
    main()
