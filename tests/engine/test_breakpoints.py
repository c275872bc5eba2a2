"""Breakpoints on the records of real steps (with a fake model): each kind, and what it says."""

from __future__ import annotations

import pytest

from engine.breakpoints import (
    EXAMPLES,
    KINDS,
    MAX_BREAKPOINTS,
    Breakpoint,
    Hit,
    Standing,
    Watch,
    parse_all,
)
from engine.errors import InvalidInput, RequestRefused
from engine.record import Failed, StepRecord
from tests.engine.fakes import FakeEngine


def met(engine: FakeEngine, text: str, records: list[StepRecord] | None = None) -> dict[int, str]:
    """At which steps a breakpoint is met, and why."""
    standing, point = Standing(), Breakpoint.parse(text)
    found: dict[int, str] = {}
    for record in records or engine.records:
        why = point.hits(record, standing)
        standing.advance(record)
        if why is not None:
            found[record.step] = why
    return found


def busy() -> FakeEngine:
    """Two requests that outgrow a pool of eight blocks, a third that begins as the first does."""
    engine = FakeEngine(token_budget=8, num_blocks=8, block_size=4)
    engine.add("A", list(range(1, 13)), max_tokens=14, ignore_eos=True)
    engine.add("B", 9, max_tokens=14, ignore_eos=True)
    for step in range(60):
        if step == 3:
            engine.add("C", [*range(1, 13), 40], max_tokens=2, ignore_eos=True)
        if not engine.core.has_work:
            break
        engine.step()
    assert engine.world.num_preemptions
    return engine


def test_preemption():
    engine = busy()
    found = met(engine, "preemption")
    steps = [r.step for r in engine.records if any(e.__class__.__name__ == "Preempted"
                                                  for e in r.events)]  # fmt: skip
    assert list(found) == steps
    assert " lost its blocks to " in found[steps[0]]


def test_chunk():
    found = met(busy(), "chunk")
    assert found[0] == "A: prefill chunk 1: 8 tokens, 4 to go (the budget of 8 is spent)"
    assert 1 in found  # B is split, A's last chunk is no split of its own.
    assert found[1].startswith("B: ")


def test_prefix_hit_and_eviction():
    engine = FakeEngine(token_budget=32, num_blocks=8, block_size=4)
    engine.add("A", list(range(1, 13)), max_tokens=2, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("B", [*range(1, 9), 40, 41], max_tokens=1, ignore_eos=True)
    engine.step()
    assert met(engine, "hit") == {2: "B begins with 8 cached tokens"}
    engine.add("C", 25, max_tokens=1, ignore_eos=True)
    engine.step()
    assert met(engine, "eviction") == {3: "C takes 2 cached blocks"}


def test_a_request_that_comes_back_finds_its_own_blocks():
    found = met(busy(), "hit")
    assert any("of its tokens still cached" in why for why in found.values())


def test_finish_refusal_error():
    engine = FakeEngine()
    engine.add("A", 4, max_tokens=2, ignore_eos=True)
    with pytest.raises(RequestRefused):
        engine.add("B", 1000)
    engine.step()
    assert met(engine, "refusal").keys() == {0}
    assert "the prompt has 1000 tokens" in met(engine, "refusal")[0]
    engine.step()
    assert met(engine, "finish") == {1: "A ended (length)"}
    engine.add("C", 4, max_tokens=9)
    engine.model.nan.add("C")
    engine.step()
    assert met(engine, "error") == {2: "C: the logits are NaN"}
    assert met(engine, "finish")[2] == "C ended (error)"


def test_a_step_that_failed_is_an_error_of_the_next_record():
    engine = FakeEngine()
    engine.add("A", 4)
    engine.model.fail_next = True
    with pytest.raises(Exception, match="out of memory"):
        engine.step()
    engine.step()
    assert any(isinstance(event, Failed) for event in engine.records[0].events)
    assert "out of memory" in met(engine, "error")[0]


def test_budget():
    engine = busy()
    full = [r.step for r in engine.records if r.num_tokens == r.token_budget]
    assert list(met(engine, "budget")) == full
    assert full
    assert met(engine, "budget")[full[0]] == "all 8 tokens of the step are used"


def test_kv_is_met_when_it_rises_above_and_not_while_it_stays():
    engine = busy()
    fills = [100 * r.blocks_used / 8 for r in engine.records]
    rises = [i for i, now in enumerate(fills) if now > 60 and (i == 0 or fills[i - 1] <= 60)]
    found = met(engine, "kv>60%")
    assert list(found) == rises
    assert len(found) < sum(fill > 60 for fill in fills)
    assert found[rises[0]].endswith(f"{fills[rises[0]]:.3g} %")


def test_step():
    assert met(busy(), "step=3") == {3: "it has run"}


def test_states_of_one_request_and_of_any():
    engine = busy()
    assert met(engine, "A:waiting")[0] == "A is new, and waiting"
    assert met(engine, "A:running")[0] == "A was waiting, is running"
    assert list(met(engine, "C:waiting")) == [3]
    ended = {e.request_id: r.step for r in engine.records for e in r.events
             if e.__class__.__name__ == "Finished"}  # fmt: skip
    for name, step in ended.items():
        assert met(engine, f"{name}:finished") == {step: f"{name} was running, is finished"}
        assert step in met(engine, f"{name}:leaves-running")
    assert sorted(met(engine, "finished")) == sorted(set(ended.values()))
    preempted = met(engine, "preempted")
    assert preempted.keys() == met(engine, "preemption").keys()
    back = met(engine, "leaves-preempted")
    assert min(back) > min(preempted)
    assert met(engine, "nobody:running") == {}


def test_a_waiting_request_that_is_cancelled_leaves_its_state():
    engine = FakeEngine(max_num_seqs=1)
    engine.add("A", 4, max_tokens=9, ignore_eos=True)
    engine.add("B", 4)
    engine.step()
    engine.core.cancel("B")
    engine.core.cancel("A")
    engine.add("B", 5)  # The same id again: another request.
    engine.step()
    assert met(engine, "B:leaves-waiting")[1] == "B was waiting, is finished, and 1 more"
    assert met(engine, "A:leaves-running") == {1: "A was running, is finished"}
    assert met(engine, "B:waiting") == {0: "B is new, and waiting", 1: "B is new, and waiting"}


def test_where_things_stand_can_be_taken_from_a_world_at_any_step():
    """What is met after any step is the same as when all steps before were watched."""
    texts = [*KINDS, "kv>60%", "running", "preempted", "leaves-running", "leaves-preempted"]
    engine = busy()
    whole = Watch()
    whole.set(texts)
    expected = [whole.step(record) for record in engine.records]
    assert sum(map(len, expected)) > 20
    other = FakeEngine(token_budget=8, num_blocks=8, block_size=4)
    for index, record in enumerate(engine.records):
        late = Watch(Standing.of(other.world))
        late.set(texts)
        assert late.step(record) == expected[index]
        other.world.apply(record)


def test_hits_leaves_what_it_is_given_alone():
    engine = busy()
    standing = Standing()
    Breakpoint.parse("running").hits(engine.records[0], standing)
    assert standing.statuses == {}


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("Budget  full", "budget"), ("prefix hit", "hit"), ("chunk split", "chunk"),
        ("rejection", "refusal"), (" kv > 80 % ", "kv>80%"), ("KV>99.5", "kv>99.5%"),
        ("step 7", "step=7"), ("A: Running", "A:running"), ("leaves running", "leaves-running"),
        ("my:own:finished", "my:own:finished"), ("a b:leaves-waiting", "a b:leaves-waiting"),
    ],
)  # fmt: skip
def test_what_can_be_written(typed, text):
    point = Breakpoint.parse(typed)
    assert point.text == text
    assert Breakpoint.parse(text) == point
    assert point.meaning


def test_every_example_can_be_read():
    assert [point.text for point in parse_all(EXAMPLES)] == list(EXAMPLES)


@pytest.mark.parametrize(
    "typed",
    ["", " ", "foo", "kv", "kv>", "kv>-1%", "kv>1e9", "kv>١%", "step=", "step=-1", "step=1.5",
     "step=9999999999999999", ":running", "A:", "A:foo", "leaves-finished", "A:leaves-finished",
     "x" * 5000, "x" * 300 + ":running", "running:A"],
)  # fmt: skip
def test_what_cannot_be_read_is_answered_with_what_there_is(typed):
    with pytest.raises(InvalidInput, match="there are preemption, chunk, hit") as error:
        Breakpoint.parse(typed)
    assert len(str(error.value)) < 400


def test_a_pool_is_never_more_than_full():
    with pytest.raises(InvalidInput, match="100 % at most"):
        Breakpoint.parse("kv>100%")


def test_what_is_set_stays_when_something_cannot_be_read():
    watch = Watch()
    watch.set(["finish", "Finish", "budget"])
    assert [point.text for point in watch.breakpoints] == ["finish", "budget"]
    with pytest.raises(InvalidInput):
        watch.set(["chunk", "nonsense"])
    with pytest.raises(InvalidInput, match="too many"):
        watch.set([f"step={number}" for number in range(MAX_BREAKPOINTS + 1)])
    assert [point.text for point in watch.breakpoints] == ["finish", "budget"]
    assert Hit("finish", "A ended (stop)").words == "finish: A ended (stop)"
