"""Each rule finds a training that breaks it, passes one that does not, and says what it needs."""

from dataclasses import replace

import numpy as np
import pytest

from indpriv._facts import ERROR, NOTE, SEVERITIES, WARNING, templates
from indpriv.analysis.lint import RULES, Plan, SgdSettings, TrainingFacts, lint

GOOD = TrainingFacts(
    n_examples=60_000,
    delta=1e-6,
    plan=Plan(noise_multiplier=2.0, sample_rate=1 / 15, total_steps=300),
    max_grad_norm=1.0,
    sgd=SgdSettings(learning_rate=0.5, momentum=0.9, weight_decay=0.0),
    layers={"Conv2d": 2, "Tanh": 3, "Linear": 2},
    views=8,
    clipped=np.array([0.9, 0.5, 0.3]),
    poisson=True,
)
MORE_NOISE, LESS_NOISE = Plan(2.0, 0.01, 2000), Plan(0.5, 0.01, 2000)
DEEP = {"Conv2d": 19, "Linear": 1}

# rule -> changes that break it, changes next to them that do not, changes that hide what it needs
CASES = {
    "delta": (
        [{"delta": 1 / 60_000}],
        [{"delta": 0.99 / 60_000}],
        [{"delta": None}, {"n_examples": None}],
    ),
    "small_delta": (
        [{"delta": 1e-5}, {"delta": 5.6e-6}],
        [{"delta": 5.5e-6}],
        [{"delta": None}, {"n_examples": None}],
    ),
    "sampler": ([{"poisson": False}], [{"poisson": True}], [{"poisson": None}]),
    "seeds": ([{"unseeded": False}], [], [{"unseeded": None}]),  # nobody can see it
    "epsilon": (
        [{"plan": Plan(0.6, 0.05, 1000)}, {"epsilon_cap": 10.1}],
        [{"plan": Plan(1.2, 0.05, 1000)}, {"plan": Plan(0.6, 0.05, 1000), "epsilon_cap": 9.9}],
        [{"plan": None}, {"delta": None}],
    ),
    "batch_size": (
        [{"plan": LESS_NOISE}],
        [{"plan": MORE_NOISE}, {"plan": Plan(0.5, 0.6, 40)}],
        [{"plan": None}, {"delta": None}, {"n_examples": None}],
    ),
    "epochs": (
        [{"plan": Plan(2.0, 1 / 15, 149)}],
        [{"plan": Plan(2.0, 1 / 15, 150)}],
        [{"plan": None}, {"delta": None}],
    ),
    "clipping": (
        [{"clipped": np.array([0.9, 0.04, 0.0])}, {"clipped": np.array([1.0, 0.96, 0.9])}],
        [{"clipped": np.array([0.9, 0.06, 0.0])}, {"clipped": np.array([1.0, 0.94, 0.9])}],
        [{"clipped": np.empty(0)}],
    ),
    "learning_rate": (
        [
            {"sgd": SgdSettings(3e-3, 0.0, 0.0)},  # 300 steps of at most 0.003: less than 1
            {"sgd": SgdSettings(6.0, 0.9, 0.0)},  # 60 * 2 / 4000 * sqrt(300) = 0.52
            {"max_grad_norm": 200.0},
        ],
        [{"sgd": SgdSettings(4e-3, 0.0, 0.0)}, {"sgd": SgdSettings(5.0, 0.9, 0.0)}],
        [{"sgd": None}, {"plan": None}, {"max_grad_norm": None}, {"n_examples": None}],
    ),
    "weight_decay": (
        [{"sgd": SgdSettings(0.5, 0.9, 1e-3)}],
        [{"sgd": SgdSettings(0.5, 0.9, 5e-4)}, {"plan": None}],
        [
            {"sgd": None},
            {"sgd": SgdSettings(0.5, 0.9, None)},
            {"sgd": SgdSettings(0.5, 0.9, 1e-3), "plan": None},
        ],
    ),
    "batch_norm": (
        [{"layers": DEEP | {"BatchNorm2d": 1}}],
        [{"layers": DEEP | {"GroupNorm": 1}}],
        [{"layers": None}],
    ),
    "normalisation": (
        [{"layers": DEEP}, {"layers": DEEP | {"BatchNorm2d": 19}}],
        [{"layers": DEEP | {"GroupNorm": 19}}, {"layers": {"Linear": 8}}],
        [{"layers": None}],
    ),
    "activations": (
        [{"layers": {"Linear": 2, "ReLU": 1}}],
        [{"layers": {"Linear": 2, "Tanh": 1}}, {"layers": DEEP | {"ReLU": 9, "GroupNorm": 9}}],
        [{"layers": None}],
    ),
    "augmentation": (
        [{"views": 1}],
        [{"views": 2}, {"views": 1, "layers": {"Linear": 2}}],
        [{"views": None}, {"layers": None}],
    ),
}


def found_by(rule, **changes):
    (found,) = [each for each in lint(replace(GOOD, **changes)) if each.key == rule]
    return found


def status_of(rule, changes):
    return found_by(rule, **changes).status


def cases(place):
    return [(rule, changes) for rule, case in CASES.items() for changes in case[place]]


def test_every_rule_has_cases():
    assert list(templates("rule")) == list(RULES) == list(CASES)


@pytest.mark.parametrize(("rule", "changes"), cases(0))
def test_a_training_that_breaks_a_rule_is_found(rule, changes):
    assert status_of(rule, changes) == "failed"


@pytest.mark.parametrize(("rule", "changes"), cases(1))
def test_a_training_beside_the_limit_passes(rule, changes):
    assert status_of(rule, changes) == "passed"


@pytest.mark.parametrize(("rule", "changes"), cases(2))
def test_what_is_not_known_is_not_judged(rule, changes):
    assert status_of(rule, changes) == "not checked"


def test_a_good_training_passes_and_an_unknown_one_is_not_judged():
    assert {each.key for each in lint(GOOD) if each.status != "passed"} == {"seeds"}
    assert not any(each.status == "failed" for each in lint(GOOD))
    assert {each.status for each in lint(TrainingFacts())} == {"not checked"}


def test_failed_rules_come_first_and_errors_before_warnings():
    bad = replace(
        GOOD,
        delta=1e-3,
        plan=LESS_NOISE,
        views=1,
    )
    found = lint(bad)
    failed = [each.kind for each in found if each.status == "failed"]
    assert failed == sorted(failed, key=SEVERITIES.index)
    assert set(failed) == {ERROR, WARNING, NOTE}
    assert {each.status for each in found[: len(failed)]} == {"failed"}


@pytest.mark.parametrize("rule", templates("rule").values(), ids=lambda rule: rule.key)
def test_a_rule_says_all_that_a_reader_needs(rule):
    needs = rule.texts["not_checked"]
    for text in (rule.title, rule.about, rule.source, rule.advice, needs):
        assert text.strip() == text
        assert text
    assert rule.kind in SEVERITIES
    assert needs.startswith("This rule needs ")
    assert not rule.title.endswith(".")
    assert all(text.endswith(".") for text in (rule.about, rule.advice, needs))


def test_the_noise_that_a_larger_batch_saves_is_what_the_definition_says():
    """A slow reference: the variance of the mean of all averaged gradients, by adding up the steps."""
    plan = replace(LESS_NOISE, total_steps=100)
    twice = Plan(0.5, 0.02, 50).with_epsilon(plan.epsilon(1e-6), 1e-6)

    def variance(p):
        batch = p.sample_rate * 60_000
        steps = range(int(p.total_steps))
        return sum((p.noise_multiplier / batch / len(steps)) ** 2 for _ in steps)

    saved = 1 - (variance(twice) / variance(plan)) ** 0.5
    figures = found_by("batch_size", plan=plan).detail
    assert f"would be {100 * saved:.0f} % smaller" in figures


def test_noise_moves_parameters_as_far_as_the_rule_says():
    """Simulated: SGD with momentum on noise alone."""
    sgd, plan = SgdSettings(0.5, 0.9, 0.0), Plan(2.0, 0.05, 2000)
    generator = np.random.default_rng(0)
    place = velocity = np.zeros(2000)
    for _ in range(plan.total_steps):
        velocity = 0.9 * velocity + generator.normal(0, 2.0 / (0.05 * 60_000), 2000)
        place = place - 0.5 * velocity
    figures = found_by("learning_rate", plan=plan, sgd=sgd).detail
    shown = float(figures.rsplit(" ", 1)[-1].rstrip("."))
    assert shown == pytest.approx(place.std(), rel=0.1)
