"""Each row of docs/reference/training-loops.md: what an account claims of a loop that does it."""

import copy
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from opacus import schedulers
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.func import functional_call, grad, vmap

from indpriv import EvidenceError, InputError, NormLog, account
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, make_run, mlp

PAGE = Path(__file__).parents[2] / "docs/reference/training-loops.md"
COPIES = 3


def steps_of(run, each=lambda i: None):
    for i, batch in enumerate(run.loader):
        run.step(*batch)
        each(i)


def with_scheduler(make):
    def loop(run):
        scheduler = make(run.optimizer)
        steps_of(run, lambda i: scheduler.step())

    return loop


def physical_batches(run):
    with BatchMemoryManager(
        data_loader=run.loader, max_physical_batch_size=5, optimizer=run.optimizer
    ) as loader:
        for batch in loader:
            run.step(*batch)


def accumulation(run):
    for i, (x, y) in enumerate(run.loader):
        run.criterion(run.model(x), y).backward()
        if i % 2:
            run.optimizer.step()
            run.optimizer.zero_grad()


def halves(run):
    for x, y in run.loader:
        run.optimizer.zero_grad()
        for half in (slice(0, len(x) // 2), slice(len(x) // 2, None)):
            run.criterion(run.model(x[half]), y[half]).backward()
        run.optimizer.step()


def without_empty_batches(run):
    for x, y in run.loader:
        if len(x):
            run.step(x, y)


def autocast(run):
    for x, y in run.loader:
        run.optimizer.zero_grad()
        with bfloat16():
            loss = run.criterion(run.model(x), y)
        loss.backward()
        run.optimizer.step()


def grad_scaler(run):
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for x, y in run.loader:
        run.optimizer.zero_grad()
        scaler.scale(run.criterion(run.model(x), y)).backward()
        scaler.step(run.optimizer)
        scaler.update()


def compiled(run):
    run.model.forward = torch.compile(run.model.forward, backend="eager")
    steps_of(run)


def averaged_weights(run):
    average = torch.optim.swa_utils.AveragedModel(run.model._module)
    steps_of(run, lambda i: average.update_parameters(run.model._module))


def evaluated(run):
    def evaluate(i):
        run.model.eval()
        with torch.no_grad():
            run.model(run.dataset.tensors[0])
        run.model.train()

    steps_of(run, evaluate)


def reloaded(run):
    steps_of(run, lambda i: run.model.load_state_dict(copy.deepcopy(run.model.state_dict())))


def frozen_on_the_way(run):
    steps_of(run, lambda i: run.model._module[0].weight.requires_grad_(i < 4))


def clipped_by_hand(run):
    for x, y in run.loader:
        run.optimizer.zero_grad()
        run.criterion(run.model(x), y).backward()
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        run.optimizer.step()


def with_loss(criterion):
    def loop(run):
        for x, y in run.loader:
            run.optimizer.zero_grad()
            criterion(run, run.model(x), y).backward()
            run.optimizer.step()

    return loop


def augmented(run):
    for x, y in run.loader:
        run.step(x + 0.3 * torch.randn_like(x), y)


def averaged_copies(run):
    for x, y in run.loader:
        run.optimizer.zero_grad()
        copies = x.repeat_interleave(COPIES, 0)
        copies = copies + 0.5 * torch.randn_like(copies)
        run.criterion(run.model(copies), y.repeat_interleave(COPIES)).backward()
        for p in run.model.parameters():
            p.grad_sample = p.grad_sample.view(len(x), COPIES, *p.shape).mean(dim=1)
        run.optimizer.step()


def own_gradients(run):
    module = run.model._module

    def loss(parameters, x, y):
        outputs = functional_call(module, parameters, (x[None],))
        return nn.functional.cross_entropy(outputs, y[None])

    for x, y in run.loader:
        run.optimizer.zero_grad()
        parameters = {name: p.detach() for name, p in module.named_parameters()}
        gradients = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        for name, p in module.named_parameters():
            p.grad_sample = gradients[name]
        run.optimizer.step()


def torch_options(mode):
    run = make_run(mode=mode)
    for group in run.optimizer.param_groups:
        group.update(momentum=0.9, weight_decay=1e-3)
    return run


def compiled_first(mode):
    return make_run(model=torch.compile(mlp(), backend="eager"), mode=mode)


def bfloat16():
    return torch.autocast("cpu", torch.bfloat16)


KNOWN = {"participation": "known"}
LOOPS = {
    "nothing else": (steps_of, {}),
    "learning rate scheduler": (
        with_scheduler(lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)),
        {},
    ),
    "noise scheduler of Opacus": (
        with_scheduler(lambda optimizer: schedulers.ExponentialNoise(optimizer, gamma=0.9)),
        {},
    ),
    "clipping norm scheduler of Opacus": (
        with_scheduler(lambda optimizer: schedulers.ExponentialGradClip(optimizer, gamma=0.9)),
        {},
    ),
    "BatchMemoryManager": (physical_batches, {}),
    "gradient accumulation, one step for two batches": (accumulation, {}),
    "one batch in two backward passes": (halves, {}),
    "empty batches skipped": (without_empty_batches, {}),
    "weight decay and momentum of the optimizer": (steps_of, {"make": torch_options}),
    "autocast to bfloat16, Recorder constructed under it": (autocast, {"under": bfloat16}),
    "autocast to bfloat16, Recorder constructed without it": (autocast, {}),
    "GradScaler": (grad_scaler, {}),
    "`torch.compile` before make_private": (steps_of, {"make": compiled_first}),
    "`torch.compile` after make_private": (compiled, {}),
    "moving average of the weights": (averaged_weights, {}),
    "evaluation between steps": (evaluated, {}),
    "weights saved and loaded again": (reloaded, {}),
    "parameters frozen on the way": (frozen_on_the_way, {}),
    "`clip_grad_norm_` between backward and step": (clipped_by_hand, {}),
    "loss with another reduction than in make_private": (
        with_loss(lambda run, outputs, y: nn.functional.cross_entropy(outputs, y, reduction="sum")),
        {},
    ),
    "label smoothing in training, but not in the Recorder": (
        with_loss(
            lambda run, outputs, y: nn.functional.cross_entropy(outputs, y, label_smoothing=0.1)
        ),
        {},
    ),
    "loss halved in training, but not in the Recorder": (
        with_loss(lambda run, outputs, y: run.criterion(outputs, y) * 0.5),
        {},
    ),
    "random augmentation": (augmented, {}),
    "random augmentation by the loop, known participation": (augmented, KNOWN),
    "several augmented copies, averaged before clipping, known participation": (
        averaged_copies,
        KNOWN,
    ),
    'gradients computed by the loop (`grad_sample_mode="no_op"`)': (
        own_gradients,
        {"make": lambda mode: make_run(mode="no_op")},
    ),
}
ROWS = [
    [cell.strip() for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text("utf-8").splitlines()
    if re.match(r"\| (?!in the loop|---)", line)
]


def is_slow(title, mode):
    """Other tests know most of the plain loops; of the rest, one mode is quick enough."""
    quick = ("under it", "known participation", "no_op", "halved", "frozen")
    return mode == "ghost" or not any(word in title for word in quick)


def test_the_page_has_each_loop():
    assert [row[0] for row in ROWS] == list(LOOPS)


@pytest.mark.parametrize(
    ("title", "mode", "claim"),
    [
        pytest.param(row[0], mode, row[i], marks=[pytest.mark.slow] * is_slow(row[0], mode))
        for row in ROWS
        for i, mode in ((1, "hooks"), (2, "ghost"))
        if row[i]
    ],
)
def test_a_loop_has_the_claim_of_the_page(title, mode, claim, tmp_path):
    loop, options = LOOPS[title]
    assert claim_of(loop, mode, tmp_path / "run", **options) == claim


def plain(mode):
    return make_run(mode=mode)


def claim_of(loop, mode, run_dir, *, make=plain, under=nullcontext, participation=None):
    run = make(mode)
    with under():
        recorder = Recorder(
            run_dir,
            dataset=run.dataset,
            loss_fn=PER_EXAMPLE,
            every=1,
            batch_norms=participation == "known",
        )
    torch.manual_seed(2**40 + 1)
    run.model.train()
    try:
        with recorder.attach(run.model, run.optimizer, run.loader):
            loop(run)
    except (InputError, EvidenceError):
        return "refused"
    except (ValueError, RuntimeError) as error:  # Opacus's and torch's own
        assert any(said in str(error) for said in ("accumulation", "outputs must be", "stack"))
        return "refused"
    asked = {"participation": participation} if participation else {}
    return account(NormLog.open(run_dir), delta=1e-3, **asked).claim
