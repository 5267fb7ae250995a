"""The sections of a report: functions from the summary of an audit to blocks. Sensitive."""

from collections.abc import Callable

from indpriv.analysis.summary import Audit
from indpriv.report.document import Section
from indpriv.report.sections.attacks.attributes import attribute_attacks
from indpriv.report.sections.attacks.canaries import canaries, gradient_canaries
from indpriv.report.sections.attacks.membership import attack_by_epsilon, attacks
from indpriv.report.sections.batch_norms import batch_norms
from indpriv.report.sections.distribution import distribution, lookup
from indpriv.report.sections.fidelity import fidelity
from indpriv.report.sections.groups import groups
from indpriv.report.sections.hazards import hazards
from indpriv.report.sections.loss import loss
from indpriv.report.sections.norms_over_training import norms_over_training
from indpriv.report.sections.publish import publish
from indpriv.report.sections.reconstruction import reconstruction
from indpriv.report.sections.reproduce import reproduce
from indpriv.report.sections.run import evidence, run
from indpriv.report.sections.schedule import schedule
from indpriv.report.sections.sensitivity import sensitivity
from indpriv.report.sections.units import units
from indpriv.report.sections.verdict import verdict
from indpriv.report.sections.views import views

# In the order of the report. A nested section belongs to the one before it.
SECTIONS: tuple[Callable[[Audit], Section | None], ...] = (
    verdict,
    evidence,
    views,
    publish,
    run,
    distribution,
    units,
    norms_over_training,
    schedule,
    lookup,
    groups,
    loss,
    attacks,
    attribute_attacks,
    attack_by_epsilon,
    canaries,
    gradient_canaries,
    reconstruction,
    fidelity,
    sensitivity,
    batch_norms,
    hazards,
    reproduce,
)


def sections_of(summary: Audit) -> tuple[Section, ...]:
    """The sections that this audit has something for."""
    return tuple(found for section in SECTIONS if (found := section(summary)) is not None)
