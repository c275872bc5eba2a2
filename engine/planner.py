"""Plans one step: which tokens of which requests run within the budget, and why. No torch.

Planning changes nothing: it works on a draft of the pool and returns a `Plan`, whose events say
what would change. Its time is proportional to the running requests and to those admitted, never
to the length of the queue. The rules of each step:

- Every running request is served before any waiting one, in the order of the policy.
- A running request that needs a block when none is left takes those of the policy's victim.
- Waiting requests are admitted in order. One that cannot be admitted holds up those behind it,
  unless `skip_blocked_head` lets some pass; in a step that preempts, nobody is admitted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Protocol

from engine.block_pool import BlockPool, PoolDraft, blocks_for
from engine.errors import RequestFailed
from engine.knobs import Knobs
from engine.plan import Plan
from engine.policies import POLICIES
from engine.record import (
    Action,
    Admitted,
    BlockCopied,
    BlocksAllocated,
    BlocksEvicted,
    BlocksFreed,
    Decision,
    Event,
    Forked,
    Preempted,
    PrefixHit,
    Reason,
    Segment,
    SegmentKind,
)
from engine.request import Request, RequestStatus
from engine.waiting_queue import WaitingQueue


class Queues(Protocol):
    """What planning reads of a scheduler."""

    pool: BlockPool
    knobs: Knobs
    waiting: WaitingQueue
    running: dict[str, Request]
    requests: dict[str, Request]


class Reuse(NamedTuple):
    """What an admitted request need not compute."""

    tokens: int = 0
    blocks: list[int] = []  # noqa: RUF012 (a default that nobody changes)
    """Shared, in the order of its table."""
    copy_from: int | None = None
    """The block whose beginning it copies, if `tokens` end inside a block."""
    parent: str = ""
    """The request whose prompt it forks; empty when the blocks come from the prefix cache."""


class Chunk(NamedTuple):
    """How many tokens of a prefill run in a step, and why not more (`limit`: see `Reason`)."""

    tokens: int
    reason: Reason
    limit: int


class Planner:
    """One step in the making.

    Args:
        queues: the state to plan from.
        now: seconds since the engine started.
    """

    def __init__(self, queues: Queues, now: float) -> None:
        self._queues = queues
        self._now = now
        self._knobs = queues.knobs
        self._size = queues.pool.block_size
        self._policy = POLICIES[queues.knobs.scheduling_policy]
        self._pool = PoolDraft(queues.pool)
        self._budget = queues.knobs.token_budget
        self._running = list(queues.running.values())
        """In order of admission, without those preempted in this step."""
        self._num_running = len(self._running)
        self._num_forks = 0
        """Waiting requests whose prompt is being computed: their places are kept."""
        self._segments: dict[str, Segment] = {}
        self._tables: dict[str, list[int]] = {}
        self._decisions: dict[str, Decision] = {}
        self._events: list[Event] = []
        self._reserved = 0
        """Blocks that admissions leave to decodes still to be served."""
        self._partial = 0
        """Prompts begun, and not finished with this step."""
        self._victims: list[tuple[Request, Request]] = []
        """Requests preempted in this step, and for whom."""
        self._preempted_for = ""
        """The request that took another one's blocks in this step."""

    def plan(self) -> Plan:
        """What the step does.

        Raises:
            RequestFailed: a request alone in the pool has no room in it.
        """
        order = self._policy.order(list(self._running))
        decodes = [request for request in order if request.num_computed >= request.prefill_end]
        prefills = [request for request in order if request.num_computed < request.prefill_end]
        if self._policy.prefills_first:
            self._serve_prefills(prefills)
            self._reserved = sum(map(self._at_block_end, decodes))
            rest = self._admit()
            self._serve_decodes(decodes)
        else:
            self._serve_decodes(decodes)
            self._serve_prefills(prefills)
            rest = self._admit()
        self._tell_victims_what_stays_cached()
        segments = list(self._segments.values())
        return Plan(
            segments=segments,
            tables=list(self._tables.values()),
            token_ids=self._token_ids(segments),
            decisions=list(self._decisions.values()),
            rest=rest,
            events=self._events,
        )

    # -- running requests ------------------------------------------------------------------

    def _serve_decodes(self, decodes: list[Request]) -> None:
        """One token each; when there are more than budget, those served longest ago go first."""
        if len(decodes) > self._budget:
            level = self._policy.level
            decodes.sort(key=lambda r: (level(r.params.priority), r.last_scheduled))
        segments, tables, decisions = self._segments, self._tables, self._decisions
        for request in decodes:
            request_id = request.request_id
            if request_id in decisions:
                continue  # Preempted by one before it.
            if self._budget == 0:
                decisions[request_id] = self._budget_spent(request)
                continue
            position, table = request.num_computed, request.block_table
            if position == len(table) * self._size:
                if not self._make_room(request):
                    decisions[request_id] = self._no_room(request)
                    continue
                table = table + self._allocate(request_id, 1)
            segments[request_id] = Segment(
                request_id, SegmentKind.DECODE, position, 1, position, True
            )
            tables[request_id] = table
            self._budget -= 1

    def _serve_prefills(self, prefills: list[Request]) -> None:
        """The next chunk of each prompt in progress."""
        for request in prefills:
            request_id, start = request.request_id, request.num_computed
            if request_id in self._decisions:
                continue  # Preempted by one before it.
            if self._budget == 0:
                self._decisions[request_id] = self._budget_spent(request)
                self._partial += 1
                continue
            held = len(request.block_table)
            if start == held * self._size and not self._make_room(request):
                self._decisions[request_id] = self._no_room(request)
                self._partial += 1
                continue
            chunk = self._chunk(request.num_tokens - start)
            room = (held + self._pool.available) * self._size - start
            if room < chunk.tokens:
                chunk = Chunk(room, Reason.NO_FREE_BLOCKS, 0)
            need = blocks_for(start + chunk.tokens, self._size) - held
            table = request.block_table + self._allocate(request_id, need)
            self._run_prefill(request, start, chunk, table, request.num_chunks + 1)

    def _chunk(self, left: int) -> Chunk:
        """How much of a prompt with `left` tokens to go runs under the budget and the caps."""
        knobs = self._knobs
        cap = knobs.long_prefill_token_threshold if knobs.chunked_prefill else 0
        if left <= self._budget and (not cap or left <= cap):
            return Chunk(left, Reason.SCHEDULED, 0)
        if cap and cap <= self._budget:
            return Chunk(cap, Reason.LONG_PREFILL, cap)
        if not knobs.chunked_prefill:
            return Chunk(self._budget, Reason.CHUNKING_OFF, knobs.token_budget)
        return Chunk(self._budget, Reason.BUDGET_SPENT, knobs.token_budget)

    def _run_prefill(
        self,
        request: Request,
        start: int,
        chunk: Chunk,
        table: list[int],
        number: int,
        parent: str = "",
    ) -> None:
        request_id, tokens, left = request.request_id, chunk.tokens, request.num_tokens - start
        whole = tokens == left
        self._segments[request_id] = Segment(
            request_id, SegmentKind.PREFILL, start, tokens, start, whole
        )
        self._tables[request_id] = table
        self._decisions[request_id] = Decision(
            request_id, Action.PREFILL, chunk.reason, tokens, left,
            have=start if number == 1 else 0, limit=chunk.limit, other=parent, chunk=number,
        )  # fmt: skip
        self._budget -= tokens
        self._partial += not whole

    def _at_block_end(self, request: Request) -> bool:
        """Its next token needs a new block."""
        return request.num_computed == len(request.block_table) * self._size

    def _make_room(self, request: Request) -> bool:
        """Preempt until a block can be taken; False when others have to end first.

        Raises:
            RequestFailed: there are no others.
        """
        while not self._pool.available:
            victim = self._policy.victim(self._running)
            if victim is not request:
                self._preempt(victim, request)
            elif len(self._running) > 1:
                return False
            else:
                blocks = self._queues.pool.num_blocks
                raise RequestFailed(
                    request.request_id,
                    f"the pool of {blocks} blocks of {self._size} tokens is too small for it: it "
                    f"has {request.num_tokens} tokens and nobody else holds any block",
                )
        return True

    def _preempt(self, victim: Request, by: Request) -> None:
        """Take the victim's blocks, and its tokens of this step if it had any."""
        request_id = victim.request_id
        segment = self._segments.pop(request_id, None)
        table = self._tables.pop(request_id, victim.block_table)
        if segment is not None:
            self._budget += segment.length
        self._running.remove(victim)
        self._preempted_for = by.request_id
        freed = table[::-1]
        self._pool.release(freed)
        if freed:
            self._events.append(BlocksFreed(request_id, freed))
        self._events.append(Preempted(request_id, by.request_id, victim.num_computed))
        self._victims.append((victim, by))
        self._decisions[request_id] = Decision(request_id, Action.PREEMPT, Reason.PREEMPTED)

    def _tell_victims_what_stays_cached(self) -> None:
        """Known only at the end: blocks of a victim go to others until the last one is served."""
        for victim, by in self._victims:
            known = victim.block_table[: victim.num_cached_blocks]
            kept = sum(1 for block in known if block not in self._pool.taken)
            self._decisions[victim.request_id] = Decision(
                victim.request_id, Action.PREEMPT, Reason.PREEMPTED, left=victim.num_computed,
                have=kept * self._size, other=by.request_id,
            )  # fmt: skip

    def _allocate(self, request_id: str, count: int) -> list[int]:
        """New blocks for a request; the cache forgets what was in them."""
        if count == 0:
            return []
        blocks, evicted = self._pool.take(count)
        if evicted:
            self._events.append(BlocksEvicted(request_id, evicted))
        self._events.append(BlocksAllocated(request_id, blocks))
        return blocks

    def _budget_spent(self, request: Request) -> Decision:
        return Decision(
            request.request_id, Action.WAIT, Reason.BUDGET_SPENT,
            left=request.num_left, have=0, limit=self._knobs.token_budget,
        )  # fmt: skip

    def _no_room(self, request: Request) -> Decision:
        return Decision(
            request.request_id, Action.WAIT, Reason.NO_FREE_BLOCKS,
            left=request.num_left, need=1, have=0,
        )  # fmt: skip

    # -- waiting requests ------------------------------------------------------------------

    def _admit(self) -> Decision | None:
        """Admit waiting requests in order; the decision of all those not named one by one."""
        blocked: list[str] = []
        passes = self._knobs.skip_blocked_head
        left, tightest = passes, ""
        seen = 0
        for request_id in self._queues.waiting:
            if tightest and left <= 0:
                return Decision("", Action.WAIT, Reason.BEHIND, other=tightest)
            request = self._queues.requests[request_id]
            seen += 1
            obstacle = self._admit_one(request, blocked)
            if obstacle is None:
                left -= 1
                continue
            self._decisions[request_id] = obstacle
            if obstacle.reason is Reason.FORK:
                self._num_forks += 1
                continue  # It waits for its own prompt; nobody need wait with it.
            if obstacle.reason not in _PASSABLE or len(blocked) >= passes:
                if seen == len(self._queues.waiting):
                    return None
                return Decision("", Action.WAIT, Reason.BEHIND, other=request_id)
            blocked.append(request_id)
            if not tightest or passes - request.passed < left:
                left, tightest = passes - request.passed, request_id
        return None

    def _admit_one(self, request: Request, blocked: list[str]) -> Decision | None:
        """Admit a request, or say what is in the way."""
        obstacle = self._obstacle_to_all(request)
        if obstacle is not None:
            return obstacle
        reuse = self._reuse(request)
        if isinstance(reuse, Decision):
            return reuse
        left = request.num_tokens - reuse.tokens
        chunk = self._chunk(left)
        need = blocks_for(reuse.tokens + chunk.tokens, self._size) - len(reuse.blocks)
        obstacle = self._obstacle(request, left, chunk, need, self._pool.idle(reuse.blocks))
        if obstacle is None:
            self._start(request, reuse, chunk, need, list(blocked))
        return obstacle

    def _obstacle_to_all(self, request: Request) -> Decision | None:
        """What keeps any request from being admitted now, whatever its size."""
        knobs, request_id, left = self._knobs, request.request_id, request.num_left
        if self._preempted_for:
            return Decision(
                request_id, Action.WAIT, Reason.HELD_BY_PREEMPTION,
                left=left, other=self._preempted_for,
            )  # fmt: skip
        if self._budget == 0:
            return self._budget_spent(request)
        if self._num_running + self._num_forks >= knobs.max_num_seqs:
            return Decision(
                request_id, Action.WAIT, Reason.MAX_NUM_SEQS,
                left=left, need=self._num_forks, have=self._num_running, limit=knobs.max_num_seqs,
            )  # fmt: skip
        return None

    def _obstacle(
        self, request: Request, left: int, chunk: Chunk, need: int, idle: int
    ) -> Decision | None:
        """What keeps this request from being admitted; `idle`: evictable blocks that it shares."""
        knobs, request_id = self._knobs, request.request_id
        if chunk.reason is Reason.CHUNKING_OFF and left <= knobs.token_budget:
            return Decision(
                request_id, Action.WAIT, Reason.CHUNKING_OFF,
                left=left, need=left, have=self._budget, limit=knobs.token_budget,
            )  # fmt: skip
        cap = knobs.max_num_partial_prefills
        if cap and chunk.tokens < left and self._partial >= cap:
            return Decision(
                request_id, Action.WAIT, Reason.PARTIAL_PREFILLS,
                left=left, have=self._partial, limit=cap,
            )  # fmt: skip
        have = max(0, self._pool.available - idle - self._reserved)
        if need > have:
            return Decision(
                request_id, Action.WAIT, Reason.NO_FREE_BLOCKS,
                left=left, need=need, have=have, limit=idle,
            )  # fmt: skip
        if self._num_running and have - need < knobs.watermark:
            return Decision(
                request_id, Action.WAIT, Reason.WATERMARK,
                left=left, need=need, have=have, limit=knobs.watermark,
            )  # fmt: skip
        return None

    def _reuse(self, request: Request) -> Reuse | Decision:
        """What of a waiting request is computed already, or that it waits for just that."""
        parent = request.fork_of
        if parent is not None and self._runs(parent):
            prompt = parent.num_prompt_tokens
            if parent.num_computed < prompt:
                return Decision(
                    request.request_id, Action.WAIT, Reason.FORK,
                    left=request.num_left, have=parent.num_computed, limit=prompt,
                    other=parent.request_id,
                )  # fmt: skip
            fork = self._fork(parent, request)
            # After a preemption, more of it may be cached than the prompt.
            return max(fork, self._cached(request), key=lambda reuse: reuse.tokens)
        return self._cached(request)

    def _fork(self, parent: Request, request: Request) -> Reuse:
        """What it has in common with a running request. The last token known is computed again,
        for its logits."""
        tokens = min(parent.num_prompt_tokens, request.num_tokens - 1)
        full = tokens // self._size
        copy_from = parent.block_table[full] if tokens % self._size else None
        return Reuse(tokens, parent.block_table[:full], copy_from, parent.request_id)

    def _cached(self, request: Request) -> Reuse:
        """What the prefix cache has of it."""
        if not self._knobs.prefix_caching:
            return Reuse()
        blocks = self._queues.pool.cache.lookup(request, self._pool.taken)
        return Reuse(len(blocks) * self._size, blocks)

    def _runs(self, parent: Request) -> bool:
        """It runs, or is admitted in this step (then nothing of it is computed yet)."""
        if self._queues.running.get(parent.request_id) is parent:
            return True
        return (
            parent.request_id in self._segments
            and self._queues.requests.get(parent.request_id) is parent
        )

    def _start(
        self, request: Request, reuse: Reuse, chunk: Chunk, need: int, passed: list[str]
    ) -> None:
        """Admit a request with what it shares and its first chunk."""
        request_id = request.request_id
        resumed = request.status is RequestStatus.PREEMPTED
        looked_up = self._knobs.prefix_caching and not reuse.parent and not resumed
        queried = request.num_tokens if looked_up else 0
        self._events.append(Admitted(request_id, self._now, queried, passed))
        self._pool.share(reuse.blocks)
        if reuse.parent:
            self._events.append(Forked(request_id, reuse.parent, reuse.blocks, reuse.tokens))
        elif reuse.blocks:
            self._events.append(PrefixHit(request_id, reuse.blocks, reuse.tokens, resumed))
        new = self._allocate(request_id, need)
        if reuse.copy_from is not None:
            self._events.append(BlockCopied(request_id, reuse.copy_from, new[0]))
        self._run_prefill(request, reuse.tokens, chunk, reuse.blocks + new, 1, reuse.parent)
        self._num_running += 1

    def _token_ids(self, segments: Iterable[Segment]) -> list[int]:
        token_ids: list[int] = []
        requests = self._queues.requests
        for segment in segments:
            known, start = requests[segment.request_id].token_ids, segment.start
            if segment.length == 1:
                token_ids.append(known[start])
            else:
                token_ids += known[start : start + segment.length]
        return token_ids


_PASSABLE = frozenset(
    {Reason.NO_FREE_BLOCKS, Reason.WATERMARK, Reason.PARTIAL_PREFILLS, Reason.CHUNKING_OFF}
)
"""Obstacles of one request that another may not have."""
