"""transformers' own continuous batching, on the same models and requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

PAGE_SIZE = 32
NUM_BLOCKS = 512
MAX_BATCH_TOKENS = 512
Job = tuple[list[int], int]
"""Prompt, and how many tokens are to be generated."""
PATIENCE_S = 600.0
SETTLED = 4
"""Steps to spare."""


class TransformersBatching:
    """A model of transformers in float32 with `sdpa`, run by its `ContinuousBatchingManager`."""

    def __init__(self, path: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa"
        ).eval()

    def run(self, jobs: Sequence[Job]) -> tuple[float, list[list[int]], list[list[float]]]:
        """Seconds from the first request added to the last one finished; the tokens of each job,
        and when they came."""
        from transformers import ContinuousBatchingConfig

        config = ContinuousBatchingConfig(
            page_size=PAGE_SIZE, num_blocks=NUM_BLOCKS, max_batch_tokens=MAX_BATCH_TOKENS
        )
        generation = GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=1024)
        found: dict[str, Any] = {}
        with self.model.continuous_batching_context_manager(
            generation_config=generation, continuous_batching_config=config
        ) as manager:
            started = time.perf_counter()
            names = [
                manager.add_request(
                    prompt, max_new_tokens=length, eos_token_id=-1, record_timestamps=True
                )
                for prompt, length in jobs
            ]
            while len(found) < len(jobs):
                result = manager.get_result(timeout=1.0)
                if result is not None and result.is_finished():
                    found[result.request_id] = result
                elif not manager.is_running() or time.perf_counter() - started > PATIENCE_S:
                    raise RuntimeError("transformers' continuous batching has stopped")
            seconds = time.perf_counter() - started
        results = [found[name] for name in names]
        return (
            seconds,
            [list(result.generated_tokens) for result in results],
            [list(result.timestamps or []) for result in results],
        )

    def decode_ms(self, requests: int, context: int, rounds: int) -> float:
        """The least time between two tokens while so many requests decode, and nothing else.

        Prompts go in by `MAX_BATCH_TOKENS` a step: the first request must still run when the
        last one begins, so each generates more tokens than that takes.
        """
        prefills = -(-requests * context // MAX_BATCH_TOKENS)
        length = prefills + SETTLED + rounds
        prompt = [3] * (context - prefills - rounds)
        jobs = [([i + 1, *prompt], length) for i in range(requests)]
        _, _, stamps = self.run(jobs)
        begin = max(each[0] for each in stamps)
        end = min(each[-1] for each in stamps)
        times = [t for t in stamps[-1] if begin < t <= end]
        return min(b - a for a, b in pairwise(times)) * 1e3
