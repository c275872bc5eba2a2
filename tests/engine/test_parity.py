"""Greedy output equals `generate()` of each request alone, token for token, in float32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, SamplingParams
from engine.block_pool import BlockPool, blocks_for
from engine.core import EngineCore
from engine.detokenizer import TokenizerText
from engine.locate import local_model
from engine.record import Preempted
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.world import World

from .conftest import MODELS

SETTINGS = settings(max_examples=25, deadline=None, derandomize=True)


@cache
def reference_model(path: str) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(local_model(path), dtype=torch.float32).eval()


@cache
def alone(path: str, prompt: tuple[int, ...], max_tokens: int) -> list[int]:
    """What transformers says after the prompt."""
    ids = torch.tensor([prompt])
    output = reference_model(path).generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False
    )
    return output[0, len(prompt) :].tolist()


@cache
def loaded_engine(path: str, attention: str) -> Engine:
    return Engine(EngineConfig(model=path, attention=attention, num_blocks=64))


@contextlib.contextmanager
def resized(engine: Engine, *, block_size: int, num_blocks: int, **sizes: int) -> Iterator[None]:
    """The engine with another pool and other limits, without loading its model again."""
    core, runner = engine.core, engine.runner
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_model_len=engine.memory.max_model_len,
        eos_token_ids=engine.loaded.eos_token_ids,
        **sizes,
    )
    engine.runner = ModelRunner(engine.loaded, num_blocks, block_size)
    engine.core = EngineCore(scheduler, engine.runner, TokenizerText(engine.loaded.tokenizer))
    try:
        yield
    finally:
        engine.core, engine.runner = core, runner


@pytest.mark.parametrize("attention", ["dense", "paged"])
@pytest.mark.parametrize("name", MODELS)
def test_random_workloads_say_what_each_request_says_alone(model_path, name, attention):
    path = model_path(name)
    engine = loaded_engine(path, attention)
    vocab = engine.loaded.facts.vocab_size
    seen = {"preempted": 0, "chunks": 0}

    @SETTINGS
    @given(
        requests=st.lists(
            st.tuples(
                st.lists(st.integers(0, vocab - 1), min_size=1, max_size=30),
                st.integers(1, 16),
                st.integers(0, 6),
            ),
            min_size=1,
            max_size=6,
        ),
        budget=st.sampled_from([1, 2, 3, 5, 8, 16, 64]),
        seqs=st.integers(1, 6),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        spare=st.sampled_from([0, 0, 1, 3, 50]),
    )
    def check(requests, budget, seqs, block_size, spare):
        need = max(blocks_for(len(p) + n - 1, block_size) for p, n, _ in requests)
        sizes = {"token_budget": budget, "max_num_seqs": seqs}
        with resized(engine, block_size=block_size, num_blocks=need + spare, **sizes):
            preempted, chunks = run_and_compare(engine, path, requests)
        seen["preempted"] += preempted
        seen["chunks"] += chunks

    check()
    assert seen["preempted"], "no example preempted anything"
    assert seen["chunks"], "no example split a prompt"


def run_and_compare(engine: Engine, path: str, requests: list) -> tuple[int, int]:
    """Run (prompt, max_tokens, arrival step) requests; how many preemptions and chunks it took."""
    later = sorted(enumerate(requests), key=lambda pair: pair[1][2])
    ids: dict[int, str] = {}
    world = None
    preempted = chunks = 0
    while later or engine.has_work:
        while later and (later[0][1][2] <= engine.next_step or not engine.has_work):
            index, (prompt, max_tokens, _) = later.pop(0)
            ids[index] = engine.add_request(prompt, SamplingParams(max_tokens=max_tokens))
            engine.core.want_completions([ids[index]])
        record = engine.step()
        engine.core.scheduler.check_integrity()
        world = world or World(_header(engine))
        world.apply(record)
        assert list(world.free) == list(engine.core.scheduler.pool.free)
        preempted += sum(isinstance(event, Preempted) for event in record.events)
        chunks += sum(not segment.samples for segment in record.segments)
    assert engine.core.scheduler.pool.num_held == 0
    for index, (prompt, max_tokens, _) in enumerate(requests):
        completion = engine.core.take_completion(ids[index])
        assert completion is not None
        assert completion.token_ids == alone(path, tuple(prompt), max_tokens)
        assert world is not None
        view = world.requests[ids[index]]
        assert view.token_ids[view.num_prompt_tokens :] == completion.token_ids
        assert view.text == completion.text
    return preempted, chunks


def _header(engine: Engine):
    import msgspec

    pool = engine.core.scheduler.pool
    return msgspec.structs.replace(
        engine.header, num_blocks=pool.num_blocks, block_size=pool.block_size
    )


@pytest.mark.parametrize("name", MODELS)
def test_streamed_text_is_what_the_tokenizer_says_of_all_tokens(model_path, name):
    engine = loaded_engine(model_path(name), "paged")
    tokenizer = engine.loaded.tokenizer
    params = SamplingParams(max_tokens=30, temperature=1.5, ignore_eos=True)
    prompts = ["Once upon a time", "¿Qué? naïve 日本語 👩‍👩‍👧", "x"]
    for completion in engine.generate(prompts, params):
        prompt_ids = tokenizer(completion.prompt)["input_ids"]
        whole = tokenizer.decode(prompt_ids + completion.token_ids, skip_special_tokens=True)
        before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
        assert whole == before + completion.text


def test_generate_refuses_all_when_one_can_never_run(model_path):
    engine = loaded_engine(model_path("tiny-llama"), "paged")
    with pytest.raises(ValueError, match="tokens and the context 96"):
        engine.generate([[1, 2], [3] * 200])
    assert not engine.has_work
    with pytest.raises(ValueError, match="the prompt is empty"):
        engine.generate([""])
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        engine.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(ValueError, match="token id 999999 is not in the vocabulary of 280"):
        engine.add_request([999999])


def test_a_seed_gives_the_same_text_whatever_shares_the_batch(model_path):
    engine = loaded_engine(model_path("tiny-gpt2"), "paged")
    params = SamplingParams(max_tokens=20, temperature=1.0, top_k=50, top_p=0.95, seed=7)
    (by_itself,) = engine.generate(["the cat"], params)
    other = SamplingParams(max_tokens=25, temperature=1.0)
    crowd = engine.generate(
        ["the dog sat", "the cat", "on the mat and"], [other, params, other]
    )  # fmt: skip
    assert crowd[1].token_ids == by_itself.token_ids
    sizes = {"token_budget": 5, "max_num_seqs": 3}
    with resized(engine, block_size=2, num_blocks=20, **sizes):
        squeezed = engine.generate(
            ["the dog sat", "the cat", "on the mat and"],
            [SamplingParams(max_tokens=20, temperature=1.0), params, other],
        )
        assert squeezed[1].token_ids == by_itself.token_ids


def test_the_dense_mask_is_the_one_that_the_record_shows(model_path, monkeypatch):
    """Cell by cell: what attention was given, against what a viewer computes from the record."""
    from engine.attention import dense
    from engine.mask import PackedAxes

    given_masks: list[torch.Tensor] = []
    original = dense.scaled_dot_product_attention

    def spy(*args: torch.Tensor, **kwargs: object) -> torch.Tensor:
        mask = kwargs["attn_mask"]
        assert isinstance(mask, torch.Tensor)
        given_masks.append(mask.clone())
        return original(*args, **kwargs)

    monkeypatch.setattr(dense, "scaled_dot_product_attention", spy)
    engine = loaded_engine(model_path("tiny-llama"), "dense")
    sizes = {"token_budget": 7, "max_num_seqs": 4}
    with resized(engine, block_size=3, num_blocks=24, **sizes):
        for length in (9, 4, 12, 1):
            engine.add_request(list(range(1, length + 1)), SamplingParams(max_tokens=9))
        steps = 0
        while engine.has_work:
            given_masks.clear()
            record = engine.step()
            shown = PackedAxes(record.segments).mask()
            assert len(given_masks) == engine.loaded.facts.num_layers
            for mask in given_masks:
                assert mask.tolist() == shown.tolist()
            assert shown.shape[0] == len(record.token_ids)
            steps += 1
        assert steps > 8
