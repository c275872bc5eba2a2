"""Breakpoints in the window: the list, the pause and what it says, in live runs and in replays."""

from __future__ import annotations

from typing import Any

import pytest

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from cbviz.panels.status import StatusLine
from cbviz.screens.breakpoints import BreakpointsScreen
from engine.protocol import Add, Run, SetBreakpoints
from tests.cbviz.fake_source import FakeSource, ReplayFake
from tests.cbviz.synthetic import story
from tests.cbviz.test_app import make, running, screen_text, settle, text_of


def status(app: CbvizApp) -> str:
    return text_of(app.query_one(StatusLine))


def listed(app: CbvizApp) -> BreakpointsScreen:
    assert isinstance(app.screen, BreakpointsScreen)
    return app.screen


async def test_breakpoints_of_the_command_line_are_sent_before_anything_runs() -> None:
    source = FakeSource()
    app = make(source, start_paused=False, break_on=("finish", "kv>80%"))
    async with running(app):
        kinds = [type(command).__name__ for command in source.sent]
        assert kinds == ["SetSpeed", "SetBreakpoints", "Run"]
        assert source.sent_of(SetBreakpoints) == [SetBreakpoints(["finish", "kv>80%"])]


async def test_one_is_typed_met_told_and_gone_on_from() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("first", max_tokens=3)
        source.add("second", max_tokens=30)
        await pilot.press("b")
        await pilot.pause()
        assert "none yet" in screen_text(app)
        await pilot.press(*"finish", "enter")
        await pilot.pause()
        assert source.sent_of(SetBreakpoints) == [SetBreakpoints(["finish"])]
        assert "[x] finish" in screen_text(app)
        await pilot.press("escape", "escape", "space")
        source.advance(20)
        await settle(app, pilot)
        assert app.session.newest == 2
        assert "paused: finish: r0 ended (length) (step 2)" in status(app)
        assert not app.session.running
        await pilot.press("left")
        await settle(app, pilot)
        assert "ended" not in status(app)
        await pilot.press("b")
        await settle(app, pilot)
        assert "1 hit" in screen_text(app)
        await pilot.press("c")
        await pilot.pause()
        await settle(app, pilot)
        assert not isinstance(app.screen, BreakpointsScreen)
        assert source.sent[-1] == Run()
        assert app.session.live
        assert "ended" not in status(app)


async def test_a_pause_while_the_past_is_looked_at_is_told_all_the_same() -> None:
    source = FakeSource()
    app = make(source, break_on=("step=5",))
    async with running(app) as pilot:
        source.add("first", max_tokens=30)
        await pilot.press("n", "n", "n", "left", "space")
        source.advance(9)
        await settle(app, pilot)
        assert (app.session.step, app.session.newest) == (1, 5)
        assert "history" in status(app)
        assert "paused: step=5: it has run (step 5)" in screen_text(app)
        await pilot.press("c")
        source.advance(3)
        await settle(app, pilot)
        assert (app.session.live, app.session.newest) == (True, 8)


async def test_they_are_turned_off_and_on_and_removed() -> None:
    source = FakeSource()
    app = make(source, break_on=("finish", "budget", "step=7"))
    async with running(app) as pilot:
        await pilot.press("b", "down", "space")
        assert source.sent_of(SetBreakpoints)[-1] == SetBreakpoints(["finish", "step=7"])
        await pilot.pause()
        assert "[ ] budget" in screen_text(app)
        await pilot.press("space")
        assert source.sent_of(SetBreakpoints)[-1] == SetBreakpoints(["finish", "budget", "step=7"])
        await pilot.press("down", "down", "x")
        assert source.sent_of(SetBreakpoints)[-1] == SetBreakpoints(["finish", "budget"])
        await pilot.press("x", "x", "x", "space", "up", "down")
        assert source.sent_of(SetBreakpoints)[-1] == SetBreakpoints([])
        await pilot.press("escape")
        await pilot.pause()
        assert not isinstance(app.screen, BreakpointsScreen)


async def test_what_cannot_be_read_is_told_and_stays_in_the_line() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("b", *"nigq", "enter")
        await pilot.pause()
        await pilot.pause()
        assert "there is no breakpoint 'nigq'" in screen_text(app)
        assert listed(app).input.value == "nigq"
        assert source.sent_of(SetBreakpoints) == []
        assert source.sent_of(Add) == []
        assert not app.prompt.input.has_focus


async def test_typing_narrows_the_choices_and_completes() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("b", *"pree")
        await pilot.pause()
        text = screen_text(app)
        assert "a request loses its blocks to another" in text
        assert "cached blocks are taken" not in text
        await pilot.press("right", "enter")
        assert source.sent_of(SetBreakpoints) == [SetBreakpoints(["preemption"])]


async def test_a_new_engine_is_told_of_them_and_counts_anew() -> None:
    source = FakeSource()
    app = make(source, break_on=("step=1",), start_paused=False)
    async with running(app) as pilot:
        source.add("first")
        source.advance(4)
        await settle(app, pilot)
        assert app.driver.breaks.entries[0].hits == 1
        await pilot.press("r")
        await app.workers.wait_for_complete()
        await settle(app, pilot)
        assert app.driver.breaks.entries[0].hits == 0
        assert len(source.sent_of(SetBreakpoints)) == 2


async def test_a_replay_stands_still_where_a_breakpoint_is_met() -> None:
    engine = story(14)
    app = make(ReplayFake(engine.records, engine.header), break_on=("chunk", "r9:finished"))
    async with running(app) as pilot:
        await settle(app, pilot)
        first = next(r.step for r in engine.records[1:]
                     if any(d.tokens < d.left for d in r.decisions))  # fmt: skip
        app.driver.go_on()
        app.driver.tick(10.0)
        app.driver.tick(10.3)
        assert app.session.step == 2
        app.driver.tick(100.0)
        assert (app.session.step, app.driver.playing) == (first, False)
        await settle(app, pilot)
        assert "paused: chunk: d: prefill chunk 1" in status(app)
        assert app.driver.breaks.entries[0].hits == 1
        await pilot.press("left")
        await settle(app, pilot)
        assert "paused: chunk" not in status(app)
        await pilot.press("b", "space", "escape")
        app.driver.go_on()
        app.driver.tick(10.0)
        app.driver.tick(100.0)
        assert app.session.step == 13


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (40, 10), (20, 5)])
@pytest.mark.parametrize("look", [{}, {"ascii": True, "color": "none"}])
async def test_hostile_ids_are_safe_at_every_size(
    size: tuple[int, int], look: dict[str, Any]
) -> None:
    source = FakeSource()
    evil = "[/]\x1b[31m\u202e日本:running"
    app = CbvizApp(
        source, palette=Palette.make(**look), break_on=(evil, "running"), start_paused=False
    )
    async with running(app, size) as pilot:
        source.add("once", "[/]\x1b[31m\u202e日本")
        source.advance(1)
        await settle(app, pilot)
        for key in ["b", "down", "a", "right"]:
            await pilot.press(key)
            await settle(app, pilot)
            text = screen_text(app)
            assert [char for char in text if not char.isprintable() and char != "\n"] == []
            assert not look or text.isascii() or "日" not in text


def test_a_bad_one_is_told_before_anything_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    from cbviz import cli

    live = ["--break-on", "finish", "--break-on", "nonsense\x1b"]
    replayed = ["replay", "--break-on", "nonsense\x1b", str(tmp_path / "no.trace")]
    for arguments in (live, replayed):
        with pytest.raises(SystemExit) as end:
            cli.main(arguments)
        assert end.value.code == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "there is no breakpoint 'nonsense" in lines[0]
        assert "\x1b" not in lines[0]
