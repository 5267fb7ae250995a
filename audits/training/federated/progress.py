"""How far a federated run has come, kept at each checkpoint to resume it. Sensitive."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from audits.training.config import AuditConfig
from audits.training.run_record import record_to_resume
from indpriv._files import write_atomically
from indpriv._reading import named, read_npz
from indpriv._types import FloatArray
from indpriv.errors import InputError

PROGRESS = "progress.npz"
_CURVE = "curve_"


@dataclass(frozen=True)
class Progress:
    """What a run needs, beside its last checkpoint, to go on.

    Attributes:
        rounds: number of rounds that are done.
        shuffling: seed of the division of rows among clients.
        squared_mu: (n_units,) of each protected unit so far, under known participation.
        mus: largest mu at each checkpoint, by round.
        curve: rows of the curve so far.
    """

    rounds: int
    shuffling: int
    squared_mu: FloatArray
    mus: dict[int, float]
    curve: pd.DataFrame

    def write(self, run_dir: Path) -> None:
        """Write RUN/progress.npz, for its owner only."""
        buffer = io.BytesIO()
        columns = {f"{_CURVE}{name}": values.to_numpy() for name, values in self.curve.items()}
        np.savez(
            buffer,
            rounds=np.int64(self.rounds),
            shuffling=np.uint64(self.shuffling),
            squared_mu=self.squared_mu,
            mus=np.array(list(self.mus.items()), dtype=np.float64).reshape(-1, 2),
            **columns,  # type: ignore[arg-type]
        )
        write_atomically(run_dir / PROGRESS, buffer.getvalue())

    @classmethod
    def read(cls, run_dir: Path, config: AuditConfig) -> Progress:
        """Read it, for the same audit.

        Raises:
            InputError: nothing to resume, or the run of another audit.
        """
        if record_to_resume(run_dir, config, PROGRESS).get("seeded"):
            raise InputError(
                f"{run_dir} is seeded: resumed, it would not be the run that its seed promises; "
                "delete it and train it anew"
            )
        held = read_npz(run_dir / PROGRESS)
        with named(run_dir / PROGRESS):
            curve = {
                name.removeprefix(_CURVE): held[name] for name in held if name.startswith(_CURVE)
            }
            return cls(
                int(held["rounds"]),
                int(held["shuffling"]),
                held["squared_mu"],
                {int(done): float(mu) for done, mu in held["mus"]},
                pd.DataFrame(curve),
            )
