"""leak: who is compared with whom, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

from indpriv import AttackScores
from indpriv.analysis.reconstruction import reconstruction_of
from indpriv.errors import InputError
from indpriv.leakage import LBFGS, FirstLayer, Informed, Observation, leak
from leakage_scenes import LOSS, digits, mlp
from reports.shared.pictures import network as cpl_network

SEEN = Observation(max_grad_norm=0.1)


def test_scores_are_errors_by_example(tmp_path):
    inputs, targets = digits(6)
    ids = np.array([f"id-{i}" for i in range(6)])
    watched = {}
    found = leak(
        mlp(), LOSS, inputs, targets, SEEN, FirstLayer(), example_ids=ids,
        watch=lambda place, picture: watched.__setitem__(place, picture),
    )  # fmt: skip
    assert found.member.tolist() == [True] * 6 + [False] * 6
    assert found.example_ids[:6].tolist() == ids.tolist()
    assert sorted(found.example_ids[6:]) == sorted(ids)
    assert found.adversary == "gradients"
    spread = float(inputs.max() - inputs.min())
    for row in range(6):  # as a non-member, against the reconstruction before it
        own = watched[row]
        assert -found.scores[row] == pytest.approx(
            float((own - inputs[row]).square().mean()) / spread**2, abs=1e-9
        )
        after = (row + 1) % 6
        null = found.scores[6:][found.example_ids[6:] == ids[after]]
        expected = float((own - inputs[after]).square().mean()) / spread**2
        assert -null[0] == pytest.approx(expected, rel=1e-5)
    found.to_parquet(tmp_path / "row.parquet")
    assert (tmp_path / "row.parquet").stat().st_mode & 0o777 == 0o600
    again = AttackScores.from_file(tmp_path / "row.parquet")
    assert set(again.details) == set(found.details)
    for name, values in found.details.items():
        np.testing.assert_array_equal(again.details[name], values)
    np.testing.assert_array_equal(again.scores, found.scores)


def test_a_seed_makes_it_reproducible():
    inputs, targets = digits(4)
    seen = Observation(max_grad_norm=0.1, noise_multiplier=1.0)
    one, two, other = (
        leak(mlp(), LOSS, inputs, targets, seen, FirstLayer(), seed=seed).scores
        for seed in (1, 1, None)
    )
    np.testing.assert_array_equal(one, two)
    assert (one != other).any()


def test_copies_of_an_example_are_no_candidates():
    inputs, targets = digits(4)
    copies = torch.cat([inputs, inputs]), torch.cat([targets, targets])
    found = leak(mlp(), LOSS, inputs, targets, SEEN, Informed(), candidates=copies)
    assert found.details["chance"] == pytest.approx(2 / 8)  # four candidates, each twice
    assert found.details["identified"][:4].all()


class Always:
    """Names the same picture, whatever it sees."""

    name, source, title = "always", "none", "always the same"
    knows_candidates, needs_labels = True, False

    def __init__(self, picture):
        self.picture = picture

    def invert(self, look):
        return self.picture.expand(look.shape), 1


@pytest.mark.parametrize("size", [1, 2, 5])
def test_always_naming_the_most_frequent_candidate_is_chance(size):
    (inputs, targets), copies = digits(3), torch.tensor([0, 1, 0, 0, 0, 2, 0, 1, 0, 0])
    seen = Observation("batch", batch_size=size, max_grad_norm=0.1, noise_multiplier=1e3)
    found = reconstruction_of(
        leak(mlp(), LOSS, inputs[copies], targets[copies], seen, Always(inputs[0]), seed=0)
    )
    assert found.identified == 0.7 <= found.ceiling
    assert found.chance == pytest.approx(min(1, 7 / (11 - size)))


def test_the_rest_of_a_batch_is_ruled_out_by_an_attacker_who_knows_it():
    inputs, targets = digits(8)
    seen = Observation("batch", batch_size=4, max_grad_norm=0.1, noise_multiplier=1e3)
    named = {}
    found = leak(
        mlp(), LOSS, inputs, targets, seen, Informed(), seed=0,
        watch=lambda place, picture: named.__setitem__(place, picture),
    )  # fmt: skip
    assert found.details["chance"] == pytest.approx(1 / 5)  # of 8, without 3
    for place, picture in named.items():
        batch = range(place - place % 4, place - place % 4 + 4)
        assert not any(torch.equal(picture, inputs[p]) for p in batch if p != place)


def test_whoever_knows_labels_names_among_fewer():
    inputs, targets = digits(40)
    found = leak(
        cpl_network(8), LOSS, inputs[:2], targets[:2], Observation(), LBFGS(1),
        candidates=(inputs, targets), knows_labels=True,
    )  # fmt: skip
    same = [int((targets == target).sum()) for target in targets[:2]]
    assert found.details["chance"][:2] == pytest.approx(1 / np.array(same))
    assert np.isnan(found.details["label_found"]).all()


def test_mu_of_an_update_is_how_far_the_example_moves_it():
    inputs, targets = digits(4)
    model = mlp()
    seen = Observation(
        "update", batch_size=2, local_steps=2, max_grad_norm=0.01, noise_multiplier=2.0
    )
    found = leak(model, LOSS, inputs, targets, seen, Informed())
    assert (found.details["mu"] > 0).all()
    assert (found.details["mu"] <= 2 / 2.0).all()  # two updates of length max_grad_norm at most


def test_informed_of_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Flatten(), nn.Linear(32, 3))
    tokens, targets = torch.randint(20, (8, 4)), torch.arange(8) % 3
    found = leak(model, LOSS, tokens, targets, SEEN, Informed())
    assert found.details["identified"][:8].all()
    with pytest.raises(InputError, match="floating-point inputs"):
        leak(model, LOSS, tokens, targets, SEEN, LBFGS())


@pytest.mark.parametrize("of", ["batch", "update"])
def test_informed_knows_the_rest_of_a_batch(of):
    inputs, targets = digits(12)
    seen = Observation(of, batch_size=3)
    found = leak(mlp(), LOSS, inputs, targets, seen, Informed())
    assert found.details["identified"][:12].all()


def test_of_what_is_sent_the_largest_are_kept():
    inputs, targets = digits(6)
    seen = Observation(share=0.1)
    found = leak(mlp(), LOSS, inputs, targets, seen, Informed())
    assert found.details["identified"][:6].all()


@pytest.mark.parametrize(
    ("n", "seen", "attack", "options", "message"),
    [
        (1, SEEN, FirstLayer(), {}, "no two whole batches"),
        (5, Observation("batch", batch_size=2), FirstLayer(), {}, "no two whole batches"),
        (18, Observation("batch", batch_size=9), LBFGS(1), {}, "more than 8 labels"),
        (4, Observation("batch", batch_size=2), LBFGS(1), {"knows_labels": False}, "inferred"),
    ],
)
def test_refusals(n, seen, attack, options, message):
    inputs, targets = digits(n)
    with pytest.raises(InputError, match=message):
        leak(mlp(), LOSS, inputs, targets, seen, attack, **options)


def test_an_example_needs_another_candidate_before_any_is_attacked():
    inputs, targets = digits(2)
    done = []
    for candidates in ((inputs[:1], targets[:1]), (inputs[1:], targets[1:])):
        with pytest.raises(InputError, match="two at least"):
            leak(
                mlp(), LOSS, inputs, targets, SEEN, Informed(), candidates=candidates,
                progress=lambda *parts: done.append(parts),
            )  # fmt: skip
    assert done == []


class Attention(nn.Module):
    """With dropout that no layer of its own shows."""

    def __init__(self):
        super().__init__()
        self.mix, self.last = nn.MultiheadAttention(8, 2, dropout=0.5), nn.Linear(64, 10)

    def forward(self, x):
        rows = x.squeeze(1).transpose(0, 1)
        return self.last(self.mix(rows, rows, rows)[0].transpose(0, 1).flatten(1))


def test_a_model_that_is_random_is_refused():
    torch.manual_seed(0)
    inputs, targets = digits(4)
    with pytest.raises(InputError, match="differs from one call to the next"):
        leak(Attention(), LOSS, inputs, targets, SEEN, Informed())
    leak(Attention().eval(), LOSS, inputs, targets, SEEN, Informed())


def test_a_label_that_nothing_infers_must_be_known():
    inputs, targets = digits(4)
    model = nn.Sequential(mlp(), nn.LayerNorm(10))
    with pytest.raises(InputError, match="knows_labels=True"):
        leak(model, LOSS, inputs, targets, SEEN, LBFGS(1))
