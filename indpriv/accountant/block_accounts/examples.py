"""The account of single rows: norm log -> histogram -> divergences -> epsilon. Sensitive."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from indpriv._progress import Advance
from indpriv.accountant.block_accounts.account import BlockAccount, tables_of_epsilons
from indpriv.accountant.claims import claim_of
from indpriv.accountant.engine import Engine, Epsilons, Fillable, Watched
from indpriv.accountant.engines import ENGINES
from indpriv.accountant.method import Method
from indpriv.accountant.prepared import account_of, as_read, block_size, checked
from indpriv.accountant.relations.pairs import PairsEngine, uses_pairs
from indpriv.norm_log.norm_log import NormLog

_CLOSE = 1e-3  # relative distance to the worst case within which an example may be always clipped


@dataclass(frozen=True)
class ExampleWork:
    """See BlockWork.

    Attributes:
        engine: prepared for the log.
        preset: of the account, which may read norms in another rounding than the log's.
    """

    engine: Engine
    preset: str | None

    def watched(self, advance: Advance) -> ExampleWork:
        """See BlockWork."""
        if not isinstance(self.engine, Watched):
            return self
        return replace(self, engine=self.engine.watched(advance))

    def filled(self, block: NormLog) -> ExampleWork:
        """See BlockWork."""
        block = as_read(block, self.preset)
        if isinstance(self.engine, Fillable):
            return replace(self, engine=self.engine.filled(block))
        self.engine.block(block)
        return self

    def block(self, block: NormLog) -> Epsilons:
        """Bounds of each example; one that is clipped in every step has the worst case, exactly."""
        block = as_read(block, self.preset)
        worst, found = self.engine.worst_case, self.engine.block(block)
        epsilon, lower = found.epsilon.copy(), found.epsilon_lower.copy()
        close = np.flatnonzero(epsilon >= worst.epsilon * (1 - _CLOSE))
        if len(close):
            clipped = close[self.engine.histogram.norms.always_clipped(block.take(close))]
            epsilon[clipped], lower[clipped] = worst.epsilon, worst.epsilon_lower
        return Epsilons(epsilon, lower, found.details)


def example_work(log: NormLog, method: Method) -> ExampleWork:
    """The work of each block of a log that `checked` returned."""
    kind = PairsEngine if uses_pairs(log, method) else ENGINES[method.accountant]
    return ExampleWork(kind.prepare(log, method), method.preset)


def example_blocks(log: NormLog, method: Method) -> BlockAccount[Epsilons]:
    """The account of each row of a log; raises and warns as `checked` does."""
    read = checked(log, method)
    work = example_work(read, method)
    return BlockAccount(
        replace(log, batch_norms=read.batch_norms),
        log.example_ids,
        work,
        tables_of_epsilons(
            float(work.engine.worst_case.epsilon[0]),
            claim_of(read, method.between_records),
            account_of(read, method),
        ),
        block_size(work.engine.bytes_per_example),
    )
