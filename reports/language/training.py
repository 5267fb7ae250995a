"""A small GPT-2 with LoRA, fine-tuned on texts into which secrets are inserted by fair coins."""

import copy
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import peft
import torch
import transformers
from opacus import PrivacyEngine
from opacus.accountants.utils import get_noise_multiplier
from torch.utils.data import DataLoader

from audits.training.datasets.topics import ALPHABET, encode, pieces_of
from indpriv.analysis.attacks.canaries import measure_attack
from indpriv.analysis.attacks.rates import rates_on_updates
from indpriv.analysis.guarantee import true_positive_bound
from indpriv.attack_scores import AttackScores
from indpriv.attacks import extraction, language_scores
from indpriv.norm_log.run_files import CANARIES, GRADIENT_CANARIES
from indpriv.recording import (
    CausalLMLoss,
    GradientCanaries,
    InsertedCanaries,
    Recorder,
    per_example_gradient_norms,
    private_generator,
    with_position_ids,
)
from indpriv.recording.norms.batches import unpacked
from reports.shared.rates import RATES
from reports.shared.recorded import not_verified, worst_case_of

LENGTH = 24  # characters of a text, each a token
PUBLIC, TEXTS, SECRETS, DIGITS = 4000, 1000, 1000, 4  # half of the secrets are inserted, each once
BATCH, DELTA = 125, 1e-5
PUBLIC_EPOCHS = 15
SAMPLES = (1, 100)
_TEXT_SEED = 1  # of texts, secrets and the public model; coins, batches and noise have none


@dataclass(frozen=True)
class Setting:
    """A fine-tuned model: epsilon None is without DP."""

    epsilon: float | None
    epochs: int
    learning_rate: float

    @property
    def name(self) -> str:
        """In words."""
        return "without DP" if self.epsilon is None else f"epsilon {self.epsilon:g}"

    @property
    def title(self) -> str:
        """With its epochs."""
        return f"{self.name}, {self.epochs} epochs"

    @property
    def file_name(self) -> str:
        """Of its run."""
        return f"{self.name} {self.epochs}".replace(" ", "-")


SETTINGS = (
    Setting(None, 15, 2e-3),
    Setting(None, 60, 2e-3),
    Setting(None, 120, 5e-3),
    Setting(50.0, 30, 2e-3),
    Setting(8.0, 30, 2e-3),
)


ABOUT = {
    "length": LENGTH,
    "batch": BATCH,
    "public": PUBLIC,
    "texts": TEXTS,
    "secrets": SECRETS,
    "candidates": 10**DIGITS,
    "delta": DELTA,
}


def texts() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Token ids of public texts, private texts and secrets, (n, LENGTH) each; no text is in two."""
    rng = np.random.default_rng(_TEXT_SEED)
    pieces = pieces_of(" ".join(topics[name] for name in sorted(topics)), LENGTH)
    pieces = [pieces[k] for k in rng.permutation(len(pieces))]
    letters, owners = list(string.ascii_lowercase), set[str]()
    while len(owners) < SECRETS:
        owners.add("".join(rng.choice(letters, 6)))
    pins = rng.integers(0, 10**DIGITS, SECRETS)
    secrets = [
        f"pin of {owner} is {pin:0{DIGITS}d}"
        for owner, pin in zip(sorted(owners), pins, strict=True)
    ]
    public = [*pieces[TEXTS : TEXTS + PUBLIC], *_like_secrets(rng)]
    return encode(public, LENGTH), encode(pieces[:TEXTS], LENGTH), encode(secrets, LENGTH)


def _like_secrets(rng: np.random.Generator, n: int = 1000) -> list[str]:
    """Public sentences of the same form, so that the form itself is nothing to learn."""
    letters = list(string.ascii_lowercase)
    return [
        f"pin of {''.join(rng.choice(letters, 6))} is {pin:0{DIGITS}d}"
        for pin in rng.integers(0, 10**DIGITS, n)
    ]


START, END = len("pin of abcdef is "), len("pin of abcdef is ") + DIGITS


def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A batch with the keywords of the model."""
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _items(ids: np.ndarray) -> list[dict[str, Any]]:
    return [{"input_ids": row.tolist()} for row in ids]


def public_model(
    public: np.ndarray, folder: Path, tell: Callable[[str], None]
) -> transformers.GPT2LMHeadModel:
    """A GPT-2 of two layers that is trained from scratch on public texts, or that of a folder."""
    if folder.is_dir():
        return transformers.GPT2LMHeadModel.from_pretrained(folder)
    torch.manual_seed(_TEXT_SEED)
    config = transformers.GPT2Config(
        vocab_size=len(ALPHABET), n_positions=LENGTH, n_embd=96, n_layer=2, n_head=4,
        use_cache=False, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    loader = DataLoader(_items(public), batch_size=BATCH, shuffle=True, collate_fn=collate)
    tell(f"public model, {len(public):,} texts")
    _train(model, torch.optim.AdamW(model.parameters(), lr=2e-3), loader, PUBLIC_EPOCHS)
    model.save_pretrained(folder)
    return model


def _train(model: Any, optimizer: Any, loader: Any, epochs: int) -> None:
    loss_fn = CausalLMLoss()
    for _ in range(epochs):
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model(**batch), batch).mean().backward()
            optimizer.step()


def with_adapters(model: transformers.GPT2LMHeadModel) -> Any:
    """A copy whose adapters alone are trained."""
    targets = ["c_attn", "c_fc", "attn.c_proj", "mlp.c_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=targets, r=32, lora_alpha=64, fan_in_fan_out=True
    )
    return peft.get_peft_model(copy.deepcopy(model), config).train()


def fine_tune(
    setting: Setting, base: transformers.GPT2LMHeadModel, private: np.ndarray, secrets: np.ndarray,
    folder: Path, updates: bool = False,
) -> tuple[Any, np.ndarray, dict[str, Any]]:  # fmt: skip
    """The model, the coins, and what the audit says of the worst case.

    updates: attack every noisy update by gradient canaries, instead of the final model.
    """
    canaries = InsertedCanaries(_items(private), _items(secrets))  # type: ignore[arg-type]
    options: dict[str, Any] = {"collate_fn": with_position_ids(collate)}
    loader = canaries.loader(BATCH, generator=private_generator(), **options)
    model = with_adapters(base)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=setting.learning_rate
    )
    if setting.epsilon is None:
        shuffled = DataLoader(canaries.train_set, batch_size=BATCH, shuffle=True, **options)
        _train(model, optimizer, shuffled, setting.epochs)
        return model, canaries.member, {"epsilon": None, "not_verified": []}
    rate = 1 / len(loader)
    sigma = get_noise_multiplier(
        target_epsilon=setting.epsilon, target_delta=DELTA, sample_rate=rate,
        epochs=setting.epochs, accountant="prv",
    )  # fmt: skip
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=sigma,
        max_grad_norm=1.0, noise_generator=private_generator(),
    )  # fmt: skip
    recorder = Recorder(
        folder, dataset=canaries.train_set, loss_fn=CausalLMLoss(), every="once",
        attack=GradientCanaries(SECRETS) if updates else canaries,
        start="a model of public texts", run_info={"delta": DELTA},
    )  # fmt: skip
    with recorder.attach(model, optimizer, loader):
        _train(model, optimizer, loader, setting.epochs)
    about = {**worst_case_of(folder), "noise_multiplier": sigma}
    if updates:
        scores = AttackScores.from_file(folder / GRADIENT_CANARIES)
        # Of its attack "epsilon" is a lower bound.
        about = {"worst_case" if name == "epsilon" else name: of for name, of in about.items()}
        return model._module, scores.member, about | of_attack(scores)
    member = AttackScores.from_file(folder / CANARIES).member  # as the run has it
    return model._module, member, {**about, "not_verified": not_verified(folder)}


def measured(
    setting: Setting, base: transformers.GPT2LMHeadModel, private: np.ndarray, secrets: np.ndarray,
    folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Membership and extraction of the secrets of one model."""
    model, member, about = fine_tune(setting, base, private, secrets, folder)
    ids = [row[:END] for row in secrets]
    sentences = ["".join(ALPHABET[k] for k in row) for row in ids]
    scores = language_scores(
        model, ids, member, texts=sentences, reference=base, fair_coins=True
    )  # without recall: a prefix needs positions that the model was not trained on
    norms = [
        per_example_gradient_norms(model, CausalLMLoss(), *unpacked(batch, None))
        for batch in map(with_position_ids(collate), _parts(_items(secrets)))
    ]
    scores["gradient"] = AttackScores(-torch.cat(norms).numpy(), member, "", fair_coins=True)
    attacks = {name: of_attack(each) for name, each in scores.items()}
    sides = {}
    found = {n: extraction(model, ids, START, samples=n) for n in SAMPLES}
    for side, chosen in (("members", member), ("others", ~member)):
        one, total = found[SAMPLES[0]][chosen], int(chosen.sum())
        sides[side] = {
            "n": total,
            "chance": {str(n): float(found[n]["chance"][chosen].mean()) for n in SAMPLES},
            "discoverable": {
                str(n): int((found[n]["chance"][chosen] >= 0.5).sum()) for n in SAMPLES
            },
            "greedy": int(one["greedy"].sum()),
            "bits": float(one["bits"].median()),
        }
    ceilings = {}
    if about["epsilon"] is not None:
        guess = [min(1.0, n / 10**DIGITS) for n in SAMPLES]
        limits = [true_positive_bound(about["epsilon"], DELTA, rate) for rate in guess]
        ceilings = dict(zip(map(str, SAMPLES), limits, strict=True))
    if setting.epsilon is not None:
        folder = folder.with_name(f"{folder.name}-updates")
        attacks["updates"] = fine_tune(setting, base, private, secrets, folder, updates=True)[2]
    settings = {"title": setting.title, "target": setting.epsilon, "epochs": setting.epochs}
    return {**settings, **about, "attacks": attacks, "extraction": sides, "ceilings": ceilings}


def of_attack(scores: AttackScores) -> dict[str, Any]:
    """Rates of one attack, and lower bounds on epsilon."""
    measures = measure_attack(scores, delta=DELTA)
    found, bounds = measures.overall, measures.bounds
    ends = found["auc_interval"]
    rates = rates_on_updates(scores).set_index("rate")["value"]
    return {
        "auc": found["auc"], "low": ends.low, "high": ends.high,
        "tpr_at_fpr": {rate: float(rates[f"tpr_{rate}"]) for rate in RATES},
        "epsilon": bounds["steinke2023"].epsilon,
        "epsilon_fdp": bounds["mahloujifar2024"].epsilon,
        "epsilon_gaussian": bounds["gaussian_ranks"].epsilon,
    }  # fmt: skip


def _parts(items: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    return [items[start : start + BATCH] for start in range(0, len(items), BATCH)]
