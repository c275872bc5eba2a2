"""How the mask of a step lies on the cells of a panel: zoom, viewport, density.

Pure geometry, no widgets: `plan` decides the layout, `MaskGrid.levels` says what each cell shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from cbviz.cells import IntArray, bin_edges
from engine.mask import PackedAxes
from engine.record import Segment

Levels = npt.NDArray[np.uint8]

FULL = 4
"""The level of a cell that is wholly True."""
WORD_WIDTHS = (8, 6, 5, 4, 3, 2, 1)
MAX_AXIS_ROWS = 5
MAX_ROW_HEIGHT = 3
LETTER_GUTTER = 3


class Zoom(StrEnum):
    """How much of the mask is on the panel: all, one pair a cell, or pairs with their words."""

    FIT = "fit"
    CELLS = "cells"
    WORDS = "words"


class Mode(StrEnum):
    """What one line of the grid stands for: one query, two of them as half blocks, several."""

    ROWS = "rows"
    HALF = "half"
    BINS = "bins"


@dataclass(frozen=True)
class MaskGrid:
    """A mask laid out on `lines` lines of `columns` cells, each `cell_width` wide.

    `row_edges` and `column_edges` (`[rows + 1]`, `[columns + 1]`) bound the queries and keys that a
    row and a column stand for. In `half` mode two rows share a line.
    """

    axes: PackedAxes
    mode: Mode
    row_edges: IntArray
    column_edges: IntArray
    cell_width: int
    row_height: int
    """Terminal lines of a row; more than 1 only in `rows` mode."""
    gutter: int
    axis_rows: int
    band_rows: int
    status_rows: int

    @property
    def lines(self) -> int:
        """Terminal lines of the grid itself."""
        rows = len(self.row_edges) - 1
        return -(-rows // 2) if self.mode is Mode.HALF else rows * self.row_height

    @property
    def top(self) -> int:
        """Lines above the grid."""
        return self.band_rows + self.axis_rows

    @property
    def exact_columns(self) -> bool:
        """Whether each column is one key."""
        return int(self.column_edges[-1] - self.column_edges[0]) == len(self.column_edges) - 1

    @property
    def exact_rows(self) -> bool:
        """Whether each row is one query."""
        return int(self.row_edges[-1] - self.row_edges[0]) == len(self.row_edges) - 1

    @property
    def whole(self) -> bool:
        """Whether all queries and keys are on the panel."""
        ends = (self.row_edges[0], self.row_edges[-1], self.column_edges[0], self.column_edges[-1])
        return tuple(map(int, ends)) == (0, self.axes.num_queries, 0, self.axes.num_keys)

    def levels(self) -> Levels:
        """What each cell shows, `[rows, columns]`; in `half` mode `[lines, columns]`.

        0 = all False, 4 = all True, 1–3 = partly. In `half` mode: bit 0 the upper query, bit 1 the
        lower one.
        """
        rows = slice(int(self.row_edges[0]), int(self.row_edges[-1]))
        columns = slice(int(self.column_edges[0]), int(self.column_edges[-1]))
        if self.mode is Mode.HALF:
            mask = self.axes.mask(rows, columns)
            if len(mask) % 2:
                mask = np.vstack([mask, np.zeros((1, mask.shape[1]), dtype=bool)])
            return mask[0::2].astype(np.uint8) + 2 * mask[1::2].astype(np.uint8)
        if self.exact_rows and self.exact_columns:
            return self.axes.mask(rows, columns).astype(np.uint8) * np.uint8(FULL)
        return shade(coverage(self.axes, self.row_edges, self.column_edges))

    @property
    def scale(self) -> tuple[int, int]:
        """Queries and keys that a cell stands for, at most."""
        return int(np.diff(self.row_edges).max()), int(np.diff(self.column_edges).max())

    def row_of(self, query: int) -> int | None:
        """The row that holds a query; None when it is not on the panel."""
        return _bin_of(self.row_edges, query)

    def column_of(self, key: int) -> int | None:
        """The column that holds a key; None when it is not on the panel."""
        return _bin_of(self.column_edges, key)


def _bin_of(edges: IntArray, item: int) -> int | None:
    index = int(np.searchsorted(edges, item, side="right")) - 1
    return index if 0 <= index < len(edges) - 1 else None


def coverage(
    axes: PackedAxes, row_edges: IntArray, column_edges: IntArray
) -> npt.NDArray[np.float64]:
    """Share of True in each cell, `[rows, columns]`, exactly, without building the mask.

    A query sees of a run of keys of its own request the first `position - start + 1`, so a run is
    one subtraction, however many keys it has.
    """
    turns = np.flatnonzero(np.diff(axes.key_segment)) + 1
    inside = turns[(turns > column_edges[0]) & (turns < column_edges[-1])]
    cuts = np.union1d(column_edges, inside)
    starts, lengths = cuts[:-1], np.diff(cuts)
    rows = slice(int(row_edges[0]), int(row_edges[-1]))
    seen = axes.query_position[rows, None] - axes.key_position[None, starts] + 1
    np.clip(seen, 0, lengths[None, :], out=seen)
    seen *= axes.query_segment[rows, None] == axes.key_segment[None, starts]
    by_row = np.add.reduceat(seen, row_edges[:-1] - row_edges[0], axis=0)
    by_cell = np.add.reduceat(by_row, np.searchsorted(cuts, column_edges[:-1]), axis=1)
    area = np.diff(row_edges)[:, None] * np.diff(column_edges)[None, :]
    result: npt.NDArray[np.float64] = by_cell / area
    return result


def shade(share: npt.NDArray[np.float64]) -> Levels:
    """Levels 0–4 of a share of True; 0 and 4 mean none and all of it, exactly."""
    level = np.ceil(share * 3).astype(np.uint8)
    level[share >= 1.0] = FULL
    return level


def plan(
    axes: PackedAxes,
    segments: Sequence[Segment],
    size: tuple[int, int],
    *,
    zoom: Zoom = Zoom.FIT,
    origin: tuple[int, int] = (0, 0),
    half_blocks: bool = True,
) -> MaskGrid | None:
    """The layout for a panel of `size` (width, height), or None where nothing can be shown.

    `origin` is the first query and key on the panel when it does not show all (not in `fit`).
    """
    width, height = size
    band, status = int(height >= 4), int(height >= 6)
    lines = height - band - status
    if not axes.num_queries or lines < 1 or width < 8:
        return None
    gutter = min(14, max(9 if width >= 40 else 7, width // 6))
    if zoom is not Zoom.FIT:
        cell = 2 if zoom is Zoom.CELLS else WORD_WIDTHS[0]
        axis = min(1, max(0, lines - 4))
        return MaskGrid(
            axes, Mode.ROWS, _window(origin[0], lines - axis, axes.num_queries),
            _window(origin[1], (width - gutter) // cell, axes.num_keys),
            cell, 1, gutter, axis, band, status,
        )  # fmt: skip
    rows, keys = axes.num_queries, axes.num_keys
    every_row, every_key = np.arange(rows + 1), np.arange(keys + 1)
    if rows <= lines and keys <= width - gutter:
        cell = next(size for size in WORD_WIDTHS if size * keys <= width - gutter)
        axis = min(lines - rows, MAX_AXIS_ROWS if cell < 3 else 1)
        tall = max(1, min(cell // 2, (lines - axis) // rows, MAX_ROW_HEIGHT))
        return MaskGrid(
            axes, Mode.ROWS, every_row, every_key, cell, tall, gutter, axis, band, status
        )  # fmt: skip
    if half_blocks and rows <= 2 * lines and keys <= width - LETTER_GUTTER:
        cell = 2 if 2 * keys <= width - LETTER_GUTTER else 1
        axis = min(lines - -(-rows // 2), MAX_AXIS_ROWS)
        return MaskGrid(
            axes, Mode.HALF, every_row, every_key, cell, 1, LETTER_GUTTER, axis, band, status
        )
    parts = [part for s in segments for part in (s.context, s.length)]
    columns = bin_edges(parts, width - gutter)
    exact = len(columns) - 1 == keys
    axis = 1 if exact and lines >= 8 else 0
    queries = bin_edges([s.length for s in segments], lines - axis)
    cell = max(1, (width - gutter) // (len(columns) - 1)) if exact else 1
    mode = Mode.ROWS if exact and len(queries) - 1 == rows else Mode.BINS
    return MaskGrid(axes, mode, queries, columns, min(cell, 2), 1, gutter, axis, band, status)


def _window(first: int, shown: int, total: int) -> IntArray:
    """Edges of `shown` single items from `first` on, kept inside `total`."""
    shown = max(1, min(shown, total))
    start = max(0, min(first, total - shown))
    return np.arange(start, start + shown + 1)
