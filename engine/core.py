"""The engine without a model: requests in, steps planned, executed and committed, records out.

No torch here. What computes (`Executor`) and what knows the tokenizer (`TextSide`) are handed in,
so that everything but the numbers can be tested in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine.config import MAX_TOKEN_BUDGET, check_range
from engine.errors import RequestRefused, StepFailed, first_line
from engine.record import (
    Added,
    Cancelled,
    Event,
    Failed,
    Finished,
    KnobChanged,
    Phases,
    Refused,
    Sample,
    StepRecord,
)
from engine.request import FinishReason, Request
from engine.scheduler import POLICY, Plan, Scheduler


@dataclass(frozen=True)
class StepOutput:
    """What came out of a step: one token and log-probability for each sampling segment.

    Times in seconds.
    """

    token_ids: list[int]
    logprobs: list[float]
    build_s: float = 0.0
    forward_s: float = 0.0
    sample_s: float = 0.0


class Executor(Protocol):
    """Computes a planned step."""

    def execute(self, plan: Plan, requests: Sequence[Request]) -> StepOutput:
        """Run a plan; `requests` are those of its sampling segments, in order."""
        ...


class TextStream(Protocol):
    """Output tokens to text, one by one."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; may be empty."""
        ...

    def flush(self) -> str:
        """What is still held back."""
        ...


class TextSide(Protocol):
    """What the tokenizer knows."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each token by itself."""
        ...

    def stream(self, prompt_ids: list[int]) -> TextStream:
        """A stream for the output that follows a prompt."""
        ...


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A finished request. Times in seconds from when it was added."""

    request_id: str
    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float | None
    e2e_s: float


class _Output:
    """The output side of one live request."""

    def __init__(self, request: Request, stream: TextStream, added_at: float) -> None:
        self.request = request
        self.stream = stream
        self.text = ""
        self.added_at = added_at
        self.first_token_at: float | None = None

    def completion(self, reason: FinishReason, now: float) -> Completion:
        request, first = self.request, self.first_token_at
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt,
            text=self.text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            prompt_tokens=request.num_prompt_tokens,
            finish_reason=reason,
            ttft_s=None if first is None else first - self.added_at,
            e2e_s=now - self.added_at,
        )


class EngineCore:
    """Queues requests, runs steps, and tells what happened.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        text: turns tokens into text.
        clock: seconds, from any origin; the engine's time starts at 0 with the core.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        text: TextSide,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self.step_number = 0
        self._executor = executor
        self._text = text
        self._clock = clock
        self._epoch = clock()
        self._outputs: dict[str, _Output] = {}
        self._wanted: set[str] = set()
        self._completions: dict[str, Completion] = {}
        self._pending: list[Event] = []

    @property
    def has_work(self) -> bool:
        """Some request is waiting or running."""
        return self.scheduler.num_live > 0

    @property
    def pending_events(self) -> list[Event]:
        """What happened since the last step; the next record will hold it."""
        return list(self._pending)

    def pending_since(self, first: int) -> list[Event]:
        """`pending_events[first:]`, without copying the rest."""
        return self._pending[first:]

    def is_live(self, request_id: str) -> bool:
        """A request with this id is waiting or running."""
        return request_id in self._outputs

    # -- between steps ---------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestRefused: it can never run; recorded as an event, too.
            InvalidInput: its id is in use.
        """
        now = self._now()
        try:
            self.scheduler.add(request)
        except RequestRefused as refusal:
            self.refuse(request.request_id, request.prompt, str(refusal))
            raise
        ids = list(request.token_ids)
        self._pending.append(
            Added(
                request.request_id, request.prompt, ids, self._text.pieces(ids), request.params, now
            )
        )
        self._outputs[request.request_id] = _Output(request, self._text.stream(ids), now)

    def refuse(self, request_id: str, prompt: str, message: str) -> None:
        """Record that a request was turned away."""
        self._pending.append(Refused(request_id, prompt, message, self._now()))

    def cancel(self, request_id: str) -> bool:
        """Take a request out, whatever its state; False when no live request has this id."""
        output = self._outputs.get(request_id)
        if output is None:
            return False
        now = self._now()
        rest = output.stream.flush()
        output.text += rest
        freed = self.scheduler.cancel(request_id)
        self._pending += [Cancelled(request_id, rest, now), *freed]
        self._complete(output, FinishReason.ABORT, now)
        return True

    def set_token_budget(self, value: int) -> None:
        """Change m from the next step on.

        Raises:
            InvalidInput: it is below 1 or absurdly large.
        """
        check_range("token budget", value, 1, MAX_TOKEN_BUDGET)
        old = self.scheduler.token_budget
        if value != old:
            self.scheduler.token_budget = value
            self._pending.append(KnobChanged("token_budget", old, value))

    # -- completions -----------------------------------------------------------------------

    def want_completions(self, request_ids: Sequence[str]) -> None:
        """Keep the completions of these live requests until they are taken."""
        self._wanted.update(request_ids)

    def take_completion(self, request_id: str) -> Completion | None:
        """The completion of a request that was asked for, once it has ended."""
        return self._completions.pop(request_id, None)

    def has_completion(self, request_id: str) -> bool:
        """`take_completion` would give it."""
        return request_id in self._completions

    # -- steps -----------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Plan, execute, commit. Without work, only what happened since the last step is recorded.

        Raises:
            StepFailed: the execution raised. Nothing of the step has happened; it may be tried
                again, with other settings.
        """
        started_at = self._now()
        plan = self.scheduler.plan(started_at)
        planned_at = self._now()
        output = self._execute(plan)
        executed_at = self._now()
        events = self.scheduler.commit(plan, output.token_ids, executed_at)
        sampled = self._deliver(plan, output, events, executed_at)
        phases = Phases(
            planned_at - started_at,
            output.build_s,
            output.forward_s,
            output.sample_s,
            self._now() - executed_at,
        )
        return self._record(plan, events, sampled, started_at, phases)

    def flush(self) -> StepRecord:
        """A record of what happened since the last step, without running anything."""
        nothing = Plan([], [], [], [], None, [])
        return self._record(nothing, [], [], self._now(), Phases())

    def _execute(self, plan: Plan) -> StepOutput:
        if not plan.segments:
            return StepOutput([], [])
        sampling = [self._outputs[s.request_id].request for s in plan.segments if s.samples]
        try:
            return self._executor.execute(plan, sampling)
        except Exception as error:
            message = f"step {self.step_number} failed and changed nothing: {first_line(error)}"
            self._pending.append(Failed("", message, self._now()))
            raise StepFailed(message) from error

    def _deliver(
        self, plan: Plan, output: StepOutput, events: list[Event], now: float
    ) -> list[Sample]:
        """Turn drawn tokens into streamed text, and ended requests into completions."""
        ended = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
        sampling = [segment.request_id for segment in plan.segments if segment.samples]
        pieces = self._text.pieces(output.token_ids)
        sampled = []
        for request_id, token_id, logprob, piece in zip(
            sampling, output.token_ids, output.logprobs, pieces, strict=True
        ):
            out = self._outputs[request_id]
            text = out.stream.push(token_id)
            if request_id in ended:
                text += out.stream.flush()
            out.text += text
            if out.first_token_at is None:
                out.first_token_at = now
            sampled.append(Sample(request_id, token_id, text, piece, logprob))
            if request_id in ended:
                self._complete(out, ended[request_id], now)
        return sampled

    def _complete(self, output: _Output, reason: FinishReason, now: float) -> None:
        request_id = output.request.request_id
        del self._outputs[request_id]
        if request_id in self._wanted:
            self._wanted.discard(request_id)
            self._completions[request_id] = output.completion(reason, now)

    def _record(
        self,
        plan: Plan,
        events: list[Event],
        sampled: list[Sample],
        started_at: float,
        phases: Phases,
    ) -> StepRecord:
        scheduler, pending = self.scheduler, self._pending
        self._pending = []
        record = StepRecord(
            step=self.step_number,
            started_at=started_at,
            phases=phases,
            policy=POLICY,
            token_budget=scheduler.token_budget,
            max_num_seqs=scheduler.max_num_seqs,
            segments=plan.segments,
            token_ids=plan.token_ids,
            decisions=plan.decisions,
            rest=plan.rest,
            events=pending + events,
            sampled=sampled,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished=scheduler.num_finished,
            blocks_free=scheduler.pool.num_free,
            blocks_held=scheduler.pool.num_held,
        )
        self.step_number += 1
        return record

    def _now(self) -> float:
        """Seconds since the engine started."""
        return self._clock() - self._epoch
