"""What `indpriv leak` and `indpriv attack --scores` print of reconstructions. Sensitive."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console

from indpriv._plain import to_json
from indpriv.analysis.reconstruction import Reconstruction
from indpriv.analysis.summary import SENSITIVE
from indpriv.report.document import paragraph
from indpriv.report.renderers.terminal import print_blocks
from indpriv.report.sections.reconstruction import ABOVE, MEANING, reconstruction_rows


def reconstruction_document(every: Sequence[Reconstruction]) -> dict[str, Any]:
    """What --json prints."""
    return {"sensitive": SENSITIVE, "reconstruction": to_json(tuple(every))}


def print_reconstruction(every: Sequence[Reconstruction], console: Console) -> None:
    """Print one row for each attack."""
    above = [paragraph(ABOVE, style="alarm")] if any(one.findings for one in every) else []
    print_blocks(
        [
            paragraph(SENSITIVE, style="alarm"),
            reconstruction_rows(every),
            *above,
            paragraph(MEANING),
        ],
        console,
    )
