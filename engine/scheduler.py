"""The scheduler: queues, budget and pool of one engine. No torch.

`plan` says what the next step does and changes nothing; `commit` applies it once the step has been
executed; `rollback` is for a step that could not be. Which requests run is decided in
`engine.planner`, in which order by `engine.policies`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from engine.block_pool import BlockPool, blocks_for
from engine.errors import InvalidInput, RequestRefused
from engine.knobs import Knob, Knobs
from engine.plan import Plan
from engine.planner import Planner
from engine.policies import POLICIES
from engine.record import (
    Admitted,
    BlockCopied,
    BlockMerged,
    BlocksAllocated,
    BlocksCached,
    BlocksEvicted,
    BlocksFreed,
    BlocksUncached,
    CacheReset,
    Event,
    Failed,
    Finished,
    Forked,
    KnobChanged,
    Preempted,
    PrefixHit,
    SegmentKind,
)
from engine.request import FinishReason, Request, RequestStatus
from engine.waiting_queue import WaitingQueue

POLICY = "continuous"


@dataclass
class CacheStats:
    """What the prefix cache did and what preemption cost, in tokens (evictions: in blocks).

    `queried` of prompts looked up at their first admission, `hit` of them found; `resumed` found
    again by requests that had been preempted; `recomputed` computed a second time after one.
    """

    queried: int = 0
    hit: int = 0
    resumed: int = 0
    recomputed: int = 0
    evictions: int = 0
    merged: int = 0
    """Blocks saved because another one held the same tokens."""


class Scheduler:
    """Queues, budget and pool of one engine.

    Args:
        pool: the physical blocks.
        knobs: what may change while it runs.
        max_model_len: prompt and output tokens of a request at most.
        eos_token_ids: tokens that end a request.
    """

    def __init__(
        self,
        pool: BlockPool,
        knobs: Knobs,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pool = pool
        self.knobs = knobs
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.waiting = WaitingQueue()
        self.running: dict[str, Request] = {}
        """In order of admission."""
        self.requests: dict[str, Request] = {}
        """All that have not ended, in order of arrival."""
        self.num_added = 0
        self.num_finished = 0
        self.stats = CacheStats()
        self.blocks_used = 0
        """Blocks held while the last step ran."""
        self._step = 0

    @property
    def num_live(self) -> int:
        """Requests that are waiting or running."""
        return len(self.requests)

    def live(self, request_id: str) -> Request | None:
        """The request, if it has not ended."""
        return self.requests.get(request_id)

    # -- between steps ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidInput: a live request has its id.
            RequestRefused: it can never run; the message holds the arithmetic.
        """
        if not request.request_id:
            raise InvalidInput("a request id must not be empty")
        if request.request_id in self.requests:
            raise InvalidInput(f"request id {request.request_id!r} is in use by a live request")
        self.check_fits(request)
        request.arrival = self.num_added
        self.num_added += 1
        self.requests[request.request_id] = request
        self.waiting.append(request.request_id, self._level(request))

    def check_fits(self, request: Request) -> None:
        """Raise RequestRefused, with the arithmetic, if the request can never run."""
        prompt, limit = request.num_prompt_tokens, self.max_model_len
        if prompt == 0:
            raise RequestRefused("the prompt is empty: it needs at least one token")
        if prompt >= limit:
            raise RequestRefused(
                f"the prompt has {prompt} tokens and the context {limit}, one of them for output: "
                f"shorten it by {prompt - limit + 1} or raise --max-model-len"
            )
        budget = self.knobs.token_budget
        if not self.knobs.chunked_prefill and prompt > budget:
            raise RequestRefused(
                f"the prompt has {prompt} tokens and a step {budget}, and chunked prefill is off: "
                f"turn it on, or raise the token budget by {prompt - budget}"
            )
        # The newest token is never computed again after it was sampled: it needs no slot.
        stored = min(prompt + request.params.max_tokens, limit) - 1
        need, size = blocks_for(stored, self.pool.block_size), self.pool.block_size
        if need > self.pool.num_blocks:
            raise RequestRefused(
                f"it may need {need} blocks (prompt {prompt} + output "
                f"{stored + 1 - prompt} - 1 = {stored} tokens, {size} a block) and the pool has "
                f"{self.pool.num_blocks}: lower max_tokens, or give --num-blocks {need}"
            )

    def cancel(self, request_id: str) -> list[Event]:
        """Take a live request out, whatever its state; its `BlocksFreed`, if it held any.

        Raises:
            KeyError: no live request has this id.
        """
        return self._end(self.requests[request_id])

    def fail(self, failure: Failed, *, trusted: bool = False) -> list[Event]:
        """End a live request that cannot go on.

        Unless what it computed is `trusted`, the prefix cache forgets it, and running requests
        that have some of it do not join the cache any more.

        Raises:
            KeyError: no live request has this id.
        """
        request = self.requests[failure.request_id]
        events: list[Event] = [failure]
        if not trusted:
            gone = self.pool.uncache(request.block_table)
            if gone:
                events.append(BlocksUncached(gone))
            self._keep_out_of_cache(request)
        events.append(Finished(request.request_id, FinishReason.ERROR, failure.at))
        return events + self._end(request)

    def set_knob(self, name: str, value: Knob) -> list[Event]:
        """Change a setting from the next step on; what changed, if anything did.

        Raises:
            InvalidInput: there is no such knob, or the value is not for it.
        """
        old, knobs = getattr(self.knobs, name, None), self.knobs.changed(name, value)
        if value == old:
            return []
        self.knobs = knobs
        assert old is not None
        events: list[Event] = [KnobChanged(name, old, value)]
        if name == "scheduling_policy":
            self.waiting.refill(
                (request_id, self._level(request))
                for request_id, request in self.requests.items()
                if request.status is not RequestStatus.RUNNING
            )
        if name == "prefix_caching" and not value:
            events.append(self._forget_cached())
        return events

    def reset_prefix_cache(self, *, force: bool = False) -> list[Event]:
        """Make the prefix cache forget everything computed so far.

        With `force`, running requests keep their blocks, and never share them any more.

        Raises:
            InvalidInput: running requests hold cached blocks, and it is not forced.
        """
        held = sum(self.pool.ref_counts[entry.block_id] > 0 for entry in self.pool.cache)
        if held and not force:
            raise InvalidInput(
                f"{held} cached blocks are held by running requests: wait until they end, or "
                f"force the reset"
            )
        self.pool.cache.epoch += 1
        return [self._forget_cached()]

    # -- a step ----------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """What the next step does under the present settings, with a reason for each request.

        `now`: seconds since the engine started.

        Raises:
            RequestFailed: a request cannot go on and has to be ended (`fail`) first.
        """
        return Planner(self, now).plan()

    def commit(
        self,
        plan: Plan,
        sampled: Sequence[int],
        now: float,
        *,
        stopped: Collection[str] = (),
        failed: Mapping[str, Failed] | None = None,
    ) -> list[Event]:
        """Apply an executed plan.

        Args:
            plan: the plan.
            sampled: one token id for each sampling segment, in order.
            now: seconds since the engine started.
            stopped: requests whose text ends here, with a stop string.
            failed: requests whose new token cannot be drawn, and why.

        Returns the events of the step: those of the plan, then what the new tokens brought about.
        """
        for event in plan.events:
            self._apply(event)
        self.blocks_used = self.pool.num_held
        tokens = iter(sampled)
        after: list[Event] = []
        size, caching, epoch = (
            self.pool.block_size, self.knobs.prefix_caching, self.pool.cache.epoch,
        )  # fmt: skip
        for segment in plan.segments:
            request = self.running[segment.request_id]
            start, end = segment.start, segment.start + segment.length
            if start < request.high_water:
                self.stats.recomputed += min(end, request.high_water) - start
            request.num_computed = end
            request.last_scheduled = self._step
            if segment.kind is SegmentKind.PREFILL:
                request.num_chunks += 1
            token = next(tokens) if segment.samples else None
            if failed and request.request_id in failed:
                after += self.fail(failed[request.request_id])
                continue
            if (
                end >= (request.num_cached_blocks + 1) * size
                and caching
                and request.cache_epoch == epoch
            ):
                after += self._cache_blocks(request)
            if token is not None:
                request.token_ids.append(token)
                reason = self._finish_reason(request, token, request.request_id in stopped)
                if reason is not None:
                    after.append(Finished(request.request_id, reason, now))
                    after += self._end(request)
        self._step += 1
        return plan.events + after

    def rollback(self, plan: Plan) -> list[Event]:
        """Give up a plan whose execution failed half-way; what had to change nevertheless.

        Blocks that the plan handed out may have been written to: what they held is lost. Cached
        content is forgotten, and a request that was to be preempted is, if its blocks are among
        them. All else is as it was.
        """
        written: set[int] = set()
        for event in plan.events:
            if isinstance(event, BlocksAllocated):
                written.update(event.block_ids)
        events: list[Event] = []
        for event in plan.events:
            if isinstance(event, Preempted):
                victim = self.running[event.request_id]
                if not written.isdisjoint(victim.block_table):
                    events.append(BlocksFreed(victim.request_id, victim.block_table[::-1]))
                    events.append(event)
        for event in events:
            self._apply(event)
        gone = self.pool.uncache(written)
        return [*events, BlocksUncached(gone)] if gone else events

    def check_integrity(self) -> None:
        """Prove queues, tables, cache and pool against each other.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        self.pool.check_integrity(request.block_table for request in self.requests.values())
        if len(self.waiting) + len(self.running) != len(self.requests):
            raise AssertionError("a live request is in no queue, or an ended one is in one")
        for request_id, request in self.requests.items():
            if (request_id in self.running) == (request_id in self.waiting):
                raise AssertionError(f"{request_id} is in both queues or in none")
            if request_id in self.waiting and (request.block_table or request.num_computed):
                raise AssertionError(f"{request_id} waits, but holds blocks")
            self._check_table(request)

    def _check_table(self, request: Request) -> None:
        size, request_id = self.pool.block_size, request.request_id
        need = blocks_for(request.num_computed, size)
        if len(request.block_table) != need:
            raise AssertionError(
                f"{request_id} holds {len(request.block_table)} blocks for "
                f"{request.num_computed} tokens"
            )
        for index, block_id in enumerate(request.block_table[: request.num_cached_blocks]):
            entry = self.pool.cache.entry(block_id)
            token_ids = tuple(request.token_ids[index * size : (index + 1) * size])
            if entry is None or entry.token_ids != token_ids:
                raise AssertionError(
                    f"block {block_id} of {request_id} is not cached with its tokens"
                )

    # -- helpers ---------------------------------------------------------------------------

    def _level(self, request: Request) -> int:
        return POLICIES[self.knobs.scheduling_policy].level(request.params.priority)

    def _finish_reason(self, request: Request, token_id: int, stopped: bool) -> FinishReason | None:
        """Why the request ends with its newest token; None = it goes on."""
        params, made = request.params, request.num_output_tokens
        if stopped:
            return FinishReason.STOP
        if made > params.min_tokens:
            if token_id in self.eos_token_ids and not params.ignore_eos:
                return FinishReason.STOP
            if token_id in params.stop_token_ids:
                return FinishReason.STOP
        if made >= params.max_tokens or request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def _apply(self, event: Event) -> None:
        """One planned change, for real."""
        match event:
            case BlocksAllocated(request_id=request_id, block_ids=block_ids):
                self.pool.take(block_ids)
                self.running[request_id].block_table += block_ids
            case Admitted(request_id=request_id):
                self._start(event)
            case PrefixHit(request_id=request_id):
                self._share(self.running[request_id], event.block_ids, event.tokens)
                if event.resumed:
                    self.stats.resumed += event.tokens
                else:
                    self.stats.hit += event.tokens
                self.running[request_id].num_cached_blocks = len(event.block_ids)
            case Forked(request_id=request_id, parent=parent):
                request = self.running[request_id]
                self._share(request, event.block_ids, event.tokens)
                if self.running[parent].cache_epoch == request.cache_epoch:
                    known = self.running[parent].num_cached_blocks
                    request.num_cached_blocks = min(known, len(event.block_ids))
                else:
                    request.cache_epoch = -1
            case BlocksEvicted(block_ids=block_ids):
                self.pool.uncache(block_ids)
                self.stats.evictions += len(block_ids)
            case BlocksFreed(request_id=request_id, block_ids=block_ids):
                self.pool.release(block_ids)
                self.running[request_id].block_table = []
            case Preempted(request_id=request_id):
                self._requeue(self.running.pop(request_id))
            case BlockCopied():
                pass  # The executor did it.
            case _:
                raise AssertionError(f"a plan cannot hold {event}")

    def _start(self, event: Admitted) -> None:
        """Move a request from the queue to the running ones."""
        request = self.requests[event.request_id]
        self.waiting.remove(event.request_id)
        self.running[event.request_id] = request
        request.status = RequestStatus.RUNNING
        request.prefill_end = request.num_tokens
        request.num_chunks = 0
        request.cache_epoch = self.pool.cache.epoch
        self.stats.queried += event.queried
        for request_id in event.passed:
            self.requests[request_id].passed += 1

    def _share(self, request: Request, block_ids: list[int], tokens: int) -> None:
        self.pool.share(block_ids)
        request.block_table = list(block_ids)
        request.num_computed = tokens

    def _requeue(self, request: Request) -> None:
        """Back to the head of the queue, with nothing computed."""
        request.status = RequestStatus.PREEMPTED
        request.high_water = max(request.high_water, request.num_computed)
        request.num_computed = 0
        request.num_cached_blocks = 0
        self.waiting.prepend(request.request_id, self._level(request))

    def _cache_blocks(self, request: Request) -> list[Event]:
        """Make the full blocks of a request known to the prefix cache.

        A duplicate is given up for the block that is known already: it costs nothing here, where
        tables are lists, and keeps the cache a tree in which whoever holds a block holds all
        before it.
        """
        table, first = request.block_table, request.num_cached_blocks
        cached: list[int] = []
        start = first
        merged: list[Event] = []
        for index in range(first, request.num_computed // self.pool.block_size):
            own = table[index]
            known = own in self.pool.cache  # It is shared, and another one was here before.
            kept = self.pool.cache.insert(request, index)
            if kept is None:
                request.cache_epoch = -1  # Nothing behind it can be found by this chain.
                break
            request.num_cached_blocks += 1
            if kept == own:
                if not known:
                    start = start if cached else index
                    cached.append(own)
                continue
            table[index] = kept
            self.pool.share([kept])
            self.pool.release([own])
            self.stats.merged += 1
            merged.append(BlockMerged(request.request_id, index, own, kept))
        # What is known comes first: whatever follows a new block is new.
        if cached:
            merged.append(BlocksCached(request.request_id, start, cached))
        return merged

    def _forget_cached(self) -> CacheReset:
        """Empty the prefix cache; running requests keep their blocks."""
        for request in self.running.values():
            request.num_cached_blocks = 0
        return CacheReset(self.pool.reset_cache())

    def _keep_out_of_cache(self, failed: Request) -> None:
        """Running requests that hold what a failed one computed, or what the cache forgot with it,
        or copied from it, do not join the cache any more."""
        held = set(failed.block_table)
        for request in self.running.values():
            known = request.num_cached_blocks
            while known and request.block_table[known - 1] not in self.pool.cache:
                known -= 1
            shares = not held.isdisjoint(request.block_table) or request.fork_of is failed
            if shares or known < request.num_cached_blocks:
                request.num_cached_blocks = known
                request.cache_epoch = -1

    def _end(self, request: Request) -> list[Event]:
        """Remove an ended request and free what it held."""
        request_id = request.request_id
        if request.status is RequestStatus.RUNNING:
            del self.running[request_id]
        else:
            self.waiting.remove(request_id)
        del self.requests[request_id]
        request.status = RequestStatus.FINISHED
        self.num_finished += 1
        if not request.block_table:
            return []
        freed = request.block_table[::-1]
        self.pool.release(freed)
        request.block_table = []
        return [BlocksFreed(request_id, freed)]

    def __iter__(self) -> Iterator[Request]:
        """Live requests: running ones in order of admission, then the queue."""
        yield from self.running.values()
        for request_id in self.waiting:
            yield self.requests[request_id]
