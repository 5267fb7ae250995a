import copy
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opacus.accountants import RDPAccountant

import indpriv
from audits.training import dp_sgd
from audits.training.config import TrainingConfig
from audits.training.config.schedules import Schedule
from audits.training.dp_sgd import train
from audits.training.step_plan import planned_steps, steps_per_epoch, with_noise
from indpriv.errors import InputError
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from tests.experiments.training.test_dp_sgd import config, toy

LAWS = ("constant", "linear", "exponential", "inverse_linear", "inverse_exponential", "cyclic")
QUICK = (("hooks", "cyclic"), ("ghost", "inverse_linear"))
BASE = {"epochs": 2, "batch_size": 50, "learning_rate": 0.5, "delta": 1e-4}


def table(law, start, end):
    return {"law": law, "start": start} | ({} if law == "constant" else {"end": end})


def one_value(schedule, step, total):
    """The docstring's formula for one step, in plain arithmetic."""
    first, last, share = schedule.start, schedule.end, step / total
    if schedule.law == "constant":
        return first
    if schedule.law == "linear":
        return first * (1 - (1 - last / first) * share)
    if schedule.law == "exponential":
        return first * math.exp(-math.log(first / last) * share)
    if schedule.law == "inverse_linear":
        return 1 / (1 / first + (1 / last - 1 / first) * share)
    if schedule.law == "inverse_exponential":
        return 1 / ((1 / first) * math.exp(math.log(first / last) * share))
    position = (schedule.cycles or 1) * share
    position -= math.floor(position)
    top, depth = first + (last - first) * share, schedule.depth or 0.5
    if position <= 0.5:
        return top * (1 - depth * 2 * position)
    return top * (1 - depth * 2 * (1 - position))


@given(
    law=st.sampled_from(LAWS),
    start=st.floats(1e-3, 1e3),
    end=st.floats(1e-3, 1e3),
    total=st.integers(1, 60),
    cycles=st.integers(1, 5),
    depth=st.floats(0.01, 0.99),
)
def test_values_are_those_of_the_formula(law, start, end, total, cycles, depth):
    of_law = {"cycles": cycles, "depth": depth} if law == "cyclic" else {}
    schedule = Schedule(**table(law, start, end), **of_law)
    values = schedule.values(total)
    expected = [one_value(schedule, step, total) for step in range(total)]
    np.testing.assert_allclose(values, expected, rtol=1e-9)
    assert np.all(values > 0)
    assert np.all(np.isfinite(values))
    np.testing.assert_allclose(schedule.times(3.0).values(total), 3 * values, rtol=1e-12)
    if law not in ("constant", "cyclic"):
        assert values[0] == pytest.approx(start)
        assert np.all(np.diff(values) * np.sign(end - start) >= -1e-9 * start)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"max_grad_norm": {"law": "linear", "start": 2.0}}, "max_grad_norm: .* lacks end"),
        ({"max_grad_norm": {"law": "constant", "start": 2.0, "end": 1.0}}, "has no end"),
        ({"noise_multiplier": {"law": "linear", "start": 0, "end": 1.0}}, "start = 0 .* above 0"),
        ({"noise_multiplier": {"law": "linear", "start": 1, "end": math.inf}}, "end = inf"),
        (
            {"noise_std": {"law": "cyclic", "start": 1, "end": 1, "depth": 1.0}},
            "depth = 1.0 .* below 1",
        ),
        ({"noise_multiplier": {"law": "line", "start": 1, "end": 1.0}}, "law = 'line' .*'linear'"),
        ({"noise_multiplier": {"start": 1, "end": 1.0}}, "the schedule lacks law"),
        (
            {"noise_multiplier": {"law": "linear", "start": 1.0, "ends": 1.0}},
            "noise_multiplier: the schedule has the key 'ends'.*did you mean 'end'",
        ),
        (
            {"noise_multiplier": {"law": "linear", "start": 1.0, "end": 1.0, "cycles": 2}},
            'cycles is for law = "cyclic" only',
        ),
        ({"noise_multiplier": 1.0, "noise_std": 1.0}, "both noise_multiplier and noise_std"),
        ({"noise_std": 1.0, "target_epsilon": 3.0}, "both target_epsilon and noise_std"),
        ({"max_grad_norm": "1"}, "above 0 or a schedule such as"),
    ],
)
def test_what_is_no_schedule_is_refused(changes, says):
    tables = config().to_dict()
    tables["training"] |= changes
    if "noise_multiplier" not in changes and "noise_std" in changes:
        del tables["training"]["noise_multiplier"]
    with pytest.raises(InputError, match=says):
        type(config()).from_dict(tables)


@pytest.mark.parametrize(
    ("name", "law"),
    [
        ("noise_multiplier", "linear"),
        ("noise_std", "cyclic"),
        *(pytest.param("noise_multiplier", law, marks=pytest.mark.slow) for law in LAWS),
    ],
)
def test_a_shape_is_scaled_to_the_target_and_never_exceeds_it(law, name):
    shape = {"law": law, "start": 3.0} | ({} if law == "constant" else {"end": 0.7})
    settings = TrainingConfig(
        **BASE,
        max_grad_norm=Schedule("linear", 2.0, 1.0),
        target_epsilon=2.0,
        **{name: Schedule(**shape)},
    )
    scaled = with_noise(settings, 300)
    noise = planned_steps(scaled, 12, 1 / 6).noise_multiplier
    accountant = RDPAccountant()
    accountant.history = [(float(sigma), 1 / 6, 1) for sigma in noise]
    assert 2.0 - 2e-3 < accountant.get_epsilon(1e-4) <= 2.0
    std = planned_steps(scaled, 12, 1 / 6).max_grad_norm * noise
    own = noise if name == "noise_multiplier" else std
    np.testing.assert_allclose(own / own[0], Schedule(**shape).values(12) / 3.0, rtol=1e-9)


def test_a_target_that_no_noise_reaches_is_refused():
    settings = TrainingConfig(
        **BASE | {"delta": 1e-300},
        max_grad_norm=1.0,
        target_epsilon=1e-5,
        noise_multiplier=Schedule("linear", 2.0, 1.0),
    )
    with pytest.raises(InputError, match="cannot be reached"):
        with_noise(settings, 300)


@pytest.mark.parametrize(
    ("mode", "law"),
    [
        pytest.param(
            mode, law, marks=() if (mode, law) in QUICK else pytest.mark.slow, id=f"{mode}-{law}"
        )
        for mode in ("hooks", "ghost")
        for law in LAWS
    ],
)
def test_realised_settings_are_those_declared(law, mode, tmp_path):
    """In the log, in the accountant, and so in the worst case."""
    clip, std = table(law, 2.0, 0.5), table(law, 4.0, 1.5)
    tables = copy.deepcopy(config(grad_sample_mode=mode, max_physical_batch_size=30).to_dict())
    del tables["training"]["noise_multiplier"]
    tables["training"] |= {"max_grad_norm": clip, "noise_std": std}
    audit = type(config()).from_dict(tables)
    assert type(config()).from_dict(audit.to_dict()) == audit
    with dp_sgd.quiet_opacus():
        run = train(audit, tmp_path / "run", dataset=toy(n_test=5))
    log = indpriv.NormLog.open(tmp_path / "run")
    clips, stds = (Schedule(**found).values(12) for found in (clip, std))
    np.testing.assert_array_equal(log.settings.max_grad_norm, clips)
    np.testing.assert_array_equal(log.settings.noise_multiplier, stds / clips)
    accountant = RDPAccountant()
    accountant.history = [(float(sigma), 1 / 6, 1) for sigma in stds / clips]
    assert run.worst_case_epsilon == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-12)
    found = indpriv.account(log, delta=1e-4, orders=RDPAccountant.DEFAULT_ALPHAS)
    assert found.worst_case_epsilon == pytest.approx(run.worst_case_epsilon, rel=1e-6)
    assert [c.title for c in verify(open_run(tmp_path / "run")) if c.status == "failed"] == []


def test_a_batch_larger_than_the_data_is_refused():
    settings = TrainingConfig(**BASE, noise_multiplier=1.0, max_grad_norm=1.0)
    assert steps_per_epoch(settings, 50) == 1
    with pytest.raises(InputError, match=r"batch_size=50 is larger than .* of 49 examples"):
        steps_per_epoch(settings, 49)
