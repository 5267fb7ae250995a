"""What README.md shows of the demo, from a finished demo: `make figures`. Adult is public, so its figures may be.

python -m reports.demo DEMO_DIR

Writes adult.txt (the first screen) and adult.svg (the histogram) beside this file, and the screen into README.md.
"""

import argparse
import re
from pathlib import Path

from rich.console import Console

from indpriv.audit import audit
from indpriv.report.figures import epsilon_histogram
from indpriv.report.report import print_audit

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STYLE = ROOT / "indpriv/report/templates/style.css"
README = ROOT / "README.md"


def main(demo_dir: Path) -> None:
    """Audit the demo's run once more and write the three."""
    summary = audit(demo_dir / "run", demo_dir)
    screen = HERE / "adult.txt"
    with screen.open("w", encoding="utf-8") as file:
        print_audit(summary, Console(file=file, width=80), report=f"{demo_dir}/report.html")
    text = re.sub(r" +$", "", screen.read_text(encoding="utf-8"), flags=re.MULTILINE)
    screen.write_text(text, encoding="utf-8")
    picture = epsilon_histogram(summary.individual, summary.guarantee.worst_case_epsilon)
    picture = re.sub(r'viewBox="0 0 (\S+) (\S+)"', _with_margin, picture, count=1)
    (HERE / "adult.svg").write_text(
        picture.replace("><title", f"><style>{_colours()}</style><title", 1), encoding="utf-8"
    )
    shown = re.compile(r"(<!-- first screen.*?-->\n```text\n).*?(```\n<!-- end)", re.DOTALL)
    README.write_text(
        shown.sub(lambda match: match[1] + text + match[2], README.read_text(encoding="utf-8")),
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
    parser = argparse.ArgumentParser(prog="python -m reports.demo", description=__doc__)
    parser.add_argument("demo_dir", type=Path, help="folder of a finished demo")
    main(parser.parse_args().demo_dir)
