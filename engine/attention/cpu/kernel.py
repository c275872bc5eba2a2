"""Calling the kernel: loaded once a process, or not at all."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from typing import Any

import torch

from engine.attention.cpu.build import BuildFailed, shared_object
from engine.kv_cache import KVCache
from engine.packed_batch import PackedBatch

SWITCH = "CBVIZ_CPU_KERNEL"
"""Environment variable; 0 = only torch's public operators."""
HEAD_DIMS = range(1, 257)

_ATTEND: Sequence[Any] = [
    c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64,
    c_void_p, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_float, c_int64, c_float, c_int64,
]  # fmt: skip


class Kernel:
    """The loaded shared object."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend: Any = library.cbviz_paged_attention
        self._attend.argtypes, self._attend.restype = _ATTEND, c_int

    def attend(
        self,
        query: torch.Tensor,
        cache: KVCache,
        layer: int,
        batch: PackedBatch,
        scaling: float,
        window: int,
        softcap: float,
    ) -> torch.Tensor:
        """`query`: `[n_Q, num_heads, head_dim]` with any strides but the last; the same shape.

        Raises:
            MemoryError: no room for the work space.
        """
        if query.stride(2) != 1:
            query = query.contiguous()
        rows, heads, dim = query.shape
        keys, values = cache.pools(layer)
        output = query.new_empty(rows, heads, dim)
        arrays = batch.arrays
        failed = self._attend(
            query.data_ptr(), query.stride(0), query.stride(1), keys.data_ptr(), values.data_ptr(),
            output.data_ptr(), heads, keys.shape[1], dim, *arrays.addresses, arrays.block_size,
            scaling, window, softcap, torch.get_num_threads(),
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the attention kernel's work space")
        return output


def switched_off() -> bool:
    """Whoever started this asks for torch's public operators only."""
    return os.environ.get(SWITCH, "").strip() == "0"


def problem() -> str | None:
    """Why the kernel is not there, in one line; None = it is, or it was switched off."""
    found = _load()
    return found if isinstance(found, str) and found else None


def kernel_for(query: torch.Tensor, cache: KVCache) -> Kernel | None:
    """The kernel, where it can do this: float32 on CPU."""
    fits = (
        query.dtype is torch.float32
        and query.device.type == "cpu"
        and cache.dtype is torch.float32
        and query.shape[-1] in HEAD_DIMS
    )
    found = _load() if fits else None
    return found if isinstance(found, Kernel) else None


@cache
def _load() -> Kernel | str:
    """The kernel, or why there is none ('' = switched off)."""
    if switched_off():
        return ""
    try:
        return Kernel(ctypes.CDLL(str(shared_object())))
    except BuildFailed as error:
        return str(error)
    except (OSError, AttributeError) as error:
        return f"the built kernel cannot be loaded: {error}"
