"""Lines of a grid, built from numpy arrays or from pieces of text, as merged runs of segments."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual.strip import Strip

from cbviz.palette import Palette
from cbviz.sanitize import fit, width_of

IntArray = npt.NDArray[np.int64]
Cell = tuple[str, Style]
"""The text of one grid cell (always as many terminal cells as the grid says) and its style."""


class Line:
    """A line under construction: safe text goes in from left to right, equal styles merge."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.used = 0
        self._texts: list[str] = []
        self._styles: list[Style] = []

    @property
    def left(self) -> int:
        """Cells that are still free."""
        return max(0, self.width - self.used)

    def add(self, text: str, style: Style) -> Line:
        """Append safe text; what goes beyond the width is cropped by `strip`."""
        if not text:
            return self
        if self._styles and self._styles[-1] == style:
            self._texts[-1] += text
        else:
            self._texts.append(text)
            self._styles.append(style)
        self.used += width_of(text)
        return self

    def fit(self, text: str, style: Style, *, ascii: bool) -> Line:
        """Append untrusted text, made safe and cut with an ellipsis to what is left."""
        return self.add(fit(text, self.left, pad=False, ascii=ascii), style)

    def pad_to(self, column: int, style: Style) -> Line:
        """Fill with spaces up to a column."""
        return self.add(" " * (column - self.used), style)

    def extend(self, cells: Sequence[Cell]) -> Line:
        """Append cells."""
        for text, style in cells:
            self.add(text, style)
        return self

    def strip(self) -> Strip:
        """The line, exactly `width` cells wide."""
        segments = [
            Segment(text, style) for text, style in zip(self._texts, self._styles, strict=True)
        ]
        return Strip(segments, self.used).adjust_cell_length(self.width)


def run_cells(codes: IntArray, table: Sequence[Cell]) -> list[Cell]:
    """Cells of a row of codes `[columns]`, equal neighbours merged; `table[code]` is a cell."""
    if len(codes) == 0:
        return []
    starts = np.concatenate(([0], np.flatnonzero(codes[1:] != codes[:-1]) + 1))
    counts = np.diff(np.append(starts, len(codes)))
    return [
        (table[code][0] * count, table[code][1])
        for code, count in zip(codes[starts].tolist(), counts.tolist(), strict=True)
    ]


def note(text: str, width: int, style: Style, *, ascii: bool = False) -> Strip:
    """One line of our own (trusted) words."""
    return Line(width).add(fit(text, width, pad=False, ascii=ascii), style).strip()


def titled(name: str, figures: str, palette: Palette) -> Text:
    """A panel's title with its figures (our own words); `Text`, so that no markup is read in it."""
    title = Text().append(name, palette.title)
    return title.append(f"  {figures}", palette.text) if figures else title


def grounded(strip: Strip, base: Style) -> Strip:
    """The strip on the widget's own colours: Textual puts none under a line that we render."""
    return strip.apply_style(base)


def share(amounts: Sequence[int], cells: int) -> list[int]:
    """Cells for each amount: 1:1 when they fit, else in proportion and at least 1 if possible.

    The result adds up to `min(cells, sum(amounts))`; no amount gets more cells than it has items.
    When there are more amounts than cells, the largest remainders win and some get none.
    """
    total = sum(amounts)
    if total <= cells:
        return list(amounts)
    if cells <= 0:
        return [0] * len(amounts)
    sizes = np.asarray(amounts, dtype=np.int64)
    floor = np.minimum(sizes, 1) if np.count_nonzero(sizes) <= cells else np.zeros_like(sizes)
    exact = sizes * (cells / total)
    given = np.maximum(np.floor(exact).astype(np.int64), floor)
    while (extra := int(given.sum()) - cells) > 0:
        # The floors took too much: the widest give back, one cell each.
        spare = np.where(given > floor, given, 0)
        takers = np.argsort(-spare, kind="stable")[:extra]
        given[takers[spare[takers] > 0]] -= 1
    while (missing := cells - int(given.sum())) > 0:
        wish = np.where(given < sizes, exact - given, -np.inf)
        takers = np.argsort(-wish, kind="stable")[:missing]
        given[takers[wish[takers] > -np.inf]] += 1
    return [int(value) for value in given]


def bin_edges(groups: Sequence[int], cells: int) -> IntArray:
    """Edges `[bins + 1]` of at most `cells` bins over items that stand in groups.

    Every bin holds the same number of items (the last of a group may hold fewer), so that a slope
    stays straight; and bins keep to one group each, so that a picture zoomed out never mixes two
    requests in one cell, unless there are more groups than cells.
    """
    sizes = np.asarray([size for size in groups if size], dtype=np.int64)
    total = int(sizes.sum())
    if len(sizes) > cells:
        sizes = np.asarray([total], dtype=np.int64)
    if not total or cells <= 0:
        return np.zeros(1, dtype=np.int64)
    step = 1 + bisect_left(
        range(1, total + 1), True, key=lambda step: bool((-(-sizes // step)).sum() <= cells)
    )
    edges = [np.zeros(1, dtype=np.int64)]
    start = 0
    for size in sizes.tolist():
        ends = np.arange(step, size + step, step, dtype=np.int64)
        edges.append(start + np.minimum(ends, size))
        start += size
    return np.concatenate(edges)
