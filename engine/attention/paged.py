"""Paged attention: no mask over the batch, no work across requests.

In float32 on CPU by a kernel that reads keys and values where they lie; otherwise (other dtypes,
no compiler) request by request with torch's own operators, from copies.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.cpu.kernel import kernel_for
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
        keys, values = cache.read(layer, slots)
        mask = _chunk_mask(segment.length, segment.context, window, query.device)
        if softcap:
            attended = _capped(query[rows], keys, values, mask, scaling, softcap)
        else:
            attended = scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None and segment.length > 1,
                scale=scaling,
                enable_gqa=query.shape[1] != keys.shape[1],
            )[0]
        output[rows] = attended.transpose(0, 1)
    return output


def _chunk_mask(
    length: int, context: int, window: int, device: torch.device
) -> torch.Tensor | None:
    """`[length, context + length]`, True = seen; None where all before a query is seen."""
    narrow = 0 < window < context + length
    if not narrow and (context == 0 or length == 1):
        return None
    ones = torch.ones(length, context + length, dtype=torch.bool, device=device)
    seen = ones.tril(diagonal=context)
    return seen.triu(diagonal=context - window + 1) if narrow else seen


def _capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """`[num_heads, length, head_dim]`: one segment, its logits capped before the softmax."""
    group = query.shape[1] // keys.shape[1]
    repeated = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = torch.einsum("qhd,khd->hqk", query, repeated[0]) * scaling
    logits = softcap * torch.tanh(logits / softcap)
    if mask is None:
        mask = torch.ones(logits.shape[1:], dtype=torch.bool, device=query.device).tril(
            diagonal=logits.shape[2] - logits.shape[1]
        )
    weights = logits.masked_fill(~mask, -torch.inf).float().softmax(-1).to(values.dtype)
    return torch.einsum("hqk,khd->hqd", weights, repeated[1])
