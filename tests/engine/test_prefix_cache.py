"""The prefix cache and forks of a prompt, step by step, with no torch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidInput
from engine.explain import sentence
from engine.record import (
    Admitted,
    BlockCopied,
    BlockMerged,
    BlocksCached,
    BlocksEvicted,
    CacheReset,
    Forked,
    Preempted,
    PrefixHit,
    StepRecord,
)
from engine.request import FinishReason, Request

from .fakes import FakeEngine, expected_output

PROMPT = list(range(1, 11))
"""Ten tokens: two full blocks of four, and a half one."""


def events(record: StepRecord, kind: type) -> list:
    return [event for event in record.events if isinstance(event, kind)]


def starts(record: StepRecord) -> dict[str, int]:
    """From which token on each request computes."""
    return {segment.request_id: segment.start for segment in record.segments}


def said(engine: FakeEngine, request_id: str) -> str:
    decision = engine.world.decision(request_id)
    assert decision is not None
    return sentence(decision)


def compute(engine: FakeEngine, request_id: str, prompt: list[int], **params: object) -> Request:
    """A request from its beginning to its end."""
    request = engine.add(request_id, prompt, **{"max_tokens": 1, **params})
    engine.run()
    return request


def cached_tokens(engine: FakeEngine, prompt: list[int], **params: object) -> int:
    """How much of a prompt is in the cache, as a request that begins with it finds it."""
    name = f"probe{len(engine.records)}"
    engine.add(name, prompt, max_tokens=1, **params)
    start = starts(engine.step())[name]
    assert not engine.scheduler.live(name)
    return start


def cached_blocks(engine: FakeEngine) -> set[int]:
    return {entry.block_id for entry in engine.scheduler.pool.cache}


def assert_said_as_alone(engine: FakeEngine, *requests: Request) -> None:
    """Run to the end; these requests said what they say alone, and nothing is left behind."""
    engine.run()
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        alone = expected_output(prompt, request.params, engine.scheduler.max_model_len)
        assert request.token_ids[request.num_prompt_tokens :] == alone
    assert engine.scheduler.pool.num_held == 0


# -- hits ----------------------------------------------------------------------------------------


def test_the_same_prompt_is_found_as_far_as_its_blocks_are_full():
    engine = FakeEngine()
    compute(engine, "a", PROMPT)
    b = engine.add("b", PROMPT, max_tokens=5, ignore_eos=True)
    record = engine.step()
    assert events(record, PrefixHit) == [PrefixHit("b", [0, 1], 8, False)]
    assert starts(record) == {"b": 8}
    assert_said_as_alone(engine, b)


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_the_last_token_of_a_prompt_is_always_computed(blocks):
    engine = FakeEngine()
    prompt = list(range(1, 4 * blocks + 1))
    compute(engine, "a", prompt)
    assert len(engine.scheduler.pool.cache) == blocks
    assert cached_tokens(engine, prompt) == 4 * (blocks - 1)
    assert cached_tokens(engine, [*prompt, 40]) == 4 * blocks


def test_of_a_prompt_that_begins_alike_the_equal_full_blocks_are_found():
    engine = FakeEngine()
    compute(engine, "a", PROMPT)
    assert cached_tokens(engine, PROMPT[:7] + [40] * 8) == 4


def test_equal_blocks_behind_different_ones_are_not_found():
    engine = FakeEngine()
    compute(engine, "a", PROMPT)
    assert cached_tokens(engine, [40, *PROMPT[1:]]) == 0


def test_a_half_full_block_is_not_found():
    engine = FakeEngine()
    compute(engine, "a", PROMPT[:6])
    assert cached_tokens(engine, PROMPT) == 4


@pytest.mark.parametrize(
    ("first", "second", "hit"),
    [("x", "x", 8), ("x", "y", 0), (None, "x", 0), ("x", None, 0), ("", None, 0)],
)
def test_only_requests_of_the_same_salt_share(first, second, hit):
    engine = FakeEngine()
    compute(engine, "a", PROMPT, cache_salt=first)
    assert cached_tokens(engine, PROMPT, cache_salt=second) == hit


def test_equal_prompts_of_different_salts_are_cached_side_by_side():
    engine = FakeEngine()
    for salt in ("x", "y", None):
        compute(engine, f"salt {salt}", PROMPT, cache_salt=salt)
    assert [cached_tokens(engine, PROMPT, cache_salt=salt) for salt in ("x", "y", None)] == [8] * 3


def test_the_next_turn_of_a_conversation_finds_the_output_too():
    engine = FakeEngine()
    a = compute(engine, "a", PROMPT[:6], max_tokens=7, ignore_eos=True)
    # 13 tokens; the last one was drawn but never computed.
    assert cached_tokens(engine, [*a.token_ids, 30, 31, 32]) == 12


def test_blocks_of_a_running_request_are_found():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=9, ignore_eos=True)
    engine.step()
    b = engine.add("b", PROMPT, max_tokens=9, ignore_eos=True)
    assert starts(engine.step()) == {"a": 10, "b": 8}
    assert b.block_table[:2] == a.block_table[:2]
    assert b.block_table[2] != a.block_table[2]
    assert [engine.scheduler.pool.ref_counts[block] for block in a.block_table] == [2, 2, 1]
    assert_said_as_alone(engine, a, b)


def test_the_chunks_of_a_prompt_are_found_as_they_are_computed():
    engine = FakeEngine(token_budget=6)
    engine.add("a", list(range(1, 17)), max_tokens=1)
    engine.step()
    engine.core.set_knob("token_budget", 30)
    engine.add("b", list(range(1, 17)), max_tokens=1)
    assert starts(engine.step()) == {"a": 6, "b": 4}


# -- eviction ------------------------------------------------------------------------------------


def two_cached(num_blocks: int = 6) -> FakeEngine:
    """`a` (blocks 0, 1), then `b` (2, 3), both ended; the other blocks are free."""
    engine = FakeEngine(num_blocks=num_blocks)
    compute(engine, "a", [1] * 8)
    compute(engine, "b", [2] * 8)
    assert list(engine.scheduler.pool.evictable)[:2] == [1, 0]
    return engine


def test_free_blocks_are_taken_first_then_the_oldest_cached_tail_first():
    engine = two_cached()
    c = engine.add("c", [3] * 12, max_tokens=1)
    record = engine.step()
    [eviction] = events(record, BlocksEvicted)
    assert eviction == BlocksEvicted("c", [1])
    assert cached_blocks(engine) == {0} | {2, 3} | {4, 5, 1}
    assert c.block_table == []
    assert engine.scheduler.stats.evictions == 1
    assert cached_tokens(engine, [1] * 9) == 4


def test_the_least_recently_used_are_evicted_first():
    engine = two_cached()
    # Both blocks of a are used again: now those of b are the oldest.
    assert cached_tokens(engine, [1] * 9) == 8
    engine.add("c", [3] * 12, max_tokens=1)
    [eviction] = events(engine.step(), BlocksEvicted)
    assert eviction.block_ids == [3]
    assert 1 in cached_blocks(engine)


def test_blocks_shared_in_a_step_are_not_evicted_in_it():
    engine = two_cached(num_blocks=5)
    engine.add("again", [1] * 9, max_tokens=3, ignore_eos=True)
    engine.add("c", [3] * 7, max_tokens=1)
    record = engine.step()
    assert starts(record) == {"again": 8, "c": 0}
    [eviction] = events(record, BlocksEvicted)
    assert eviction.block_ids == [3, 2]
    engine.run()


def test_cached_blocks_of_running_requests_are_never_evicted():
    engine = FakeEngine(num_blocks=5)
    a = engine.add("a", [1] * 8, max_tokens=8, ignore_eos=True)
    engine.step()
    b = engine.add("b", [2] * 8, max_tokens=1)
    assert_said_as_alone(engine, a, b)
    evicted = [e.block_ids for record in engine.records for e in events(record, BlocksEvicted)]
    assert evicted == [[4]], "the tail of b, which has ended, and not of a, which is older"
    assert cached_tokens(engine, [1] * 9) == 8


def test_evictable_blocks_count_as_available():
    engine = FakeEngine(num_blocks=4)
    compute(engine, "a", [1] * 16)
    pool = engine.scheduler.pool
    assert (pool.num_free, pool.num_evictable, pool.num_held) == (0, 4, 0)
    b = engine.add("b", [2] * 16, max_tokens=1)
    assert starts(engine.step()) == {"b": 0}
    assert_said_as_alone(engine, b)
    assert engine.scheduler.stats.evictions == 4


def test_blocks_that_a_request_shares_do_not_count_as_available_to_it():
    engine = two_cached()
    engine.add("r", [9] * 7, max_tokens=9, ignore_eos=True)
    engine.add("big", [1] * 8 + [7] * 12, max_tokens=1)
    engine.step()
    assert said(engine, "big") == "no free blocks: needs 3 besides 2 cached, 2 available"


def test_blocks_that_two_requests_share_in_a_step_are_taken_once():
    engine = FakeEngine(num_blocks=4)
    compute(engine, "a", [1] * 8)
    b, c = (
        engine.add(name, [1] * 8 + [token], max_tokens=2) for name, token in (("b", 2), ("c", 3))
    )
    assert starts(engine.step()) == {"b": 8, "c": 8}
    assert_said_as_alone(engine, b, c)


def test_blocks_evicted_in_a_step_are_not_found_in_it():
    engine = FakeEngine(token_budget=32, num_blocks=6)
    compute(engine, "a", [1] * 16)
    compute(engine, "x", [2] * 8)
    b = engine.add("b", [3] * 8, max_tokens=1)
    c = engine.add("c", [1] * 13, max_tokens=1)
    record = engine.step()
    assert starts(record) == {"b": 0, "c": 8}
    assert events(record, BlocksEvicted) == [
        BlocksEvicted("b", [3, 2]), BlocksEvicted("c", [5, 4]),
    ]  # fmt: skip
    assert_said_as_alone(engine, b, c)


def test_sharing_blocks_that_are_held_takes_none_from_others():
    engine = FakeEngine(num_blocks=6)
    engine.add("a", PROMPT, max_tokens=3, ignore_eos=True)
    engine.step()
    b = engine.add("b", PROMPT, max_tokens=1)
    c = engine.add("c", [30] * 8, max_tokens=1)
    assert starts(engine.step()) == {"a": 10, "b": 8, "c": 0}
    assert_said_as_alone(engine, b, c)


def test_a_block_that_is_taken_twice_in_a_step_is_evicted_once():
    """`b` decodes into the block of `z`, and is then preempted for the prompt of `a`, which came
    before it and needs that block and the other one of `b`."""
    engine = FakeEngine(token_budget=8, num_blocks=3, long_prefill_token_threshold=4)
    compute(engine, "z", [7] * 4)
    a = engine.add("a", [8] * 12, max_tokens=1)
    b = engine.add("b", [9] * 4, max_tokens=6, ignore_eos=True)
    engine.step()
    engine.core.set_knob("long_prefill_token_threshold", 0)
    record = engine.step()
    assert events(record, BlocksEvicted) == [BlocksEvicted("b", [0]), BlocksEvicted("a", [2])]
    assert engine.scheduler.stats.evictions == 2
    assert starts(record) == {"a": 4}
    assert_said_as_alone(engine, a, b)


def test_a_request_that_cannot_be_admitted_changes_no_count_and_no_order():
    engine = two_cached()
    engine.add("r", [9] * 7, max_tokens=2, ignore_eos=True)
    engine.step()
    pool = engine.scheduler.pool
    before = list(pool.ref_counts), list(pool.free), list(pool.evictable), cached_blocks(engine)
    big = engine.add("big", [1] * 8 + [7] * 12, max_tokens=1)
    plan = engine.scheduler.plan(1.0)
    assert [segment.request_id for segment in plan.segments] == ["r"]
    engine.core.flush()
    after = list(pool.ref_counts), list(pool.free), list(pool.evictable), cached_blocks(engine)
    assert after == before
    assert big.block_table == []


# -- collisions and duplicates -------------------------------------------------------------------


def test_with_equal_hashes_for_everything_the_output_is_right_and_no_hit_is_false():
    engine = FakeEngine(hash_function=lambda key: 0, num_blocks=32)
    requests = [
        engine.add(name, [token] * 10, max_tokens=7, ignore_eos=True)
        for name, token in (("a", 1), ("b", 2), ("c", 1))
    ]
    assert_said_as_alone(engine, *requests)
    assert len(engine.scheduler.pool.cache) == 1, "no second content has a hash of its own"
    assert cached_tokens(engine, [2] * 10) == 0
    assert cached_tokens(engine, [1] * 10) == 4


def test_a_block_is_found_only_behind_the_blocks_that_it_was_computed_behind():
    # Equal hashes for equal tokens, whatever stands before them.
    engine = FakeEngine(hash_function=lambda key: hash(key[1]))
    compute(engine, "a", [1, 1, 1, 1, 2, 2, 2, 2, 3])
    assert cached_tokens(engine, [2, 2, 2, 2, 3]) == 0
    assert cached_tokens(engine, [2, 2, 2, 2, 1, 1, 1, 1, 3]) == 0
    assert cached_tokens(engine, [1, 1, 1, 1, 2, 2, 2, 2, 9]) == 8


def test_salts_are_compared_even_if_the_hashes_are_equal():
    engine = FakeEngine(hash_function=lambda key: hash(key[1]))
    compute(engine, "a", PROMPT, cache_salt="x")
    assert cached_tokens(engine, PROMPT, cache_salt="y") == 0


def test_identical_prompts_in_one_step_do_not_share_what_is_only_planned():
    engine = FakeEngine(token_budget=32)
    for name in "abc":
        engine.add(name, PROMPT, max_tokens=4, ignore_eos=True)
    record = engine.step()
    assert starts(record) == {"a": 0, "b": 0, "c": 0}
    assert events(record, PrefixHit) == []
    assert engine.scheduler.stats.hit == 0


def test_duplicates_become_one_block_as_soon_as_they_are_computed():
    engine = FakeEngine(token_budget=32)
    requests = [engine.add(name, PROMPT, max_tokens=4, ignore_eos=True) for name in "abc"]
    record = engine.step()
    assert events(record, BlockMerged) == [
        BlockMerged("b", 0, 3, 0), BlockMerged("b", 1, 4, 1),
        BlockMerged("c", 0, 6, 0), BlockMerged("c", 1, 7, 1),
    ]  # fmt: skip
    assert (record.blocks_used, record.blocks_held) == (9, 5)
    assert engine.scheduler.stats.merged == 4
    assert [r.block_table[:2] for r in requests] == [[0, 1]] * 3
    assert_said_as_alone(engine, *requests)


def test_requests_that_went_apart_share_no_more():
    engine = FakeEngine(token_budget=32)
    a = engine.add("a", [*PROMPT, 20, 21], max_tokens=6, ignore_eos=True)
    b = engine.add("b", [*PROMPT, 20, 22], max_tokens=6, ignore_eos=True)
    engine.step()
    assert a.block_table[:2] == b.block_table[:2]
    assert a.block_table[2] != b.block_table[2]
    assert_said_as_alone(engine, a, b)


# -- reset, off and on ---------------------------------------------------------------------------


def test_a_reset_forgets_everything():
    engine = two_cached()
    engine.core.reset_prefix_cache()
    pool = engine.scheduler.pool
    assert (len(pool.cache), pool.num_free) == (0, 6)
    assert engine.step().events == [CacheReset(4)]
    assert cached_tokens(engine, [1] * 9) == 0


def test_a_reset_is_refused_while_cached_blocks_are_held():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=3, ignore_eos=True)
    engine.step()
    with pytest.raises(InvalidInput, match="2 cached blocks are held by running requests"):
        engine.core.reset_prefix_cache()
    assert cached_blocks(engine) == {0, 1}
    assert_said_as_alone(engine, a)
    engine.core.reset_prefix_cache()
    assert cached_blocks(engine) == set()


def test_a_reset_is_not_refused_for_blocks_that_are_not_cached():
    engine = FakeEngine()
    engine.add("a", PROMPT[:3], max_tokens=4, ignore_eos=True)
    engine.step()
    engine.core.reset_prefix_cache()
    engine.run()


def test_nothing_computed_before_a_forced_reset_is_ever_shared():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=14, ignore_eos=True)
    engine.step()
    engine.core.reset_prefix_cache(force=True)
    b = engine.add("b", PROMPT, max_tokens=3, ignore_eos=True)
    record = engine.step()
    assert starts(record) == {"a": 10, "b": 0}
    assert events(record, BlockMerged) == []
    assert set(a.block_table).isdisjoint(b.block_table)
    assert cached_blocks(engine) == set(b.block_table[:2])
    assert_said_as_alone(engine, a, b)
    # Found are the 12 tokens that b computed (it says what a says); what a computed after the
    # reset continues what it computed before.
    assert cached_tokens(engine, [*a.token_ids, 1]) == 12


def test_a_request_preempted_after_a_forced_reset_joins_the_cache_again():
    engine = FakeEngine(token_budget=32, num_blocks=5)
    a = engine.add("a", [1] * 8, max_tokens=9, ignore_eos=True)
    b = engine.add("b", [2] * 8, max_tokens=9, ignore_eos=True)
    engine.step()
    engine.core.reset_prefix_cache(force=True)
    assert_said_as_alone(engine, a, b)
    assert any(events(record, Preempted) for record in engine.records)
    assert cached_tokens(engine, [2] * 9) == 8


def test_a_fork_of_a_request_from_before_a_forced_reset_shares_with_it_alone():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=9, ignore_eos=True, n=2)
    child = engine.scheduler.requests["a.2"]
    engine.step()
    engine.core.reset_prefix_cache(force=True)
    assert events(engine.step(), Forked) == [Forked("a.2", "a", [0, 1], 9)]
    assert cached_tokens(engine, [*PROMPT, 40]) == 0
    assert_said_as_alone(engine, a, child)


def test_switched_off_the_cache_forgets_and_finds_nothing():
    engine = two_cached()
    engine.core.set_knob("prefix_caching", False)
    assert len(engine.scheduler.pool.cache) == 0
    queried = engine.scheduler.stats.queried
    assert cached_tokens(engine, [1] * 9) == 0
    assert engine.scheduler.stats.queried == queried
    assert len(engine.scheduler.pool.cache) == 0
    assert engine.scheduler.pool.num_free == 6


def test_switched_off_and_on_while_a_request_runs():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=8, ignore_eos=True)
    engine.step()
    engine.core.set_knob("prefix_caching", False)
    engine.step()
    assert cached_blocks(engine) == set()
    engine.core.set_knob("prefix_caching", True)
    b = engine.add("b", PROMPT, max_tokens=3, ignore_eos=True)
    # The blocks of a become known again with its next token, and those of b are duplicates.
    record = engine.step()
    assert starts(record) == {"a": 11, "b": 0}
    assert {event.kept for event in events(record, BlockMerged)} == set(a.block_table[:2])
    assert_said_as_alone(engine, a, b)
    assert cached_tokens(engine, [*a.token_ids, 1]) == 16


def test_what_a_failed_request_computed_is_not_cached_when_the_cache_is_switched_on_again():
    engine = FakeEngine()
    a = engine.add("a", PROMPT, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.add("b", PROMPT, max_tokens=20, ignore_eos=True)
    engine.step()
    untrusted = set(a.block_table)
    engine.core.set_knob("prefix_caching", False)
    engine.model.nan.add("a")
    engine.step()
    engine.core.set_knob("prefix_caching", True)
    engine.step()
    # b still holds the first two blocks of a.
    assert untrusted.isdisjoint(cached_blocks(engine))


# -- counters ------------------------------------------------------------------------------------


def test_queried_and_hit_count_tokens_of_prompts():
    engine = FakeEngine()
    compute(engine, "a", PROMPT)
    compute(engine, "b", PROMPT)
    compute(engine, "c", [*PROMPT[:4], 40, 41])
    stats = engine.scheduler.stats
    assert (stats.queried, stats.hit) == (26, 12)
    assert (stats.resumed, stats.recomputed, stats.evictions, stats.merged) == (0, 0, 0, 0)


def test_a_request_that_waits_for_several_steps_is_one_query():
    engine = FakeEngine(max_num_seqs=1)
    engine.add("a", PROMPT, max_tokens=5, ignore_eos=True)
    engine.add("b", PROMPT, max_tokens=1)
    engine.run()
    assert engine.scheduler.stats.queried == 20


def preemption(caching: bool) -> FakeEngine:
    """`a` and `b` decode, until `b` gives up its three blocks for the fourth of `a`."""
    engine = FakeEngine(token_budget=32, num_blocks=6, prefix_caching=caching)
    engine.add("a", [1] * 8, max_tokens=8, ignore_eos=True)
    engine.add("b", [2] * 8, max_tokens=8, ignore_eos=True)
    while not any(isinstance(e, Preempted) for r in engine.records for e in r.events):
        engine.step()
    return engine


def test_what_a_preempted_request_finds_again_is_resumed_and_no_hit():
    engine = preemption(True)
    b = engine.scheduler.requests["b"]
    assert (b.status, b.high_water) == ("preempted", 12)
    assert_said_as_alone(engine, b)
    hits = [event for record in engine.records for event in events(record, PrefixHit)]
    assert [(hit.request_id, hit.tokens, hit.resumed) for hit in hits] == [("b", 8, True)]
    stats = engine.scheduler.stats
    assert (stats.queried, stats.hit, stats.resumed, stats.recomputed) == (16, 0, 8, 4)
    assert [e.queried for r in engine.records for e in events(r, Admitted)] == [8, 8, 0]


def test_without_the_cache_all_is_recomputed():
    engine = preemption(False)
    assert_said_as_alone(engine, engine.scheduler.requests["b"])
    stats = engine.scheduler.stats
    assert (stats.queried, stats.hit, stats.resumed, stats.recomputed) == (0, 0, 0, 12)


def test_evictions_are_counted_in_blocks_and_apart_from_resets():
    engine = two_cached()
    compute(engine, "c", [3] * 16)
    assert engine.scheduler.stats.evictions == 2
    engine.core.reset_prefix_cache()
    engine.step()
    assert engine.scheduler.stats.evictions == 2


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    prompts=st.lists(
        st.tuples(st.integers(0, 2), st.integers(1, 14), st.integers(1, 9)), min_size=1, max_size=9
    ),
    num_blocks=st.integers(6, 14),
)
def test_free_evictable_and_held_blocks_add_up_in_every_record(prompts, num_blocks):
    engine = FakeEngine(num_blocks=num_blocks)
    requests = [
        engine.add(f"r{i}", [kind] * length, max_tokens=made, ignore_eos=True)
        for i, (kind, length, made) in enumerate(prompts)
    ]
    assert_said_as_alone(engine, *requests)
    for record in engine.records:
        assert record.blocks_free + record.blocks_evictable + record.blocks_held == num_blocks
        assert record.blocks_used >= record.blocks_held
    assert engine.records[-1].blocks_evictable == len(engine.scheduler.pool.cache)


# -- forks ---------------------------------------------------------------------------------------


def fork(engine: FakeEngine, prompt: list[int] = PROMPT, n: int = 3) -> dict[str, Request]:
    """`a` and its other samples, by id."""
    engine.add("a", prompt, max_tokens=6, ignore_eos=True, n=n)
    return dict(engine.scheduler.requests)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_share_the_full_blocks_of_their_prompt_and_copy_the_last_one(caching):
    engine = FakeEngine(prefix_caching=caching)
    requests = fork(engine)
    record = engine.step()
    assert starts(record) == {"a": 0}
    assert said(engine, "a.2") == "waits for the prompt of a: 0 of 10 computed"
    assert said(engine, "a.3") == "waits for the prompt of a: 0 of 10 computed"
    record = engine.step()
    assert events(record, Forked) == [Forked(name, "a", [0, 1], 9) for name in ("a.2", "a.3")]
    assert events(record, BlockCopied) == [BlockCopied("a.2", 2, 3), BlockCopied("a.3", 2, 4)]
    assert events(record, BlocksCached) == [], "what they share is known already"
    assert record.blocks_held == 5
    assert starts(record) == {"a": 10, "a.2": 9, "a.3": 9}
    assert engine.scheduler.stats.hit == 0
    assert_said_as_alone(engine, *requests.values())


def test_a_prompt_of_full_blocks_is_shared_but_for_the_block_of_its_last_token():
    engine = FakeEngine(prefix_caching=False)
    requests = fork(engine, PROMPT[:8], n=2)
    engine.step()
    record = engine.step()
    assert events(record, Forked) == [Forked("a.2", "a", [0], 7)]
    [copied] = events(record, BlockCopied)
    assert copied.source == 1
    assert_said_as_alone(engine, *requests.values())


def test_a_prompt_of_one_block_and_one_token_needs_no_copy():
    engine = FakeEngine(prefix_caching=False)
    requests = fork(engine, PROMPT[:5], n=2)
    engine.step()
    record = engine.step()
    assert events(record, Forked) == [Forked("a.2", "a", [0], 4)]
    assert events(record, BlockCopied) == []
    assert_said_as_alone(engine, *requests.values())


def test_samples_wait_until_the_last_chunk_of_the_prompt():
    engine = FakeEngine(token_budget=4)
    requests = fork(engine, n=2)
    for done in (0, 4, 8):
        record = engine.step()
        assert starts(record) == {"a": done}
    assert said(engine, "a.2") == "waits for the prompt of a: 8 of 10 computed"
    assert starts(engine.step()) == {"a": 10, "a.2": 9}
    assert_said_as_alone(engine, *requests.values())


def test_a_sample_for_whose_copy_no_block_is_free_waits_in_the_queue():
    engine = FakeEngine(num_blocks=4, prefix_caching=False)
    requests = fork(engine)
    engine.step()
    assert starts(engine.step()) == {"a": 10, "a.2": 9}
    assert said(engine, "a.3") == "no free blocks: needs 1, 0 available"
    assert_said_as_alone(engine, *requests.values())


def test_samples_that_wait_for_their_prompt_keep_their_places():
    engine = FakeEngine(token_budget=32, max_num_seqs=3)
    requests = fork(engine)
    requests["b"] = engine.add("b", 3, max_tokens=2)
    record = engine.step()
    assert starts(record) == {"a": 0}
    assert said(engine, "b") == "max sequences: 1 of 3 running, 2 places kept for samples"
    assert [event.request_id for event in events(engine.step(), Admitted)] == ["a.2", "a.3"]
    assert_said_as_alone(engine, *requests.values())
    order = [e.request_id for record in engine.records for e in events(record, Admitted)]
    assert order == ["a", "a.2", "a.3", "b"]


def test_a_request_with_a_place_of_its_own_does_not_wait_for_the_forks_before_it():
    engine = FakeEngine(token_budget=32, max_num_seqs=4)
    requests = fork(engine)
    requests["b"] = engine.add("b", 3, max_tokens=9, ignore_eos=True)
    assert starts(engine.step()) == {"a": 0, "b": 0}
    assert list(starts(engine.step())) == ["a", "b", "a.2", "a.3"]
    assert_said_as_alone(engine, *requests.values())


def test_samples_beyond_the_places_wait_for_their_turn():
    engine = FakeEngine(max_num_seqs=2)
    requests = fork(engine, n=5)
    assert_said_as_alone(engine, *requests.values())
    order = [e.request_id for record in engine.records for e in events(record, Admitted)]
    assert order == ["a", "a.2", "a.3", "a.4", "a.5"]
    assert max(record.num_running for record in engine.records) == 2


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_a_prompt_that_was_cancelled_before_it_was_done_are_ordinary_requests(
    steps, caching
):
    engine = FakeEngine(token_budget=6, prefix_caching=caching)
    requests = fork(engine)
    for _ in range(steps):
        engine.step()
    assert engine.core.cancel("a")
    del requests["a"]
    record = engine.step()
    assert starts(record) == {"a.2": 4 if steps and caching else 0}
    assert_said_as_alone(engine, *requests.values())
    assert not any(events(record, Forked) for record in engine.records)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_whose_parent_ended_with_its_first_token_are_ordinary_requests(caching):
    engine = FakeEngine(token_budget=32, prefix_caching=caching)
    engine.add("a", PROMPT, max_tokens=1, n=3)
    requests = list(engine.scheduler.requests.values())
    engine.step()
    assert engine.world.requests["a"].finish_reason is FinishReason.LENGTH
    record = engine.step()
    assert starts(record) == dict.fromkeys(("a.2", "a.3"), 8 if caching else 0)
    assert events(record, Forked) == []
    assert_said_as_alone(engine, *requests)


def test_a_sample_whose_parent_was_preempted_finds_no_blocks_to_share():
    engine = FakeEngine(token_budget=32, num_blocks=5, prefix_caching=False)
    first = engine.add("first", [9] * 8, max_tokens=5, ignore_eos=True)
    requests = [first, *list(fork(engine).values())[1:]]
    assert_said_as_alone(engine, *requests)
    assert any(
        event.request_id == "a" for record in engine.records for event in events(record, Preempted)
    )


def test_a_sample_does_not_take_a_new_request_with_the_id_of_its_parent_for_it():
    engine = FakeEngine(token_budget=32, prefix_caching=False, scheduling_policy="priority")
    engine.add("a", PROMPT, max_tokens=6, ignore_eos=True, n=2, priority=1)
    child = engine.scheduler.requests["a.2"]
    engine.step()
    assert engine.core.cancel("a")
    new = engine.add("a", [30] * 9, max_tokens=6, ignore_eos=True, priority=0)
    record = engine.step()
    assert starts(record) == {"a": 0, "a.2": 0}
    assert events(record, Forked) == []
    assert_said_as_alone(engine, child, new)


def test_the_parent_may_end_and_its_samples_keep_the_blocks():
    engine = FakeEngine(prefix_caching=False)
    requests = fork(engine)
    engine.step()
    engine.step()
    assert engine.core.cancel("a")
    pool, child = engine.scheduler.pool, requests["a.2"]
    assert [pool.ref_counts[block] for block in child.block_table] == [2, 2, 1]
    del requests["a"]
    assert_said_as_alone(engine, *requests.values())


def test_a_sample_that_copied_what_a_failed_request_computed_does_not_join_the_cache():
    engine = FakeEngine()
    fork(engine, PROMPT[:3], n=2)
    engine.step()
    assert len(events(engine.step(), BlockCopied)) == 1
    engine.model.nan.add("a")
    for _ in range(3):
        engine.step()
    assert cached_blocks(engine) == set()


def test_a_sample_that_was_preempted_comes_back():
    engine = FakeEngine(num_blocks=5)
    requests = fork(engine)
    assert_said_as_alone(engine, *requests.values())
    assert any(events(record, Preempted) for record in engine.records)


def test_a_shared_block_is_cached_once_when_the_cache_is_switched_on():
    """FakeEngine holds the tokens that the fold names for each cached block against the cache."""
    engine = FakeEngine(token_budget=32, prefix_caching=False)
    engine.add("P", 8, n=2, max_tokens=30, ignore_eos=True)
    for _ in range(6):
        engine.step()
    engine.core.set_knob("prefix_caching", True)
    engine.step()
    assert engine.world.cached[engine.scheduler.running["P"].block_table[0]] == ("P", 0)
    engine.run()


def test_the_look_past_blocked_requests_is_bounded():
    with pytest.raises(InvalidInput, match="between 0 and 64"):
        FakeEngine(skip_blocked_head=65)


def test_a_request_needs_a_name():
    with pytest.raises(InvalidInput, match="must not be empty"):
        FakeEngine().add("", 3)
