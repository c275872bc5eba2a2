"""The packed batch of one step: every scheduled token in one row, and where its keys lie."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from engine.mask import IntArray, PackedAxes
from engine.record import Segment


class Ragged:
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
        self.ragged = Ragged(segments, tables, block_size)
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
    def key_slots(self) -> list[torch.Tensor]:
        """For each segment, the slots of all its keys in order of position."""
        return [self._tensor(slots) for slots in self._key_slots]

    @cached_property
    def packed_key_slots(self) -> torch.Tensor:
        """`[n_K]` the keys of all segments side by side."""
        return self._tensor(_joined(self._key_slots))

    @cached_property
    def mask(self) -> torch.Tensor:
        """`[n_Q, n_K]` boolean: True = this query sees this key."""
        return torch.from_numpy(PackedAxes(self.segments).mask()).to(self.device)

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)


def slots_of(table: Sequence[int], block_size: int) -> IntArray:
    """Slots of a block table in order of position, `[len(table) * block_size]`."""
    blocks = np.array(table, dtype=np.int64)
    offsets = np.arange(block_size, dtype=np.int64)
    return (blocks[:, None] * block_size + offsets).reshape(-1)


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
