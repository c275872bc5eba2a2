"""The boolean attention mask of a packed batch, from its segments alone (numpy, no torch).

Rows are the queries of the step in packed order, `[n_Q]`. Columns are the keys of every request
in the step, side by side in the order of the segments: for each, its cached tokens, then its new
ones, `[n_K]`. `True` = the query sees the key: same request, not in its future and, in a layer
with a sliding window, not too far in its past. After "Continuous batching from first principles"
(Hugging Face, 2025); the window counts the query itself, as in "Mistral 7B" (2023) and
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from engine.record import Segment

IntArray = npt.NDArray[np.int64]


class PackedAxes:
    """Which segment and which position each query row and each key column is."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        lengths = [segment.length for segment in segments]
        totals = [segment.context + segment.length for segment in segments]
        index = np.arange(len(segments))
        self.query_segment: IntArray = np.repeat(index, lengths)
        """`[n_Q]` index into the segments."""
        self.key_segment: IntArray = np.repeat(index, totals)
        """`[n_K]` index into the segments."""
        self.query_position: IntArray = _ranges([s.start for s in segments], lengths)
        """`[n_Q]` position in the request."""
        self.key_position: IntArray = _ranges([s.start - s.context for s in segments], totals)
        """`[n_K]` position in the request."""
        self.key_is_new: npt.NDArray[np.bool_] = self.key_position >= np.repeat(
            np.array([s.start for s in segments], dtype=np.int64), totals
        )
        """`[n_K]` computed in this step (else cached before)."""

    @property
    def num_queries(self) -> int:
        """`n_Q`."""
        return len(self.query_segment)

    @property
    def num_keys(self) -> int:
        """`n_K`."""
        return len(self.key_segment)

    def mask(
        self, rows: slice = slice(None), columns: slice = slice(None), *, window: int = 0
    ) -> npt.NDArray[np.bool_]:
        """The mask, or the part of it that a viewport shows, `[rows, columns]` of `[n_Q, n_K]`.

        `window`: tokens that a query sees, itself among them; 0 = all before it.
        """
        same = self.query_segment[rows, None] == self.key_segment[None, columns]
        past = self.query_position[rows, None] >= self.key_position[None, columns]
        visible: npt.NDArray[np.bool_] = same & past
        if window:
            first = self.query_position[rows, None] - window
            visible &= self.key_position[None, columns] > first
        return visible


def _ranges(starts: list[int], lengths: list[int]) -> IntArray:
    """Concatenation of `arange(start, start + length)`."""
    if not lengths:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate(
        [np.arange(s, s + n, dtype=np.int64) for s, n in zip(starts, lengths, strict=True)]
    )
