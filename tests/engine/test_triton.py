"""The Triton kernels against dense attention: compiled where there is a card, else interpreted.

The interpreter takes some 15 ms for each tile of keys that each program looks at, so the batches
are small and the tiles large.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch

from engine import Engine, EngineConfig, SamplingParams
from engine.attention import interface
from engine.attention.dense import dense_attention
from engine.block_pool import blocks_for
from engine.decode_graphs import Forward
from engine.errors import ModelUnavailable
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch
from engine.record import Segment, SegmentKind

from .test_parity import alone

pytest.importorskip("triton", reason="there is no triton for this platform")

from engine.attention.triton_paged import (
    Tiling,
    triton_attention,
    triton_write,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DECODES = [(0, 1), (1, 1), (200, 1), (37, 1)]
CHUNKS = [(0, 60), (35, 40)]
MIXED = [(300, 1), (0, 33), (17, 1), (130, 50)]


class Step(NamedTuple):
    batch: PackedBatch
    cache: KVCache
    query: torch.Tensor


def make_step(
    segments: list[tuple[int, int]],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    size: int = 16,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Step:
    """A step of (cached, new) tokens; keys lie in shuffled blocks, all other slots hold NaN."""
    torch.manual_seed(len(segments) * size + block_size)
    counts = [blocks_for(context + length, block_size) for context, length in segments]
    ids = random.Random(block_size).sample(range(sum(counts) + 3), sum(counts))
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    packed = [
        Segment(f"r{i}", SegmentKind.PREFILL, context, length, context, True)
        for i, (context, length) in enumerate(segments)
    ]
    rows = sum(length for _, length in segments)
    batch = PackedBatch(packed, tables, [0] * rows, block_size, DEVICE)
    cache = KVCache(
        num_layers=2, num_slots=(sum(counts) + 3) * block_size, num_kv_heads=kv_heads,
        head_dim=size, dtype=dtype, device=DEVICE,
    )  # fmt: skip
    for tensor in cache.layer(1):
        tensor.fill_(float("nan"))
        slots = batch.packed_key_slots
        tensor[slots] = torch.randn(len(slots), kv_heads, size, device=DEVICE).to(dtype)
    # As a model hands it over: heads before tokens in memory.
    query = torch.randn(heads, rows, size, device=DEVICE).to(dtype).transpose(0, 1)
    return Step(batch, cache, query)


def assert_agrees(step: Step, *, window: int = 0, softcap: float = 0.0, **own: object) -> None:
    asked = {"window": window, "softcap": softcap}
    scaling = 1.7 * step.query.shape[2] ** -0.5
    expected = dense_attention(step.query, step.cache, 1, step.batch, scaling, **asked)
    found = triton_attention(step.query, step.cache, 1, step.batch, scaling, **asked, **own)
    assert found.shape == expected.shape
    tolerance = 2e-5 if step.query.dtype is torch.float32 else 1e-2
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("segments", [DECODES, CHUNKS, MIXED, [(0, 1)]])
def test_all_kinds_of_step(segments):
    assert_agrees(make_step(segments))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"),
    [(2, 2, 64), (3, 1, 8), (4, 1, 128), (8, 1, 80), (6, 2, 32), (16, 2, 96)],
)
def test_shapes_of_heads(heads, kv_heads, size):
    assert_agrees(make_step(MIXED[1:], heads=heads, kv_heads=kv_heads, size=size))


@pytest.mark.parametrize("block_size", [1, 3, 7, 64, 1024])
def test_sizes_of_blocks(block_size):
    assert_agrees(make_step(MIXED[1:], block_size=block_size))


@pytest.mark.parametrize(
    ("window", "softcap"), [(1, 0.0), (9, 0.0), (40, 2.0), (0, 1.5), (1000, 0.0), (256, 0.0)]
)
def test_windows_and_soft_caps(window, softcap):
    assert_agrees(make_step(MIXED), window=window, softcap=softcap)


def test_a_saturated_soft_cap_is_no_overflow():
    step = make_step(DECODES)
    assert_agrees(Step(step.batch, step.cache, step.query * 1e4), softcap=1.5)


@pytest.mark.parametrize("splits", [2, 4, 16])
@pytest.mark.parametrize("window", [0, 30])
def test_keys_split_among_programs(splits, window):
    step = make_step([(150, 1), (0, 1), (70, 3)], heads=3, kv_heads=1)
    assert_agrees(step, splits=splits, window=window, tiling=Tiling(16, 32))


@pytest.mark.parametrize("rows", [16, 64])
def test_small_tiles(rows):
    """As on a card: many tiles of queries and of keys, group sizes that do not divide the rows."""
    step = make_step([(20, 9), (50, 1)], heads=3, kv_heads=1)
    assert_agrees(step, tiling=Tiling(rows, 16), splits=1)
    assert_agrees(step, tiling=Tiling(rows, 16), splits=1, window=21)


def test_half_precision():
    assert_agrees(make_step(MIXED[1:], dtype=torch.float16))


def test_a_query_is_given_the_same_whatever_shares_its_batch():
    """Bit for bit, when keys are not split."""
    crowd = make_step(MIXED)
    together = triton_attention(crowd.query, crowd.cache, 1, crowd.batch, 0.25, splits=1)
    segment, table = crowd.batch.segments[0], crowd.batch.block_tables[0].tolist()
    alone = PackedBatch([segment], [table], [0], crowd.batch.block_size, DEVICE)
    by_itself = triton_attention(crowd.query[:1], crowd.cache, 1, alone, 0.25, splits=1)
    assert torch.equal(by_itself, together[:1])


@pytest.mark.parametrize(("kv_heads", "size"), [(1, 8), (3, 20), (2, 64)])
def test_writing_as_the_cache_writes(kv_heads, size):
    ours = make_step(MIXED, heads=6, kv_heads=kv_heads, size=size, block_size=5)
    theirs = make_step(MIXED, heads=6, kv_heads=kv_heads, size=size, block_size=5)
    rows = len(ours.batch.slots)
    keys, values = torch.randn(2, kv_heads, rows, size, device=DEVICE).transpose(1, 2)
    triton_write(ours.cache, 1, ours.batch.slots, keys, values)
    theirs.cache.write(1, theirs.batch.slots, keys, values)
    for mine, other in zip(ours.cache.layer(1), theirs.cache.layer(1), strict=True):
        assert torch.equal(mine.nan_to_num(7.0), other.nan_to_num(7.0))


def test_a_model_says_with_triton_what_it_says_alone(model_path):
    path = model_path("tiny-llama")
    engine = Engine(EngineConfig(model=path, attention="triton", token_budget=12, num_blocks=16))
    prompts = [[5, 6, 7] * 4, [9], list(range(20, 31))]
    done = engine.generate(prompts, SamplingParams(max_tokens=5))
    assert [d.token_ids for d in done] == [alone(path, tuple(p), 5) for p in prompts]
    assert engine.header.attention == "triton"


def test_where_triton_cannot_run_it_is_told_why(model_path, monkeypatch):
    config = EngineConfig(model=model_path("tiny-llama"), attention="triton", device="cpu")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ModelUnavailable, match="it needs a CUDA device"):
        Engine(config)
    monkeypatch.setattr(interface, "find_spec", lambda name: None)
    with pytest.raises(ModelUnavailable, match=r"pip install 'cbviz\[triton\]'"):
        Engine(config)
    assert Engine(EngineConfig(device="cpu")).attention == "paged"


def test_padded_decodes_say_the_same(model_path):
    """The batches that a graph replays, run as they are: sizes, padding and the spare block."""
    path = model_path("tiny-llama")
    engine = Engine(EngineConfig(model=path, attention="triton", num_blocks=24, block_size=4))
    runner, replayed = engine.runner, []

    def uncaptured(forward: Forward) -> Forward:
        def replay() -> torch.Tensor:
            replayed.append(forward())
            return replayed[-1]

        return replay

    # No request of this test comes near the pool's last block.
    runner.graphs = runner.decode_graphs(23, 3, uncaptured)
    prompts = [[5, 6, 7], [9], [20, 21, 22, 23, 24]]
    params = [SamplingParams(max_tokens=n) for n in (6, 3, 5)]
    done = engine.generate(prompts, params)
    assert [d.token_ids for d in done] == [
        alone(path, tuple(p), own.max_tokens) for p, own in zip(prompts, params, strict=True)
    ]
    assert [len(logits) for logits in replayed] == [3, 3, 2, 2, 1]
