"""What scheduling costs without a model: plan, commit and record of a step, torch-free.

The queue is the variable: 256 requests decode while 10 to 100,000 wait behind them. Planning that
looks at the queue shows up as a curve that rises.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import msgspec

from engine.block_pool import BlockPool
from engine.core import EngineCore, StepOutput
from engine.knobs import Knobs
from engine.plan import Plan
from engine.record import StepRecord
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler

WAITING = (10, 100, 1_000, 10_000, 100_000)
BLOCK_SIZE = 16
PROMPT = 24
STEPS = 200
"""Of a measurement."""


class SchedulerCost(msgspec.Struct, frozen=True, kw_only=True):
    """One row: times in microseconds, medians over steps."""

    running: int
    waiting: int
    add_us: float
    """Queueing one more request, its event included."""
    cancel_us: float
    """Cancelling one from the middle of the queue."""
    plan_us: float
    step_us: float
    """Plan, commit and the finished record."""
    encode_us: float
    """The record as bytes."""
    record_bytes: int


class NoModel:
    """Says 1, at no cost."""

    def execute(self, plan: Plan, requests: Sequence[Request]) -> StepOutput:
        """One token for each sampling segment."""
        count = len(requests)
        return StepOutput([1] * count, [-1.0] * count)


class NoText:
    """Every token is a letter."""

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """As many letters."""
        return ["a"] * len(token_ids)

    def stream(self, prompt_ids: list[int]) -> NoText:
        """Itself."""
        return self

    def push(self, token_id: int) -> str:
        """A letter."""
        return "a"

    def flush(self) -> str:
        """Nothing is held back."""
        return ""


def measure(running: int = 256, waiting: Sequence[int] = WAITING) -> list[SchedulerCost]:
    """One row for each length of the queue."""
    return [_measure(running, count) for count in waiting]


def _measure(running: int, waiting: int) -> SchedulerCost:
    core = _engine(running)
    ids = (f"r{index}" for index in range(10**9))
    for _ in range(running):
        _add(core, next(ids))
    core.step()
    queued = [next(ids) for _ in range(waiting)]
    gc.collect()
    gc.freeze()
    adding = sum(_clock(partial(_add, core, request_id)) for request_id in queued)
    core.step()
    plans = [_clock(lambda: core.scheduler.plan(0.0)) for _ in range(STEPS)]
    records: list[StepRecord] = []
    steps = [_clock(lambda: records.append(core.step())) for _ in range(STEPS)]
    encoder = msgspec.msgpack.Encoder()
    encoded = [_clock(partial(encoder.encode, record)) for record in records]
    middle = queued[waiting // 2 : waiting // 2 + 5]
    cancelling = sum(_clock(partial(core.cancel, request_id)) for request_id in middle)
    gc.unfreeze()
    assert len(records[-1].segments) == running
    return SchedulerCost(
        running=running,
        waiting=waiting,
        add_us=adding / waiting,
        cancel_us=cancelling / len(middle),
        plan_us=median(plans),
        step_us=median(steps),
        encode_us=median(encoded),
        record_bytes=len(encoder.encode(records[-1])),
    )


def _engine(running: int) -> EngineCore:
    blocks = running * (PROMPT + 3 * STEPS) // BLOCK_SIZE
    knobs = Knobs(token_budget=running * PROMPT, max_num_seqs=running)
    scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), knobs, max_model_len=10**6)
    return EngineCore(scheduler, NoModel(), NoText())


def _add(core: EngineCore, request_id: str) -> None:
    params = SamplingParams(max_tokens=2 * STEPS + 100, ignore_eos=True)
    token_ids = [hash((request_id, index)) % 30_000 for index in range(PROMPT)]
    core.add(Request(request_id, "a prompt", token_ids, params, 0))


def _clock(work: Callable[[], object]) -> float:
    """Microseconds."""
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6
