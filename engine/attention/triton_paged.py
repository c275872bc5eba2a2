"""Launching the Triton kernels: tiles, splits and shapes of a packed batch."""

from __future__ import annotations

import os
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from engine.attention.triton_kernels import add_parts, attend_tile, store_tokens
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton runs its kernels in Python, on CPU tensors: slow, for tests."""
MAX_SPLITS = 16
SHORTEST_SPLIT = 4
"""Tiles of keys that a program must at least have for a split to pay."""


class Tiling(NamedTuple):
    """Rows (a query and a head each) and keys that a program holds at a time."""

    rows: int
    keys: int
    num_warps: int = 4
    num_stages: int = 2


def triton_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: PackedBatch,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    splits: int = 0,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """`query`: `[n_Q, num_heads, head_dim]`; returns the same shape.

    `splits`: programs that share the keys of a tile; 0 = as many as fill the card; 1 = no
    splitting, so that what a request gets does not depend on what shares its batch.
    `tiling`: None = chosen for the shapes.
    """
    keys, values = cache.layer(layer)
    num_queries, heads, size = query.shape
    kv_heads = keys.shape[1]
    group = heads // kv_heads
    query = _packed_dims(query)
    out = torch.empty_like(query)
    one_each = splits != 1 and batch.longest_segment == 1
    tiling = tiling or tiling_for(group, size, query.element_size(), one_each)
    tiles = batch.tiles(tiling.rows // group)
    num_tiles = tiles.shape[1]
    if splits == 0:
        seen = min(batch.most_keys, window or batch.most_keys)
        splits = _splits(num_tiles * kv_heads, seen // tiling.keys, query.device)
    parts = _part_buffers(splits, query)
    padded = max(16, triton.next_power_of_2(size))
    attend_tile[(num_tiles, kv_heads, splits)](
        query, query.stride(0), query.stride(1), keys, values, keys.stride(0), keys.stride(1),
        out, out.stride(0), out.stride(1), *parts, num_queries,
        tiles, num_tiles, batch.ragged, batch.ragged.shape[1],
        batch.block_tables, batch.block_tables.stride(0),
        scaling, softcap, window,
        GROUP=group, HEADS=heads, SIZE=size, SIZE_PADDED=padded,
        BLOCK_SIZE=batch.block_size, ROWS=tiling.rows, KEYS=tiling.keys, SPLITS=splits,
        CAPPED=softcap > 0, WINDOWED=window > 0,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    if splits > 1:
        block_heads = triton.next_power_of_2(heads) if INTERPRETED else 4
        add_parts[(num_queries, triton.cdiv(heads, block_heads))](
            out, out.stride(0), out.stride(1), *parts, num_queries,
            HEADS=heads, SIZE=size, SIZE_PADDED=padded, BLOCK_HEADS=block_heads, SPLITS=splits,
        )  # fmt: skip
    return out


def triton_write(
    cache: KVCache, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    """Store new keys and values, `[n_Q, num_kv_heads, head_dim]`, in their slots `[n_Q]`."""
    into_keys, into_values = cache.layer(layer)
    num_tokens, heads, size = keys.shape
    keys, values = _packed_dims(keys), _packed_dims(values)
    width = triton.next_power_of_2(heads * size)
    tokens = 64 if INTERPRETED else max(1, 4096 // width)
    store_tokens[(triton.cdiv(num_tokens, tokens),)](
        keys, keys.stride(0), keys.stride(1), values, values.stride(0), values.stride(1),
        into_keys, into_values, into_keys.stride(0), into_keys.stride(1), slots, num_tokens,
        HEADS=heads, SIZE=size, WIDTH=width, TOKENS=tokens,
    )  # fmt: skip


def _packed_dims(tensor: torch.Tensor) -> torch.Tensor:
    """The kernels step through a head's numbers one by one."""
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()


def tiling_for(group: int, size: int, element_size: int, one_each: bool) -> Tiling:
    """Tiles that fit in the shared memory of small cards, too (99 KiB).

    `one_each`: every request decodes one token, whose heads are all the rows that there are.
    """
    least = max(16, triton.next_power_of_2(group))
    if INTERPRETED:
        return Tiling(max(128, least), 256)
    # Bytes of a key in shared memory: a tile of keys and one of values, each twice.
    width = max(16, triton.next_power_of_2(size)) * element_size
    fitting = max(16, 64 // max(1, width // 256))
    return Tiling(least if one_each else max(fitting, least), fitting)


def _splits(programs: int, key_tiles: int, device: torch.device) -> int:
    """A power of two, since every number of splits is another kernel to compile."""
    idle = _processors(device) // max(1, programs)
    wanted = min(MAX_SPLITS, idle, key_tiles // SHORTEST_SPLIT)
    return 1 << (wanted.bit_length() - 1) if wanted > 1 else 1


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _part_buffers(splits: int, query: torch.Tensor) -> tuple[Any, Any, Any]:
    """Running maximum, sum and weighted values of each split; nothing where there is one."""
    if splits == 1:
        return query, query, query
    tokens, heads, size = query.shape
    shape = (splits, tokens, heads)
    options: dict[str, Any] = {"dtype": torch.float32, "device": query.device}
    return (
        torch.empty(shape, **options),
        torch.empty(shape, **options),
        torch.empty((*shape, size), **options),
    )
