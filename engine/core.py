"""The engine without a model: requests in, steps planned, executed and committed, records out.

No torch here. What computes (`Executor`) and what knows the tokenizer (`TextSide`) are handed in,
so that everything but the numbers can be tested in milliseconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from engine.errors import RequestFailed, RequestRefused, StepFailed, first_line
from engine.knobs import Knob
from engine.plan import Plan
from engine.record import (
    Added,
    Cancelled,
    Event,
    Failed,
    Finished,
    Phases,
    Refused,
    Sample,
    StepRecord,
)
from engine.request import FinishReason, Request
from engine.scheduler import POLICY, Scheduler
from engine.stop import StopStrings


@dataclass(frozen=True)
class StepOutput:
    """What came out of a step, one entry for each sampling segment. Times in seconds.

    `logprobs`: of the drawn tokens. `top_logprobs`: the likeliest (token id, logprob) of each row
    that asked for them; may be empty altogether. `errors`: rows from which nothing can be drawn,
    and why; their entries mean nothing.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)
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
    """A finished request. Times in seconds from when it was added.

    `logprobs` and `top_logprobs` (token id, logprob), one a token, if they were asked for;
    `error`: what was wrong, when the reason is `error`.
    """

    request_id: str
    prompt: str
    text: str
    token_ids: list[int]
    prompt_tokens: int
    finish_reason: FinishReason
    ttft_s: float | None
    e2e_s: float
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    error: str = ""


class _Output:
    """The output side of one live request."""

    def __init__(self, request: Request, stream: TextStream, added_at: float) -> None:
        self.request = request
        self.text = ""
        self.added_at = added_at
        self.first_token_at: float | None = None
        self.error = ""
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self._stream = stream
        self._stop = StopStrings(request.params.stop) if request.params.stop else None

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._stop is not None and self._stop.hit is not None

    def push(self, token_id: int) -> str:
        """The text that a new token adds; may be empty. Call before the token is committed."""
        text = self._stream.push(token_id)
        if self._stop is None or self.request.num_output_tokens < self.request.params.min_tokens:
            return text
        return self._stop.push(text)

    def flush(self) -> str:
        """What is still held back at the end; nothing after a stop string."""
        text = self._stream.flush()
        if self._stop is None:
            return text
        if self.request.num_output_tokens > self.request.params.min_tokens:
            text = self._stop.push(text)
        return text + self._stop.flush()

    def completion(self, reason: FinishReason, now: float) -> Completion:
        """What whoever asked for the request gets."""
        request, first = self.request, self.first_token_at
        asked = request.params.logprobs is not None
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt,
            text=self.text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            prompt_tokens=request.num_prompt_tokens,
            finish_reason=reason,
            ttft_s=None if first is None else first - self.added_at,
            e2e_s=now - self.added_at,
            logprobs=self.logprobs if asked else None,
            top_logprobs=self.top_logprobs if asked else None,
            error=self.error,
        )


class EngineCore:
    """Queues requests, runs steps, and tells what happened.

    Args:
        scheduler: decides what runs.
        executor: runs it.
        text: turns tokens into text.
        clock: seconds, from any origin; the engine's time starts at 0 with the core.
        check: prove queues, tables and pool against each other after every step.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        text: TextSide,
        clock: Callable[[], float] = time.perf_counter,
        check: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.check = check
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
        fork_of = request.fork_of.request_id if request.fork_of else ""
        self._pending.append(
            Added(
                request.request_id, request.prompt, ids, self._text.pieces(ids), request.params,
                now, fork_of,
            )
        )  # fmt: skip
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
        rest = output.flush()
        output.text += rest
        freed = self.scheduler.cancel(request_id)
        self._pending += [Cancelled(request_id, rest, now), *freed]
        self._complete(output, FinishReason.ABORT, now)
        return True

    def set_knob(self, name: str, value: Knob) -> None:
        """Change a setting from the next step on.

        Raises:
            InvalidInput: there is no such knob, or the value is not for it.
        """
        self._pending += self.scheduler.set_knob(name, value)

    def reset_prefix_cache(self, *, force: bool = False) -> None:
        """Make the prefix cache forget everything computed so far.

        Raises:
            InvalidInput: running requests hold cached blocks, and it is not forced.
        """
        self._pending += self.scheduler.reset_prefix_cache(force=force)

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
        plan = self._plan(started_at)
        planned_at = self._now()
        output = self._execute(plan)
        executed_at = self._now()
        events, sampled = self._commit(plan, output, executed_at)
        if self.check:
            self.scheduler.check_integrity()
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
        self.scheduler.blocks_used = self.scheduler.pool.num_held
        return self._record(Plan(), [], [], self._now(), Phases())

    def _plan(self, now: float) -> Plan:
        """The plan of a step; requests that cannot go on are ended first."""
        while True:
            try:
                return self.scheduler.plan(now)
            except RequestFailed as error:
                failure = self._failure(self._outputs[error.request_id], str(error), now)
                events = self.scheduler.fail(failure, trusted=True)
                self._pending += events
                self._close(events, now)

    def _execute(self, plan: Plan) -> StepOutput:
        if not plan.segments:
            return StepOutput([], [])
        sampling = [self._outputs[s.request_id].request for s in plan.segments if s.samples]
        try:
            return self._executor.execute(plan, sampling)
        except Exception as error:
            message = f"step {self.step_number} failed and changed nothing: {first_line(error)}"
            self._pending.append(Failed("", message, self._now()))
            self._pending += self.scheduler.rollback(plan)
            raise StepFailed(message) from error

    def _commit(
        self, plan: Plan, output: StepOutput, now: float
    ) -> tuple[list[Event], list[Sample]]:
        """Turn drawn tokens into streamed text, and apply the step; its events and samples."""
        outputs = [self._outputs[s.request_id] for s in plan.segments if s.samples]
        errors = {
            outputs[row].request.request_id: self._failure(outputs[row], message, now)
            for row, message in output.errors.items()
        }
        stopped: set[str] = set()
        texts: list[str] = []
        for out, token_id in zip(outputs, output.token_ids, strict=True):
            texts.append("" if out.request.request_id in errors else out.push(token_id))
            if out.stopped:
                stopped.add(out.request.request_id)
        events = self.scheduler.commit(plan, output.token_ids, now, stopped=stopped, failed=errors)
        ended = {event.request_id for event in events if isinstance(event, Finished)}
        pieces = self._text.pieces(output.token_ids)
        sampled: list[Sample] = []
        for row, out in enumerate(outputs):
            request_id = out.request.request_id
            if request_id in errors:
                continue
            if request_id in ended:
                texts[row] += out.flush()
            if texts[row]:
                out.text += texts[row]
            if out.first_token_at is None:
                out.first_token_at = now
            sampled.append(
                Sample(
                    request_id, output.token_ids[row], texts[row], pieces[row],
                    output.logprobs[row], self._top(out, row, output),
                )
            )  # fmt: skip
        if ended:
            self._close(events, now)
        return events, sampled

    def _failure(self, out: _Output, message: str, now: float) -> Failed:
        """The end of a request that cannot go on, with the text that was still held back."""
        text = out.flush()
        out.text += text
        return Failed(out.request.request_id, message, now, text)

    def _top(self, out: _Output, row: int, output: StepOutput) -> list[tuple[int, str, float]]:
        """The likeliest tokens of a row, if they are wanted."""
        if out.request.params.logprobs is None:
            return []
        top = output.top_logprobs[row] if output.top_logprobs else []
        out.logprobs.append(output.logprobs[row])
        out.top_logprobs.append(top)
        pieces = self._text.pieces([token_id for token_id, _ in top])
        return [(token_id, piece, p) for (token_id, p), piece in zip(top, pieces, strict=True)]

    def _close(self, events: list[Event], now: float) -> None:
        """Complete the requests that ended with these events."""
        for event in events:
            if isinstance(event, Failed) and event.request_id:
                self._outputs[event.request_id].error = event.message
            elif isinstance(event, Finished):
                self._complete(self._outputs[event.request_id], event.reason, now)

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
            token_budget=scheduler.knobs.token_budget,
            max_num_seqs=scheduler.knobs.max_num_seqs,
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
            blocks_evictable=scheduler.pool.num_evictable,
            blocks_held=scheduler.pool.num_held,
            blocks_used=scheduler.blocks_used,
        )
        self.step_number += 1
        return record

    def _now(self) -> float:
        """Seconds since the engine started."""
        return self._clock() - self._epoch
