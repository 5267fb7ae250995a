"""Trainers that make their own Opacus optimizer, in the block of attach_dptrainer: supported, or refused by name."""

import pytest
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.uniform_sampler import UniformWithReplacementSampler
from torch.utils.data import DataLoader

from indpriv import InputError, account
from indpriv.norm_log.evidence import unverified
from indpriv.norm_log.norm_log import open_run
from indpriv.recording import CausalLMLoss, Recorder, attach_dptrainer, with_position_ids
from integrations.language_models import (
    ASK,
    Texts,
    collate,
    gpt2,
    lines_by_key,
    training_arguments,
    with_adapters,
)

transformers = pytest.importorskip("transformers", reason=ASK)
pytest.importorskip("accelerate", reason=ASK)
pytestmark = pytest.mark.filterwarnings("ignore")
N = 61


def opacus_dp_trainer(model, arguments, texts, noise=1.0, **attributes):
    """As Microsoft's and others derived from it: one draw for each substep, and its own callback."""

    class PassesOn(DPOptimizer):
        @property
        def param_groups(self):
            return self.original_optimizer.param_groups

        @param_groups.setter
        def param_groups(self, groups):
            self.original_optimizer.param_groups = groups

    class Callback(transformers.TrainerCallback):
        def on_step_begin(self, *_, optimizer, **__):
            optimizer.optimizer.signal_skip_step(do_skip=False)

        def on_substep_end(self, *_, optimizer, **__):
            optimizer.optimizer.signal_skip_step(do_skip=True)
            optimizer.step()
            optimizer.zero_grad()

    class Trainer(transformers.Trainer):
        def create_optimizer(self, model=None):
            super().create_optimizer()
            size = self.args.per_device_train_batch_size * self.args.gradient_accumulation_steps
            self.optimizer = PassesOn(
                self.optimizer, noise_multiplier=noise, max_grad_norm=0.5, expected_batch_size=size
            )
            return self.optimizer

        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            loss = self.compute_loss(model, self._prepare_inputs(inputs))
            loss.backward()
            return loss.detach()

        def get_train_dataloader(self):
            rate = self.args.per_device_train_batch_size / len(self.train_dataset)
            sampler = UniformWithReplacementSampler(num_samples=N, sample_rate=rate)
            return DataLoader(
                self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator
            )

    trainer = Trainer(
        GradSampleModule(model),
        arguments,
        train_dataset=texts,
        data_collator=collate,
        callbacks=[Callback()],
    )
    vars(trainer).update(attributes)
    return trainer


def dp_trainer(model, arguments, texts, **settings):
    dptrainer = pytest.importorskip("dptrainer", reason="pip install --no-deps DPTrainer")
    settings = {"noise_multiplier": 1.0, "per_sample_max_grad_norm": 0.5} | settings
    return dptrainer.DPTrainer(
        model=model,
        args=arguments,
        train_dataset=texts,
        privacy_args=dptrainer.PrivacyArguments(**settings),
        data_collator=collate,
    )


def sft_trainer(model, arguments, texts):
    """TRL's, whose loss runs the model in a forward of its own."""
    trl = pytest.importorskip("trl", reason="pip install trl to test against it")
    datasets = pytest.importorskip("datasets")
    dptrainer = pytest.importorskip("dptrainer", reason="pip install --no-deps DPTrainer")
    from tokenizers import Tokenizer, models

    privacy = dptrainer.PrivacyArguments(noise_multiplier=1.0, per_sample_max_grad_norm=0.5)
    dptrainer.privatize_trainer(trl.SFTTrainer, privacy)
    words = Tokenizer(models.WordLevel({f"w{k}": k for k in range(32)}, unk_token="w0"))
    tokens = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="w0", eos_token="w1"
    )
    kept = [
        "output_dir",
        "num_train_epochs",
        "use_cpu",
        "report_to",
        "save_strategy",
        "disable_tqdm",
    ]
    kept += ["per_device_train_batch_size", "gradient_accumulation_steps"]
    settings = {name: getattr(arguments, name) for name in kept}
    return trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(**settings, max_length=12, bf16=False, gradient_checkpointing=False),
        train_dataset=datasets.Dataset.from_dict({"input_ids": texts.texts}),
        processing_class=tokens,
    )


def recorded(make, model, tmp_path, **settings):
    """A trainer that was trained while a strict Recorder watched."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3} | settings
    trainer = make(model, training_arguments(tmp_path, **settings), Texts(N))
    recorder = Recorder(
        tmp_path / "run",
        dataset=trainer.train_dataset,
        loss_fn=CausalLMLoss(),
        every=1,
        strict=True,
    )
    with attach_dptrainer(recorder, trainer):
        trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("make", "adapters", "settings"),
    [
        (opacus_dp_trainer, True, {}),
        (opacus_dp_trainer, False, {"gradient_accumulation_steps": 1}),
        (opacus_dp_trainer, True, {"per_device_train_batch_size": 1, "seed": 7}),
        (dp_trainer, True, {}),
        (dp_trainer, False, {"gradient_accumulation_steps": 1}),
        (dp_trainer, True, {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1}),
        (sft_trainer, True, {}),
    ],
)
def test_a_step_is_one_poisson_batch_and_the_run_is_supported(make, adapters, settings, tmp_path):
    """With batches of one text on average, a third are empty."""
    model = gpt2()
    trainer = recorded(make, with_adapters(model) if adapters else model, tmp_path, **settings)
    lines = lines_by_key(tmp_path / "run")
    assert unverified(lines.values()) == []
    assert lines["source"].detail == "its state is from the operating system"
    log = open_run(tmp_path / "run").log
    assert account(log, delta=1e-4).claim == "exact"
    size = trainer.args.per_device_train_batch_size * trainer.args.gradient_accumulation_steps
    assert log.settings.sample_rate[0] == pytest.approx(size / N)
    assert trainer.state.global_step == log.total_steps == 2 * int(1 / (size / N))


def test_the_trainer_is_as_before_after_the_block(tmp_path):
    trainer = recorded(opacus_dp_trainer, with_adapters(gpt2()), tmp_path)
    assert trainer.args.gradient_accumulation_steps == 3
    kept = ("create_optimizer", "get_train_dataloader", "training_step", "compute_loss")
    assert not set(kept) & set(vars(trainer))


def test_dptrainer_on_its_own_ends_epochs_inside_a_batch(tmp_path):
    """What attach_dptrainer is for; the learning rate moves by the number of parts, too."""
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    arguments = training_arguments(tmp_path, num_train_epochs=12, **settings)
    trainer = dp_trainer(with_adapters(gpt2()), arguments, Texts(N))
    parts, loss_fn = trainer.get_train_dataloader(), CausalLMLoss()
    trainer.get_train_dataloader = lambda: parts
    trainer.compute_loss = lambda model, inputs, **_: loss_fn(model(**inputs), inputs).mean()
    whole = DataLoader(
        parts.dataset, batch_sampler=parts.batch_sampler.sampler, collate_fn=parts.collate_fn
    )
    recorder = Recorder(tmp_path / "run", dataset=Texts(N), loss_fn=loss_fn, every=1)
    recorder.draw_privately()
    with recorder.attach(trainer.model, trainer.optimizer, whole):
        trainer.train()
    lines = lines_by_key(tmp_path / "run")
    assert lines["contribution"].status == "refuted"
    assert "left a batch unfinished" in lines["contribution"].detail
    assert lines["settings"].status == "declared"


def test_the_trainers_own_loss_is_told_by_name(tmp_path):
    """A loss_fn that is no CausalLMLoss leaves the trainer its own."""
    trainer = opacus_dp_trainer(with_adapters(gpt2()), training_arguments(tmp_path), Texts(N))
    loss_fn = CausalLMLoss()

    def of_each(outputs, batch):
        return loss_fn(outputs, batch)

    recorder = Recorder(tmp_path / "run", dataset=Texts(N), loss_fn=of_each, every="epoch")
    with attach_dptrainer(recorder, trainer):
        trainer.train()
    line = lines_by_key(tmp_path / "run")["contribution"]
    assert line.status == "refuted"
    assert line.detail.startswith("train on CausalLMLoss")


def test_ghost_mode_is_refused_with_the_reason(tmp_path):
    def in_ghost_mode(model, arguments, texts):
        return dp_trainer(model, arguments, texts, grad_sample_mode="ghost")

    with pytest.raises(InputError, match=r"does not clip each example.*grad_sample_mode=\"hooks\""):
        recorded(in_ghost_mode, with_adapters(gpt2()), tmp_path)


@pytest.mark.parametrize(
    ("max_grad_norm", "said"),
    [(0.5, "prepare_module.wrap_model=False. made do not know it"), (1.0, "does not clip each")],
)
def test_ghost_mode_of_dptrainer_is_refused_without_attach_dptrainer(max_grad_norm, said, tmp_path):
    arguments, settings = training_arguments(tmp_path), {"grad_sample_mode": "ghost"}
    settings |= {"per_sample_max_grad_norm": max_grad_norm}
    trainer = dp_trainer(with_adapters(gpt2()), arguments, Texts(N), **settings)
    parts = trainer.get_train_dataloader()
    whole = DataLoader(
        parts.dataset, batch_sampler=parts.batch_sampler.sampler, collate_fn=parts.collate_fn
    )
    recorder = Recorder(tmp_path / "run", dataset=Texts(N), loss_fn=CausalLMLoss())
    with pytest.raises(InputError, match=said):
        recorder.attach(trainer.model, trainer.optimizer, whole).__enter__()


def test_authors_with_several_texts_are_refused(tmp_path):
    def of_authors(model, arguments, texts):
        return opacus_dp_trainer(model, arguments, texts, author_mapping=[[0, 1], [2]])

    with pytest.raises(InputError, match=r"draws 2 authors.*unit_ids="):
        recorded(of_authors, with_adapters(gpt2()), tmp_path)


@pytest.mark.parametrize("setting", [{"packing": True}, {"neftune_noise_alpha": 5.0}])
def test_settings_that_change_rows_or_norms_are_refused(setting, tmp_path):
    def with_setting(model, arguments, texts):
        for name, value in setting.items():
            setattr(arguments, name, value)
        return opacus_dp_trainer(model, arguments, texts)

    with pytest.raises(InputError, match=next(iter(setting))):
        recorded(with_setting, with_adapters(gpt2()), tmp_path)


def test_a_trainer_that_has_trained_before_is_refused(tmp_path):
    trainer = opacus_dp_trainer(with_adapters(gpt2()), training_arguments(tmp_path), Texts(N))
    trainer.create_optimizer()
    accelerate = pytest.importorskip("accelerate")
    trainer.optimizer = accelerate.Accelerator().prepare(trainer.optimizer)
    recorder = Recorder(tmp_path / "run", dataset=Texts(N), loss_fn=CausalLMLoss())
    with pytest.raises(InputError, match="has trained before"):
        attach_dptrainer(recorder, trainer).__enter__()


def test_position_ids_are_the_models_own():
    rows = [Texts()[k] for k in range(4)]
    batch, plain = with_position_ids(collate)(rows), collate(rows)
    assert batch.keys() - plain.keys() == {"position_ids"}
    model = gpt2().eval()
    torch.testing.assert_close(model(**batch).logits, model(**plain).logits)
    given = {"position_ids": torch.zeros(1, 1), "input_ids": torch.zeros(1, 1)}
    assert with_position_ids(lambda _: given)(rows)["position_ids"] is given["position_ids"]
