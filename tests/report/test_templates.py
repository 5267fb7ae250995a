"""Every line of every template of an audit is rendered, for a page, Markdown and a terminal."""

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from indpriv.analysis.summary import findings
from indpriv.report.formats import TEMPLATES
from indpriv.report.page import environment
from indpriv.report.report import audit_page, print_audit

pytestmark = pytest.mark.slow  # tracing takes a minute

SECTIONS = [one.name for one in findings() if (TEMPLATES / f"{one.name}.md.j2").is_file()]
OURS = [
    f"{one}.md.j2"
    for one in (
        *SECTIONS,
        "columns",
        "fitted_models",
        "since",
        "readings",
        "report",
        "screen",
        "verbose",
    )
]

FIGURES = ("plain", "groups", "moved", "estimate", "read", "bare", "rounds")  # have what is folded


def printed(audit, *, width=80, **options):
    buffer = io.StringIO()
    print_audit(audit, Console(file=buffer, width=width), **options)
    return buffer.getvalue()


@pytest.fixture(scope="module")
def met(audits):
    """Lines of compiled templates that were run, by the name of the template."""
    lines = {}

    def trace(frame, event, _):
        name = frame.f_code.co_filename
        if not name.endswith(".j2"):
            return None
        if event == "line":
            lines.setdefault(Path(name).name, set()).add(frame.f_lineno)
        return trace

    environment.cache_clear()  # a template that is imported runs once, maybe in a test before these
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        for name, audit in audits.items():
            since = audits["declared"] if name in ("plain", "void") else None
            texts = [audit_page(audit, since).markdown(), printed(audit, report="r/report.html")]
            texts.append(printed(audit, verbose=True))
            if name in FIGURES:
                texts.append(audit_page(audit, since=since).html(reconstructed={"row": "data:,"}))
            assert all("{{" not in text and "{%" not in text for text in texts), name
    finally:
        sys.settrace(before)
    return lines


@pytest.mark.parametrize("name", OURS)
def test_every_branch_is_rendered(met, name):
    templates = environment()
    template = templates.get_template(name)
    written = templates.compile((TEMPLATES / name).read_text(encoding="utf-8"), raw=True)
    # Each piece of output is a line of the compiled template, inside a macro too.
    output = re.compile(r"\s*(yield (?!None)|t_\d+\()")
    lines = {k for k, line in enumerate(written.split("\n"), 1) if output.match(line)}
    missed = {template.get_corresponding_lineno(line) for line in lines - met.get(name, set())}
    assert not missed, "give an audit of conftest.py what renders these lines"
