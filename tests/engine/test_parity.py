"""Greedy output equals `generate()` of each request alone, token for token, in float32."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from engine import Engine, EngineConfig, SamplingParams
from engine.block_pool import BlockPool, blocks_for
from engine.core import EngineCore
from engine.detokenizer import TokenizerText
from engine.engine import sample_ids
from engine.errors import RequestRefused
from engine.knobs import POLICY_NAMES, Knobs
from engine.locate import local_model
from engine.record import RunHeader
from engine.runner import ModelRunner
from engine.scheduler import Scheduler
from engine.world import World

from .conftest import MODELS
from .strategies import knob_changes


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
def resized(engine: Engine, *, block_size: int, num_blocks: int, **knobs: Any) -> Iterator[None]:
    """The engine with another pool and other settings, without loading its model again."""
    core, runner = engine.core, engine.runner
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        Knobs(**knobs),
        max_model_len=engine.memory.max_model_len,
        eos_token_ids=engine.loaded.eos_token_ids,
    )
    engine.runner = ModelRunner(engine.loaded, num_blocks, block_size)
    engine.core = EngineCore(
        scheduler, engine.runner, TokenizerText(engine.loaded.tokenizer), check=True
    )
    try:
        yield
    finally:
        engine.core, engine.runner = core, runner


@dataclass
class Ask:
    """One request of a workload: when it arrives, what it wants, which settings come with it."""

    prompt: list[int]
    max_tokens: int
    at_step: int
    n: int = 1
    priority: int = 0
    knob: tuple[str, Any] | None = None


KNOBS = knob_changes(st.sampled_from([2, 3, 5, 8, 16, 64]))


@st.composite
def asks(draw: st.DrawFn, vocab: int) -> list[Ask]:
    """Requests, some of which begin with the same tokens, and changes of settings in between."""
    shared = draw(st.lists(st.integers(0, vocab - 1), min_size=0, max_size=24))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20))
        found.append(
            Ask(
                prompt=(shared if draw(st.booleans()) else []) + own,
                max_tokens=draw(st.integers(1, 12)),
                at_step=draw(st.integers(0, 6)),
                n=draw(st.sampled_from([1, 1, 1, 3])),
                priority=draw(st.integers(0, 2)),
                knob=draw(st.none() | KNOBS),
            )
        )
    return sorted(found, key=lambda ask: ask.at_step)


@pytest.mark.parametrize("attention", ["dense", "paged"])
@pytest.mark.parametrize("name", MODELS)
def test_random_workloads_say_what_each_request_says_alone(model_path, name, attention):
    """Whatever shares the batch or the blocks, whatever is preempted, forked or changed."""
    path = model_path(name)
    engine = loaded_engine(path, attention)
    vocab = engine.loaded.facts.vocab_size
    seen: Counter[str] = Counter()

    # The large ones are slow, and the small ones meet every event.
    tiny = name.startswith("tiny")

    @settings(max_examples=50 if tiny else 10, deadline=None, derandomize=True)
    @given(
        work=asks(vocab),
        budget=st.sampled_from([3, 5, 8, 16, 64]),
        seqs=st.integers(1, 6),
        policy=st.sampled_from(POLICY_NAMES),
        block_size=st.sampled_from([1, 2, 3, 4, 8, 16]),
        spare=st.sampled_from([0, 0, 1, 3, 50]),
    )
    def check(work, budget, seqs, policy, block_size, spare):
        need = max(blocks_for(len(ask.prompt) + ask.max_tokens - 1, block_size) for ask in work)
        sizes = {"token_budget": budget, "max_num_seqs": seqs, "scheduling_policy": policy}
        with resized(engine, block_size=block_size, num_blocks=need + spare, **sizes):
            seen.update(run_and_compare(engine, path, work))

    check()
    wanted = {
        "Preempted", "PrefixHit", "Forked", "BlockCopied", "BlocksEvicted", "KnobChanged",
        "BlockMerged", "chunk",
    }  # fmt: skip
    assert not tiny or not {what for what in wanted if not seen[what]}


def run_and_compare(engine: Engine, path: str, work: list[Ask]) -> Counter[str]:
    """Run a workload, hold the fold against the engine; the events that it took."""
    later = list(work)
    ids: dict[str, Ask] = {}
    world = World(_header(engine))
    seen: Counter[str] = Counter()
    while later or engine.has_work:
        while later and (later[0].at_step <= engine.next_step or not engine.has_work):
            ask = later.pop(0)
            if ask.knob is not None:
                engine.set_knob(*ask.knob)
            params = SamplingParams(max_tokens=ask.max_tokens, n=ask.n, priority=ask.priority)
            try:
                request_id = engine.add_request(ask.prompt, params)
            except RequestRefused:
                assert not engine.core.scheduler.knobs.chunked_prefill
                continue
            names = sample_ids(request_id, ask.n)
            ids |= dict.fromkeys(names, ask)
            engine.core.want_completions(names)
        record = engine.step()
        world.apply(record)
        assert list(world.free) == list(engine.core.scheduler.pool.free)
        assert list(world.evictable) == list(engine.core.scheduler.pool.evictable)
        seen.update(type(event).__name__ for event in record.events)
        seen["chunk"] += sum(not segment.samples for segment in record.segments)
    assert engine.core.scheduler.pool.num_held == 0
    for request_id, ask in ids.items():
        completion = engine.core.take_completion(request_id)
        assert completion is not None
        assert completion.token_ids == alone(path, tuple(ask.prompt), ask.max_tokens)
        view = world.requests[request_id]
        assert view.token_ids[view.num_prompt_tokens :] == completion.token_ids
        assert view.text == completion.text
    return seen


def _header(engine: Engine) -> RunHeader:
    scheduler = engine.core.scheduler
    return msgspec.structs.replace(
        engine.header, num_blocks=scheduler.pool.num_blocks,
        block_size=scheduler.pool.block_size, knobs=scheduler.knobs,
    )  # fmt: skip


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
