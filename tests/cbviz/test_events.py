"""The event log: one line an event, in order, filtered, and every kind of event in plain words."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from rich.cells import cell_len

from cbviz.event_log import FILTERS, KINDS, NOBODY, EventLog, Filter, other_in, renamed
from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.events import EventsPanel
from cbviz.session import History
from cbviz.timeline import Timeline
from engine.explain import event_words
from engine.record import (
    Added,
    Admitted,
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Cancelled,
    Event,
    Failed,
    Finished,
    Forked,
    KnobChanged,
    Preempted,
    PrefixHit,
    Refused,
    StepRecord,
)
from engine.request import FinishReason, SamplingParams
from engine.world import World
from tests.cbviz.busy import busy_run, worlds
from tests.cbviz.fake_source import FakeSource, ReplayFake
from tests.cbviz.test_app import make, running, settle
from tests.cbviz.test_grids import HOSTILE, Stage, cells_of
from tests.cbviz.test_sanitize import unsafe
from tests.cbviz.test_session import long_run

PARAMS = SamplingParams()
WORDS: list[tuple[Event, str]] = [
    (Added("a", "Hi there", [1, 2], ["Hi", " there"], PARAMS, 0.0), "added, 2 tokens: Hi there"),
    (Added("a", "", [1], ["x"], PARAMS, 0.0, "b"), "added, 1 token, another sample of b"),
    (Added("a", "x" * 500, [1], ["x"], PARAMS, 0.0), "added, 1 token: " + "x" * 120 + "…"),
    (Refused("a", "Hi", "40 tokens do not fit", 0.0), "refused: 40 tokens do not fit"),
    (Admitted("a", 0.0), "admitted"),
    (Admitted("a", 0.0, 12, ["b", "c"]),
     "admitted, 12 tokens looked up in the prefix cache, past 2 requests"),
    (PrefixHit("a", [3, 4], 32), "prefix cache hit: 32 tokens in 2 blocks (3, 4)"),
    (PrefixHit("a", [3], 16, True), "resumed with its own blocks: 16 tokens in block 3"),
    (Forked("a", "b", [3], 16), "shares the prompt of b: 16 tokens in block 3"),
    (BlocksAllocated("a", [1, 2, 3, 4, 5]), "got 5 blocks (1, 2, 3, 4, …)"),
    (BlocksFreed("a", []), "gave up 0 blocks"),
    (BlocksCached("a", 2, [7]), "put block 7 in the prefix cache, from the 3rd of its table on"),
    (BlockMerged("a", 10, 5, 6), "its 11th block was a duplicate: block 6 instead of 5"),
    (BlocksEvicted("a", [1]), "evicted block 1 from the prefix cache"),
    (BlocksUncached([1, 2]),
     "2 blocks (1, 2) taken out of the prefix cache: not to be trusted"),
    (CacheReset(1), "prefix cache reset: 1 block forgotten"),
    (BlockCopied("a", 1, 2), "copied block 1 to block 2"),
    (Preempted("a", "b", 40), "preempted by b: 40 tokens to recompute"),
    (Finished("a", FinishReason.STOP, 0.0), "finished: an end token or a stop string"),
    (Finished("a", FinishReason.LENGTH, 0.0), "finished: its limit of tokens"),
    (Finished("a", FinishReason.ABORT, 0.0), "finished: by command"),
    (Finished("a", FinishReason.ERROR, 0.0), "finished: it could not be computed"),
    (Cancelled("a", "", 0.0), "cancelled"),
    (Failed("a", "the logits are NaN", 0.0), "failed: the logits are NaN"),
    (KnobChanged("token_budget", 32, 64), "token budget: 32 to 64"),
    (KnobChanged("chunked_prefill", True, False), "chunked prefill: on to off"),
    (KnobChanged("scheduling_policy", "fcfs", "priority"), "scheduling policy: fcfs to priority"),
]  # fmt: skip


@pytest.mark.parametrize(("event", "wanted"), WORDS, ids=lambda value: type(value).__name__)
def test_every_event_in_words(event: Event, wanted: str) -> None:
    assert event_words(event) == wanted


def test_no_kind_of_event_is_left_out() -> None:
    every = set(get_args(Event))
    assert {type(event) for event, _ in WORDS} == every
    assert set(KINDS) == set(FILTERS[Filter.ALL]) == every
    others = [kinds for kinds in Filter if kinds not in (Filter.ALL, Filter.MAIN)]
    assert sorted(kind.__name__ for f in others for kind in FILTERS[f]) == sorted(
        kind.__name__ for kind in every
    )
    assert set(FILTERS) == set(Filter)


def test_an_event_that_names_another_request_can_be_told_with_its_letter() -> None:
    for event, _ in WORDS:
        other = other_in(event)
        if other:
            assert other == "b"
            assert "B" in event_words(renamed(event, "B"))
        else:
            assert renamed(event, "B") == event or isinstance(event, Added)


def log_of(records: list[StepRecord]) -> EventLog:
    log = EventLog()
    for record in records:
        log.append(record)
    return log


def frame_at(world: World, records: list[StepRecord], log: EventLog) -> Frame:
    timeline = Timeline()
    for record in records:
        timeline.append(record)
    return Frame(world, records[world.step], records[: world.step + 1], timeline, log)


@pytest.mark.parametrize("seed", range(4))
def test_the_log_holds_all_events_and_whose_they_are(seed: int) -> None:
    engine = busy_run(seed)
    log = log_of(engine.records)
    wanted: list[tuple[int, Event, int]] = []
    for record, world in zip(engine.records, worlds(engine, engine.records), strict=True):
        for event in record.events:
            view = world.requests.get(getattr(event, "request_id", ""))
            wanted.append((record.step, event, NOBODY if view is None else view.ordinal))
    entries = [log.entry(number) for number in range(len(log))]
    assert [(entry.step, entry.event, entry.ordinal) for entry in entries] == wanted
    assert log.numbers(Filter.ALL).tolist() == list(range(len(wanted)))
    for kinds in Filter:
        numbers = [n for n, (_, event, _) in enumerate(wanted) if type(event) in FILTERS[kinds]]
        assert log.numbers(kinds).tolist() == numbers
    for name, view in engine.world.requests.items():
        mine = [
            n for n, (_, event, ordinal) in enumerate(wanted)
            if ordinal == view.ordinal or (other_in(event) == name)
        ]  # fmt: skip
        assert log.numbers(Filter.ALL, name).tolist() == mine
    for step in range(-1, len(engine.records)):
        assert log.upto(step) == sum(at <= step for at, _, _ in wanted)


def test_the_log_is_as_bounded_as_the_records() -> None:
    engine = long_run(2000)
    history = History(engine.header, max_steps=200)
    for record in engine.records:
        history.append(record)
    log, whole = history.log, log_of(engine.records)
    assert log.dropped + len(log) == len(whole)
    assert len(log._records) == len(history)
    assert len(log._by_id) < 300
    for number in log.numbers(Filter.MAIN).tolist():
        assert log.entry(number) == whole.entry(number)
    with pytest.raises(IndexError):
        log.entry(log.dropped - 1)
    assert log.entry(log.dropped).step >= history.oldest


@pytest.mark.parametrize("size", [(12, 3), (46, 10), (118, 36)])
@pytest.mark.parametrize("palette", [Palette.make(), Palette.make(ascii=True, color="none")])
async def test_lines_equal_the_events(size: tuple[int, int], palette: Palette) -> None:
    engine = busy_run(1)
    log = log_of(engine.records)
    states = worlds(engine, engine.records)
    letters = {
        view.ordinal: palette.letter(view.ordinal) for view in engine.world.requests.values()
    }
    panel = EventsPanel(palette)
    async with Stage(panel).run_test(size=size) as pilot:
        panel.focus()
        for step in (59, 30, 0):
            panel.show(frame_at(states[step], engine.records, log))
            for _ in Filter:
                await pilot.press("f")
                numbers = log.numbers(panel.kinds).tolist()
                assert panel.numbers.tolist() == numbers
                for y in range(min(panel.room, len(numbers))):
                    entry = log.entry(numbers[panel._top + y])
                    line = panel.render_line(y)
                    other = letters.get(entry.other, "")
                    said = event_words(renamed(entry.event, other) if other else entry.event)
                    letter = letters.get(entry.ordinal, " ")
                    mark = palette.glyphs.cursor if entry.step == step else " "
                    start = f"{mark}{entry.step:>4} {letter} "
                    if isinstance(entry.event, Refused):
                        said = f"{entry.event.request_id} {said}"
                    assert line.text.startswith(start[: size[0]])
                    shown = line.text[len(start) :].rstrip()
                    cut = palette.glyphs.ellipsis in shown
                    said = said.replace("…", palette.glyphs.ellipsis)
                    assert said.startswith(shown.rstrip("…~ ")) if cut else shown == said
                    later = entry.step > step
                    assert all(bool(style.dim) >= later for _, style in cells_of(line))
        assert panel.kinds is Filter.MAIN


async def test_it_follows_the_step_looked_at_until_it_is_moved() -> None:
    engine = busy_run(2)
    log, states = log_of(engine.records), worlds(engine, engine.records)
    panel = EventsPanel(Palette.make())
    async with Stage(panel).run_test(size=(60, 10)) as pilot:
        panel.focus()
        panel.show(frame_at(states[59], engine.records, log))
        assert panel._top + panel.room == len(panel.numbers)
        panel.show(frame_at(states[30], engine.records, log))
        last = int(panel.numbers[panel._top + 5])
        assert log.entry(last).step <= 30 < log.entry(int(panel.numbers[panel._top + 6])).step
        await pilot.press("pageup", "pageup")
        top = panel._top
        panel.show(frame_at(states[30], engine.records, log))
        assert panel._top == top
        panel.show(frame_at(states[59], engine.records, log))
        await pilot.press("k", "k")
        assert panel.cursor == int(panel.numbers[-2])
        await pilot.press("f")
        assert panel.cursor == log.numbers(Filter.MAIN)[-2]
        await pilot.press("escape")
        assert panel.cursor is None
        assert panel._top + panel.room == len(panel.numbers)


async def test_click_and_enter_go_to_the_step_and_select() -> None:
    engine = long_run(60)
    app = make(ReplayFake(engine.records, engine.header))
    async with running(app, (200, 50)) as pilot:
        await pilot.press("end")
        await settle(app, pilot)
        panel = app.query_one(EventsPanel)
        log = panel.event_log
        assert log is not None
        entry = log.entry(int(panel.numbers[panel._top + 2]))
        await pilot.click(EventsPanel, offset=(10, 3))
        await settle(app, pilot)
        assert app.session.step == entry.step
        view = app.requests.frame.world.requests[app.requests.selected]  # type: ignore
        assert view.ordinal == entry.ordinal
        await pilot.press("8", "k", "k", "k", "enter")
        await settle(app, pilot)
        assert panel.cursor is not None
        assert app.session.step == log.entry(panel.cursor).step
        await pilot.press("o")
        await settle(app, pilot)
        chosen = app.requests.selected
        assert panel.numbers.tolist() == log.numbers(Filter.MAIN, chosen).tolist()
        await pilot.press("down")
        await settle(app, pilot)
        assert app.requests.selected != chosen
        assert panel.numbers.tolist() == log.numbers(Filter.MAIN, app.requests.selected).tolist()
        await pilot.press("o")
        assert panel.numbers.tolist() == log.numbers(Filter.MAIN).tolist()


@pytest.mark.parametrize("size", [(8, 3), (46, 10), (120, 38)])
@pytest.mark.parametrize("palette", [Palette.make(), Palette.make(ascii=True, color="none")])
async def test_hostile_text_stays_text_and_in_its_place(
    size: tuple[int, int], palette: Palette
) -> None:
    events: list[Event] = []
    for text in HOSTILE:
        for event, _ in WORDS:
            changed = {
                field: text for field in ("request_id", "prompt", "message", "by", "parent", "name")
                if hasattr(event, field)
            }  # fmt: skip
            events.append(msgspec.structs.replace(event, **changed))
    engine = busy_run(0, steps=1)
    record = msgspec.structs.replace(engine.records[0], events=events)
    panel = EventsPanel(palette)
    panel.kinds = Filter.ALL
    async with Stage(panel).run_test(size=size) as pilot:
        panel.show(Frame(engine.world, record, [record], None, log_of([record])))
        panel.focus()
        for key in [*["pageup"] * 14, "k", "o", "k", "escape"]:
            for y in range(size[1]):
                strip = panel.render_line(y)
                assert not unsafe(strip.text)
                assert strip.cell_length == cell_len(strip.text) == size[0]
                assert strip.text.isascii() or not palette.ascii
            assert not unsafe(str(panel.border_title))
            await pilot.press(key)


async def test_nothing_to_show_is_said_quietly() -> None:
    panel = EventsPanel(Palette.make())
    async with Stage(panel).run_test(size=(60, 8)) as pilot:
        panel.focus()
        keys = ["j", "k", "f", "o", "pageup", "enter", "escape"]
        await pilot.press(*keys)
        assert panel.render_line(0).text.strip() == "no step yet"
        engine = busy_run(0, steps=1)
        record = msgspec.structs.replace(engine.records[0], events=[])
        panel.show(Frame(engine.world, record, [record], None, log_of([record])))
        await pilot.press(*keys)
        assert panel.render_line(0).text.strip() == "no such event yet"


async def test_a_change_of_the_budget_is_logged() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app, (120, 40)) as pilot:
        source.add("one", max_tokens=30)
        await pilot.press("right_square_bracket", "n", "8")
        await settle(app, pilot)
        panel = app.query_one(EventsPanel)
        lines = [panel.render_line(y).text for y in range(panel.room)]
        assert any("token budget: 32 to 40" in line for line in lines)
