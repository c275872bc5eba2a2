"""Paged attention: no mask over the batch, no work across requests.

In float32 on CPU by a kernel that reads keys and values where they lie; otherwise (other dtypes,
no compiler) request by request with torch's own operators, from copies.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.cpu.kernel import kernel_for
from engine.attention.softcap import softcapped_attention
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch


def paged_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: PackedBatch,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`query`: `[n_Q, num_heads, head_dim]`; returns the same shape.

    `window`: keys that a query sees at most, itself included; 0 = all before it. `softcap`:
    logits become `softcap * tanh(logit / softcap)`; 0 = they stay as they are.
    """
    kernel = kernel_for(query, cache)
    if kernel is not None:
        return kernel.attend(query, cache, layer, batch, scaling, window, softcap)
    return attend_by_request(query, cache, layer, batch, scaling, window=window, softcap=softcap)


def attend_by_request(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: PackedBatch,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """As `paged_attention`, with torch's own operators, in any dtype and on any device."""
    output = torch.empty_like(query)
    first = 0
    for segment, slots in zip(batch.segments, batch.key_slots, strict=True):
        rows = slice(first, first + segment.length)
        first += segment.length
        hidden = max(0, segment.context - window + 1) if window else 0
        keys, values = cache.read(layer, slots[hidden:])
        plain = segment.context == 0 and not 0 < window < segment.length
        causal = plain and not softcap and segment.length > 1
        mask = None
        if not causal:
            mask = _chunk_mask(segment.length, segment.context - hidden, window, query.device)
        if softcap:
            output[rows] = softcapped_attention(query[rows], keys, values, mask, scaling, softcap)
            continue
        attended = scaled_dot_product_attention(
            query[rows].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=causal,
            scale=scaling,
            enable_gqa=query.shape[1] != keys.shape[1],
        )
        output[rows] = attended[0].transpose(0, 1)
    return output


def _chunk_mask(
    length: int, context: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """`[length, context + length]` for a chunk behind cached keys; None where all is seen."""
    if length == 1:
        return None
    ones = torch.ones(length, context + length, dtype=torch.bool, device=device)
    seen = ones.tril_(diagonal=context)
    return seen.triu_(diagonal=context - window + 1) if window else seen
