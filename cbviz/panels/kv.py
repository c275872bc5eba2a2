"""The KV cache: every physical block of the pool, or the block table of each request."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip

from cbviz.cells import Cell, Line, grounded, note, titled
from cbviz.kv_grid import NOBODY, BlockGrid, Blocks, filler, holders, plan_blocks
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import TokenSelected
from cbviz.sanitize import width_of

NAMED_HOLDERS = 6
"""Requests that share a block: as many are named by their letters."""

LegendItem = tuple[str, Style, str]
"""A glyph, its style, and the word for it."""


class KVPanel(Panel):
    """How full each block is, whose it is, and which were written in this step.

    Held blocks have the capital letter of their request; evictable ones, which the prefix cache
    keeps until somebody needs them, the small letter of the request that filled them, if it is
    known still; free ones have none.

    Physical view: one cell a block, in the order of the pool; blocks never move. Logical view
    (`v`): the block table of each running request, in its order.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("v", "view", "view", id="kv.view",
                tooltip="KV cache: physical blocks, or the block table of each request"),
        Binding("h", "move(-1,0)", "block ←", id="kv.left", show=False,
                tooltip="Move the block cursor to the left"),
        Binding("j", "move(0,1)", "block ↓", id="kv.down", show=False,
                tooltip="Move the block cursor down, or scroll the block tables"),
        Binding("k", "move(0,-1)", "block ↑", id="kv.up", show=False,
                tooltip="Move the block cursor up, or scroll the block tables"),
        Binding("l", "move(1,0)", "block →", id="kv.right", show=False,
                tooltip="Move the block cursor to the right"),
        Binding("escape", "clear", "no cursor", id="kv.clear", show=False,
                tooltip="Put the block cursor away"),
    ]  # fmt: skip

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.logical = False
        self.cursor: int | None = None
        """The block under the cursor."""
        self._blocks: Blocks | None = None
        self._tables: list[list[Cell]] = []
        self._tables_for: object = None
        self._top = 0

    def update_frame(self) -> None:
        """Read the pool."""
        self._tables_for = None
        self._blocks = None
        if self.frame is not None:
            self._blocks = Blocks.of(self.frame.world, self.frame.record)
            if self.cursor is not None:
                self.cursor = min(self.cursor, self.frame.world.header.num_blocks - 1)
        self._entitle()

    def on_resize(self) -> None:
        """Fit the title to the width."""
        self._entitle()

    def _entitle(self) -> None:
        """The three states in the title; what is stored there too, or else below, if it fits."""
        blocks, palette = self._blocks, self.palette
        self.border_subtitle = ""
        if blocks is None:
            self.border_title = titled("KV cache", "", palette)
            return
        dot = f" {palette.glyphs.middot} "
        room = self.size.width - 4
        forms = _counts(blocks, dot)
        fitting = (form for form in forms if len("  ".join(form)) <= room)
        name, counts = next(fitting, forms[-1])
        use = self._use(blocks)
        line = dot.join([counts, *use])
        fits = len(name) + 2 + len(line) <= room
        self.border_title = titled(name, line if fits else counts, palette)
        while use and len(dot.join(use)) > room:
            use = use[1:]
        if use and not fits:
            self.border_subtitle = Text().append(dot.join(use), palette.muted)

    def _use(self, blocks: Blocks) -> list[str]:
        """What the held blocks are used for, and what the prefix cache spared."""
        use = [f"{blocks.tokens} tokens", f"{blocks.tail_waste * 100:.0f} % tail waste"]
        if self.size.width < 40:
            use[1] = use[1].replace("tail ", "")
        world = self.frame.world if self.frame else None
        if world is not None and world.cache_queried_tokens:
            rate = 100 * world.cache_hit_tokens / world.cache_queried_tokens
            use.append(f"hit {rate:.0f} %")
        return use

    @property
    def grid(self) -> BlockGrid | None:
        """The physical layout for the present size."""
        if self._blocks is None:
            return None
        width, height = self.size
        return plan_blocks(len(self._blocks.owner), width, height - self._legend_lines)

    @property
    def _legend_lines(self) -> int:
        return 1 if self.size.height >= 4 else 0

    def render_line(self, y: int) -> Strip:
        """One line of the panel."""
        return grounded(self._line(y), self.rich_style)

    def _line(self, y: int) -> Strip:
        width, height = self.size
        if self._blocks is None:
            return note("no step yet" if y == 0 else "", width, self.palette.muted)
        if self._legend_lines and y == height - 1:
            return self._status()
        if self.logical:
            return self._table_line(y)
        grid = self.grid
        if grid is None or y >= grid.lines:
            return Strip.blank(width)
        return self._physical(self._blocks, grid, y)

    # Physical blocks.

    def _physical(self, blocks: Blocks, grid: BlockGrid, y: int) -> Strip:
        first = y * grid.per_line
        line = Line(self.size.width)
        line.add(f"{first:>{grid.label - 1}} ", self.palette.muted)
        for block in range(first, min(first + grid.per_line, grid.num_blocks), grid.per_cell):
            text, style = (
                self._cell(blocks, block, grid.cell_width)
                if grid.per_cell == 1
                else self._many(blocks, block, grid.per_cell)
            )
            if self.cursor is not None and block <= self.cursor < block + grid.per_cell:
                line.add(text[:2], style + self.palette.cursor).add(text[2:], style)
            else:
                line.add(text, style)
        return line.strip()

    def _cell(self, blocks: Blocks, block: int, width: int) -> Cell:
        """One block: how full, whose, a mark where it was written or is shared."""
        glyphs = self.palette.glyphs
        owner = int(blocks.owner[block])
        if owner == NOBODY:
            if blocks.cached[block]:
                return self._evictable(block, width)
            return (glyphs.free.rjust(min(2, width)).ljust(width), self.palette.faint)
        letter = self.palette.letter(owner)
        style = self._style(owner, bool(blocks.written[block]))
        if width == 1:
            return letter, style
        mark = self._mark(blocks, block) if width >= 3 else ""
        return (self._fill(int(blocks.fill[block])) + letter + mark).ljust(width)[:width], style

    def _evictable(self, block: int, width: int) -> Cell:
        """A hollow cell with the small letter of the request that filled it."""
        ordinal = filler(self.frame.world, block)[0] if self.frame else None
        letter = "" if ordinal is None else self.palette.letter(ordinal).lower()
        text = self.palette.glyphs.evictable + letter
        return (text if width > 1 else text[-1]).ljust(width), self.palette.evictable

    def _mark(self, blocks: Blocks, block: int) -> str:
        """What is most worth knowing of a held block."""
        glyphs = self.palette.glyphs
        if blocks.evicted[block]:
            return glyphs.evicted
        if blocks.written[block]:
            return glyphs.written
        return glyphs.shared if blocks.sharers[block] > 1 else " "

    def _fill(self, tokens: int) -> str:
        fills = self.palette.glyphs.fills
        size = self._blocks.block_size if self._blocks else 1
        return fills[-(-tokens * (len(fills) - 1) // size)]

    def _style(self, owner: int, written: bool) -> Style:
        tint = self.palette.tint(owner)
        return tint.name if written else tint.dim

    def _many(self, blocks: Blocks, block: int, count: int) -> Cell:
        """Several blocks in one cell: how many of them are held, in the tint of their owner.

        Where none is held, whether one is evictable.
        """
        part = slice(block, block + count)
        owners = np.unique(blocks.owner[part])
        owners = owners[owners != NOBODY]
        shades = self.palette.glyphs.shades
        if not len(owners):
            if blocks.cached[part].any():
                return self.palette.glyphs.evictable, self.palette.evictable
            return self.palette.glyphs.free, self.palette.faint
        held = int(np.count_nonzero(blocks.sharers[part]))
        total = len(blocks.owner[part])
        glyph = shades[-(-held * (len(shades) - 1) // total)]
        written = bool(blocks.written[part].any())
        style = self._style(int(owners[0]), written) if len(owners) == 1 else self.palette.muted
        return glyph, style

    # Block tables.

    def _table_line(self, y: int) -> Strip:
        width = self.size.width
        if self._tables_for != width:
            self._tables_for = width
            self._tables = self._draw_tables(width)
        self._top = max(0, min(self._top, len(self._tables) - self._table_room))
        index = self._top + y
        if not self._tables:
            return note("no request runs" if y == 0 else "", width, self.palette.muted)
        cells = self._tables[index] if index < len(self._tables) else []
        return Line(width).extend(cells).strip()

    @property
    def _table_room(self) -> int:
        return max(1, self.size.height - self._legend_lines)

    def _draw_tables(self, width: int) -> list[list[Cell]]:
        lines: list[list[Cell]] = []
        if self.frame is None or self._blocks is None:
            return lines
        world, blocks = self.frame.world, self._blocks
        digits = len(str(world.header.num_blocks - 1))
        per_line = max(1, (width - 3) // (digits + 2))
        for request_id in world.running:
            view = world.requests[request_id]
            letter = self.palette.letter(view.ordinal)
            name = (f"{letter}  ", self.palette.tint(view.ordinal).name)
            for start in range(0, max(1, len(view.block_table)), per_line):
                cells = [name if start == 0 else ("   ", self.palette.muted)]
                for block in view.block_table[start : start + per_line]:
                    written = bool(blocks.written[block])
                    number = self.palette.text if written else self.palette.muted
                    cells.append((f"{block:>{digits}}", number))
                    fill = self._fill(int(blocks.fill[block]))
                    mark = self.palette.glyphs.shared if blocks.sharers[block] > 1 else " "
                    cells.append((fill + mark, self._style(view.ordinal, written)))
                lines.append(cells)
        return lines

    # The last line.

    def _status(self) -> Strip:
        line = Line(self.size.width)
        if self.cursor is not None and self._blocks is not None and not self.logical:
            line.add(self.palette.glyphs.cursor + " ", self.palette.accent)
            words = self._explain(self._blocks, self.cursor)
            return line.fit(words, self.palette.text, ascii=self.palette.ascii).strip()
        legend = _fitting(self._legend(), self.size.width)
        for index, (glyph, style, word) in enumerate(legend):
            line.add("  " if index else "", self.palette.muted)
            line.add(glyph, style).add(f" {word}" if glyph else word, self.palette.muted)
        return line.strip()

    def _explain(self, blocks: Blocks, block: int) -> str:
        """All about the block under the cursor, and in brief about its neighbours in the cell."""
        size, dash = blocks.block_size, self.palette.glyphs.dash
        words = f"block {block}: {self._state(blocks, block)}"
        words += f", slots {block * size}{dash}{(block + 1) * size - 1}"
        grid = self.grid
        if grid is None or grid.per_cell == 1:
            return words
        first = block - block % grid.per_cell
        last = min(first + grid.per_cell, grid.num_blocks) - 1
        part = slice(first, last + 1)
        held = int(np.count_nonzero(blocks.sharers[part]))
        evictable = int(np.count_nonzero(blocks.is_evictable[part]))
        free = last + 1 - first - held - evictable
        counts = f"{held} held, {evictable} evictable, {free} free"
        return f"{first}{dash}{last}: {counts}; {words}"

    def _state(self, blocks: Blocks, block: int) -> str:
        if blocks.owner[block] != NOBODY:
            return self._held_words(blocks, block)
        if not blocks.cached[block] or self.frame is None:
            return "free"
        ordinal, first = filler(self.frame.world, block)
        positions = f"positions {first}{self.palette.glyphs.dash}{first + blocks.block_size - 1}"
        if ordinal is None:
            return f"cached, free to be taken: {positions} of a request that is gone"
        return f"cached, free to be taken: {self.palette.letter(ordinal)} {positions}"

    def _held_words(self, blocks: Blocks, block: int) -> str:
        fill, first = int(blocks.fill[block]), int(blocks.first_position[block])
        letter, dash = self.palette.letter(int(blocks.owner[block])), self.palette.glyphs.dash
        held = f"positions {first}{dash}{first + fill - 1}" if fill else "reserved"
        parts = [f"{letter} {held}", f"{fill} of {blocks.block_size}"]
        if blocks.sharers[block] > 1:
            parts[0] = f"shared by {self._sharers(blocks, block)}: {held}"
        if blocks.evicted[block]:
            parts.append("evicted in this step")
        if blocks.written[block]:
            parts.append("written in this step")
        if blocks.cached[block]:
            parts.append("cached")
        return ", ".join(parts)

    def _sharers(self, blocks: Blocks, block: int) -> str:
        """How many have it, and who."""
        ordinals = holders(self.frame.world, block) if self.frame else []
        letters = [self.palette.letter(ordinal) for ordinal in ordinals[:NAMED_HOLDERS]]
        if len(ordinals) > NAMED_HOLDERS:
            letters.append(self.palette.glyphs.ellipsis)
        return f"{int(blocks.sharers[block])} ({', '.join(letters)})"

    def _legend(self) -> list[LegendItem]:
        """What the cells mean, the most important first."""
        glyphs, grid = self.palette.glyphs, self.grid
        tint, faint = self.palette.tint(0), self.palette.faint
        evictable = self.palette.evictable
        if self.logical:
            return [
                (glyphs.fills[6], tint.dim, "how full"), (glyphs.fills[6], tint.name, "written"),
                (glyphs.shared, self.palette.text, "shared"), ("", faint, "v blocks"),
            ]  # fmt: skip
        if grid is not None and grid.per_cell > 1:
            return [
                (glyphs.shades[1] + glyphs.shades[4], tint.dim, "held"),
                (glyphs.evictable, evictable, "evictable"), (glyphs.free, faint, "free"),
                ("", faint, f"{grid.per_cell} blocks a cell"), ("", faint, "v tables"),
            ]  # fmt: skip
        width = grid.cell_width if grid is not None else 1
        full, half, hollow = ("", "", "")
        if width > 1:
            full, half, hollow = glyphs.fills[8], glyphs.fills[4], glyphs.evictable
        items = [
            (f"{full}A", tint.dim, "held"), (f"{hollow}a", evictable, "evictable"),
            (glyphs.free, faint, "free"),
            (f"{half}A{glyphs.written if width >= 3 else ''}", tint.name, "written"),
        ]  # fmt: skip
        if width >= 3:
            if self._blocks is not None and self._blocks.evicted.any():
                items.append((glyphs.evicted, self.palette.text, "evicted"))
            items.append((glyphs.shared, self.palette.text, "shared"))
        return [*items, ("", faint, "v tables")]

    # The cursor.

    def action_view(self) -> None:
        """Physical blocks or block tables."""
        self.logical = not self.logical
        self.refresh()

    def action_move(self, columns: int, rows: int) -> None:
        """Move the cursor; in the logical view, scroll."""
        grid = self.grid
        if self.logical:
            self._top += rows
            self.refresh()
        elif grid is not None and self.cursor is None:
            self._put_cursor(0)
        elif grid is not None and self.cursor is not None:
            block = self.cursor + columns * grid.per_cell + rows * grid.per_line
            if 0 <= block < grid.num_blocks:
                self._put_cursor(block)

    def action_clear(self) -> None:
        """Put the cursor away."""
        self.cursor = None
        self.post_message(TokenSelected("", None, self))
        self.refresh()

    def show_selection(self, request_id: str, position: int | None) -> None:
        """Light the block that holds a token picked elsewhere; the whole request lights none."""
        view = self.frame.world.view(request_id) if self.frame else None
        self.cursor = None
        if view is not None and position is not None and self.frame is not None:
            index = position // self.frame.world.header.block_size
            self.cursor = view.block_table[index] if index < len(view.block_table) else None
        self.refresh()

    def _put_cursor(self, block: int) -> None:
        """Move the cursor there, and select whose block it is, or was."""
        self.cursor = block
        if self._blocks is not None and self.frame is not None:
            world, owner = self.frame.world, int(self._blocks.owner[block])
            position: int | None = int(self._blocks.first_position[block])
            known = world.running
            if owner == NOBODY and self._blocks.cached[block]:
                known, position = [world.cached[block][0]], None
                ordinal = filler(world, block)[0]
                owner = NOBODY if ordinal is None else ordinal
            for request_id in known:
                view = world.view(request_id)
                if view is not None and view.ordinal == owner:
                    self.post_message(TokenSelected(request_id, position, self))
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor on the block under the mouse."""
        grid, offset = self.grid, event.get_content_offset(self)
        if grid is None or offset is None or self.logical:
            return
        block = grid.block_at(offset.x, offset.y)
        if block is not None:
            self._put_cursor(block)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Scroll the block tables."""
        if self.logical:
            event.stop()
            self.action_move(0, 2)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Scroll the block tables."""
        if self.logical:
            event.stop()
            self.action_move(0, -2)


def _counts(blocks: Blocks, dot: str) -> list[tuple[str, str]]:
    """The panel's name and how many blocks are in each state, in ever fewer cells."""
    held, evictable, free, count = blocks.held, blocks.evictable, blocks.free, len(blocks.owner)
    three = f"held {held}{dot}evictable {evictable}{dot}free {free} of {count}"
    return [
        ("KV cache", f"{three} blocks"),
        ("KV", f"{three} blocks"),
        ("KV", three),
        ("KV", f"{held} held {evictable} evictable {free} free"),
        ("KV", f"{held} held {evictable} evict. {free} free"),
        ("KV", f"{held}+{evictable}+{free} of {count}"),
    ]


def _fitting(legend: list[LegendItem], width: int) -> list[LegendItem]:
    """As many items as there is room for, the first ones."""
    used, shown = -2, []
    for item in legend:
        used += 2 + width_of(f"{item[0]} {item[2]}".strip())
        if used <= width:
            shown.append(item)
    return shown
