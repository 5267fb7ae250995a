import numpy as np
import pandas as pd
import pytest
from opacus.accountants import RDPAccountant
from opacus.optimizers import optimizer

from audits.training import dp_sgd
from audits.training.config.schedules import Schedule
from audits.training.dp_sgd import train
from tests.experiments.training.test_dp_sgd import config, toy


def test_the_curve_of_a_run(tmp_path):
    noise, clip = (
        {"law": "linear", "start": 3.0, "end": 1.0},
        {"law": "exponential", "start": 2.0, "end": 1.0},
    )
    audit = config(checkpoints=5, noise_multiplier=noise, max_grad_norm=clip)
    with dp_sgd.quiet_opacus():
        run = train(audit, tmp_path / "run", dataset=toy())
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    assert curve["step"].tolist() == [0, 5, 10, 12]
    np.testing.assert_allclose(curve["epoch"], curve["step"] / 6)
    noises, clips = (Schedule(**law).values(12)[[0, 4, 9, 11]] for law in (noise, clip))
    np.testing.assert_array_equal(curve["noise_multiplier"], noises)
    np.testing.assert_array_equal(curve["max_grad_norm"], clips)
    np.testing.assert_allclose(curve["noise_std"], noises * clips)
    accountant = RDPAccountant()
    accountant.history = [(float(s), 1 / 6, 1) for s in Schedule(**noise).values(12)[:10]]
    epsilons = curve["worst_case_epsilon"].tolist()
    assert epsilons[0] == 0.0
    assert epsilons[2] == pytest.approx(accountant.get_epsilon(audit.training.delta), rel=1e-9)
    assert epsilons[3] == pytest.approx(run.worst_case_epsilon, rel=1e-9)
    assert curve["test_accuracy"].iloc[-1] == run.test_accuracy
    assert (curve["seconds"].diff()[1:] > 0).all()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"clipping": "quantile"},
        {"noise_scale": "largest_norm", "allow_no_privacy": True},
    ],
)
def test_the_noise_of_the_curve_is_that_which_was_added(tmp_path, monkeypatch, settings):
    added, generate = [], optimizer._generate_noise

    def watched(std, *args, **keywords):
        added.append(float(std))
        return generate(std, *args, **keywords)

    monkeypatch.setattr(optimizer, "_generate_noise", watched)
    audit = config(checkpoints=1, max_grad_norm=2.0, **settings)
    with dp_sgd.quiet_opacus():
        train(audit, tmp_path / "run", dataset=toy())
    curve = pd.read_parquet(tmp_path / "run" / "curve.parquet")
    each = len(added) // 12  # parameters
    np.testing.assert_allclose(curve["noise_std"].iloc[1:], added[::each], rtol=1e-6)
