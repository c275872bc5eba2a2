"""The scheduler: which tokens of which requests run in a step, and why. No torch.

`plan` changes nothing: it works on a draft of the pool and returns a `Plan`, whose events say what
would change. `commit` applies them once the step has been executed, so a step that fails leaves
no trace. The policy is that of "Continuous batching from first principles" (Hugging Face, 2025):
fill the token budget with every decode first (one token each), then prefills in progress, then
waiting requests in order, the last one split to fit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from engine.block_pool import BlockPool, PoolDraft, blocks_for
from engine.errors import InvalidInput, RequestRefused
from engine.record import (
    Action,
    Admitted,
    BlocksAllocated,
    BlocksFreed,
    Decision,
    Event,
    Finished,
    Preempted,
    Reason,
    Segment,
    SegmentKind,
)
from engine.request import FinishReason, Request, RequestStatus

POLICY = "continuous"


@dataclass(frozen=True)
class Plan:
    """What one step would do. Nothing has happened yet.

    `tables[i]` is the block table that `segments[i]` runs with. `events` are the changes, in
    order, that come before the forward pass.
    """

    segments: list[Segment]
    tables: list[list[int]]
    token_ids: list[int]
    decisions: list[Decision]
    rest: Decision | None
    events: list[Event]

    @property
    def num_tokens(self) -> int:
        """`n_Q` of the packed batch."""
        return len(self.token_ids)


@dataclass
class _Draft:
    """A plan in the making."""

    pool: PoolDraft
    budget: int
    queue: list[Request]
    """Running requests in order of admission, without those preempted in this step."""
    scheduled: dict[str, tuple[Segment, list[int]]] = field(default_factory=dict)
    new_blocks: dict[str, list[int]] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    preempted_for: str = ""
    """The request that took another one's blocks in this step."""

    def table(self, request: Request) -> list[int]:
        return request.block_table + self.new_blocks.get(request.request_id, [])


class Scheduler:
    """Queues, budget and pool of one engine.

    Args:
        pool: the physical blocks.
        token_budget: m, tokens in a step at most.
        max_num_seqs: running requests at most.
        max_model_len: prompt and output tokens of a request at most.
        eos_token_ids: tokens that end a request.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        token_budget: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.pool = pool
        self.token_budget = token_budget
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.eos_token_ids = eos_token_ids
        self.waiting: OrderedDict[str, Request] = OrderedDict()
        self.running: dict[str, Request] = {}
        self.num_finished = 0
        self._step = 0

    @property
    def num_live(self) -> int:
        """Requests that are waiting or running."""
        return len(self.waiting) + len(self.running)

    def live(self, request_id: str) -> Request | None:
        """The request, if it has not ended."""
        return self.running.get(request_id) or self.waiting.get(request_id)

    def requests(self) -> Iterator[Request]:
        """Live requests: running ones in order of admission, then the queue."""
        yield from self.running.values()
        yield from self.waiting.values()

    # -- between steps ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidInput: a live request has its id.
            RequestRefused: it can never run; the message holds the arithmetic.
        """
        if self.live(request.request_id) is not None:
            raise InvalidInput(f"request id {request.request_id!r} is in use by a live request")
        self.check_fits(request)
        self.waiting[request.request_id] = request

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
        request = self.live(request_id)
        if request is None:
            raise KeyError(request_id)
        return self._end(request)

    # -- a step ----------------------------------------------------------------------------

    def plan(self, now: float) -> Plan:
        """What the next step does under the present settings, with a reason for each request.

        Time and size are proportional to the running requests and the ones admitted, never to the
        length of the queue. `now`: seconds since the engine started.
        """
        draft = _Draft(PoolDraft(self.pool), self.token_budget, list(self.running.values()))
        for request in self._running_in_turn():
            if request.request_id not in draft.decisions:
                self._schedule_running(draft, request)
        rest = self._admit(draft, now)
        scheduled = list(draft.scheduled.values())
        return Plan(
            segments=[segment for segment, _ in scheduled],
            tables=[table for _, table in scheduled],
            token_ids=self._token_ids(segment for segment, _ in scheduled),
            decisions=list(draft.decisions.values()),
            rest=rest,
            events=draft.events,
        )

    def commit(self, plan: Plan, sampled: Sequence[int], now: float) -> list[Event]:
        """Apply an executed plan. `sampled`: one token id for each sampling segment, in order.

        Returns the events of the step: those of the plan, then what the new tokens brought about.
        """
        for event in plan.events:
            self._apply(event)
        tokens = iter(sampled)
        ended: list[Event] = []
        for segment in plan.segments:
            request = self.running[segment.request_id]
            request.num_computed = segment.start + segment.length
            request.last_scheduled = self._step
            if segment.samples:
                request.token_ids.append(next(tokens))
                reason = self.finish_reason(request)
                if reason is not None:
                    ended.append(Finished(request.request_id, reason, now))
                    ended.extend(self._end(request))
        self._step += 1
        return plan.events + ended

    def finish_reason(self, request: Request) -> FinishReason | None:
        """Why the request ends with its newest token; None = it goes on."""
        if request.token_ids[-1] in self.eos_token_ids and not request.params.ignore_eos:
            return FinishReason.STOP
        if request.num_output_tokens >= request.params.max_tokens:
            return FinishReason.LENGTH
        if request.num_tokens >= self.max_model_len:
            return FinishReason.LENGTH
        return None

    def check_integrity(self) -> None:
        """Prove queues, tables and pool against each other.

        Raises:
            AssertionError: something is wrong; the message says what.
        """
        self.pool.check_integrity(request.block_table for request in self.requests())
        for request in self.waiting.values():
            if request.block_table or request.num_computed:
                raise AssertionError(f"{request.request_id} waits, but holds blocks")
        for request in self.running.values():
            need = blocks_for(request.num_computed, self.pool.block_size)
            if len(request.block_table) != need:
                raise AssertionError(
                    f"{request.request_id} holds {len(request.block_table)} blocks for "
                    f"{request.num_computed} tokens"
                )

    # -- planning --------------------------------------------------------------------------

    def _running_in_turn(self) -> list[Request]:
        """Decodes, then prefills, each in order of admission.

        When there are more decodes than budget, those served longest ago come first, so that
        they take turns.
        """
        decodes = [request for request in self.running.values() if request.decoding]
        if len(decodes) > self.token_budget:
            decodes.sort(key=lambda request: request.last_scheduled)
        return decodes + [r for r in self.running.values() if not r.decoding]

    def _schedule_running(self, draft: _Draft, request: Request) -> None:
        """Give a running request its next tokens, or say why not."""
        if draft.budget == 0:
            draft.decisions[request.request_id] = self._budget_spent(request)
            return
        wanted = min(request.num_left, draft.budget)
        room = self._room(draft, request)
        while room == 0 and draft.queue[-1] is not request:
            self._preempt(draft, draft.queue[-1], request)
            room = self._room(draft, request)
        if room == 0:
            draft.decisions[request.request_id] = Decision(
                request.request_id, Action.WAIT, Reason.NO_FREE_BLOCKS,
                left=request.num_left, need=1, have=0,
            )  # fmt: skip
            return
        self._schedule(draft, request, min(wanted, room))

    def _admit(self, draft: _Draft, now: float) -> Decision | None:
        """Admit waiting requests in order; the decision of all those not named one by one."""
        running = len(draft.queue)
        for position, request in enumerate(self.waiting.values()):
            obstacle = self._obstacle(draft, request, running)
            if obstacle is not None:
                draft.decisions[request.request_id] = obstacle
                if position + 1 == len(self.waiting):
                    return None
                return Decision("", Action.WAIT, Reason.BEHIND, other=request.request_id)
            draft.events.append(Admitted(request.request_id, now))
            self._schedule(draft, request, min(request.num_left, draft.budget))
            running += 1
        return None

    def _obstacle(self, draft: _Draft, request: Request, running: int) -> Decision | None:
        """Why the head of the queue cannot be admitted now; None = it can."""
        request_id, left = request.request_id, request.num_left
        if draft.preempted_for:
            return Decision(
                request_id, Action.WAIT, Reason.HELD_BY_PREEMPTION,
                left=left, other=draft.preempted_for,
            )  # fmt: skip
        if draft.budget == 0:
            return self._budget_spent(request)
        if running >= self.max_num_seqs:
            return Decision(
                request_id, Action.WAIT, Reason.MAX_NUM_SEQS,
                left=left, have=running, limit=self.max_num_seqs,
            )  # fmt: skip
        need = blocks_for(min(left, draft.budget), self.pool.block_size)
        if need > draft.pool.available:
            return Decision(
                request_id, Action.WAIT, Reason.NO_FREE_BLOCKS,
                left=left, need=need, have=draft.pool.available,
            )  # fmt: skip
        return None

    def _budget_spent(self, request: Request) -> Decision:
        return Decision(
            request.request_id, Action.WAIT, Reason.BUDGET_SPENT,
            left=request.num_left, have=0, limit=self.token_budget,
        )  # fmt: skip

    def _room(self, draft: _Draft, request: Request) -> int:
        """Tokens that the request's blocks and the free ones could take."""
        blocks = len(request.block_table) + draft.pool.available
        return blocks * self.pool.block_size - request.num_computed

    def _schedule(self, draft: _Draft, request: Request, tokens: int) -> None:
        request_id, start = request.request_id, request.num_computed
        need = blocks_for(start + tokens, self.pool.block_size) - len(request.block_table)
        if need > 0:
            blocks = draft.pool.take(need)
            draft.new_blocks[request_id] = blocks
            draft.events.append(BlocksAllocated(request_id, blocks))
        # A waiting request starts a prefill of all it knows, however little that is.
        decodes = request.status is RequestStatus.RUNNING and request.decoding
        kind, action = (
            (SegmentKind.DECODE, Action.DECODE)
            if decodes
            else (SegmentKind.PREFILL, Action.PREFILL)
        )
        segment = Segment(request_id, kind, start, tokens, start, tokens == request.num_left)
        draft.scheduled[request_id] = (segment, draft.table(request))
        draft.decisions[request_id] = Decision(
            request_id, action, Reason.SCHEDULED, tokens=tokens, left=request.num_left
        )
        draft.budget -= tokens

    def _preempt(self, draft: _Draft, victim: Request, by: Request) -> None:
        """Take the victim's blocks, and its tokens of this step if it had any."""
        request_id = victim.request_id
        segment, table = draft.scheduled.pop(request_id, (None, draft.table(victim)))
        if segment is not None:
            draft.budget += segment.length
        freed = table[::-1]
        draft.pool.release(freed)
        draft.queue.remove(victim)
        draft.preempted_for = by.request_id
        if freed:
            draft.events.append(BlocksFreed(request_id, freed))
        draft.events.append(Preempted(request_id, by.request_id, victim.num_computed))
        draft.decisions[request_id] = Decision(
            request_id, Action.PREEMPT, Reason.PREEMPTED,
            left=victim.num_computed, other=by.request_id,
        )  # fmt: skip

    def _token_ids(self, segments: Iterator[Segment]) -> list[int]:
        token_ids: list[int] = []
        for segment in segments:
            request = self.live(segment.request_id)
            assert request is not None
            token_ids += request.token_ids[segment.start : segment.start + segment.length]
        return token_ids

    # -- applying --------------------------------------------------------------------------

    def _apply(self, event: Event) -> None:
        """One planned change, for real."""
        match event:
            case Admitted(request_id=request_id):
                request = self.waiting.pop(request_id)
                request.status = RequestStatus.RUNNING
                request.prefill_end = request.num_tokens
                self.running[request_id] = request
            case BlocksAllocated(request_id=request_id, block_ids=block_ids):
                self.pool.take(block_ids)
                self.running[request_id].block_table += block_ids
            case BlocksFreed(request_id=request_id, block_ids=block_ids):
                self.pool.release(block_ids)
                self.running[request_id].block_table = []
            case Preempted(request_id=request_id):
                request = self.running.pop(request_id)
                request.status = RequestStatus.PREEMPTED
                request.num_computed = 0
                self.waiting[request_id] = request
                self.waiting.move_to_end(request_id, last=False)
            case _:
                raise AssertionError(f"a plan cannot hold {event}")

    def _end(self, request: Request) -> list[Event]:
        """Remove an ended request and free what it held."""
        queue = self.running if request.status is RequestStatus.RUNNING else self.waiting
        del queue[request.request_id]
        request.status = RequestStatus.FINISHED
        self.num_finished += 1
        if not request.block_table:
            return []
        freed = request.block_table[::-1]
        self.pool.release(freed)
        request.block_table = []
        return [BlocksFreed(request.request_id, freed)]
