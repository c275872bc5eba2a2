"""Results as JSON or as a table for a terminal and for README.md."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import transformers

from engine.bench.floor import Machine
from engine.bench.scheduler import SchedulerCost
from engine.bench.steps import StepTime
from engine.bench.workload import Result


def machine_name() -> str:
    """The processor, as it calls itself, and the versions of what computes."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return (
        f"{models[0] if models else name}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )


def as_json(value: object) -> str:
    """With the machine's name beside it."""
    return msgspec.json.encode({"machine": machine_name(), "results": value}).decode()


def floor_table(machine: Machine) -> str:
    """Rates of the machine."""
    rows = [["reading memory", f"{machine.read_gb_per_s:.1f} GB/s", ""]]
    rows += [
        [f"product of {n} rows", f"{machine.gemm_gflops[n]:.0f} GFLOP/s",
         f"{machine.plain_gflops[n]:.0f} GFLOP/s"]
        for n in machine.gemm_gflops
    ]  # fmt: skip
    return table(["", "packed", "torch's own"], rows)


def steps_table(steps: Sequence[StepTime]) -> str:
    """A row a step, ms."""
    head = ["step", "build", "forward", "sample", "least", "floor", "over floor", "transformers"]
    rows = [
        [
            s.step, *(f"{x:.2f}" for x in (s.build_ms, s.forward_ms, s.sample_ms, s.least_ms,
                                           s.floor_ms)),
            f"{s.over_floor:.2f}×",
            "" if s.transformers_ms is None
            else f"{s.transformers_ms:.1f} ({s.transformers_ms / s.least_ms:.2f}×)",
        ]
        for s in steps
    ]  # fmt: skip
    return table(head, rows)


def workload_table(results: Sequence[Result]) -> str:
    """A row a shape."""
    head = ["shape", "ours tok/s", "transformers tok/s", "ratio by round", "same tokens"]
    rows = [
        [
            r.shape, f"{r.ours_tok_per_s:.1f}",
            "" if r.theirs_tok_per_s is None else f"{r.theirs_tok_per_s:.1f}",
            " ".join(f"{ratio:.2f}×" for ratio in r.ratios),
            "" if r.same is None else f"{r.same} of {r.requests}",
        ]
        for r in results
    ]  # fmt: skip
    return table(head, rows)


def scheduler_table(rows: Sequence[SchedulerCost]) -> str:
    """A row a length of the queue, µs."""
    head = ["running", "waiting", "add", "cancel", "plan", "whole step", "encode", "record"]
    return table(
        head,
        [
            [
                str(r.running), f"{r.waiting:,}",
                *(f"{x:.0f}" for x in (r.add_us, r.cancel_us, r.plan_us, r.step_us, r.encode_us)),
                f"{r.record_bytes / 1000:.1f} kB",
            ]
            for r in rows
        ],
    )  # fmt: skip


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown, with columns aligned for a terminal, too."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in [head, ["-" * w for w in widths], *rows]
    ]
    return "\n".join(lines)
