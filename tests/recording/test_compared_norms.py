"""Norms that training clips, compared with those that the Recorder takes."""

from contextlib import ExitStack

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import indpriv
from indpriv import NormLog
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, blobs, failed, make_run, mlp, record


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_norms_in_training_are_the_recorded_ones(mode, workers, tmp_path):
    record(make_run(mode=mode, workers=workers), tmp_path / "run", every=1)
    check = next(
        check for check in verify(open_run(tmp_path / "run")) if check.title == "norms in training"
    )
    assert check.status == "passed"
    assert int(check.detail.split()[0]) > 50


def larger(run, run_dir, loop=None, dataset=None, every=1):
    """Whether the recorder finds that training's norms were larger than its own."""
    recorder = Recorder(run_dir, dataset=dataset or run.dataset, loss_fn=PER_EXAMPLE, every=every)
    with recorder.attach(run.model, run.optimizer, run.loader):
        (loop or run.train)()
    caveats = NormLog.open(run_dir).caveats
    return "norms in training" in failed(run_dir) and any(
        "larger than recorded" in caveat for caveat in caveats
    )


def test_another_loss_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    run.criterion = lambda outputs, targets: 3 * nn.functional.cross_entropy(outputs, targets)
    assert larger(run, tmp_path / "run")


def test_another_reduction_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    run.criterion = nn.CrossEntropyLoss(reduction="sum")
    assert larger(run, tmp_path / "run")


def test_another_data_set_of_the_same_size_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    inputs, targets = run.dataset.tensors
    assert larger(run, tmp_path / "run", dataset=TensorDataset(0.1 * inputs, targets))


class Augmented(Dataset):
    def __len__(self):
        return 120

    def __getitem__(self, index):
        inputs, targets = blobs().tensors
        return inputs[index] + torch.randn(6), targets[index]


def test_augmentation_is_found(tmp_path):
    """It is no fault, but the recorded norms are of other views than training's."""
    log = record(make_run(Augmented(), max_grad_norm=5.0), tmp_path / "run")
    assert failed(tmp_path / "run") == {"norm pass"}
    assert any("items of the data set are random" in caveat for caveat in log.caveats)


def test_parameters_changed_between_steps_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)

    def loop():
        for batch in run.loader:
            run.step(*batch)
            with torch.no_grad():
                for p in run.model.parameters():
                    p.mul_(1.3)

    assert larger(run, tmp_path / "run", loop)


def test_lower_precision_in_training_is_found(tmp_path):
    run = make_run(max_grad_norm=5.0)

    def rounded(outputs, targets):  # as autocast rounds what passes through a layer
        return nn.functional.cross_entropy(
            outputs + (outputs.bfloat16() - outputs).detach(), targets
        )

    run.criterion = rounded
    assert larger(run, tmp_path / "run")


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ghost"])
@pytest.mark.parametrize(("attaching", "training"), [(False, True), (True, False), (True, True)])
def test_autocast_that_only_training_has_is_found(attaching, training, mode, tmp_path):
    """Attached under it, the norms have slack for half precision, which covers training in any."""
    run = make_run(mode=mode, max_grad_norm=5.0)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with ExitStack() as block:
        with torch.autocast("cpu", torch.bfloat16, enabled=attaching):
            block.enter_context(recorder.attach(run.model, run.optimizer, run.loader))
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=training):
                loss = run.criterion(run.model(inputs), targets)
            loss.backward()
            run.optimizer.step()
    found = training and not attaching
    assert ("norms in training" in failed(tmp_path / "run")) == found
    claim = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim
    assert claim == ("estimate" if found else "exact")


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_norms_that_a_hook_of_training_makes_smaller_are_no_exact_records(share, tmp_path):
    run = make_run(max_grad_norm=5.0)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.model._module[1].register_forward_hook(  # which passes on a share of the gradient
            lambda _, __, outputs: share * outputs + (1 - share) * outputs.detach()
        )
        run.train()
    found = failed(tmp_path / "run")
    claim = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim
    if share < 1:
        assert (found, claim) == ({"norm pass, precision"}, "estimate")
    else:
        assert (found, claim) == (set(), "exact")


def test_why_norms_are_not_taken_the_fastest_way_is_told(tmp_path):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, inputs):
            return inputs * self.weight

    scale = Scale()  # used twice, and no layer that has a formula
    twice = nn.Sequential(scale, nn.Tanh(), scale, nn.Linear(6, 2))
    details = {}
    for name, model in (("plain", mlp()), ("twice", twice)):
        run = make_run(model=model)
        recorder = Recorder(tmp_path / name, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=10)
        with recorder.attach(run.model, run.optimizer, run.loader):
            run.train(1)
        details[name] = next(
            check.detail
            for check in verify(open_run(tmp_path / name))
            if check.title == "norm pass"
        )
    assert details["plain"] == "layerwise, compared with one example at a time"
    assert "not layerwise, which is faster: " in details["twice"]
    assert "Scale shares a parameter or is used several times" in details["twice"]


@pytest.mark.parametrize(
    ("factor", "max_grad_norm", "found"), [(0.5, 0.3, True), (0.5, 50.0, False), (1.0, 0.3, False)]
)
def test_norms_that_ghost_mode_takes_too_small_are_found(factor, max_grad_norm, found, tmp_path):
    """Gradients below max_grad_norm are not scaled, whatever their norm is taken for."""
    run = make_run(mode="ghost", max_grad_norm=max_grad_norm, noise_multiplier=0.01)
    plain = run.model.get_norm_sample
    run.model.get_norm_sample = lambda: factor * plain()
    record(run, tmp_path / "run")
    wrong = {"training repeated"} if factor != 1 else set()
    assert failed(tmp_path / "run") == wrong | ({"clipping"} if found else set())
    reason = indpriv.account(NormLog.open(tmp_path / "run"), delta=1e-5).claim_reason
    assert ("Ghost mode clipped" in reason) == found


def test_batches_of_another_size_than_drawn_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    other = DataLoader(run.dataset, batch_size=13)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1)
    with recorder.attach(run.model, run.optimizer, run.loader):
        for _, batch in zip(run.loader, other, strict=False):
            run.step(*batch)
    assert "a batch for every step" in failed(tmp_path / "run")


def test_other_batches_of_the_size_drawn_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    inputs, targets = run.dataset.tensors

    def loop():
        for drawn, _ in run.loader:
            run.step(inputs[: len(drawn)], targets[: len(drawn)])

    assert larger(run, tmp_path / "run", loop)
