"""Training compared with its own recomputation: what it must never do to training, and how it speaks."""

import copy
import json
import random
import warnings
from contextlib import nullcontext

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from indpriv._facts import text
from indpriv.audit import audit
from indpriv.errors import EvidenceError, EvidenceWarning, InputError
from indpriv.norm_log.evidence import CHECKS, COMPARISONS, lines_of
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify
from indpriv.recording import Recorder, private_generator
from indpriv.recording.compared.findings import Budget, Findings, worst_of
from runs import PER_EXAMPLE, blobs, make_run


class WritesInPlace(nn.Module):
    """Writes into its inputs, its weights and a counter."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        inputs.clamp_(-2, 2)
        with torch.no_grad():
            self.second.weight.clamp_(-0.3, 0.3)
        return self.second(torch.tanh(self.first(inputs)))


def with_dropout():
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2))


def trained(recorder_of, model, mode, optimizer=torch.optim.SGD):
    """Parameters, optimizer state and random states after 20 steps from the same seeds."""
    torch.manual_seed(2**40 + 7)
    np.random.seed(7)
    random.seed(7)
    dataset = TensorDataset(*(t.clone() for t in blobs(120).tensors))
    run = make_run(dataset, model, mode=mode)
    run.optimizer.original_optimizer.__class__ = optimizer
    for group in run.optimizer.param_groups:
        group.update(optimizer([torch.zeros(1)], lr=0.1).defaults)
    with recorder_of(dataset, run):
        run.train(2)
    state = run.optimizer.original_optimizer.state_dict()["state"]
    leaves = torch.utils._pytree.tree_leaves(state)
    return (
        [p.detach().clone() for p in run.model.parameters()],
        [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)],
        [torch.get_rng_state(), torch.tensor(np.random.get_state()[1].astype(np.int64))],
        [random.random()],
    )


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew", "ghost"])
@pytest.mark.parametrize("model", [with_dropout, WritesInPlace])
def test_training_is_bit_for_bit_what_it_is_without(model, mode, tmp_path):
    def watched(dataset, run):
        recorder = Recorder(tmp_path / "run", dataset=dataset, loss_fn=PER_EXAMPLE, every="once")
        return recorder.attach(run.model, run.optimizer, run.loader)

    def make():
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return model()

    if mode == "ew" and model is WritesInPlace:
        pytest.skip("expanded weights have no in-place writes")
    plain = trained(lambda *_: nullcontext(), make(), mode, torch.optim.Adam)
    recorded = trained(watched, make(), mode, torch.optim.Adam)
    for mine, theirs in zip(plain[:3], recorded[:3], strict=True):
        assert len(mine) == len(theirs)
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert plain[3] == recorded[3]
    counts = open_run(tmp_path / "run").sessions[0].training.compared.found
    assert counts["replay"].steps + counts["replay"].unknown >= 3


def lines(run_dir):
    opened = open_run(run_dir)
    return {line.key: line for line in lines_of(verify(opened), opened.header["run"])}


def private_run(**options):
    dataset = options.pop("dataset", blobs(120))
    loader = DataLoader(dataset, batch_size=12, generator=private_generator())
    return make_run(dataset, data_loader=loader, noise_generator=private_generator(), **options)


def record(run, run_dir, loss=None, **options):
    recorder = Recorder(run_dir, dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, **options)
    if loss is not None:
        run.criterion = loss
    with recorder.attach(run.model, run.optimizer, run.loader):
        run.train(2)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9.0]))


class NoCopies(nn.Sequential):
    """It can be trained, and from some moment on not be copied."""

    locked = False

    def __deepcopy__(self, memo):
        if self.locked:
            raise ZeroDivisionError("no copies\nof this")
        made = NoCopies(*copy.deepcopy(list(self), memo))
        return made.train(self.training)


def test_an_error_of_a_comparison_is_a_finding(tmp_path):
    model = NoCopies(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    run = private_run(model=model)
    recorder = Recorder(tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every="once")
    with recorder.attach(run.model, run.optimizer, run.loader):
        model.locked = True
        run.train(3)
        model.locked = False
    assert open_run(tmp_path / "run").log.total_steps == 30
    found = lines(tmp_path / "run")["contribution"]
    assert found.status == "declared"
    assert "not compared: ZeroDivisionError: no copies of this" in found.detail


def test_a_sound_run_is_verified_without_a_word(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", EvidenceWarning)
        record(private_run(), tmp_path / "run", start="random", strict=True)
    found = lines(tmp_path / "run")
    words = {key: line.status for key, line in found.items()}
    verified = ("batch", "contribution", "noise", "update", "settings")
    assert all(words[key] == "verified" for key in verified)
    assert words["source"] == "on trust"
    assert (words["start"], found["start"].detail) == ("declared", "random")


def test_what_is_refuted_is_said_after_the_first_step(tmp_path):
    with pytest.warns(EvidenceWarning, match="loss of training: gradients at the model's outputs"):
        record(private_run(), tmp_path / "run", WEIGHTED)
    assert lines(tmp_path / "run")["contribution"].status == "refuted"


def test_strict_stops_there(tmp_path):
    with pytest.raises(EvidenceError, match="strict=True stops here"):
        record(private_run(), tmp_path / "run", WEIGHTED, strict=True)
    assert open_run(tmp_path / "run").total_steps == 1


def test_a_chosen_seed_is_said_at_attach(tmp_path):
    run = make_run()
    torch.manual_seed(0)
    with pytest.warns(
        EvidenceWarning, match="seeds: noise or batches come from a generator with a chosen seed"
    ):
        record(run, tmp_path / "run")
    assert lines(tmp_path / "run")["source"].status == "refuted"


def test_groups_that_are_no_column_are_said_at_attach(tmp_path):
    with pytest.warns(EvidenceWarning, match="run_info names: there is no column 'race'"):
        record(private_run(), tmp_path / "run", run_info={"groups": ["race"]})
    with pytest.raises(InputError, match="there is no column 'race'"):
        record(private_run(), tmp_path / "other", run_info={"groups": ["race"]}, strict=True)


def test_groups_that_an_audit_makes_of_columns_are_no_fault(tmp_path):
    """Bins, intersections and what the final model got right; warnings are errors."""
    groups = ["age:bins=4", "label,age:bins=2", "correct", "loss:bins=3"]
    metadata = pd.DataFrame({"age": np.arange(120.0)})
    info = {"groups": groups, "delta": 1e-4}
    record(private_run(), tmp_path / "run", metadata=metadata, test_set=blobs(), run_info=info)
    audited = audit(tmp_path / "run", tmp_path / "audit")
    assert [table.by for table in audited.groups] == groups
    with pytest.warns(EvidenceWarning, match="bins='x' is not a whole number"):
        record(
            private_run(), tmp_path / "x", metadata=metadata, run_info={"groups": ["age:bins=x"]}
        )


def halved(run):
    def loop():
        for step, batch in enumerate(run.loader):
            for group in run.optimizer.param_groups:
                group["lr"] = 0.1 * 0.5**step
            run.step(*batch)

    return loop


@pytest.mark.parametrize(
    ("law", "word", "detail"),
    [
        (None, "declared", "lr moved at step 0 by no law that the recorder saw"),
        (lambda step: {"lr": 0.1 * 0.5**step}, "verified", ""),
        (lambda step: {"lr": 0.1}, "declared", "the public law says 0.1"),
        (lambda step: {"learning": 0.1}, "declared", "names 'learning', which is no setting"),
    ],
)
def test_a_law_of_the_user(law, word, detail, tmp_path):
    run = private_run()
    recorder = Recorder(
        tmp_path / "run", dataset=run.dataset, loss_fn=PER_EXAMPLE, every=1, public_settings=law
    )
    with recorder.attach(run.model, run.optimizer, run.loader):
        halved(run)()
    found = lines(tmp_path / "run")["settings"]
    assert found.status == word
    assert detail in found.detail


def test_private_generators_are_unlike_each_other_and_normal():
    one, other = private_generator(), private_generator()
    assert not torch.equal(one.get_state(), other.get_state())
    values = torch.randn(200_000, generator=one, dtype=torch.float64)
    assert abs(float(values.mean())) < 6 / 200_000**0.5
    assert abs(float(values.square().mean()) - 1) < 6 * (2 / 200_000) ** 0.5
    uniform = torch.rand(100_000, generator=other)
    assert 0.45 < float(uniform.mean()) < 0.55


def test_all_of_its_state_is_drawn():
    """Words of two states agree as often as random ones do: never, among 624."""
    words = [private_generator().get_state().numpy()[24 : 24 + 8 * 624] for _ in range(2)]
    one, other = (w.view(np.uint64) for w in words)
    assert (one < 2**32).all()
    assert (one != other).all()


def test_a_private_generator_that_is_seeded_is_an_ordinary_one(tmp_path):
    noise = private_generator()
    run = make_run(noise_generator=noise)
    noise.manual_seed(3)
    record(run, tmp_path / "run")
    assert lines(tmp_path / "run")["source"].status == "refuted"


class WithoutState(torch.Generator):
    """Like torchcsprng's, which read /dev/urandom."""

    def get_state(self):
        raise RuntimeError("not implemented")

    initial_seed = get_state


@pytest.mark.filterwarnings("ignore:seeds")
@pytest.mark.parametrize(
    ("made", "word", "said"),
    [
        (lambda: None, "refuted", "seed"),  # torch's default one, seeded with 0
        (private_generator, "on trust", "its state is from the operating system"),
        (WithoutState, "on trust", "a cryptographically secure generator"),
    ],
)
def test_secure_mode_is_as_secure_as_its_generator(made, word, said, tmp_path):
    """Some trainers set secure_mode and no generator: the noise is drawn from torch's default one."""
    batches = DataLoader(blobs(), batch_size=12, generator=private_generator())
    run = make_run(data_loader=batches)
    torch.manual_seed(0)
    run.optimizer.secure_mode, run.optimizer.generator = True, made()
    record(run, tmp_path / "run")
    source = lines(tmp_path / "run")["source"]
    assert source.status == word
    assert said in source.detail
    about = json.loads((tmp_path / "run" / "run.json").read_text())["recorder"]
    assert about["secure_mode"] == (made is WithoutState)


def test_only_cases_that_have_a_text_refute():
    refuting = [one for one in CHECKS.values() if one.refutes]
    assert {one.key for one in refuting} < set(COMPARISONS)
    assert all(set(one.refutes) <= set(one.texts) for one in refuting)


def test_steps_count_as_their_worst_micro_batch():
    findings = Findings()
    findings.add("loss")
    findings.add("loss", "unused")
    assert findings.end_step() == ["loss"]
    findings.add("loss", "differ", error=1.0)
    assert findings.end_step() == []
    counts = worst_of([findings.found]).found["loss"]
    assert (counts.steps, counts.refuted, counts.detail) == (2, 2, text("check.loss", "unused"))


def test_the_first_steps_are_always_repeated():
    budget = Budget("cpu")
    for _ in range(3):
        assert budget.drawn
        assert budget.every
        budget.begin_step()
        with budget.spending("drawn"):
            budget._spent["drawn"] += 60.0  # as if it had taken a minute
        budget.end_step()
    assert not budget.drawn
