"""Breakpoints: at which steps a run stands still, and why. Pure, no torch.

A `Breakpoint` is written as a word or two (`preemption`, `kv>80%`, `A:finished`, `step=120`) and
tells of one record whether it is met. What it has to know of the step before is kept in a
`Standing`, which costs a few dictionary entries and not a whole `World`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from engine.errors import InvalidInput
from engine.explain import sentence
from engine.record import (
    Action,
    Added,
    Admitted,
    BlocksEvicted,
    Cancelled,
    Event,
    Failed,
    Finished,
    Preempted,
    PrefixHit,
    Refused,
    StepRecord,
)
from engine.request import RequestStatus
from engine.world import World

E = TypeVar("E")
LONGEST = 200
"""Characters of a breakpoint at most: a request id is the longest part of it."""
MAX_BREAKPOINTS = 100
LAST_STEP = 2**53
LEAVES = "leaves-"


class Move(msgspec.Struct, frozen=True):
    """A request changed its state; `old` is None when it is new."""

    request_id: str
    old: RequestStatus | None
    new: RequestStatus


class Standing:
    """What is known before a step: where each live request stood, and how full the pool was."""

    def __init__(self) -> None:
        self.statuses: dict[str, RequestStatus] = {}
        self.kv_percent = 0.0

    @classmethod
    def of(cls, world: World) -> Standing:
        """Where things stand in a world (without events that are pending)."""
        made = cls()
        made.statuses = {view.request_id: view.status for view in world.requests.values()
                         if view.live}  # fmt: skip
        if world.last is not None:
            made.kv_percent = kv_percent(world.last)
        return made

    def advance(self, record: StepRecord) -> list[Move]:
        """Take in the next step; the changes of state in it, in order."""
        moves: list[Move] = []
        for event in record.events:
            new = _NEW_STATUS.get(type(event))
            if new is None:
                continue
            request_id: str = event.request_id  # type: ignore[union-attr]
            old = None if isinstance(event, Added) else self.statuses.get(request_id)
            moves.append(Move(request_id, old, new))
            if new is RequestStatus.FINISHED:
                self.statuses.pop(request_id, None)
            else:
                self.statuses[request_id] = new
        self.kv_percent = kv_percent(record)
        return moves


class Happened(msgspec.Struct, frozen=True):
    """A step as breakpoints see it: its record, its moves, and the pool's fill before it (%)."""

    record: StepRecord
    moves: list[Move]
    kv_percent_before: float


class Breakpoint(msgspec.Struct, frozen=True):
    """One condition. `text` is how it is written; make it with `parse`.

    `kind`: a word of `KINDS`, or `kv`, `step`, `enters`, `leaves`. `number`: per cent of `kv`, the
    step of `step`. `request_id` (empty: any request) and `status` belong to the last two.
    """

    text: str
    kind: str
    number: float = 0.0
    request_id: str = ""
    status: RequestStatus = RequestStatus.WAITING

    @classmethod
    def parse(cls, text: str) -> Breakpoint:
        """Read a breakpoint.

        Raises:
            InvalidInput: it is none; the message lists what there is.
        """
        words = " ".join(text.split())
        if not words:
            raise InvalidInput(f"a breakpoint is empty; there are {CHOICES}")
        found = None
        if len(words) <= LONGEST:
            found = _of_kind(words) or _of_number(words) or _of_state(words)
        if found is None:
            shown = words if len(words) <= 40 else f"{words[:40]}…"
            raise InvalidInput(f"there is no breakpoint {shown!r}; there are {CHOICES}")
        return found

    @property
    def meaning(self) -> str:
        """What it waits for. Untrusted: it may hold a request id."""
        who = f"request {self.request_id}" if self.request_id else "any request"
        match self.kind:
            case "enters":
                return f"{who} comes to be {self.status}"
            case "leaves":
                return f"{who} is {self.status} no more"
            case "kv":
                return f"more than {self.number:g} % of the KV cache comes into use"
            case "step":
                return f"step {int(self.number)} has run"
            case _:
                return KINDS[self.kind].meaning

    def hits(self, record: StepRecord, before: Standing) -> str | None:
        """Why this step meets it, in words; None when it does not.

        `before` is where things stood before the step. It stays as it is: with many breakpoints
        or many steps, a `Watch` does less work.
        """
        twin = Standing()
        twin.statuses, twin.kv_percent = dict(before.statuses), before.kv_percent
        return self.why(Happened(record, twin.advance(record), before.kv_percent))

    def why(self, step: Happened) -> str | None:
        """The same of a step that has been looked through already."""
        match self.kind:
            case "enters" | "leaves":
                return _many([_moved(move) for move in step.moves if self._is_meant(move)])
            case "kv":
                return self._why_kv(step)
            case "step":
                return "it has run" if step.record.step == self.number else None
            case _:
                return KINDS[self.kind].why(step.record)

    def _is_meant(self, move: Move) -> bool:
        if self.request_id not in ("", move.request_id) or move.old is move.new:
            return False
        return (move.new if self.kind == "enters" else move.old) is self.status

    def _why_kv(self, step: Happened) -> str | None:
        now = kv_percent(step.record)
        if not step.kv_percent_before <= self.number < now:
            return None
        used = step.record.blocks_used
        return f"{used} of {num_blocks(step.record)} blocks in use, {now:.3g} %"


class Hit(msgspec.Struct, frozen=True, array_like=True):
    """A breakpoint that a step met, and why."""

    text: str
    why: str

    @property
    def words(self) -> str:
        """Both, as one line. Untrusted: it may hold request ids."""
        return f"{self.text}: {self.why}"


class Watch:
    """Breakpoints over the steps of one run, in order."""

    def __init__(self, standing: Standing | None = None) -> None:
        self.breakpoints: tuple[Breakpoint, ...] = ()
        self.standing = standing or Standing()

    def set(self, texts: Sequence[str]) -> None:
        """Watch for these from the next step on, and for no others.

        Raises:
            InvalidInput: one of them cannot be read, or they are too many; all stays as it was.
        """
        self.breakpoints = parse_all(texts)

    def step(self, record: StepRecord) -> list[Hit]:
        """Take in the next step; what it met."""
        before = self.standing.kv_percent
        moves = self.standing.advance(record)
        if not self.breakpoints:
            return []
        step = Happened(record, moves, before)
        found = ((point, point.why(step)) for point in self.breakpoints)
        return [Hit(point.text, why) for point, why in found if why is not None]


def parse_all(texts: Sequence[str]) -> tuple[Breakpoint, ...]:
    """Read several; each is kept once.

    Raises:
        InvalidInput: one of them cannot be read, or they are too many.
    """
    if len(texts) > MAX_BREAKPOINTS:
        raise InvalidInput(f"{len(texts)} breakpoints are too many: {MAX_BREAKPOINTS} at most")
    return tuple({point.text: point for point in map(Breakpoint.parse, texts)}.values())


def num_blocks(record: StepRecord) -> int:
    """Size of the pool."""
    return record.blocks_free + record.blocks_evictable + record.blocks_held


def kv_percent(record: StepRecord) -> float:
    """How much of the pool requests held while a step ran, %."""
    return 100 * record.blocks_used / max(1, num_blocks(record))


def _preemption(record: StepRecord) -> str | None:
    return _many([f"{event.request_id} lost its blocks to {event.by}"
                  for event in _all(record, Preempted)])  # fmt: skip


def _chunk(record: StepRecord) -> str | None:
    """A prompt got less than all of it that was left."""
    return _many([
        f"{decision.request_id}: {sentence(decision)}" for decision in record.decisions
        if decision.action is Action.PREFILL and decision.tokens < decision.left
    ])  # fmt: skip


def _prefix_hit(record: StepRecord) -> str | None:
    return _many([
        f"{event.request_id} finds {event.tokens} of its tokens still cached" if event.resumed
        else f"{event.request_id} begins with {event.tokens} cached tokens"
        for event in _all(record, PrefixHit)
    ])  # fmt: skip


def _eviction(record: StepRecord) -> str | None:
    return _many([f"{event.request_id} takes {_blocks(len(event.block_ids))}"
                  for event in _all(record, BlocksEvicted)])  # fmt: skip


def _finish(record: StepRecord) -> str | None:
    return _many([f"{event.request_id} ended ({event.reason})"
                  for event in _all(record, Finished)])  # fmt: skip


def _refusal(record: StepRecord) -> str | None:
    return _many([f"{event.request_id}: {event.message}" if event.request_id else event.message
                  for event in _all(record, Refused)])  # fmt: skip


def _error(record: StepRecord) -> str | None:
    return _many([f"{event.request_id}: {event.message}" if event.request_id else event.message
                  for event in _all(record, Failed)])  # fmt: skip


def _budget(record: StepRecord) -> str | None:
    full = record.num_tokens >= record.token_budget
    return f"all {record.token_budget} tokens of the step are used" if full else None


class Kind(msgspec.Struct, frozen=True):
    """A breakpoint that is one word: what it waits for, other words for it, and its test."""

    meaning: str
    why: Callable[[StepRecord], str | None]
    synonyms: tuple[str, ...] = ()


KINDS: dict[str, Kind] = {
    "preemption": Kind("a request loses its blocks to another", _preemption, ("preempt",)),
    "chunk": Kind("a prompt is split: only a part of it runs", _chunk,
                  ("chunk split", "chunk-split", "split")),
    "hit": Kind("a request begins with cached blocks", _prefix_hit, ("prefix hit", "prefix-hit")),
    "eviction": Kind("cached blocks are taken for something else", _eviction, ("evict",)),
    "finish": Kind("a request ends by itself", _finish),
    "refusal": Kind("a request can never run and is turned away", _refusal,
                    ("refused", "rejection")),
    "error": Kind("a request or a step could not be computed", _error, ("failure",)),
    "budget": Kind("a step uses its whole token budget", _budget, ("budget full", "budget-full")),
}  # fmt: skip
EXAMPLES: tuple[str, ...] = (
    *KINDS, "kv>80%", "step=120", *RequestStatus,
    *(f"{LEAVES}{status}" for status in RequestStatus if status is not RequestStatus.FINISHED),
    *(f"A:{status}" for status in RequestStatus), f"A:{LEAVES}running",
)  # fmt: skip
"""One of each sort."""
CHOICES = (
    f"{', '.join(KINDS)}, kv>80%, step=120, and for any request or for one "
    f"{', '.join(RequestStatus)}, {LEAVES}running, A:finished, A:{LEAVES}running"
)

_SYNONYMS = {name: word for word, kind in KINDS.items() for name in (word, *kind.synonyms)}
_KV = re.compile(r"kv ?> ?([0-9]{1,3}(?:\.[0-9]{1,3})?) ?%?", re.IGNORECASE | re.ASCII)
_STEP = re.compile(r"step ?=? ?([0-9]{1,16})", re.IGNORECASE | re.ASCII)
_NEW_STATUS: dict[type[Event], RequestStatus] = {
    Added: RequestStatus.WAITING,
    Admitted: RequestStatus.RUNNING,
    Preempted: RequestStatus.PREEMPTED,
    Finished: RequestStatus.FINISHED,
    Cancelled: RequestStatus.FINISHED,
}


def _of_kind(words: str) -> Breakpoint | None:
    word = _SYNONYMS.get(words.lower())
    return Breakpoint(word, word) if word else None


def _of_number(words: str) -> Breakpoint | None:
    if match := _KV.fullmatch(words):
        percent = float(match[1])
        if not percent < 100:
            raise InvalidInput(f"{words!r} never comes: the KV cache holds 100 % at most")
        return Breakpoint(f"kv>{percent:g}%", "kv", percent)
    if match := _STEP.fullmatch(words):
        step = int(match[1])
        return Breakpoint(f"step={step}", "step", step) if step <= LAST_STEP else None
    return None


def _of_state(words: str) -> Breakpoint | None:
    name, colon, state = words.rpartition(":")
    name, state = name.strip(), state.strip().lower()
    if colon and not name:
        return None
    kind = "enters"
    for leaves in (LEAVES, "leaves "):
        if state.startswith(leaves):
            kind, state = "leaves", state.removeprefix(leaves)
    if state not in list(RequestStatus) or (kind, state) == ("leaves", RequestStatus.FINISHED):
        return None
    text = f"{name}{colon}{LEAVES if kind == 'leaves' else ''}{state}"
    return Breakpoint(text, kind, request_id=name, status=RequestStatus(state))


def _all(record: StepRecord, kind: type[E]) -> Iterator[E]:
    return (event for event in record.events if isinstance(event, kind))


def _moved(move: Move) -> str:
    if move.old is None:
        return f"{move.request_id} is new, and {move.new}"
    return f"{move.request_id} was {move.old}, is {move.new}"


def _blocks(count: int) -> str:
    return f"{count} cached block{'' if count == 1 else 's'}"


def _many(reasons: list[str]) -> str | None:
    """The first reason, and how many more there are."""
    if not reasons:
        return None
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return reasons[0] + more
