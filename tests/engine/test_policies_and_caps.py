"""Scheduling policies, caps, preemption, failures and the sentences about them, with no torch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import RequestRefused, StepFailed
from engine.explain import sentence
from engine.knobs import POLICY_NAMES
from engine.record import (
    Action,
    Admitted,
    BlocksEvicted,
    BlocksFreed,
    BlocksUncached,
    Decision,
    Failed,
    Finished,
    Preempted,
    Reason,
    StepRecord,
)
from engine.request import FinishReason, Request

from .fakes import FakeEngine, expected_output

LONG = {"max_tokens": 60, "ignore_eos": True}
"""A request that decodes until the test is over."""


def shape(record: StepRecord) -> list[tuple[str, int]]:
    """Who computes how much."""
    return [(s.request_id, s.length) for s in record.segments]


def events(record: StepRecord, kind: type) -> list:
    return [event for event in record.events if isinstance(event, kind)]


def admitted(record: StepRecord) -> list[str]:
    return [event.request_id for event in events(record, Admitted)]


def preempted(records: list[StepRecord]) -> list[str]:
    return [event.request_id for record in records for event in events(record, Preempted)]


def said(engine: FakeEngine, request_id: str) -> str:
    """What the last step says about a request."""
    decision = engine.world.decision(request_id)
    assert decision is not None
    return sentence(decision)


def output(request: Request) -> list[int]:
    return request.token_ids[request.num_prompt_tokens :]


def alone(engine: FakeEngine, request: Request) -> list[int]:
    """What the request would say by itself."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    return expected_output(prompt, request.params, engine.scheduler.max_model_len)


def assert_said_as_alone(engine: FakeEngine, *requests: Request) -> None:
    """Run to the end; these requests said what they say alone, and nothing is left behind."""
    engine.run()
    for request in requests:
        assert output(request) == alone(engine, request)
    assert engine.scheduler.pool.num_held == 0


def assert_gone(engine: FakeEngine, request: Request) -> None:
    """No queue and no block knows the request."""
    scheduler = engine.scheduler
    assert request.request_id not in scheduler.requests
    assert request.request_id not in scheduler.running
    assert request.request_id not in scheduler.waiting
    assert request.block_table == []
    scheduler.check_integrity()


# -- priority ------------------------------------------------------------------------------------


def test_priority_admits_lower_numbers_first_and_arrival_breaks_ties():
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
    for name, priority in (("a", 5), ("b", 0), ("c", 5), ("d", 0), ("e", -1)):
        engine.add(name, 3, max_tokens=1, priority=priority)
    order = [name for record in engine.run() for name in admitted(record)]
    assert order == ["e", "b", "d", "a", "c"]


def test_fcfs_does_not_look_at_priorities():
    engine = FakeEngine(max_num_seqs=1)
    for name, priority in (("a", 5), ("b", 0), ("c", 5)):
        engine.add(name, 3, max_tokens=1, priority=priority)
    assert [name for record in engine.run() for name in admitted(record)] == ["a", "b", "c"]


def test_priority_serves_urgent_decodes_first_when_the_budget_is_short():
    engine = FakeEngine(scheduling_policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", 1)):
        engine.add(name, 2, priority=priority, **LONG)
    engine.step()
    engine.core.set_knob("token_budget", 2)
    turns = [shape(engine.step()) for _ in range(3)]
    assert [[name for name, _ in turn] for turn in turns] == [["b", "a"], ["b", "c"], ["b", "a"]]


def test_priority_serves_urgent_prompts_in_progress_first():
    engine = FakeEngine(
        token_budget=6, scheduling_policy="priority", long_prefill_token_threshold=4
    )
    engine.add("late", 12, max_tokens=1, priority=1)
    engine.step()
    engine.add("urgent", 12, max_tokens=1, priority=0)
    assert shape(engine.step()) == [("late", 4), ("urgent", 2)]
    assert shape(engine.step()) == [("urgent", 4), ("late", 2)]


def full_pool(policy: str, **priorities: int) -> FakeEngine:
    """Each of these holds two full blocks, admitted in this order, and no block is left for the
    next tokens."""
    engine = FakeEngine(token_budget=64, num_blocks=2 * len(priorities))
    for name, priority in priorities.items():
        engine.add(name, 8, max_tokens=6, ignore_eos=True, priority=priority)
    engine.step()
    engine.core.set_knob("scheduling_policy", policy)
    return engine


def test_priority_preempts_the_least_urgent_whenever_it_came():
    engine = full_pool("priority", a=1, b=2, c=0)
    record = engine.step()
    assert events(record, Preempted) == [Preempted("b", "c", 8)]
    assert shape(record) == [("c", 1), ("a", 1)]


def test_priority_preempts_the_one_that_came_last_of_the_least_urgent():
    engine = full_pool("priority", a=2, b=2, c=0)
    assert preempted([engine.step()]) == ["b"]


def test_fcfs_preempts_the_one_admitted_last_whatever_its_priority():
    engine = full_pool("fcfs", a=1, b=2, c=0)
    assert preempted([engine.step()]) == ["c"]


def test_an_urgent_request_preempts_nobody_to_get_a_place():
    engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
    engine.add("low", 3, max_tokens=5, ignore_eos=True, priority=9)
    engine.step()
    engine.add("urgent", 3, max_tokens=5, priority=0)
    assert shape(engine.step()) == [("low", 1)]
    assert said(engine, "urgent") == "max sequences: 1 of 1 running"
    assert preempted(engine.run()) == []


def test_an_urgent_request_that_lacks_blocks_preempts_nobody_to_be_admitted():
    engine = FakeEngine(num_blocks=4, scheduling_policy="priority")
    low = engine.add("low", 9, max_tokens=3, ignore_eos=True, priority=9)
    engine.step()
    urgent = engine.add("urgent", 8, max_tokens=3, ignore_eos=True, priority=0)
    assert shape(engine.step()) == [("low", 1)]
    assert said(engine, "urgent") == "no free blocks: needs 2, 1 available"
    assert_said_as_alone(engine, low, urgent)
    assert preempted(engine.records) == []


def test_a_live_switch_of_the_policy_sorts_the_queue_again():
    engine = FakeEngine(max_num_seqs=1)
    engine.add("x", 3, **LONG)
    for name, priority in (("a", 5), ("b", 0), ("c", 3), ("d", 0)):
        engine.add(name, 3, max_tokens=1, priority=priority)
    engine.step()
    for policy, order in (("priority", "bdca"), ("fcfs", "abcd"), ("priority", "bdca")):
        engine.core.set_knob("scheduling_policy", policy)
        assert list(engine.scheduler.waiting) == list(order)
        engine.step()


def test_a_switch_of_the_policy_puts_a_preempted_request_where_it_belongs():
    engine = full_pool("fcfs", a=0, b=4)
    engine.add("c", 3, max_tokens=1, priority=1)
    engine.step()
    assert list(engine.scheduler.waiting) == ["b", "c"]
    engine.core.set_knob("scheduling_policy", "priority")
    assert list(engine.scheduler.waiting) == ["c", "b"]
    engine.step()


# -- prefill-first -------------------------------------------------------------------------------


def test_prefill_first_gives_the_budget_to_prompts_before_decodes():
    engine = FakeEngine(token_budget=8, scheduling_policy="prefill-first")
    engine.add("a", 4, **LONG)
    engine.step()
    engine.add("b", 10, **LONG)
    assert shape(engine.step()) == [("b", 8)]
    assert said(engine, "a") == "budget spent: 0 of 8 left, 1 token to compute"
    assert shape(engine.step()) == [("b", 2), ("a", 1)]


def test_prefill_first_leaves_a_block_to_a_decode_that_needs_one():
    engine = FakeEngine(num_blocks=4, scheduling_policy="prefill-first")
    a = engine.add("a", 8, max_tokens=4, ignore_eos=True)
    engine.step()
    b = engine.add("b", 8, max_tokens=1)
    assert shape(engine.step()) == [("a", 1)]
    assert said(engine, "b") == "no free blocks: needs 2, 1 available"
    assert_said_as_alone(engine, a, b)
    assert preempted(engine.records) == []


def test_prefill_first_admits_what_fits_beside_the_block_of_a_decode():
    engine = FakeEngine(num_blocks=4, scheduling_policy="prefill-first")
    engine.add("a", 8, max_tokens=4, ignore_eos=True)
    engine.step()
    engine.add("b", 4, max_tokens=1)
    assert shape(engine.step()) == [("b", 4), ("a", 1)]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 16)), min_size=2, max_size=9),
    num_blocks=st.integers(7, 12),
)
def test_prefill_first_never_takes_a_decodes_block_for_an_admission(sizes, num_blocks):
    engine = FakeEngine(
        token_budget=40, num_blocks=num_blocks, scheduling_policy="prefill-first"
    )  # fmt: skip
    requests = [
        engine.add(f"r{i}", prompt, max_tokens=made, ignore_eos=True)
        for i, (prompt, made) in enumerate(sizes)
    ]
    assert_said_as_alone(engine, *requests)
    for record in engine.records:
        assert not (admitted(record) and preempted([record]))
        assert not events(record, Failed)


# -- caps ----------------------------------------------------------------------------------------


def test_the_long_prefill_cap_lets_three_long_prompts_share_the_steps():
    engine = FakeEngine(
        token_budget=1024, block_size=16, num_blocks=200, max_model_len=2048,
        long_prefill_token_threshold=400,
    )  # fmt: skip
    requests = [engine.add(name, 800, max_tokens=4, ignore_eos=True) for name in "abc"]
    assert shape(engine.step()) == [("a", 400), ("b", 400), ("c", 224)]
    assert said(engine, "a") == "prefill chunk 1: 400 tokens, 400 to go (long-prefill cap: 400)"
    assert said(engine, "c") == (
        "prefill chunk 1: 224 tokens, 576 to go (the budget of 1024 is spent)"
    )
    assert shape(engine.step()) == [("a", 400), ("b", 400), ("c", 224)]
    assert shape(engine.step()) == [("a", 1), ("b", 1), ("c", 352)]
    assert said(engine, "c") == "prefill: the last 352 tokens"
    engine.run()
    assert [len(output(request)) for request in requests] == [4, 4, 4]


def test_without_chunked_prefill_the_long_prefill_cap_holds_nothing_up():
    engine = FakeEngine(chunked_prefill=False, long_prefill_token_threshold=3)
    engine.add("a", 10, max_tokens=1)
    assert shape(engine.step()) == [("a", 10)]


def test_a_long_prefill_cap_as_large_as_the_budget_is_what_a_chunk_names():
    engine = FakeEngine(token_budget=4, long_prefill_token_threshold=4)
    engine.add("a", 9, max_tokens=1)
    engine.step()
    assert said(engine, "a") == "prefill chunk 1: 4 tokens, 5 to go (long-prefill cap: 4)"


def test_only_so_many_prompts_are_in_progress_at_a_time():
    engine = FakeEngine(long_prefill_token_threshold=4, max_num_partial_prefills=1)
    engine.add("a", 12, **LONG)
    engine.add("b", 12, **LONG)
    engine.add("c", 3, **LONG)
    assert shape(engine.step()) == [("a", 4)]
    assert said(engine, "b") == "partial-prefill cap: 1 prompt of 1 begun and unfinished"
    assert said(engine, "c") == "behind b"
    engine.core.set_knob("max_num_partial_prefills", 2)
    assert shape(engine.step()) == [("a", 4), ("b", 4), ("c", 3)]


def test_a_prompt_may_begin_in_the_step_in_which_the_one_before_it_is_done():
    engine = FakeEngine(long_prefill_token_threshold=4, max_num_partial_prefills=1)
    engine.add("a", 8, **LONG)
    engine.add("b", 8, **LONG)
    engine.step()
    assert shape(engine.step()) == [("a", 4), ("b", 4)]


def test_a_prompt_that_runs_whole_is_not_held_up_by_prompts_in_progress():
    engine = FakeEngine(
        long_prefill_token_threshold=4, max_num_partial_prefills=1, skip_blocked_head=1
    )
    for name, prompt in (("a", 12), ("b", 12), ("c", 4)):
        engine.add(name, prompt, **LONG)
    assert shape(engine.step()) == [("a", 4), ("c", 4)]


def test_prompts_in_progress_that_get_no_budget_count_under_the_cap():
    engine = FakeEngine(token_budget=8, long_prefill_token_threshold=4, max_num_partial_prefills=2)
    engine.add("a", 20, **LONG)
    engine.add("b", 20, **LONG)
    engine.step()
    engine.core.set_knob("token_budget", 4)
    assert shape(engine.step()) == [("a", 4)]
    engine.add("c", 2, **LONG)
    engine.core.set_knob("token_budget", 8)
    engine.core.set_knob("max_num_partial_prefills", 1)
    # Lowering the cap stops nobody that has begun.
    assert shape(engine.step()) == [("a", 4), ("b", 4)]


def test_the_watermark_is_ignored_while_nothing_runs_and_kept_while_something_does():
    engine = FakeEngine(num_blocks=6, watermark=3)
    engine.add("a", 16, max_tokens=2, ignore_eos=True)
    engine.step()
    engine.add("b", 4, max_tokens=2, ignore_eos=True)
    # a has ended when its second token is drawn; its decode takes the fifth block.
    assert shape(engine.step()) == [("a", 1)]
    assert said(engine, "b") == "watermark: needs 1 of 1 blocks, and 3 must stay free"
    assert shape(engine.step()) == [("b", 4)]


def test_an_admission_may_leave_exactly_the_watermark():
    for watermark, runs in ((3, True), (4, False)):
        engine = FakeEngine(token_budget=32, num_blocks=8, watermark=watermark)
        engine.add("a", 11, **LONG | {"max_tokens": 9})
        engine.add("b", 8, max_tokens=1)
        assert admitted(engine.step()) == (["a", "b"] if runs else ["a"])


def test_without_chunked_prefill_a_prompt_waits_until_it_fits_and_others_behind_it():
    engine = FakeEngine(token_budget=8, chunked_prefill=False)
    for name, prompt in (("a", 5), ("b", 6), ("c", 2)):
        engine.add(name, prompt, **LONG)
    assert shape(engine.step()) == [("a", 5)]
    assert said(engine, "b") == (
        "chunked prefill is off: 6 tokens in one step, 3 of the budget of 8 left"
    )
    assert said(engine, "c") == "behind b"
    assert shape(engine.step()) == [("a", 1), ("b", 6)]
    assert said(engine, "c") == (
        "chunked prefill is off: 2 tokens in one step, 1 of the budget of 8 left"
    )
    assert shape(engine.step()) == [("a", 1), ("b", 1), ("c", 2)]


def test_without_chunked_prefill_a_prompt_above_the_budget_is_refused_with_the_numbers():
    engine = FakeEngine(token_budget=8, chunked_prefill=False)
    message = "has 11 tokens and a step 8, and chunked prefill is off.*raise the token budget by 3"
    with pytest.raises(RequestRefused, match=message):
        engine.add("a", 11)
    engine.add("b", 8, max_tokens=1)
    assert shape(engine.step()) == [("b", 8)]


def test_a_prompt_that_a_live_change_made_too_long_runs_in_chunks_and_says_why():
    engine = FakeEngine(token_budget=8, chunked_prefill=False)
    a = engine.add("a", 8, max_tokens=3, ignore_eos=True)
    engine.core.set_knob("token_budget", 5)
    assert shape(engine.step()) == [("a", 5)]
    assert said(engine, "a") == (
        "prefill chunk 1: 5 tokens, 3 to go (chunked prefill is off, but it is longer than a step)"
    )
    assert shape(engine.step()) == [("a", 3)]
    assert said(engine, "a") == "prefill: the last 3 tokens"
    assert_said_as_alone(engine, a)


def test_without_chunked_prefill_a_preempted_request_that_outgrew_the_budget_comes_back():
    engine = FakeEngine(
        token_budget=8, num_blocks=6, chunked_prefill=False, prefix_caching=False
    )  # fmt: skip
    a, b = (engine.add(name, 7, max_tokens=12, ignore_eos=True) for name in "ab")
    assert_said_as_alone(engine, a, b)
    assert preempted(engine.records) == ["b", "b"]
    chunks = [
        d.tokens
        for record in engine.records
        for d in record.decisions
        if d.request_id == "b" and d.reason is Reason.CHUNKING_OFF and d.action is Action.PREFILL
    ]
    # The first time beside a decode, the second time alone; the rest of it is short enough.
    assert chunks == [7, 8]


def blocked_head(skip: int) -> tuple[FakeEngine, Request]:
    """`big` lacks blocks while `a` runs, and small requests stand behind it."""
    engine = FakeEngine(token_budget=64, num_blocks=12, skip_blocked_head=skip)
    engine.add("a", 24, max_tokens=16, ignore_eos=True)
    engine.step()
    big = engine.add("big", 28, max_tokens=2, ignore_eos=True)
    for name in "cde":
        engine.add(name, 3, max_tokens=1)
    return engine, big


def test_nobody_passes_a_blocked_head_by_default():
    engine, _ = blocked_head(0)
    assert shape(engine.step()) == [("a", 1)]
    assert said(engine, "big") == "no free blocks: needs 7, 5 available"
    assert [said(engine, name) for name in "cde"] == ["behind big"] * 3


def test_a_blocked_head_alone_in_the_queue_has_nobody_behind_it():
    engine = FakeEngine(num_blocks=4)
    engine.add("a", 10, max_tokens=4, ignore_eos=True)
    engine.add("b", 9, max_tokens=4)
    record = engine.step()
    assert said(engine, "b").startswith("no free blocks")
    assert record.rest is None


def test_so_many_pass_a_blocked_head_and_the_next_stands_behind_it():
    engine, big = blocked_head(2)
    record = engine.step()
    assert shape(record) == [("a", 1), ("c", 3), ("d", 3)]
    assert [event.passed for event in events(record, Admitted)] == [["big"], ["big"]]
    assert big.passed == 2
    assert said(engine, "e") == "behind big"


def test_a_blocked_head_is_never_passed_more_often_in_all_steps_together():
    engine, big = blocked_head(2)
    for index in range(8):
        engine.add(f"f{index}", 2, max_tokens=1)
        engine.step()
    assert big.passed == 2
    before = [name for record in engine.records for name in admitted(record)]
    assert before == ["a", "c", "d"]
    assert_said_as_alone(engine, big)
    order = [name for record in engine.records for name in admitted(record)]
    assert order[:5] == ["a", "c", "d", "big", "e"]


def test_no_more_requests_than_may_pass_are_blocked_at_the_head():
    engine = FakeEngine(token_budget=64, num_blocks=12, skip_blocked_head=1)
    engine.add("a", 24, max_tokens=16, ignore_eos=True)
    for name in ("big", "large"):
        engine.add(name, 28, max_tokens=2)
    engine.add("c", 2, max_tokens=1)
    assert shape(engine.step()) == [("a", 24)]
    assert said(engine, "large") == "no free blocks: needs 7, 6 available"
    assert said(engine, "c") == "behind large"


def test_a_cap_that_holds_for_all_lets_nobody_pass():
    engine = FakeEngine(max_num_seqs=1, skip_blocked_head=3)
    for name in "abc":
        engine.add(name, 3, **LONG)
    assert shape(engine.step()) == [("a", 3)]
    assert said(engine, "b") == "max sequences: 1 of 1 running"
    assert said(engine, "c") == "behind b"


def test_fewer_places_than_requests_running_lose_nobody():
    engine = FakeEngine()
    requests = [engine.add(name, 3, max_tokens=6 + i) for i, name in enumerate("abcd")]
    engine.step()
    engine.core.set_knob("max_num_seqs", 1)
    requests.append(engine.add("e", 3, max_tokens=2))
    assert len(engine.step().segments) == 4
    assert said(engine, "e") == "max sequences: 4 of 1 running"
    assert_said_as_alone(engine, *requests)
    assert preempted(engine.records) == []
    last = max(i for i, r in enumerate(engine.records) if len(r.segments) > 1)
    first = next(i for i, r in enumerate(engine.records) if "e" in admitted(r))
    assert first > last


# -- preemption ----------------------------------------------------------------------------------


def test_tokens_of_a_request_preempted_after_it_was_scheduled_go_to_the_one_that_took_its_blocks():
    """`b` decodes before the prompt of `a` goes on, though it was admitted later; `a` then finds
    no block but those of `b`."""
    engine = FakeEngine(token_budget=8, num_blocks=5, long_prefill_token_threshold=4)
    a = engine.add("a", 20, max_tokens=1)
    b = engine.add("b", 1, max_tokens=6, ignore_eos=True)
    assert shape(engine.step()) == [("a", 4), ("b", 1)]
    engine.core.set_knob("long_prefill_token_threshold", 0)
    assert shape(engine.step()) == [("b", 1), ("a", 7)]
    assert shape(engine.step()) == [("b", 1), ("a", 5)]
    assert said(engine, "a") == "prefill chunk 3: 5 tokens, 4 to go (no free blocks for more)"
    engine.core.set_knob("token_budget", 4)
    record = engine.step()
    assert events(record, Preempted) == [Preempted("b", "a", 3)]
    assert shape(record) == [("a", 4)]
    assert said(engine, "b") == "preempted by a: 3 tokens to recompute"
    assert_said_as_alone(engine, a, b)


def test_nobody_is_admitted_in_a_step_that_preempts_however_much_room_it_makes():
    engine = full_pool("priority", a=0, b=1)
    engine.add("c", 1, max_tokens=1, priority=-5)
    record = engine.step()
    assert preempted([record]) == ["b"]
    assert admitted(record) == []
    assert said(engine, "c") == "held back: memory ran out for a in this step"
    # c is the most urgent, so the preempted one stands behind it.
    assert said(engine, "b") == "preempted by a: 8 tokens to recompute, 4 of them still cached"
    assert admitted(engine.step())[0] == "c"


def test_the_chunks_of_a_request_that_comes_back_are_counted_anew():
    engine = FakeEngine(token_budget=5, num_blocks=7, prefix_caching=False)
    engine.add("a", 5, max_tokens=16, ignore_eos=True)
    b = engine.add("b", 12, max_tokens=8, ignore_eos=True)
    chunks = [
        decision.chunk
        for record in engine.run()
        for decision in record.decisions
        if decision.request_id == "b" and decision.action is Action.PREFILL
    ]
    assert "b" in preempted(engine.records)
    assert chunks[:3] == [1, 2, 3]
    assert chunks[3:5] == [1, 2]
    assert_said_as_alone(engine, b)


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("caching", [True, False])
def test_two_requests_in_a_pool_for_one_do_not_preempt_each_other_for_ever(policy, caching):
    engine = FakeEngine(num_blocks=8, scheduling_policy=policy, prefix_caching=caching)
    a, b = (engine.add(name, 8, max_tokens=25, ignore_eos=True) for name in "ab")
    assert_said_as_alone(engine, a, b)
    assert "a" not in preempted(engine.records), "the first one always gets on"
    ended = next(i for i, r in enumerate(engine.records) if events(r, Finished))
    assert ended == 24, "it loses no step to the other one"


def test_a_request_that_the_pool_cannot_hold_ends_with_an_error_and_others_go_on():
    engine = FakeEngine(num_blocks=4)
    engine.scheduler.check_fits = lambda request: None
    a = engine.add("a", 10, max_tokens=30, ignore_eos=True)
    b = engine.add("b", 2, max_tokens=9, ignore_eos=True)
    engine.core.want_completions(["a"])
    assert_said_as_alone(engine, b)
    completion = engine.core.take_completion("a")
    assert completion is not None
    assert completion.finish_reason is FinishReason.ERROR
    assert "the pool of 4 blocks of 4 tokens is too small for it: it has 17 tokens" in (
        completion.error
    )
    assert output(a) == alone(engine, a)[:7]
    assert engine.world.requests["a"].finish_reason is FinishReason.ERROR
    assert_gone(engine, a)


# -- cancelling ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "where"), [(0, "waiting"), (1, "mid-prefill"), (3, "decode"), (4, "decode")]
)
def test_a_cancelled_request_leaves_nothing_behind(steps, where):
    engine = FakeEngine(token_budget=6)
    a = engine.add("a", 11, max_tokens=20, ignore_eos=True)
    b = engine.add("b", 9, max_tokens=5)
    for _ in range(steps):
        engine.step()
    assert (a.status == "waiting") == (where == "waiting")
    assert a.decoding == (where == "decode")
    assert engine.core.cancel("a")
    assert not engine.core.cancel("a")
    assert_gone(engine, a)
    assert_said_as_alone(engine, b)
    assert engine.world.requests["a"].finish_reason is FinishReason.ABORT


def test_a_cancelled_preempted_request_leaves_nothing_behind():
    engine = full_pool("fcfs", a=0, b=0)
    a, b = engine.scheduler.requests["a"], engine.scheduler.requests["b"]
    engine.step()
    assert b.status == "preempted"
    assert engine.core.cancel("b")
    assert not engine.core.cancel("b")
    assert_gone(engine, b)
    assert_said_as_alone(engine, a)


def test_a_request_that_ended_cannot_be_cancelled():
    engine = FakeEngine()
    engine.add("a", 3, max_tokens=1)
    engine.step()
    assert not engine.core.cancel("a")
    record = engine.step()
    assert record.events == []
    assert engine.world.requests["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("steps", range(5))
@pytest.mark.parametrize("which", ["a", "a.2"])
def test_a_cancelled_fork_or_its_parent_leaves_the_others_as_they_are(which, steps):
    engine = FakeEngine(token_budget=6)
    engine.add("a", 10, max_tokens=8, ignore_eos=True, n=3)
    requests = dict(engine.scheduler.requests)
    for _ in range(steps):
        engine.step()
    assert engine.core.cancel(which)
    assert not engine.core.cancel(which)
    assert_gone(engine, requests.pop(which))
    assert_said_as_alone(engine, *requests.values())


# -- failures ------------------------------------------------------------------------------------


def test_a_request_with_logits_that_are_not_numbers_ends_alone():
    engine = FakeEngine(num_blocks=32)
    requests = [engine.add(name, 6, max_tokens=9, ignore_eos=True) for name in "abc"]
    engine.step()
    engine.step()
    engine.core.want_completions(["b"])
    engine.model.nan.add("b")
    table = list(requests[1].block_table)
    record = engine.step()
    assert [e.message for e in events(record, Failed)] == ["the logits are NaN"]
    assert events(record, BlocksFreed) == [BlocksFreed("b", table[::-1])]
    completion = engine.core.take_completion("b")
    assert completion is not None
    assert (completion.finish_reason, completion.error) == ("error", "the logits are NaN")
    assert completion.token_ids == alone(engine, requests[1])[:2]
    assert [s.request_id for s in record.sampled] == ["a", "c"]
    assert_gone(engine, requests[1])
    assert_said_as_alone(engine, requests[0], requests[2])


def test_a_request_that_ends_with_an_error_gives_out_the_text_held_back():
    engine = FakeEngine()
    first = expected_first([5, 6, 7])
    engine.add("a", [5, 6, 7], max_tokens=9, ignore_eos=True, stop=[f" {first} and more"])
    engine.core.want_completions(["a"])
    engine.step()
    engine.model.nan.add("a")
    engine.step()
    completion = engine.core.take_completion("a")
    assert completion is not None
    assert completion.token_ids == [first]
    assert completion.text == f" {first}"


def test_a_request_that_is_cancelled_gives_out_the_text_held_back():
    engine = FakeEngine()
    first = expected_first([5, 6, 7])
    engine.add("a", [5, 6, 7], max_tokens=9, ignore_eos=True, stop=[f" {first} and more"])
    engine.core.want_completions(["a"])
    engine.step()
    engine.core.cancel("a")
    completion = engine.core.take_completion("a")
    assert completion is not None
    assert completion.text == f" {first}"


def test_the_cache_forgets_what_a_request_without_logits_computed():
    engine = FakeEngine()
    prompt = list(range(1, 11))
    engine.add("a", prompt, **LONG)
    engine.step()
    table = list(engine.scheduler.requests["a"].block_table)
    engine.model.nan.add("a")
    record = engine.step()
    assert events(record, BlocksUncached) == [BlocksUncached([table[1], table[0]])]
    assert engine.scheduler.pool.num_evictable == 0
    engine.add("b", prompt, max_tokens=1)
    assert shape(engine.step()) == [("b", 10)]


def test_the_cache_forgets_what_others_computed_behind_the_blocks_of_a_failed_request():
    engine = FakeEngine()
    prefix = list(range(1, 9))
    a = engine.add("a", [*prefix, 30], **LONG)
    engine.step()
    longer = [*prefix, *range(20, 29)]
    b = engine.add("b", longer, max_tokens=12, ignore_eos=True)
    engine.step()
    assert b.block_table[:2] == a.block_table[:2]
    assert b.num_cached_blocks == 4
    engine.model.nan.add("a")
    engine.step()
    assert len(engine.scheduler.pool.cache) == 0
    # What b computes from now on continues untrusted blocks.
    assert_said_as_alone(engine, b)
    assert len(engine.scheduler.pool.cache) == 0
    engine.add("c", longer, max_tokens=1)
    record = engine.step()
    assert record.segments[0].start == 0


def fail(engine: FakeEngine) -> None:
    engine.model.fail_next = True
    with pytest.raises(StepFailed):
        engine.core.step()


def test_a_failed_step_that_wrote_to_a_victims_blocks_preempts_it_all_the_same():
    engine = full_pool("fcfs", a=0, b=0, c=0)
    requests = list(engine.scheduler.requests.values())
    fail(engine)
    assert [r.status for r in requests] == ["running", "running", "preempted"]
    engine.scheduler.check_integrity()
    gone = [e for e in engine.core.pending_events if isinstance(e, BlocksUncached)]
    assert len(gone) == 1
    assert_said_as_alone(engine, *requests)


def test_a_victim_of_a_failed_step_whose_blocks_nobody_took_goes_on():
    """`twin` holds nothing but blocks of `a`: preempting it frees none, so `d` is preempted, too,
    and only the blocks of `d` are written to."""
    engine = FakeEngine(token_budget=64, num_blocks=8)
    prompts = {"x": [1] * 4, "y": [2] * 4, "a": [3] * 8, "d": [4] * 8, "twin": [3] * 8}
    requests = [
        engine.add(name, prompt, max_tokens=6, ignore_eos=True) for name, prompt in prompts.items()
    ]
    engine.step()
    assert requests[4].block_table == requests[2].block_table
    plan = engine.scheduler.plan(1.0)
    assert [e.request_id for e in plan.events if isinstance(e, Preempted)] == ["twin", "d"]
    fail(engine)
    assert {r.request_id for r in requests if r.status == "preempted"} == {"d"}
    assert_said_as_alone(engine, *requests)


def test_a_failed_step_loses_the_cached_blocks_that_it_overwrote():
    engine = FakeEngine(num_blocks=4)
    prompt = list(range(1, 14))
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    assert list(engine.scheduler.pool.evictable) == [2, 1, 0]
    b = engine.add("b", [40] * 10, max_tokens=1)
    fail(engine)
    # Planned: free block 3, then 2 and 1 of the cache.
    assert [entry.block_id for entry in engine.scheduler.pool.cache] == [0]
    assert engine.core.cancel("b")
    again = engine.add("again", prompt, max_tokens=1)
    assert engine.step().segments[0].start == 4
    assert_said_as_alone(engine, again)
    assert b.block_table == []
    assert events(engine.records[-1], BlocksEvicted) == []


def test_a_failed_step_admits_nobody_and_forks_nothing():
    engine = FakeEngine()
    engine.add("a", 6, max_tokens=5, ignore_eos=True, n=2)
    requests = list(engine.scheduler.requests.values())
    engine.step()
    fail(engine)
    assert list(engine.scheduler.waiting) == ["a.2"]
    assert_said_as_alone(engine, *requests)


@pytest.mark.parametrize("steps", range(12))
def test_a_failed_step_at_any_time_changes_no_output(steps):
    engine = FakeEngine(num_blocks=7, token_budget=9)
    prompt = list(range(1, 8))
    engine.add("a", prompt, max_tokens=9, ignore_eos=True, n=2)
    engine.add("b", [*prompt, 30], max_tokens=12, ignore_eos=True)
    requests = list(engine.scheduler.requests.values())
    for _ in range(steps):
        engine.step()
    fail(engine)
    fail(engine)
    assert_said_as_alone(engine, *requests)


# -- ends ----------------------------------------------------------------------------------------


def test_a_stop_token_ends_a_request_and_stays_in_its_output():
    engine = FakeEngine()
    said_alone = alone(engine, engine.add("x", [5, 6, 7], max_tokens=12, ignore_eos=True))
    stop = said_alone[4]
    a = engine.add("a", [5, 6, 7], max_tokens=12, ignore_eos=True, stop_token_ids=[stop, 99])
    engine.run()
    assert output(a) == said_alone[: said_alone.index(stop) + 1]
    assert engine.world.requests["a"].finish_reason is FinishReason.STOP


def test_a_stop_token_does_not_count_before_min_tokens():
    engine = FakeEngine()
    said_alone = alone(engine, engine.add("x", [5, 6, 7], max_tokens=12, ignore_eos=True))
    requests = {}
    for least in range(8):
        requests[least] = engine.add(
            f"a{least}", [5, 6, 7], max_tokens=8, min_tokens=least, ignore_eos=True,
            stop_token_ids=said_alone,
        )  # fmt: skip
    engine.run()
    assert [len(output(requests[least])) for least in range(8)] == [1, 2, 3, 4, 5, 6, 7, 8]


def test_an_end_token_does_not_count_before_min_tokens():
    # The first token that follows this prompt is the end token.
    prompt = next([i, j] for i in range(50) for j in range(50) if expected_first([i, j]) == 0)
    engine = FakeEngine()
    at_once = engine.add("a", prompt, max_tokens=6)
    later = engine.add("b", prompt, max_tokens=6, min_tokens=1)
    never = engine.add("c", prompt, max_tokens=6, ignore_eos=True)
    engine.run()
    assert output(at_once) == [0]
    assert len(output(later)) > 1
    assert len(output(never)) == 6


def expected_first(prompt: list[int]) -> int:
    engine = FakeEngine()
    return alone(engine, engine.add("x", prompt, max_tokens=1))[0]


# -- sentences -----------------------------------------------------------------------------------

SENTENCES = [
    (Action.DECODE, Reason.SCHEDULED, {"tokens": 1, "left": 1}, "decode: 1 token"),
    (Action.PREFILL, Reason.SCHEDULED, {"tokens": 9, "left": 9, "chunk": 1},
     "prefill: all 9 tokens"),
    (Action.PREFILL, Reason.SCHEDULED, {"tokens": 1, "left": 1, "chunk": 1},
     "prefill: 1 token"),
    (Action.PREFILL, Reason.SCHEDULED, {"tokens": 1, "left": 1, "chunk": 2},
     "prefill: the last 1 token"),
    (Action.PREFILL, Reason.BUDGET_SPENT, {"tokens": 3, "left": 8, "limit": 6, "chunk": 1},
     "prefill chunk 1: 3 tokens, 5 to go (the budget of 6 is spent)"),
    (Action.PREFILL, Reason.LONG_PREFILL, {"tokens": 4, "left": 9, "limit": 4, "chunk": 2},
     "prefill chunk 2: 4 tokens, 5 to go (long-prefill cap: 4)"),
    (Action.PREFILL, Reason.NO_FREE_BLOCKS, {"tokens": 4, "left": 9, "chunk": 2},
     "prefill chunk 2: 4 tokens, 5 to go (no free blocks for more)"),
    (Action.PREFILL, Reason.CHUNKING_OFF, {"tokens": 4, "left": 9, "chunk": 1},
     "prefill chunk 1: 4 tokens, 5 to go (chunked prefill is off, but it is longer than a step)"),
    (Action.WAIT, Reason.BUDGET_SPENT, {"left": 1, "have": 0, "limit": 6},
     "budget spent: 0 of 6 left, 1 token to compute"),
    (Action.WAIT, Reason.MAX_NUM_SEQS, {"have": 3, "limit": 2}, "max sequences: 3 of 2 running"),
    (Action.WAIT, Reason.NO_FREE_BLOCKS, {"need": 4, "have": 3},
     "no free blocks: needs 4, 3 available"),
    (Action.WAIT, Reason.WATERMARK, {"need": 4, "have": 5, "limit": 2},
     "watermark: needs 4 of 5 blocks, and 2 must stay free"),
    (Action.WAIT, Reason.PARTIAL_PREFILLS, {"have": 1, "limit": 1},
     "partial-prefill cap: 1 prompt of 1 begun and unfinished"),
    (Action.WAIT, Reason.PARTIAL_PREFILLS, {"have": 2, "limit": 2},
     "partial-prefill cap: 2 prompts of 2 begun and unfinished"),
    (Action.WAIT, Reason.CHUNKING_OFF, {"need": 7, "have": 3, "limit": 8},
     "chunked prefill is off: 7 tokens in one step, 3 of the budget of 8 left"),
    (Action.WAIT, Reason.FORK, {"have": 4, "limit": 9, "other": "p"},
     "waits for the prompt of p: 4 of 9 computed"),
    (Action.WAIT, Reason.BEHIND, {"other": "x"}, "behind x"),
    (Action.WAIT, Reason.HELD_BY_PREEMPTION, {"other": "x"},
     "held back: memory ran out for x in this step"),
    (Action.PREEMPT, Reason.PREEMPTED, {"left": 9, "have": 0, "other": "x"},
     "preempted by x: 9 tokens to recompute"),
    (Action.PREEMPT, Reason.PREEMPTED, {"left": 1, "have": 0, "other": "x"},
     "preempted by x: 1 token to recompute"),
    (Action.PREEMPT, Reason.PREEMPTED, {"left": 9, "have": 8, "other": "x"},
     "preempted by x: 9 tokens to recompute, 8 of them still cached"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "reason", "numbers", "text"), SENTENCES)
def test_a_decision_in_words(action, reason, numbers, text):
    assert sentence(Decision("r", action, reason, **numbers)) == text


def test_every_reason_has_a_sentence():
    assert {reason for _, reason, _, _ in SENTENCES} == set(Reason)
