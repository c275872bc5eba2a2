"""Every family of decoder-only models says in a batch what it says alone.

Tiny random models, their sliding windows shorter than the sequences, weights large enough for
decided logits. What a family needs beyond Llama (windows, soft-caps, scales, odd norms, fewer
rotated dimensions, …) shows as wrong tokens where it is missing.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import interface
from engine.errors import ModelUnavailable

from .conftest import save_tokenizer
from .test_parity import Ask, alone, loaded_engine, resized, run_and_compare

WINDOW = 6
COMMON = {
    "vocab_size": 280, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "eos_token_id": 0, "bos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
GEMMA = {"head_dim": 8, "query_pre_attn_scalar": 5, "sliding_window": WINDOW}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ALTERNATING = ["sliding_attention", "full_attention"]

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": WINDOW, "head_dim": 8},
    "gemma2": GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    "gemma3_text": GEMMA | {"layer_types": ALTERNATING},
    "phi3": {"sliding_window": WINDOW},
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo2": {},
    "olmo3": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0},
    "starcoder2": {"sliding_window": WINDOW},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_bigcode": {"num_key_value_heads": None},
    "gptj": {"rotary_dim": 4, "num_key_value_heads": None},
    "nemotron": {"head_dim": 8},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None},
    "cohere2": {"sliding_window": WINDOW, "layer_types": ALTERNATING},
    "mixtral": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": MOE | {"num_experts": 4, "head_dim": 8},
}
WINDOWS = {
    "qwen2": [0, WINDOW],
    "mistral": [WINDOW, WINDOW],
    "gemma2": [WINDOW, 0],
    "gemma3_text": [WINDOW, 0],
    "phi3": [WINDOW, WINDOW],
    "olmo3": [WINDOW, 0],
    "starcoder2": [WINDOW, WINDOW],
    "cohere2": [WINDOW, 0],
    "mixtral": [WINDOW, WINDOW],
}


@pytest.fixture(scope="module")
def family_path(tmp_path_factory):
    """The path of a tiny random model of a family."""
    made: dict[str, str] = {}

    def path(name: str) -> str:
        if name not in made:
            made[name] = str(tmp_path_factory.mktemp(name))
            save_model(Path(made[name]), name, **FAMILIES[name])
        return made[name]

    return path


def save_model(path: Path, model_type: str, **own: Any) -> None:
    settings = {k: v for k, v in (COMMON | own).items() if v is not None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    torch.manual_seed(len(model_type))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(path)
    save_tokenizer(path)


def workload(seed: int) -> list[Ask]:
    """Ragged requests."""
    rng = random.Random(seed)
    return [
        Ask([rng.randrange(2, 280) for _ in range(rng.randint(1, 30))], rng.randint(2, 12), arrival)
        for arrival in range(4)
    ]


@pytest.mark.parametrize("attention", ["dense", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_says_in_a_batch_what_it_says_alone(family_path, family, attention):
    path = family_path(family)
    engine = loaded_engine(path, attention)
    assert engine.header.model.windows == WINDOWS.get(family, [])
    chunks = 0
    for seed, (budget, block_size) in enumerate([(5, 3), (16, 4), (64, 16)]):
        sizes = {"token_budget": budget, "max_num_seqs": 3}
        with resized(engine, block_size=block_size, num_blocks=60, **sizes):
            chunks += run_and_compare(engine, path, workload(seed))["chunk"]
    assert chunks


@pytest.mark.parametrize(
    ("family", "missing"), [(family, "window") for family in WINDOWS] + [("gemma2", "softcap")]
)
def test_what_a_family_needs_matters(family_path, family, missing, monkeypatch):
    """The workloads would say other things if windows or soft-caps were not honoured."""
    path = family_path(family)
    prompts = [ask.prompt for ask in workload(0)]
    expected = [alone(path, tuple(prompt), 10) for prompt in prompts]
    whole = interface.IMPLEMENTATIONS["paged"]
    engine = Engine(EngineConfig(model=path, num_blocks=64))

    def lacking(*args: Any, **asked: Any) -> torch.Tensor:
        return whole(*args, **asked | {missing: 0})

    with monkeypatch.context() as patch:
        patch.setitem(interface.IMPLEMENTATIONS, "paged", lacking)
        interface.register()
        found = engine.generate(prompts, SamplingParams(max_tokens=10))
    interface.register()
    assert [done.token_ids for done in found] != expected


@pytest.mark.parametrize(
    ("family", "own", "reason"),
    [
        ("granite_swa", {"sliding_window": WINDOW}, "it has attention sinks"),
        ("gpt_neox", {"num_key_value_heads": 2}, "its keys have 4 heads of 8 numbers, and 2 of 8"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
            | {"num_experts": 4, "shared_expert_intermediate_size": 24} | MOE,
            "does not tell its layers of its sliding window of 6 tokens: give --max-model-len 6",
        ),
    ],
)  # fmt: skip
def test_what_only_a_batch_shows_is_refused_when_loaded(tmp_path, family, own, reason):
    save_model(tmp_path, family, **own)
    with pytest.raises(ModelUnavailable, match=reason) as refusal:
        Engine(EngineConfig(model=str(tmp_path)))
    assert "\n" not in str(refusal.value)
    if "--max-model-len" in reason:
        Engine(EngineConfig(model=str(tmp_path), max_model_len=WINDOW))
