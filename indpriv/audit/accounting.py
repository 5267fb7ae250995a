"""How an audit accounts a log, and what other accounts of the same run would have said. Sensitive."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from indpriv.accountant import account
from indpriv.analysis.fidelity import Fidelity, compare
from indpriv.analysis.spacing import Spacing, spacing_effect
from indpriv.epsilon_table import EpsilonTable
from indpriv.norm_log import NormLog

FIDELITY_EPOCHS = (1 / 3, 1.0, 2.0)  # the paper's Figure 4 goes from a third of an epoch to two epochs
COMPARING = "comparing with larger K"
SPACING = "leaving out every second record"

Progress = Callable[[str, int, int], None]
"""Called as progress(stage, done, total)."""


@dataclass(frozen=True)
class Accounting:
    """How to account: arguments of `indpriv.account`, so that a table for another K is computed alike."""

    delta: float
    accountant: str = "rdp"
    conversion: str = "canonne2020"
    between_records: str = "last"
    preset: str | None = None

    def __call__(
        self,
        log: NormLog,
        between_records: str | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> EpsilonTable:
        """The epsilons of a log; between_records overrides the rule."""
        if self.preset is not None:
            return account(log, delta=self.delta, preset=self.preset, progress=progress)
        return account(
            log,
            progress=progress,
            delta=self.delta,
            accountant=self.accountant,
            conversion=self.conversion,
            between_records=between_records or self.between_records,
        )


def silent(_stage: str, _done: int, _total: int) -> None:
    """No progress."""


def fidelity_against_k(
    log: NormLog, accounting: Accounting, table: EpsilonTable, progress: Progress | None = None
) -> tuple[Fidelity, ...]:
    """What larger K would have said, against epsilons of norms known at every step.

    Exact values come from the whole log where it has every step, else from the examples recorded exactly; there the
    log's own K is compared too. Empty where neither exists, and where training clipped individually (any K is exact).
    """
    if log.individually_clipped:
        return ()
    if log.coverage == 1:
        exact_log, exact, source = log, table, "norms at every step of this log"
        comparisons: list[Fidelity] = []
    else:
        found = log.exact_examples()
        if found is None:
            return ()
        exact_log, exact, source = found, accounting(found), f"norms at every step of {found.n_examples:,} examples"
        gaps = np.diff(log.recorded_steps)
        every = round(float(gaps.mean())) if len(gaps) else log.total_steps
        own = every * float(log.settings.sample_rate.mean())
        comparisons = [compare(table, exact, source=source, every=every, epochs=own, is_this_log=True)]
    rate = float(exact_log.settings.sample_rate.mean())
    rules = (accounting.between_records,) if accounting.preset else ("last", "closest")
    steps = sorted({round(epochs / rate) for epochs in FIDELITY_EPOCHS})
    cases = [(every, rule) for every in steps if 1 < every < log.total_steps for rule in rules]
    for number, (every, rule) in enumerate(cases, 1):
        guess = accounting(exact_log.thin(every), rule)
        comparisons.append(compare(guess, exact, source=source, every=every, epochs=every * rate))
        (progress or silent)(COMPARING, number, len(cases))
    return tuple(comparisons)


def effect_of_spacing(
    log: NormLog, accounting: Accounting, table: EpsilonTable, progress: Progress | None = None
) -> Spacing | None:
    """How far the estimate of a log moves when every second record is left out; None where nothing is carried between records.

    Args:
        log: the log.
        accounting: as the table was made.
        table: the account of all records.
        progress: called as progress(stage, done, total).
    """
    carried = table.account.between_records != "worst_case" and log.n_records < log.total_steps
    if not carried or log.individually_clipped or log.n_records < 3:
        return None
    tell = progress or silent
    sparser = replace(log, recorded_steps=log.recorded_steps[::2], rows=log.rows[::2])
    return spacing_effect(
        table,
        accounting(sparser, progress=lambda done, total: tell(SPACING, done, total)),
        n_records=log.n_records,
        n_kept=sparser.n_records,
        every=int(np.median(np.diff(log.recorded_steps))),
    )
