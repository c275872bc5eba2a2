"""The attention mask of the step: which query sees which key, and why."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from textual import events
from textual.binding import Binding, BindingType
from textual.strip import Strip

from cbviz.cells import IntArray, grounded, note, titled
from cbviz.mask_art import MaskArt
from cbviz.mask_grid import MaskGrid, Mode, Zoom, plan
from cbviz.palette import Palette
from cbviz.panels.base import Panel
from cbviz.panels.selection import TokenSelected
from engine.mask import PackedAxes
from engine.record import Segment


class MaskPanel(Panel):
    """Rows are queries, columns are keys, True is the tint of the request.

    Grey columns were cached before the step, bright ones are computed in it. What does not fit is
    drawn as density; `x` zooms in to single pairs, and then to the words. The cursor explains one
    pair in a sentence.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("h", "move(0,-1)", "key ←", id="mask.left", show=False,
                tooltip="Move the mask cursor one key to the left"),
        Binding("j", "move(1,0)", "query ↓", id="mask.down", show=False,
                tooltip="Move the mask cursor one query down"),
        Binding("k", "move(-1,0)", "query ↑", id="mask.up", show=False,
                tooltip="Move the mask cursor one query up"),
        Binding("l", "move(0,1)", "key →", id="mask.right", show=False,
                tooltip="Move the mask cursor one key to the right"),
        Binding("v", "zoom", "view", id="mask.zoom",
                tooltip="Zoom the mask: all of it, one pair a cell, pairs with their words"),
        Binding("escape", "clear", "no cursor", id="mask.clear", show=False,
                tooltip="Put the mask cursor away"),
    ]  # fmt: skip

    def __init__(self, palette: Palette, *, id: str | None = None) -> None:
        super().__init__(palette, id=id)
        self.zoom = Zoom.FIT
        self.cursor: tuple[int, int] | None = None
        """The query and the key under the cursor, indices into `[n_Q, n_K]`."""
        self._origin = (0, 0)
        self._segments: list[Segment] = []
        self._axes = PackedAxes([])
        self._art: MaskArt | None = None
        self._planned: object = None

    # What the step is.

    def update_frame(self) -> None:
        """Take the step's segments, and keep the cursor on its tokens where they are still in."""
        held = self._held_tokens()
        record = self.frame.record if self.frame else None
        self._segments = list(record.segments) if record else []
        self._axes = PackedAxes(self._segments)
        self._planned = None
        if held is not None:
            self.cursor = self._find_tokens(*held)
        queries, keys = self._axes.num_queries, self._axes.num_keys
        rows = "1 query" if queries == 1 else f"{queries} queries"
        columns = "1 key" if keys == 1 else f"{keys} keys"
        figures = f"{rows} {self.palette.glyphs.times} {columns}" if queries else ""
        self.border_title = titled("Mask", figures, self.palette)

    def _held_tokens(self) -> tuple[str, int, str, int] | None:
        if self.cursor is None or not self._segments:
            return None
        query, key = self.cursor
        row = self._segments[self._axes.query_segment[query]]
        column = self._segments[self._axes.key_segment[key]]
        offset = int(self._axes.query_position[query]) - row.start
        return row.request_id, offset, column.request_id, int(self._axes.key_position[key])

    def _find_tokens(
        self, row: str, offset: int, column: str, position: int
    ) -> tuple[int, int] | None:
        if not self._segments or self.cursor is None:
            return None
        ids = [segment.request_id for segment in self._segments]
        query = min(self.cursor[0], self._axes.num_queries - 1)
        key = min(self.cursor[1], self._axes.num_keys - 1)
        if row in ids:
            index = ids.index(row)
            first = int(np.searchsorted(self._axes.query_segment, index))
            query = first + min(offset, self._segments[index].length - 1)
        if column in ids:
            index = ids.index(column)
            segment = self._segments[index]
            first = int(np.searchsorted(self._axes.key_segment, index))
            key = first + min(position, segment.context + segment.length - 1)
        return query, key

    # How it lies on the panel.

    @property
    def grid(self) -> MaskGrid | None:
        """The layout for the present size; None when there is nothing to draw."""
        art = self._laid_out()
        return None if art is None else art.grid

    def _laid_out(self) -> MaskArt | None:
        state = (self.size, self.zoom, self._origin)
        if state == self._planned:
            return self._art
        self._planned = state
        # Without colour the two halves of a cell could not tell cached from new.
        halves = self.palette.glyphs.half_blocks and self.palette.color != "none"
        grid = plan(
            self._axes, self._segments, (self.size.width, self.size.height),
            zoom=self.zoom, origin=self._origin, half_blocks=halves,
        )  # fmt: skip
        self._art = None
        if grid is not None and self.frame is not None:
            world = self.frame.world
            self._art = MaskArt(self.palette, world, self._segments, grid, self.size.width)
        return self._art

    # Drawing.

    def render_line(self, y: int) -> Strip:
        """One line of the panel."""
        width, height = self.size
        art = self._laid_out()
        if art is not None:
            strip = art.line(y, height, self.cursor)
        else:
            strip = note(self._hint() if y == 0 else "", width, self.palette.muted)
        return grounded(strip, self.rich_style)

    def _hint(self) -> str:
        if self.frame is None or self.frame.record is None:
            return "no step yet"
        return "" if self._segments else "nothing ran in this step"

    # The cursor.

    def action_move(self, rows: int, columns: int) -> None:
        """Move the cursor by cells of the panel; the first key press puts it on the panel."""
        grid = self.grid
        if grid is None:
            return
        if self.cursor is None:
            query = int(grid.row_edges[0])
            same = self._axes.key_segment == self._axes.query_segment[query]
            own = np.flatnonzero(
                same & (self._axes.key_position == self._axes.query_position[query])
            )
            self._put_cursor(query, int(own[0]))
            return
        self._put_cursor(
            _moved(self.cursor[0], rows, grid.row_edges, self._axes.num_queries),
            _moved(self.cursor[1], columns, grid.column_edges, self._axes.num_keys),
        )

    def _put_cursor(self, query: int, key: int) -> None:
        self.cursor = (query, key)
        self._reveal(query, key)
        segment = self._segments[self._axes.query_segment[query]]
        position = int(self._axes.query_position[query])
        self.post_message(TokenSelected(segment.request_id, position, self))
        self.refresh()

    def _reveal(self, query: int, key: int) -> None:
        grid = self.grid
        if grid is None or self.zoom is Zoom.FIT:
            return
        self._origin = (_shifted(grid.row_edges, query), _shifted(grid.column_edges, key))

    def show_selection(self, request_id: str, position: int | None) -> None:
        """Put the cursor on a token picked elsewhere, if it takes part in the step."""
        indices = [i for i, s in enumerate(self._segments) if s.request_id == request_id]
        self.cursor = None
        if indices and position is not None:
            index, segment, at = indices[0], self._segments[indices[0]], position
            offset = min(max(0, at - segment.start), segment.length - 1)
            last = segment.context + segment.length - 1
            key = min(max(0, at - segment.start + segment.context), last)
            axes = self._axes
            self.cursor = (
                int(np.searchsorted(axes.query_segment, index)) + offset,
                int(np.searchsorted(axes.key_segment, index)) + key,
            )
            self._reveal(*self.cursor)
        self.refresh()

    def action_zoom(self) -> None:
        """Next zoom: all, cells, words."""
        order = list(Zoom)
        self.zoom = order[(order.index(self.zoom) + 1) % len(order)]
        if self.cursor is not None:
            self._reveal(*self.cursor)
        self.refresh()

    def action_clear(self) -> None:
        """Put the cursor away."""
        self.cursor = None
        self.post_message(TokenSelected("", None, self))
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Put the cursor where the mouse is."""
        grid = self.grid
        offset = event.get_content_offset(self)
        if grid is None or offset is None:
            return
        step = 2 if grid.mode is Mode.HALF else 1
        row = (offset.y - grid.top) // grid.row_height * step
        column = (offset.x - grid.gutter) // grid.cell_width
        if 0 <= row < len(grid.row_edges) - 1 and 0 <= column < len(grid.column_edges) - 1:
            self._put_cursor(int(grid.row_edges[row]), int(grid.column_edges[column]))

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Pan down, or with shift to the right."""
        self._pan(event, 3)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Pan up, or with shift to the left."""
        self._pan(event, -3)

    def _pan(self, event: events.MouseEvent, by: int) -> None:
        grid = self.grid
        if grid is None or self.zoom is Zoom.FIT:
            return
        rows, columns = (0, by) if event.shift or event.ctrl else (by, 0)
        self._origin = (
            max(0, int(grid.row_edges[0]) + rows), max(0, int(grid.column_edges[0]) + columns)
        )  # fmt: skip
        event.stop()
        self.refresh()


def _moved(item: int, by: int, edges: IntArray, total: int) -> int:
    """The first item of the cell `by` cells on; one item on where that leaves the panel."""
    if by == 0:
        return item
    index = int(np.searchsorted(edges, item, side="right")) - 1 + by
    if 0 <= index < len(edges) - 1:
        return int(edges[index])
    return max(0, min(total - 1, item + by))


def _shifted(edges: IntArray, item: int) -> int:
    """The first item of a window of the same width, moved just enough to hold `item`."""
    first, end = int(edges[0]), int(edges[-1])
    if item < first:
        return item
    return first + max(0, item - end + 1)
