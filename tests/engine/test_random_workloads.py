"""Random workloads on the fake model: invariants after every step, and the fold of the records."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import RequestRefused, StepFailed
from engine.request import Request
from engine.world import World

from .fakes import FakeEngine, expected_output

CONTEXT = 48


class Workload(RuleBasedStateMachine):
    """Add, cancel, step, fail, change the budget: in any order."""

    @initialize(
        budget=st.integers(1, 24),
        seqs=st.integers(1, 6),
        block_size=st.integers(1, 7),
        num_blocks=st.integers(1, 30),
    )
    def build(self, budget: int, seqs: int, block_size: int, num_blocks: int) -> None:
        self.engine = FakeEngine(
            token_budget=budget, max_num_seqs=seqs, block_size=block_size,
            num_blocks=num_blocks, max_model_len=CONTEXT,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.cancelled: set[str] = set()

    @rule(
        prompt=st.lists(st.integers(0, 49), min_size=1, max_size=40),
        max_tokens=st.integers(1, 30),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list[int], max_tokens: int, ignore_eos: bool) -> None:
        try:
            self.requests.append(
                self.engine.add(
                    f"r{len(self.requests)}", prompt, max_tokens=max_tokens, ignore_eos=ignore_eos
                )
            )
        except RequestRefused:
            pool = self.engine.scheduler.pool
            stored = min(len(prompt) + max_tokens, CONTEXT) - 1
            assert stored > pool.num_blocks * pool.block_size

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.requests:
            request_id = self.requests[which % len(self.requests)].request_id
            if self.engine.core.cancel(request_id):
                self.cancelled.add(request_id)

    @rule(times=st.integers(1, 8))
    def step(self, times: int) -> None:
        for _ in range(times):
            had_work = self.engine.core.has_work
            budget = self.engine.scheduler.token_budget
            record = self.engine.step()
            assert record.num_tokens <= budget
            assert bool(record.segments) == had_work, "no progress although there was work"
            self.every_live_request_has_a_decision()

    @rule()
    def fail(self) -> None:
        if self.engine.core.has_work:
            self.engine.model.fail_next = True
            with pytest.raises(StepFailed):
                self.engine.core.step()

    @rule(budget=st.integers(1, 24))
    def set_budget(self, budget: int) -> None:
        self.engine.core.set_token_budget(budget)

    @invariant()
    def pool_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def every_live_request_has_a_decision(self) -> None:
        world = self.engine.world
        for request_id in world.running + world.waiting:
            assert world.decision(request_id) is not None

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.run()
        assert self.engine.scheduler.pool.num_held == 0
        assert not self.engine.world.running
        assert not self.engine.world.waiting
        for request in self.requests:
            if request.request_id not in self.cancelled:
                prompt = request.token_ids[: request.num_prompt_tokens]
                said = request.token_ids[request.num_prompt_tokens :]
                assert said == expected_output(prompt, request.params, CONTEXT)


Workload.TestCase.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, derandomize=True
)
test_random_workloads = Workload.TestCase


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8),
    budget=st.integers(1, 16),
    num_blocks=st.integers(8, 20),
)
def test_going_back_gives_the_same_worlds(lengths, budget, num_blocks):
    """A copy stays as it was while the original moves on, and can be moved on itself."""
    engine = FakeEngine(token_budget=budget, num_blocks=num_blocks, block_size=4)
    for index, (prompt, output) in enumerate(lengths):
        engine.add(f"r{index}", prompt, max_tokens=output, ignore_eos=True)
    copies = [engine.world.copy()]
    states = [_state(engine.world)]
    while engine.core.has_work:
        engine.step()
        copies.append(engine.world.copy())
        states.append(_state(engine.world))
    for world, state in zip(copies, states, strict=True):
        assert _state(world) == state
    half = len(copies) // 2
    again = copies[half].copy()
    for record in engine.records[half:]:
        again.apply(record)
    assert _state(again) == states[-1]
    assert _state(copies[half]) == states[half]


def _state(world: World) -> object:
    return (
        world.step,
        list(world.running),
        list(world.waiting),
        list(world.free),
        world.ref_counts.tolist(),
        {
            request_id: (
                view.status, view.token_ids, view.pieces, view.text, view.block_table,
                view.num_computed, view.preemptions, view.first_token_at, view.finished_at,
            )
            for request_id, view in world.requests.items()
        },
    )  # fmt: skip


def test_records_out_of_order_are_refused():
    engine = FakeEngine()
    engine.add("A", 3, max_tokens=3, ignore_eos=True)
    engine.run()
    world = World(engine.header)
    world.apply(engine.records[0])
    with pytest.raises(ValueError, match="step 2 does not follow step 0"):
        world.apply(engine.records[2])


def test_old_finished_requests_are_forgotten_but_counted():
    engine = FakeEngine(token_budget=64, max_num_seqs=64)
    for index in range(1100):
        engine.add(f"r{index}", 1, max_tokens=1)
    engine.run()
    assert engine.world.num_finished == 1100
    assert len(engine.world.requests) == 1000
    assert "r1099" in engine.world.requests
    assert "r0" not in engine.world.requests


def test_an_id_used_again_names_the_new_request():
    engine = FakeEngine(token_budget=64, max_num_seqs=64)
    for _ in range(2):
        engine.add("x", 3, max_tokens=2, ignore_eos=True)
        engine.run()
    for index in range(1100):
        engine.add(f"r{index}", 1, max_tokens=1)
    engine.run()
    assert engine.world.num_finished == 1102
    assert len(engine.world.requests) == 1000
