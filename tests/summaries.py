"""Summaries of small hand-made audits, for tests of reports and gates."""

from indpriv._plain import empty
from indpriv.accountant.account import table_for
from indpriv.analysis.attacks.membership import tables_of_both_sides
from indpriv.analysis.fidelity import compare_with_exact
from indpriv.analysis.recorded_run import AuditedRun, Declared, RecordedRun, find_all
from indpriv.analysis.summary import keys
from indpriv.attacks import Material
from indpriv.norm_log.evidence import CHECKS as TEMPLATES
from synthetic import epsilon_table, sound_checks

NO_ATTACKS = {
    key: empty(keys()[key][0])
    for key in ("attacks", "rates", "attack_by_epsilon", "ceilings", "roc", "most_exposed")
}
CHECKS = (
    *sound_checks(),
    TEMPLATES["coverage"].fact("not checked", "10 of 30 steps have a record"),
)


def run_of(log, method, table=None, examples=None, **options):
    """A run and its account by a method."""
    table = table_for(log, method) if table is None else table
    return AuditedRun(log, table, RecordedRun(Material(examples)), method=method, **options)


def audit_of(log, table, recorded, *, fidelity=None, holdout=None, **options):
    """What is found about a run; given are how far off its epsilons can be, and those of the hold-out."""
    run = AuditedRun(log, table, recorded, **options)
    run.audit._values |= fidelity or {}
    if holdout is not None:
        run._computed[tables_of_both_sides] = table, holdout
    return find_all(run)


def summary_of(log, examples, **options):
    """A summary of hand-made epsilons: the accountant has no part in it."""
    scale = examples.train["loss"].to_numpy() ** 0.5
    table = epsilon_table((2 * scale).clip(max=1.9), worst_case=1.9)
    fidelity = [
        compare_with_exact(
            epsilon_table(table.epsilon * factor, between_records=rule),
            table,
            source="norms at every step of this log",
            every=every,
            epochs=every / 10,
        )
        for every, factor in ((3, 1.01), (10, 0.95))
        for rule in ("last", "closest")
    ]
    evidence = {
        "examples": examples,
        "non_dp": examples,
        "checks": CHECKS,
        "declared": Declared({"name": "tiny"}),
        "recorder": {"sampler_class": "UniformWithReplacementSampler"},
    }
    evidence |= options.pop("evidence", {})
    settings = {
        "name": "tiny",
        "fidelity": {"fidelity": tuple(fidelity)},
        "command": "indpriv audit run",
    } | options
    models = {"dp": Material(evidence.pop("examples")), "non_dp": Material(evidence.pop("non_dp"))}
    return audit_of(log, table, RecordedRun(**models, **evidence), **settings)
