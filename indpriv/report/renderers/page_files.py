"""A page as files, readable by their owner only. Sensitive."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from indpriv._files import write_atomically, write_json
from indpriv._folders import make_folder
from indpriv.report.document import Page
from indpriv.report.renderers.html import render_page
from indpriv.report.renderers.markdown import render_sections


def write_page(page: Page, content: Mapping[str, Any], output_dir: Path, name: str) -> None:
    """Write NAME.html and NAME.md, and then NAME.json with the content.

    Args:
        page: what the first two show.
        content: JSON values.
        output_dir: is made if it does not exist.
        name: of the files.
    """
    make_folder(output_dir)
    texts = {
        "html": render_page(page, account=None),
        "md": render_sections(page.title, page.sections),
    }
    for suffix, text in texts.items():
        write_atomically(output_dir / f"{name}.{suffix}", text.encode("utf-8", "replace"))
    write_json(output_dir / f"{name}.json", dict(content))
