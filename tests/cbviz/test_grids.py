"""The grids: what is drawn equals a naive reading of the same records, at every size."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.style import Style
from rich.text import Text
from textual.app import App, ComposeResult
from textual.strip import Strip

from cbviz.cells import bin_edges, share
from cbviz.frame import Frame
from cbviz.kv_grid import Blocks, plan_blocks
from cbviz.mask_grid import MaskGrid, Mode, Zoom, coverage
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.batch import BatchPanel
from cbviz.panels.kv import KVPanel
from cbviz.panels.mask import MaskPanel
from cbviz.panels.selection import TokenSelected
from engine.mask import PackedAxes
from engine.record import BlockMerged, BlocksEvicted, Segment, SegmentKind
from tests.cbviz.synthetic import FakeEngine, header, story, words
from tests.cbviz.test_sanitize import unsafe
from tests.engine import fakes

SIZES = [(8, 3), (28, 6), (46, 10), (70, 20), (118, 25), (200, 48)]
HOSTILE = [
    "\x1b[2J", "\x9b31m", "\u202eevil", "a\u200bb", "\u0301", "中文字", "👩\u200d🚀", "\t\n\r",
    "[bold red]x[/]", "\ud83d", "", "\x00\x07", "🇩🇪", "[/]", "\\[", "x" * 300,
]  # fmt: skip


class Stage(App[None]):
    """One panel over the whole terminal."""

    CSS = "Screen { overflow: hidden; } Panel { width: 100%; height: 100%; }"

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.panel = panel
        self.picked: list[tuple[str, int | None]] = []

    def compose(self) -> ComposeResult:
        yield self.panel

    def on_token_selected(self, event: TokenSelected) -> None:
        self.picked.append((event.request_id, event.position))


def frame_of(engine: FakeEngine | fakes.FakeEngine) -> Frame:
    return Frame(engine.world.copy(), engine.records[-1], list(engine.records))


def frames(seed: int, pieces: list[str] | None = None) -> Iterator[Frame]:
    """Frames of a random small run, with admissions, chunks, decodes and preemptions."""
    chance = random.Random(seed)
    engine = FakeEngine(
        header(
            budget=chance.choice([3, 7, 16, 64]), max_num_seqs=chance.randint(1, 6),
            block_size=chance.choice([1, 4, 16]), num_blocks=chance.choice([90, 128, 400]),
        )
    )  # fmt: skip
    for step in range(12):
        if step < 8:
            count = chance.randint(1, 60)
            text = [chance.choice(pieces) for _ in range(count)] if pieces else words(count, step)
            name = f"{chance.choice(HOSTILE)}{step}" if pieces else f"r{step}"
            engine.add(name, text, chance.randint(1, 20))
        engine.step()
        yield frame_of(engine)


def cells_of(strip: Strip) -> list[tuple[str, Style]]:
    """The character and style at each terminal cell; a wide one is followed by an empty one."""
    cells: list[tuple[str, Style]] = []
    for text, style, _ in strip:
        for char in text:
            cells.append((char, style or Style()))
            cells.extend([("", style or Style())] * (cell_len(char) - 1))
            if cell_len(char) == 0:
                cells.pop()
    return cells


def naive_mask(segments: list[Segment]) -> np.ndarray:
    """`[n_Q, n_K]`, pair by pair."""
    queries = [(i, s.start + n) for i, s in enumerate(segments) for n in range(s.length)]
    keys = [(i, n) for i, s in enumerate(segments) for n in range(s.context + s.length)]
    return np.array([[q[0] == k[0] and k[1] <= q[1] for k in keys] for q in queries])


def naive_level(part: np.ndarray) -> int:
    """0 nothing, 4 everything, 1–3 by thirds of what is True."""
    true, total = int(part.sum()), part.size
    return 0 if not true else 4 if true == total else -(-3 * true // total)


def expected_glyph(
    palette: Palette, grid: MaskGrid, mask: np.ndarray, line: int, column: int, new: bool
) -> str:
    glyphs = palette.glyphs
    keys = slice(int(grid.column_edges[column]), int(grid.column_edges[column + 1]))
    if grid.mode is Mode.HALF:
        query = int(grid.row_edges[2 * line])
        upper = bool(mask[query, keys].all())
        lower = query + 1 < len(mask) and bool(mask[query + 1, keys].all())
        return {(0, 0): " ", (1, 0): "▀", (0, 1): "▄", (1, 1): "█"}[int(upper), int(lower)]
    row = line // grid.row_height
    level = naive_level(mask[int(grid.row_edges[row]) : int(grid.row_edges[row + 1]), keys])
    if level == 0:
        return glyphs.off if line % grid.row_height == 0 else " "
    if level == 4:
        return glyphs.full if new else glyphs.cached
    return glyphs.shades[level]


def check_mask(panel: MaskPanel, frame: Frame) -> None:
    assert frame.record is not None
    segments = frame.record.segments
    grid = panel.grid
    if grid is None:
        return
    mask = naive_mask(segments)
    owner = [i for i, s in enumerate(segments) for _ in range(s.context + s.length)]
    is_new = [n >= s.context for s in segments for n in range(s.context + s.length)]
    for line in range(grid.lines):
        cells = cells_of(panel.render_line(grid.top + line))
        for column in range(len(grid.column_edges) - 1):
            first, end = int(grid.column_edges[column]), int(grid.column_edges[column + 1])
            owners, new = set(owner[first:end]), all(is_new[first:end])
            mixed = len({(owner[k], is_new[k]) for k in range(first, end)}) > 1
            char, style = cells[grid.gutter + column * grid.cell_width]
            wanted = expected_glyph(panel.palette, grid, mask, line, column, new or mixed)
            assert char == wanted, (line, column, grid.mode)
            if char not in (" ", panel.palette.glyphs.off) and not mixed:
                view = frame.world.view(segments[owners.pop()].request_id)
                assert view is not None
                tint = panel.palette.tint(view.ordinal)
                wanted_style = tint.bright if new else tint.dim
                assert style.color == wanted_style.color or panel.palette.color == "none"
                assert bool(style.dim) == bool(wanted_style.dim)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("palette", [Palette.make(), Palette.make(ascii=True, color="none")])
async def test_mask_equals_the_naive_one(size: tuple[int, int], palette: Palette) -> None:
    panel = MaskPanel(palette)
    async with Stage(panel).run_test(size=size):
        for seed in range(2):
            for frame in frames(seed):
                panel.zoom = Zoom.FIT
                panel.show(frame)
                check_mask(panel, frame)
                panel.action_zoom()
                check_mask(panel, frame)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5),
    st.integers(1, 30), st.integers(1, 30),
)  # fmt: skip
def test_coverage_counts_the_pairs(parts: list[tuple[int, int]], rows: int, keys: int) -> None:
    kind = SegmentKind.PREFILL
    segments = [Segment(str(i), kind, c, n, c, False) for i, (c, n) in enumerate(parts)]
    row_edges = bin_edges([n for _, n in parts], rows)
    key_edges = bin_edges([size for part in parts for size in part], keys)
    mask = naive_mask(segments)
    shown = coverage(PackedAxes(segments), row_edges, key_edges)
    for i, j in np.ndindex(*shown.shape):
        part = mask[row_edges[i] : row_edges[i + 1], key_edges[j] : key_edges[j + 1]]
        assert shown[i, j] == pytest.approx(part.mean())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60))
def test_bins_cover_everything_once_and_keep_to_their_group(groups: list[int], cells: int) -> None:
    edges = bin_edges(groups, cells).tolist()
    assert edges[0] == 0
    assert edges[-1] == sum(groups)
    assert edges == sorted(set(edges))
    assert len(edges) - 1 <= cells
    if len([size for size in groups if size]) <= cells:
        assert set(np.cumsum([size for size in groups if size]).tolist()) <= set(edges)


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.integers(0, 120))
def test_shares_use_all_cells_and_forget_nobody(amounts: list[int], cells: int) -> None:
    given_cells = share(amounts, cells)
    assert sum(given_cells) == min(cells, sum(amounts))
    assert all(0 <= got <= amount for got, amount in zip(given_cells, amounts, strict=True))
    if sum(amount > 0 for amount in amounts) <= cells:
        assert all(got > 0 for got, amount in zip(given_cells, amounts, strict=True) if amount)


def cached_frames(seed: int) -> Iterator[Frame]:
    """Frames of a real scheduler with a prefix cache: hits, forks, merges, evictions."""
    chance = random.Random(seed)
    size = chance.choice([1, 4])
    engine = fakes.FakeEngine(
        token_budget=chance.choice([5, 16, 40]), max_num_seqs=4, block_size=size,
        num_blocks=chance.choice([12, 14, 32]) * 4 // size, max_model_len=64,
    )  # fmt: skip
    system = list(range(1, 18))
    for step in range(30):
        if step % 3 == 0:
            shared = system[: chance.choice([0, 9, 17])]
            own = [chance.randrange(1, fakes.VOCAB) for _ in range(chance.randint(1, 6))]
            for name in ("a", "b")[: chance.randint(1, 2)]:
                engine.add(f"{name}{step}", shared + own, max_tokens=chance.randint(1, 20), n=2)
        engine.step()
        yield frame_of(engine)


def written_blocks(frame: Frame) -> set[int]:
    """Block by block, token by token; a duplicate that was given up is not what stands there."""
    assert frame.record is not None
    world, size = frame.world, frame.world.header.block_size
    merged = {(e.request_id, e.index) for e in frame.record.events if isinstance(e, BlockMerged)}
    return {
        view.block_table[position // size]
        for segment in frame.record.segments
        if (view := world.view(segment.request_id)) is not None
        for position in range(segment.start, segment.start + segment.length)
        if position // size < len(view.block_table)
        and (segment.request_id, position // size) not in merged
    }


def held_text(
    palette: Palette, frame: Frame, block: int, width: int, holders: list[tuple[str, int]]
) -> str:
    """What a held block looks like."""
    assert frame.record is not None
    glyphs, size = palette.glyphs, frame.world.header.block_size
    letter = palette.letter(frame.world.requests[holders[0][0]].ordinal)
    if width == 1:
        return letter
    text = glyphs.fills[-(-8 * max(fill for _, fill in holders) // size)] + letter
    if width == 2:
        return text
    taken = [e.block_ids for e in frame.record.events if isinstance(e, BlocksEvicted)]
    if any(block in block_ids for block_ids in taken):
        return text + glyphs.evicted
    if block in written_blocks(frame):
        return text + glyphs.written
    return text + glyphs.shared if len(holders) > 1 else text


def evictable_text(palette: Palette, frame: Frame, block: int, width: int) -> str:
    """What an evictable block looks like: hollow, and a small letter."""
    view = frame.world.view(frame.world.cached[block][0])
    assert view is not None
    letter = palette.letter(view.ordinal).lower()
    return letter if width == 1 else palette.glyphs.evictable + letter


def assert_look(palette: Palette, shown: Style, wanted: Style) -> None:
    """The same colour and weight; without colours, the panel's own."""
    assert shown.color == wanted.color or palette.color == "none"
    assert (bool(shown.bold), bool(shown.dim)) == (bool(wanted.bold), bool(wanted.dim))


def check_blocks(panel: KVPanel, frame: Frame) -> None:
    world, grid, palette = frame.world, panel.grid, panel.palette
    glyphs = palette.glyphs
    if grid is None:
        return
    owners, evictable, written = world.owners(), set(world.evictable), written_blocks(frame)
    lines = [cells_of(panel.render_line(y)) for y in range(grid.lines)]
    for block in range(0, world.header.num_blocks, grid.per_cell):
        line, place = divmod(block, grid.per_line)
        at = grid.label + place // grid.per_cell * grid.cell_width
        text = "".join(char for char, _ in lines[line][at : at + grid.cell_width])
        style = lines[line][at][1]
        inside = range(block, min(block + grid.per_cell, world.header.num_blocks))
        if grid.per_cell > 1:
            held = sum(b in owners for b in inside)
            none = glyphs.evictable if evictable & set(inside) else glyphs.free
            assert text == (none if not held else glyphs.shades[-(-4 * held // len(inside))])
        elif block in owners:
            assert text.rstrip() == held_text(palette, frame, block, grid.cell_width, owners[block])
            tint = palette.tint(world.requests[owners[block][0][0]].ordinal)
            assert_look(palette, style, tint.name if block in written else tint.dim)
        elif block in evictable:
            assert text.rstrip() == evictable_text(palette, frame, block, grid.cell_width)
            assert_look(palette, style, palette.evictable)
        else:
            assert block in world.free
            assert text.strip() == glyphs.free
            assert_look(palette, style, palette.faint)


@pytest.mark.parametrize("size", [*SIZES, (16, 3), (36, 4)])
@pytest.mark.parametrize(
    "palette",
    [Palette.make(), Palette.make(ascii=True, color="16"), Palette.make(ascii=True, color="none")],
)
async def test_blocks_equal_the_pool(size: tuple[int, int], palette: Palette) -> None:
    panel = KVPanel(palette)
    async with Stage(panel).run_test(size=size):
        for seed in range(2):
            for frame in (*frames(seed), *cached_frames(seed)):
                panel.show(frame)
                check_blocks(panel, frame)


def test_the_cached_frames_show_all_that_can_happen() -> None:
    seen = [Blocks.of(f.world, f.record) for seed in range(2) for f in cached_frames(seed)]
    assert any(blocks.evicted.any() for blocks in seen)
    assert any((blocks.sharers > 1).any() for blocks in seen)
    assert any(blocks.held and blocks.evictable and blocks.free for blocks in seen)
    worlds = [f.world for seed in range(2) for f in cached_frames(seed)]
    assert any(world.merged_blocks for world in worlds)
    for blocks, world in zip(seen, worlds, strict=True):
        counts = (blocks.held, blocks.evictable, blocks.free)
        assert counts == (world.blocks_held, len(world.evictable), len(world.free))


@pytest.mark.parametrize("color", ["truecolor", "256", "16", "none"])
@pytest.mark.parametrize("ascii", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
async def test_the_three_states_never_look_alike(color: str, ascii: bool, width: int) -> None:
    palette = Palette.make(ascii=ascii, color=color)  # type: ignore[arg-type]
    panel = KVPanel(palette)
    engine = fakes.FakeEngine(num_blocks=16)
    engine.add("a", 8, max_tokens=1)
    engine.step()
    engine.add("b", 30, max_tokens=2)
    engine.step()
    async with Stage(panel).run_test(size=(60, 6)):
        panel.show(frame_of(engine))
        blocks = panel._blocks
        assert blocks is not None
        states = (blocks.sharers > 0, blocks.is_evictable, blocks.owner + blocks.cached < 0)
        places = [int(np.flatnonzero(state)[0]) for state in states]
        texts = [panel._cell(blocks, place, width)[0] for place in places]
        assert len({text.strip() for text in texts}) == 3
        assert all(cell_len(text) == width for text in texts)
        assert all(text.isascii() for text in texts) or not ascii


def scripted() -> fakes.FakeEngine:
    """Two requests that share two blocks of one that is gone."""
    engine = fakes.FakeEngine(num_blocks=12, token_budget=32)
    system = list(range(1, 13))
    engine.add("a", [*system, 20], max_tokens=2, ignore_eos=True)
    engine.step()
    engine.step()
    engine.add("b", [*system[:8], 30, 31, 32], max_tokens=9, ignore_eos=True)
    engine.add("c", [*system[:8], 40, 41, 42], max_tokens=9, ignore_eos=True)
    engine.step()
    return engine


async def test_the_cursor_says_which_state_a_block_is_in() -> None:
    engine = scripted()
    panel = KVPanel(Palette.make())
    stage = Stage(panel)
    async with stage.run_test(size=(110, 8)) as pilot:
        frame = frame_of(engine)
        panel.show(frame)
        table = engine.world.requests["b"].block_table
        left = next(iter(engine.world.evictable))
        free = next(iter(engine.world.free))
        said = {}
        for block in (table[0], table[2], left, free):
            panel.cursor = block
            said[block] = panel.render_line(7).text
        first = table[0]
        assert f"block {first}: shared by 2 (B, C): positions 0–3, 4 of 4, cached" in said[first]
        assert "B positions 8–10, 3 of 4, written in this step, slots" in said[table[2]]
        assert f"block {left}: cached, free to be taken: A positions 8–11" in said[left]
        slots = f"slots {free * 4}–{free * 4 + 3}"
        assert f"block {free}: free, {slots}" in said[free]
        panel._put_cursor(left)
        await pilot.pause()
        assert stage.picked == [("a", None)]
        del frame.world.requests["a"]
        assert "positions 8–11 of a request that is gone" in panel.render_line(7).text
        assert panel._cell(Blocks.of(frame.world, None), left, 3)[0] == "▯  "


async def test_an_evicted_block_says_so() -> None:
    engine = fakes.FakeEngine(num_blocks=4, token_budget=32)
    engine.add("a", 12, max_tokens=1)
    engine.step()
    engine.add("b", 14, max_tokens=3, ignore_eos=True)
    record = engine.step()
    taken = next(e.block_ids for e in record.events if isinstance(e, BlocksEvicted))
    panel = KVPanel(Palette.make())
    async with Stage(panel).run_test(size=(110, 8)):
        panel.show(frame_of(engine))
        panel.cursor = taken[0]
        assert "evicted in this step, written in this step" in panel.render_line(7).text
        assert "✗" in panel.render_line(0).text
        panel.cursor = None
        assert "✗ evicted" in panel.render_line(7).text


async def test_a_cell_of_many_blocks_counts_the_three_states() -> None:
    engine = scripted()
    panel = KVPanel(Palette.make())
    async with Stage(panel).run_test(size=(6, 4)) as pilot:
        panel.show(frame_of(engine))
        grid = panel.grid
        assert grid is not None
        assert grid.per_cell > 1
        await pilot.pause()
        assert panel._blocks is not None
        panel.cursor = 1
        words = panel._explain(panel._blocks, 1)
        inside = range(grid.per_cell)
        held = sum(b in engine.world.owners() for b in inside)
        evictable = sum(b in set(engine.world.evictable) for b in inside)
        free = grid.per_cell - held - evictable
        counts = f"{held} held, {evictable} evictable, {free} free"
        assert words.startswith(f"0–{grid.per_cell - 1}: {counts}; block 1: ")


@pytest.mark.parametrize("width", range(12, 140, 3))
async def test_the_title_names_the_three_states_in_any_room(width: int) -> None:
    panel = KVPanel(Palette.make())
    engine = scripted()
    async with Stage(panel).run_test(size=(width, 8)) as pilot:
        panel.show(frame_of(engine))
        await pilot.pause()
        title, below = (
            Text.from_markup(str(words)).plain
            for words in (panel.border_title, panel.border_subtitle)
        )
        assert max(len(title), len(below)) <= width - 4 or title == "KV  4+1+7 of 12"
        numbers = [int(n) for n in "".join(c if c.isdigit() else " " for c in title).split()]
        world = engine.world
        assert numbers[:3] == [world.blocks_held, len(world.evictable), len(world.free)]
        if width >= 40:
            assert "evictable" in title
            assert "tail waste" in title + below
            assert "hit 46 %" in title + below  # 16 of 13 + 11 + 11 tokens


async def test_block_tables_read_in_order() -> None:
    panel = KVPanel(Palette.make())
    engine = story()
    async with Stage(panel).run_test(size=(60, 12)) as pilot:
        panel.show(frame_of(engine))
        panel.focus()
        await pilot.press("v")
        for y, request_id in enumerate(engine.world.running):
            view = engine.world.requests[request_id]
            line = panel.render_line(y).text
            numbers = "".join(char if char.isdigit() else " " for char in line).split()
            assert line.startswith(panel.palette.letter(view.ordinal))
            assert [int(number) for number in numbers] == view.block_table


async def test_block_tables_mark_what_is_shared() -> None:
    panel = KVPanel(Palette.make())
    engine = scripted()
    async with Stage(panel).run_test(size=(60, 12)) as pilot:
        panel.show(frame_of(engine))
        panel.focus()
        await pilot.press("v")
        for y, request_id in enumerate(engine.world.running):
            table = engine.world.requests[request_id].block_table
            cells = panel.render_line(y).text.split()[1:]
            for block, cell in zip(table, cells, strict=True):
                shared = len(engine.world.owners()[block]) > 1
                assert cell.endswith("+") == shared
        assert "+ shared" in panel.render_line(11).text


@given(st.integers(1, 5000), st.integers(8, 200), st.integers(1, 50))
def test_every_block_has_one_place(blocks: int, width: int, lines: int) -> None:
    grid = plan_blocks(blocks, width, lines)
    assert grid is not None
    assert grid.lines <= lines
    assert grid.label + grid.columns * grid.cell_width <= width
    seen = {
        grid.block_at(grid.label + x * grid.cell_width, y)
        for y in range(grid.lines)
        for x in range(grid.columns)
    }
    assert seen - {None} == set(range(0, blocks, grid.per_cell))


@pytest.mark.parametrize("size", [(30, 3), (78, 3), (118, 3), (198, 4)])
async def test_batch_shows_every_token_of_the_step(size: tuple[int, int]) -> None:
    panel = BatchPanel(Palette.make())
    async with Stage(panel).run_test(size=size):
        for frame in (f for seed in range(3) for f in frames(seed)):
            assert frame.record is not None
            panel.show(frame)
            shown = "".join(panel.render_line(y).text for y in range(size[1] - 1))
            letters = [
                (panel.palette.letter(frame.world.requests[s.request_id].ordinal), s.length)
                for s in frame.record.segments
            ]
            if "▏" in shown:
                assert shown.count("▏") == frame.record.num_tokens
                samples = sum(s.samples for s in frame.record.segments)
                assert shown.count("▸") == samples
            elif frame.record.num_tokens <= size[0] * (size[1] - 1):
                assert shown.strip() == "".join(letter * count for letter, count in letters)
            elif len(letters) <= size[0]:
                assert [c for c in shown if c.isalpha()] == [letter for letter, _ in letters]


async def test_budget_bar_is_in_proportion() -> None:
    panel = BatchPanel(Palette.make())
    async with Stage(panel).run_test(size=(120, 4)):
        panel.show(frame_of(story()))
        bar = cells_of(panel.render_line(3))
        text = "".join(char for char, _ in bar)
        assert text.endswith("m = 32")
        room = len(text) - len(" m = 32")
        prefill = text.index("▓")
        assert prefill == pytest.approx(room * 3 / 32, abs=1)
        assert "prefill 29" in text
        assert "32 of 32 tokens: 3 decode + 29 prefill (D, 29–57 of 75)" in str(panel.border_title)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [BatchPanel, MaskPanel, KVPanel])
@pytest.mark.parametrize("palette", [Palette.make(), Palette.make(ascii=True, color="none")])
async def test_hostile_text_stays_text_and_in_its_place(
    kind: type[Panel], size: tuple[int, int], palette: Palette
) -> None:
    panel = kind(palette)
    async with Stage(panel).run_test(size=size) as pilot:
        panel.focus()
        for seed in range(2):
            for frame in frames(seed, HOSTILE):
                panel.show(frame)
                for y in range(size[1]):
                    strip = panel.render_line(y)
                    assert not unsafe(strip.text)
                    assert strip.cell_length == cell_len(strip.text) == size[0]
                    assert strip.text.isascii() or not palette.ascii
                assert not unsafe(str(panel.border_title))
            await pilot.press("l", "j", "v", "v")


@pytest.mark.parametrize("kind", [BatchPanel, MaskPanel, KVPanel])
async def test_nothing_to_show_is_said_quietly(kind: type[Panel]) -> None:
    panel = kind(Palette.make())
    async with Stage(panel).run_test(size=(60, 8)) as pilot:
        panel.focus()
        await pilot.press("l", "j", "v", "escape")
        assert panel.render_line(0).text.strip() == "no step yet"
        engine = FakeEngine(header())
        engine.step()
        panel.show(frame_of(engine))
        assert all(panel.render_line(y).cell_length == 60 for y in range(8))


async def test_the_cursor_explains_a_pair() -> None:
    engine = FakeEngine(header(budget=16, block_size=4))
    engine.add("a", [" I", " am", " here", " now", " and", " then"])
    engine.add("b", [" you"])
    engine.step()
    panel = MaskPanel(Palette.make())
    stage = Stage(panel)
    async with stage.run_test(size=(100, 16)) as pilot:
        panel.show(frame_of(engine))
        panel.focus()
        await pilot.press("l", "j", "j", "j", "j", "j")
        assert "True: ` then` (A, position 5) sees ` I` (position 0, slot 0, block 0)" in (
            panel.render_line(15).text
        )
        assert stage.picked[-1] == ("a", 5)
        await pilot.press("k", "l", "l", "l", "l", "l")
        assert "False: ` then` (position 5) lies in the future of ` and`" in (
            panel.render_line(15).text
        )
        await pilot.press("l")
        assert "belong to different requests" in panel.render_line(15).text
        panel.show_selection("b", 0)
        assert panel.cursor == (6, 6)
        await pilot.press("escape")
        assert "cached" in panel.render_line(15).text


async def test_the_cursor_says_when_a_finished_request_gave_its_blocks_up() -> None:
    engine = FakeEngine(header())
    engine.add("a", [" I", " am"], max_tokens=1)
    engine.step()
    panel = MaskPanel(Palette.make())
    async with Stage(panel).run_test(size=(100, 10)) as pilot:
        panel.show(frame_of(engine))
        panel.focus()
        await pilot.press("l")
        assert "its blocks were freed since" in panel.render_line(9).text


async def test_the_cursor_keeps_to_its_tokens_from_step_to_step() -> None:
    engine = story()
    panel = MaskPanel(Palette.make())
    async with Stage(panel).run_test(size=(200, 48)) as pilot:
        panel.show(frame_of(engine))
        panel.show_selection("c", engine.world.requests["c"].num_computed - 1)
        await pilot.pause()
        engine.add("e", words(4))
        engine.step()
        panel.show(frame_of(engine))
        assert panel.cursor is not None
        segments = engine.records[-1].segments
        axes = PackedAxes(segments)
        assert segments[axes.query_segment[panel.cursor[0]]].request_id == "c"
        assert segments[axes.key_segment[panel.cursor[1]]].request_id == "c"


async def test_a_token_picked_in_the_batch_is_lit_in_its_block() -> None:
    engine = story()
    batch = BatchPanel(Palette.make())
    stage = Stage(batch)
    async with stage.run_test(size=(118, 3)) as pilot:
        batch.show(frame_of(engine))
        await pilot.pause()
        await pilot.click(BatchPanel, offset=(2, 0))
        await pilot.pause()
        assert stage.picked == [("a", 21)]
    panel = KVPanel(Palette.make())
    async with Stage(panel).run_test(size=(90, 12)):
        panel.show(frame_of(engine))
        panel.show_selection("a", 21)
        assert panel.cursor == engine.world.requests["a"].block_table[21 // 16]
        assert "A positions 16–21" in panel.render_line(11).text
