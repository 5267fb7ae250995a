"""A small GPT-2 with adapters (LoRA), from a configuration: only adapters and head are trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from indpriv.errors import InputError

_WIDTH, _LAYERS, _HEADS, _RANK = 64, 2, 4, 8


class Gpt2WithLora(nn.Module):
    """GPT-2 with random weights that are frozen, adapters of rank 8 in its attention, and a head.

    It reads numbers of symbols, and says what comes after the last one.
    """

    def __init__(self, length: int, n_symbols: int) -> None:
        """Build it for texts of one length; InputError if transformers or peft is missing."""
        super().__init__()
        transformers, peft = _packages()
        config = transformers.GPT2Config(
            vocab_size=n_symbols,
            n_positions=length,
            n_embd=_WIDTH,
            n_layer=_LAYERS,
            n_head=_HEADS,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            activation_function="gelu_pytorch_tanh",
            bos_token_id=0,
            eos_token_id=0,
        )
        adapters = peft.LoraConfig(r=_RANK, target_modules=["c_attn"], fan_in_fan_out=True)
        self.body = peft.get_peft_model(transformers.GPT2Model(config), adapters)
        self.head = nn.Linear(_WIDTH, n_symbols)

    def forward(self, symbols: Tensor) -> Tensor:
        """Map symbols (batch, length) to logits of the next one (batch, n_symbols)."""
        ids = symbols.long()
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        states = self.body(input_ids=ids, position_ids=places).last_hidden_state
        logits: Tensor = self.head(states[:, -1])
        return logits


def _packages() -> tuple[Any, Any]:
    try:
        import peft
        import transformers
    except ImportError as error:
        raise InputError(
            "the architecture gpt2_lora needs transformers and peft; pip install transformers peft"
        ) from error
    return transformers, peft
