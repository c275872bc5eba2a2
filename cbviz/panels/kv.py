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
from cbviz.kv_grid import FREE, BlockGrid, Blocks, plan_blocks
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import TokenSelected
from cbviz.sanitize import width_of


class KVPanel(Panel):
    """How full each block is, whose it is, and which were written in this step.

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
        blocks = self._blocks
        self.border_subtitle = ""
        if blocks is None:
            self.border_title = titled("KV cache", "", self.palette)
            return
        held = f"{blocks.held} of {len(blocks.owner)} blocks held"
        dot = f" {self.palette.glyphs.middot} "
        waste = f"{blocks.tokens} tokens{dot}{blocks.tail_waste * 100:.0f} % tail waste"
        room = self.size.width - 14
        fits = len(held + dot + waste) <= room
        name = "KV cache" if len(held) <= room else "KV"
        self.border_title = titled(name, held + dot + waste if fits else held, self.palette)
        if len(waste) > self.size.width - 4:
            waste = waste.removesuffix(" tail waste") + " waste"
        if not fits:
            self.border_subtitle = Text().append(waste, self.palette.muted)

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
        if owner == FREE:
            return (glyphs.free.rjust(min(2, width)).ljust(width), self.palette.faint)
        letter = self.palette.letter(owner)
        style = self._style(owner, bool(blocks.written[block]))
        if width == 1:
            return letter, style
        mark = " "
        if width >= 3:
            mark = "+" if blocks.sharers[block] > 1 else mark
            mark = glyphs.written if blocks.written[block] else mark
        return (self._fill(int(blocks.fill[block])) + letter + mark).ljust(width)[:width], style

    def _fill(self, tokens: int) -> str:
        fills = self.palette.glyphs.fills
        size = self._blocks.block_size if self._blocks else 1
        return fills[-(-tokens * (len(fills) - 1) // size)]

    def _style(self, owner: int, written: bool) -> Style:
        tint = self.palette.tint(owner)
        return tint.name if written else tint.dim

    def _many(self, blocks: Blocks, block: int, count: int) -> Cell:
        """Several blocks in one cell: how many of them are held, in the tint of their owner."""
        part = slice(block, block + count)
        owners = np.unique(blocks.owner[part])
        owners = owners[owners != FREE]
        shades = self.palette.glyphs.shades
        if not len(owners):
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
                    cells.append((f"{fill} ", self._style(view.ordinal, written)))
                lines.append(cells)
        return lines

    # The last line.

    def _status(self) -> Strip:
        line = Line(self.size.width)
        if self.cursor is not None and self._blocks is not None and not self.logical:
            line.add(self.palette.glyphs.cursor + " ", self.palette.accent)
            words = self._explain(self._blocks, self.cursor)
            return line.fit(words, self.palette.text, ascii=self.palette.ascii).strip()
        for text, style in self._legend():
            if width_of(text) <= line.left:
                line.add(text, style)
        return line.strip()

    def _explain(self, blocks: Blocks, block: int) -> str:
        owner = int(blocks.owner[block])
        size, dash = blocks.block_size, self.palette.glyphs.dash
        slots = f"slots {block * size}{dash}{(block + 1) * size - 1}"
        if owner == FREE:
            return f"block {block}: free, {slots}"
        fill, first = int(blocks.fill[block]), int(blocks.first_position[block])
        sharers = int(blocks.sharers[block])
        written = ", written in this step" if blocks.written[block] else ""
        shared = f", shared by {sharers}" if sharers > 1 else ""
        held = f"positions {first}{dash}{first + fill - 1}" if fill else "reserved"
        letter = self.palette.letter(owner)
        return f"block {block}: {letter} {held}, {fill} of {size}{written}{shared}, {slots}"

    def _legend(self) -> list[Cell]:
        glyphs, muted, grid = self.palette.glyphs, self.palette.muted, self.grid
        tint = self.palette.tint(0)
        if self.logical:
            cells = [
                (glyphs.fills[6], tint.dim), (" how full  ", muted),
                (glyphs.fills[6], tint.name), (" written", muted), ("  v blocks", muted),
            ]  # fmt: skip
        elif grid is not None and grid.per_cell > 1:
            words = f" held  {grid.per_cell} blocks a cell  v tables"
            cells = [(glyphs.shades[1] + glyphs.shades[4], tint.dim), (words, muted)]
        else:
            one = grid is not None and grid.cell_width == 1
            fill, half = ("", "") if one else (glyphs.fills[8], glyphs.fills[4])
            mark = glyphs.written if grid is not None and grid.cell_width >= 3 else ""
            cells = [
                (f"{fill}A", tint.dim), (" cached  ", muted),
                (f"{half}A{mark}", tint.name), (" written  ", muted),
                (glyphs.free, self.palette.faint), (" free", muted), ("  v tables", muted),
            ]  # fmt: skip
        return cells

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
        self.cursor = block
        if self._blocks is not None and self.frame is not None:
            owner = int(self._blocks.owner[block])
            for request_id in self.frame.world.running:
                if self.frame.world.requests[request_id].ordinal == owner:
                    position = int(self._blocks.first_position[block])
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
