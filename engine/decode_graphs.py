"""CUDA graphs for steps that only decode: the forward pass of a batch size is recorded once and
replayed, so that the host does not launch hundreds of small kernels for a few tokens.

Batches are padded to the next size that there is a graph for. A row of padding decodes token 0 at
position 0 and keeps its key and value in a block of its own that no request ever has, behind the
pool. After "CUDA graphs" in vLLM's and SGLang's documentation (bucketed batch sizes).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.packed_batch import PackedBatch
from engine.record import Segment, SegmentKind

Forward = Callable[[], torch.Tensor]
"""Logits `[size, vocab]` of the padded batch as it is filled now."""
Capture = Callable[[Forward], Forward]


class PaddedDecodes(PackedBatch):
    """A batch of `size` decodes whose tensors stay where they are and are filled for each step.

    Only what attention over block tables needs is kept up to date: not the slots of all keys, nor
    the mask.

    Args:
        size: rows, one for each request or padding.
        most_keys: tokens that a request may have at most.
        spare_block: the block that padding writes to.
        block_size: tokens in a block.
        device: where the tensors are to lie.
    """

    def __init__(
        self, size: int, most_keys: int, spare_block: int, block_size: int, device: torch.device
    ) -> None:
        padding = [Segment("", SegmentKind.PAD, 0, 1, 0, True)] * size
        blocks = -(-most_keys // block_size)
        table = [spare_block] + [0] * (blocks - 1)
        super().__init__(padding, [table] * size, [0] * size, block_size, device)
        self.size = size
        self.most_keys = most_keys
        self._spare_block = spare_block

    def fill(self, batch: PackedBatch) -> None:
        """Become these decodes, at most `size`, with padding behind them."""
        count = len(batch.segments)
        self._rest(count)
        self.input_ids[:, :count] = batch.input_ids
        self.position_ids[:, :count] = batch.position_ids
        self.slots[:count] = batch.slots
        self.ragged[1, :count] = batch.ragged[1]
        self.block_tables[:count, : batch.block_tables.shape[1]] = batch.block_tables

    def _rest(self, first: int) -> None:
        self.input_ids[:, first:] = 0
        self.position_ids[:, first:] = 0
        self.slots[first:] = self._spare_block * self.block_size
        self.ragged[1, first:] = 0
        self.block_tables[first:, 0] = self._spare_block


class DecodeGraphs:
    """Runs steps that only decode by graphs, captured when a size is first needed.

    Args:
        forward: the model over a batch: logits `[n_S, vocab]`.
        padded: makes the padded batch of a size.
        largest: rows of the largest graph; sizes are powers of two up to it, and it itself.
        capture: turns a forward pass into one that is replayed.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], torch.Tensor],
        padded: Callable[[int], PaddedDecodes],
        largest: int,
        capture: Capture,
    ) -> None:
        self._forward = forward
        self._padded = padded
        self._largest = largest
        self._capture = capture
        self._ready: dict[int, tuple[PaddedDecodes, Forward]] = {}

    def logits(self, batch: PackedBatch) -> torch.Tensor | None:
        """`[n_S, vocab]`, valid until the next call; None where there is no graph for the batch."""
        count = len(batch.segments)
        if not count or count > self._largest or not _only_decodes(batch):
            return None
        size = min(1 << (count - 1).bit_length(), self._largest)
        if size not in self._ready:
            self._make(size, batch)
        padded, forward = self._ready[size]
        padded.fill(batch)
        return forward()[:count]

    def _make(self, size: int, batch: PackedBatch) -> None:
        padded = self._padded(size)
        padded.fill(batch)
        self._ready[size] = (padded, self._capture(lambda: self._forward(padded)))


def _only_decodes(batch: PackedBatch) -> bool:
    return all(segment.length == 1 and segment.samples for segment in batch.segments)


class CudaCapture:
    """Captures forward passes into CUDA graphs that share their memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Forward) -> Forward:
        """Record; the result replays."""
        with torch.cuda.device(self._device):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                # Compiles kernels and fills the libraries' workspaces, which cannot be recorded.
                for _ in range(2):
                    forward()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                output = forward()

        def replay() -> torch.Tensor:
            graph.replay()
            return output

        return replay
