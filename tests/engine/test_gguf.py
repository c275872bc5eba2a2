"""A GGUF file runs as the model that it was made from."""

from __future__ import annotations

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from engine import Engine, EngineConfig, SamplingParams
from engine import gguf as ours
from engine.errors import ModelUnavailable
from engine.info import gather

from .test_parity import alone

NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm", "model.embed_tokens": "token_embd",
    "model.norm": "output_norm", "lm_head": "output",
}  # fmt: skip


def write_gguf(source: Path, target: Path, dtype: type = np.float32) -> None:
    """The tiny Llama in llama.cpp's names and order of rotated dimensions."""
    from safetensors.numpy import load_file

    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name("tiny")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _write_tokenizer(writer, source, config["vocab_size"])
    for name, weights in load_file(source / "model.safetensors").items():
        own = np.float32 if weights.ndim == 1 else dtype
        writer.add_tensor(_gguf_name(name), _rotation_order(name, weights, config).astype(own))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _gguf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        number, inner = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{number}.{NAMES[inner]}.weight"
    return f"{NAMES[stem]}.weight"


def _rotation_order(name: str, weights: np.ndarray, config: dict[str, int]) -> np.ndarray:
    """llama.cpp has the two dimensions that turn together side by side."""
    if "q_proj" not in name and "k_proj" not in name:
        return weights
    halves = weights.reshape(-1, 2, config["head_dim"] // 2, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def _write_tokenizer(writer: gguf.GGUFWriter, source: Path, size: int) -> None:
    core = json.loads((source / "tokenizer.json").read_text())["model"]
    tokens = sorted(core["vocab"], key=core["vocab"].__getitem__)
    tokens += [f"<unused {i}>" for i in range(len(tokens), size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (size - 1))
    writer.add_token_merges([" ".join(pair) for pair in core["merges"]])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)


@pytest.fixture
def gguf_file(tmp_path, model_path, monkeypatch):
    monkeypatch.setattr(ours, "user_cache_path", lambda name: tmp_path / "cache" / name)
    write_gguf(Path(model_path("tiny-llama")), tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def test_a_gguf_file_says_what_its_model_says(gguf_file, model_path):
    prompt = [5, 60, 7, 8, 99, 10, 11]
    expected = alone(model_path("tiny-llama"), tuple(prompt), 12)
    engine = Engine(EngineConfig(model=str(gguf_file), num_blocks=8))
    (done,) = engine.generate([prompt], SamplingParams(max_tokens=12))
    assert done.token_ids == expected
    assert engine.header.model.name == "tiny"
    text = "the cat sat on the mat"
    assert engine.loaded.tokenizer.decode(engine.loaded.tokenizer(text)["input_ids"]) == text


def test_a_file_is_unpacked_once_and_anew_when_it_changes(gguf_file):
    told: list[str] = []

    def unpack() -> Path:
        return ours.unpacked(gguf_file, told.append, weights=True)

    first = unpack()
    assert unpack() == first
    assert told == ["unpacking tiny.gguf"]
    assert [path.name for path in first.parent.iterdir()] == [first.name]
    os.utime(gguf_file, ns=(1, 1))
    assert unpack() != first


def test_half_precision_is_kept(gguf_file, model_path):
    write_gguf(Path(model_path("tiny-llama")), gguf_file, np.float16)
    made = ours.unpacked(gguf_file, lambda _: None, weights=True)
    assert json.loads((made / "config.json").read_text())["dtype"] == "float16"


def test_info_needs_no_weights(gguf_file):
    found = gather(EngineConfig(model=str(gguf_file)))
    assert found.model.num_layers == 2
    (made,) = (gguf_file.parent / "cache" / "cbviz" / "gguf").iterdir()
    assert not list(made.glob("*.safetensors"))


def test_what_is_wrong_with_a_file_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setattr(ours, "user_cache_path", lambda name: tmp_path / "cache" / name)
    file = tmp_path / "bad.gguf"
    file.write_bytes(b"not a model")
    with pytest.raises(ModelUnavailable, match="cannot read the GGUF file") as refusal:
        Engine(EngineConfig(model=str(file)))
    assert "\n" not in str(refusal.value)
    assert not list((tmp_path / "cache" / "cbviz" / "gguf").iterdir())
    monkeypatch.setattr(ours, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install 'cbviz\[gguf\]'"):
        Engine(EngineConfig(model=str(file)))
