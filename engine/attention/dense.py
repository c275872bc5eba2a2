"""The literal form: one packed row, one boolean mask `[n_Q, n_K]`, one attention call.

As "Continuous batching from first principles" (Hugging Face, 2025) draws it: the keys of all
requests in the step lie side by side and the mask alone keeps requests apart. It reads and
multiplies everything with everything, so it is the reference and not the fast one. Layers with a
sliding window have a mask of their own.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

from engine.attention.softcap import softcapped_attention
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch


def dense_attention(
    query: torch.Tensor,
    cache: KVCache,
    layer: int,
    batch: PackedBatch,
    scaling: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """`query`: `[n_Q, num_heads, head_dim]`; returns the same shape."""
    keys, values = cache.read(layer, batch.packed_key_slots)
    mask = batch.mask(window)
    if softcap:
        return softcapped_attention(query, keys, values, mask, scaling, softcap)
    output = scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        scale=scaling,
        enable_gqa=query.shape[1] != keys.shape[1],
    )
    return output[0].transpose(0, 1)
