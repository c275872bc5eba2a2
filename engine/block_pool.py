"""The pool of physical KV-cache blocks: who holds which, and in which order free ones are taken.

No tensors here: a block is a number. Blocks are taken from the head of the free queue and given
back tail first, so that the beginning of a sequence is reused last.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from engine.free_queue import FreeQueue


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Ref-counted blocks `0..num_blocks-1` of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = FreeQueue(num_blocks)
        self.ref_counts = array("i", bytes(4 * num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks in no block table."""
        return len(self.free)

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - len(self.free)

    def take(self, block_ids: Iterable[int]) -> None:
        """Hold these free blocks.

        Raises:
            ValueError: one of them is not free.
        """
        for block_id in block_ids:
            self.free.remove(block_id)
            self.ref_counts[block_id] = 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, in order; those without any become free."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                self.free.append(block_id)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the pool against the block tables of all requests.

        Raises:
            AssertionError: a count or a link is wrong; the message says which.
        """
        held = Counter(block_id for table in tables for block_id in table)
        free = list(self.free)
        if len(free) != len(set(free)) or len(free) != len(self.free):
            raise AssertionError("the free queue's links are broken")
        if set(free) & held.keys():
            raise AssertionError(f"blocks both free and held: {sorted(set(free) & held.keys())}")
        if len(free) + len(held) != self.num_blocks:
            raise AssertionError(f"{len(free)} free + {len(held)} held != {self.num_blocks} blocks")
        for block_id in range(self.num_blocks):
            if self.ref_counts[block_id] != held[block_id]:
                raise AssertionError(
                    f"block {block_id}: ref count {self.ref_counts[block_id]}, "
                    f"but in {held[block_id]} tables"
                )


class PoolDraft:
    """The pool as it would be while a step is planned; the pool itself is left alone.

    Hands out the very block ids that the pool will, in time proportional to the blocks asked for.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._head = iter(pool.free)
        self._given_back: deque[int] = deque()
        self._dropped: Counter[int] = Counter()
        self.available = pool.num_free
        """Blocks that `take` can still hand out."""

    def take(self, count: int) -> list[int]:
        """The next `count` block ids; `count` is at most `available`."""
        self.available -= count
        return [self._next() for _ in range(count)]

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back references, in order."""
        for block_id in block_ids:
            self._dropped[block_id] += 1
            if self._pool.ref_counts[block_id] <= self._dropped[block_id]:
                del self._dropped[block_id]
                self._given_back.append(block_id)
                self.available += 1

    def _next(self) -> int:
        for block_id in self._head:
            return block_id
        return self._given_back.popleft()
