"""A tiny fake engine: valid headers and records that fold, without a model or a scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.knobs import Knobs
from engine.record import (
    Action,
    Added,
    Admitted,
    BlocksAllocated,
    BlocksFreed,
    Decision,
    Event,
    Finished,
    ModelFacts,
    Phases,
    Preempted,
    Reason,
    RunHeader,
    Sample,
    Segment,
    SegmentKind,
    StepRecord,
)
from engine.request import FinishReason, SamplingParams
from engine.world import World

WORDS = (
    " once upon a time there was a little fox who lived by the sea and every day he ran home to"
    " his mother , who said : do not go far ."
).replace(" ", "\x00 ").split("\x00")[1:]  # fmt: skip


def header(
    *, budget: int = 32, max_num_seqs: int = 8, block_size: int = 16, num_blocks: int = 64
) -> RunHeader:
    """A run of a small model that was never loaded."""
    model = ModelFacts(
        name="synthetic", architecture="LlamaForCausalLM", num_parameters=2_200_000,
        weight_bytes=8_800_000, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=32,
        vocab_size=1024, context=4096, bytes_per_token=2048,
    )  # fmt: skip
    return RunHeader(
        version="0", started="2026-01-01T00:00:00Z", model=model, device="cpu", device_name="cpu",
        dtype="float32", attention="dense", policy="continuous",
        knobs=Knobs(token_budget=budget, max_num_seqs=max_num_seqs), max_model_len=4096,
        block_size=block_size, num_blocks=num_blocks, seed=0,
    )  # fmt: skip


def words(count: int, offset: int = 0) -> list[str]:
    """Pieces of a plausible text."""
    return [WORDS[(offset + index) % len(WORDS)] for index in range(count)]


@dataclass
class Job:
    """A request of the fake engine."""

    request_id: str
    pieces: list[str]
    max_tokens: int
    known: int = 0
    prefill_end: int = 0
    computed: int = 0
    chunks: int = 0
    table: list[int] = field(default_factory=list)


class FakeEngine:
    """Continuous batching with chunked prefill, preemption by recompute; tokens are invented."""

    def __init__(self, run: RunHeader) -> None:
        self.header = run
        self.world = World(run)
        self.records: list[StepRecord] = []
        self.waiting: list[Job] = []
        self.running: list[Job] = []
        self.finished = 0
        self._events: list[Event] = []
        self._free = list(range(run.num_blocks))

    def add(self, request_id: str, pieces: list[str], max_tokens: int = 8) -> None:
        """Queue a request for the next step."""
        ids = list(range(len(pieces)))
        params = SamplingParams(max_tokens=max_tokens)
        self._events.append(Added(request_id, "".join(pieces), ids, list(pieces), params, 0.0))
        self.waiting.append(Job(request_id, list(pieces), max_tokens, known=len(pieces)))

    def step(self) -> StepRecord:
        """Run one step, and fold its record into `world`."""
        segments: list[Segment] = []
        decisions: list[Decision] = []
        left = self.header.knobs.token_budget
        for job in sorted(self.running, key=lambda job: job.computed < job.prefill_end):
            if job in self.running and left:
                left -= self._schedule(job, left, segments, decisions)
        while self.waiting and left and len(self.running) < self.header.knobs.max_num_seqs:
            job = self.waiting[0]
            take = min(left, job.known)
            if self._blocks_for(take) > len(self._free):
                break
            self.running.append(self.waiting.pop(0))
            job.prefill_end = job.known
            self._events.append(Admitted(job.request_id, 0.0))
            left -= self._schedule(job, left, segments, decisions)
        sampled = self._commit(segments)
        return self._record(segments, decisions, sampled)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.header.block_size)

    def _schedule(
        self, job: Job, left: int, segments: list[Segment], decisions: list[Decision]
    ) -> int:
        take = min(left, job.known - job.computed)
        need = self._blocks_for(job.computed + take) - len(job.table)
        while need > len(self._free):
            victim = self.running[-1]
            if victim is job or any(s.request_id == victim.request_id for s in segments):
                return 0
            self._preempt(victim, job.request_id)
        if need > 0:
            ids = [self._free.pop(0) for _ in range(need)]
            job.table.extend(ids)
            self._events.append(BlocksAllocated(job.request_id, ids))
        decode = job.computed >= job.prefill_end
        kind, action = (
            (SegmentKind.DECODE, Action.DECODE) if decode else (SegmentKind.PREFILL, Action.PREFILL)
        )
        samples = job.computed + take == job.known
        segments.append(Segment(job.request_id, kind, job.computed, take, job.computed, samples))
        job.chunks += not decode
        reason = Reason.SCHEDULED if samples else Reason.BUDGET_SPENT
        decisions.append(
            Decision(
                job.request_id, action, reason, tokens=take, left=job.known - job.computed,
                limit=self.header.knobs.token_budget, chunk=0 if decode else job.chunks,
            )
        )  # fmt: skip
        return take

    def _preempt(self, victim: Job, by: str) -> None:
        self._release(victim)
        self._events.append(Preempted(victim.request_id, by, victim.computed))
        victim.computed = victim.chunks = 0
        self.running.remove(victim)
        self.waiting.insert(0, victim)

    def _release(self, job: Job) -> None:
        self._free.extend(reversed(job.table))
        self._events.append(BlocksFreed(job.request_id, list(reversed(job.table))))
        job.table = []

    def _commit(self, segments: list[Segment]) -> list[Sample]:
        jobs = {job.request_id: job for job in self.running}
        sampled: list[Sample] = []
        for segment in segments:
            job = jobs[segment.request_id]
            job.computed += segment.length
            if not segment.samples:
                continue
            piece = words(1, job.known)[0]
            sampled.append(Sample(job.request_id, 0, piece, piece, -0.5))
            job.pieces.append(piece)
            job.known += 1
            job.max_tokens -= 1
            if job.max_tokens == 0:
                self._release(job)
                self._events.append(Finished(job.request_id, FinishReason.LENGTH, 0.0))
                self.running.remove(job)
                self.finished += 1
        return sampled

    def _record(
        self, segments: list[Segment], decisions: list[Decision], sampled: list[Sample]
    ) -> StepRecord:
        count = sum(segment.length for segment in segments)
        record = StepRecord(
            step=self.world.step + 1, started_at=0.1 * (self.world.step + 1),
            phases=Phases(0.001, 0.003, 0.07, 0.002, 0.001), policy="continuous",
            token_budget=self.header.knobs.token_budget,
            max_num_seqs=self.header.knobs.max_num_seqs,
            segments=segments, token_ids=[0] * count, decisions=decisions, rest=None,
            events=self._events, sampled=sampled, num_running=len(self.running),
            num_waiting=len(self.waiting), num_finished=self.finished,
            blocks_free=len(self._free), blocks_evictable=0,
            blocks_held=self.header.num_blocks - len(self._free),
            blocks_used=self.header.num_blocks - len(self._free),
        )  # fmt: skip
        self._events = []
        self.world.apply(record)
        self.records.append(record)
        return record


def story(steps: int = 11, **knobs: int) -> FakeEngine:
    """Three requests that decode while a fourth is prefilled in chunks."""
    engine = FakeEngine(header(**knobs))
    engine.add("a", words(12), 40)
    engine.add("b", words(7, 5), 40)
    engine.add("c", words(20, 9), 40)
    for index in range(steps):
        if index == steps - 2:
            engine.add("d", words(75), 40)
        engine.step()
    return engine
