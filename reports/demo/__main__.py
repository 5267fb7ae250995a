"""What README.md and the first tutorial show of the demo, from the run of reports/adult, which has its settings: `make figures`.

python -m reports.demo

Writes adult.txt (the first screen) and adult.svg (the histogram) beside this file, and the screen into both pages. Adult is public,
so its figures may be shown.
"""

import argparse
import re
import tempfile
from pathlib import Path

from rich.console import Console

from indpriv.audit import audit
from indpriv.report.figures import epsilon_histogram
from indpriv.report.report import print_audit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STYLE = ROOT / "indpriv/report/templates/style.css"
RUN = ROOT / "reports/runs/adult"  # by python -m reports.yu2023 adult
SHOWN_AS = "reports/adult-demo/report.html"  # where the demo writes its report
PAGES = {  # and what stands before and after the screen there
    ROOT / "README.md": r"(<!-- first screen.*?-->\n```text\n).*?(```\n<!-- end)",
    ROOT
    / "docs/tutorials/first_audit.md": r"(<!-- source: reports/demo/adult.txt -->\n```text[^\n]*\n).*?(```\n)",
}


def main() -> None:
    """Audit the run once more and write all of it."""
    with tempfile.TemporaryDirectory() as folder:
        summary = audit(RUN, Path(folder) / "audit")
    screen = HERE / "adult.txt"
    with screen.open("w", encoding="utf-8") as file:
        print_audit(summary, Console(file=file, width=80), report=SHOWN_AS)
    text = re.sub(r" +$", "", screen.read_text(encoding="utf-8"), flags=re.MULTILINE)
    screen.write_text(text, encoding="utf-8")
    picture = epsilon_histogram(summary.individual, summary.guarantee.worst_case_epsilon)
    picture = re.sub(r'viewBox="0 0 (\S+) (\S+)"', _with_margin, picture, count=1)
    (HERE / "adult.svg").write_text(
        picture.replace("><title", f"><style>{_colours()}</style><title", 1), encoding="utf-8"
    )
    for page, around in PAGES.items():
        shown = re.compile(around, re.DOTALL)
        page.write_text(
            shown.sub(lambda match: match[1] + text + match[2], page.read_text(encoding="utf-8")),
            encoding="utf-8",
        )


def _with_margin(view: re.Match[str]) -> str:
    """Room for labels that another font makes longer; on the report's page they may stand out."""
    return f'viewBox="-16 -8 {float(view[1]) + 24:g} {float(view[2]) + 16:g}"'


def _colours() -> str:
    """The report's colours, light and dark, for a figure that stands alone."""
    light, dark = (
        " ".join(re.findall(r"--\w+: #\w+;", block))
        for block in STYLE.read_text(encoding="utf-8").split("@media", 2)[:2]
    )
    return (
        f":root {{ {light} }} @media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }} "
        "svg { background: var(--paper); font-family: system-ui, sans-serif }"
    )


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m reports.demo", description=__doc__).parse_args()
    main()
