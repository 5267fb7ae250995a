import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.data import Dataset

config = transformers.GPT2Config(
    vocab_size=32, n_positions=12, n_embd=16, n_layer=1, n_head=2, use_cache=False,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
)  # fmt: skip
model = get_peft_model(
    transformers.GPT2LMHeadModel(config),
    LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True),
)


class Texts(Dataset):
    def __len__(self):
        return 121

    def __getitem__(self, index):
        return {"input_ids": [(index * k + k) % 32 for k in range(1, 4 + index % 9)]}


def collate(rows):
    longest = max(len(row["input_ids"]) for row in rows)
    padded = [row["input_ids"] + [-100] * (longest - len(row["input_ids"])) for row in rows]
    labels = torch.tensor(padded)
    mask = labels >= 0
    return {"input_ids": labels.clamp(min=0), "attention_mask": mask.long(), "labels": labels}


texts = Texts()
