"""Single steps of given make-up: time by phase, beside the floor and transformers' own batching."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from engine.bench.floor import Machine, Span, floor_of
from engine.bench.peers import TransformersBatching
from engine.block_pool import blocks_for
from engine.config import EngineConfig
from engine.core import StepOutput
from engine.engine import Engine
from engine.record import Segment, SegmentKind
from engine.request import Request, SamplingParams
from engine.scheduler import Plan

STEPS: dict[str, list[Span]] = {
    **{f"decode {n} at {c}": [(1, c - 1)] * n for c in (256, 1024) for n in (1, 8, 32)},
    "mixed 8 + 248": [(1, 255)] * 8 + [(248, 0)],
    "prefill 256": [(256, 0)],
}
BLOCK_SIZE = 16


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


def measure(
    path: Path, machine: Machine, rounds: int, only: Sequence[str], peers: bool
) -> list[StepTime]:
    """Each step of STEPS, or those whose names begin as one of `only`."""
    wanted = {
        name: spans
        for name, spans in STEPS.items()
        if not only or any(name.startswith(start) for start in only)
    }
    blocks = max(sum(_blocks(span) for span in spans) for spans in wanted.values())
    engine = Engine(EngineConfig(model=str(path), num_blocks=blocks, block_size=BLOCK_SIZE))
    theirs = TransformersBatching(path) if peers else None
    rows = []
    for name, spans in wanted.items():
        outputs = _run(engine, spans, rounds)
        least = min(o.build_s + o.forward_s + o.sample_s for o in outputs) * 1e3
        floor = floor_of(machine, engine.loaded.facts, spans).ms
        decodes = all(length == 1 for length, _ in spans)
        rows.append(
            StepTime(
                step=name,
                build_ms=statistics.median(o.build_s for o in outputs) * 1e3,
                forward_ms=statistics.median(o.forward_s for o in outputs) * 1e3,
                sample_ms=statistics.median(o.sample_s for o in outputs) * 1e3,
                least_ms=least,
                floor_ms=floor,
                over_floor=least / floor,
                transformers_ms=(
                    theirs.decode_ms(len(spans), spans[0][1] + 1, rounds)
                    if theirs and decodes and spans[0][1] < 512
                    else None
                ),
            )
        )
    return rows


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
