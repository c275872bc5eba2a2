"""The pool of physical KV-cache blocks: who holds which, and in which order others are taken.

No tensors here: a block is a number. It is in one of three states: *held* (in at least one block
table), *evictable* (in none, but the prefix cache knows its content) or *free* (in none, and worth
nothing). Free blocks are taken first, first freed first; then evictable ones, least recently used
first. Tables are given back tail first, so that the beginning of a sequence is lost last.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from engine.free_queue import FreeQueue
from engine.prefix_cache import HashFunction, PrefixCache


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


class BlockPool:
    """Ref-counted blocks `0..num_blocks-1` of `block_size` tokens each.

    Args:
        num_blocks: physical blocks.
        block_size: tokens in a block.
        hash_function: that of the prefix cache; another one for tests of collisions.
    """

    def __init__(
        self, num_blocks: int, block_size: int, hash_function: HashFunction = hash
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.free = FreeQueue(num_blocks)
        self.evictable = FreeQueue(num_blocks, empty=True)
        self.ref_counts = array("i", bytes(4 * num_blocks))
        self.cache = PrefixCache(block_size, hash_function)

    @property
    def num_free(self) -> int:
        """Blocks in no block table and without cached content."""
        return len(self.free)

    @property
    def num_evictable(self) -> int:
        """Blocks in no block table whose content is cached."""
        return len(self.evictable)

    @property
    def num_held(self) -> int:
        """Blocks in at least one block table."""
        return self.num_blocks - len(self.free) - len(self.evictable)

    def take(self, block_ids: Iterable[int]) -> None:
        """Hold these free blocks.

        Raises:
            ValueError: one of them is not free.
        """
        for block_id in block_ids:
            self.free.remove(block_id)
            self.ref_counts[block_id] = 1

    def share(self, block_ids: Iterable[int]) -> None:
        """Hold these cached or held blocks once more."""
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self.evictable.remove(block_id)
            self.ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> None:
        """Drop one reference to each block, in order; those without any become free, or
        evictable where the cache knows them."""
        for block_id in block_ids:
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                queue = self.evictable if block_id in self.cache else self.free
                queue.append(block_id)

    def uncache(self, block_ids: Iterable[int]) -> list[int]:
        """Make the cache forget blocks and whatever continues them; all those forgotten."""
        gone = [gone for block_id in block_ids for gone in self.cache.forget(block_id)]
        for block_id in gone:
            if block_id in self.evictable:
                self.evictable.remove(block_id)
                self.free.append(block_id)
        return gone

    def reset_cache(self) -> int:
        """Make the cache forget everything; how many blocks it knew."""
        known = len(self.cache)
        self.cache.clear()
        for block_id in list(self.evictable):
            self.evictable.remove(block_id)
            self.free.append(block_id)
        return known

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Prove the pool against the block tables of all requests.

        Raises:
            AssertionError: a count or a link is wrong; the message says which.
        """
        held = Counter(block_id for table in tables for block_id in table)
        states: dict[int, str] = {}
        for name, queue in (("free", self.free), ("evictable", self.evictable)):
            queue.check_integrity()
            for block_id in queue:
                if block_id in states or block_id in held:
                    raise AssertionError(f"block {block_id} is in two states, one of them {name}")
                states[block_id] = name
        if len(states) + len(held) != self.num_blocks:
            raise AssertionError(
                f"{len(self.free)} free + {len(self.evictable)} evictable + {len(held)} held "
                f"!= {self.num_blocks} blocks"
            )
        for block_id in range(self.num_blocks):
            if self.ref_counts[block_id] != held[block_id]:
                raise AssertionError(
                    f"block {block_id}: ref count {self.ref_counts[block_id]}, "
                    f"but in {held[block_id]} tables"
                )
            if block_id not in held and (states[block_id] == "evictable") != (
                block_id in self.cache
            ):
                raise AssertionError(f"block {block_id} is {states[block_id]}; the cache differs")
        self.cache.check_integrity()


class PoolDraft:
    """The pool as it would be while a step is planned; the pool itself is left alone.

    Everything takes time proportional to the blocks asked for.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._returned: deque[int] = deque()
        """Free blocks that were given back in this step."""
        self._returned_cached: deque[int] = deque()
        self._next_free: Iterator[int] = chain(pool.free, _drain(self._returned))
        self._next_evictable: Iterator[int] = chain(pool.evictable, _drain(self._returned_cached))
        self._shared: Counter[int] = Counter()
        self._dropped: Counter[int] = Counter()
        self.taken: set[int] = set()
        """Blocks handed out; what they held is gone."""
        self.available = pool.num_free + pool.num_evictable
        """Blocks that `take` can still hand out: free and evictable ones."""

    def take(self, count: int) -> tuple[list[int], list[int]]:
        """The next `count` block ids, and which of them the cache has to forget.

        `count` is at most `available`.
        """
        self.available -= count
        blocks = [self._next() for _ in range(count)]
        cache = self._pool.cache
        evicted = [block for block in blocks if block in cache and block not in self.taken]
        self.taken.update(blocks)
        return blocks, evicted

    def idle(self, block_ids: Iterable[int]) -> int:
        """How many of these cached blocks nobody holds: sharing them takes from `available`."""
        counts, shared = self._pool.ref_counts, self._shared
        return sum(1 for block in block_ids if counts[block] == 0 and not shared[block])

    def share(self, block_ids: Sequence[int]) -> None:
        """Hold these cached or held blocks once more."""
        self.available -= self.idle(block_ids)
        self._shared.update(block_ids)

    def release(self, block_ids: Iterable[int]) -> None:
        """Give back references, in order."""
        for block_id in block_ids:
            self._dropped[block_id] += 1
            references = self._pool.ref_counts[block_id] + self._shared[block_id]
            if references <= self._dropped[block_id]:
                del self._dropped[block_id]
                cached = block_id in self._pool.cache and block_id not in self.taken
                (self._returned_cached if cached else self._returned).append(block_id)
                self.available += 1

    def _next(self) -> int:
        for block_id in self._next_free:
            return block_id
        # Free blocks given back later come before evictable ones again.
        self._next_free = iter(_drain(self._returned))
        return next(block for block in self._next_evictable if not self._shared[block])


def _drain(queue: deque[int]) -> Iterator[int]:
    while queue:
        yield queue.popleft()
