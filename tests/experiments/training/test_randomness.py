import pytest
import torch

from audits.training.randomness import Randomness, generator
from indpriv.errors import InputError


def seeds(randomness):
    return (
        randomness.first_parameters,
        randomness.sampling,
        randomness.noise,
        randomness.shuffling,
    )


def test_a_seed_gives_the_same_independent_seeds_again():
    assert Randomness.from_seed(7) == Randomness.from_seed(7)
    assert Randomness.from_seed(7).seeded
    assert len({*seeds(Randomness.from_seed(7)), *seeds(Randomness.from_seed(8))}) == 8


def test_without_a_seed_nothing_repeats_whatever_torch_was_seeded_with():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        randomness = Randomness.from_seed(None)
        assert not randomness.seeded
        drawn += seeds(randomness)
    assert len(set(drawn)) == 8


@pytest.mark.parametrize("seed", [-1, 1.5, "x", True])
def test_a_seed_that_is_no_whole_number_is_refused(seed):
    with pytest.raises(InputError, match="seed="):
        Randomness.from_seed(seed)


def test_generators_repeat_and_are_their_own():
    state = torch.random.get_rng_state()
    first, again = (torch.rand(5, generator=generator(3)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.random.get_rng_state())
