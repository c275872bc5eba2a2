"""The fold: the state of the engine after any step, from its records alone.

`World(header)` is the state before the first step; `apply(record)` moves it one step on; `copy()`
is cheap (requests are copied only when one side changes them), which is what makes keyframes and
going back in time affordable. Tests hold this state equal to the engine's own after every step.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from typing import Any

import msgspec

from engine.free_queue import FreeQueue
from engine.knobs import Knobs
from engine.policies import POLICIES
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
    Decision,
    Event,
    Failed,
    Finished,
    Forked,
    KnobChanged,
    Preempted,
    PrefixHit,
    Refused,
    RunHeader,
    Sample,
    Segment,
    SegmentKind,
    StepRecord,
    decode_decision,
)
from engine.request import FinishReason, RequestStatus, SamplingParams
from engine.waiting_queue import WaitingQueue

MAX_POSITION = 2**40
KEPT_FINISHED = 1000
"""Finished requests whose details are kept; older ones are only counted."""


class RequestView:
    """What the records say of one request.

    `token_ids` and `pieces` only ever grow and are shared between copies of the world: read them
    up to `num_tokens`. `*_at` are seconds since the engine started, `*_busy` seconds that the
    engine had computed by then: pauses and a speed limit do not count. None = not yet.
    """

    __slots__ = (
        "_epoch",
        "_pieces",
        "_token_ids",
        "added_at",
        "added_busy",
        "added_step",
        "admitted_at",
        "block_table",
        "decode_steps",
        "error",
        "finish_reason",
        "finished_at",
        "first_token_at",
        "first_token_busy",
        "fork_of",
        "high_water",
        "hit_tokens",
        "last_token_at",
        "last_token_busy",
        "num_computed",
        "num_prompt_tokens",
        "num_tokens",
        "ordinal",
        "params",
        "preemptions",
        "prefill_chunks",
        "prompt",
        "recomputed",
        "request_id",
        "status",
        "text",
    )  # fmt: skip

    def __init__(self, epoch: int, ordinal: int, step: int, busy_s: float, event: Added) -> None:
        self._epoch = epoch
        self._token_ids = list(event.token_ids)
        self._pieces = list(event.pieces)
        self.request_id = event.request_id
        self.ordinal = ordinal
        """How many requests were added before it: picks its tint and letter."""
        self.prompt = event.prompt
        self.params: SamplingParams = event.params
        self.fork_of = event.fork_of
        """The request whose prompt it shares, or empty."""
        self.status = RequestStatus.WAITING
        self.num_prompt_tokens = len(event.token_ids)
        self.num_tokens = len(event.token_ids)
        self.num_computed = 0
        self.block_table: list[int] = []
        self.text = ""
        self.added_step = step
        """The step that took it in."""
        self.added_at = event.at
        self.added_busy = busy_s
        self.first_token_busy: float | None = None
        self.last_token_busy: float | None = None
        self.admitted_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.finished_at: float | None = None
        self.finish_reason: FinishReason | None = None
        self.error = ""
        self.preemptions = 0
        self.high_water = 0
        """Tokens that were computed before it was last preempted."""
        self.recomputed = 0
        """Tokens that were computed a second time, after a preemption."""
        self.hit_tokens = 0
        """Tokens of the prompt that the prefix cache had."""
        self.prefill_chunks = 0
        self.decode_steps = 0

    def clone(self, epoch: int) -> RequestView:
        """A copy that may change while this one stays as it is; tokens stay shared."""
        twin = object.__new__(RequestView)
        for name in RequestView.__slots__:
            setattr(twin, name, getattr(self, name))
        twin._epoch = epoch
        twin.block_table = list(self.block_table)
        return twin

    @property
    def epoch(self) -> int:
        """The world that may change this view."""
        return self._epoch

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output token ids, `[num_tokens]`."""
        return self._token_ids[: self.num_tokens]

    @property
    def pieces(self) -> list[str]:
        """One text a token, prompt and output, `[num_tokens]`."""
        return self._pieces[: self.num_tokens]

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, in seconds that the engine computed."""
        return None if self.first_token_busy is None else self.first_token_busy - self.added_busy

    @property
    def itl_s(self) -> float | None:
        """Mean time from token to token, in seconds that the engine computed."""
        if self.first_token_busy is None or self.last_token_busy is None:
            return None
        gaps = self.num_output_tokens - 1
        return (self.last_token_busy - self.first_token_busy) / gaps if gaps > 0 else None

    @property
    def live(self) -> bool:
        """Waiting, running or preempted."""
        return self.status is not RequestStatus.FINISHED

    def piece(self, position: int) -> str:
        """The text of the token at a position."""
        return self._pieces[position]

    def push(self, sample: Sample) -> None:
        """Append a sampled token, unless a copy of the world further on already has."""
        if len(self._token_ids) == self.num_tokens:
            self._token_ids.append(sample.token_id)
            self._pieces.append(sample.piece)
        self.num_tokens += 1


class World:
    """The state after `step` (-1: before the first)."""

    def __init__(self, header: RunHeader) -> None:
        self.header = header
        self.step = -1
        self.knobs: Knobs = header.knobs
        self.requests: dict[str, RequestView] = {}
        self.waiting = WaitingQueue()
        self.running: list[str] = []
        self.num_added = 0
        self.num_finished = 0
        self.num_refused = 0
        self.num_preemptions = 0
        self.cache_queried_tokens = 0
        """Tokens of prompts looked up in the prefix cache, at their first admission."""
        self.cache_hit_tokens = 0
        """Of these, tokens that it had."""
        self.resumed_tokens = 0
        """Tokens that preempted requests found still cached."""
        self.recomputed_tokens = 0
        """Tokens computed a second time, after a preemption."""
        self.evictions = 0
        """Cached blocks that were taken for something else."""
        self.merged_blocks = 0
        """Duplicates given up for a block with the same tokens."""
        self.prefill_tokens = 0
        self.decode_tokens = 0
        self.busy_s = 0.0
        """Seconds that the engine has computed, all steps together."""
        self.free = FreeQueue(header.num_blocks)
        self.evictable = FreeQueue(header.num_blocks, empty=True)
        self.cached: dict[int, tuple[str, int]] = {}
        """Blocks that the prefix cache knows: the request that filled each, and its index there."""
        self.ref_counts = array("i", bytes(4 * header.num_blocks))
        self.last: StepRecord | None = None
        self._finished_order: list[str] = []
        self._decisions: dict[str, Decision] = {}
        self._decoded: set[str] | None = None
        """Who decoded in the last step, once somebody asks."""
        self._epoch = 0
        self._epochs = [0]

    def copy(self) -> World:
        """An independent world in the same state, in time proportional to requests and blocks."""
        twin = object.__new__(World)
        twin.__dict__.update(self.__dict__)
        twin.requests = dict(self.requests)
        twin.waiting = self.waiting.copy()
        twin.running = list(self.running)
        twin.free = self.free.copy()
        twin.evictable = self.evictable.copy()
        twin.cached = dict(self.cached)
        twin.ref_counts = array("i", self.ref_counts)
        twin._finished_order = list(self._finished_order)
        for world in (self, twin):
            self._epochs[0] += 1
            world._epoch = self._epochs[0]
        return twin

    def apply(self, record: StepRecord) -> None:
        """Move on by one step.

        Raises:
            ValueError: the record does not follow this state (a damaged or foreign trace).
        """
        if record.step != self.step + 1:
            raise ValueError(f"step {record.step} does not follow step {self.step}")
        _check_shape(record)
        self.apply_events(record.events)
        for segment in record.segments:
            self._compute(segment)
        ended_at = record.started_at + record.phases.total
        self.busy_s += record.phases.total
        for sample in record.sampled:
            self._sample(sample, ended_at)
        self.step = record.step
        self.last = record
        self._decoded = None
        self._decisions = {decision.request_id: decision for decision in record.decisions}
        self._forget_old()

    def apply_events(self, events: list[Event]) -> None:
        """Take in events alone: those of a step, or those pending since the last one."""
        for event in events:
            _HANDLERS[type(event)](self, event)

    def decision(self, request_id: str) -> Decision | None:
        """What the last step decided about a live request; None when it was not there yet."""
        found = self._decisions.get(request_id)
        view = self.requests.get(request_id)
        if found is not None or view is None or self.last is None:
            return found
        if self._decoded is None:
            decodes = (s for s in self.last.segments if s.kind is SegmentKind.DECODE)
            self._decoded = {segment.request_id for segment in decodes}
        if request_id in self._decoded:
            return decode_decision(request_id)
        waited = view.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return self.last.rest if waited and view.added_step <= self.step else None

    def view(self, request_id: str) -> RequestView | None:
        """The request, if it is live or finished recently."""
        return self.requests.get(request_id)

    @property
    def blocks_held(self) -> int:
        """Blocks in at least one block table."""
        return self.header.num_blocks - len(self.free) - len(self.evictable)

    def owners(self) -> dict[int, list[tuple[str, int]]]:
        """Held blocks: `block_id -> [(request_id, tokens of it in this block)]`."""
        size = self.header.block_size
        owners: dict[int, list[tuple[str, int]]] = {}
        for request_id in self.running:
            view = self.requests[request_id]
            for index, block_id in enumerate(view.block_table):
                fill = max(0, min(size, view.num_computed - index * size))
                owners.setdefault(block_id, []).append((request_id, fill))
        return owners

    def _own(self, request_id: str) -> RequestView:
        """The view of a request, made safe to change in this world alone."""
        view = self.requests[request_id]
        if view.epoch != self._epoch:
            view = self.requests[request_id] = view.clone(self._epoch)
        return view

    def _compute(self, segment: Segment) -> None:
        if segment.kind is SegmentKind.PAD:
            return
        view = self._own(segment.request_id)
        if segment.start + segment.length > view.num_tokens:
            raise ValueError(f"a segment goes beyond the tokens of {segment.request_id!r}")
        end = view.num_computed = segment.start + segment.length
        again = max(0, min(end, view.high_water) - segment.start)
        view.recomputed += again
        self.recomputed_tokens += again
        if segment.kind is SegmentKind.DECODE:
            view.decode_steps += 1
            self.decode_tokens += segment.length
        else:
            view.prefill_chunks += 1
            self.prefill_tokens += segment.length

    def _sample(self, sample: Sample, at: float) -> None:
        view = self._own(sample.request_id)
        view.push(sample)
        view.text += sample.text
        view.last_token_at, view.last_token_busy = at, self.busy_s
        if view.first_token_at is None:
            view.first_token_at, view.first_token_busy = at, self.busy_s

    def _on_added(self, event: Added) -> None:
        if len(event.pieces) != len(event.token_ids):
            raise ValueError(f"{event.request_id!r} has not one piece a token")
        if event.request_id in self.requests:
            if self.requests[event.request_id].live:
                raise ValueError(f"{event.request_id!r} is added twice")
            # The id is used again: it names the new request from now on.
            self._finished_order.remove(event.request_id)
        self.requests[event.request_id] = RequestView(
            self._epoch, self.num_added, self.step + 1, self.busy_s, event
        )
        self.waiting.append(event.request_id, self._level(event.params))
        self.num_added += 1

    def _on_refused(self, event: Refused) -> None:
        self.num_refused += 1

    def _on_admitted(self, event: Admitted) -> None:
        view = self._own(event.request_id)
        view.status = RequestStatus.RUNNING
        if view.admitted_at is None:
            view.admitted_at = event.at
        self.waiting.remove(event.request_id)
        self.running.append(event.request_id)
        self.cache_queried_tokens += event.queried

    def _on_prefix_hit(self, event: PrefixHit) -> None:
        self._share(event.request_id, event.block_ids, event.tokens)
        if event.resumed:
            self.resumed_tokens += event.tokens
        else:
            self.cache_hit_tokens += event.tokens
            self._own(event.request_id).hit_tokens = event.tokens

    def _on_forked(self, event: Forked) -> None:
        self._share(event.request_id, event.block_ids, event.tokens)

    def _share(self, request_id: str, block_ids: list[int], tokens: int) -> None:
        """An admitted request begins with blocks that hold `tokens` of it already."""
        view = self._own(request_id)
        if not 0 <= tokens <= view.num_tokens or view.block_table:
            raise ValueError(f"{request_id!r} cannot begin with {tokens} tokens")
        for block_id in block_ids:
            self._hold(block_id)
        view.block_table = list(block_ids)
        view.num_computed = tokens

    def _on_allocated(self, event: BlocksAllocated) -> None:
        for block_id in event.block_ids:
            self._check_block(block_id)
            self.free.remove(block_id)
            self.ref_counts[block_id] += 1
        self._own(event.request_id).block_table.extend(event.block_ids)

    def _on_freed(self, event: BlocksFreed) -> None:
        for block_id in event.block_ids:
            self._let_go(block_id)
        view = self._own(event.request_id)
        view.block_table = []

    def _on_cached(self, event: BlocksCached) -> None:
        for offset, block_id in enumerate(event.block_ids):
            self._check_block(block_id)
            self.cached[block_id] = (event.request_id, event.first + offset)

    def _on_merged(self, event: BlockMerged) -> None:
        view = self._own(event.request_id)
        if not 0 <= event.index < len(view.block_table):
            raise ValueError(f"{event.request_id!r} has no block {event.index}")
        self._hold(event.kept)
        self._let_go(event.freed)
        view.block_table[event.index] = event.kept
        self.merged_blocks += 1

    def _on_evicted(self, event: BlocksEvicted) -> None:
        self._uncache(event.block_ids)
        self.evictions += len(event.block_ids)

    def _on_uncached(self, event: BlocksUncached) -> None:
        self._uncache(event.block_ids)

    def _on_reset(self, event: CacheReset) -> None:
        self.cached.clear()
        for block_id in list(self.evictable):
            self.evictable.remove(block_id)
            self.free.append(block_id)

    def _on_copied(self, event: BlockCopied) -> None:
        self._check_block(event.source)
        self._check_block(event.target)

    def _hold(self, block_id: int) -> None:
        """One more table has a block that is cached or held."""
        self._check_block(block_id)
        if self.ref_counts[block_id] == 0:
            self.evictable.remove(block_id)
        self.ref_counts[block_id] += 1

    def _let_go(self, block_id: int) -> None:
        """One table less has a block."""
        self._check_block(block_id)
        self.ref_counts[block_id] -= 1
        if self.ref_counts[block_id] == 0:
            (self.evictable if block_id in self.cached else self.free).append(block_id)

    def _uncache(self, block_ids: list[int]) -> None:
        for block_id in block_ids:
            self._check_block(block_id)
            self.cached.pop(block_id, None)
            if block_id in self.evictable:
                self.evictable.remove(block_id)
                self.free.append(block_id)

    def _on_preempted(self, event: Preempted) -> None:
        view = self._own(event.request_id)
        view.status = RequestStatus.PREEMPTED
        view.high_water = max(view.high_water, view.num_computed)
        view.num_computed = 0
        view.preemptions += 1
        self.running.remove(event.request_id)
        self.waiting.prepend(event.request_id, self._level(view.params))
        self.num_preemptions += 1

    def _on_finished(self, event: Finished) -> None:
        self._end(event.request_id, event.reason, event.at)

    def _on_cancelled(self, event: Cancelled) -> None:
        self._own(event.request_id).text += event.text
        self._end(event.request_id, FinishReason.ABORT, event.at)

    def _on_failed(self, event: Failed) -> None:
        if event.request_id in self.requests:
            view = self._own(event.request_id)
            view.error = event.message
            view.text += event.text

    def _on_knob(self, event: KnobChanged) -> None:
        self.knobs = self.knobs.changed(event.name, event.new)
        if event.name == "scheduling_policy":
            waiting = [self.requests[request_id] for request_id in self.waiting]
            waiting.sort(key=lambda view: view.ordinal)
            self.waiting.refill((view.request_id, self._level(view.params)) for view in waiting)

    def _level(self, params: SamplingParams) -> int:
        """Which level of the queue a request waits in, under the present policy."""
        return POLICIES[self.knobs.scheduling_policy].level(params.priority)

    def _end(self, request_id: str, reason: FinishReason, at: float) -> None:
        view = self._own(request_id)
        queue: list[str] | WaitingQueue = self.waiting
        if view.status is RequestStatus.RUNNING:
            queue = self.running
        queue.remove(request_id)
        view.status = RequestStatus.FINISHED
        view.finish_reason = reason
        view.finished_at = at
        self._finished_order.append(request_id)
        self.num_finished += 1

    def _check_block(self, block_id: int) -> None:
        if not 0 <= block_id < self.header.num_blocks:
            raise ValueError(f"there is no block {block_id}")

    def _forget_old(self) -> None:
        while len(self._finished_order) > KEPT_FINISHED:
            del self.requests[self._finished_order.pop(0)]


def _check_shape(record: StepRecord) -> None:
    """What must hold of any step, whatever came before it.

    Raises:
        ValueError: it does not (a damaged or foreign trace).
    """
    times = (record.started_at, *msgspec.structs.astuple(record.phases))
    if not all(math.isfinite(time) and time >= 0 for time in times):
        raise ValueError(f"step {record.step} has impossible times")
    if record.token_budget < 1 or record.max_num_seqs < 1:
        raise ValueError(f"step {record.step} has no budget")
    for segment in record.segments:
        if segment.length < 1 or not 0 <= segment.context <= segment.start < MAX_POSITION:
            raise ValueError(f"step {record.step} has an impossible segment")
    if sum(segment.length for segment in record.segments) != len(record.token_ids):
        raise ValueError(f"step {record.step} has segments and tokens that do not agree")


_HANDLERS: dict[type, Callable[[World, Any], None]] = {
    Added: World._on_added,
    Refused: World._on_refused,
    Admitted: World._on_admitted,
    PrefixHit: World._on_prefix_hit,
    Forked: World._on_forked,
    BlocksAllocated: World._on_allocated,
    BlocksFreed: World._on_freed,
    BlocksCached: World._on_cached,
    BlockMerged: World._on_merged,
    BlocksEvicted: World._on_evicted,
    BlocksUncached: World._on_uncached,
    CacheReset: World._on_reset,
    BlockCopied: World._on_copied,
    Preempted: World._on_preempted,
    Finished: World._on_finished,
    Cancelled: World._on_cancelled,
    Failed: World._on_failed,
    KnobChanged: World._on_knob,
}
