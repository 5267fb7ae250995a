"""What whoever holds a run directory can do: edit its lines and files, and make the chain of hashes anew."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Line = dict[str, Any]


def lines_of(run_dir: Path) -> list[Line]:
    return [json.loads(line) for line in (run_dir / "journal.jsonl").read_text().splitlines()]


def rechained(
    run_dir: Path, change: Callable[[list[Line]], list[Line]] = lambda lines: lines
) -> None:
    """Write the changed lines with numbers and hashes that fit, as the package would have written them."""
    chain, text = "indpriv", ""
    for number, line in enumerate(change(lines_of(run_dir))):
        body = {**line, "seq": number}
        body.pop("chain", None)
        plain = json.dumps(body, sort_keys=True, separators=(",", ":"))
        chain = hashlib.sha256(f"{chain}\n{plain}".encode()).hexdigest()
        text += json.dumps({**body, "chain": chain}, sort_keys=True, separators=(",", ":")) + "\n"
    (run_dir / "journal.jsonl").write_text(text)


def with_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> Line:
    """Change a Parquet file; what a line says of it then."""
    sink = io.BytesIO()
    pq.write_table(change(pq.read_table(path)), sink, write_page_checksum=True)
    path.write_bytes(sink.getvalue())
    return {"bytes": len(sink.getvalue()), "sha256": hashlib.sha256(sink.getvalue()).hexdigest()}


def settings_forged(run_dir: Path, **settings: float) -> None:
    """Say other settings of every step."""
    rechained(
        run_dir,
        lambda lines: [{**one, **settings} if one["kind"] == "steps" else one for one in lines],
    )


def norms_forged(
    run_dir: Path, factor: float, steps: range | None = None, rows: slice = slice(None)
) -> None:
    """Say norms of some rows (default all) times a factor, in the full records of some steps."""

    def smaller(table: pa.Table) -> pa.Table:
        codes = table["norm"].to_numpy().copy()
        codes[rows] = codes[rows] * factor
        return pa.table({"norm": codes})

    def change(lines: list[Line]) -> list[Line]:
        return [
            {**line, **with_table(run_dir / "records" / line["file"], smaller)}
            if line["kind"] == "record" and (steps is None or line["step"] in steps)
            else line
            for line in lines
        ]

    rechained(run_dir, change)
