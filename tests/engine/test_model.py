"""Models that cannot work are refused with the reason; odd settings too."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.config import parse_bytes
from engine.errors import InvalidInput, ModelUnavailable, StepFailed
from engine.info import gather


def config_dir(tmp_path: Path, **config: object) -> str:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "is an encoder-decoder model"),
        ({"model_type": "mamba"}, "linear_attention layers"),
        ({"model_type": "vit"}, "is not a text-generation model"),
        ({"model_type": "bloom"}, r"position biases in its attention \(ALiBi\)"),
        ({"model_type": "gpt_oss"}, "has attention sinks"),
        ({"model_type": "deepseek_v3"}, "compressed keys and values"),
        ({"model_type": "gemma4_unified_text"}, "has layers of different shapes"),
        ({"model_type": "xglm"}, "does not let its attention be replaced"),
        ({"model_type": "no-such-thing"}, "cannot read the config"),
        ({}, "cannot read the config"),
    ],
)
def test_architectures_that_cannot_work_are_refused_before_weights(tmp_path, config, message):
    with pytest.raises(ModelUnavailable, match=message) as refusal:
        Engine(EngineConfig(model=config_dir(tmp_path, **config)))
    assert "\n" not in str(refusal.value)


def test_a_damaged_directory_is_told_in_one_line(tmp_path, model_path):
    source = Path(model_path("tiny-gpt2"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ModelUnavailable, match="cannot read the weights") as refusal:
        Engine(EngineConfig(model=str(tmp_path)))
    assert "\n" not in str(refusal.value)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="cannot read the config"):
        Engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    "model", ["/nowhere/at/all", "./nope", "a/b/c", "-x", "what is this?", "~nobody/x"]
)
def test_what_is_neither_a_directory_nor_a_hub_name(model):
    with pytest.raises(ModelUnavailable, match="there is no directory"):
        Engine(EngineConfig(model=model))


def test_a_model_that_ignores_the_interface_is_caught_at_load(model_path, monkeypatch):
    """If positions did not reach the model, packed tokens would be wrong: refused, not shown."""
    from engine.runner import ModelRunner

    original = ModelRunner.logits

    def without_positions(self, batch, cache):
        batch.position_ids = torch.zeros_like(batch.position_ids)
        return original(self, batch, cache)

    monkeypatch.setattr(ModelRunner, "logits", without_positions)
    with pytest.raises(ModelUnavailable, match="does not honour the attention interface"):
        Engine(EngineConfig(model=model_path("tiny-gpt2")))


def test_settings_that_do_not_fit_the_model(model_path):
    path = model_path("tiny-gpt2")
    with pytest.raises(ModelUnavailable, match=r"more than the context of .*, 96"):
        Engine(EngineConfig(model=path, max_model_len=97))
    with pytest.raises(InvalidInput, match="no KV block fits: one takes"):
        Engine(EngineConfig(model=path, kv_memory=100))
    with pytest.raises(InvalidInput, match="are free: at most"):
        Engine(EngineConfig(model=path, num_blocks=4_000_000))
    with pytest.raises(InvalidInput, match="give --num-blocks or --kv-memory, not both"):
        EngineConfig(num_blocks=1, kv_memory=1)
    if not torch.cuda.is_available():
        with pytest.raises(ModelUnavailable, match="no CUDA device"):
            Engine(EngineConfig(model=path, device="cuda"))


def test_one_block_runs_what_fits_in_it_and_refuses_the_rest(model_path):
    engine = Engine(EngineConfig(model=model_path("tiny-gpt2"), num_blocks=1, block_size=16))
    (done,) = engine.generate(["the cat"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(done.token_ids) == 3
    with pytest.raises(ValueError, match="the pool has 1"):
        engine.generate(["the cat"], SamplingParams(max_tokens=64))


def test_a_forward_that_raises_leaves_the_engine_usable(model_path, monkeypatch):
    engine = Engine(EngineConfig(model=model_path("tiny-gpt2"), token_budget=4))
    expected = engine.generate(["the cat sat"], SamplingParams(max_tokens=5))[0].token_ids
    engine.add_request("the cat sat", SamplingParams(max_tokens=5), "again")
    engine.core.want_completions(["again"])
    engine.step()

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("device-side trouble")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "logits", broken)
        with pytest.raises(StepFailed, match="changed nothing: device-side trouble"):
            engine.step()
    while engine.has_work:
        engine.step()
    assert engine.core.take_completion("again").token_ids == expected


def test_info_plans_memory_without_reading_weights(tmp_path, model_path):
    source = Path(model_path("tiny-llama"))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    config = EngineConfig(model=str(tmp_path), block_size=8, num_blocks=10)
    found = gather(config)
    real = Engine(EngineConfig(model=str(source), block_size=8, num_blocks=10))
    assert found.model.num_parameters == real.loaded.facts.num_parameters
    assert found.memory.weight_bytes == real.memory.weight_bytes
    assert found.memory.bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert found.memory.pool_bytes == 10 * 8 * found.memory.bytes_per_token


def test_the_default_pool_stays_within_its_share_of_memory():
    found = gather(EngineConfig(max_num_seqs=1_000_000))
    assert found.memory.num_blocks == found.memory.fitting
    assert found.memory.pool_bytes <= found.memory.free_bytes // 4


@pytest.mark.parametrize(
    ("text", "size"), [("512MiB", 512 * 2**20), ("1.5 gb", 1_500_000_000), ("7", 7), ("3KiB", 3072)]
)
def test_sizes_in_words(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "5 parsecs", "-1", "1e9"])
def test_what_is_no_size(text):
    with pytest.raises(InvalidInput, match="is not a size"):
        parse_bytes(text)


def test_half_precision_runs(model_path):
    for dtype in ("bfloat16", "float16"):
        engine = Engine(EngineConfig(model=model_path("tiny-llama"), dtype=dtype))
        (done,) = engine.generate(["the cat"], SamplingParams(max_tokens=4, ignore_eos=True))
        assert len(done.token_ids) == 4
        assert engine.header.dtype == dtype


def test_a_model_that_cannot_run_at_all_is_refused_in_one_line(model_path, monkeypatch):
    from engine.runner import ModelRunner

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("The size of tensor a must match\nthe size of tensor b")

    monkeypatch.setattr(ModelRunner, "logits", broken)
    with pytest.raises(ModelUnavailable, match="cannot run on a paged cache: The size") as refusal:
        Engine(EngineConfig(model=model_path("tiny-gpt2")))
    assert "\n" not in str(refusal.value)


def test_longrope_is_kept_to_where_its_positions_do_not_depend_on_the_batch(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    from .conftest import save_tokenizer

    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 4.0,
    }  # fmt: skip
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=280, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
            rope_parameters=rope,
        )
    ).save_pretrained(tmp_path)  # fmt: skip
    save_tokenizer(tmp_path)
    assert Engine(EngineConfig(model=str(tmp_path))).memory.max_model_len == 16
    with pytest.raises(ModelUnavailable, match=r"beyond 16 tokens \(longrope\)"):
        Engine(EngineConfig(model=str(tmp_path), max_model_len=17))


def test_generate_leaves_nothing_behind_when_it_fails(model_path, monkeypatch):
    engine = Engine(EngineConfig(model=model_path("tiny-gpt2")))
    with pytest.raises(InvalidInput, match="not of 'a'"):
        engine.generate(["ok", ["a"]])
    assert not engine.has_work

    def broken(*_: object) -> torch.Tensor:
        raise RuntimeError("trouble")

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "logits", broken)
        with pytest.raises(StepFailed):
            engine.generate(["ok", "fine"])
    assert not engine.has_work
    engine.step()
    assert engine.core.scheduler.pool.num_held == 0


def test_half_characters_in_prompts_and_ids_are_replaced(model_path):
    engine = Engine(EngineConfig(model=model_path("tiny-gpt2")))
    request_id = engine.add_request("caf\udce9", request_id="x\udce9")
    record = engine.step()
    assert request_id == "x?"
    assert record.events[0].prompt == "caf?"


def test_a_container_s_memory_limit_counts(tmp_path):
    from engine.memory import cgroup_free

    assert cgroup_free(tmp_path) is None
    (tmp_path / "memory.current").write_text("300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    assert cgroup_free(tmp_path) == 700


def test_the_models_own_repetition_penalty_is_that_of_generate(tmp_path, model_path):
    """And a request can refuse it."""
    from transformers import AutoModelForCausalLM

    shutil.copytree(model_path("tiny-gpt2"), tmp_path, dirs_exist_ok=True)
    settings = tmp_path / "generation_config.json"
    facts = json.loads(settings.read_text())
    said = {}
    for penalty in (1.0, 1.4):
        settings.write_text(json.dumps({**facts, "repetition_penalty": penalty}))
        engine = Engine(EngineConfig(model=str(tmp_path)))
        assert engine.loaded.repetition_penalty == penalty
        model = AutoModelForCausalLM.from_pretrained(tmp_path)
        ids = torch.tensor([[5, 6, 7]])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
        )[0, 3:].tolist()
        (done,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20))
        assert done.token_ids == expected
        said[penalty] = expected
    assert said[1.0] != said[1.4]
    (done,) = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=20, repetition_penalty=1.0))
    assert done.token_ids == said[1.0]
    settings.write_text(json.dumps({**facts, "repetition_penalty": 0.0}))
    with pytest.raises(ModelUnavailable, match=r"has a repetition_penalty of 0\.0; it must"):
        Engine(EngineConfig(model=str(tmp_path)))
