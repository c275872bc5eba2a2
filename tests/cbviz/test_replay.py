"""A trace as a source: whole, cut off, damaged, and not a trace at all."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from cbviz.sources.replay import ReplaySource
from engine.protocol import Fatal, Message, Notice, Ready, Run, RunState, Stepped
from engine.trace import TraceWriter
from tests.cbviz.synthetic import FakeEngine, story
from tests.cbviz.test_app import drawn, running, screen_text, settle
from tests.cbviz.test_session import fold, state

STEPS = 15


@pytest.fixture
def engine() -> FakeEngine:
    return story(STEPS)


@pytest.fixture
def trace(engine: FakeEngine, tmp_path: Path) -> Path:
    path = tmp_path / "run.trace"
    writer = TraceWriter(path, engine.header)
    for record in engine.records:
        writer.write(record)
    writer.close()
    return path


def read(path: Path) -> list[Message]:
    """All that the source says, after its thread has ended."""
    messages: list[Message] = []
    source = ReplaySource(path)
    source.start(messages.append)
    assert source._thread is not None
    source._thread.join(timeout=30)
    assert not source._thread.is_alive()
    return messages


def test_a_whole_trace_is_delivered_in_order(engine: FakeEngine, trace: Path) -> None:
    ready, run_state, *steps = read(trace)
    assert ready == Ready(engine.header, 0.0)
    assert run_state == RunState(running=False, steps_per_s=0.0)
    assert steps == [Stepped(record) for record in engine.records]


def test_a_trace_that_breaks_off_is_delivered_up_to_there(trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-200])
    *steps, notice = read(trace)[2:]
    assert 0 < len(steps) < STEPS
    assert isinstance(notice, Notice)
    assert notice.message == f"the trace breaks off after {len(steps)} steps"


def test_damage_in_the_middle_is_told(trace: Path) -> None:
    data = bytearray(trace.read_bytes())
    data[len(data) * 3 // 4] ^= 0xFF
    trace.write_bytes(data)
    *steps, notice = read(trace)[2:]
    assert all(isinstance(step, Stepped) for step in steps)
    assert isinstance(notice, Notice)
    assert f"after {len(steps)} steps" in notice.message


@pytest.mark.parametrize("content", [b"", b"not a trace", b"cbviz-trace 1\n", None])
def test_what_is_no_trace_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "file"
    if content is not None:
        path.write_bytes(content)
    (fatal,) = read(path)
    assert isinstance(fatal, Fatal)
    assert str(path) in fatal.message
    assert "\n" not in fatal.message


def test_closing_stops_the_reading(trace: Path) -> None:
    source = ReplaySource(trace)
    first, go_on = threading.Event(), threading.Event()
    steps: list[Message] = []

    def take(message: Message) -> None:
        if isinstance(message, Stepped):
            steps.append(message)
            first.set()
            go_on.wait(30)

    source.start(take)
    assert first.wait(30)
    source.close()
    go_on.set()
    assert source._thread is not None
    source._thread.join(timeout=30)
    assert len(steps) == 1


def test_commands_change_nothing(trace: Path) -> None:
    source = ReplaySource(trace)
    assert not source.can_drive
    source.send(Run())


async def test_the_window_shows_the_steps_of_a_trace(engine: FakeEngine, trace: Path) -> None:
    app = CbvizApp(ReplaySource(trace), palette=Palette.make())
    async with running(app) as pilot:
        while app.session.newest < STEPS - 1:
            await pilot.pause()
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(engine, 0))
        for step in (1, 2, 3):
            await pilot.press("right")
            await settle(app, pilot)
            assert state(drawn(app)) == state(fold(engine, step))
        await pilot.press("end")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(engine, STEPS - 1))


async def test_the_window_opens_a_broken_trace_and_says_so(engine: FakeEngine, trace: Path) -> None:
    trace.write_bytes(trace.read_bytes()[:-200])
    app = CbvizApp(ReplaySource(trace), palette=Palette.make())
    async with running(app) as pilot:
        while "breaks off after" not in screen_text(app):
            await pilot.pause()
        assert 0 < app.session.newest < STEPS - 1
        await pilot.press("end")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(engine, app.session.newest))
