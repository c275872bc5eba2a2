"""The packed mask against the plainest possible reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.mask import PackedAxes
from engine.record import Segment, SegmentKind

segments_of_a_step = st.lists(
    st.tuples(st.integers(0, 9), st.integers(1, 6)), min_size=0, max_size=5
).map(
    lambda pairs: [
        Segment(f"r{i}", SegmentKind.PREFILL, context, length, context, False)
        for i, (context, length) in enumerate(pairs)
    ]
)


def naive(segments: list[Segment], window: int) -> list[list[bool]]:
    """For every query and every key: same request, not later, and not before the window."""
    keys = [(s.request_id, p) for s in segments for p in range(s.context + s.length)]
    queries = [(s.request_id, s.start + i) for s in segments for i in range(s.length)]
    window = window or 1000
    return [[q[0] == k[0] and 0 <= q[1] - k[1] < window for k in keys] for q in queries]


@settings(deadline=None, derandomize=True)
@given(segments_of_a_step, st.integers(0, 8))
def test_the_mask_equals_the_naive_one(segments, window):
    axes = PackedAxes(segments)
    assert axes.mask(window=window).tolist() == naive(segments, window)
    assert axes.num_queries == sum(s.length for s in segments)
    assert axes.num_keys == sum(s.context + s.length for s in segments)


@settings(deadline=None, derandomize=True)
@given(segments_of_a_step, st.integers(0, 20), st.integers(0, 20))
def test_a_viewport_is_a_cut_of_the_whole(segments, top, left):
    axes = PackedAxes(segments)
    rows, columns = slice(top, top + 7), slice(left, left + 9)
    assert np.array_equal(axes.mask(rows, columns), axes.mask()[rows, columns])


def test_new_keys_are_told_from_cached_ones():
    axes = PackedAxes([Segment("A", SegmentKind.DECODE, 3, 1, 3, True)])
    assert axes.key_is_new.tolist() == [False, False, False, True]
