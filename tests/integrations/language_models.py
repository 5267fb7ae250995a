"""Tiny language models and texts, for tests against the trainers of Hugging Face."""

import pytest
import torch
from torch.utils.data import Dataset

from indpriv.norm_log.evidence import lines_of
from indpriv.norm_log.norm_log import open_run
from indpriv.norm_log.verify import verify

ASK = "pip install 'indpriv[hf]' to test against it"
WORDS, LONGEST = 32, 12


class Texts(Dataset):
    """Random texts of several lengths."""

    def __init__(self, n=60):
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, LONGEST, (n,), generator=generator).tolist()
        self.texts = [torch.randint(WORDS, (k,), generator=generator).tolist() for k in lengths]

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return {"input_ids": self.texts[index]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [-100] * (longest - len(row["input_ids"])) for row in rows]
    labels = torch.tensor(padded)
    mask = labels >= 0
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask.long(), "labels": labels}


def gpt2(**settings):
    transformers = pytest.importorskip("transformers", reason=ASK)
    settings = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0} | settings
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=LONGEST,
        n_embd=16,
        n_layer=1,
        n_head=2,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    return transformers.GPT2LMHeadModel(config)


def with_adapters(model, dropout=0.0):
    peft = pytest.importorskip("peft", reason="pip install peft to test against it")
    adapters = peft.LoraConfig(
        task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=dropout
    )
    return peft.get_peft_model(model, adapters)


def training_arguments(tmp_path, **settings):
    transformers = pytest.importorskip("transformers", reason=ASK)
    settings = {"num_train_epochs": 2, "save_strategy": "no", "report_to": "none"} | settings
    out = str(tmp_path / "out")
    return transformers.TrainingArguments(out, use_cpu=True, disable_tqdm=True, **settings)


def lines_by_key(run_dir):
    """Lines of evidence of a recorded run."""
    return {line.key: line for line in lines_of(verify(open_run(run_dir)), {})}
