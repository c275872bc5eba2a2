"""Single steps of given make-up: time by phase, beside the floor and transformers' own batching."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.bench import floor
from engine.bench.floor import Machine, Span
from engine.bench.peers import TransformersBatching
from engine.block_pool import blocks_for
from engine.config import EngineConfig
from engine.core import StepOutput
from engine.engine import Engine
from engine.plan import Plan
from engine.record import Segment, SegmentKind
from engine.request import Request, SamplingParams

STEPS: dict[str, list[Span]] = {
    **{f"decode {n} at {c}": [(1, c - 1)] * n for c in (256, 1024) for n in (1, 8, 32)},
    "mixed 8 + 248": [(1, 255)] * 8 + [(248, 0)],
    "prefill 256": [(256, 0)],
}
BLOCK_SIZE = 16
"""Tokens."""


class StepTime(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ms, the median of the rounds by phase and the least of their sums."""

    step: str
    build_ms: float
    forward_ms: float
    sample_ms: float
    least_ms: float
    floor_ms: float
    over_floor: float
    transformers_ms: float | None = None


class Steps(msgspec.Struct, frozen=True, kw_only=True):
    """All steps of one shape, and the machine at its best meanwhile."""

    machine: Machine
    steps: list[StepTime]


def measure(path: Path, rounds: int, only: Sequence[str], peers: bool) -> Steps:
    """Each step of STEPS, or those whose names begin as one of `only`.

    Ours is measured before and after theirs, and the machine between all steps: where others use
    it, too, the least of many moments is the nearest to what it can do.
    """
    wanted = {
        name: spans
        for name, spans in STEPS.items()
        if not only or any(name.startswith(start) for start in only)
    }
    blocks = max(sum(map(_blocks, spans)) for spans in wanted.values())
    engine = Engine(EngineConfig(model=str(path), num_blocks=blocks, block_size=BLOCK_SIZE))
    theirs = TransformersBatching(path) if peers else None
    machine = floor.measure(rounds)
    measured: dict[str, tuple[list[StepOutput], float | None]] = {}
    for name, spans in wanted.items():
        outputs = _run(engine, spans, rounds)
        decode_ms = None
        if theirs and _is_short_decode(spans):
            decode_ms = theirs.decode_ms(len(spans), spans[0][1] + 1, rounds)
        outputs += _run(engine, spans, rounds)
        measured[name] = outputs, decode_ms
        machine = machine.best_of(floor.measure(rounds))
    facts = engine.loaded.facts
    return Steps(
        machine=machine,
        steps=[
            _summary(name, *measured[name], floor.floor_of(machine, facts, spans).ms)
            for name, spans in wanted.items()
        ],
    )


def _is_short_decode(spans: list[Span]) -> bool:
    """One that their pool holds at every batch size."""
    return all(length == 1 and context < 512 for length, context in spans)


def _summary(
    name: str, outputs: list[StepOutput], transformers_ms: float | None, floor_ms: float
) -> StepTime:
    least = min(o.build_s + o.forward_s + o.sample_s for o in outputs) * 1e3
    return StepTime(
        step=name,
        build_ms=statistics.median(o.build_s for o in outputs) * 1e3,
        forward_ms=statistics.median(o.forward_s for o in outputs) * 1e3,
        sample_ms=statistics.median(o.sample_s for o in outputs) * 1e3,
        least_ms=least,
        floor_ms=floor_ms,
        over_floor=least / floor_ms,
        transformers_ms=transformers_ms,
    )


def _run(engine: Engine, spans: list[Span], rounds: int) -> list[StepOutput]:
    segments, tables, first = [], [], 0
    for i, (length, context) in enumerate(spans):
        count = _blocks((length, context))
        tables.append(list(range(first, first + count)))
        first += count
        segments.append(Segment(str(i), SegmentKind.DECODE, context, length, context, True))
    plan = Plan(segments, tables, [7] * sum(n for n, _ in spans), [], None, [])
    requests = [
        Request(str(i), "", [1], SamplingParams(max_tokens=2), 0) for i in range(len(spans))
    ]
    return [engine.runner.execute(plan, requests) for _ in range(rounds + 1)][1:]


def _blocks(span: Span) -> int:
    return blocks_for(sum(span), BLOCK_SIZE)
