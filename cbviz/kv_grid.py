"""What each physical block holds, and how the blocks lie on the cells of a panel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbviz.cells import IntArray
from engine.record import SegmentKind, StepRecord
from engine.world import World

FREE = -1
"""Owner of a block that is in no block table."""


@dataclass(frozen=True)
class Blocks:
    """The pool after a step, one entry a physical block, `[num_blocks]` each."""

    owner: IntArray
    """Ordinal of the (first) request whose table it is in, or `FREE`."""
    fill: IntArray
    """Tokens whose keys and values lie in it."""
    sharers: IntArray
    """Block tables it is in."""
    first_position: IntArray
    """Position of its first token in its request."""
    written: npt.NDArray[np.bool_]
    """Whether the step wrote into it."""
    block_size: int

    @property
    def held(self) -> int:
        """Blocks in at least one block table."""
        return int(np.count_nonzero(self.sharers))

    @property
    def tokens(self) -> int:
        """Tokens stored; what is shared counts once."""
        return int(self.fill.sum())

    @property
    def tail_waste(self) -> float:
        """Share of the held slots that no token fills yet."""
        slots = self.held * self.block_size
        return 1.0 - self.tokens / slots if slots else 0.0

    @classmethod
    def of(cls, world: World, record: StepRecord | None) -> Blocks:
        """The blocks of a world; `written` as the step of `record` did."""
        count, size = world.header.num_blocks, world.header.block_size
        owner = np.full(count, FREE, dtype=np.int64)
        fill, sharers, first = (np.zeros(count, dtype=np.int64) for _ in range(3))
        for request_id in reversed(world.running):
            view = world.requests[request_id]
            table = np.asarray(view.block_table, dtype=np.int64)
            starts = np.arange(len(table)) * size
            owner[table] = view.ordinal
            first[table] = starts
            fill[table] = np.maximum(fill[table], np.clip(view.num_computed - starts, 0, size))
            sharers[table] += 1
        return cls(owner, fill, sharers, first, _written(world, record), size)


def _written(world: World, record: StepRecord | None) -> npt.NDArray[np.bool_]:
    """Blocks that the segments of a step wrote; not those of a request that is gone by now."""
    written = np.zeros(world.header.num_blocks, dtype=bool)
    size = world.header.block_size
    for segment in record.segments if record else []:
        view = world.view(segment.request_id)
        if view is None or segment.kind is SegmentKind.PAD:
            continue
        first, last = segment.start // size, (segment.start + segment.length - 1) // size
        written[view.block_table[first : last + 1]] = True
    return written


@dataclass(frozen=True)
class BlockGrid:
    """Blocks in reading order: `columns` cells a line, each `cell_width` wide, `per_cell` blocks.

    It depends on the size of the pool and of the panel alone, so that no block ever moves.
    """

    num_blocks: int
    columns: int
    cell_width: int
    per_cell: int
    label: int
    """Cells of the block number before each line."""

    @property
    def per_line(self) -> int:
        """Blocks on one line."""
        return self.columns * self.per_cell

    @property
    def lines(self) -> int:
        """Lines that the pool takes."""
        return -(-self.num_blocks // self.per_line)

    def block_at(self, x: int, y: int) -> int | None:
        """The (first) block under a cell of the panel."""
        column = (x - self.label) // self.cell_width
        block = y * self.per_line + column * self.per_cell
        inside = 0 <= column < self.columns and y >= 0 and block < self.num_blocks
        return block if inside else None


def plan_blocks(num_blocks: int, width: int, lines: int) -> BlockGrid | None:
    """The roomiest grid in which all blocks fit; several blocks a cell where they don't."""
    label = len(str(max(0, num_blocks - 1))) + 1
    room = width - label
    if num_blocks < 1 or lines < 1 or room < 1:
        return None
    for cell in (4, 3, 2, 1):
        columns = _even(room // cell)
        if columns and columns * lines >= num_blocks:
            return BlockGrid(num_blocks, columns, cell, 1, label)
    columns, per_cell = _even(room), 2
    while columns * per_cell * lines < num_blocks:
        per_cell *= 2
    return BlockGrid(num_blocks, columns, 1, per_cell, label)


def _even(columns: int) -> int:
    """Fewer columns, so that the numbers beside the lines are easy to count on from."""
    for step in (16, 8, 4):
        if columns >= 2 * step or columns == step:
            return columns - columns % step
    return columns
