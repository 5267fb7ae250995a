"""The attacker of the analysis in real Opacus runs, beside a slow reference and its own prediction."""

import numpy as np
import pytest
import torch
from scipy import stats

from indpriv import AttackScores, InputError, PrivacyFilter
from indpriv.norm_log.run_files import WHITE_BOX
from indpriv.recording import Recorder, WhiteBox
from runs import PER_EXAMPLE, blobs, failed, make_run, mlp, record


def one_by_one(plain, module, inputs, targets):
    """Flat gradients (n, parameters) of single examples, by autograd on a plain copy."""
    plain.load_state_dict(module.state_dict())
    rows = []
    for x, y in zip(inputs, targets, strict=True):
        plain.zero_grad()
        PER_EXAMPLE(plain(x[None]), y[None]).sum().backward()
        rows.append(torch.cat([p.grad.flatten() for p in plain.parameters()]))
    return torch.stack(rows).double()


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_scores_equal_a_slow_reference(tmp_path, mode):
    """Step by step: the noisy sum less every other example, projected on one gradient."""
    copied = mlp()
    torch.manual_seed(2**40 + 4)
    run = make_run(mode=mode, max_grad_norm=0.4, noise_multiplier=0.8)
    test_set = torch.utils.data.TensorDataset(*(t + 0 for t in blobs(140).tensors))
    inputs, targets = run.dataset.tensors
    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every="once",
        test_set=test_set, attack=WhiteBox(140),
    )  # fmt: skip
    expected, q, sigma, clip = np.zeros(120), 0.1, 0.8, 0.4
    with recorder.attach(run.model, run.optimizer, run.loader):
        scale = run.optimizer.scale_grad

        def score() -> None:
            gradients = one_by_one(copied, run.model._module, inputs, targets)
            norms = gradients.norm(dim=1)
            clipped = gradients * (clip / (norms + 1e-6)).clamp(max=1)[:, None]
            noisy = torch.cat([p.grad.flatten() for p in run.optimizer.params]).double()
            for i in range(120):
                others = sum(clipped[j] for j in batches[-1] if j != i)
                left, mine = (noisy - others).numpy(), clipped[i].numpy()
                out = stats.norm.logpdf(left, 0, sigma * clip).sum()
                inside = stats.norm.logpdf(left, mine, sigma * clip).sum()
                expected[i] += np.logaddexp(np.log(1 - q), np.log(q) + inside - out)
            scale()

        batches: list[list[int]] = []
        sampler = run.loader.batch_sampler
        draw = type(sampler).__iter__
        type(sampler).__iter__ = lambda self: (batches.append(b) or b for b in draw(self))
        run.optimizer.scale_grad = score
        run.train(1)
    scores = AttackScores.from_file(tmp_path / "run" / WHITE_BOX)
    assert scores.adversary == "full"
    assert scores.example_ids.tolist() == [*range(120), *range(140)]
    assert scores.member.sum() == 120
    np.testing.assert_allclose(scores.scores[scores.member], expected, atol=2e-4)
    assert not failed(tmp_path / "run") - {"seeds", "random numbers"}


def test_training_is_the_same_with_the_attack(tmp_path):
    finals = []
    for attack in (None, WhiteBox(20)):
        torch.manual_seed(2**40 + 1)
        run = make_run()
        torch.manual_seed(2**40 + 1)
        record(run, tmp_path / str(attack is None), epochs=1, attack=attack, test_set=blobs(40))
        finals.append([p.detach().clone() for p in run.model.parameters()])
    for one, other in zip(*finals, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"individual_clipping": True}, "clipped at max_grad_norm"),
        ({"privacy_filter": PrivacyFilter(order=8.0, rdp_cap=1.0)}, "clipped at max_grad_norm"),
    ],
)
def test_thresholds_of_their_own_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        record(make_run(), tmp_path / "run", attack=WhiteBox(10), **options)


def test_a_random_forward_pass_is_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(6, 2))
    with pytest.raises(InputError, match="can be computed again"):
        record(make_run(model=model), tmp_path / "run", attack=WhiteBox(10))


def test_gradients_are_taken_in_the_precision_of_training(tmp_path):
    run = make_run()
    attack = WhiteBox(10)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        recorder = Recorder(
            tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every="once", attack=attack
        )
    with recorder.attach(run.model, run.optimizer, run.loader):
        assert recorder._started._passes._model.compute_dtype == torch.bfloat16
