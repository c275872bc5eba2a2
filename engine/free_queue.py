"""The queue of free blocks: first in, first out, with removal from the middle in O(1).

A doubly linked list held in two flat integer arrays, so that it is small, quick to copy and needs
no object a block. The engine's pool and the fold over its records use the same structure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

_OUT = -2
"""In `_next`: the block is not in the queue."""


class FreeQueue:
    """Block ids `0..num_blocks-1` in a queue, at first all of them in order, or none."""

    __slots__ = ("_length", "_next", "_previous", "_size")

    def __init__(self, num_blocks: int, *, empty: bool = False) -> None:
        self._size = num_blocks
        # Index `num_blocks` is the sentinel: its next is the head, its previous the tail.
        self._next = array("i", range(1, num_blocks + 1)) + array("i", [0])
        self._previous = array("i", [num_blocks]) + array("i", range(num_blocks))
        self._length = num_blocks
        if empty:
            self._next = array("i", [_OUT]) * num_blocks + array("i", [num_blocks])
            self._previous[num_blocks] = num_blocks
            self._length = 0

    def __len__(self) -> int:
        return self._length

    def __contains__(self, block_id: int) -> bool:
        return bool(self._next[block_id] != _OUT)

    def __iter__(self) -> Iterator[int]:
        """Block ids from head (taken next) to tail."""
        block_id = self._next[self._size]
        while block_id != self._size:
            yield block_id
            block_id = self._next[block_id]

    def copy(self) -> FreeQueue:
        """An independent queue in the same order."""
        twin = object.__new__(FreeQueue)
        twin._size, twin._length = self._size, self._length
        twin._next, twin._previous = self._next[:], self._previous[:]
        return twin

    def append(self, block_id: int) -> None:
        """Put a block at the tail.

        Raises:
            ValueError: it is in the queue already (freed twice).
        """
        if block_id in self:
            raise ValueError(f"block {block_id} is free already")
        tail = self._previous[self._size]
        self._next[tail] = block_id
        self._previous[block_id] = tail
        self._next[block_id] = self._size
        self._previous[self._size] = block_id
        self._length += 1

    def extend(self, block_ids: Iterable[int]) -> None:
        """Append several blocks in order."""
        for block_id in block_ids:
            self.append(block_id)

    def remove(self, block_id: int) -> None:
        """Take a block out, wherever it stands.

        Raises:
            ValueError: it is not in the queue (taken twice).
        """
        if block_id not in self:
            raise ValueError(f"block {block_id} is not free")
        after, before = self._next[block_id], self._previous[block_id]
        self._next[before] = after
        self._previous[after] = before
        self._next[block_id] = _OUT
        self._length -= 1

    def check_integrity(self) -> None:
        """Prove the links in both directions.

        Raises:
            AssertionError: a link is wrong, or the count is.
        """
        block_id, count = self._size, 0
        while True:
            after = self._next[block_id]
            if after == _OUT or self._previous[after] != block_id or count > self._length:
                raise AssertionError(f"the queue's links are broken at block {block_id}")
            if after == self._size:
                break
            block_id, count = after, count + 1
        if count != self._length:
            raise AssertionError(f"the queue counts {self._length} blocks and links {count}")
