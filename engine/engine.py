"""The engine: `step()` plans, executes, commits, and returns the record of it."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import msgspec
import psutil
import torch

from engine.block_pool import BlockPool
from engine.config import MAX_TOKEN_BUDGET, EngineConfig, check_range
from engine.detokenizer import Detokenizer, Pieces
from engine.errors import InvalidInput, RequestRefused, StepFailed
from engine.memory import MemoryPlan, format_bytes, plan_memory
from engine.model import LoadedModel, StageReport, load
from engine.record import (
    Added,
    Cancelled,
    Event,
    Failed,
    Finished,
    KnobChanged,
    Phases,
    Refused,
    RunHeader,
    Sample,
    StepRecord,
)
from engine.request import FinishReason, Request, SamplingParams
from engine.runner import ModelRunner, StepOutput
from engine.sampler import derived_seed
from engine.scheduler import POLICY, Plan, Scheduler
from engine.version import __version__


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


class _Stream:
    """The output side of one live request."""

    def __init__(self, request: Request, detokenizer: Detokenizer, added_at: float) -> None:
        self.request = request
        self.detokenizer = detokenizer
        self.text = ""
        self.added_at = added_at
        self.first_token_at: float | None = None


class Engine:
    """A continuous-batching engine over one model.

    Args:
        config: every knob; the default runs the embedded model.
        report: told about the stages of loading.

    Raises:
        ModelUnavailable: the model cannot be loaded or run.
        InvalidInput: the settings do not fit the model or the machine.
    """

    def __init__(
        self, config: EngineConfig | None = None, *, report: StageReport | None = None
    ) -> None:
        self.config = config or EngineConfig()
        self.attention: Literal["dense", "paged"] = (
            "dense" if self.config.attention == "dense" else "paged"
        )
        if self.config.threads is not None:
            torch.set_num_threads(self.config.threads)
        report = report or _silent
        self.loaded: LoadedModel = load(self.config, self.attention, report)
        self.memory = self._plan_memory()
        report("memory plan", _memory_line(self.memory), 0, 0)
        self.runner = ModelRunner(self.loaded, self.memory.num_blocks, self.memory.block_size)
        self.runner.verify()
        self.scheduler = Scheduler(
            BlockPool(self.memory.num_blocks, self.memory.block_size),
            token_budget=self.memory.token_budget,
            max_num_seqs=self.memory.max_num_seqs,
            max_model_len=self.memory.max_model_len,
            eos_token_ids=self.loaded.eos_token_ids,
        )
        self.pieces = Pieces(self.loaded.tokenizer)
        self._streams: dict[str, _Stream] = {}
        self._completions: dict[str, Completion] = {}
        self._wanted: set[str] = set()
        self._pending: list[Event] = []
        self._num_added = 0
        self._step = 0
        self._epoch = time.perf_counter()
        self.header = self._header()

    # -- requests --------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | list[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a prompt, as text or as token ids; returns the id of the request.

        Raises:
            RequestRefused: it can never run; the message holds the arithmetic.
            InvalidInput: the id is in use, or a token id is not in the vocabulary.
        """
        params = params or SamplingParams()
        if request_id is None:
            request_id = self._next_id()
        token_ids = self._encode(prompt)
        text = prompt if isinstance(prompt, str) else self.loaded.tokenizer.decode(prompt)
        seed = params.seed
        if seed is None:
            seed = derived_seed(self.config.seed, self._num_added)
        request = Request(request_id, text, token_ids, params, seed)
        now = self._now()
        try:
            if isinstance(prompt, str) and not prompt:
                raise RequestRefused("the prompt is empty: give it some text")
            self.scheduler.add(request)
        except RequestRefused as refusal:
            self._pending.append(Refused(request_id, text, str(refusal), now))
            raise
        self._num_added += 1
        self._pending.append(
            Added(request_id, text, token_ids, self.pieces.all(token_ids), params, now)
        )
        detokenizer = Detokenizer(self.loaded.tokenizer, token_ids)
        self._streams[request_id] = _Stream(request, detokenizer, now)
        return request_id

    def cancel(self, request_id: str) -> bool:
        """Take a request out, whatever its state; False when no live request has this id."""
        stream = self._streams.get(request_id)
        if stream is None:
            return False
        now = self._now()
        rest = stream.detokenizer.flush()
        stream.text += rest
        freed = self.scheduler.cancel(request_id)
        self._pending += [*freed, Cancelled(request_id, rest, now)]
        self._complete(stream, FinishReason.ABORT, now)
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

    @property
    def has_work(self) -> bool:
        """Some request is waiting or running."""
        return self.scheduler.num_live > 0

    @property
    def next_step(self) -> int:
        """The number that the next step will have."""
        return self._step

    @property
    def pending_events(self) -> list[Event]:
        """What happened since the last step; the next record will hold it."""
        return list(self._pending)

    # -- a step ----------------------------------------------------------------------------

    def step(self) -> StepRecord:
        """Run one step. Without work, the record holds only what happened since the last one.

        Raises:
            StepFailed: the forward pass or the sampling raised. Nothing of the step has happened;
                it may be tried again, with other settings.
        """
        started_at = self._now()
        plan = self.scheduler.plan(started_at)
        planned_at = self._now()
        output = self._execute(plan)
        committing_at = self._now()
        events = self.scheduler.commit(plan, output.token_ids, committing_at)
        sampled = self._deliver(plan, output, events, committing_at)
        ended_at = self._now()
        return self._record(
            plan,
            [*self._take_pending(), *events],
            sampled,
            started_at,
            Phases(
                planned_at - started_at,
                output.build_s,
                output.forward_s,
                output.sample_s,
                ended_at - committing_at,
            ),
        )

    def flush(self) -> StepRecord:
        """A record of what happened since the last step, without running anything."""
        nothing = Plan([], [], [], [], None, [])
        return self._record(nothing, self._take_pending(), [], self._now(), Phases())

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Run prompts to their end, with whatever else the engine has to do; results in order.

        Raises:
            RequestRefused: a prompt can never run; none of them is then.
            InvalidInput: the number of params is not that of the prompts.
        """
        each = _for_each(params, len(prompts))
        added: list[str] = []
        try:
            for prompt, own in zip(prompts, each, strict=True):
                added.append(self.add_request(prompt, own))
        except InvalidInput:
            for request_id in added:
                self.cancel(request_id)
            raise
        self._wanted.update(added)
        while not all(request_id in self._completions for request_id in added):
            self.step()
        return [self._completions.pop(request_id) for request_id in added]

    def on_completion(self, request_ids: Sequence[str]) -> None:
        """Keep the completions of these requests until `take_completion` fetches them."""
        self._wanted.update(request_ids)

    def take_completion(self, request_id: str) -> Completion | None:
        """The completion of a request asked for by `on_completion`, once it has ended."""
        return self._completions.pop(request_id, None)

    # -- inside a step ---------------------------------------------------------------------

    def _execute(self, plan: Plan) -> StepOutput:
        if not plan.segments:
            return StepOutput([], [], 0.0, 0.0, 0.0)
        sampling = [self._streams[s.request_id].request for s in plan.segments if s.samples]
        try:
            return self.runner.execute(plan, sampling)
        except Exception as error:
            message = f"step {self._step} failed: {(str(error).splitlines() or ['?'])[0][:300]}"
            self._pending.append(Failed("", message, self._now()))
            raise StepFailed(message) from error

    def _deliver(
        self, plan: Plan, output: StepOutput, events: list[Event], now: float
    ) -> list[Sample]:
        """Turn drawn tokens into streamed text, and ended requests into completions."""
        ended = {e.request_id: e.reason for e in events if isinstance(e, Finished)}
        sampled = []
        draws = zip(output.token_ids, output.logprobs, strict=True)
        for segment in plan.segments:
            if not segment.samples:
                continue
            token_id, logprob = next(draws)
            stream = self._streams[segment.request_id]
            text = stream.detokenizer.push(token_id)
            if segment.request_id in ended:
                text += stream.detokenizer.flush()
            stream.text += text
            if stream.first_token_at is None:
                stream.first_token_at = now
            sampled.append(
                Sample(segment.request_id, token_id, text, self.pieces(token_id), logprob)
            )
            if segment.request_id in ended:
                self._complete(stream, ended[segment.request_id], now)
        return sampled

    def _complete(self, stream: _Stream, reason: FinishReason, now: float) -> None:
        request = stream.request
        del self._streams[request.request_id]
        if request.request_id not in self._wanted:
            return
        self._wanted.discard(request.request_id)
        first = stream.first_token_at
        self._completions[request.request_id] = Completion(
            request_id=request.request_id,
            prompt=request.prompt,
            text=stream.text,
            token_ids=request.token_ids[request.num_prompt_tokens :],
            prompt_tokens=request.num_prompt_tokens,
            finish_reason=reason,
            ttft_s=None if first is None else first - stream.added_at,
            e2e_s=now - stream.added_at,
        )

    def _record(
        self,
        plan: Plan,
        events: list[Event],
        sampled: list[Sample],
        started_at: float,
        phases: Phases,
    ) -> StepRecord:
        scheduler = self.scheduler
        record = StepRecord(
            step=self._step,
            started_at=started_at,
            phases=phases,
            policy=POLICY,
            token_budget=scheduler.token_budget,
            max_num_seqs=scheduler.max_num_seqs,
            segments=plan.segments,
            token_ids=plan.token_ids,
            decisions=plan.decisions,
            rest=plan.rest,
            events=events,
            sampled=sampled,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_finished=scheduler.num_finished,
            blocks_free=scheduler.pool.num_free,
            blocks_held=scheduler.pool.num_held,
        )
        self._step += 1
        return record

    def _take_pending(self) -> list[Event]:
        pending, self._pending = self._pending, []
        return pending

    # -- helpers ---------------------------------------------------------------------------

    def _encode(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return list(self.loaded.tokenizer(_without_surrogates(prompt))["input_ids"])
        vocab = self.loaded.facts.vocab_size
        for token_id in prompt:
            if not 0 <= token_id < vocab:
                raise InvalidInput(f"token id {token_id} is not in the vocabulary of {vocab}")
        return list(prompt)

    def _next_id(self) -> str:
        """`A`, `B`, … `Z`, `AA`, …: short enough to be read in a grid."""
        ordinal = self._num_added
        while True:
            request_id = letters(ordinal)
            if request_id not in self._streams:
                return request_id
            ordinal += 1

    def _plan_memory(self) -> MemoryPlan:
        device = self.loaded.device
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        else:
            free = psutil.virtual_memory().available
        return plan_memory(
            self.config, self.loaded.facts, device.type, self.loaded.max_model_len, free
        )

    def _header(self) -> RunHeader:
        plan = self.memory
        return RunHeader(
            version=__version__,
            started=datetime.now(UTC).isoformat(timespec="seconds"),
            model=self.loaded.facts,
            device=self.loaded.device.type,
            device_name=device_name(self.loaded.device),
            dtype=str(self.loaded.dtype).removeprefix("torch."),
            attention=self.attention,
            policy=POLICY,
            token_budget=plan.token_budget,
            max_num_seqs=plan.max_num_seqs,
            max_model_len=plan.max_model_len,
            block_size=plan.block_size,
            num_blocks=plan.num_blocks,
            seed=self.config.seed,
        )

    def _now(self) -> float:
        """Seconds since the engine started."""
        return time.perf_counter() - self._epoch


def letters(ordinal: int) -> str:
    """0 to `A`, 25 to `Z`, 26 to `AA`, as columns of a spreadsheet."""
    text = ""
    ordinal += 1
    while ordinal:
        ordinal, digit = divmod(ordinal - 1, 26)
        text = chr(ord("A") + digit) + text
    return text


def device_name(device: torch.device) -> str:
    """The card's name, or the processor's and its threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def _memory_line(plan: MemoryPlan) -> str:
    return f"{plan.num_blocks} blocks of {plan.block_size} tokens: {format_bytes(plan.pool_bytes)}"


def _for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidInput(f"{len(params)} sampling params for {count} prompts")
    return list(params)


def _without_surrogates(text: str) -> str:
    """Text that can be encoded: bytes that were no UTF-8 become U+FFFD."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _silent(name: str, detail: str, done: int, total: int) -> None:
    """No one wants to know."""


__all__ = ["Completion", "Engine", "letters"]
