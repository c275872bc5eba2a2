"""The requests panel: order, words, widths, selection, and many lines."""

from __future__ import annotations

import msgspec
import pytest
from rich.cells import cell_len
from textual.app import App, ComposeResult

from cbviz.frame import Frame
from cbviz.palette import Palette
from cbviz.panels.requests import RequestsPanel, ordered
from cbviz.panels.rows import RATIO_WIDTH, ratio, tail
from engine.record import Action, Decision, Reason
from tests.cbviz.synthetic import FakeEngine, header, story, words
from tests.engine import fakes


class Alone(App[None]):
    """A window with the panel and nothing else."""

    CSS = """
    RequestsPanel {
        height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 1;
    }
    """

    def __init__(self, palette: Palette) -> None:
        super().__init__()
        self.panel = RequestsPanel(palette)

    def compose(self) -> ComposeResult:
        yield self.panel


def frame_of(engine: FakeEngine | fakes.FakeEngine) -> Frame:
    return Frame(engine.world.copy(), engine.records[-1] if engine.records else None)


def lines_of(panel: RequestsPanel) -> list[str]:
    """What the panel shows, line by line."""
    height = panel.scrollable_content_region.height
    return ["".join(s.text for s in panel.render_line(y)) for y in range(height)]


def crowd(count: int) -> FakeEngine:
    """A few that run, and a long queue."""
    engine = FakeEngine(header())
    for index in range(count):
        engine.add(f"r{index}", words(8, index), 4)
    engine.step()
    return engine


def test_running_then_waiting_then_finished_newest_first() -> None:
    engine = FakeEngine(header(max_num_seqs=2))
    for index, tokens in enumerate([1, 2, 9, 9, 9]):
        engine.add(f"r{index}", words(4), tokens)
    for _ in range(4):
        engine.step()
    world = engine.world
    assert world.num_finished == 2
    order = ordered(world)
    assert order[:3] == [*world.running, *world.waiting]
    assert set(order[3:]) == {"r0", "r1"}
    assert order[-1] == "r0"


async def test_a_line_says_state_progress_and_why() -> None:
    engine = story(11)
    app = Alone(Palette.make())
    async with app.run_test(size=(100, 12)) as pilot:
        app.panel.show(frame_of(engine))
        await pilot.pause()
        head, *lines = lines_of(app.panel)
        assert "state" in head
        decoding = next(line for line in lines if "decode" in line)
        view = engine.world.requests["a"]
        assert f"{view.num_prompt_tokens}/{view.num_prompt_tokens}" in decoding
        assert f"{view.num_output_tokens}/{view.params.max_tokens}" in decoding
        chunked = next(line for line in lines if "prefill" in line)
        assert f"{engine.world.requests['d'].num_computed}/75" in chunked
        assert "prefill chunk 2:" in chunked


async def test_a_line_says_what_came_from_the_cache() -> None:
    engine = fakes.FakeEngine(token_budget=8, num_blocks=64)
    prompt = list(range(1, 41))
    engine.add("a", prompt[:25], max_tokens=1)
    for _ in range(4):
        engine.step()
    engine.add("b", prompt, max_tokens=4, ignore_eos=True)
    engine.step()
    app = Alone(Palette.make())
    async with app.run_test(size=(170, 8)) as pilot:
        app.panel.show(frame_of(engine))
        await pilot.pause()
        _, line, *_ = lines_of(app.panel)
        assert "32/40   ▓▓▓▓█░░" in line
        assert "24 of 40 prompt" in line
        engine.step()
        app.panel.show(frame_of(engine))
        await pilot.pause()
        _, line, *_ = lines_of(app.panel)
        assert "40/40   24 hit " in line


async def test_a_waiting_request_is_behind_a_letter() -> None:
    engine = crowd(12)
    record = msgspec.structs.replace(
        engine.step(), step=0,
        rest=Decision("", Action.WAIT, Reason.BEHIND, other="r8"),
    )  # fmt: skip
    frame = frame_of(engine)
    frame.world.last = record
    app = Alone(Palette.make())
    async with app.run_test(size=(100, 20)) as pilot:
        app.panel.show(frame)
        await pilot.pause()
        assert any("waiting" in line and "behind I" in line for line in lines_of(app.panel))


@pytest.mark.parametrize("size", [(20, 5), (60, 10), (80, 10), (130, 20)])
@pytest.mark.parametrize("ascii", [False, True])
async def test_hostile_text_is_safe_and_every_line_as_wide_as_the_panel(
    size: tuple[int, int], ascii: bool
) -> None:
    engine = FakeEngine(header())
    engine.add("\x1b[31m[/]\u202e", ["\x1b]0;owned\x07", "[bold", "\x9b2J"], 6)
    engine.add("wide", ["日本", "語", "e\u0301\u0301\u0301", "\u200b"], 6)
    for _ in range(3):
        engine.step()
    app = Alone(Palette.make(ascii=ascii))
    async with app.run_test(size=size) as pilot:
        app.panel.show(frame_of(engine))
        await pilot.pause()
        width = app.panel.scrollable_content_region.width
        for line in lines_of(app.panel):
            assert line.isprintable()
            assert cell_len(line) == width
            assert line.isascii() or not ascii


async def test_the_selection_stays_with_its_request() -> None:
    engine = story(11)
    app = Alone(Palette.make())
    async with app.run_test(size=(100, 12)) as pilot:
        app.panel.show(frame_of(engine))
        app.panel.select("b")
        before = app.panel.order.index("b")
        while engine.world.requests["b"].live:
            engine.step()
        app.panel.show(frame_of(engine))
        await pilot.pause()
        assert app.panel.selected == "b"
        assert app.panel.order.index("b") != before
        marked = [line for line in lines_of(app.panel) if line.startswith("▸")]
        assert len(marked) == 1
        assert marked[0][1] == "B"


async def test_moving_through_thousands_makes_only_the_lines_in_view() -> None:
    engine = crowd(3000)
    app = Alone(Palette.make())
    async with app.run_test(size=(100, 12)) as pilot:
        made: list[str] = []
        row = app.panel._row
        app.panel._row = lambda world, name, width: made.append(name) or row(world, name, width)  # type: ignore[func-returns-value,method-assign]
        app.panel.show(frame_of(engine))
        await pilot.pause()
        app.panel.move_selection(1)
        app.panel.move_selection(2500)
        await pilot.pause()
        assert app.panel.selected == app.panel.order[2500]
        assert any(line.startswith("▸") for line in lines_of(app.panel)[1:])
        assert len(set(made)) < 60
        app.panel.move_selection(10_000)
        assert app.panel.selected == app.panel.order[-1]


async def test_nothing_is_known_yet() -> None:
    app = Alone(Palette.make())
    async with app.run_test(size=(80, 8)) as pilot:
        app.panel.show(None)
        await pilot.pause()
        assert app.panel.move_selection(1) is None
        assert [line for line in lines_of(app.panel)[1:] if line.strip()] == []


@pytest.mark.parametrize(
    ("done", "total", "words"),
    [
        (0, 0, "0/0"),
        (18, 64, "18/64"),
        (198, 198, "198/198"),
        (1499, 2048, "1.4k/2k"),
        (31_000, 98_765, "31k/98k"),
        (131_071, 131_072, "99 %"),
    ],
)
def test_counts_take_few_cells_and_never_round_up(done: int, total: int, words: str) -> None:
    assert ratio(done, total) == words
    assert len(words) <= RATIO_WIDTH


@pytest.mark.parametrize("width", [0, 1, 5, 20, 80])
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("Once upon", " a time"),
        ("", ""),
        ("日本語" * 20, "語" * 7),
        ("a\n b " * 900, "c\td " * 900),
    ],
)
def test_the_tail_is_the_end_of_the_text_in_the_room_there_is(
    prompt: str, text: str, width: int
) -> None:
    shown = "".join(tail(prompt, text, width))
    assert cell_len(shown) <= max(1, width)
    assert shown.isprintable()
    if (prompt, width) == ("Once upon", 80):
        assert shown == "Once upon a time"
    if (prompt, width) == ("Once upon", 5):
        assert shown == "…time"
