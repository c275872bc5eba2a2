"""A busy run of the real scheduler without a model: everything that can happen to a request."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine.errors import RequestRefused
from engine.record import StepRecord
from engine.world import World
from tests.engine.fakes import FakeEngine

Namer = Callable[[int], str]


def busy_run(seed: int, steps: int = 60, name: Namer = "r{}".format) -> FakeEngine:
    """Requests that share prompts, fork, are cancelled, fail; memory that runs out."""
    chance = random.Random(seed)
    engine = FakeEngine(
        token_budget=chance.choice([5, 9, 16]), max_num_seqs=chance.choice([2, 4, 6]),
        block_size=4, num_blocks=chance.choice([13, 18, 40]),
    )  # fmt: skip
    added: list[str] = []
    for step in range(steps):
        for _ in range(chance.choice([0, 0, 1, 1, 2])):
            request_id = name(len(added))
            prompt = [7] * chance.choice([0, 4, 12]) + [chance.randrange(50) for _ in range(9)]
            try:
                engine.add(
                    request_id, prompt, max_tokens=chance.randint(1, 14),
                    n=chance.choice([1, 1, 1, 2]), ignore_eos=True,
                )  # fmt: skip
            except RequestRefused:
                continue
            added.append(request_id)
        if added and chance.random() < 0.1:
            engine.core.cancel(chance.choice(added))
        if added and chance.random() < 0.1:
            engine.model.nan.add(chance.choice(added))
        if chance.random() < 0.05:
            engine.core.set_knob("token_budget", chance.choice([5, 9, 16]))
        if step == 20:
            engine.core.refuse(name(9999), "a prompt", "it is too long")
        engine.step()
    return engine


def worlds(engine: FakeEngine, records: list[StepRecord]) -> list[World]:
    """The state after each step."""
    world = World(engine.header)
    found = []
    for record in records:
        world.apply(record)
        found.append(world.copy())
    return found
