"""MkDocs hook: pages generated from the code, and files that lie outside docs/.

Reference pages hold lines such as `<!-- generated: commands -->`, which are replaced here at build
time. Links to files outside docs/, as GitHub needs them, lead to copies in the site.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT)]

from reference import GENERATED  # noqa: E402

_OUTSIDE = (
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "audits/README.md",
    "audits/docs/*.md",
    "benchmarks/README.md",
    "reports/README.md",
    "reports/*/README.md",
    "reports/*/audit.md",
    "reports/*/*.json",
    "reports/*/*.svg",
    "indpriv/report/audit.schema.json",
    "indpriv/_facts/refusals.toml",
    "indpriv/recording/norms/hindrances.toml",
)
_TERM = re.compile(r"^\*\*([^*]+?)\.?\*\*(?: \([^)]*\)\.)? ((?:[^.]|\.(?! |\n))+\.)", re.MULTILINE)
_EVERYDAY = {"Account", "DP-SGD", "Epsilon", "Exact", "Level", "Record", "Supported", "Unit"}
_PLACEHOLDER = re.compile(r"^<!-- generated: (\S+) -->$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add what lies outside docs/."""
    for pattern in _OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            content = path.read_bytes()
            files.append(File.generated(config, name, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in generated parts and tooltips; lead links to files outside docs/ to their copies."""
    markdown = _PLACEHOLDER.sub(lambda match: GENERATED[match[1]](), markdown)
    up = "../" * page.file.src_uri.count("/")
    markdown = markdown.replace(f"]({up}docs/", f"]({up}").replace(f"]({up}../", f"]({up}")
    return markdown + ("" if page.file.src_uri == "reference/glossary.md" else tooltips())


def tooltips() -> str:
    """The terms of the glossary that readers may not know, each with its first sentence."""
    glossary = (ROOT / "docs/reference/glossary.md").read_text(encoding="utf-8")
    lines = [""]
    for term, meaning in _TERM.findall(glossary):
        if term not in _EVERYDAY:
            said = re.sub(r"[*`]", "", " ".join(meaning.split()))
            names = dict.fromkeys((term, term if term.isupper() else term[0].lower() + term[1:]))
            lines += [f"*[{name}]: {said}" for name in names]
    return "\n".join(lines) + "\n"
