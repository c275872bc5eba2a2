"""The window, driven by keys, over a source in memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from textual.pilot import Pilot
from textual.widget import Widget

from cbviz.app import CbvizApp
from cbviz.palette import Palette
from cbviz.panels.status import StatusLine
from cbviz.session import Phase
from engine.protocol import Add, Cancel, Pause, Run, SetKnob, SetSpeed, Stage, Step
from engine.world import World
from tests.cbviz.fake_source import FakeSource, ReplayFake
from tests.cbviz.synthetic import story
from tests.cbviz.test_session import fold, state

SIZES = [(80, 24), (120, 40), (200, 50)]


def make(source: FakeSource, **options: Any) -> CbvizApp:
    options.setdefault("start_paused", True)
    return CbvizApp(source, palette=Palette.make(), **options)


@asynccontextmanager
async def running(app: CbvizApp, size: tuple[int, int] = (120, 40)) -> Iterator[Pilot[int]]:
    async with app.run_test(size=size, notifications=True) as pilot:
        while not app.panels_are_up:
            await pilot.pause()
        await pilot.pause()
        yield pilot


def screen_text(app: CbvizApp) -> str:
    """The characters on the screen, line by line."""
    lines = app.screen._compositor.render_full_update().strips  # type: ignore[attr-defined]
    return "\n".join("".join(segment.text for segment in line) for line in lines)


def text_of(widget: Widget) -> str:
    """The characters of one widget."""
    return "\n".join(
        "".join(segment.text for segment in widget.render_line(y))
        for y in range(widget.content_size.height)
    )


def drawn(app: CbvizApp) -> World:
    """The state that the panels were told to draw."""
    frame = app.requests.frame
    assert frame is not None
    return frame.world


async def settle(app: CbvizApp, pilot: Pilot[int]) -> None:
    """Until all messages are taken in and the newest state is drawn."""
    await pilot.pause()
    app._draw()
    await pilot.pause()


async def test_the_first_frame_needs_no_engine() -> None:
    source = FakeSource(ready=False)
    app = make(source)
    async with running(app) as pilot:
        text = screen_text(app)
        assert "loading synthetic" in text
        assert "Mask" in text
        source.say(Stage("import", "torch"))
        source.say(Stage("weights", "model.safetensors", 3, 4))
        await settle(app, pilot)
        text = screen_text(app)
        assert "weights" in text
        assert "75 %" in text
        for key in ["space", "n", "left", "right_square_bracket", "x", "g", "escape", "up", "end"]:
            await pilot.press(key)
        assert source.sent == []
        source.get_ready()
        await settle(app, pilot)
        assert "no step yet" in text_of(app.query_one(StatusLine))
        assert app.requests.display


async def test_an_engine_that_is_ready_gets_speed_workload_and_run() -> None:
    source = FakeSource()
    demo = [Add("one", params=_params()), Add("two", params=_params(), at_step=3)]
    app = make(source, start_paused=False, speed=4.0, demo=demo)
    async with running(app):
        assert source.sent == [SetSpeed(4.0), *demo, Run()]
        assert app.session.running


async def test_space_runs_and_pauses() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("space")
        await settle(app, pilot)
        assert "live, 8/s" in text_of(app.query_one(StatusLine))
        await pilot.press("space")
        await settle(app, pilot)
        assert "paused" in text_of(app.query_one(StatusLine))
        assert source.sent[-2:] == [Run(), Pause()]


async def test_step_back_and_on_show_exactly_the_state_of_that_step() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("once", max_tokens=20)
        source.add("twice " * 40, max_tokens=20)
        for _ in range(12):
            await pilot.press("n")
        assert source.sent_of(Step) == [Step(1)] * 12
        await settle(app, pilot)
        for step in (10, 9, 8):
            await pilot.press("left")
            await settle(app, pilot)
            assert state(drawn(app)) == state(fold(source.engine, step))
            assert f"history, step {step} of 11" in text_of(app.query_one(StatusLine))
        await pilot.press("right")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(source.engine, 9))
        await pilot.press("home")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(source.engine, 0))
        await pilot.press("shift+right")
        await settle(app, pilot)
        assert app.session.step == 10
        assert len(source.records) == 12
        await pilot.press("g", "7", "enter")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(source.engine, 7))
        await pilot.press("end")
        assert app.session.live
        await pilot.press("shift+left")
        assert app.session.step == 1


async def test_steps_come_in_while_the_past_is_looked_at() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("once", max_tokens=30)
        await pilot.press("n", "n", "n", "left", "space")
        source.advance(5)
        await settle(app, pilot)
        assert (app.session.step, app.session.newest) == (1, 7)
        assert state(drawn(app)) == state(fold(source.engine, 1))


async def test_the_budget_keys_ask_for_the_next_step_s_budget() -> None:
    source = FakeSource(budget=32)
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("left_square_bracket", "left_square_bracket")
        assert source.sent_of(SetKnob) == [SetKnob("token_budget", 25), SetKnob("token_budget", 20)]
        await settle(app, pilot)
        assert "m = 20" in text_of(app.query_one(StatusLine))
        await pilot.press("right_square_bracket")
        assert source.sent_of(SetKnob)[-1] == SetKnob("token_budget", 25)
        source.add("word " * 60)
        await pilot.press("n")
        await settle(app, pilot)
        assert source.records[-1].num_tokens == 25
        for _ in range(20):
            await pilot.press("left_square_bracket")
        assert source.sent_of(SetKnob)[-1] == SetKnob("token_budget", 1)


async def test_a_burst_of_budget_keys_adds_up_though_the_engine_is_silent() -> None:
    source = FakeSource(budget=100)
    app = make(source)
    async with running(app) as pilot:
        source.set_budget = lambda value: None  # type: ignore[method-assign]
        await pilot.press(*["left_square_bracket"] * 3)
        assert source.sent_of(SetKnob) == [
            SetKnob("token_budget", 80), SetKnob("token_budget", 64), SetKnob("token_budget", 51),
        ]  # fmt: skip


async def test_a_prompt_is_injected_while_others_decode() -> None:
    source = FakeSource()
    app = make(source, start_paused=False)
    async with running(app) as pilot:
        source.add("first", max_tokens=30)
        source.advance(3)
        await pilot.press("i", *"hi q?", "space", "x", "enter")
        assert [add.prompt for add in source.sent_of(Add)] == ["hi q? x"]  # type: ignore[union-attr]
        assert not app.prompt.input.has_focus
        assert app.prompt.input.value == ""
        source.advance(1)
        await settle(app, pilot)
        assert [view.prompt.split()[0] for view in drawn(app).requests.values()] == ["first", "hi"]


async def test_typing_never_triggers_a_key() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        sent = list(source.sent)
        await pilot.press("i", *"nqxzrgl123?+-[]=", "space", "home", "end", "left", "right")
        assert app.prompt.input.value == "nqxzrgl123?+-[]= "
        assert source.sent == sent
        assert app.is_running
        await pilot.press("escape", "n")
        assert source.sent[len(sent) :] == [Step(1)]


async def test_an_empty_prompt_is_refused_here() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("i", "space", "enter")
        await settle(app, pilot)
        assert source.sent_of(Add) == []
        assert app.prompt.input.has_focus
        assert "the prompt is empty" in screen_text(app)


async def test_pasted_lines_become_one_safe_line() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("i")
        from textual.events import Paste

        app.prompt.input.post_message(Paste("one\ntwo\r\n\n three\x1b[31m\u202e"))
        await pilot.pause()
        await pilot.press("enter")
        assert [add.prompt for add in source.sent_of(Add)] == ["one two three␛[31m⇄"]  # type: ignore[union-attr]


async def test_the_selected_request_is_cancelled() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press("x")
        source.add("first")
        source.add("second")
        await pilot.press("n")
        await settle(app, pilot)
        await pilot.press("down", "down")
        assert app.requests.selected == "r1"
        await pilot.press("x")
        assert source.sent_of(Cancel) == [Cancel("r1")]
        await settle(app, pilot)
        assert not drawn(app).requests["r1"].live
        await pilot.press("x")
        assert source.sent_of(Cancel) == [Cancel("r1")]


async def test_a_click_selects_a_request() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("first")
        source.add("second")
        await pilot.press("n")
        await settle(app, pilot)
        await pilot.click("#requests", offset=(6, 3))
        assert app.requests.selected == "r1"


async def test_speed_keys_walk_through_the_speeds() -> None:
    source = FakeSource()
    app = make(source, speed=16.0)
    async with running(app) as pilot:
        await pilot.press("plus", "plus", "plus", "minus", "minus", "minus")
        speeds = [speed.steps_per_s for speed in source.sent_of(SetSpeed)]  # type: ignore[union-attr]
        assert speeds == [16.0, 32.0, 0.0, 0.0, 32.0, 16.0, 8.0]


async def test_a_dead_engine_is_told_in_one_line_and_r_starts_another() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("first")
        await pilot.press("n", "n", "n")
        source.die("the engine's process was ended by SIGKILL\x1b[2J")
        await settle(app, pilot)
        status = text_of(app.query_one(StatusLine))
        assert "was ended by SIGKILL" in status
        assert "r to start it again" in status
        assert "\x1b" not in status
        await pilot.press("left")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(source.engine, 1))
        sent = len(source.sent)
        await pilot.press("n", "space", "left_square_bracket", "i", "a", "enter", "escape")
        assert [type(command) for command in source.sent[sent:]] == []
        await pilot.press("r")
        await pilot.app.workers.wait_for_complete()
        await settle(app, pilot)
        assert source.starts == 2
        assert app.session.phase is Phase.READY
        assert app.session.newest == -1


async def test_a_model_that_cannot_be_loaded_leaves_a_usable_window() -> None:
    source = FakeSource(ready=False)
    app = make(source)
    async with running(app, (80, 24)) as pilot:
        source.die("no model " + "x" * 300)
        await settle(app, pilot)
        assert "r tries again" in screen_text(app)
        source._ready = True
        await pilot.press("r")
        await settle(app, pilot)
        assert app.session.phase is Phase.READY


async def test_what_the_engine_complains_about_is_shown_without_markup() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.complain("refused: [/] [bold]210 tokens\x1b[0m")
        await settle(app, pilot)
        assert "refused: [/] [bold]210 tokens␛[0m" in screen_text(app)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("look", [{}, {"color": "none"}, {"ascii": True}, {"color": "16"}])
async def test_hostile_text_is_made_safe_at_every_size(
    size: tuple[int, int], look: dict[str, Any]
) -> None:
    source = FakeSource()
    app = CbvizApp(source, palette=Palette.make(**look), start_paused=True)
    async with running(app, size) as pilot:
        source.add("\x1b[31m[/]\u202eevil\u200b\x9b2J [bold", "\x1b]0;owned\x07")
        source.add("日本語" * 30)
        await pilot.press("n", "n", "n")
        await settle(app, pilot)
        text = screen_text(app)
        bad = [char for char in text if not char.isprintable() and char != "\n"]
        assert bad == []
        assert {len(_cells(line)) for line in text.split("\n")} == {size[0]}
        for key in ["z", "z", "1", "z", "5", "4", "3", "z", "question_mark", "escape", "down"]:
            await pilot.press(key)
            await settle(app, pilot)
        assert "\x1b" not in screen_text(app)


@pytest.mark.parametrize("size", [*SIZES, (40, 10), (20, 5)])
async def test_panels_lie_side_by_side_and_fill_the_screen(size: tuple[int, int]) -> None:
    source = FakeSource()
    app = make(source)
    async with running(app, size) as pilot:
        source.add("first")
        await pilot.press("n")
        await settle(app, pilot)
        seen = [panel.region for panel in app.panels if panel.display]
        for index, region in enumerate(seen):
            assert not any(region.overlaps(other) for other in seen[index + 1 :])


async def test_nothing_moves_while_it_runs() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("first", max_tokens=5)
        before = None
        for index in range(12):
            source.add(f"more {index}")
            source.advance(1)
            await settle(app, pilot)
            regions = [panel.region for panel in app.panels]
            assert before in (None, regions)
            before = regions


async def test_a_small_window_shows_throughput_when_asked_for() -> None:
    app = make(FakeSource())
    async with running(app, (80, 24)) as pilot:
        kv, throughput = app.query_one("#kv"), app.query_one("#throughput")
        assert (kv.display, throughput.display) == (True, False)
        await pilot.press("4")
        assert (kv.display, throughput.display) == (False, True)
        assert throughput.has_focus
        await pilot.press("z")
        assert [panel.id for panel in app.panels if panel.display] == ["throughput"]
        await pilot.press("2")
        assert [panel.id for panel in app.panels if panel.display] == ["mask"]
        await pilot.press("z", "3")
        assert (kv.display, throughput.display) == (True, False)
        await pilot.resize_terminal(120, 40)
        await pilot.pause()
        assert (kv.display, throughput.display) == (True, True)


async def test_help_lists_every_key() -> None:
    app = make(FakeSource())
    async with running(app, (120, 60)) as pilot:
        await pilot.press("question_mark")
        await pilot.pause()
        text = screen_text(app)
        for words in ["Run or pause", "A smaller token budget", "Type a prompt", "All keys"]:
            assert words in text
        await pilot.press("escape")
        await pilot.pause()
        assert "All keys" not in screen_text(app)


async def test_the_command_palette_offers_what_the_keys_do() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app):
        commands = {command.title: command for command in app.get_system_commands(app.screen)}
        titles = " ".join(commands).lower()
        for word in (
            "pause",
            "step",
            "prompt",
            "cancel",
            "start the engine",
            "token budget",
            "leave",
        ):
            assert word in titles


@pytest.mark.parametrize("key", ["q", "ctrl+q", "ctrl+c"])
async def test_quitting_ends_the_engine(key: str) -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        await pilot.press(key)
    assert source.closes == 1
    assert not app.is_running


async def test_ctrl_c_leaves_from_the_prompt_line_too() -> None:
    app = make(FakeSource())
    async with running(app) as pilot:
        await pilot.press("i", "a", "ctrl+c")
    assert not app.is_running


async def test_no_timer_runs_while_nothing_happens() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        source.add("first")
        await pilot.press("n", "left", "right")
        await settle(app, pilot)
        assert app._draw_timer is None
        assert app._play_timer is None


async def test_thousands_of_messages_are_drawn_few_times() -> None:
    source = FakeSource()
    app = make(source)
    async with running(app) as pilot:
        draws = 0
        draw = app._draw

        def counted() -> None:
            nonlocal draws
            draws += 1
            draw()

        app._draw = counted  # type: ignore[method-assign]
        source.add("long", max_tokens=2000)
        source.advance(1500)
        while app.session.newest < 1499:
            await pilot.pause()
        await settle(app, pilot)
        assert drawn(app).step == 1499
        assert draws < 300


async def test_a_replay_is_looked_at_and_not_changed() -> None:
    engine = story(12)
    app = make(ReplayFake(engine.records, engine.header))
    async with running(app) as pilot:
        await settle(app, pilot)
        status = app.query_one(StatusLine)
        assert "step 0 of 11" in text_of(status)
        await pilot.press("right", "right")
        await settle(app, pilot)
        assert state(drawn(app)) == state(fold(engine, 2))
        await pilot.press("left_square_bracket", "i", "a", "enter", "escape", "down", "x")
        await settle(app, pilot)
        assert "a replay cannot be changed" in screen_text(app)
        await pilot.press("end", "right")
        assert app.session.step == 11
        await pilot.press("home")
        app.driver.run_or_pause()
        assert app.driver.playing
        app.driver.tick(10.0)
        app.driver.tick(10.51)
        assert app.session.step == 4
        app.driver.tick(100.0)
        assert (app.session.step, app.driver.playing) == (11, False)


def _params() -> Any:
    from engine.request import SamplingParams

    return SamplingParams()


def _cells(line: str) -> list[None]:
    from rich.cells import cell_len

    return [None] * cell_len(line)
