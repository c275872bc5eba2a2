"""Executes a plan: packs the batch, runs the model over the paged cache, draws tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from engine.attention.interface import PagedStep, noting_mask_windows, running
from engine.core import StepOutput
from engine.decode_graphs import Capture, CudaCapture, DecodeGraphs, PaddedDecodes
from engine.errors import ModelUnavailable, first_line
from engine.kv_cache import KVCache
from engine.model import LoadedModel
from engine.packed_batch import PackedBatch
from engine.plan import Plan
from engine.record import Segment, SegmentKind
from engine.request import Request
from engine.sampler import Sampler


class ModelRunner:
    """A loaded model with its cache of `num_blocks * block_size` slots.

    `graphed`: decodes up to which a step that only decodes is replayed from a CUDA graph; 0 = none.
    """

    def __init__(
        self, loaded: LoadedModel, num_blocks: int, block_size: int, *, graphed: int = 0
    ) -> None:
        self.loaded = loaded
        self.block_size = block_size
        self.sampler = Sampler(loaded.eos_token_ids, loaded.repetition_penalty)
        # One more, for what the padding of a graph writes.
        self.cache = self._new_cache(num_blocks + 1 if graphed else num_blocks)
        self.graphs = (
            self.decode_graphs(num_blocks, graphed, CudaCapture(loaded.device)) if graphed else None
        )
        self._windows: dict[int, int] = {}

    def decode_graphs(self, spare_block: int, largest: int, capture: Capture) -> DecodeGraphs:
        """Graphs over this cache, whose block `spare_block` no request has."""
        return DecodeGraphs(
            lambda batch: self.logits(batch, self.cache),
            lambda size: PaddedDecodes(
                size, self.loaded.max_model_len, spare_block, self.block_size, self.loaded.device
            ),
            largest,
            capture,
        )

    def execute(self, plan: Plan, requests: Sequence[Request]) -> StepOutput:
        """Run a plan. `requests`: those of the sampling segments, in order.

        Only slots that the plan allocated are written, so a failure leaves nothing to undo.
        """
        started = time.perf_counter()
        batch = PackedBatch(
            plan.segments, plan.tables, plan.token_ids, self.block_size, self.loaded.device
        )
        for source, target in plan.copies:
            self.cache.copy_block(source, target, self.block_size)
        built = time.perf_counter()
        logits = self._graphed_logits(batch)
        if logits is None:
            logits = self.logits(batch, self.cache)
        self._synchronize()
        computed = time.perf_counter()
        drawn = self.sampler.sample(logits, requests)
        return StepOutput(
            token_ids=drawn.token_ids,
            logprobs=drawn.logprobs,
            top_logprobs=drawn.top_logprobs,
            errors=drawn.errors,
            build_s=built - started,
            forward_s=computed - built,
            sample_s=time.perf_counter() - computed,
        )

    @torch.inference_mode()
    def _graphed_logits(self, batch: PackedBatch) -> torch.Tensor | None:
        """`[n_S, vocab]` by a graph; None where there is none for such a batch."""
        if self.graphs is None:
            return None
        try:
            return self.graphs.logits(batch)
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            # Some models decide on the host by what is on the card: they run without graphs.
            self.graphs = None
            return None

    @torch.inference_mode()
    def logits(self, batch: PackedBatch, cache: KVCache) -> torch.Tensor:
        """`[n_S, vocab]`: logits of the rows that sample, and of no others."""
        step = PagedStep(batch, cache)
        with running(step):
            output = self.loaded.model(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                use_cache=False,
                logits_to_keep=batch.sample_rows,
            )
        self._windows = step.windows
        logits: torch.Tensor = output.logits[0]
        return logits

    def verify(self) -> list[int]:
        """Compare a packed, chunked run of two short sequences with the model's own attention.

        Returns the sliding window of each layer in tokens, 0 = none; empty where no layer has one.
        Catches every architecture that loads but does not honour the interface (positions it
        takes no notice of, masks of its own, …) before it can show wrong tokens.

        Raises:
            ModelUnavailable: the logits differ, or the model cannot run at all.
        """
        vocab = self.loaded.facts.vocab_size
        sequences = [[i * 7 % vocab for i in range(1, 6)], [i * 11 % vocab for i in range(1, 4)]]
        try:
            with noting_mask_windows(self.loaded.model) as mask_windows:
                ours = self._packed_logits(sequences)
            theirs = self._reference_logits(sequences)
        except Exception as error:
            facts, line = self.loaded.facts, first_line(error, 200)
            raise ModelUnavailable(
                f"{facts.name} ({facts.architecture}) cannot run on a paged cache: {line}"
            ) from error
        scale = theirs.abs().max().clamp_min(1e-6)
        tolerance = 2e-3 if self.loaded.dtype is torch.float32 else 8e-2
        difference = float((ours - theirs).abs().max() / scale)
        if not difference <= tolerance:
            raise ModelUnavailable(
                f"{self.loaded.facts.name} ({self.loaded.facts.architecture}) gives other logits "
                f"in a packed batch than alone (off by {difference:.1%}): it does not honour the "
                f"attention interface"
            )
        windows = [self._windows.get(layer, 0) for layer in range(self.loaded.facts.num_layers)]
        self._check_windows(mask_windows, set(windows))
        return windows if any(windows) else []

    def _check_windows(self, of_masks: set[int], of_layers: set[int]) -> None:
        """The two short sequences fit in every window: windows are compared by their numbers.

        Some architectures build their mask with a window and do not hand it to their layers.
        """
        odd = {w for w in of_masks ^ of_layers if 0 < w < self.loaded.max_model_len}
        if odd:
            raise ModelUnavailable(
                f"{self.loaded.facts.name} ({self.loaded.facts.architecture}) does not tell its "
                f"layers of its sliding window of {min(odd)} tokens: give --max-model-len "
                f"{min(odd)} or less"
            )

    def _packed_logits(self, sequences: list[list[int]]) -> torch.Tensor:
        """Both sequences in one batch, the first in two chunks; a table out of order."""
        first, second = sequences
        cache = self._new_cache(-(-len(first) // self.block_size) + 4)
        tables = [list(range(-(-len(first) // self.block_size)))[::-1], []]
        used = len(tables[0])
        tables[1] = list(range(used, used + -(-len(second) // self.block_size)))
        steps = [
            ([Segment("A", SegmentKind.PREFILL, 0, 3, 0, False),
              Segment("B", SegmentKind.PREFILL, 0, 3, 0, True)], tables, first[:3] + second),
            ([Segment("A", SegmentKind.PREFILL, 3, 2, 3, True)], tables[:1], first[3:]),
        ]  # fmt: skip
        rows = [
            self.logits(PackedBatch(*step, self.block_size, self.loaded.device), cache).float()
            for step in steps
        ]
        return torch.cat([rows[1], rows[0]])

    @torch.inference_mode()
    def _reference_logits(self, sequences: list[list[int]]) -> torch.Tensor:
        model = self.loaded.model
        ours = model.config._attn_implementation
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
        try:
            rows = [
                model(
                    input_ids=torch.tensor([ids], device=self.loaded.device), use_cache=False
                ).logits[0, -1:]
                for ids in sequences
            ]
        finally:
            model.set_attn_implementation(ours)
        return torch.cat(rows).float()

    def _new_cache(self, num_blocks: int) -> KVCache:
        facts = self.loaded.facts
        return KVCache(
            num_layers=facts.num_layers,
            num_slots=num_blocks * self.block_size,
            num_kv_heads=facts.num_kv_heads,
            head_dim=facts.head_dim,
            dtype=self.loaded.dtype,
            device=self.loaded.device,
        )

    def _synchronize(self) -> None:
        """On CUDA, wait for the forward pass, so that its time is its own."""
        if self.loaded.device.type == "cuda":
            torch.cuda.synchronize(self.loaded.device)
