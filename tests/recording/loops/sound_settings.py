"""Sound loops: optimizers, schedules, clipping rules, attacks and who is protected."""

import copy
import warnings

import numpy as np
import torch
from opacus import schedulers
from torch import nn
from torch.optim import lr_scheduler as rates

from indpriv.recording import AdaClip, GradientCanaries, QuantileClipping, WhiteBox
from recording.loops.harness import blobs, ce, normal, private_generator, sound, told
from recording.loops.parts import with_dropout

OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, 1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
    "adamw_fused": lambda p: torch.optim.AdamW(p, 1e-2, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, 1e-2, amsgrad=True),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}
for _name, _make in OPTIMIZERS.items():
    _rare = _name not in ("adam", "adamw_fused", "nesterov")

    @sound("hooks ghost functorch ew", name=f"optimizer_{_name}", rare=_rare)
    def optimizer(s, make=_make):
        s.train(opt=make)


LAWS = {
    "lambda": lambda o: rates.LambdaLR(o, lambda t: 1 / (1 + t)),
    "one_cycle": lambda o: rates.OneCycleLR(o, 0.5, total_steps=40),
    "cosine": lambda o: rates.CosineAnnealingLR(o, 20),
    "restarts": lambda o: rates.CosineAnnealingWarmRestarts(o, 5),
    "cycle": lambda o: rates.CyclicLR(o, 0.05, 0.2, 4, mode="exp_range", gamma=0.99),
    "cycle with a function": lambda o: rates.CyclicLR(o, 0.05, 0.2, 4, scale_fn=lambda k: 0.9**k),
    "sequential with a function": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=5), rates.LambdaLR(o, lambda e: 0.9**e)], [5]
    ),
    "sequential": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=4), rates.ExponentialLR(o, 0.9)], [4]
    ),
    "chained": lambda o: rates.ChainedScheduler(
        [rates.LinearLR(o, 0.1, total_iters=4), rates.ExponentialLR(o, 0.9)]
    ),
    "averaging": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=5),
    "noise": lambda o: schedulers.StepNoise(o, step_size=9, gamma=0.9),
}
for _name, _make in LAWS.items():
    _rare = _name not in ("lambda", "one_cycle", "averaging", "noise")

    @sound("hooks ghost functorch", name=f"schedule_{_name}", rare=_rare)
    def schedule(s, make=_make, name=_name):
        s.make(opt=OPTIMIZERS["momentum"])
        # Both are done: a schedule of Opacus's optimizer, or of the one inside it.
        inside = s.mode != "hooks" and name != "noise"
        law = make(s.inner if inside else s.optimizer)
        with s.recorded():
            for x, y in s.batches():
                s.step(x, y)
                law.step()


@sound("hooks functorch ew")
def schedule_clip(s):
    s.make()
    law = schedulers.StepGradClip(s.optimizer, step_size=9, gamma=0.9)
    s.go(after=lambda s, x, y: law.step())


@sound("hooks ghost")
def rates_by_hand_with_public_settings(s):
    def rate(step):
        return {"lr": 0.1 / (1 + step)}

    def decay(s, x, y):
        s.optimizer.param_groups[0].update(rate(s.steps))

    s.train(after=decay, recorder={"public_settings": rate})


@sound("hooks ghost", rare=True)
def warm_up_per_epoch_with_public_settings(s):
    def law(step):
        return {"lr": 0.05 * (1 + step // 13), "momentum": 0.9}

    s.make(opt=OPTIMIZERS["momentum"])
    with s.recorded(public_settings=law):
        for _ in range(2):
            s.optimizer.param_groups[0].update(law(s.steps))
            for x, y in s.loader:
                s.step(x, y)


@sound("hooks ghost functorch")
def parameter_groups(s):
    def groups(parameters):
        a, b, c, d = parameters
        weights = {"params": [a, c], "lr": 0.02, "weight_decay": 0.1}
        return torch.optim.AdamW([weights, {"params": [b, d], "weight_decay": 0.0}], lr=0.01)

    s.train(opt=groups)


@sound("hooks functorch")
def clipped_per_layer(s):
    s.train(clip=[0.3, 0.1, 0.5, 0.2], clipping="per_layer")


@sound("hooks")
def clipped_at_a_quantile(s):
    s.make()
    s.optimizer = QuantileClipping.of(s.optimizer, quantile=0.5)
    s.go(micro=20)


@sound("hooks")
def clipped_by_coordinate(s):
    s.make()
    s.optimizer = AdaClip.of(s.optimizer)
    s.go()


@sound("hooks functorch")
def clipped_individually(s):
    s.train(recorder={"every": 5, "individual_clipping": True}, clip=2.0)


@sound("hooks ghost", rare=True)
def clipped_below_all_norms(s):
    s.train(model=with_dropout(), clip=0.01)


@sound("hooks ghost", rare=True)
def clipped_above_all_norms(s):
    s.train(clip=50.0, noise=2.0)


@sound("hooks ghost")
def gradient_canaries(s):
    s.train(recorder={"every": "once", "attack": GradientCanaries(50)})


@sound("hooks")
def white_box_attack(s):
    test = blobs(500)
    test.tensors = tuple(t[400:] for t in test.tensors)
    s.train(recorder={"every": 5, "attack": WhiteBox(20), "test_set": test})


@sound("hooks ghost")
def two_rows_for_each_user(s):
    s.train(recorder={"unit": "user", "unit_ids": np.arange(400) // 2})


@sound("hooks ghost", participation="known")
def shuffled_and_participation_known(s):
    s.train(blobs(416), poisson=False, noise=3.0, recorder={"batch_norms": True})


@sound("hooks functorch", participation="known", rare=True)
def dropout_and_participation_known(s):
    s.train(
        blobs(416),
        with_dropout(),
        poisson=False,
        noise=3.0,
        recorder={"every": "once", "batch_norms": True},
    )


@sound("hooks ghost", rare=True)
def rare_records(s):
    s.train(recorder={"every": "once", "reference_examples": 4, "batch_norms": True})


@sound("hooks ghost", rare=True)
def records_by_default(s):
    s.train(recorder={"every": None})


@sound("hooks ghost", rare=True)
def little_noise(s):
    s.train(noise=0.3)


@sound("hooks ghost", rare=True)
def one_parameter_tensor(s):
    s.train(model=nn.Sequential(nn.Linear(6, 2, bias=False)))


@sound("hooks ghost functorch", rare=True)
def learning_rate_zero(s):
    s.train(opt=lambda p: torch.optim.SGD(p, lr=0.0))


@sound("hooks ghost")
def rates_from_a_list_and_one_generator_for_all(s):
    rates, generator = [1 / (1 + k) for k in range(27)], private_generator()
    s.make(noise_generator=generator)
    s.loader.batch_sampler.generator = generator
    scheduler = torch.optim.lr_scheduler.LambdaLR(s.inner, lambda epoch: rates[epoch])
    s.go(after=lambda s, x, y: scheduler.step())


@sound("hooks ghost", rare=True)
def weights_that_start_from_public_ones(s):
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        model[0].weight.copy_(normal(8, 6, seed=4))
    s.train(model=model, recorder={"start": "pretrained on public data"})


class Signs(torch.optim.Optimizer):
    """An optimizer that torch does not have: steps by the sign of a moving mean (Lion)."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 1e-3, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                mean.mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.sub_(mean.sign(), alpha=group["lr"])


@told("update", "hooks ghost functorch")
def optimizer_of_the_users_own(s):
    """A copy of it makes the same step, whatever it reads outside of its state."""
    s.train(opt=Signs)


@sound("hooks functorch")
def resumed_with_a_schedule(s):
    def made():
        s.make(opt=OPTIMIZERS["momentum"])
        return s.model, s.optimizer, rates.StepLR(s.optimizer, 5, 0.5)

    held, saved = made(), None
    for session in range(2):
        if session:
            states = copy.deepcopy([one.state_dict() for one in held])
            held = made()
            for one, state in zip(held, states, strict=True):
                one.load_state_dict(state)
        with s.recorded(resume_at=saved) as recorder:
            for x, y in s.batches(1):
                s.step(x, y)
                held[2].step()
            saved = recorder.state_dict()


@sound("hooks")
def resumed_while_clipped_at_a_quantile(s):
    s.make()
    s.optimizer = QuantileClipping.of(s.optimizer, quantile=0.5)
    s.resumed()


@sound("hooks ghost", rare=True)
def clipping_norm_by_public_settings(s):
    def halve(s, epoch):
        owners = [s.optimizer, *([s.model] if s.mode == "ghost" else [])]
        for owner in owners:
            owner.max_grad_norm = 1.0 if epoch == 0 else 0.5

    law = {"public_settings": lambda step: {"max_grad_norm": 1.0 if step < 13 else 0.5}}
    s.train(epoch=halve, recorder=law)


@sound("hooks ghost", rare=True)
def maximised(s):
    ascent = lambda p: torch.optim.SGD(p, 0.1, maximize=True)  # noqa: E731
    s.train(loss=lambda out, y: -ce(out, y), opt=ascent)


@sound("hooks ghost", rare=True)
def two_schedulers_of_one_optimizer(s):
    s.make()
    both = rates.LinearLR(s.inner, 0.1, total_iters=5), rates.ExponentialLR(s.inner, 0.99)
    s.go(after=lambda *_: [law.step() for law in both])


@sound("hooks ghost", rare=True)
def restarts_by_parts_of_an_epoch(s):
    s.make()
    law = rates.CosineAnnealingWarmRestarts(s.inner, 2)
    s.go(after=lambda s, x, y: law.step(s.steps / 13), epochs=4)


@sound("hooks ghost", rare=True)
def pretrained_on_public_rows_with_the_same_optimizer(s):
    s.make(opt=OPTIMIZERS["adam"])
    for p, g in zip(
        s.optimizer.params, s.gradients(normal(50, 6), torch.arange(50) % 2), strict=True
    ):
        p.grad = g
    s.inner.step()
    s.inner.zero_grad()
    s.go(start="pretrained on public rows")


@sound("hooks ghost", rare=True)
def two_schedulers_that_step_in_the_other_order(s):
    s.make()
    first = rates.CosineAnnealingLR(s.inner, 30, eta_min=0.01)
    second = rates.ExponentialLR(s.inner, 0.99)
    s.go(after=lambda *_: (second.step(), first.step()))


@sound("hooks ghost", rare=True)
def scheduler_that_moves_twice_for_each_step(s):
    s.make()
    law = rates.CosineAnnealingLR(s.inner, 60)
    s.go(after=lambda *_: (law.step(), law.step()))


@sound("hooks", rare=True)
def schedulers_in_a_chain_and_in_a_row(s):
    s.make()
    begin = rates.LinearLR(s.inner, 0.1, total_iters=4)
    chain = [rates.StepLR(s.inner, 3, 0.9), rates.ExponentialLR(s.inner, 0.99)]
    later = rates.SequentialLR(s.inner, [begin, rates.PolynomialLR(s.inner, 30)], [6])
    law = rates.ChainedScheduler([*chain, later], s.inner)
    s.go(after=lambda *_: law.step())


@sound("hooks ghost", rare=True)
def evaluation_in_a_fork_of_the_generators(s):
    def evaluate(s, x, y):
        with torch.random.fork_rng(), torch.no_grad():
            s.model(torch.randn(9, 6))

    torch.seed()
    s.train(model=with_dropout(), private=False, after=evaluate)


@sound("hooks ghost", rare=True)
def steps_of_a_scheduler_with_the_number_of_the_epoch(s):
    s.make()
    law = rates.CosineAnnealingLR(s.inner, 30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would rather not be told
        s.go(after=lambda s, x, y: law.step(s.steps))


@sound("hooks ghost", rare=True)
def rate_in_a_tensor_that_a_cycle_moves(s):
    s.make(opt=lambda p: torch.optim.Adam(p, torch.tensor(0.05)))
    law = rates.OneCycleLR(s.inner, 0.1, total_steps=60)
    s.go(after=lambda *_: law.step())


@sound("hooks ghost", participation="known")
def seed_of_the_script_for_the_order_of_rows(s):
    """As torch's notes on reproducibility do it; noise has a generator of its own."""
    torch.manual_seed(3)
    s.make(blobs(416), poisson=False, noise=3.0)
    s.loader.generator = s.loader.sampler.generator = torch.Generator().manual_seed(3)
    s.go(batch_norms=True)


@sound("hooks ghost")
def one_cycle_made_in_the_block(s):
    """It sets rate and momentum when it is made."""
    s.make(opt=OPTIMIZERS["momentum"])
    with s.recorded():
        law = rates.OneCycleLR(s.inner, 0.2, total_steps=30)
        for x, y in s.batches():
            s.step(x, y)
            law.step()


@sound("hooks ghost", rare=True)
def warm_up_made_in_the_block(s):
    s.make()
    with s.recorded():
        law = rates.LinearLR(s.optimizer, 0.1, total_iters=5)
        for x, y in s.batches():
            s.step(x, y)
            law.step()


@sound("hooks ghost")
def evaluation_and_mode_of_training_in_the_block(s):
    s.make(model=with_dropout())
    s.model.eval()
    with s.recorded():
        with torch.no_grad():
            s.model(normal(20, 6))
        s.model.train()
        for x, y in s.batches():
            s.step(x, y)
