"""What each physical block holds, and how the blocks lie on the cells of a panel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cbviz.cells import IntArray
from engine.record import BlockMerged, BlocksEvicted, SegmentKind, StepRecord
from engine.world import World

NOBODY = -1
"""Owner of a block that is in no block table."""

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Blocks:
    """The pool after a step, one entry a physical block, `[num_blocks]` each.

    A block is *held* (in at least one block table), *evictable* (in none, its content cached) or
    *free* (in none, worth nothing).
    """

    owner: IntArray
    """Ordinal of the (first) request whose table it is in, or `NOBODY`."""
    fill: IntArray
    """Tokens whose keys and values lie in it; of held blocks only."""
    sharers: IntArray
    """Block tables it is in."""
    first_position: IntArray
    """Position of its first token in its request; of held blocks only."""
    cached: Flags
    """Whether the prefix cache knows it."""
    written: Flags
    """Whether the step wrote into it."""
    evicted: Flags
    """Whether the step took it from the prefix cache."""
    block_size: int

    @property
    def is_evictable(self) -> Flags:
        """Cached, and in no block table."""
        in_no_table: Flags = self.sharers == 0
        return self.cached & in_no_table

    @property
    def held(self) -> int:
        """Blocks in at least one block table."""
        return int(np.count_nonzero(self.sharers))

    @property
    def evictable(self) -> int:
        """Blocks in no block table whose content is cached."""
        return int(np.count_nonzero(self.is_evictable))

    @property
    def free(self) -> int:
        """Blocks in no block table that hold nothing of worth."""
        return len(self.owner) - self.held - self.evictable

    @property
    def tokens(self) -> int:
        """Tokens stored in held blocks; what is shared counts once."""
        return int(self.fill.sum())

    @property
    def tail_waste(self) -> float:
        """Share of the held slots that no token fills yet."""
        slots = self.held * self.block_size
        return 1.0 - self.tokens / slots if slots else 0.0

    @classmethod
    def of(cls, world: World, record: StepRecord | None) -> Blocks:
        """The blocks of a world; `written` and `evicted` as the step of `record` did."""
        count, size = world.header.num_blocks, world.header.block_size
        owner = np.full(count, NOBODY, dtype=np.int64)
        fill, sharers, first = (np.zeros(count, dtype=np.int64) for _ in range(3))
        for request_id in reversed(world.running):
            view = world.requests[request_id]
            table = np.asarray(view.block_table, dtype=np.int64)
            starts = np.arange(len(table)) * size
            owner[table] = view.ordinal
            first[table] = starts
            fill[table] = np.maximum(fill[table], np.clip(view.num_computed - starts, 0, size))
            sharers[table] += 1
        cached = np.zeros(count, dtype=bool)
        cached[np.fromiter(world.cached, dtype=np.int64, count=len(world.cached))] = True
        written, evicted = _written(world, record), _evicted(count, record)
        return cls(owner, fill, sharers, first, cached, written, evicted, size)


def _written(world: World, record: StepRecord | None) -> Flags:
    """Blocks that the segments of a step wrote; not those of a request that is gone by now.

    Nor duplicates that were given up at the end of the step, or what their requests have instead.
    """
    written = np.zeros(world.header.num_blocks, dtype=bool)
    size = world.header.block_size
    events = record.events if record else []
    merged = {(e.request_id, e.index) for e in events if isinstance(e, BlockMerged)}
    for segment in record.segments if record else []:
        view = world.view(segment.request_id)
        if view is None or segment.kind is SegmentKind.PAD:
            continue
        first, last = segment.start // size, (segment.start + segment.length - 1) // size
        for index, block in enumerate(view.block_table[first : last + 1], first):
            if (segment.request_id, index) not in merged:
                written[block] = True
    return written


def _evicted(count: int, record: StepRecord | None) -> Flags:
    """Blocks whose cached content a step gave up."""
    evicted = np.zeros(count, dtype=bool)
    for event in record.events if record else []:
        if isinstance(event, BlocksEvicted):
            evicted[event.block_ids] = True
    return evicted


def filler(world: World, block: int) -> tuple[int | None, int]:
    """Who filled a cached block (the ordinal, if it is known still), and its first position."""
    request_id, index = world.cached[block]
    size = world.header.block_size
    view = world.view(request_id)
    # An id may be used again, by a request that has not come so far.
    known = view is not None and (index + 1) * size <= max(view.num_computed, view.high_water)
    return view.ordinal if view is not None and known else None, index * size


def holders(world: World, block: int) -> list[int]:
    """Ordinals of the running requests that have a block in their tables, in their order."""
    views = (world.requests[request_id] for request_id in world.running)
    return [view.ordinal for view in views if block in view.block_table]


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
