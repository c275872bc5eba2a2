"""Every knob of the engine, validated, with its unit. No torch here.

`None` means: chosen for the machine and the model when the model is loaded (`engine.memory`).
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from engine.errors import InvalidInput
from engine.knobs import MAX_BLOCKS, Knobs, SchedulingPolicy, check_range
from engine.request import MAX_SEED

EMBEDDED = "embedded"
"""The name of the model that ships with the engine."""

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Attention = Literal["auto", "dense", "paged", "triton"]

MAX_BLOCK_SIZE = 1024
MAX_THREADS = 1024


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How an engine is built.

    Args:
        model: `embedded`, a hub name such as `gpt2`, the path of a Hugging Face directory
            or of a GGUF file.
        revision: branch, tag or commit on the hub.
        trust_remote_code: run Python code that comes with the model.
        device: `auto` takes CUDA where there is one.
        dtype: `auto` takes float32 on CPU, the model's own on CUDA.
        attention: `dense` (one boolean mask over the packed batch), `paged` or `triton`; `auto` =
            triton on CUDA where it is installed, else paged.
        split_keys: `triton` may share out the keys of one query among several programs where a
            step is too small for the card; without, what a request is given does not depend on
            what shares its batch.
        cuda_graphs: replay steps that only decode from CUDA graphs (`triton` on CUDA only).
        token_budget: m, tokens computed in one step at most (vLLM: max_num_batched_tokens).
        max_num_seqs: requests running at the same time at most.
        scheduling_policy, long_prefill_token_threshold, max_num_partial_prefills, watermark,
            chunked_prefill, skip_blocked_head, prefix_caching: see `engine.knobs.Knobs`.
        block_size: tokens in a block of the KV cache.
        num_blocks: blocks in the pool; excludes `kv_memory`.
        kv_memory: bytes of the pool, rounded down to whole blocks.
        max_model_len: prompt and output tokens of one request at most; None = the model's context.
        seed: seeds the requests that bring no seed of their own.
        threads: CPU threads of the forward pass.
        check: prove queues, tables and pool against each other after every step.

    Raises:
        InvalidInput: a value out of its range, with the range.
    """

    model: str = EMBEDDED
    revision: str | None = None
    trust_remote_code: bool = False
    device: Device = "auto"
    dtype: Dtype = "auto"
    attention: Attention = "auto"
    split_keys: bool = True
    cuda_graphs: bool = True
    token_budget: int | None = None
    max_num_seqs: int | None = None
    scheduling_policy: SchedulingPolicy = "fcfs"
    long_prefill_token_threshold: int = 0
    max_num_partial_prefills: int = 0
    watermark: int = 0
    chunked_prefill: bool = True
    skip_blocked_head: int = 0
    prefix_caching: bool = True
    block_size: int = 16
    num_blocks: int | None = None
    kv_memory: int | None = None
    max_model_len: int | None = None
    seed: int = 0
    threads: int | None = None
    check: bool = False

    def __post_init__(self) -> None:
        if not self.model.strip():
            raise InvalidInput("model must be a name or a path, not empty")
        # A budget or limit that is not given is chosen later, and is good.
        self.knobs(
            1 if self.token_budget is None else self.token_budget,
            1 if self.max_num_seqs is None else self.max_num_seqs,
        )
        check_range("block size", self.block_size, 1, MAX_BLOCK_SIZE)
        check_range("number of blocks", self.num_blocks, 1, MAX_BLOCKS)
        check_range("KV memory in bytes", self.kv_memory, 1, 2**50)
        check_range("max model len", self.max_model_len, 2, 2**30)
        check_range("seed", self.seed, 0, MAX_SEED)
        check_range("threads", self.threads, 1, MAX_THREADS)
        if self.num_blocks is not None and self.kv_memory is not None:
            raise InvalidInput("give --num-blocks or --kv-memory, not both: each sizes the pool")

    def knobs(self, token_budget: int, max_num_seqs: int) -> Knobs:
        """The settings that the engine starts with."""
        own = {name: getattr(self, name) for name in Knobs.__struct_fields__}
        return Knobs(**own | {"token_budget": token_budget, "max_num_seqs": max_num_seqs})


_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
}


def parse_bytes(text: str) -> int:
    """`512MiB`, `1.5 GB`, `1048576` in bytes.

    Raises:
        InvalidInput: it is not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = match and _UNITS.get(match[2].upper())
    if match is None or not unit:
        raise InvalidInput(f"{text!r} is not a size; write it like 512MiB or 2GB")
    return int(float(match[1]) * unit)
