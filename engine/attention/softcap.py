"""Attention with capped logits, which torch's own attention does not have."""

from __future__ import annotations

import torch


def softcapped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    """Logits are squeezed into `(-softcap, softcap)` before the softmax ("Gemma 2", 2024).

    `query`: `[n_Q, num_heads, head_dim]`; `keys`, `values`: `[n_K, num_kv_heads, head_dim]`;
    `mask`: `[n_Q, n_K]` boolean, None = all seen. Returns the shape of `query`.
    """
    group = query.shape[1] // keys.shape[1]
    grouped = query.reshape(len(query), keys.shape[1], group, query.shape[2])
    logits = torch.einsum("qhgd,khd->hgqk", grouped, keys).float() * scaling
    logits = softcap * torch.tanh(logits / softcap)
    if mask is not None:
        logits = logits.masked_fill(~mask, float("-inf"))
    weights = logits.softmax(dim=-1).to(query.dtype)
    return torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2)
