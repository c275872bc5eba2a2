"""How a transformers model reaches our attention, and how ours reaches the paged cache.

A model whose attention layers go through `ALL_ATTENTION_FUNCTIONS` is switched to `cbviz_dense`
or `cbviz_paged`. The step's batch and cache travel through `forward` as the keyword argument
`paged_step`; keys and values are written to their slots before they are attended to.

What a model asks of a layer's attention arrives in keyword arguments: scale, sliding window and
soft-cap are obeyed; what would be silently missing (attention sinks, position biases, key
indexers) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
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
        self,
        query: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: PackedBatch,
        scaling: float,
        *,
        window: int = 0,
        softcap: float = 0.0,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: `[n_Q, num_heads, head_dim]`.
            cache: holds the keys and values.
            layer: whose keys and values.
            batch: where they lie.
            scaling: multiplies the logits before the softmax.
            window: tokens that a query sees, itself among them; 0 = all before it.
            softcap: logits become `softcap * tanh(logits / softcap)`; 0 = as they are.
        """
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
    windows: dict[int, int] = field(default_factory=dict)
    """Filled by the layers: the window that each asked for."""


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
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query`: `[1, num_heads, n_Q, head_dim]` to `[1, n_Q, num_heads, head_dim]`."""
        _refuse_what_would_be_missing(others)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        window = paged_step.windows[layer] = sliding_window or 0
        batch, cache = paged_step.batch, paged_step.cache
        cache.write(layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = function(
            query[0].transpose(0, 1), cache, layer, batch, scale,
            window=window, softcap=softcap or 0.0,
        )  # fmt: skip
        return output[None], None

    return attend


_MISSING = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias in its attention",
    "attention_bias": "a bias in its attention",
    "indices": "attention to chosen keys",
    "block_indices": "attention to chosen blocks",
}


def _refuse_what_would_be_missing(arguments: dict[str, Any]) -> None:
    for name, what in _MISSING.items():
        if arguments.get(name) is not None:
            raise NotImplementedError(f"it has {what}, which cbviz does not compute")


_mask_windows: set[int] = set()


@contextmanager
def noting_mask_windows() -> Iterator[set[int]]:
    """Collects the windows of the masks that a model asks for in the meantime (0 = no window)."""
    _mask_windows.clear()
    yield _mask_windows


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """Our implementations know which keys a query sees; transformers need not build a mask.

    Noted is what it would have been, since a model may build its mask with a window and not tell
    the attention function.
    """
    _mask_windows.add(local_size or 0)
