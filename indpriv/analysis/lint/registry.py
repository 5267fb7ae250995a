"""Every rule of `indpriv check`.

To add one, write it in a module beside this one, whose RULES are listed here.
"""

from __future__ import annotations

from indpriv.analysis.lint import model, optimisation, privacy
from indpriv.analysis.lint.rule import SEVERITIES, Finding, apply
from indpriv.analysis.lint.training_facts import TrainingFacts
from indpriv.norm_log.evidence import FAILED, NOT_CHECKED, PASSED

_STATUSES = (FAILED, NOT_CHECKED, PASSED)

RULES = {rule.key: rule for rule in (*privacy.RULES, *optimisation.RULES, *model.RULES)}


def lint(facts: TrainingFacts) -> tuple[Finding, ...]:
    """What every rule finds: failed ones first, errors before warnings before notes."""
    found = [apply(rule, facts) for rule in RULES.values()]
    return tuple(
        sorted(found, key=lambda f: (_STATUSES.index(f.status), SEVERITIES.index(f.severity)))
    )
