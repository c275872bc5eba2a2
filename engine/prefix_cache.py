"""The prefix cache: which full blocks hold which tokens, so that equal beginnings are shared.

A full block is known by a hash chain: the hash of the block before it, its token ids, and at the
beginning the request's salt (the design of vLLM's automatic prefix caching). A hash is a hint and
no proof: a block is shared only if the tokens are equal, block by block from the first one.

An entry's parent is always an entry itself. A block is cached only behind its cached parent, and
whoever holds a block holds its parents, too; tables are given up tail first, so that of the blocks
nobody holds, a child is always taken before its parent.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

from engine.request import Request

HashFunction = Callable[[tuple[int, tuple[int, ...], str | None]], int]
"""(hash of the block before, token ids, salt) to the hash of a block."""


class CachedBlock:
    """The content of one cached block."""

    __slots__ = ("block_id", "children", "key", "parent", "salt", "token_ids")

    def __init__(
        self,
        block_id: int,
        key: int,
        token_ids: tuple[int, ...],
        parent: CachedBlock | None,
        salt: str | None,
    ) -> None:
        self.block_id = block_id
        self.key = key
        self.token_ids = token_ids
        self.parent = parent
        self.salt = salt
        self.children: set[CachedBlock] = set()

    def holds(
        self, token_ids: tuple[int, ...], parent: CachedBlock | None, salt: str | None
    ) -> bool:
        """Whether it is this very content: the proof that an equal hash is not."""
        return self.parent is parent and self.token_ids == token_ids and self.salt == salt


class PrefixCache:
    """Cached blocks by hash and by id. It knows nothing of who holds them.

    Args:
        block_size: tokens in a block.
        hash_function: another one, for tests of collisions.
    """

    def __init__(self, block_size: int, hash_function: HashFunction = hash) -> None:
        self.block_size = block_size
        self.epoch = 0
        """Grows when everything cached becomes invalid: what was computed before stays out."""
        self._hash = hash_function
        self._by_hash: dict[int, CachedBlock] = {}
        self._by_block: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        return len(self._by_block)

    def __contains__(self, block_id: object) -> bool:
        return block_id in self._by_block

    def __iter__(self) -> Iterator[CachedBlock]:
        return iter(self._by_block.values())

    def entry(self, block_id: int) -> CachedBlock | None:
        """What a block holds, if it is cached."""
        return self._by_block.get(block_id)

    def lookup(self, request: Request, gone: Container[int] = ()) -> list[int]:
        """The longest run of cached blocks that a request begins with, in order.

        Never covers its last token, whose logits are wanted. `gone`: blocks that do not count.
        """
        found: list[int] = []
        parent: CachedBlock | None = None
        size, salt = self.block_size, request.params.cache_salt
        for index in range((request.num_tokens - 1) // size):
            entry = self._by_hash.get(self._hash_of(request, index))
            if entry is None or entry.block_id in gone:
                break
            token_ids = tuple(request.token_ids[index * size : (index + 1) * size])
            if not entry.holds(token_ids, parent, salt):
                break
            found.append(entry.block_id)
            parent = entry
        return found

    def insert(self, request: Request, index: int) -> int | None:
        """Make the `index`-th block of a request's table known; the block that holds the content.

        That is another one when the content is cached already (a duplicate); None when the block
        cannot be cached, because its hash stands for other tokens. Its parent must be cached.
        """
        size, salt, table = self.block_size, request.params.cache_salt, request.block_table
        parent = self._by_block[table[index - 1]] if index else None
        key = self._hash_of(request, index)
        token_ids = tuple(request.token_ids[index * size : (index + 1) * size])
        entry = self._by_hash.get(key)
        if entry is not None:
            return entry.block_id if entry.holds(token_ids, parent, salt) else None
        entry = CachedBlock(table[index], key, token_ids, parent, salt)
        self._by_hash[key] = self._by_block[table[index]] = entry
        if parent is not None:
            parent.children.add(entry)
        return table[index]

    def forget(self, block_id: int) -> list[int]:
        """Drop a block and all that continues it; the dropped block ids, children first."""
        entry = self._by_block.get(block_id)
        if entry is None:
            return []
        family = [entry]
        for member in family:
            family.extend(member.children)
        for member in family:
            del self._by_block[member.block_id]
            del self._by_hash[member.key]
        if entry.parent is not None:
            entry.parent.children.discard(entry)
        return [member.block_id for member in reversed(family)]

    def clear(self) -> None:
        """Drop everything."""
        self._by_hash.clear()
        self._by_block.clear()

    def check_integrity(self) -> None:
        """Prove the two maps and the family ties against each other.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        if len(self._by_hash) != len(self._by_block):
            raise AssertionError(f"{len(self._by_hash)} hashes for {len(self._by_block)} blocks")
        for block_id, entry in self._by_block.items():
            if entry.block_id != block_id or self._by_hash.get(entry.key) is not entry:
                raise AssertionError(f"block {block_id} and its hash do not agree")
            parent = entry.parent
            if len(entry.token_ids) != self.block_size:
                raise AssertionError(f"block {block_id} is cached but not full")
            if parent is not None and self._by_block.get(parent.block_id) is not parent:
                raise AssertionError(f"block {block_id} is cached without the one before it")
            if parent is not None and entry not in parent.children:
                raise AssertionError(f"block {block_id} is unknown to the one before it")

    def _hash_of(self, request: Request, index: int) -> int:
        """The chain's hash up to the `index`-th block, computed once a request."""
        known, size = request.block_hashes, self.block_size
        while len(known) <= index:
            start = len(known) * size
            token_ids = tuple(request.token_ids[start : start + size])
            before = known[-1] if known else 0
            known.append(self._hash((before, token_ids, request.params.cache_salt)))
        return known[index]
