"""The timeline: each cell drawn equals a naive reading of the records of its steps."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.timeline import TimelinePanel
from cbviz.session import History
from cbviz.timeline import LEVELS, Mark, Timeline, lane_words
from engine.record import (
    Cancelled,
    Failed,
    Finished,
    Preempted,
    PrefixHit,
    SegmentKind,
    StepRecord,
)
from engine.request import RequestStatus
from engine.world import World
from tests.cbviz.busy import busy_run, worlds
from tests.cbviz.fake_source import FakeSource, ReplayFake
from tests.cbviz.synthetic import FakeEngine as Synthetic
from tests.cbviz.synthetic import header, story, words
from tests.cbviz.test_app import make, running, screen_text, settle, text_of
from tests.cbviz.test_grids import HOSTILE, Stage, cells_of
from tests.cbviz.test_sanitize import unsafe
from tests.cbviz.test_session import long_run
from tests.engine.fakes import FakeEngine


def timeline_of(records: list[StepRecord]) -> Timeline:
    timeline = Timeline()
    for record in records:
        timeline.append(record)
    return timeline


def frame_at(world: World, records: list[StepRecord], timeline: Timeline) -> Frame:
    return Frame(world, records[world.step], records[: world.step + 1], timeline)


def naive_marks(engine: FakeEngine) -> dict[tuple[int, int], int]:
    """`(ordinal, step) -> mark`, read from each record and the state after it, one by one."""
    marks: dict[tuple[int, int], int] = {}
    for record, world in zip(engine.records, worlds(engine, engine.records), strict=True):
        for view in world.requests.values():
            own = [e for e in record.events if getattr(e, "request_id", None) == view.request_id]
            failed = any(isinstance(event, Failed) for event in own)
            found = {
                RequestStatus.WAITING: 1, RequestStatus.PREEMPTED: 2, RequestStatus.RUNNING: 3,
                RequestStatus.FINISHED: 0,
            }[view.status]  # fmt: skip
            for segment in record.segments:
                if segment.request_id == view.request_id:
                    share = segment.length / record.token_budget
                    chunk = 4 + max(1, math.ceil(round(LEVELS * share, 9)))
                    found = max(found, 4 if segment.kind is SegmentKind.DECODE else chunk)
            for event in own:
                match event:
                    case PrefixHit():
                        found = max(found, Mark.HIT)
                    case Preempted():
                        found = max(found, Mark.PREEMPTED)
                    case Cancelled():
                        found = max(found, Mark.CANCELLED)
                    case Finished():
                        found = max(found, Mark.FAILED if failed else Mark.FINISHED)
            marks[view.ordinal, record.step] = found
    return marks


@pytest.mark.parametrize("seed", range(6))
def test_lanes_say_what_the_records_say(seed: int) -> None:
    engine = busy_run(seed)
    naive = naive_marks(engine)
    timeline = timeline_of(engine.records)
    last = len(engine.records)
    assert [lane.ordinal for lane in timeline.lanes] == list(range(engine.world.num_added))
    for lane in timeline.lanes:
        for per in (1, 2, 3, 8):
            columns = last // per + 2
            wanted = [
                max(naive.get((lane.ordinal, step), 0) for step in range(c * per, c * per + per))
                for c in range(columns)
            ]
            assert lane.marks(0, columns, per, last - 1).tolist() == wanted
            assert lane.marks(2 * per, 4, per, last - 1).tolist() == wanted[2:6]


def test_the_runs_meet_every_mark() -> None:
    seen = {mark for seed in range(6) for mark in naive_marks(busy_run(seed)).values()}
    assert seen >= set(Mark) - {Mark.IDLE}


@given(st.integers(0, 40), st.integers(1, 12), st.integers(1, 8), st.integers(0, 3))
@settings(max_examples=60, deadline=None)
def test_windows_hold_the_lanes_that_have_something_in_them(
    first: int, columns: int, per: int, seed: int
) -> None:
    timeline = timeline_of(_run(seed).records)
    end = first + columns * per
    seen = set(timeline.seen(first, end))
    for index, lane in enumerate(timeline.lanes):
        marks = lane.marks(first, columns, per, timeline.newest)
        assert bool(marks.any()) == (index in seen and lane.added <= timeline.newest)


_RUNS: dict[int, FakeEngine] = {}


def _run(seed: int) -> FakeEngine:
    if seed not in _RUNS:
        _RUNS[seed] = busy_run(seed)
    return _RUNS[seed]


def test_lanes_stay_the_same_when_old_steps_are_dropped() -> None:
    engine = long_run(3000)
    history = History(engine.header, max_steps=200)
    whole = Timeline()
    for record in engine.records:
        history.append(record)
        whole.append(record)
    kept = history.timeline
    assert kept.oldest == history.oldest > 2500
    assert len(kept.lanes) < 400
    assert len(kept._by_id) < 400
    window = kept.newest + 1 - kept.oldest
    mine = [kept.lanes[i] for i in kept.seen(kept.oldest, kept.newest + 1)]
    others = [whole.lanes[i] for i in whole.seen(kept.oldest, kept.newest + 1)]
    assert [lane.ordinal for lane in mine] == [lane.ordinal for lane in others]
    for lane, other in zip(mine, others, strict=True):
        ours = lane.marks(kept.oldest, window, 1, kept.newest)
        assert ours.tolist() == other.marks(kept.oldest, window, 1, whole.newest).tolist()


def test_a_lane_of_one_long_request_stays_small() -> None:
    engine = Synthetic(header(budget=8, num_blocks=4000))
    engine.add("long", words(30), 20_000)
    history = History(engine.header, max_steps=300)
    for index in range(2500):
        if index % 2:
            engine.add(f"r{index}", words(4), 1)
        history.append(engine.step())
    lane = history.timeline.lane_of("long")
    assert lane is not None
    assert len(lane._starts) < 1000
    assert lane.marks(history.oldest, 50, 1, history.newest).tolist() == [Mark.DECODE] * 50


def test_an_id_used_again_has_a_lane_of_its_own() -> None:
    engine = Synthetic(header())
    for _ in range(2):
        engine.add("same", words(4), 2)
        for _ in range(3):
            engine.step()
    timeline = timeline_of(engine.records)
    assert [(lane.added, lane.ended) for lane in timeline.lanes] == [(0, 1), (3, 4)]
    assert timeline.lane_of("same") is timeline.lanes[1]


def test_a_long_queue_and_long_runs_cost_little_to_take_in_and_to_read() -> None:
    engine = Synthetic(header(max_num_seqs=4))
    for index in range(5000):
        engine.add(f"r{index}", words(1), 30)
    records = [engine.step() for _ in range(300)]
    timeline = timeline_of(records[:1])
    begin = time.perf_counter()
    for record in records[1:]:
        timeline.append(record)
    for first in range(300):
        timeline.seen(first, first + 100)
    assert time.perf_counter() - begin < 1.0


def test_words_for_steps() -> None:
    engine = story(11)
    timeline = timeline_of(engine.records)
    lane = timeline.lane_of("d")
    assert lane is not None
    newest = timeline.newest
    assert lane_words(lane, 10, 11, newest) == "prefill 29 tokens"
    assert lane_words(lane, 8, 12, newest) == "prefill 58 tokens"
    assert lane_words(lane, 3, 4, newest) == "not there yet"
    first = timeline.lanes[0]
    assert lane_words(first, 0, 4, newest) == "prefill 12 tokens, decode 3 tokens"


# The panel.


def glyph_of(palette: Palette, mark: int) -> str:
    glyphs = palette.glyphs
    if Mark.PREFILL <= mark < Mark.HIT:
        return glyphs.fills[mark - Mark.PREFILL + 1]
    return {
        0: " ", 1: glyphs.waiting, 2: glyphs.waiting_again, 3: glyphs.idle, 4: glyphs.decode,
        Mark.HIT: glyphs.hit, Mark.PREEMPTED: glyphs.preempted, Mark.CANCELLED: glyphs.cancelled,
        Mark.FAILED: glyphs.cross, Mark.FINISHED: glyphs.check,
    }[mark]  # fmt: skip


def check_panel(panel: TimelinePanel, naive: dict[tuple[int, int], int]) -> None:
    timeline, glyphs = panel.timeline, panel.palette.glyphs
    assert timeline is not None
    axis = 1 if panel.size.height >= 3 else 0
    for y, lane in enumerate(panel.rows):
        cells = cells_of(panel.render_line(axis + y))
        assert cells[1][0] == panel.palette.letter(lane.ordinal)
        for column in range(panel.columns):
            steps = range(panel.first + column * panel.per, panel.first + (column + 1) * panel.per)
            mark = max(naive.get((lane.ordinal, step), 0) for step in steps)
            here = panel.viewed in steps
            wanted = glyphs.here if mark == 0 and here else glyph_of(panel.palette, mark)
            char, style = cells[panel.lead + column]
            assert char == wanted, (lane.ordinal, column)
            assert bool(style.underline) == (here and mark > 0) or panel.palette.color == "none"
            assert not (steps[0] > panel.viewed and mark) or style.dim


@pytest.mark.parametrize("size", [(8, 3), (28, 6), (70, 20), (120, 38), (200, 10)])
@pytest.mark.parametrize(
    "palette", [Palette.make(), Palette.make(ascii=True, color="16"), Palette.make(color="none")]
)
async def test_cells_equal_the_records(size: tuple[int, int], palette: Palette) -> None:
    panel = TimelinePanel(palette)
    async with Stage(panel).run_test(size=size) as pilot:
        for seed in (0, 3):
            engine = busy_run(seed)
            naive, states = naive_marks(engine), worlds(engine, engine.records)
            timeline = timeline_of(engine.records)
            for step in (59, 58, 20, 0, 31):
                panel.show(frame_at(states[step], engine.records, timeline))
                await pilot.pause()
                check_panel(panel, naive)
                column = (step - panel.first) // panel.per
                assert 0 <= column < panel.columns
        panel.focus()
        for keys in (["<"], ["<", "pagedown"], [">", "H"], ["<", "<", "L"], ["k", "k", "h"]):
            await pilot.press(*("less_than_sign" if k == "<" else
                                "greater_than_sign" if k == ">" else k for k in keys))  # fmt: skip
            panel.cursor = None
            check_panel(panel, naive)


async def test_every_state_reads_without_colour() -> None:
    for ascii in (False, True):
        palette = Palette.make(ascii=ascii, color="none")
        marks = [mark for mark in range(Mark.FINISHED + 1) if mark != Mark.NONE]
        glyphs = [glyph_of(palette, mark) for mark in marks]
        assert len(set(glyphs)) == len(glyphs)
        assert all(cell_len(glyph) == 1 for glyph in glyphs)
        assert not ascii or all(glyph.isascii() for glyph in glyphs)


@pytest.mark.parametrize("size", [(8, 3), (46, 10), (120, 20)])
@pytest.mark.parametrize("palette", [Palette.make(), Palette.make(ascii=True, color="none")])
async def test_hostile_ids_stay_text_and_in_their_place(
    size: tuple[int, int], palette: Palette
) -> None:
    engine = Synthetic(header())
    for index, text in enumerate(HOSTILE):
        engine.add(f"{text}{index}", words(3), 5)
    records = [engine.step() for _ in range(6)]
    panel = TimelinePanel(palette)
    async with Stage(panel).run_test(size=size) as pilot:
        panel.show(frame_at(engine.world, records, timeline_of(records)))
        panel.focus()
        for key in ["j", "j", "l", "less_than_sign", "pagedown", "escape"]:
            await pilot.press(key)
            for y in range(size[1]):
                strip = panel.render_line(y)
                assert not unsafe(strip.text)
                assert strip.cell_length == cell_len(strip.text) == size[0]
                assert strip.text.isascii() or not palette.ascii
            assert not unsafe(str(panel.border_title))


async def test_nothing_to_show_is_said_quietly() -> None:
    panel = TimelinePanel(Palette.make())
    async with Stage(panel).run_test(size=(60, 8)) as pilot:
        panel.focus()
        await pilot.press("l", "j", "less_than_sign", "enter", "escape", "H", "pageup")
        assert panel.render_line(0).text.strip() == "no step yet"
        engine = Synthetic(header())
        records = [engine.step()]
        panel.show(frame_at(engine.world, records, timeline_of(records)))
        await pilot.press("l", "j", "less_than_sign", "enter", "escape", "H", "pageup")
        assert "no request in these steps" in panel.render_line(1).text


async def test_it_follows_live_until_it_is_moved() -> None:
    engine = long_run(0)
    source = timeline_of([])
    panel = TimelinePanel(Palette.make())

    def step() -> None:
        engine.add(f"r{engine.world.step}", words(3), 3)
        source.append(engine.step())
        panel.show(frame_at(engine.world.copy(), engine.records, source))

    async with Stage(panel).run_test(size=(43, 12)) as pilot:
        for _ in range(120):
            step()
        assert (panel.first, panel.columns) == (80, 40)
        panel.focus()
        await pilot.press("H")
        assert panel.first == 60
        for _ in range(10):
            step()
        assert panel.first == 60
        await pilot.press("less_than_sign")
        await pilot.press("escape")
        assert panel.first == 50
        await pilot.press("full_stop", "comma", "comma")
        assert panel.per == 4
        for _ in range(40):
            step()
        assert panel.first == 12
        assert "4 steps a column" in str(panel.border_title)
        await pilot.press("comma", "comma", "comma", "comma")
        assert panel.per == 8
        assert panel.first == 0


async def test_the_cursor_goes_to_the_step_in_which_it_happened() -> None:
    engine = long_run(120)
    source = ReplayFake(engine.records, engine.header)
    app = make(source)
    async with running(app, (120, 40)) as pilot:
        await pilot.press("end", "7")
        await settle(app, pilot)
        panel = app.query_one(TimelinePanel)
        assert [p.id for p in app.panels if p.display] == ["timeline"]
        assert panel.has_focus
        assert panel.size.height > 30
        lane = panel.rows[2]
        offset = (panel.lead + (lane.ended - panel.first) // panel.per, 3)
        await pilot.click(TimelinePanel, offset=(offset[0] + 1, offset[1] + 1))
        await settle(app, pilot)
        assert app.session.step == lane.ended
        assert app.requests.selected == lane.request_id
        assert panel.viewed == lane.ended
        await pilot.press("j", "j", "comma", "h", "enter")
        await settle(app, pilot)
        assert panel.cursor is not None
        chosen = panel._lane_at(panel.cursor[0])
        assert chosen is not None
        assert app.requests.selected == chosen.request_id
        assert panel.cursor[1] // 2 == app.session.step // 2
        first = app.session.step
        await pilot.press("left")
        await settle(app, pilot)
        assert app.session.step == first - 1
        await pilot.press("up")
        await settle(app, pilot)
        assert panel._selected == panel.timeline.lane_of(app.requests.selected).ordinal  # type: ignore
        await pilot.press("2")
        await settle(app, pilot)
        assert not panel.display
        assert app.query_one("#mask").display
        assert app.requests.display


async def test_picking_the_newest_step_of_an_engine_stays_live() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app, (200, 50)) as pilot:
        source.add("one", max_tokens=30)
        source.advance(12)
        await settle(app, pilot)
        panel = app.query_one(TimelinePanel)
        assert panel.display
        await pilot.click(TimelinePanel, offset=(1 + panel.lead + 3, 2))
        await settle(app, pilot)
        assert (app.session.live, app.session.step) == (False, 3)
        await pilot.click(TimelinePanel, offset=(1 + panel.lead + 11, 2))
        await settle(app, pilot)
        assert app.session.live
        source.advance(3)
        await settle(app, pilot)
        assert panel.viewed == 14


@pytest.mark.parametrize(("size", "beside"), [((80, 24), False), ((120, 40), False),
                                              ((200, 50), True), ((40, 12), False)])  # fmt: skip
async def test_panels_that_have_no_room_come_alone(size: tuple[int, int], beside: bool) -> None:
    source = FakeSource()
    app = make(source)
    async with running(app, size) as pilot:
        source.add("one", max_tokens=30)
        source.advance(5)
        await settle(app, pilot)
        names = [panel.id for panel in app.panels if panel.display]
        assert ("timeline" in names) == ("events" in names) == beside
        await pilot.press("7")
        await settle(app, pilot)
        assert "▾" in text_of(app.query_one(TimelinePanel))
        await pilot.press("8")
        await settle(app, pilot)
        assert "added, 3 tokens" in screen_text(app)
        if beside:
            await pilot.press("z")
            assert [panel.id for panel in app.panels if panel.display] == ["events"]
            await pilot.press("z")
        else:
            assert [panel.id for panel in app.panels if panel.display] == ["events"]
            await pilot.press("z")
        await settle(app, pilot)
        assert [panel.id for panel in app.panels if panel.display] == names
        await pilot.press("7")
        await pilot.resize_terminal(200, 50)
        await settle(app, pilot)
        assert len([panel for panel in app.panels if panel.display]) == 7
