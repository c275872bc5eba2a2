"""The queue of waiting requests: ordered by level, then by arrival; every change in O(1).

The scheduler's queue and the fold over its records use the same structure. Under a policy without
levels there is one level; the number of levels in use is taken to be small.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator


class WaitingQueue:
    """Request ids, lower levels first."""

    __slots__ = ("_level_of", "_levels", "_order")

    def __init__(self) -> None:
        # OrderedDict: popping from the front of a plain dict makes the next look at it slower.
        self._levels: dict[int, OrderedDict[str, None]] = {}
        self._order: list[int] = []
        self._level_of: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._level_of

    def __iter__(self) -> Iterator[str]:
        """Request ids from head to tail."""
        for level in self._order:
            yield from self._levels[level]

    def copy(self) -> WaitingQueue:
        """An independent queue in the same order."""
        twin = WaitingQueue()
        twin._levels = {level: queue.copy() for level, queue in self._levels.items()}
        twin._order = list(self._order)
        twin._level_of = dict(self._level_of)
        return twin

    def append(self, request_id: str, level: int) -> None:
        """Put a request behind all others of its level.

        Raises:
            ValueError: it waits already.
        """
        if request_id in self._level_of:
            raise ValueError(f"{request_id!r} waits already")
        queue = self._levels.get(level)
        if queue is None:
            queue = self._levels[level] = OrderedDict()
            insort(self._order, level)
        queue[request_id] = None
        self._level_of[request_id] = level

    def prepend(self, request_id: str, level: int) -> None:
        """Put a request before all others of its level.

        Raises:
            ValueError: it waits already.
        """
        self.append(request_id, level)
        self._levels[level].move_to_end(request_id, last=False)

    def remove(self, request_id: str) -> None:
        """Take a request out, wherever it stands.

        Raises:
            ValueError: it does not wait.
        """
        if request_id not in self._level_of:
            raise ValueError(f"{request_id!r} does not wait")
        level = self._level_of.pop(request_id)
        queue = self._levels[level]
        del queue[request_id]
        if not queue:
            del self._levels[level]
            del self._order[bisect_left(self._order, level)]

    def refill(self, entries: Iterable[tuple[str, int]]) -> None:
        """Begin anew with these requests and levels, each behind the ones before it."""
        self._levels, self._order, self._level_of = {}, [], {}
        for request_id, level in entries:
            self.append(request_id, level)
