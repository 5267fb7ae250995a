"""Other faults of a training loop: refused, or the account is an estimate that says why."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import indpriv
from indpriv import EvidenceError, InputError, NormLog, PrivacyFilter
from indpriv._files import JournalWriter, read_journal
from indpriv.cli import run as command_line
from indpriv.norm_log.journal_state import read_state
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder
from runs import PER_EXAMPLE, failed, make_run


def record(run, run_dir, loop=None, **options):
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, **{"every": 2} | options)
    with recorder.attach(run.model, run.optimizer, run.loader):
        (loop or run.train)()
    return NormLog.open(run_dir)


def test_gradients_scaled_for_mixed_precision_are_found(tmp_path):
    run = make_run(max_grad_norm=5.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loop():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            scaler.scale(run.criterion(run.model(inputs), targets)).backward()
            run.optimizer.step()

    record(run, tmp_path / "run", loop)
    assert "norms in training" in failed(tmp_path / "run")


def test_steps_that_a_scaler_skips_are_found(tmp_path):
    run = make_run()

    def loop():
        for number, batch in enumerate(run.loader):
            if number != 4:  # as GradScaler.step does where a gradient overflowed
                run.step(*batch)

    log = record(run, tmp_path / "run", loop)
    assert any("never became a step" in caveat for caveat in log.caveats)


@pytest.mark.parametrize("smallest", [0, 13])
def test_batches_that_the_loop_chooses_are_found(smallest, tmp_path):
    run = make_run()

    def loop():
        for _ in range(40):
            inputs, targets = next(iter(run.loader))
            if len(inputs) >= smallest:
                run.step(inputs, targets)

    record(run, tmp_path / "run", loop)
    assert failed(tmp_path / "run") == ({"a batch for every step"} if smallest else set())


def test_a_look_at_a_batch_in_each_epoch_is_no_fault(tmp_path):
    run = make_run()

    def loop():
        for _ in range(3):
            next(iter(run.loader))
            run.train(1)

    assert record(run, tmp_path / "run", loop).caveats == ()


@pytest.mark.parametrize("mixed", [True, False])
def test_examples_mixed_in_training_are_told_also_where_all_are_clipped(mixed, tmp_path):
    run = make_run(max_grad_norm=0.001)

    def loop():
        for inputs, targets in run.loader:
            partners = torch.randperm(len(inputs)) if mixed else slice(None)
            run.step((inputs + inputs[partners]) / 2, targets)

    record(run, tmp_path / "run", loop, every=1)
    check = next(
        check for check in verify(open_run(tmp_path / "run")) if check.title == "norms in training"
    )
    assert check.status == ("not checked" if mixed else "passed")
    assert ("mixup" in check.detail) == mixed


def test_accumulated_batches_are_found_where_opacus_lets_them_pass(tmp_path):
    run = make_run(mode="ghost")

    def loop():
        batches = iter(run.loader)
        for first, second in zip(batches, batches, strict=False):
            run.optimizer.zero_grad()
            for inputs, targets in (first, second):
                run.criterion(run.model(inputs), targets).backward()
            run.optimizer.step()

    record(run, tmp_path / "run", loop)
    assert "a batch for every step" in failed(tmp_path / "run")


def test_parameters_frozen_while_training_stop_it(tmp_path):
    run = make_run()

    def loop():
        for number, batch in enumerate(run.loader):
            run.step(*batch)
            if number == 4:
                next(iter(run.model.parameters())).requires_grad_(False)

    with pytest.raises(InputError, match=r"were frozen during the run: \S*0.weight"):
        record(run, tmp_path / "run", loop)
    assert read_state(tmp_path / "run").total_steps == 5  # nothing that was recorded is lost


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_a_gradient_that_freezing_keeps_from_clipping_and_noise_stops_the_update(mode, tmp_path):
    run = make_run(mode=mode)
    first = next(iter(run.model.parameters()))
    before = first.detach().clone()

    def loop():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            run.criterion(run.model(inputs), targets).backward()
            first.requires_grad_(False)
            run.optimizer.step()

    with pytest.raises(
        (InputError, EvidenceError), match=r"were frozen during the run|gradients were changed"
    ):
        record(run, tmp_path / "run", loop, every="once")
    assert torch.equal(first, before)


def test_parameters_unfrozen_while_training_stop_it(tmp_path):
    run = make_run()
    first = next(iter(run.model.parameters()))
    first.requires_grad_(False)

    def loop():
        first.requires_grad_(True)
        run.train(1)

    with pytest.raises(InputError, match=r"were unfrozen during the run: \S*0.weight"):
        record(run, tmp_path / "run", loop, every="once", individual_clipping=True)


def test_noise_is_that_which_was_added_whatever_a_hook_sets_next(tmp_path):
    run = make_run()
    accountant = run.optimizer.step_hook

    def hook(optimizer):
        accountant(optimizer)
        optimizer.noise_multiplier *= 1.25

    run.optimizer.attach_step_hook(hook)
    law = {"public_settings": lambda step: {"noise_multiplier": 1.25**step}}
    log = record(run, tmp_path / "run", **law)
    assert log.settings.noise_multiplier[:3].tolist() == [1.0, 1.25, 1.5625]
    assert log.caveats == ()


def test_noise_that_is_replaced_stops_training(tmp_path):
    run = make_run()

    def loop():
        run.optimizer.add_noise = lambda: None
        run.train(1)

    with pytest.raises(EvidenceError, match="add_noise was replaced"):
        record(run, tmp_path / "run", loop)


def test_parameters_that_the_optimizer_does_not_train_are_refused(tmp_path):
    run = make_run()
    group = run.optimizer.original_optimizer.param_groups[0]
    group["params"] = group["params"][2:]
    with pytest.raises(
        InputError, match=r"does not train exactly the model's trainable parameters"
    ):
        record(run, tmp_path / "run")
    assert run.engine.accountant.history == []


class Remembers(nn.Module):
    """Keeps a running mean of what it saw, or merely counts the batches."""

    def __init__(self, of_data):
        super().__init__()
        self.layer, self._of_data = nn.Linear(6, 2), of_data
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, inputs):
        if self.training and len(inputs):
            self.seen.mul_(0.9).add_(inputs.mean(0) if self._of_data else 1.0)
        return self.layer(inputs)


def test_what_a_buffer_keeps_of_the_examples_is_refused(tmp_path):
    """Nothing clips it or adds noise to it, and it is in every checkpoint."""
    run = make_run(model=Remembers(of_data=True))
    with pytest.raises(InputError, match="changes the buffer 'seen' depending on its examples"):
        record(run, tmp_path / "run")
    assert record(make_run(model=Remembers(of_data=False)), tmp_path / "counts").caveats == ()


class KeepsInputs(nn.Module):
    """Adds a little of the last input it saw to the next output, or only counts its passes."""

    def __init__(self, of_data):
        super().__init__()
        self.layer, self._of_data, self.kept = nn.Linear(6, 2), of_data, []

    def forward(self, inputs):
        outputs = self.layer(inputs) + 1e-4 * sum(part.mean() for part in self.kept[-1:])
        if len(inputs):
            self.kept.append(inputs.detach() if self._of_data else torch.ones(1))
        return outputs


def test_what_a_list_keeps_of_the_examples_is_refused(tmp_path):
    run = make_run(model=KeepsInputs(of_data=True))
    with pytest.raises(InputError, match="depend on examples that it has seen before"):
        record(run, tmp_path / "run")


@pytest.mark.parametrize(("excess", "counted"), [(5e-5, 0.0), (5e-4, 1e-3), (4e-3, 8e-3)])
def test_clipping_by_norms_that_sums_make_too_small_counts_as_less_noise(
    excess, counted, tmp_path, monkeypatch
):
    monkeypatch.setattr("indpriv.recording.opacus.gradients.clip_excess", lambda _: excess)
    log = record(make_run(noise_multiplier=1.5), tmp_path / "run", every=1)
    check = next(check for check in verify(open_run(tmp_path / "run")) if check.key == "clipping")
    assert check.status == "passed"
    assert ("for gradients as long as this model's" in check.detail) == (counted > 0)
    assert log.settings.noise_multiplier == pytest.approx(1.5 / (1 + counted))
    assert indpriv.account(log, delta=1e-5).claim == "exact"
    exact = replace(
        log, settings=replace(log.settings, noise_multiplier=np.full(log.total_steps, 1.5))
    )
    larger = indpriv.account(log, delta=1e-5).worst_case_epsilon
    assert (larger > indpriv.account(exact, delta=1e-5).worst_case_epsilon) == (counted > 0)


@pytest.mark.parametrize("outside", [True, False])
def test_parameters_that_change_outside_the_optimizer_are_told(outside, tmp_path):
    run = make_run()

    def loop():
        for inputs, targets in run.loader:
            run.step(inputs, targets)
            if outside:  # as a second optimizer without DP would
                with torch.no_grad():
                    next(iter(run.model.parameters())).sub_(inputs.sum(0))

    record(run, tmp_path / "run", loop, every="once", individual_clipping=True)
    told = [
        check.detail for check in verify(open_run(tmp_path / "run")) if check.title == "parameters"
    ]
    assert [detail.split(" had")[0] for detail in told] == (
        ["before 9 of 10 steps something other than the optimizer"] if outside else []
    )


@pytest.mark.parametrize("half", [True, False])
def test_clipping_by_norms_in_half_precision_is_told(half, tmp_path):
    run = make_run()

    def loop():
        for inputs, targets in run.loader:
            run.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                loss = run.criterion(run.model(inputs), targets)
            loss.backward()
            run.optimizer.step()

    log = record(run, tmp_path / "run", loop)
    told = [
        check
        for check in verify(open_run(tmp_path / "run"))
        if check.title == "clipping, precision"
    ]
    assert [check.status for check in told] == ["passed"] * half
    assert log.settings.noise_multiplier == pytest.approx(1.0 / (1 + half * 1.5 * 2**-7))
    assert all("by up to 1.2 %" in check.detail for check in told)


@pytest.mark.parametrize("count", ["gradients", "participations", "repeated_draws"])
def test_counts_that_are_missing_are_refused(count, tmp_path, capsys):
    """A check that cannot be made must not pass."""
    record(make_run(), tmp_path / "run")
    entries, _ = read_journal(tmp_path / "run")
    (tmp_path / "run" / "journal.jsonl").unlink()
    with JournalWriter(tmp_path / "run") as writer:
        for entry in entries:
            entry.get("evidence", {}).pop(count, None)
            writer.append(**{key: value for key, value in entry.items() if key != "seq"})
    with pytest.raises(EvidenceError, match=f"lack.* {count}"):
        NormLog.open(tmp_path / "run")
    assert command_line(["check", str(tmp_path / "run"), "--json"]) == 2
    assert count in capsys.readouterr().err


@pytest.mark.parametrize("damage", ["bit", "missing"])
@pytest.mark.filterwarnings("ignore:the privacy filter has left out everyone")
def test_who_was_left_out_cannot_be_lost_unseen(damage, tmp_path):
    run = make_run(batch_size=30, noise_multiplier=0.7)
    record(
        run,
        tmp_path / "run",
        privacy_filter=PrivacyFilter(3.0, 1.0),
        individual_clipping=True,
        clip_headroom=0.0,
    )
    path = next((tmp_path / "run" / "records").glob("filter-*.parquet"))
    if damage == "bit":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    else:
        path.unlink()
    with pytest.raises(EvidenceError, match=path.name):
        NormLog.open(tmp_path / "run")
    log = NormLog.open(tmp_path / "run", unreadable="worst_case")
    assert log.filtered is None
    assert indpriv.account(log, delta=1e-5).account.guaranteed_by == "RDP accountant"


@pytest.mark.parametrize("mode", ["hooks", "ghost"])
def test_norms_of_another_draw_of_dropout_are_not_compared(mode, tmp_path):
    """They may differ from training's by any amount: an estimate, but no fault of the clipping."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    record(make_run(model=model, mode=mode, max_grad_norm=0.1), tmp_path / "run", every=1)
    found = {check.title: check for check in verify(open_run(tmp_path / "run"))}
    assert found["clipping"].status == "passed"
    assert (
        found["norms in training"].detail
        == "no norms from training could be compared with a record"
    )
    assert "dropout" in found["norm pass"].detail
