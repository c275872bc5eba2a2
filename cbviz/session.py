"""What the explorer knows: the history of records, where one looks at it, and how the engine does.

Plain Python, no terminal. Messages come in by `ingest`, the one thing that goes out is `frame()`.
History is bounded: records, and a keyframe (a copy of the folded world) every so many steps, so
that the state after any step is a copy and a few dozen small folds away. Nothing is ever re-run.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from enum import StrEnum

from cbviz.event_log import EventLog
from cbviz.frame import Frame
from cbviz.timeline import Timeline
from engine.protocol import (
    Broke,
    Fatal,
    Message,
    Notice,
    Pending,
    Ready,
    RunState,
    Stage,
    Stepped,
)
from engine.record import Event, RunHeader, StepRecord
from engine.world import World

MAX_STEPS = 20_000
MAX_TOKENS = 4_000_000
"""Tokens in the kept records at most (some 150 MB): large budgets fill memory, not step counts."""
KEYFRAME_EVERY = 64
KEYFRAME_BYTES = 128 * 2**20
"""What all keyframes may take: a pool of many blocks gets fewer of them."""
BYTES_PER_BLOCK = 12
RECENT = 240


class Phase(StrEnum):
    """How the source of the records does."""

    LOADING = "loading"
    READY = "ready"
    ENDED = "ended"


class History:
    """The records of one run and the worlds between them."""

    def __init__(
        self, header: RunHeader, max_steps: int = MAX_STEPS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self.header = header
        self.head = World(header)
        self.dropped = 0
        self.timeline = Timeline()
        self.log = EventLog()
        self._max_steps = max_steps
        self._max_tokens = max_tokens
        self._tokens = 0
        self._records: list[StepRecord] = []
        self._keyframes: list[World] = [self.head.copy()]
        self._every = _keyframe_interval(header.num_blocks, max_steps)
        self._near: World | None = None

    def __len__(self) -> int:
        return len(self._records)

    @property
    def oldest(self) -> int:
        """The first step that can be looked at; -1 before any step."""
        return self._records[0].step if self._records else self.head.step

    @property
    def newest(self) -> int:
        """The last step; -1 before any step."""
        return self.head.step

    def append(self, record: StepRecord) -> None:
        """Take in the next step.

        Raises:
            ValueError: it does not follow (a damaged or foreign source); history stays as it was.
        """
        try:
            self.head.apply(record)
        except (ValueError, KeyError, IndexError) as error:
            self.head = self._fold(self._keyframes[-1], self.newest)
            raise ValueError(f"step {record.step} does not follow from the steps before") from error
        self._records.append(record)
        self.timeline.append(record)
        self.log.append(record)
        self._tokens += record.num_tokens
        if record.step % self._every == self._every - 1:
            self._keyframes.append(self.head.copy())
        while self._too_big() and len(self._keyframes) > 1:
            self._drop_oldest()

    def record_at(self, step: int) -> StepRecord | None:
        """The record of a step, if it is kept."""
        index = step - self.oldest
        return self._records[index] if 0 <= index < len(self._records) else None

    def world_at(self, step: int) -> World:
        """The state after a step (clamped to what is kept). The caller may change it."""
        step = max(self.oldest, min(step, self.newest))
        world = self._fold(self._base_of(step), step)
        self._near = world.copy()
        return world

    def recent(self, step: int, count: int = RECENT) -> list[StepRecord]:
        """At most `count` records up to and including a step, oldest first."""
        return self._between(step - count, step)

    def _fold(self, base: World, step: int) -> World:
        world = base.copy()
        for record in self._between(base.step, step):
            world.apply(record)
        return world

    def _between(self, after: int, upto: int) -> list[StepRecord]:
        """The kept records of steps `after + 1 .. upto`."""
        first = max(0, after + 1 - self.oldest)
        return self._records[first : max(first, upto + 1 - self.oldest)]

    def _base_of(self, step: int) -> World:
        """The nearest world at or before a step: a keyframe, the head, or the one seen last."""
        if step == self.newest:
            return self.head
        index = bisect_right(self._keyframes, step, key=_step_of) - 1
        base = self._keyframes[index]
        near = self._near
        return near if near is not None and base.step < near.step <= step else base

    def _too_big(self) -> bool:
        return len(self._records) > self._max_steps or self._tokens > self._max_tokens

    def _drop_oldest(self) -> None:
        """Drop the first keyframe and the records up to the second one."""
        self._keyframes.pop(0)
        count = self._keyframes[0].step + 1 - self.oldest
        self._tokens -= sum(record.num_tokens for record in self._records[:count])
        del self._records[:count]
        self.dropped += count
        self.timeline.drop_before(self.oldest)
        self.log.drop_before(self.oldest)
        if self._near is not None and self._near.step < self.oldest:
            self._near = None


class Session:
    """History, cursor and engine state of one window.

    Args:
        follow: start live; otherwise (a replay) stand at the first step.
        max_steps: steps kept at most.
        max_tokens: tokens kept in their records at most.
    """

    def __init__(
        self, *, follow: bool = True, max_steps: int = MAX_STEPS, max_tokens: int = MAX_TOKENS
    ) -> None:
        self._follow = follow
        self._max_steps = max_steps
        self._max_tokens = max_tokens
        self.history: History | None = None
        self.phase = Phase.LOADING
        self.stages: list[Stage] = []
        """The stages of loading so far, the last one in its newest state."""
        self.fault = ""
        """One line that says how the engine ended."""
        self.running = False
        self.steps_per_s = 0.0
        self.notices: deque[Notice] = deque(maxlen=20)
        """Not yet shown to the user, oldest first."""
        self.broke: Broke | None = None
        """What the run last stood still for, until it goes on."""
        self._cursor: int | None = None
        self._pending: list[Event] = []
        self._broken = False

    @property
    def header(self) -> RunHeader | None:
        """What is known of the run that is looked at; None while the first one loads."""
        return self.history.header if self.history is not None else None

    @property
    def live(self) -> bool:
        """The newest state is looked at, and the view moves with it."""
        return self._cursor is None

    @property
    def step(self) -> int:
        """The step looked at; -1 before the first."""
        return self.newest if self._cursor is None else self._cursor

    @property
    def newest(self) -> int:
        """The last step there is; -1 before the first."""
        return self.history.newest if self.history is not None else -1

    @property
    def oldest(self) -> int:
        """The first step that can be looked at; -1 before the first."""
        return self.history.oldest if self.history is not None else -1

    def ingest(self, message: Message) -> None:
        """Take in one message of the source."""
        match message:
            case Stepped(record=record):
                self._on_step(record)
            case Pending(events=events, first=first):
                self._pending = self._pending[:first] + events
            case RunState(running=running, steps_per_s=steps_per_s):
                self.running, self.steps_per_s = running, steps_per_s
                self.broke = None if running else self.broke
            case Broke(paused=True):
                self.broke = message
            case Stage():
                self._on_stage(message)
            case Ready(header=header):
                self._on_ready(header)
            case Notice():
                self.notices.append(message)
            case Fatal(message=text):
                self.end(text)

    def begin(self) -> None:
        """A new engine process is starting. The old run can be looked at until it is ready."""
        self.phase = Phase.LOADING
        self.stages = []
        self.fault = ""
        self.running = False
        self._pending = []

    def end(self, message: str) -> None:
        """The engine has ended; the first reason given stands."""
        if self.phase is not Phase.ENDED:
            self.fault = message
        self.phase = Phase.ENDED
        self.running = False
        self._pending = []

    def go_to(self, step: int) -> None:
        """Look at a step of the past (or the newest one), clamped to what is kept."""
        if self.history is None or self.newest < 0:
            return
        self._cursor = max(self.oldest, min(step, self.newest))

    def move(self, steps: int) -> None:
        """Look further back (negative) or on; moving on past the newest step goes live."""
        target = self.step + steps
        if steps > 0 and target > self.newest:
            self.go_live()
        else:
            self.go_to(target)

    def go_live(self) -> None:
        """Look at the newest state, and follow it."""
        self._cursor = None

    def world_at(self, step: int) -> World | None:
        """The state after a step, without what is pending; None before the engine is ready."""
        return self.history.world_at(step) if self.history is not None else None

    def live_world(self) -> World | None:
        """The newest state, with the events since the last step."""
        if self.history is None:
            return None
        world = self.history.head.copy()
        if not self._pending:
            return world
        try:
            world.apply_events(self._pending)
        except (ValueError, KeyError, IndexError):
            # They belong to a step that has not reached us: it will bring them.
            return self.history.head.copy()
        return world

    def frame(self) -> Frame | None:
        """All there is to draw now: an own copy of the state, which no later step changes."""
        history = self.history
        world = self.live_world() if self.live else self.world_at(self.step)
        if history is None or world is None:
            return None
        return Frame(
            world, history.record_at(world.step), history.recent(world.step), history.timeline,
            history.log,
        )  # fmt: skip

    def _on_ready(self, header: RunHeader) -> None:
        self.history = History(header, self._max_steps, self._max_tokens)
        self.phase = Phase.READY
        self.fault = ""
        self._pending = []
        self._broken = False
        self._cursor = None
        self.broke = None

    def _on_step(self, record: StepRecord) -> None:
        if self.history is None or self._broken:
            return
        try:
            self.history.append(record)
        except ValueError as error:
            self._broken = True
            self.notices.append(Notice(f"{error}: the rest is not shown", "error"))
            return
        self._pending = []
        if self._cursor is not None:
            self._cursor = max(self._cursor, self.oldest)
        elif not self._follow:
            self._cursor = record.step

    def _on_stage(self, stage: Stage) -> None:
        if self.stages and self.stages[-1].name == stage.name:
            self.stages[-1] = stage
        else:
            self.stages.append(stage)


def _keyframe_interval(num_blocks: int, max_steps: int) -> int:
    """Steps from one keyframe to the next, so that all of them stay within their memory."""
    allowed = max(1, KEYFRAME_BYTES // (BYTES_PER_BLOCK * num_blocks))
    return max(1, min(max_steps, max(min(KEYFRAME_EVERY, max_steps), -(-max_steps // allowed))))


def _step_of(world: World) -> int:
    return world.step
