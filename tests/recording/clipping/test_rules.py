"""Rules of clipping beside Opacus's own, against gradients of one example at a time."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from opacus.optimizers import DPOptimizer
from torch import nn

import indpriv
from audits.training.largest_norm import LargestNormNoise
from indpriv.accountant.rdp import compute_rdp
from indpriv.analysis.guarantee import VOID, guarantee_of
from indpriv.errors import InputError
from indpriv.norm_log.evidence import LARGEST_NORM
from indpriv.norm_log.fields import StepSetting
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import AdaClip, QuantileClipping, Recorder
from tests.runs import PER_EXAMPLE, make_run, mlp

BATCH = 20


def optimizer_of(rule, n_parameters=2, noise_multiplier=1.0, max_grad_norm=1.0, **options):
    """A rule for one vector of parameters, whose gradients are given."""
    parameter = nn.Parameter(torch.zeros(n_parameters, dtype=torch.float64))
    plain = DPOptimizer(
        torch.optim.SGD([parameter], lr=0.0),
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        expected_batch_size=BATCH,
    )
    return rule.of(plain, **options), parameter


def release(optimizer, parameter, gradients):
    """The clipped sum, and the centred number of unclipped gradients, before noise."""
    optimizer._centred = 0.0
    parameter.grad_sample, parameter.summed_grad = torch.tensor(gradients), None
    optimizer.clip_and_accumulate()
    return parameter.summed_grad.numpy().copy(), optimizer._centred


def gradients_of(module, dataset):
    """(n, n_parameters) by autograd, one example at a time."""
    found = []
    for inputs, target in dataset:
        loss = PER_EXAMPLE(module(inputs[None]), target[None]).sum()
        parts = torch.autograd.grad(loss, list(module.parameters()))
        found.append(torch.cat([part.ravel().double() for part in parts]))
    return torch.stack(found)


@given(
    norm=st.sampled_from([0.0, 0.3, 0.9, 1.0, 3.0]),
    sigma=st.floats(0.6, 4.0),
    count_noise=st.floats(0.51, 3.0).map(lambda x: x * 2),
    rate=st.sampled_from([0.05, 0.4, 1.0]),
    order=st.sampled_from([1.5, 2.0, 5.0]),
)
@settings(max_examples=30, derandomize=True)
def test_the_joint_release_of_neighbours_is_within_the_account(
    norm, sigma, count_noise, rate, order
):
    """Renyi divergence of sum and number together, in two dimensions, by a grid."""
    if sigma >= 2 * count_noise:
        return
    optimizer, parameter = optimizer_of(
        QuantileClipping, noise_multiplier=sigma, count_noise=count_noise
    )
    others = [[0.4, 0.2], [3.0, 1.0]]
    without = release(optimizer, parameter, others)
    with_one = release(optimizer, parameter, [*others, [0.0, norm]])
    shift = np.array(
        [
            np.linalg.norm(with_one[0] - without[0]) / optimizer.noise_std,
            (with_one[1] - without[1]) / count_noise,
        ]
    )
    contribution = optimizer.contributions(np.array([norm]), StepSetting(sigma, 1.0, rate))
    assert 0 < contribution[0] <= 1 + 1e-12
    np.testing.assert_allclose(np.linalg.norm(shift) * sigma, contribution[0], rtol=2e-6)
    axis = np.linspace(-9 - order * shift.max(), 9 + order * shift.max(), 250)
    squares = (axis[:, None] ** 2 + axis[None] ** 2) / 2
    ratio = (
        1
        - rate
        + rate * np.exp(axis[:, None] * shift[0] + axis[None] * shift[1] - shift @ shift / 2)
    )
    cell = (axis[1] - axis[0]) ** 2 / (2 * np.pi)
    account = compute_rdp(
        sample_rate=rate,
        noise_multiplier=sigma,
        relative_norms=np.minimum(contribution, 1.0),
        orders=[order],
    )[0, 0]
    for power in (order, 1 - order):  # with over without, and without over with
        exact = np.log((np.exp(-squares) * ratio**power).sum() * cell) / (order - 1)
        assert exact <= account * (1 + 1e-5) + 1e-12
    assert account > 0


VECTORS = arrays(np.float64, st.tuples(st.integers(1, 8), st.just(2)), elements=st.floats(-3, 3))


@given(
    gradients=VECTORS, clip=st.floats(0.1, 4.0), rule=st.sampled_from([QuantileClipping, AdaClip])
)
@settings(max_examples=40, derandomize=True)
def test_what_is_released_is_the_sum_of_what_examples_contribute(gradients, clip, rule):
    optimizer, parameter = optimizer_of(rule, max_grad_norm=clip)
    found, centred = release(optimizer, parameter, gradients)
    if rule is AdaClip:  # the first widths are those of max_grad_norm in all coordinates
        (centre, factor), *_ = optimizer.transforms()
        gradients = (gradients - centre.numpy()) * factor.numpy()
    lengths = np.linalg.norm(gradients, axis=1)
    each = gradients * np.minimum(1, clip / np.maximum(lengths, 1e-30))[:, None]
    np.testing.assert_allclose(found, each.sum(0), atol=1e-5 * len(each) * clip)
    of = optimizer.contributions(lengths, StepSetting(1.0, clip, 0.1)) / clip
    if rule is QuantileClipping:
        assert centred == (lengths + 1e-6 <= clip).sum() - len(each) / 2
        together = np.linalg.norm(each, axis=1) / optimizer.noise_std
        np.testing.assert_allclose(of, np.hypot(together, 0.5 / optimizer.count_noise))
        assert (of <= 1 + 1e-12).all()


def test_the_clipping_norm_follows_the_share_of_unclipped_gradients():
    optimizer, parameter = optimizer_of(
        QuantileClipping,
        noise_multiplier=1e-7,
        quantile=0.8,
        rate=0.5,
        count_noise=1e-6,
    )
    for count, unclipped in ((20, 5), (30, 30), (0, 0)):  # the size of the batch is not divided by
        clip = optimizer.max_grad_norm
        gradients = [[0.1 * clip, 0.0]] * unclipped + [[0.0, 2.0 * clip]] * (count - unclipped)
        parameter.grad_sample, parameter.summed_grad = torch.tensor(gradients).reshape(-1, 2), None
        optimizer.pre_step()
        share = 0.5 + (unclipped - count / 2) / BATCH
        assert optimizer.max_grad_norm == pytest.approx(clip * np.exp(-0.5 * (share - 0.8)), 1e-5)


def test_the_noise_of_the_number_is_taken_from_that_of_the_gradients():
    optimizer, _ = optimizer_of(QuantileClipping, noise_multiplier=1.0, count_noise=2.0)
    assert optimizer.noise_std == pytest.approx((1 - 1 / 16) ** -0.5)
    with pytest.raises(InputError, match="twice the noise"):
        optimizer_of(QuantileClipping, noise_multiplier=1.0, count_noise=0.5)
    with pytest.raises(InputError, match="is not in"):
        optimizer_of(QuantileClipping, quantile=1.0)


def recorded(tmp_path, rule, steps=4, **options):
    """A run with a rule: its log, and contributions by autograd, (n_steps, n)."""
    run = make_run(batch_size=30)
    run.optimizer = optimizer = rule.of(run.optimizer, **options)
    recorder = Recorder(
        tmp_path / "run",
        dataset=run.dataset,
        loss_fn=PER_EXAMPLE,
        every=1,
        rounding=0,
        batch_norms=True,
    )
    expected, plain = [], mlp()
    with recorder.attach(run.model, optimizer, run.loader):
        for _ in range(-(-steps // len(run.loader))):
            for inputs, targets in run.loader:
                plain.load_state_dict(run.model._module.state_dict())
                clip, gradients = float(optimizer.max_grad_norm), gradients_of(plain, run.dataset)
                if rule is AdaClip:
                    parts = [(c.ravel(), f.expand_as(c).ravel()) for c, f in optimizer.transforms()]
                    centre, factor = (torch.cat(side).double() for side in zip(*parts, strict=True))
                    gradients = (gradients - centre) * factor
                share = gradients.norm(dim=1).clamp(max=clip).numpy() / clip
                if rule is QuantileClipping:
                    sigma = optimizer.noise_multiplier
                    alone = optimizer.noise_std / clip
                    share = sigma * np.sqrt(
                        (share / alone) ** 2 + 1 / (4 * optimizer.count_noise**2)
                    )
                expected.append(share * clip)
                run.step(inputs, targets)
    return indpriv.NormLog.open(tmp_path / "run"), np.array(expected)


@pytest.mark.parametrize("rule", [QuantileClipping, AdaClip])
def test_the_log_holds_contributions_in_every_step(rule, tmp_path):
    """In full records, and in those of batches as training clipped them."""
    log, expected = recorded(tmp_path, rule)
    clip = log.settings.max_grad_norm[:, None]
    found = log.read()
    np.testing.assert_allclose(np.minimum(found, clip), expected, rtol=2e-4)
    assert (len(np.unique(clip)) > 1) == (rule is QuantileClipping)
    assert (expected < 0.99 * clip).any()
    entries = log.batch_norms.read(0, log.n_examples)
    of_batches = np.minimum(entries.norm, clip[entries.step, 0])
    np.testing.assert_allclose(of_batches, expected[entries.step, entries.position], rtol=2e-4)
    assert [c.title for c in verify(open_run(tmp_path / "run")) if c.status == "failed"] == []
    for participation in ("secret", "known"):
        table = indpriv.account(log, delta=1e-5, participation=participation)
        assert table.claim == "exact"
        assert (table.epsilon <= table.worst_case_epsilon).all()


def test_adaclip_undoes_what_it_did_before_clipping():
    """Without noise and without clipping, the update is the mean gradient of the batch."""
    optimizer, parameter = optimizer_of(AdaClip, noise_multiplier=1e-9, max_grad_norm=1e3)
    gradients = torch.linspace(-1, 1, 2 * BATCH, dtype=torch.float64).reshape(BATCH, 2) + 0.3
    for _ in range(3):  # means and widths move in between
        parameter.grad_sample, parameter.summed_grad = gradients.clone(), None
        scales = [float(factor.max()) for _, factor in optimizer.transforms()]
        optimizer.max_grad_norm = 1e3 * max(1.0, *scales)
        parameter.grad_sample = gradients.clone()
        optimizer.pre_step()
        np.testing.assert_allclose(parameter.grad.numpy(), gradients.mean(0).numpy(), rtol=1e-6)
    assert float(optimizer.transforms()[0][0].abs().sum()) > 0


def test_noise_of_the_largest_norm_tells_who_took_part():
    """From the size of one update's noise alone: TPR - FPR above 0.9."""
    torch.manual_seed(2**40 + 3)
    size, rates = 2000, []
    others = torch.full((20, size), 0.5 / size**0.5)
    longest = torch.full((1, size), 0.8 / size**0.5)
    for gradients in (torch.cat([others, longest]), others):
        guesses = []
        for _ in range(40):
            optimizer, parameter = optimizer_of(LargestNormNoise, size, noise_multiplier=6.0)
            parameter.grad_sample = gradients.double()
            optimizer.pre_step()
            spread = float(parameter.grad.std()) * BATCH
            guesses.append(spread > 6.0 * 0.65)
        rates.append(np.mean(guesses))
    assert rates[0] - rates[1] > 0.9


def test_a_run_with_noise_of_the_largest_norm_is_void(tmp_path):
    log, _ = recorded(tmp_path, LargestNormNoise)
    run = open_run(tmp_path / "run")
    assert LARGEST_NORM in log.caveats
    assert LARGEST_NORM in log.known_caveats
    assert run.no_privacy == LARGEST_NORM
    largest = log.read().max()
    assert largest > 0
    table = indpriv.account(log, delta=1e-5)
    assert table.claim == "estimate"
    found = guarantee_of(table, verify(run), {"no_privacy": run.no_privacy})
    assert (found.status, found.reasons) == (VOID, (LARGEST_NORM,))
    assert LARGEST_NORM in found.statement


def test_the_log_holds_the_realised_noise_of_the_largest_norm(tmp_path):
    run = make_run(batch_size=30, max_grad_norm=50.0)
    run.optimizer = LargestNormNoise.of(run.optimizer)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    largest, plain = [], mlp()
    with recorder.attach(run.model, run.optimizer, run.loader):
        for inputs, targets in run.loader:
            pairs = list(zip(inputs, targets, strict=True))
            plain.load_state_dict(run.model._module.state_dict())
            largest.append(float(gradients_of(plain, pairs).norm(dim=1).max()))
            run.step(inputs, targets)
            assert run.optimizer.noise_multiplier == 1.0
    log = indpriv.NormLog.open(tmp_path / "run")
    np.testing.assert_allclose(log.settings.noise_multiplier, np.array(largest) / 50, rtol=1e-4)
    titles = [c.title for c in verify(open_run(tmp_path / "run")) if c.status == "failed"]
    assert titles == ["norm pass"]


def test_rules_take_the_place_of_a_plain_optimizer_only():
    run = make_run(clipping="per_layer", max_grad_norm=[1.0] * 4)
    with pytest.raises(InputError, match="is a DPPerLayerOptimizer"):
        AdaClip.of(run.optimizer)


def test_widths_of_adaclip_shrink_with_batch_means():
    run = make_run(batch_size=60, noise_multiplier=2.0, learning_rate=0.1)
    rule = AdaClip.of(run.optimizer)
    run.optimizer, widths = rule, []
    for _ in range(12):
        widths.append(float(sum(b.sum() for b in rule._scales())))
        run.train(1)
    assert widths[-1] < 0.5 * widths[0]


@pytest.mark.parametrize(
    "odd", [{"quantile": "0.5"}, {"quantile": 50}, {"rate": 0}, {"count_noise": 0}]
)
def test_numbers_out_of_range_are_refused_by_name(odd):
    (name,) = odd
    with pytest.raises(InputError, match=rf"{name}=.* is not in \(0, "):
        QuantileClipping.of(make_run().optimizer, **odd)
