"""Where each event stands in the records, so that a log of them can be filtered and drawn.

Nothing of an event is copied: a few numbers say where it is, what kind it is and which request it
is of. No terminal.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from enum import Enum

import msgspec
import numpy as np

from cbviz.cells import IntArray
from engine.record import (
    Added,
    Admitted,
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Cancelled,
    Event,
    Failed,
    Finished,
    Forked,
    KnobChanged,
    Preempted,
    PrefixHit,
    Refused,
    StepRecord,
)

NOBODY = -1
"""In place of an ordinal: the event is of no request that was ever queued."""

KINDS: tuple[type, ...] = (
    Added, Refused, Finished, Cancelled, Failed, Admitted, Forked, Preempted, PrefixHit,
    BlocksCached, BlockMerged, BlocksEvicted, BlocksUncached, CacheReset, BlocksAllocated,
    BlocksFreed, BlockCopied, KnobChanged,
)  # fmt: skip
_CODES = {kind: code for code, kind in enumerate(KINDS)}
_BLOCKS = (BlocksAllocated, BlocksFreed, BlockCopied)
_CACHE = (PrefixHit, BlocksCached, BlockMerged, BlocksEvicted, BlocksUncached, CacheReset)


class Filter(Enum):
    """Kinds of events that are shown together; the value names them."""

    MAIN = "all but blocks"
    ALL = "all"
    REQUESTS = "come and gone"
    SCHEDULING = "scheduling"
    CACHE = "prefix cache"
    BLOCKS = "blocks"
    SETTINGS = "settings"

    @property
    def next(self) -> Filter:
        """The one that comes after it, round and round."""
        filters = list(Filter)
        return filters[(filters.index(self) + 1) % len(filters)]


FILTERS: dict[Filter, tuple[type, ...]] = {
    Filter.MAIN: tuple(kind for kind in KINDS if kind not in (*_BLOCKS, BlocksCached)),
    Filter.ALL: KINDS,
    Filter.REQUESTS: (Added, Refused, Finished, Cancelled, Failed),
    Filter.SCHEDULING: (Admitted, Forked, Preempted),
    Filter.CACHE: _CACHE,
    Filter.BLOCKS: _BLOCKS,
    Filter.SETTINGS: (KnobChanged,),
}


class Entry(msgspec.Struct, frozen=True):
    """One event: the step it belongs to, itself, whose it is, and the request that it names.

    `number` counts all events of the run. `ordinal` and `other` count the requests added before
    that one, `NOBODY` where there is none.
    """

    number: int
    step: int
    event: Event
    ordinal: int
    other: int


class EventLog:
    """The events of the steps that are kept, in the order in which they happened."""

    def __init__(self) -> None:
        self.dropped = 0
        """Events that are not kept any more: the number of the first that is."""
        self._records: deque[StepRecord] = deque()
        self._steps = array("q")
        self._places = array("q")
        self._codes = array("q")
        self._ordinals = array("q")
        self._others = array("q")
        self._by_id: dict[str, int] = {}
        self._ended: deque[tuple[int, str, int]] = deque()
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._steps)

    def append(self, record: StepRecord) -> None:
        """Take in the events of the next step."""
        self._records.append(record)
        for place, event in enumerate(record.events):
            if isinstance(event, Added):
                self._by_id[event.request_id] = self._num_added
                self._num_added += 1
            ordinal = self._ordinal(getattr(event, "request_id", ""))
            self._steps.append(record.step)
            self._places.append(place)
            self._codes.append(_CODES[type(event)])
            self._ordinals.append(NOBODY if isinstance(event, Refused) else ordinal)
            self._others.append(self._ordinal(other_in(event)))
            if isinstance(event, Finished | Cancelled):
                self._ended.append((record.step, event.request_id, ordinal))

    def drop_before(self, oldest: int) -> None:
        """Steps before this one are not kept any more."""
        while self._records and self._records[0].step < oldest:
            self._records.popleft()
        count = bisect_left(self._steps, oldest)
        for column in (self._steps, self._places, self._codes, self._ordinals, self._others):
            del column[:count]
        self.dropped += count
        while self._ended and self._ended[0][0] < oldest:
            _, request_id, ordinal = self._ended.popleft()
            if self._by_id.get(request_id) == ordinal:
                del self._by_id[request_id]

    def numbers(self, kinds: Filter, request_id: str | None = None) -> IntArray:
        """The numbers of the events of some kinds, and of one request if it is named."""
        if not self._steps:
            return np.zeros(0, dtype=np.int64)
        codes = np.frombuffer(self._codes, dtype=np.int64)
        wanted = np.zeros(len(KINDS), dtype=bool)
        wanted[[_CODES[kind] for kind in FILTERS[kinds]]] = True
        chosen = wanted[codes]
        if request_id is not None:
            ordinal = self._ordinal(request_id)
            own = np.frombuffer(self._ordinals, dtype=np.int64) == ordinal
            other = np.frombuffer(self._others, dtype=np.int64) == ordinal
            chosen &= (own | other) & (ordinal != NOBODY)
        return np.flatnonzero(chosen) + self.dropped

    def upto(self, step: int) -> int:
        """The number after that of the last event of a step and those before it."""
        return self.dropped + bisect_left(self._steps, step + 1)

    def entry(self, number: int) -> Entry:
        """One event.

        Raises:
            IndexError: it is not kept.
        """
        index = number - self.dropped
        if not 0 <= index < len(self._steps):
            raise IndexError(f"event {number} is not kept")
        step = self._steps[index]
        event = self._records[step - self._records[0].step].events[self._places[index]]
        return Entry(number, step, event, self._ordinals[index], self._others[index])

    def _ordinal(self, request_id: str) -> int:
        return self._by_id.get(request_id, NOBODY) if request_id else NOBODY


def other_in(event: Event) -> str:
    """The request that an event names beside its own, or empty."""
    match event:
        case Added(fork_of=other) | Forked(parent=other) | Preempted(by=other):
            return other
        case _:
            return ""


def renamed(event: Event, other: str) -> Event:
    """The event with another name for the request that it names beside its own."""
    match event:
        case Added():
            return msgspec.structs.replace(event, fork_of=other)
        case Forked():
            return msgspec.structs.replace(event, parent=other)
        case Preempted():
            return msgspec.structs.replace(event, by=other)
        case _:
            return event
