"""The memory plan: how many blocks the pool gets, and the defaults sized to the machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import psutil

from engine.block_pool import blocks_for
from engine.config import EngineConfig
from engine.errors import InvalidInput
from engine.record import ModelFacts

if TYPE_CHECKING:
    import torch

CPU_FRACTION = 0.25
"""Of the memory that is free after loading the weights, at most this much for the pool."""
CUDA_FRACTION = 0.85
DEFAULT_BUDGET = {"cpu": 32, "cuda": 512}
"""Small on CPU, so that chunks of a prefill can be watched."""
DEFAULT_SEQS = {"cpu": 8, "cuda": 64}


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the pool holds. Sizes in bytes, lengths in tokens.

    `fitting`: blocks that would fit in the memory meant for the pool.
    """

    weight_bytes: int
    free_bytes: int
    bytes_per_token: int
    bytes_per_block: int
    block_size: int
    num_blocks: int
    fitting: int
    token_budget: int
    max_num_seqs: int
    max_model_len: int

    @property
    def pool_bytes(self) -> int:
        """Bytes of the whole pool."""
        return self.num_blocks * self.bytes_per_block


def plan_memory(
    config: EngineConfig, facts: ModelFacts, device: str, max_model_len: int, free_bytes: int
) -> MemoryPlan:
    """Size the pool: as asked for, else enough for every running request at full length, within
    the share of free memory that is meant for it.

    Raises:
        InvalidInput: not one block fits, or the pool asked for is larger than free memory.
    """
    seqs = config.max_num_seqs or DEFAULT_SEQS[device]
    per_block = facts.bytes_per_token * config.block_size
    share = int(free_bytes * (CUDA_FRACTION if device == "cuda" else CPU_FRACTION))
    fitting = share // per_block
    if config.num_blocks is not None:
        num_blocks = config.num_blocks
    elif config.kv_memory is not None:
        num_blocks = config.kv_memory // per_block
    else:
        num_blocks = min(fitting, seqs * blocks_for(max_model_len, config.block_size))
    if num_blocks < 1:
        raise InvalidInput(
            f"no KV block fits: one takes {format_bytes(per_block)} "
            f"({config.block_size} tokens of {format_bytes(facts.bytes_per_token)}); "
            f"give more --kv-memory or a smaller --block-size"
        )
    if num_blocks * per_block > free_bytes:
        raise InvalidInput(
            f"a pool of {num_blocks} blocks takes {format_bytes(num_blocks * per_block)} and "
            f"{format_bytes(free_bytes)} are free: at most {free_bytes // per_block} blocks fit"
        )
    return MemoryPlan(
        weight_bytes=facts.weight_bytes,
        free_bytes=free_bytes,
        bytes_per_token=facts.bytes_per_token,
        bytes_per_block=per_block,
        block_size=config.block_size,
        num_blocks=num_blocks,
        fitting=fitting,
        token_budget=config.token_budget or DEFAULT_BUDGET[device],
        max_num_seqs=seqs,
        max_model_len=max_model_len,
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can be taken on a device now."""
    if device.type == "cuda":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    available = int(psutil.virtual_memory().available)
    group = cgroup_free(Path("/sys/fs/cgroup"))
    return available if group is None else min(available, group)


def cgroup_free(folder: Path) -> int | None:
    """Bytes that a container may still take (cgroup v2); None where there is no limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        return None if limit == "max" else max(0, int(limit) - used)
    except (OSError, ValueError):
        return None


def format_bytes(size: float) -> str:
    """`1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
