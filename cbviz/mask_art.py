"""The lines of the mask panel: header band, token axes, cells, and the sentence below."""

from __future__ import annotations

import numpy as np
from rich.style import Style
from textual.strip import Strip

from cbviz.cells import Cell, IntArray, Line, run_cells
from cbviz.mask_grid import FULL, MaskGrid, Mode
from cbviz.mask_words import explain, piece_of
from cbviz.palette import Palette, Tint
from cbviz.sanitize import fit
from engine.mask import PackedAxes
from engine.record import Segment, SegmentKind
from engine.world import World

MIXED = 0
"""The column code of a cell that holds keys of several requests."""
LEVELS = FULL + 1
REVERSE = Style(reverse=True)

Cursor = tuple[int, int]
"""A query and a key, indices into `[n_Q, n_K]`."""


class MaskArt:
    """Draws one laid-out mask, `width` cells wide, line by line."""

    def __init__(
        self, palette: Palette, world: World, segments: list[Segment], grid: MaskGrid, width: int
    ) -> None:
        self.palette = palette
        self.world = world
        self.grid = grid
        self.width = width
        self._segments = segments
        self._axes: PackedAxes = grid.axes
        self._column_codes = self._code_columns(grid)
        self._codes = grid.levels() + LEVELS * self._column_codes[None, :]
        self._table = self._build_table(grid)
        self._lower_table = self._without_dots(self._table)

    def line(self, y: int, height: int, cursor: Cursor | None) -> Strip:
        """Line `y` of a panel of this height."""
        grid = self.grid
        if y < grid.band_rows:
            return self._band(grid)
        if y < grid.top:
            return self._axis(grid, y - grid.band_rows, cursor)
        if grid.status_rows and y == height - 1:
            return self._status(grid, cursor)
        if y - grid.top < grid.lines:
            return self._row(grid, y - grid.top, cursor)
        return Strip.blank(self.width)

    def _code_columns(self, grid: MaskGrid) -> IntArray:
        """What each column is, `[columns]`: `1 + 2 * segment + new`, or `MIXED`."""
        codes = 1 + 2 * self._axes.key_segment + self._axes.key_is_new
        first = codes[grid.column_edges[:-1]]
        last = codes[grid.column_edges[1:] - 1]
        return np.where(first == last, first, MIXED)

    def _build_table(self, grid: MaskGrid) -> list[Cell]:
        """The text and style of each code; only the codes on the panel are filled in."""
        blank = ("", Style())
        table: list[Cell] = [blank] * (LEVELS * (2 * len(self._segments) + 1))
        for code in np.unique(self._column_codes).tolist():
            for level in range(LEVELS):
                table[LEVELS * code + level] = self._cell(grid, code, level)
        return table

    def _without_dots(self, table: list[Cell]) -> list[Cell]:
        """For the lower lines of a tall row: one dot a pair is enough."""
        return [
            (" " * len(text) if index % LEVELS == 0 else text, style)
            for index, (text, style) in enumerate(table)
        ]

    def _cell(self, grid: MaskGrid, code: int, level: int) -> Cell:
        glyphs = self.palette.glyphs
        new = code != MIXED and code % 2 == 0
        style = self.palette.text
        if code != MIXED:
            segment = self._segments[(code - 1) // 2]
            tint = self._tint(segment)
            style = tint.bright if new else tint.dim
            if segment.kind is SegmentKind.PAD:
                style = self.palette.pad
        if level == 0:
            dot = " " if grid.mode is Mode.HALF else glyphs.off
            return dot.ljust(grid.cell_width), self.palette.faint
        if grid.mode is Mode.HALF:
            glyph = (glyphs.upper, glyphs.lower, glyphs.full, glyphs.full)[level - 1]
        elif level == FULL:
            glyph = glyphs.full if new or code == MIXED else glyphs.cached
        else:
            glyph = glyphs.shades[level]
        if code != MIXED and segment.kind is SegmentKind.PAD and level == FULL:
            glyph = glyphs.pad
        gap = 1 if grid.cell_width >= 4 else 0
        return glyph * (grid.cell_width - gap) + " " * gap, style

    def _ordinal(self, segment: Segment) -> int | None:
        view = self.world.view(segment.request_id)
        return None if view is None else view.ordinal

    def _tint(self, segment: Segment) -> Tint:
        ordinal = self._ordinal(segment)
        if ordinal is None:
            pad = self.palette.pad
            return Tint(pad, pad, pad + Style(reverse=True), pad)
        return self.palette.tint(ordinal)

    def _letter(self, segment: Segment) -> str:
        ordinal = self._ordinal(segment)
        return self.palette.glyphs.pad if ordinal is None else self.palette.letter(ordinal)

    def _piece(self, segment: Segment, position: int) -> str:
        return piece_of(self.world, segment, position)

    def _band(self, grid: MaskGrid) -> Strip:
        """Whose keys stand below: grey for the cached, bright for the new."""
        line = Line(self.width).pad_to(grid.gutter, self.palette.muted)
        codes = self._column_codes
        starts = np.concatenate(([0], np.flatnonzero(np.diff(codes)) + 1)).tolist()
        for start, end in zip(starts, [*starts[1:], len(codes)], strict=True):
            span = (end - start) * grid.cell_width
            code = int(codes[start])
            if code == MIXED:
                line.add(self.palette.glyphs.line * span, self.palette.muted)
                continue
            segment = self._segments[(code - 1) // 2]
            new = code % 2 == 0
            count = segment.length if new else segment.context
            words = f"{self._letter(segment)} {'new' if new else 'cached'} {count}"
            if len(words) > span:
                words = f"{self._letter(segment)} {count}"
            if len(words) > span:
                words = self._letter(segment)
            tint = self._tint(segment)
            if new:
                line.add(words.ljust(span), tint.on)
            else:
                rule = " " + self.palette.glyphs.line * span
                line.add(words[:1], tint.name).add((words + rule)[1:span], self.palette.muted)
        return line.strip()

    def _axis(self, grid: MaskGrid, y: int, cursor: Cursor | None) -> Strip:
        """The key tokens: whole words where columns are wide, else letters from top to bottom."""
        line = Line(self.width).pad_to(grid.gutter, self.palette.muted)
        first = int(grid.column_edges[0])
        for column, code in enumerate(self._column_codes.tolist()):
            segment = self._segments[(code - 1) // 2]
            key = first + column
            piece = self._piece(segment, int(self._axes.key_position[key]))
            words = piece.strip(" ") or piece
            if grid.cell_width >= 3:
                text = fit(words, grid.cell_width - 1, ascii=self.palette.ascii) if y == 0 else ""
            else:
                safe = fit(words, 80, pad=False, ascii=self.palette.ascii)
                text = fit(safe[y : y + 1], 1, ascii=self.palette.ascii)
                if grid.axis_rows > 1 and y == grid.axis_rows - 1 and len(safe) > y + 1:
                    text = self.palette.glyphs.ellipsis
            style = self._tint(segment).bright if code % 2 == 0 else self.palette.muted
            if cursor is not None and cursor[1] == key:
                style += self.palette.cursor
            line.add(text.ljust(1), style).pad_to(
                grid.gutter + (column + 1) * grid.cell_width, self.palette.muted
            )
        return line.strip()

    def _row(self, grid: MaskGrid, y: int, cursor: Cursor | None) -> Strip:
        line = Line(self.width)
        row, below = divmod(y, grid.row_height)
        at = self._cursor_cell(grid, cursor)
        self._gutter(grid, y, line, at is not None and at[0] == row)
        codes = self._codes[row]
        table = self._lower_table if below else self._table
        if at is None or at[0] != row:
            return line.extend(run_cells(codes, table)).strip()
        column = at[1]
        return (
            line.extend(run_cells(codes[:column], table))
            .add(*self._cursor_text(grid, cursor))
            .extend(run_cells(codes[column + 1 :], table))
            .strip()
        )

    def _cursor_text(self, grid: MaskGrid, cursor: Cursor | None) -> Cell:
        """The pair under the cursor as a letter: a block in reverse would look like a hole."""
        query, key = cursor or (0, 0)
        true = bool(self._axes.mask(slice(query, query + 1), slice(key, key + 1))[0, 0])
        return ("T" if true else "F").ljust(grid.cell_width), self.palette.accent + REVERSE

    def _gutter(self, grid: MaskGrid, y: int, line: Line, lit: bool) -> None:
        """Which queries a line is: letter and token, or the range of positions."""
        y, below = divmod(y, grid.row_height)
        if below:
            line.pad_to(grid.gutter, self.palette.muted)
            return
        step = 2 if grid.mode is Mode.HALF else 1
        edges = grid.row_edges
        first = int(edges[y * step])
        end = int(edges[min(y * step + step, len(edges) - 1)])
        segment = self._segments[self._axes.query_segment[first]]
        last = self._segments[self._axes.query_segment[end - 1]]
        tint = self._tint(segment)
        line.add(self._letter(segment), tint.name + (self.palette.cursor if lit else Style()))
        if last is not segment:
            same = (
                self._letter(last)
                if grid.mode is Mode.HALF
                else f"{self.palette.glyphs.dash}{self._letter(last)}"
            )
            line.add(same, self._tint(last).name)
        elif grid.mode is not Mode.HALF:
            words, style = self._row_words(segment, first, end, grid.gutter - 2)
            line.add(words, style + (self.palette.cursor if lit else Style()))
            if last.samples and self._ends_segment(end):
                line.pad_to(grid.gutter - 1, self.palette.muted)
                line.add(self.palette.glyphs.samples, self.palette.accent)
        line.pad_to(grid.gutter, self.palette.muted)

    def _row_words(self, segment: Segment, first: int, end: int, width: int) -> tuple[str, Style]:
        position = int(self._axes.query_position[first])
        if end - first == 1:
            words = self._piece(segment, position)
            words = words if words.startswith(" ") else f" {words}"
            return fit(words, width, ascii=self.palette.ascii), self.palette.text
        dash = self.palette.glyphs.dash
        words = f"{position}{dash}{position + end - first - 1}"
        return fit(f" {words}" if len(words) < width else words, width), self.palette.muted

    def _ends_segment(self, end: int) -> bool:
        owners = self._axes.query_segment
        return end == len(owners) or bool(owners[end] != owners[end - 1])

    def _status(self, grid: MaskGrid, cursor: Cursor | None) -> Strip:
        line = Line(self.width)
        if cursor is not None:
            words = explain(
                self.world, self._segments, self._axes, *cursor,
                width=self.width - 2, letter=self.palette.letter, ascii=self.palette.ascii,
            )  # fmt: skip
            sees = words.startswith("True")
            line.add(self.palette.glyphs.cursor + " ", self.palette.accent)
            style = self.palette.ok if sees else self.palette.warn
            return line.fit(words, style, ascii=self.palette.ascii).strip()
        return line.extend(self._legend(grid)).strip()

    def _legend(self, grid: MaskGrid) -> list[Cell]:
        glyphs, muted = self.palette.glyphs, self.palette.muted
        tint = self._tint(self._segments[-1])
        cached = glyphs.full if grid.mode is Mode.HALF else glyphs.cached
        cells = [(glyphs.full, tint.bright), (" new  ", muted), (cached, tint.dim)]
        cells.append((" cached  ", muted))
        if grid.mode is Mode.BINS:
            rows, columns = grid.scale
            cells.append((glyphs.shades[1] + glyphs.shades[2], tint.bright))
            cells.append((f" partly  {rows} {glyphs.times} {columns} pairs a cell  ", muted))
        elif not grid.whole:
            cells.append((self._where(grid), muted))
        cells.append(("v view  hjkl cursor", muted))
        return [(fit(text, 80, pad=False, ascii=self.palette.ascii), s) for text, s in cells]

    def _where(self, grid: MaskGrid) -> str:
        rows, columns, dash = grid.row_edges, grid.column_edges, self.palette.glyphs.dash
        return (
            f"queries {rows[0]}{dash}{rows[-1] - 1} of {self._axes.num_queries}, "
            f"keys {columns[0]}{dash}{columns[-1] - 1} of {self._axes.num_keys}  "
        )

    def _cursor_cell(self, grid: MaskGrid, cursor: Cursor | None) -> tuple[int, int] | None:
        """Line and column of the cursor; None when it is not on the panel."""
        if cursor is None:
            return None
        row, column = grid.row_of(cursor[0]), grid.column_of(cursor[1])
        if row is None or column is None:
            return None
        return (row // 2 if grid.mode is Mode.HALF else row), column
