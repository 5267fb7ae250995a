"""Which models can be recorded, in which of Opacus's modes, and what their norms cost.

    python benchmarks/models.py [--only NAMES] [--device cuda] [--write PAGE]

Each model is small and made from a configuration; nothing is downloaded. It trains for a few steps
with Opacus while a Recorder is attached. Norms of four examples are compared with autograd in
float64. The ratio is that of a norm pass over 32 examples to a plain forward and backward pass;
attach is CPU seconds. About ten minutes on one idle core, with transformers, peft and diffusers;
models of packages that are not installed are left out.
"""

import argparse
import copy
import itertools
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import opacus
import torch
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM, DPMultiheadAttention
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from audits.training.config import ModelConfig
from audits.training.models import build_model
from indpriv import account
from indpriv.norm_log.norm_log import open_run
from indpriv.recording import CausalLMLoss, NormPass, Recorder
from indpriv.recording.norms.batches import Batch, Keywords, call, map_tensors
from indpriv.recording.norms.model_checks import hindrance, validate_module
from indpriv.recording.norms.norm_pass import norms_by_autograd
from indpriv.recording.norms.shadow_model import ModelInTraining
from indpriv.recording.process import processor

MODES = ("hooks", "functorch", "ghost")
N, BATCH, TIMED, COMPARED, ROUNDS = 120, 20, 32, 4, 5
VOCABULARY, LENGTH, WIDTH, IMAGE = 100, 16, 32, 16
WIDE = 64, 192, 32  # the same of a transformer in which arithmetic costs more than calls
PER_EXAMPLE = nn.CrossEntropyLoss(reduction="none")
TITLES = ("model (parameters trained)", *MODES, "pass / plain", "attach (s)")
WIDE_TITLES = ("model (parameters trained)", "pass / plain")
MARKER = "<!-- benchmarks/models.py writes what follows -->"


class Rows(Dataset[Any]):
    """A data set of dicts."""

    def __init__(self, **columns: Tensor) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def labels() -> Tensor:
    """Two classes at random."""
    return torch.randint(0, 2, (N,))


def vectors(*shape: int) -> Dataset[Any]:
    """Normal inputs of a shape."""
    return TensorDataset(torch.randn(N, *shape), labels())


def tokens() -> Tensor:
    """Texts of one length."""
    return torch.randint(1, VOCABULARY, (N, LENGTH))


def texts() -> Dataset[Any]:
    """The last half of a text is padding, in every other text."""
    values = tokens()
    values[::2, LENGTH // 2 :] = 0
    return TensorDataset(values, labels())


def positions() -> dict[str, Tensor]:
    """Position ids for each text."""
    return {"position_ids": torch.arange(LENGTH).repeat(N, 1)}


def causal(**more: Tensor) -> Rows:
    """Texts to continue."""
    values = tokens()
    return Rows(input_ids=values, labels=values.clone(), **more)


class Logits(nn.Module):
    """What follows is given the logits of a model of Hugging Face alone."""

    def forward(self, outputs: Any) -> Any:
        """Take them."""
        return outputs.logits


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: Any) -> Any:
        """Take it."""
        return outputs[0]


class Mean(nn.Module):
    """The mean over positions."""

    def forward(self, values: Tensor) -> Tensor:
        """Take it."""
        return values.mean(1)


class InPlace(nn.Module):
    """A residual block as torchvision writes it: ReLU(inplace=True) and +=."""

    def __init__(self, relu: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.relu = nn.ReLU(inplace=relu)

    def forward(self, values: Tensor) -> Tensor:
        """Change outputs in place."""
        out = self.norm(self.conv(values))
        out += values
        return self.relu(out)


class Attention(nn.Module):
    """One encoder layer with an attention of a given class."""

    def __init__(self, attention: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.attention = attention(WIDTH, 4, batch_first=True)
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, values: Tensor) -> Tensor:
        """Add attention, then a layer."""
        values = values + self.attention(values, values, values, need_weights=False)[0]
        return values + torch.relu(self.linear(self.norm(values)))


def classifier(*parts: nn.Module) -> nn.Module:
    """Two classes from what the parts give."""
    return nn.Sequential(*parts, nn.Linear(WIDTH, 2))


def gpt2(**changes: Any) -> Any:
    """Two blocks of GPT-2."""
    import transformers

    sizes = {
        "n_positions": 2 * LENGTH,
        "n_embd": WIDTH,
        "n_layer": 2,
        "n_head": 4,
        "use_cache": False,
    }
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, loss_type="ForCausalLM", **sizes, **off, **ends, **changes
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    """Two blocks of Llama."""
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            use_cache=False,
        )
    )


def bert(*, head_only: bool) -> Any:
    """Two blocks of BERT with a classifier."""
    import transformers

    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = transformers.BertForSequenceClassification(config)
    model.bert.requires_grad_(not head_only)
    return model


def vit() -> Any:
    """Two blocks of a vision transformer."""
    import transformers

    config = transformers.ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=2 * WIDTH,
        image_size=IMAGE,
        patch_size=4,
        num_channels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.ViTForImageClassification(config)


def t5(*, biased: bool) -> Any:
    """Two blocks each of encoder and decoder."""
    import transformers

    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=WIDTH,
        d_kv=8,
        d_ff=2 * WIDTH,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
    )
    model = transformers.T5ForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(biased or "relative_attention_bias" not in name)
    return model


def t5_loss(outputs: Any, batch: Any) -> Tensor:
    """Mean over the tokens of each text."""
    return PER_EXAMPLE(outputs.logits.transpose(1, 2), batch["labels"]).mean(1)


def of_logits(outputs: Any, batch: Any) -> Tensor:
    """Cross-entropy of each text's class."""
    return PER_EXAMPLE(outputs.logits, batch["labels"])


def unet() -> Any:
    """A small UNet of diffusion."""
    import diffusers

    return diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(16, 32),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def noisy_images() -> Rows:
    """Images and times."""
    return Rows(
        sample=torch.randn(N, 3, 8, 8), timestep=torch.randint(0, 1000, (N,)),
    )  # fmt: skip


def denoising(outputs: Any, batch: Any) -> Tensor:
    """Mean square error of each image."""
    return (outputs.sample - batch["sample"]).square().flatten(1).mean(1)


def adapted(model: Any, name: str, **options: Any) -> Any:
    """A model with adapters of PEFT."""
    import peft

    return peft.get_peft_model(model, getattr(peft, name)(**options))


def lora(model: Any, *targets: str, **options: Any) -> Any:
    """A model with LoRA on some layers."""
    return adapted(model, "LoraConfig", r=4, target_modules=list(targets), **options)


@dataclass(frozen=True)
class Kind:
    """A kind of model: how it, its data set and its loss are made."""

    build: Callable[[], nn.Module]
    data: Callable[[], Dataset[Any]]
    loss_fn: Callable[..., Tensor] = PER_EXAMPLE


OF_GPT2 = ("c_attn",)
KINDS = {
    "MLP": Kind(lambda: classifier(nn.Linear(8, WIDTH), nn.Tanh()), lambda: vectors(8)),
    "Conv1d": Kind(
        lambda: classifier(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(4), nn.Flatten()),
        lambda: vectors(4, LENGTH),
    ),
    "Conv2d, GroupNorm": Kind(
        lambda: build_model(ModelConfig(architecture="tanh_cnn"), (1, 28, 28), 2),
        lambda: vectors(1, 28, 28),
    ),
    "Conv3d": Kind(
        lambda: classifier(nn.Conv3d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(2), nn.Flatten()),
        lambda: vectors(1, 6, 6, 6),
    ),
    "ResNet-20, GroupNorm": Kind(
        lambda: build_model(ModelConfig(architecture="resnet20_gn"), (3, 32, 32), 2),
        lambda: vectors(3, 32, 32),
    ),
    "residual block with +=": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), InPlace(relu=False), nn.Flatten(), nn.Linear(144, 2)
        ),
        lambda: vectors(3, 8, 8),
    ),
    "the same, ReLU(inplace=True)": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), InPlace(relu=True), nn.Flatten(), nn.Linear(144, 2)
        ),
        lambda: vectors(3, 8, 8),
    ),
    "BatchNorm2d": Kind(
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)
        ),
        lambda: vectors(3, 8, 8),
    ),
    "nn.LSTM": Kind(
        lambda: classifier(nn.LSTM(4, WIDTH, batch_first=True), First(), Mean()),
        lambda: vectors(LENGTH, 4),
    ),
    "DPLSTM": Kind(
        lambda: classifier(DPLSTM(4, WIDTH, batch_first=True), First(), Mean()),
        lambda: vectors(LENGTH, 4),
    ),
    "DPGRU": Kind(
        lambda: classifier(DPGRU(4, WIDTH, batch_first=True), First(), Mean()),
        lambda: vectors(LENGTH, 4),
    ),
    "nn.MultiheadAttention": Kind(
        lambda: classifier(Attention(nn.MultiheadAttention), Mean()), lambda: vectors(8, WIDTH)
    ),
    "DPMultiheadAttention": Kind(
        lambda: classifier(Attention(DPMultiheadAttention), Mean()), lambda: vectors(8, WIDTH)
    ),
    "Embedding, LayerNorm": Kind(
        lambda: classifier(nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH), Mean()), texts
    ),
    "Embedding(padding_idx=0)": Kind(
        lambda: classifier(nn.Embedding(VOCABULARY, WIDTH, padding_idx=0), Mean()), texts
    ),
    "EmbeddingBag": Kind(lambda: classifier(nn.EmbeddingBag(VOCABULARY, WIDTH)), texts),
    "ViT": Kind(lambda: nn.Sequential(vit(), Logits()), lambda: vectors(3, IMAGE, IMAGE)),
    "ViT, LoRA": Kind(
        lambda: nn.Sequential(lora(vit(), "q_proj", "v_proj", "query", "value"), Logits()),
        lambda: vectors(3, IMAGE, IMAGE),
    ),
    "BERT, head": Kind(
        lambda: bert(head_only=True), lambda: Rows(input_ids=tokens(), labels=labels()), of_logits
    ),
    "BERT, whole": Kind(
        lambda: bert(head_only=False), lambda: Rows(input_ids=tokens(), labels=labels()), of_logits
    ),
    "BERT, whole, position and type ids given": Kind(
        lambda: bert(head_only=False),
        lambda: Rows(
            input_ids=tokens(),
            labels=labels(),
            token_type_ids=torch.zeros(N, LENGTH, dtype=torch.long),
            **positions(),
        ),
        of_logits,
    ),
    "GPT-2, whole": Kind(gpt2, causal, CausalLMLoss()),
    "GPT-2, whole, position ids given": Kind(gpt2, lambda: causal(**positions()), CausalLMLoss()),
    "GPT-2, whole, untied, position ids given": Kind(
        lambda: gpt2(tie_word_embeddings=False), lambda: causal(**positions()), CausalLMLoss()
    ),
    "GPT-2, LoRA": Kind(
        lambda: lora(gpt2(), *OF_GPT2, fan_in_fan_out=True), causal, CausalLMLoss()
    ),
    "GPT-2, LoRA with dropout": Kind(
        lambda: lora(gpt2(), *OF_GPT2, fan_in_fan_out=True, lora_dropout=0.1),
        causal,
        CausalLMLoss(),
    ),
    "GPT-2, DoRA": Kind(
        lambda: lora(gpt2(), *OF_GPT2, fan_in_fan_out=True, use_dora=True), causal, CausalLMLoss()
    ),
    "GPT-2, IA3": Kind(
        lambda: adapted(
            gpt2(),
            "IA3Config",
            target_modules=["c_attn"],
            feedforward_modules=[],
            fan_in_fan_out=True,
        ),
        causal,
        CausalLMLoss(),
    ),
    "GPT-2, prefix tuning": Kind(
        lambda: adapted(gpt2(), "PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4),
        causal,
        CausalLMLoss(),
    ),
    "Llama, whole": Kind(llama, causal, CausalLMLoss()),
    "Llama, LoRA": Kind(lambda: lora(llama(), "q_proj", "v_proj"), causal, CausalLMLoss()),
    "T5": Kind(lambda: t5(biased=True), lambda: Rows(input_ids=tokens(), labels=tokens()), t5_loss),
    "T5, relative positions frozen": Kind(
        lambda: t5(biased=False), lambda: Rows(input_ids=tokens(), labels=tokens()), t5_loss
    ),
    "UNet": Kind(unet, noisy_images, denoising),
    "UNet, LoRA": Kind(lambda: lora(unet(), "to_q", "to_v"), noisy_images, denoising),
}
TRANSFORMERS = (
    "ViT",
    "ViT, LoRA",
    "BERT, whole, position and type ids given",
    "GPT-2, whole, position ids given",
    "GPT-2, LoRA",
    "Llama, whole",
    "Llama, LoRA",
)
WIDE_HEAD = f"""## Wider transformers

The same with width {WIDE[1]} and {WIDE[0]} positions: arithmetic costs more than calls."""


@dataclass
class Cell:
    """What one model does in one mode."""

    says: str  # claim, and the backend if it is not layerwise; or the refusal
    works: bool = False
    backend: str = ""
    attach: float = 0.0


def cell(kind: Kind, mode: str, device: str) -> Cell:
    """Train a few steps with a Recorder attached."""
    model = kind.build().train().to(device)
    data = kind.data()
    try:
        made: Any = PrivacyEngine(accountant="rdp").make_private(
            module=model,
            optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
            data_loader=DataLoader(data, batch_size=BATCH),
            criterion=copy.deepcopy(kind.loss_fn) if mode != "ghost" else _Ghost(kind.loss_fn),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            grad_sample_mode=mode,
        )
    except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
        few = next(batches(DataLoader(data, batch_size=COMPARED), device))
        return Cell(reason(model, few, error))
    module, optimizer, *criterion, loader = made
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(Path(folder) / "run", dataset=data, loss_fn=kind.loss_fn, every=1)
        recorder.draw_privately()
        start = time.process_time()
        try:
            with recorder.attach(module, optimizer, loader):
                seconds = time.process_time() - start
                for batch in itertools.islice(batches(loader, device), 2):
                    optimizer.zero_grad()
                    outputs = call(module, batch.inputs)
                    loss = (criterion or [kind.loss_fn])[0](outputs, batch.targets)
                    (loss if criterion else loss.mean()).backward()
                    optimizer.step()
        except ValueError as error:
            return Cell(shortened(error))
        run = open_run(recorder.run_dir)
        backend = run.header["norm_pass"]["backend"]
        claim = account(run.log, delta=1e-3).claim
    says = claim if backend == "layerwise" else f"{claim}, {backend}"
    return Cell(says, True, backend, seconds)


class _Ghost:
    """A loss that Opacus may give an attribute."""

    def __init__(self, loss_fn: Callable[..., Tensor]) -> None:
        self.loss_fn, self.reduction = loss_fn, "mean"

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        return self.loss_fn(outputs, targets)


def reason(model: nn.Module, few: Batch, error: Exception) -> str:
    """What our own check says of a model that Opacus refuses; else what Opacus says."""
    try:
        validate_module(model)
    except ValueError as own:
        return shortened(own)
    if not ModuleValidator.is_valid(model):
        return "model = opacus.validators.ModuleValidator.fix(model) replaces the layer"
    return hindrance(model, few) or shortened(error)


def batches(loader: Any, device: str) -> Iterator[Batch]:
    """Batches on a device; a dict is the inputs and the targets."""
    for batch in loader:
        inputs, targets = (Keywords(batch),) * 2 if isinstance(batch, dict) else batch
        yield Batch(*(map_tensors(value, lambda t: t.to(device)) for value in (inputs, targets)))


def shortened(error: Exception) -> str:
    """The message on one line of a table."""
    return re.sub(r"\s+", " ", str(error)).replace("|", "/")


def ratio(kind: Kind, backend: str, device: str) -> float:
    """Seconds of a norm pass to those of a plain one; norms are first compared with float64."""
    model = kind.build().train().to(device)
    data = kind.data()
    batch = next(batches([default_collate([data[i] for i in range(TIMED)])], device))
    with NormPass(model, kind.loss_fn, batch.inputs, batch.targets, backend=backend) as norm_pass:
        if not norm_pass.caveats:
            compare(model, kind, norm_pass, batch)

        def plain() -> None:
            losses = kind.loss_fn(call(model, batch.inputs), batch.targets)
            losses.mean().backward()

        runs = [lambda: norm_pass(batch.inputs, batch.targets), plain]
        seconds = [min(timed(run) for _ in range(ROUNDS)) for run in runs]
    return seconds[0] / seconds[1]


def timed(run: Callable[[], object]) -> float:
    """CPU seconds of a run; of a GPU, until it is done."""
    start = time.process_time()
    run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.process_time() - start


def compare(model: nn.Module, kind: Kind, norm_pass: NormPass, batch: Batch) -> None:
    """Raise RuntimeError unless the norms are those of autograd in float64, or just above."""

    def wide(value: Tensor) -> Tensor:
        return value.double() if value.is_floating_point() else value

    few = batch.rows(0, COMPARED)
    double = Batch(map_tensors(few.inputs, wide), map_tensors(few.targets, wide))
    in_double = ModelInTraining(copy.deepcopy(model).double(), kind.loss_fn)
    expected = norms_by_autograd(in_double, double)
    norms, _ = norm_pass(few.inputs, few.targets)
    if not bool(((norms >= expected * (1 - 1e-9)) & (norms <= expected * 1.002)).all()):
        raise RuntimeError(f"norms are {norms}, by autograd in float64 {expected}")


def row(name: str, kind: Kind, device: str) -> tuple[str, list[Cell], str, str]:
    """One line of the table: name with parameters trained, cells, ratio, seconds to attach."""
    torch.manual_seed(0)
    cells = [cell(kind, mode, device) for mode in MODES]
    backends = dict.fromkeys(each.backend for each in cells if each.works)
    ratios = [f"{ratio(kind, backend, device):.1f}" for backend in backends]
    attach = max((each.attach for each in cells if each.works), default=0.0)
    trained = sum(p.numel() for p in kind.build().parameters() if p.requires_grad)
    return f"{name} ({trained:,})", cells, ", ".join(ratios), f"{attach:.1f}" if ratios else ""


def wide_row(name: str, kind: Kind, device: str) -> str:
    """Cost of a norm pass of a wider and longer model, on one line of a table."""
    global LENGTH, WIDTH, IMAGE
    small = LENGTH, WIDTH, IMAGE
    LENGTH, WIDTH, IMAGE = WIDE
    try:
        torch.manual_seed(0)
        trained = sum(p.numel() for p in kind.build().parameters() if p.requires_grad)
        return f"| {name} ({trained:,}) | {ratio(kind, 'layerwise', device):.2f} |"
    finally:
        LENGTH, WIDTH, IMAGE = small


def table(rows: list[tuple[str, list[Cell], str, str]]) -> str:
    """The rows, and below them each refusal once, whatever layer it names."""
    refused = [each.says for _, cells, *_ in rows for each in cells if not each.works]
    kinds = dict.fromkeys(map(kind_of, refused))
    numbers = {says: [*kinds].index(kind_of(says)) + 1 for says in refused}
    lines = [TITLES, ("---",) * len(TITLES)]
    for name, cells, cost, attach in rows:
        shown = (c.says if c.works else f"refused ({numbers[c.says]})" for c in cells)
        lines.append((name, *shown, cost, attach))
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return text + "\n\n" + "\n".join(f"{number}. {kind}" for number, kind in enumerate(kinds, 1))


def kind_of(refusal: str) -> str:
    """A refusal, without the names of the layers that it is about, and without torch's error."""
    refusal = re.sub(r" \(\w+Error: [^;]*\)(?=;)", "", refusal)
    return re.sub(r"\w+ '[^']+'(?: and \w+ '[^']+')*", "*layer*", refusal)


def main() -> None:
    """Print the table, or write it into a page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--write", type=Path, help="a page; what follows its marker is replaced")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows, wide = [], ["| " + " | ".join(WIDE_TITLES) + " |", "| --- | --- |"]
    for name in options.only:
        try:
            rows.append(row(name, KINDS[name], options.device))
            if name in TRANSFORMERS:
                wide.append(wide_row(name, KINDS[name], options.device))
        except ImportError as error:
            print(f"{name}: left out, {error.name} is not installed")
            continue
        print(rows[-1], flush=True)
    names = ("transformers", "peft", "diffusers")
    packages = [f"{name} {sys.modules[name].__version__}" for name in names if name in sys.modules]
    device = torch.cuda.get_device_name() if options.device == "cuda" else processor()
    versions = [f"torch {torch.__version__}", f"Opacus {opacus.__version__}", *packages]
    text = f"{device}; {', '.join(versions)}.\n\n{table(rows)}\n\n{WIDE_HEAD}\n\n" + "\n".join(wide)
    if options.write is None:
        print(text)
    else:
        before = options.write.read_text("utf-8").partition(MARKER)[0]
        options.write.write_text(f"{before}{MARKER}\n\n{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
