"""The scheduling policy, step by step, with no torch."""

from __future__ import annotations

import copy

import pytest

from engine.errors import InvalidInput, RequestRefused, StepFailed
from engine.explain import sentence
from engine.record import Action, Failed, Finished, KnobChanged, Preempted, Reason, StepRecord
from engine.request import FinishReason

from .fakes import FakeEngine, expected_output


def shape(record: StepRecord) -> list[tuple[str, str, int, int]]:
    return [(s.request_id, s.kind.value, s.start, s.length) for s in record.segments]


def test_decodes_come_first_and_the_last_prompt_is_split_to_fit():
    engine = FakeEngine(token_budget=10)
    engine.add("A", 4, max_tokens=8, ignore_eos=True)
    engine.add("B", 5, max_tokens=8, ignore_eos=True)
    engine.add("C", 12, max_tokens=8, ignore_eos=True)
    assert shape(engine.step()) == [
        ("A", "prefill", 0, 4), ("B", "prefill", 0, 5), ("C", "prefill", 0, 1),
    ]  # fmt: skip
    assert shape(engine.step()) == [
        ("A", "decode", 4, 1), ("B", "decode", 5, 1), ("C", "prefill", 1, 8),
    ]  # fmt: skip
    record = engine.step()
    assert shape(record) == [
        ("A", "decode", 5, 1), ("B", "decode", 6, 1), ("C", "prefill", 9, 3),
    ]  # fmt: skip
    assert [segment.samples for segment in record.segments] == [True, True, True]
    assert [s.request_id for s in record.sampled] == ["A", "B", "C"]


def test_a_prefill_in_progress_goes_before_waiting_requests():
    engine = FakeEngine(token_budget=4)
    engine.add("A", 6, max_tokens=1)
    engine.add("B", 3, max_tokens=1)
    assert shape(engine.step()) == [("A", "prefill", 0, 4)]
    assert shape(engine.step()) == [("A", "prefill", 4, 2), ("B", "prefill", 0, 2)]
    assert shape(engine.step()) == [("B", "prefill", 2, 1)]
    assert not engine.core.has_work


def test_a_finished_request_leaves_at_once_and_is_replaced_in_the_next_step():
    engine = FakeEngine(max_num_seqs=1)
    engine.add("A", 3, max_tokens=1)
    engine.add("B", 3, max_tokens=1)
    first = engine.step()
    assert first.num_running == 0
    assert first.blocks_held == 0
    assert engine.world.requests["A"].finish_reason is FinishReason.LENGTH
    assert shape(engine.step()) == [("B", "prefill", 0, 3)]


def test_a_request_preempts_the_one_admitted_last_and_both_say_what_they_say_alone():
    """Ten blocks of 16 and two prompts of 80: the first needs a sixth block to decode."""
    engine = FakeEngine(token_budget=160, block_size=16, num_blocks=10)
    requests = [engine.add(name, 80, max_tokens=20, ignore_eos=True) for name in "AB"]
    assert shape(engine.step()) == [("A", "prefill", 0, 80), ("B", "prefill", 0, 80)]
    record = engine.step()
    assert shape(record) == [("A", "decode", 80, 1)]
    assert Preempted("B", "A", 80) in record.events
    decision = engine.world.decision("B")
    assert decision is not None
    assert decision.action is Action.PREEMPT
    assert sentence(decision) == ("preempted by A: 80 tokens to recompute, 64 of them still cached")
    engine.run()
    for request in requests:
        prompt = request.token_ids[:80]
        assert request.token_ids[80:] == expected_output(prompt, request.params, 128)


def test_nobody_is_admitted_in_a_step_that_preempts():
    engine = FakeEngine(token_budget=8, block_size=1, num_blocks=8)
    engine.add("A", 4, max_tokens=5, ignore_eos=True)
    engine.add("B", 4, max_tokens=5, ignore_eos=True)
    engine.step()
    engine.add("C", 1, max_tokens=1)
    record = engine.step()
    assert any(isinstance(event, Preempted) for event in record.events)
    # B heads the queue now; C is behind it.
    assert list(engine.world.waiting) == ["B", "C"]
    decision = engine.world.decision("C")
    assert decision is not None
    assert decision.reason is Reason.HELD_BY_PREEMPTION


def test_a_preempted_request_gives_its_tokens_of_the_step_back_to_the_budget():
    """The decode of B is planned before the prefill of A, which then takes B's blocks."""
    engine = FakeEngine(token_budget=3, block_size=1, num_blocks=8, max_num_seqs=2)
    engine.add("A", 7, max_tokens=1)
    engine.step()
    engine.core.set_knob("token_budget", 5)
    engine.add("B", 2, max_tokens=4, ignore_eos=True)
    engine.step()
    engine.run()
    assert engine.world.requests["A"].num_output_tokens == 1
    assert engine.world.requests["B"].num_output_tokens == 4


def test_more_decodes_than_budget_take_turns():
    engine = FakeEngine(token_budget=12, max_num_seqs=6)
    for name in "ABCDEF":
        engine.add(name, 2, max_tokens=20, ignore_eos=True)
    engine.step()
    engine.core.set_knob("token_budget", 2)
    turns = [s.request_id for _ in range(6) for s in engine.step().segments]
    assert sorted(turns) == sorted("ABCDEF" * 2)
    assert {turns[i] for i in range(6)} == set("ABCDEF")
    engine.run()


def test_the_next_batch_obeys_a_new_budget_and_the_record_tells_of_it():
    engine = FakeEngine(token_budget=4)
    engine.add("A", 20, max_tokens=1)
    assert engine.step().num_tokens == 4
    engine.core.set_knob("token_budget", 9)
    record = engine.step()
    assert record.num_tokens == 9
    assert KnobChanged("token_budget", 4, 9) in record.events
    with pytest.raises(InvalidInput, match="between 1 and"):
        engine.core.set_knob("token_budget", 0)


def test_every_live_request_gets_a_decision_with_its_numbers():
    engine = FakeEngine(token_budget=6, max_num_seqs=2)
    for name, prompt in (("A", 3), ("B", 8), ("C", 3), ("D", 3)):
        engine.add(name, prompt, max_tokens=9, ignore_eos=True)
    engine.step()
    said = {name: engine.world.decision(name) for name in "ABCD"}
    sentences = {name: sentence(decision) for name, decision in said.items() if decision}
    assert sentences == {
        "A": "prefill: all 3 tokens",
        "B": "prefill chunk 1: 3 tokens, 5 to go (the budget of 6 is spent)",
        "C": "budget spent: 0 of 6 left, 3 tokens to compute",
        "D": "behind C",
    }
    engine.step()
    decision = engine.world.decision("C")
    assert decision is not None
    # A decodes (1) and B takes the other 5 of the budget.
    assert sentence(decision) == "budget spent: 0 of 6 left, 3 tokens to compute"
    engine.core.set_knob("token_budget", 16)
    engine.step()
    decision = engine.world.decision("C")
    assert decision is not None
    assert sentence(decision) == "max sequences: 2 of 2 running"


def test_a_waiting_request_says_how_many_blocks_it_lacks():
    engine = FakeEngine(token_budget=32, block_size=4, num_blocks=4)
    engine.add("A", 12, max_tokens=2, ignore_eos=True)
    engine.add("B", 8, max_tokens=1)
    engine.step()
    decision = engine.world.decision("B")
    assert decision is not None
    assert sentence(decision) == "no free blocks: needs 2, 1 available"
    engine.run()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        (0, 1, "the prompt is empty"),
        (128, 1, r"has 128 tokens and the context 128.*shorten it by 1"),
        (60, 12, r"18 blocks \(prompt 60 \+ output 12 - 1 = 71 tokens, 4 a block\).*has 16"),
    ],
)
def test_what_can_never_run_is_refused_with_the_arithmetic(prompt, max_tokens, message):
    engine = FakeEngine(num_blocks=16)
    engine.add("A", 5, max_tokens=2)
    with pytest.raises(RequestRefused, match=message):
        engine.add("B", prompt, max_tokens=max_tokens)
    engine.step()
    assert engine.world.num_refused == 1
    assert "B" not in engine.world.requests


def test_a_request_that_just_fits_runs():
    engine = FakeEngine(num_blocks=16)
    request = engine.add("A", 60, max_tokens=5, ignore_eos=True)
    engine.run()
    assert request.num_output_tokens == 5
    assert max(record.blocks_held for record in engine.records) == 16


def test_the_context_ends_a_request():
    engine = FakeEngine(max_model_len=8)
    request = engine.add("A", 5, max_tokens=50, ignore_eos=True)
    engine.run()
    assert request.num_tokens == 8
    assert engine.world.requests["A"].finish_reason is FinishReason.LENGTH


def test_an_end_token_ends_a_request_unless_ignored():
    for seed in range(60):
        prompt = [seed, 1, 2]
        engine = FakeEngine()
        request = engine.add("A", prompt, max_tokens=40)
        engine.run()
        if request.token_ids[-1] == 0:
            assert engine.world.requests["A"].finish_reason is FinishReason.STOP
            break
    else:
        pytest.fail("the fake model never ended a text")
    again = FakeEngine()
    request = again.add("A", prompt, max_tokens=40, ignore_eos=True)
    again.run()
    assert request.num_output_tokens == 40


def test_a_live_id_cannot_be_used_twice_but_an_old_one_can():
    engine = FakeEngine()
    engine.add("A", 3, max_tokens=1)
    with pytest.raises(InvalidInput, match="'A' is in use"):
        engine.add("A", 3)
    engine.run()
    engine.add("A", 3, max_tokens=1)
    engine.run()
    assert engine.world.num_finished == 2


@pytest.mark.parametrize("steps_before", [0, 1, 2, 5])
def test_cancelling_in_any_state_leaves_nothing_behind(steps_before):
    engine = FakeEngine(token_budget=4)
    engine.add("A", 7, max_tokens=30, ignore_eos=True)
    engine.add("B", 3, max_tokens=3)
    for _ in range(steps_before):
        engine.step()
    assert engine.core.cancel("A")
    assert not engine.core.cancel("A")
    engine.step()
    assert engine.world.requests["A"].finish_reason is FinishReason.ABORT
    engine.run()
    assert engine.scheduler.pool.num_held == 0


def test_planning_changes_nothing():
    engine = FakeEngine(token_budget=8, block_size=1, num_blocks=12)
    engine.add("A", 6, max_tokens=6, ignore_eos=True)
    engine.add("B", 4, max_tokens=6, ignore_eos=True)
    for _ in range(3):
        engine.step()
    before = copy.deepcopy(engine.scheduler.__dict__)
    plan = engine.scheduler.plan(1.0)
    assert any(isinstance(event, Preempted) for event in plan.events)
    after = engine.scheduler.__dict__
    assert list(before["pool"].free) == list(after["pool"].free)
    assert list(before["running"]) == list(after["running"])
    assert [r.block_table for r in before["running"].values()] == [
        r.block_table for r in after["running"].values()
    ]
    assert engine.scheduler.plan(1.0) == plan


def test_a_failed_step_changes_nothing_and_can_be_tried_again():
    engine = FakeEngine(token_budget=6)
    requests = [engine.add(name, 5, max_tokens=6) for name in "AB"]
    engine.step()
    engine.model.fail_next = True
    held = engine.scheduler.pool.num_held
    with pytest.raises(StepFailed, match=r"step 1 failed and changed nothing: out of memory$"):
        engine.core.step()
    assert engine.scheduler.pool.num_held == held
    engine.scheduler.check_integrity()
    record = engine.step()
    assert record.step == 1
    assert any(isinstance(event, Failed) for event in record.events)
    engine.run()
    for request in requests:
        prompt = request.token_ids[:5]
        assert request.token_ids[5:] == expected_output(prompt, request.params, 128)


def test_a_step_without_work_records_only_what_happened_before_it():
    engine = FakeEngine()
    engine.core.set_knob("token_budget", 7)
    record = engine.step()
    assert record.segments == []
    assert record.events == [KnobChanged("token_budget", 16, 7)]


def test_times_of_requests_are_those_of_the_engine_and_not_of_pauses():
    engine = FakeEngine()
    engine.add("A", 3, max_tokens=3, ignore_eos=True)
    engine.step()
    for _ in range(100_000):
        engine.core._now()
    engine.run()
    view = engine.world.requests["A"]
    spent = [record.phases.total for record in engine.records]
    assert view.ttft_s == pytest.approx(spent[0])
    assert view.itl_s == pytest.approx(sum(spent[1:]) / 2)
    assert view.last_token_at - view.first_token_at > 100


def test_finish_events_follow_the_blocks_order_of_release():
    """Blocks are given back tail first, so the head of a sequence is reused last."""
    engine = FakeEngine(block_size=2, num_blocks=6)
    engine.add("A", 6, max_tokens=1)
    record = engine.step()
    assert Finished("A", FinishReason.LENGTH, record.events[-2].at) == record.events[-2]
    assert list(engine.scheduler.pool.free) == [3, 4, 5]
    assert list(engine.scheduler.pool.evictable) == [2, 1, 0]
