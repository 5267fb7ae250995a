import numpy as np
import pytest
import torch

from audits.exposure.findings import measure_exposure
from audits.exposure.measured import exposure_of_run
from audits.exposure.models import MODELS
from audits.exposure.ranks import Exposures
from audits.exposure.text import LENGTH, START, draw_secrets, lines_of_text, shifted
from audits.exposure.training import SecretsConfig, log_perplexities, train_with_secrets
from audits.training.datasets.topics import ALPHABET, encode
from indpriv.errors import InputError
from indpriv.norm_log.run_files import SECRETS


def test_rows_of_text_are_encoded_and_shifted():
    rng = np.random.default_rng(0)
    lines = lines_of_text(50, rng)
    assert {len(line) for line in lines} == {LENGTH}
    codes = encode([*lines, "ab 1"], LENGTH)
    assert ["".join(ALPHABET[c] for c in row).rstrip() for row in codes] == [
        *(line.rstrip() for line in lines),
        "ab 1",
    ]
    before = shifted(codes)
    assert (before[:, 0] == START).all()
    np.testing.assert_array_equal(before[:, 1:], codes[:, :-1])
    with pytest.raises(InputError, match="more than"):
        lines_of_text(10**7, rng)


@pytest.mark.parametrize("name", MODELS)
def test_shared_beginnings_give_the_likelihood_of_each_candidate(name):
    """Slow reference: the whole sentence of each pin through the model, character by character."""
    torch.manual_seed(0)
    module = MODELS[name]().eval()
    (secret,) = draw_secrets([1], np.random.default_rng(1))
    found = log_perplexities(module, secret)
    for pin in (0, 7, 1234, 9999):
        codes = encode([f"{secret.prefix}{pin:04d}"], LENGTH)
        with torch.no_grad():
            logits = module(torch.from_numpy(shifted(codes)))[0].double().log_softmax(1)
        places = range(len(secret.prefix), len(secret.prefix) + 4)
        expected = -sum(float(logits[place, codes[0, place]]) for place in places)
        assert found[pin] == pytest.approx(expected, rel=1e-5)


def test_no_character_sees_later_ones():
    module = MODELS["transformer"]().eval()
    codes = torch.randint(0, len(ALPHABET), (2, LENGTH))
    changed = codes.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % len(ALPHABET)
    torch.testing.assert_close(module(codes)[:, :10], module(changed)[:, :10])


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_secrets_are_memorised_without_dp_and_not_with_it(name, tmp_path):
    common = {"model": name, "text_rows": 300, "secrets": 4, "repeats": (1, 16), "controls": 16}
    plain = SecretsConfig(**common, target_epsilon=None, epochs=30)
    found = train_with_secrets(plain, tmp_path / "plain", seed=1)
    controls, _, sixteen = measure_exposure(found).rows
    assert sixteen.mean > 10
    assert controls.mean < 3
    private = SecretsConfig(**common, target_epsilon=1.0, epochs=3)
    train_with_secrets(private, tmp_path / "private", seed=1)
    exposures, table = exposure_of_run(tmp_path / "private", delta=1e-5)
    assert Exposures.from_parquet(tmp_path / "private" / SECRETS).n_candidates == 10_000
    controls, once, sixteen = measure_exposure(exposures, table).rows
    assert sixteen.mean < 4
    assert not measure_exposure(exposures, table).findings
    assert once.mean_epsilon <= once.worst_case_epsilon <= 1.01
    assert sixteen.worst_case_epsilon > 3 * once.worst_case_epsilon
