"""The packed batch of one step: every scheduled token in one row, and where its keys lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from engine.mask import IntArray, PackedAxes
from engine.record import Segment


class SegmentArrays:
    """The segments of a step as arrays, for a kernel: int64, on the CPU.

    `lengths`, `contexts`, `first_rows`, `table_starts`: `[num_segments]`. `tables`: the block
    tables one after the other; that of a segment begins at its `table_starts`.
    """

    def __init__(
        self, segments: Sequence[Segment], tables: Sequence[Sequence[int]], block_size: int
    ) -> None:
        self.block_size = block_size
        self.lengths: IntArray = np.array([s.length for s in segments], dtype=np.int64)
        self.contexts: IntArray = np.array([s.context for s in segments], dtype=np.int64)
        self.first_rows: IntArray = np.cumsum(self.lengths) - self.lengths
        sizes = np.array([len(table) for table in tables], dtype=np.int64)
        self.table_starts: IntArray = np.cumsum(sizes) - sizes
        self.tables: IntArray = np.fromiter(
            itertools.chain.from_iterable(tables), np.int64, int(sizes.sum())
        )
        arrays = (self.lengths, self.contexts, self.first_rows, self.table_starts, self.tables)
        self.addresses = (len(segments), *(int(array.ctypes.data) for array in arrays))
        """The number of segments, then where each array lies, in the order above."""


class PackedBatch:
    """The tensors of one step, on the model's device.

    Args:
        segments: what runs, in packed order.
        tables: the block table of each segment's request, long enough for its new tokens.
        token_ids: `[n_Q]`.
        block_size: tokens in a block.
        device: where the tensors are to lie.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        tables: Sequence[Sequence[int]],
        token_ids: Sequence[int],
        block_size: int,
        device: torch.device,
    ) -> None:
        self.segments = segments
        self.device = device
        self.block_size = block_size
        self._tables = tables
        self._tiles: dict[int, torch.Tensor] = {}
        self._masks: dict[int, torch.Tensor] = {}
        self._key_slots = [
            slots_of(table, block_size)[: segment.context + segment.length]
            for segment, table in zip(segments, tables, strict=True)
        ]
        starts = [segment.start for segment in segments]
        positions = _joined(
            [np.arange(s, s + segment.length) for s, segment in zip(starts, segments, strict=True)]
        )
        slots = _joined(
            [
                keys[segment.context :]
                for keys, segment in zip(self._key_slots, segments, strict=True)
            ]
        )
        ends = np.cumsum([segment.length for segment in segments], dtype=np.int64)
        samples = np.array([segment.samples for segment in segments], dtype=bool)
        self.input_ids = self._tensor(np.array(token_ids, dtype=np.int64))[None]
        """`[1, n_Q]`"""
        self.position_ids = self._tensor(positions)[None]
        """`[1, n_Q]` position of each token in its request"""
        self.slots = self._tensor(slots)
        """`[n_Q]` slot that takes the token's key and value: `block * block_size + offset`"""
        self.sample_rows = self._tensor(ends[samples] - 1 if len(segments) else ends)
        """`[n_S]` rows whose logits are wanted"""

    @cached_property
    def arrays(self) -> SegmentArrays:
        """The segments and their tables, for a kernel on the CPU."""
        return SegmentArrays(self.segments, self._tables, self.block_size)

    @cached_property
    def key_slots(self) -> list[torch.Tensor]:
        """For each segment, the slots of all its keys in order of position."""
        return [self._tensor(slots) for slots in self._key_slots]

    @cached_property
    def packed_key_slots(self) -> torch.Tensor:
        """`[n_K]` the keys of all segments side by side."""
        return self._tensor(_joined(self._key_slots))

    @cached_property
    def block_tables(self) -> torch.Tensor:
        """`[n_segments, longest]` int32: the blocks of each segment's request, then zeros."""
        padded = np.zeros((len(self._tables), max(map(len, self._tables), default=0)), np.int32)
        for row, table in zip(padded, self._tables, strict=True):
            row[: len(table)] = table
        return torch.from_numpy(padded).to(self.device)

    @cached_property
    def ragged(self) -> torch.Tensor:
        """`[3, n_segments]` int32: first row, cached tokens and new tokens of each segment."""
        lengths = [segment.length for segment in self.segments]
        firsts = np.cumsum([0, *lengths])[:-1]
        contexts = [segment.context for segment in self.segments]
        return torch.from_numpy(np.array([firsts, contexts, lengths], np.int32)).to(self.device)

    def tiles(self, queries: int) -> torch.Tensor:
        """`[2, n_tiles]` int32: segment and first query in it, of tiles of so many queries."""
        if queries not in self._tiles:
            pairs = [
                (index, first)
                for index, segment in enumerate(self.segments)
                for first in range(0, segment.length, queries)
            ]
            tiles = np.array(pairs, np.int32).reshape(-1, 2).T
            self._tiles[queries] = torch.from_numpy(tiles.copy()).to(self.device)
        return self._tiles[queries]

    @cached_property
    def longest_segment(self) -> int:
        """New tokens of the request that has the most of them."""
        return max((segment.length for segment in self.segments), default=0)

    @cached_property
    def most_keys(self) -> int:
        """Keys of the request that has the most of them."""
        return max((segment.context + segment.length for segment in self.segments), default=0)

    def mask(self, window: int = 0) -> torch.Tensor:
        """`[n_Q, n_K]` boolean: True = this query sees this key. One a window, whatever the layers.

        `window`: tokens that a query sees, itself among them; 0 = all before it.
        """
        if window not in self._masks:
            mask = PackedAxes(self.segments).mask(window=window)
            self._masks[window] = torch.from_numpy(mask).to(self.device)
        return self._masks[window]

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def slots_of(table: Sequence[int], block_size: int) -> IntArray:
    """Slots of a block table in order of position, `[len(table) * block_size]`."""
    blocks = np.array(table, dtype=np.int64)
    offsets = np.arange(block_size, dtype=np.int64)
    return (blocks[:, None] * block_size + offsets).reshape(-1)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
