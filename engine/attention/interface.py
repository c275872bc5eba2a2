"""How a transformers model reaches our attention, and how ours reaches the paged cache.

A model whose attention layers go through `ALL_ATTENTION_FUNCTIONS` is switched to `cbviz_dense`,
`cbviz_paged` or `cbviz_triton`. The step's batch and cache do not travel through `forward`, since
some models hand no arguments on to their layers: they are set for its duration (`running`). Keys
and values are written to their slots before they are attended to.

What a model asks of a layer's attention arrives in keyword arguments: scale, sliding window and
soft-cap are obeyed; what would be silently missing (attention sinks, position biases, key
indexers) is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention.dense import dense_attention
from engine.attention.paged import paged_attention
from engine.errors import ModelUnavailable
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


class WriteFunction(Protocol):
    """How an implementation stores the keys and values of a step in their slots."""

    def __call__(
        self,
        cache: KVCache,
        layer: int,
        slots: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """`keys`, `values`: `[n_Q, num_kv_heads, head_dim]`; `slots`: `[n_Q]`."""
        ...


IMPLEMENTATIONS: dict[str, AttentionFunction] = {
    "dense": dense_attention,
    "paged": paged_attention,
}
WRITERS: dict[str, WriteFunction] = {}
"""Of the implementations that do not leave it to the cache itself."""


@dataclass(frozen=True)
class PagedStep:
    """What the attention layers need to know of a step."""

    batch: PackedBatch
    cache: KVCache
    windows: dict[int, int] = field(default_factory=dict)
    """Filled by the layers: the window that each asked for."""


_running: ContextVar[PagedStep] = ContextVar("running")


@contextmanager
def running(step: PagedStep) -> Iterator[None]:
    """Attention layers that are called meanwhile, in this thread, work for this step."""
    token = _running.set(step)
    try:
        yield
    finally:
        _running.reset(token)


def transformers_name(implementation: str) -> str:
    """The name under which transformers knows an implementation of ours."""
    return f"cbviz_{implementation}"


def register(wanted: str = "paged", *, split_keys: bool = True) -> None:
    """Make the implementations known to transformers, Triton's if wanted. May be called again.

    `split_keys`: the keys of one query may be shared out among several programs (Triton only).
    """
    if wanted == "triton":
        from engine.attention.triton_paged import triton_attention, triton_write

        IMPLEMENTATIONS["triton"] = partial(triton_attention, splits=0 if split_keys else 1)
        WRITERS["triton"] = triton_write
    for name, function in IMPLEMENTATIONS.items():
        adapter = _adapter(function, WRITERS.get(name, _write))
        ALL_ATTENTION_FUNCTIONS.register(transformers_name(name), adapter)
        # transformers builds no mask for an implementation that it knows no mask function of.
        ALL_ATTENTION_FUNCTIONS.register(transformers_name(name) + _NOTING, adapter)
        ALL_MASK_ATTENTION_FUNCTIONS.register(transformers_name(name) + _NOTING, _no_mask)


def _write(
    cache: KVCache, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> None:
    cache.write(layer, slots, keys, values)


def triton_trouble(device: torch.device) -> str:
    """Why the Triton kernels cannot run on a device, in a few words; empty = they can."""
    if find_spec("triton") is None:
        return "it needs the package triton: pip install 'cbviz[triton]'"
    if device.type == "cuda":
        capable = torch.cuda.get_device_capability(device) >= (8, 0)
        return "" if capable else "it needs a card of compute capability 8.0 or more"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return ""
    return "it needs a CUDA device (on a CPU it can only be interpreted: TRITON_INTERPRET=1)"


def choose(wanted: str, device: torch.device) -> str:
    """The implementation for a device: `auto` is Triton on CUDA where it runs, else paged.

    Raises:
        ModelUnavailable: Triton is asked for and cannot run here.
    """
    trouble = triton_trouble(device)
    if wanted == "triton" and trouble:
        raise ModelUnavailable(f"triton attention cannot run here: {trouble}")
    if wanted == "auto":
        return "triton" if device.type == "cuda" and not trouble else "paged"
    return wanted


def _adapter(function: AttentionFunction, write: WriteFunction) -> Any:
    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """`query`: `[1, num_heads, n_Q, head_dim]` to `[1, n_Q, num_heads, head_dim]`."""
        _refuse_what_would_be_missing(others)
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        step = _running.get()
        _refuse_other_shapes(step.cache, key, value)
        window = step.windows[layer] = sliding_window or 0
        batch, cache = step.batch, step.cache
        write(cache, layer, batch.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        output = function(
            query[0].transpose(0, 1), cache, layer, batch, scale,
            window=window, softcap=float(softcap or 0.0),
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


_NOTING = "_noting"


def _refuse_other_shapes(cache: KVCache, key: torch.Tensor, value: torch.Tensor) -> None:
    """A kernel would write them across the slots of others."""
    heads, size = cache.layer(0)[0].shape[1:]
    for name, tensor in (("keys", key), ("values", value)):
        if tensor.shape[1] != heads or tensor.shape[3] != size:
            raise NotImplementedError(
                f"its {name} have {tensor.shape[1]} heads of {tensor.shape[3]} numbers, and "
                f"{heads} of {size} are what its configuration tells"
            )


_mask_windows: set[int] = set()


@contextmanager
def noting_mask_windows(model: Any) -> Iterator[set[int]]:
    """Collects the windows of the masks that a model asks for in the meantime (0 = no window).

    Until then, it must have been switched to an implementation of ours.
    """
    _mask_windows.clear()
    ours = model.config._attn_implementation
    model.set_attn_implementation(ours + _NOTING)
    try:
        yield _mask_windows
    finally:
        model.set_attn_implementation(ours)


def _no_mask(*_: Any, local_size: int | None = None, **__: Any) -> None:
    """No mask: our implementations know which keys a query sees.

    What it would have been is noted, since a model may build its mask with a window and not tell
    the attention function.
    """
    _mask_windows.add(local_size or 0)
