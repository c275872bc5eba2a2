"""What the machine allows: how fast it reads memory and multiplies, and the least time of a step.

A step must read every weight once and every key and value that its queries see; it must do two
operations for each weight and token. It cannot be faster than either takes at the rate measured
here, so the larger of the two is its floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
from torch.nn.functional import linear

from engine.linear import PackedLinear
from engine.record import ModelFacts

READ_BYTES = 256 * 2**20
"""Larger than any cache."""
WIDTH = 1024
GEMM_ROWS = (1, 8, 32, 256)
Span = tuple[int, int]
"""(tokens computed, tokens cached before) of a request in a step."""


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Measured rates. `gemm_gflops`, `plain_gflops`: by rows of the batch, with a packed weight
    and with torch's own; `read_gb_per_s`: reading memory in order with all threads."""

    threads: int
    read_gb_per_s: float
    gemm_gflops: dict[int, float]
    plain_gflops: dict[int, float]

    def best_of(self, other: Machine) -> Machine:
        """The larger rate of two measurements: the smaller one shared the machine."""
        return Machine(
            threads=self.threads,
            read_gb_per_s=max(self.read_gb_per_s, other.read_gb_per_s),
            gemm_gflops={n: max(x, other.gemm_gflops[n]) for n, x in self.gemm_gflops.items()},
            plain_gflops={n: max(x, other.plain_gflops[n]) for n, x in self.plain_gflops.items()},
        )


class Floor(msgspec.Struct, frozen=True, kw_only=True):
    """The least time of a step, ms: by memory, by arithmetic, and the larger of both."""

    memory_ms: float
    compute_ms: float

    @property
    def ms(self) -> float:
        """No step is faster than this."""
        return max(self.memory_ms, self.compute_ms)


@torch.inference_mode()
def measure(rounds: int) -> Machine:
    """Best of `rounds`."""
    data = torch.ones(READ_BYTES // 4)
    read_s = best(data.sum, rounds)
    weight = torch.randn(2 * WIDTH, WIDTH)
    packed = PackedLinear(weight, None)
    gemm, plain = {}, {}
    for rows in GEMM_ROWS:
        x = torch.randn(rows, WIDTH)
        work = 2 * rows * weight.numel() / 1e9
        gemm[rows] = work / best(partial(packed, x), rounds * 3)
        plain[rows] = work / best(partial(linear, x, weight), rounds * 3)
    return Machine(
        threads=torch.get_num_threads(),
        read_gb_per_s=READ_BYTES / read_s / 1e9,
        gemm_gflops=gemm,
        plain_gflops=plain,
    )


def floor_of(machine: Machine, facts: ModelFacts, spans: Sequence[Span]) -> Floor:
    """The least time of a step in which each request samples one token."""
    tokens = sum(length for length, _ in spans)
    head = facts.vocab_size * _width(facts)
    body = facts.num_parameters - head
    keys = sum(length + context for length, context in spans)
    seen = sum(length * context + length * (length + 1) // 2 for length, context in spans)
    attention = 4 * seen * facts.num_heads * facts.head_dim * facts.num_layers
    work = 2 * tokens * body + 2 * len(spans) * head + attention
    peak = max(machine.gemm_gflops.values())
    read = bytes_read(facts, keys)
    return Floor(memory_ms=read / machine.read_gb_per_s / 1e6, compute_ms=work / peak / 1e6)


def bytes_read(facts: ModelFacts, keys: int) -> int:
    """What a step must read: every weight, and keys and values of so many tokens."""
    return facts.weight_bytes + keys * facts.bytes_per_token


def best(function: Callable[[], Any], rounds: int) -> float:
    """The least of the times of several calls after one to warm up, s."""
    function()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return min(times)


def _width(facts: ModelFacts) -> int:
    return facts.num_heads * facts.head_dim
