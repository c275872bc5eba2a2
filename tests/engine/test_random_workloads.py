"""Random workloads on the fake model: invariants after every step, and the fold of the records."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import InvalidInput, RequestRefused, StepFailed
from engine.explain import sentence
from engine.knobs import POLICY_NAMES
from engine.record import Action, Admitted, Event, Reason, StepRecord
from engine.request import Request
from engine.world import World

from .fakes import FakeEngine, expected_output
from .strategies import knob_changes

CONTEXT = 48


PREFIXES = [[7] * 11, [7] * 5 + [8] * 9, list(range(1, 24))]
"""Beginnings that prompts share."""
SEEN: Counter[str] = Counter()
"""Steps run, events and reasons met."""
EVENTS = [kind.__name__ for kind in get_args(Event)]


class Workload(RuleBasedStateMachine):
    """Add, fork, cancel, step, fail, turn knobs, reset the cache: in any order."""

    @initialize(
        budget=st.integers(1, 24),
        seqs=st.integers(1, 6),
        block_size=st.integers(1, 7),
        num_blocks=st.integers(1, 30),
        policy=st.sampled_from(POLICY_NAMES),
        collisions=st.booleans(),
        threshold=st.sampled_from([0, 0, 2, 5]),
        partial=st.sampled_from([0, 0, 1, 2]),
    )
    def build(
        self, budget, seqs, block_size, num_blocks, policy, collisions, threshold, partial
    ) -> None:
        self.engine = FakeEngine(
            token_budget=budget, max_num_seqs=seqs, block_size=block_size,
            num_blocks=num_blocks, max_model_len=CONTEXT, scheduling_policy=policy,
            long_prefill_token_threshold=threshold, max_num_partial_prefills=partial,
            hash_function=(lambda key: hash(key) % 5) if collisions else hash,
        )  # fmt: skip
        self.requests: list[Request] = []
        self.ended: set[str] = set()
        """Requests that were cancelled or failed."""

    @rule(
        prefix=st.sampled_from([[], *PREFIXES]),
        cut=st.integers(0, 24),
        own=st.lists(st.integers(0, 49), min_size=1, max_size=16),
        max_tokens=st.integers(1, 30),
        min_tokens=st.integers(0, 4),
        ignore_eos=st.booleans(),
        priority=st.integers(0, 2),
        n=st.sampled_from([1, 1, 1, 2, 4]),
        salt=st.sampled_from([None, None, "pepper"]),
    )
    def add(self, prefix, cut, own, max_tokens, min_tokens, ignore_eos, priority, n, salt) -> None:
        prompt = prefix[:cut] + own
        name = f"r{len(self.requests)}"
        scheduler = self.engine.scheduler
        try:
            first = self.engine.add(
                name, prompt, max_tokens=max(max_tokens, min_tokens), min_tokens=min_tokens,
                ignore_eos=ignore_eos, priority=priority, n=n, cache_salt=salt,
            )  # fmt: skip
        except RequestRefused:
            pool, knobs = scheduler.pool, scheduler.knobs
            stored = min(len(prompt) + max(max_tokens, min_tokens), CONTEXT) - 1
            too_large = stored > pool.num_blocks * pool.block_size
            assert too_large or (not knobs.chunked_prefill and len(prompt) > knobs.token_budget)
            return
        self.requests.append(first)
        self.requests += [r for r in scheduler.requests.values() if r.fork_of is first]

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.requests:
            request_id = self.requests[which % len(self.requests)].request_id
            if self.engine.core.cancel(request_id):
                self.ended.add(request_id)
                assert not self.engine.core.cancel(request_id)

    @rule(times=st.integers(1, 12))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.one_step()

    def one_step(self) -> None:
        SEEN["steps"] += 1
        scheduler = self.engine.scheduler
        had_work = self.engine.core.has_work
        knobs, running = scheduler.knobs, len(scheduler.running)
        record = self.engine.step()
        assert record.num_tokens <= knobs.token_budget
        assert bool(record.segments) == had_work, "no progress although there was work"
        admitted = sum(isinstance(event, Admitted) for event in record.events)
        assert not admitted or running + admitted <= knobs.max_num_seqs
        # (A step that failed may have preempted somebody before this one.)
        preempted = any(d.action is Action.PREEMPT for d in record.decisions)
        assert not (admitted and preempted)
        SEEN.update(type(event).__name__ for event in record.events)
        SEEN.update(str(decision.reason) for decision in record.decisions)
        SEEN[str(record.rest.reason) if record.rest else ""] += 1
        self.every_live_request_has_a_decision(record)
        self.nobody_is_passed_for_ever(record)

    @rule()
    def fail(self) -> None:
        if self.engine.core.has_work:
            self.engine.model.fail_next = True
            with pytest.raises(StepFailed):
                self.engine.core.step()

    @rule(which=st.integers(0, 100))
    def nan(self, which: int) -> None:
        if self.engine.scheduler.running:
            running = list(self.engine.scheduler.running)
            request_id = running[which % len(running)]
            self.engine.model.nan.add(request_id)
            self.ended.add(request_id)

    @rule(knob=knob_changes(st.integers(1, 24)))
    def turn(self, knob: tuple[str, Any]) -> None:
        self.engine.core.set_knob(*knob)

    @rule(force=st.booleans())
    def reset_cache(self, force: bool) -> None:
        pool = self.engine.scheduler.pool
        held = any(pool.ref_counts[entry.block_id] for entry in pool.cache)
        if held and not force:
            with pytest.raises(InvalidInput, match="held by running requests"):
                self.engine.core.reset_prefix_cache()
        else:
            self.engine.core.reset_prefix_cache(force=force)
            assert not len(pool.cache)

    @invariant()
    def pool_adds_up(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_integrity()

    def every_live_request_has_a_decision(self, record: StepRecord) -> None:
        world = self.engine.world
        scheduled = {segment.request_id: segment.length for segment in record.segments}
        for request_id in [*world.running, *world.waiting]:
            decision = world.decision(request_id)
            assert decision is not None
            assert decision.tokens == scheduled.get(request_id, 0)
            assert sentence(decision)

    def nobody_is_passed_for_ever(self, record: StepRecord) -> None:
        limit = self.engine.scheduler.knobs.skip_blocked_head
        for event in record.events:
            for request_id in event.passed if isinstance(event, Admitted) else []:
                request = self.engine.scheduler.requests.get(request_id)
                assert request is None or request.passed <= limit

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        tokens = sum(request.num_prompt_tokens + 30 for request in self.requests)
        for _ in range(40 * (tokens + 10)):
            if not self.engine.core.has_work:
                break
            self.one_step()
        assert not self.engine.core.has_work, "some request starves"
        self.one_step()
        assert self.engine.scheduler.pool.num_held == 0
        assert not self.engine.world.running
        assert not list(self.engine.world.waiting)
        for request in self.requests:
            prompt = request.token_ids[: request.num_prompt_tokens]
            said = request.token_ids[request.num_prompt_tokens :]
            alone = expected_output(prompt, request.params, CONTEXT)
            if request.request_id in self.ended:
                assert said == alone[: len(said)]
            else:
                assert said == alone


Workload.TestCase.settings = settings(
    max_examples=800, stateful_step_count=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip


class TestRandomWorkloads(Workload.TestCase):
    """At least 20,000 steps of it."""

    @classmethod
    def tearDownClass(cls) -> None:
        assert SEEN["steps"] >= 20_000, f"only {SEEN['steps']} steps were run"
        for name in (*EVENTS, *Reason):
            assert SEEN[name] >= 20, f"{name} was met {SEEN[name]} times in all steps"


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
