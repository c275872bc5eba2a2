"""An engine core with no model: tokens come from a hash of what a request has said so far."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from itertools import count

import msgspec

from engine.block_pool import BlockPool
from engine.core import EngineCore, StepOutput
from engine.knobs import Knob, Knobs
from engine.plan import Plan
from engine.prefix_cache import HashFunction
from engine.record import BlocksAllocated, ModelFacts, RunHeader, StepRecord
from engine.request import Request, SamplingParams
from engine.scheduler import POLICY, Scheduler
from engine.world import World

EOS = 0
VOCAB = 50


def next_token(token_ids: Sequence[int]) -> int:
    """What the fake model says after these tokens."""
    return zlib.crc32(bytes(token_ids)) % VOCAB


def expected_output(prompt: Sequence[int], params: SamplingParams, context: int) -> list[int]:
    """What a request alone would say."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        made = len(tokens) - len(prompt)
        ended = tokens[-1] == EOS and not params.ignore_eos
        ended = (ended or tokens[-1] in params.stop_token_ids) and made > params.min_tokens
        if ended or made == params.max_tokens or len(tokens) == context:
            return tokens[len(prompt) :]


class FakeModel:
    """Keeps token ids in slots, as the cache keeps keys, and reads them back through the tables."""

    def __init__(self, pool: BlockPool) -> None:
        self.size = pool.block_size
        self.slots = [-1] * (pool.num_blocks * pool.block_size)
        self.fail_next = False
        self.nan: set[str] = set()
        """Requests whose logits are NaN."""

    def execute(self, plan: Plan, requests: Sequence[Request]) -> StepOutput:
        size, tokens = self.size, iter(plan.token_ids)
        for source, target in plan.copies:
            block = self.slots[source * size : (source + 1) * size]
            self.slots[target * size : (target + 1) * size] = block
        drawn: list[int] = []
        errors: dict[int, str] = {}
        for segment, table in zip(plan.segments, plan.tables, strict=True):
            for position in range(segment.start, segment.start + segment.length):
                self.slots[self.slot(table, position)] = next(tokens)
        for segment, table in zip(plan.segments, plan.tables, strict=True):
            if segment.samples:
                if segment.request_id in self.nan:
                    errors[len(drawn)] = "the logits are NaN"
                seen = range(segment.context + segment.length)
                drawn.append(next_token([self.slots[self.slot(table, p)] for p in seen]))
        if self.fail_next:
            self.fail_next = False
            for _, table in zip(plan.segments, plan.tables, strict=True):
                for index in range(len(table)):
                    if table[index] in allocated(plan):
                        self.slots[table[index] * size : (table[index] + 1) * size] = [-2] * size
            raise RuntimeError("out of memory\nand more lines")
        assert next(tokens, None) is None
        return StepOutput(drawn, [-1.0] * len(drawn), errors=errors)

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.size] * self.size + position % self.size


def allocated(plan: Plan) -> set[int]:
    """Blocks that a plan hands out."""
    events = [event for event in plan.events if isinstance(event, BlocksAllocated)]
    return {block for event in events for block in event.block_ids}


class FakeText:
    """Every token is its number."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        return [f" {token_id}" for token_id in token_ids]

    def stream(self, prompt_ids: list[int]) -> FakeText:
        return self

    def push(self, token_id: int) -> str:
        return f" {token_id}"

    def flush(self) -> str:
        return ""


class FakeEngine:
    """A core over the fake model, and the fold of its records, checked after every step."""

    def __init__(
        self,
        *,
        token_budget: int = 16,
        max_num_seqs: int = 8,
        block_size: int = 4,
        num_blocks: int = 64,
        max_model_len: int = 128,
        hash_function: HashFunction = hash,
        **knobs: Knob,
    ) -> None:
        pool = BlockPool(num_blocks, block_size, hash_function)
        self.knobs = Knobs(token_budget=token_budget, max_num_seqs=max_num_seqs, **knobs)
        self.scheduler = Scheduler(
            pool, self.knobs, max_model_len=max_model_len, eos_token_ids=frozenset({EOS})
        )
        self.model = FakeModel(pool)
        ticks = count()
        self.core = EngineCore(
            self.scheduler, self.model, FakeText(), clock=lambda: next(ticks) / 1000
        )
        self.header = header(
            knobs=self.knobs,
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
        )
        self.world = World(self.header)
        self.records: list[StepRecord] = []

    def add(self, request_id: str, prompt: int | list[int], **params: object) -> Request:
        """Queue `prompt` tokens (a number: that many, all different from other requests')."""
        ids = prompt
        if isinstance(ids, int):
            ids = [(zlib.crc32(request_id.encode()) + i) % VOCAB for i in range(ids)]
        sampling = SamplingParams(**params)
        first: Request | None = None
        for name in [request_id, *(f"{request_id}.{i}" for i in range(2, sampling.n + 1))]:
            request = Request(name, f"prompt of {request_id}", ids, sampling, 0, first)
            self.core.add(request)
            first = first or request
        assert first is not None
        return first

    def step(self) -> StepRecord:
        """One step; its record goes through the wire format into the fold, which must agree."""
        record = self.core.step()
        wire = msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=StepRecord)
        assert wire == record
        self.records.append(wire)
        self.world.apply(wire)
        self.check()
        return record

    def run(self, limit: int = 2_000) -> list[StepRecord]:
        """Step until nothing is left."""
        while self.core.has_work:
            self.step()
            limit -= 1
            assert limit > 0, "no end in sight"
        return self.records

    def check(self) -> None:
        """The fold equals the engine's own state, the pool adds up, and each cached block holds
        the tokens that it is cached for."""
        scheduler, world, pool = self.scheduler, self.world, self.scheduler.pool
        scheduler.check_integrity()
        assert world.running == list(scheduler.running)
        assert list(world.waiting) == list(scheduler.waiting)
        assert list(world.free) == list(pool.free)
        assert list(world.evictable) == list(pool.evictable)
        assert world.ref_counts == pool.ref_counts
        assert world.num_finished == scheduler.num_finished
        assert world.knobs == scheduler.knobs
        assert world.cached.keys() == {entry.block_id for entry in pool.cache}
        size = pool.block_size
        for entry in pool.cache:
            stored = self.model.slots[entry.block_id * size : (entry.block_id + 1) * size]
            assert tuple(stored) == entry.token_ids
            filler, index = world.cached[entry.block_id]
            if filler in world.requests:
                known = world.requests[filler].token_ids[index * size : (index + 1) * size]
                assert tuple(known) == entry.token_ids
        for request in scheduler:
            view = world.requests[request.request_id]
            assert view.block_table == request.block_table
            assert view.num_computed == request.num_computed
            assert view.token_ids == request.token_ids
            assert view.status == request.status
            assert view.high_water == request.high_water
        last = world.last
        assert last is not None
        assert last.num_running == len(world.running)
        assert last.num_waiting == len(world.waiting)
        assert last.blocks_free == len(world.free)
        assert last.blocks_evictable == len(world.evictable)
        assert last.blocks_held == world.blocks_held == len(world.owners())
        stats = scheduler.stats
        assert stats.queried == world.cache_queried_tokens
        assert stats.hit == world.cache_hit_tokens
        assert stats.resumed == world.resumed_tokens
        assert stats.recomputed == world.recomputed_tokens
        assert stats.evictions == world.evictions
        assert stats.merged == world.merged_blocks


def header(*, knobs: Knobs, **sizes: int) -> RunHeader:
    """A header for the fake model."""
    facts = ModelFacts(
        name="fake", architecture="Fake", num_parameters=0, weight_bytes=0, num_layers=1,
        num_heads=1, num_kv_heads=1, head_dim=1, vocab_size=VOCAB, context=sizes["max_model_len"],
        bytes_per_token=8,
    )  # fmt: skip
    return RunHeader(
        version="0", started="2026-01-01T00:00:00+00:00", model=facts, device="cpu",
        device_name="fake", dtype="float32", attention="dense", policy=POLICY, seed=0,
        knobs=knobs, **sizes,
    )  # fmt: skip
