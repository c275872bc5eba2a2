"""Models with random weights, for measuring and comparing where nothing can be downloaded."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.locate import EMBEDDED_PATH

SMALL = {
    "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 1024, "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": 50},
    "gemma2": SMALL | {"sliding_window": 50, "query_pre_attn_scalar": 32},
}
"""Small models that between them need windows, soft-caps and grouped heads."""
LLAMA_1B = {
    "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
    "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 0,
    "bos_token_id": 0,
}  # fmt: skip
"""The shape of Llama 3.2 1B."""


def save_random(
    path: Path, model_type: str, settings: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    """Write a model directory with the embedded model's tokenizer; the same weights each time."""
    torch.manual_seed(0)
    with device:
        config = AutoConfig.for_model(model_type, **settings)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                # Wide enough that logits are decided, whatever the order of summation.
                torch.nn.init.normal_(parameter, std=2.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_PATH / name, path / name)
