"""Models of well-known shapes with random weights, made here: a benchmark needs no download."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

SHAPES = ("gpt2-124m", "smollm2-135m")


@contextlib.contextmanager
def made(shape: str) -> Iterator[Path]:
    """A directory with a random model of this shape and a tokenizer of one word a token."""
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="cbviz-bench-") as folder:
        path = Path(folder) / shape
        torch.manual_seed(0)
        model = _model(shape)
        model.save_pretrained(path)
        words = {f"w{i} ": i for i in range(model.config.vocab_size)}
        core = Tokenizer(models.WordLevel(words, unk_token="w0 "))
        PreTrainedTokenizerFast(tokenizer_object=core, eos_token="w0 ").save_pretrained(path)
        yield path


def _model(shape: str) -> Any:
    if shape == "gpt2-124m":
        return GPT2LMHeadModel(GPT2Config())
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192,
            tie_word_embeddings=True, rms_norm_eps=1e-5, eos_token_id=0, bos_token_id=0,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        )
    )  # fmt: skip
