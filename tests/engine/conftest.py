"""Model directories for the tests that run real models: tiny random ones, the embedded one, and
any that `CBVIZ_TEST_MODELS` (paths, separated like PATH) names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

EXTRA_MODELS = [path for path in os.environ.get("CBVIZ_TEST_MODELS", "").split(os.pathsep) if path]
MODELS = ["tiny-gpt2", "tiny-llama", "embedded", *EXTRA_MODELS]


@pytest.fixture(scope="session", autouse=True)
def one_thread_each():
    """Processes that run tests side by side only wait for each other's threads."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        import torch

        torch.set_num_threads(1)


def save_tokenizer(path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=["<end>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(["the cat sat on the mat and the dog sat on the cat"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>").save_pretrained(path)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory) -> dict[str, str]:
    """Random models of both families, with weights large enough for decided logits."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models")
    shared = {"vocab_size": 280, "eos_token_id": 0, "bos_token_id": 0, "initializer_range": 0.3}
    made = {
        "tiny-gpt2": GPT2LMHeadModel(
            GPT2Config(n_positions=96, n_embd=32, n_layer=2, n_head=4, **shared)
        ),
        "tiny-llama": LlamaForCausalLM(
            LlamaConfig(
                hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
                num_key_value_heads=2, head_dim=8, max_position_embeddings=96, **shared,
            )
        ),
    }  # fmt: skip
    for name, model in made.items():
        torch.manual_seed(len(name))
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(folder / name)
        save_tokenizer(folder / name)
    return {name: str(folder / name) for name in made}


@pytest.fixture(scope="session")
def model_path(tiny_models):
    """The path of a model by its name in MODELS."""

    def path(name: str) -> str:
        return tiny_models.get(name, name)

    return path
