"""What the benchmark computes and says; how fast anything is, is not tested."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from cbviz.cli import cli
from engine.bench.floor import Machine, floor_of
from engine.bench.report import table
from engine.bench.workload import jobs
from engine.record import ModelFacts

FACTS = ModelFacts(
    name="m", architecture="M", num_parameters=1_000_000, weight_bytes=4_000_000, num_layers=2,
    num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=1000, context=128, bytes_per_token=512,
)  # fmt: skip
MACHINE = Machine(
    threads=1, read_gb_per_s=4.0, gemm_gflops={1: 1.0, 8: 10.0}, plain_gflops={1: 1.0, 8: 5.0}
)


def test_the_workload_is_the_same_every_time():
    given = jobs(500)
    assert given == jobs(500)
    assert len(given) == 32
    assert sum(len(prompt) for prompt, _ in given) == 3817
    assert sum(length for _, length in given) == 2101


def test_a_decode_is_bound_by_memory_and_a_prefill_by_arithmetic():
    decode = floor_of(MACHINE, FACTS, [(1, 99)])
    assert decode.memory_ms == pytest.approx((4_000_000 + 100 * 512) / 4e6)
    assert decode.ms == decode.memory_ms
    prefill = floor_of(MACHINE, FACTS, [(64, 0)])
    seen = 64 * 65 // 2
    work = 2 * 64 * (1_000_000 - 64_000) + 2 * 64_000 + 4 * seen * 64 * 2
    assert prefill.ms == prefill.compute_ms == pytest.approx(work / 1e7)


def test_a_table_is_markdown_with_straight_columns():
    assert table(["a", "bb"], [["long", "x"]]) == ("| a    | bb |\n| ---- | -- |\n| long | x  |")


@pytest.mark.parametrize("command", ["floor", "steps", "workload"])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(cli, ["bench", command, "--help"])
    assert result.exit_code == 0
    assert "--rounds" in result.output
    assert "--json" in result.output
