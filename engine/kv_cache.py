"""The paged key/value tensors: one flat row of slots a layer, a block being consecutive slots."""

from __future__ import annotations

import torch


class KVCache:
    """Keys and values of every layer, `[num_slots, num_kv_heads, head_dim]` each.

    A slot is `block * block_size + offset`. Memory is touched only where tokens are written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_slots: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_layers, num_slots, num_kv_heads, head_dim)
        self._keys = torch.zeros(shape, dtype=dtype, device=device)
        self._values = torch.zeros(shape, dtype=dtype, device=device)

    def write(
        self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Store new keys and values, `[n_Q, num_kv_heads, head_dim]`, in their slots `[n_Q]`."""
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and values of a layer, `[num_slots, num_kv_heads, head_dim]` each (views)."""
        return self._keys[layer], self._values[layer]

    def read(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of these slots, `[len(slots), num_kv_heads, head_dim]` each (copies)."""
        return self._keys[layer].index_select(0, slots), self._values[layer].index_select(0, slots)

    def copy_block(self, source: int, target: int, block_size: int) -> None:
        """Copy keys and values of a whole block, in every layer."""
        old = slice(source * block_size, (source + 1) * block_size)
        new = slice(target * block_size, (target + 1) * block_size)
        self._keys[:, new] = self._keys[:, old]
        self._values[:, new] = self._values[:, old]

    def pools(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """All keys and all values of a layer, `[num_slots, num_kv_heads, head_dim]` (no copies)."""
        return self._keys[layer], self._values[layer]

    @property
    def dtype(self) -> torch.dtype:
        """That of both pools."""
        return self._keys.dtype
