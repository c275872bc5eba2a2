"""History, cursor and state of one window: what is shown is what the records say."""

from __future__ import annotations

import time

import msgspec
import pytest

from cbviz.session import History, Phase, Session
from engine.protocol import Fatal, Notice, Pending, Ready, RunState, Stage, Stepped
from engine.record import Admitted, KnobChanged, StepRecord
from engine.world import World
from tests.cbviz.synthetic import FakeEngine, header, story, words


def long_run(steps: int, **knobs: int) -> FakeEngine:
    """Requests come and go all the time, memory runs out now and then."""
    engine = FakeEngine(header(**{"num_blocks": 24, "block_size": 4, **knobs}))
    for index in range(steps):
        if index % 5 == 0:
            engine.add(f"r{index}", words(10 + index % 37, index), 5 + index % 11)
        engine.step()
    return engine


def filled(engine: FakeEngine, **options: int) -> Session:
    session = Session(**options)
    session.ingest(Ready(engine.header, 0.1))
    for record in engine.records:
        session.ingest(Stepped(record))
    return session


def fold(engine: FakeEngine, step: int) -> World:
    world = World(engine.header)
    for record in engine.records[: step + 1]:
        world.apply(record)
    return world


def state(world: World) -> dict[str, object]:
    """All that can be seen of a world."""
    return {
        "step": world.step,
        "queues": (list(world.running), list(world.waiting)),
        "knobs": (world.knobs.token_budget, world.knobs.max_num_seqs),
        "free": list(world.free),
        "owners": world.owners(),
        "counts": (world.num_added, world.num_finished, world.num_preemptions),
        "requests": {
            name: (view.status, view.token_ids, view.pieces, view.text, view.num_computed,
                   list(view.block_table), view.preemptions, view.finish_reason)
            for name, view in world.requests.items()
        },
        "last": world.last,
    }  # fmt: skip


def test_every_step_of_the_past_is_the_fold_of_its_records() -> None:
    engine = long_run(300)
    assert engine.world.num_preemptions > 0
    session = filled(engine)
    for step in [299, 0, 150, 149, 148, 63, 64, 65, 127, 128, 1, 298, 299, 10]:
        session.go_to(step)
        frame = session.frame()
        assert frame is not None
        assert state(frame.world) == state(fold(engine, step))
        assert frame.record is engine.records[step]
        assert frame.recent == engine.records[max(0, step - 239) : step + 1]


def test_worlds_handed_out_do_not_change_later_and_do_not_change_history() -> None:
    engine = long_run(80)
    session = filled(engine)
    live = session.frame()
    session.go_to(40)
    past = session.frame()
    assert live is not None
    assert past is not None
    before = (state(live.world), state(past.world))
    session.ingest(Stepped(engine.step()))
    past.world.apply(engine.records[41])
    assert state(live.world) == before[0]
    assert state(session.world_at(40) or past.world) == before[1]


def test_going_back_is_quick() -> None:
    engine = long_run(1500, num_blocks=512)
    session = filled(engine)
    took = []
    for step in range(1499, 900, -7):
        started = time.perf_counter()
        session.world_at(step)
        took.append(time.perf_counter() - started)
    assert sorted(took)[len(took) // 2] < 0.05


def test_the_cursor_stays_where_it_is_while_steps_come_in() -> None:
    engine = long_run(30)
    session = filled(engine)
    session.move(-5)
    assert (session.live, session.step) == (False, 24)
    session.ingest(Stepped(engine.step()))
    assert (session.step, session.newest) == (24, 30)
    session.go_live()
    assert (session.live, session.step) == (True, 30)


def test_moves_are_clamped_and_moving_past_the_end_goes_live() -> None:
    session = filled(long_run(10))
    session.move(-100)
    assert session.step == 0
    session.move(9)
    assert (session.step, session.live) == (9, False)
    session.move(1)
    assert session.live


def test_before_the_engine_is_ready_there_is_nothing_and_no_error() -> None:
    session = Session()
    session.move(-1)
    session.go_to(7)
    session.ingest(Stage("import", "torch"))
    session.ingest(Stage("weights", "a", 1, 2))
    session.ingest(Stage("weights", "a", 2, 2))
    assert session.frame() is None
    assert [(stage.name, stage.done) for stage in session.stages] == [("import", 0), ("weights", 2)]
    assert session.phase is Phase.LOADING


@pytest.mark.parametrize("options", [{"max_steps": 100}, {"max_steps": 3}, {"max_tokens": 900}])
def test_history_is_bounded_and_what_is_kept_is_right(options: dict[str, int]) -> None:
    engine = long_run(400)
    session = filled(engine, **options)
    history = session.history
    assert history is not None
    kept = range(session.oldest, session.newest + 1)
    assert session.oldest > 0
    assert len(kept) == len(history)
    assert len(history) <= options.get("max_steps", 400)
    if "max_tokens" in options:
        tokens = sum(engine.records[step].num_tokens for step in kept)
        assert tokens <= options["max_tokens"]
    session.go_to(0)
    assert session.step == session.oldest
    for step in {kept[0], kept[len(kept) // 2], kept[-1]}:
        world = session.world_at(step)
        assert world is not None
        assert state(world) == state(fold(engine, step))


def test_a_cursor_on_a_dropped_step_moves_to_the_oldest_one() -> None:
    engine = long_run(50)
    session = filled(engine, max_steps=60)
    session.go_to(0)
    for _ in range(40):
        session.ingest(Stepped(engine.step()))
    assert session.step == session.oldest > 0
    frame = session.frame()
    assert frame is not None
    assert state(frame.world) == state(fold(engine, session.oldest))


def test_keyframes_of_a_large_pool_stay_within_their_memory() -> None:
    small, large = History(header(num_blocks=64)), History(header(num_blocks=200_000))
    assert small._every == 64
    assert (20_000 / large._every) * 12 * 200_000 <= 1.05 * 128 * 2**20


def test_pending_events_show_in_the_live_frame_alone() -> None:
    engine = story(6)
    session = filled(engine)
    engine.add("late", words(4))
    session.ingest(Pending([*engine._events, KnobChanged("token_budget", 32, 20)]))
    frame = session.frame()
    assert frame is not None
    assert list(frame.world.waiting) == ["late"]
    assert frame.world.knobs.token_budget == 20
    assert frame.record is engine.records[-1]
    session.go_to(5)
    past = session.frame()
    assert past is not None
    assert list(past.world.waiting) == []
    session.go_live()
    session.ingest(Stepped(engine.step()))
    after = session.frame()
    assert after is not None
    assert state(after.world) == state(fold(engine, 6))


def test_pending_events_that_do_not_fit_are_left_out() -> None:
    session = filled(story(6))
    session.ingest(Pending([Admitted("nobody", 0.0)]))
    frame = session.frame()
    assert frame is not None
    assert state(frame.world) == state(fold(story(6), 5))


def test_records_that_do_not_follow_end_the_history_and_are_told() -> None:
    engine = long_run(20)
    session = filled(engine)
    foreign: StepRecord = msgspec.structs.replace(
        engine.records[3], step=20, events=[Admitted("nobody", 0.0)]
    )
    session.ingest(Stepped(foreign))
    session.ingest(Stepped(engine.step()))
    assert session.newest == 19
    assert [notice.level for notice in session.notices] == ["error"]
    world = session.world_at(19)
    assert world is not None
    assert state(world) == state(fold(engine, 19))


def test_a_dead_engine_leaves_its_history_until_the_next_one_is_ready() -> None:
    engine = long_run(20)
    session = filled(engine)
    session.ingest(RunState(True, 8.0))
    session.ingest(Fatal("killed"))
    session.ingest(Fatal("the pipe broke"))
    assert (session.phase, session.fault, session.running) == (Phase.ENDED, "killed", False)
    session.begin()
    session.move(-3)
    assert session.step == 16
    assert (session.phase, session.fault) == (Phase.LOADING, "")
    session.ingest(Ready(header(budget=7), 0.1))
    assert session.live
    assert session.newest == -1
    frame = session.frame()
    assert frame is not None
    assert frame.world.knobs.token_budget == 7


def test_a_replay_stands_at_its_first_step() -> None:
    engine = long_run(20)
    session = Session(follow=False)
    session.ingest(Ready(engine.header, 0.0))
    for record in engine.records:
        session.ingest(Stepped(record))
    assert (session.step, session.newest) == (0, 19)


def test_notices_wait_to_be_shown() -> None:
    session = Session()
    session.ingest(Notice("one"))
    session.ingest(Notice("two", "error"))
    assert [notice.message for notice in session.notices] == ["one", "two"]
