"""The CPU kernel against the dense reference, and life without it."""

from __future__ import annotations

import random

import pytest
import torch

from engine.attention.cpu import build, kernel
from engine.attention.dense import dense_attention
from engine.attention.paged import attend_by_request, paged_attention
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch
from engine.record import Segment, SegmentKind

CPU = torch.device("cpu")
needs_kernel = pytest.mark.skipif(
    build.find_compiler() is None or kernel.switched_off(), reason="no C++ compiler"
)
SHAPES = [
    (heads * kv_heads, kv_heads, dim)
    for heads, kv_heads in [(1, 3), (3, 2), (4, 1), (8, 2)]
    for dim in (8, 20, 64, 80, 128)
]


class Case:
    """A random ragged step over a pool with blocks out of order; what is not its own is NaN."""

    def __init__(
        self, spans: list[tuple[int, int]], shape: tuple[int, int, int], block_size: int, seed: int
    ) -> None:
        """`spans`: (length, context) of each segment."""
        rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        heads, kv_heads, dim = shape
        counts = [-(-(context + length) // block_size) for length, context in spans]
        blocks = list(range(sum(counts) + 2))
        rng.shuffle(blocks)
        tables = [[blocks.pop() for _ in range(count)] for count in counts]
        segments = [
            Segment(str(i), SegmentKind.PREFILL, context, length, context, True)
            for i, (length, context) in enumerate(spans)
        ]
        rows = sum(length for length, _ in spans)
        self.batch = PackedBatch(segments, tables, [0] * rows, block_size, CPU)
        self.cache = KVCache(
            num_layers=2, num_slots=(sum(counts) + 2) * block_size, num_kv_heads=kv_heads,
            head_dim=dim, dtype=torch.float32, device=CPU,
        )  # fmt: skip
        for pool in self.cache.pools(1):
            pool.fill_(torch.nan)
            own = self.batch.packed_key_slots
            pool[own] = torch.randn(len(own), kv_heads, dim, generator=generator)
        self.query = torch.randn(rows, heads, dim, generator=generator)

    def by_kernel(self, **options: float) -> torch.Tensor:
        assert kernel.kernel_for(self.query, self.cache) is not None
        return paged_attention(self.query, self.cache, 1, self.batch, 0.2, **options)

    def by_torch(self, **options: float) -> torch.Tensor:
        return attend_by_request(self.query, self.cache, 1, self.batch, 0.2, **options)

    def dense(self) -> torch.Tensor:
        return dense_attention(self.query, self.cache, 1, self.batch, 0.2)


def random_spans(rng: random.Random) -> list[tuple[int, int]]:
    lengths = [1, 1, 1, 2, 5, 17, 70]
    return [(rng.choice(lengths), rng.choice([0, 0, 1, 15, 63, 64, 200]))
            for _ in range(rng.randint(1, 6))]  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("shape", SHAPES)
def test_ragged_steps_are_those_of_the_dense_reference(shape):
    rng = random.Random(repr(shape))
    for seed in range(4):
        case = Case(random_spans(rng), shape, rng.choice([1, 2, 3, 16, 32]), seed)
        torch.testing.assert_close(case.by_kernel(), case.dense(), rtol=1e-4, atol=2e-6)


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_long_contexts_are_divided_among_threads_and_put_together(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for spans in ([(1, 2999)], [(3, 1500), (1, 700)], [(64, 900)], [(1, 0), (1, 1)]):
            case = Case(spans, (12, 4, 64), 16, threads)
            torch.testing.assert_close(case.by_kernel(), case.dense(), rtol=1e-4, atol=2e-6)
            narrow = case.by_kernel(window=300)
            torch.testing.assert_close(narrow, case.by_torch(window=300), rtol=1e-4, atol=2e-6)
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("window", [0, 1, 2, 16, 65, 1000])
@pytest.mark.parametrize("softcap", [0.0, 1.5, 30.0])
def test_windows_and_caps(window, softcap):
    rng = random.Random(window)
    for seed, shape in enumerate([(6, 2, 16), (4, 4, 24), (8, 1, 32)]):
        case = Case(random_spans(rng), shape, 8, seed)
        options = {"window": window, "softcap": softcap}
        torch.testing.assert_close(
            case.by_kernel(**options), case.by_torch(**options), rtol=1e-4, atol=2e-6
        )
        torch.testing.assert_close(
            case.by_kernel(**options), literal(case, **options), rtol=1e-4, atol=2e-6
        )


def literal(case: Case, window: int, softcap: float) -> torch.Tensor:
    """One query at a time, as it is written in a paper."""
    keys, values = case.cache.pools(1)
    group = case.query.shape[1] // keys.shape[1]
    rows = []
    for segment, slots in zip(case.batch.segments, case.batch.key_slots, strict=True):
        for i in range(segment.length):
            last = segment.context + i + 1
            seen = slots[max(0, last - window) if window else 0 : last]
            q = case.query[len(rows)]
            logits = torch.einsum("hd,khd->hk", q, keys[seen].repeat_interleave(group, 1)) * 0.2
            if softcap:
                logits = softcap * torch.tanh(logits / softcap)
            weights = logits.double().softmax(-1).float()
            rows.append(
                torch.einsum("hk,khd->hd", weights, values[seen].repeat_interleave(group, 1))
            )
    return torch.stack(rows)


@needs_kernel
def test_large_logits_and_odd_strides():
    case = Case([(5, 20), (1, 90), (40, 0)], (6, 2, 32), 4, 1)
    case.query = (case.query * 80).transpose(0, 1).contiguous().transpose(0, 1)
    torch.testing.assert_close(case.by_kernel(), case.dense(), rtol=1e-3, atol=1e-4)


@needs_kernel
def test_nothing_but_float32_on_cpu_goes_through_the_kernel():
    case = Case([(2, 3)], (4, 2, 16), 4, 0)
    assert kernel.kernel_for(case.query.bfloat16(), case.cache) is None
    assert kernel.kernel_for(torch.zeros(1, 4, 300), case.cache) is None


@pytest.fixture
def fresh_kernel(monkeypatch, tmp_path):
    """Nothing loaded, nothing built."""
    monkeypatch.setattr(build, "user_cache_path", lambda name: tmp_path / name)
    monkeypatch.delenv(kernel.SWITCH, raising=False)
    kernel._load.cache_clear()
    yield tmp_path
    kernel._load.cache_clear()


def test_without_a_compiler_torch_attends(fresh_kernel, monkeypatch):
    monkeypatch.setenv("PATH", str(fresh_kernel))
    monkeypatch.delenv("CXX", raising=False)
    case = Case([(3, 9), (1, 30)], (4, 2, 16), 4, 0)
    found = paged_attention(case.query, case.cache, 1, case.batch, 0.2)
    torch.testing.assert_close(found, case.dense())
    assert kernel.problem() == "no C++ compiler (c++, g++ or clang++)"


def test_a_compiler_that_fails_is_named_with_its_first_words(fresh_kernel, monkeypatch):
    compiler = fresh_kernel / "odd++"
    compiler.write_text("#!/bin/sh\necho 'out of ideas' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert kernel.problem() == f"{compiler} failed: out of ideas"
    assert not list((fresh_kernel / "cbviz" / "kernels").iterdir())


def test_no_place_to_keep_it(fresh_kernel, monkeypatch):
    (fresh_kernel / "cbviz").write_text("a file where a folder should be")
    monkeypatch.setattr(build, "find_compiler", lambda: "/bin/sh")
    assert "no place to keep it" in (kernel.problem() or "")


def test_switched_off_is_no_problem(fresh_kernel, monkeypatch):
    monkeypatch.setenv(kernel.SWITCH, "0")
    case = Case([(3, 9)], (4, 2, 16), 4, 0)
    assert kernel.kernel_for(case.query, case.cache) is None
    assert kernel.problem() is None


@needs_kernel
def test_it_is_built_once_and_then_found(fresh_kernel, monkeypatch):
    path = build.shared_object()
    assert [path] == list(path.parent.iterdir())
    monkeypatch.setattr(build, "_build", lambda *_: pytest.fail("built again"))
    assert build.shared_object() == path
