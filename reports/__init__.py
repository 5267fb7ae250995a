"""Pages and audits of this repository; README.md lists them, and what makes each."""

from pathlib import Path

REPORTS = Path(__file__).resolve().parent
