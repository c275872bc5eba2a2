"""What each request did in each step, as lanes that grow with the records. No terminal.

A lane keeps runs of equal steps and changes of state, so that a request that waits or decodes for
thousands of steps costs a few numbers; a picture of any window is read off it without folding
anything again. Steps are numbered as in the records, ranges of them are half open.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from enum import IntEnum

import numpy as np

from cbviz.cells import IntArray
from engine.record import (
    Added,
    Admitted,
    Cancelled,
    Event,
    Failed,
    Finished,
    Preempted,
    PrefixHit,
    SegmentKind,
    StepRecord,
)

LEVELS = 8
"""How many heights the size of a prefill chunk is drawn in, as a share of the token budget."""
FOREVER = 2**62
TRIM_EVERY = 512
"""Runs of a lane after which it forgets those of steps that are not kept any more."""


class Mark(IntEnum):
    """What a lane shows at a step. Where several hold, or steps share a column, the highest wins.

    `PREFILL` to `PREFILL + LEVELS - 1` are one kind: how much of the budget the chunk took.
    """

    NONE = 0
    WAITING = 1
    WAITING_AGAIN = 2
    """It waits to be recomputed after a preemption."""
    IDLE = 3
    """It is admitted, and nothing of it ran."""
    DECODE = 4
    PREFILL = 5
    HIT = PREFILL + LEVELS
    """It was admitted, and the prefix cache had a beginning of it."""
    PREEMPTED = HIT + 1
    CANCELLED = HIT + 2
    FAILED = HIT + 3
    FINISHED = HIT + 4


def level_of(tokens: int, budget: int) -> int:
    """The height of a chunk, 1 to `LEVELS`: its share of the token budget, rounded up."""
    return max(1, min(LEVELS, -(-LEVELS * tokens // max(1, budget))))


def prefill_mark(tokens: int, budget: int) -> int:
    """The mark of a chunk of so many tokens."""
    return Mark.PREFILL + level_of(tokens, budget) - 1


class Lane:
    """All that one request did, in the steps that are kept.

    Args:
        request_id: untrusted; an id that is used again gets a lane of its own.
        ordinal: how many requests were added before it: its letter and tint.
        step: the step that took it in.
    """

    __slots__ = (
        "_amounts", "_ends", "_marks", "_starts", "_states", "_states_from", "added", "ended",
        "failed", "index", "ordinal", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, ordinal: int, step: int) -> None:
        self.request_id = request_id
        self.ordinal = ordinal
        self.added = step
        self.ended = FOREVER
        """The step that it ended in."""
        self.failed = False
        self.index = 0
        self._starts = array("q")
        self._ends = array("q")
        self._marks = array("B")
        self._amounts = array("q")
        self._states_from = array("q", [step])
        self._states = array("B", [Mark.WAITING])

    @property
    def live(self) -> bool:
        """It has not ended yet."""
        return self.ended == FOREVER

    def ran(self, step: int, mark: int, amount: int, oldest: int) -> None:
        """Something of it ran, or happened to it, in the newest step."""
        goes_on = mark < Mark.HIT and bool(self._ends) and self._ends[-1] == step
        if goes_on and (self._marks[-1], self._amounts[-1]) == (mark, amount):
            self._ends[-1] = step + 1
            return
        self._starts.append(step)
        self._ends.append(step + 1)
        self._marks.append(mark)
        self._amounts.append(amount)
        if len(self._starts) % TRIM_EVERY == 0:
            self._trim(oldest)

    def becomes(self, step: int, state: Mark) -> None:
        """From this step on it waits, idles, … where nothing of it ran."""
        if self._states_from[-1] == step:
            self._states[-1] = state
            return
        self._states_from.append(step)
        self._states.append(state)

    def end(self, step: int, mark: Mark) -> None:
        """It ended in this step."""
        self.ended = step
        self.ran(step, mark, 0, 0)
        self.becomes(step + 1, Mark.NONE)

    def runs(self, first: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """`(start, end, mark, amount in each step)` of what ran or happened in a window."""
        for index in range(bisect_right(self._ends, first), len(self._starts)):
            if self._starts[index] >= end:
                return
            yield (
                max(first, self._starts[index]),
                min(end, self._ends[index]),
                self._marks[index],
                self._amounts[index],
            )

    def states(self, first: int, end: int) -> Iterator[tuple[int, int, int]]:
        """`(start, end, state)` of what holds in a window wherever nothing ran."""
        for index in range(max(0, bisect_right(self._states_from, first) - 1), len(self._states)):
            start = self._states_from[index]
            last = index + 1 == len(self._states)
            until = FOREVER if last else self._states_from[index + 1]
            if start >= end:
                return
            yield max(first, start), min(end, until), self._states[index]

    def marks(self, first: int, columns: int, per: int, newest: int) -> IntArray:
        """One mark a column `[columns]`: the highest of its `per` steps, from step `first` on."""
        marks = np.zeros(columns, dtype=np.int64)
        end = min(first + columns * per, newest + 1)
        for start, until, mark in self.states(first, end):
            part = marks[(start - first) // per : (until - 1 - first) // per + 1]
            np.maximum(part, mark, out=part)
        for start, until, mark, _ in self.runs(first, end):
            part = marks[(start - first) // per : (until - 1 - first) // per + 1]
            np.maximum(part, mark, out=part)
        return marks

    def notable(self, first: int, end: int, newest: int) -> int:
        """The step of a window that its mark speaks of; the first one if there are several."""
        end = min(end, newest + 1)
        marks = self.marks(first, max(1, end - first), 1, newest)
        return first + int(marks.argmax())

    def _trim(self, oldest: int) -> None:
        gone = bisect_right(self._ends, oldest)
        for runs in (self._starts, self._ends, self._marks, self._amounts):
            del runs[:gone]
        gone = max(0, bisect_right(self._states_from, oldest) - 1)
        del self._states_from[:gone], self._states[:gone]


class Timeline:
    """The lanes of all requests that did something in the steps kept, in the order of arrival."""

    def __init__(self) -> None:
        self.oldest = 0
        self.newest = -1
        self.lanes: list[Lane] = []
        self._num_added = 0
        self._by_id: dict[str, Lane] = {}
        self._added = array("q")
        self._ended = array("q")
        self._num_dead = 0
        self._order: list[Lane] = []
        """Lanes that have ended, the first to end first."""

    def append(self, record: StepRecord) -> None:
        """Take in the next step, which follows from those before."""
        step = self.newest = record.step
        marks: list[tuple[Lane, Mark]] = []
        for event in record.events:
            self._take(event, step, marks)
        for segment in record.segments:
            lane = self._by_id.get(segment.request_id)
            if lane is None or segment.kind is SegmentKind.PAD:
                continue
            decode = segment.kind is SegmentKind.DECODE
            mark = Mark.DECODE if decode else prefill_mark(segment.length, record.token_budget)
            lane.ran(step, mark, segment.length, self.oldest)
        for lane, mark in marks:
            if mark < Mark.CANCELLED:
                lane.ran(step, mark, 0, self.oldest)
            else:
                lane.end(step, mark)
                self._ended[lane.index] = step
                self._order.append(lane)

    def drop_before(self, oldest: int) -> None:
        """Steps before this one are not kept any more."""
        self.oldest = oldest
        while self._num_dead < len(self._order) and self._order[self._num_dead].ended < oldest:
            self._num_dead += 1
        # Now and then, so that a long queue is not gone through at every step.
        if self._num_dead > 64 + len(self.lanes) // 4:
            self._compact()

    def lane_of(self, request_id: str) -> Lane | None:
        """The lane of a request; of an id used again, the last one."""
        return self._by_id.get(request_id)

    def seen(self, first: int, end: int) -> list[int]:
        """Indices of the lanes that have something in a window of steps, from the first on."""
        if not self.lanes:
            return []
        first = max(first, self.oldest)
        added = np.frombuffer(self._added, dtype=np.int64)
        ended = np.frombuffer(self._ended, dtype=np.int64)
        return np.flatnonzero((added < end) & (ended >= first)).tolist()

    def _take(self, event: Event, step: int, marks: list[tuple[Lane, Mark]]) -> None:
        if isinstance(event, Added):
            self._add(Lane(event.request_id, self._num_added, step))
            return
        if not isinstance(event, Admitted | PrefixHit | Preempted | Finished | Cancelled | Failed):
            return
        lane = self._by_id.get(event.request_id)
        if lane is None:
            return
        match event:
            case Admitted():
                lane.becomes(step, Mark.IDLE)
            case PrefixHit():
                marks.append((lane, Mark.HIT))
            case Preempted():
                lane.becomes(step, Mark.WAITING_AGAIN)
                marks.append((lane, Mark.PREEMPTED))
            case Failed():
                lane.failed = True
            case Finished():
                marks.append((lane, Mark.FAILED if lane.failed else Mark.FINISHED))
            case Cancelled():
                marks.append((lane, Mark.CANCELLED))

    def _add(self, lane: Lane) -> None:
        self._num_added += 1
        lane.index = len(self.lanes)
        self.lanes.append(lane)
        self._added.append(lane.added)
        self._ended.append(FOREVER)
        self._by_id[lane.request_id] = lane

    def _compact(self) -> None:
        for lane in self._order[: self._num_dead]:
            if self._by_id.get(lane.request_id) is lane:
                del self._by_id[lane.request_id]
        del self._order[: self._num_dead]
        self._num_dead = 0
        self.lanes = [lane for lane in self.lanes if lane.ended >= self.oldest]
        self._added = array("q", [lane.added for lane in self.lanes])
        self._ended = array("q", [lane.ended for lane in self.lanes])
        for index, lane in enumerate(self.lanes):
            lane.index = index


def lane_words(lane: Lane, first: int, end: int, newest: int) -> str:
    """What a request did in some steps, in words: `prefill 29 tokens, decode 3 tokens`."""
    end = min(end, newest + 1)
    if end <= lane.added or first > lane.ended:
        return "not there yet" if end <= lane.added else "ended before"
    prefill = decode = 0
    happened: list[str] = []
    told: set[int] = set()
    for start, until, mark, amount in lane.runs(first, end):
        told.update(range(start, until))
        if mark >= Mark.HIT:
            happened.append(_HAPPENED[Mark(mark)])
        elif mark == Mark.DECODE:
            decode += amount * (until - start)
        else:
            prefill += amount * (until - start)
    waited = [
        _STATES[Mark(state)]
        for start, until, state in lane.states(first, end)
        if state and not told.issuperset(range(start, until))
    ]
    parts = list(dict.fromkeys(waited))
    if prefill:
        parts.append(f"prefill {_tokens(prefill)}")
    if decode:
        parts.append(f"decode {_tokens(decode)}")
    parts += dict.fromkeys(happened)
    return ", ".join(parts)


_HAPPENED = {
    Mark.HIT: "prefix cache hit", Mark.PREEMPTED: "preempted", Mark.CANCELLED: "cancelled",
    Mark.FAILED: "failed", Mark.FINISHED: "finished",
}  # fmt: skip
_STATES = {
    Mark.WAITING: "waiting", Mark.WAITING_AGAIN: "waiting to be recomputed",
    Mark.IDLE: "admitted, nothing of it runs",
}  # fmt: skip


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"
