import tracemalloc

import numpy as np
import pytest

from indpriv.attack_signals import AttackSignals, add_model, new_folder
from indpriv.attacks.references import lira, rmia


@pytest.mark.parametrize("attack", [rmia, lira])
def test_memory_grows_with_examples_and_not_with_models(attack, tmp_path):
    """10^6 examples x 64 models take less than 4 GiB: under 3,000 bytes an example, signals mapped."""
    n, rng = 50_000, np.random.default_rng(0)
    facts = {"coins": True}
    new_folder(tmp_path / "s", np.arange(n), facts)
    peaks = []
    for _ in range(2):
        for _ in range(6):
            signal = rng.normal(size=n).astype("f4")
            add_model(tmp_path / "s", {"confidence": signal}, rng.random(n) < 0.5)
        tracemalloc.start()
        attack(AttackSignals.open(tmp_path / "s"), 0)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 500 * n
    assert peaks[1] < 1.1 * peaks[0]
