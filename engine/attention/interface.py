"""How a transformers model reaches our attention, and how ours reaches the paged cache.

A model whose attention layers go through `ALL_ATTENTION_FUNCTIONS` is switched to `cbviz_dense`
or `cbviz_paged`. The step's batch and cache travel through `forward` as the keyword argument
`paged_step`; keys and values are written to their slots before they are attended to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.dense import dense_attention
from engine.attention.paged import paged_attention
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch


class AttentionFunction(Protocol):
    """One implementation.

    `query`: `[n_Q, num_heads, head_dim]`. Returns the same shape. Keys and values of the step
    are in the cache already.
    """

    def __call__(
        self, query: torch.Tensor, cache: KVCache, layer: int, batch: PackedBatch, scaling: float
    ) -> torch.Tensor:
        """Attend; `scaling` multiplies the logits before the softmax."""
        ...


IMPLEMENTATIONS: dict[str, AttentionFunction] = {
    "dense": dense_attention,
    "paged": paged_attention,
}


@dataclass(frozen=True)
class PagedStep:
    """What the attention layers need to know of a step."""

    batch: PackedBatch
    cache: KVCache


def transformers_name(implementation: str) -> str:
    """The name under which transformers knows an implementation of ours."""
    return f"cbviz_{implementation}"


def register() -> None:
    """Make every implementation known to transformers. May be called again."""
    for name, function in IMPLEMENTATIONS.items():
        ALL_ATTENTION_FUNCTIONS.register(transformers_name(name), _adapter(function))
        ALL_MASK_ATTENTION_FUNCTIONS.register(transformers_name(name), _no_mask)


def _adapter(function: AttentionFunction) -> Any:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        paged_step: PagedStep,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query`: `[1, num_heads, n_Q, head_dim]` to `[1, n_Q, num_heads, head_dim]`."""
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        batch, cache = paged_step.batch, paged_step.cache
        cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return function(query[0].transpose(0, 1), cache, layer, batch, scale)[None], None

    return attend


def _no_mask(*_: Any, **__: Any) -> None:
    """Our implementations know which keys a query sees; transformers need not build a mask."""
