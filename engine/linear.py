"""Linear layers on CPU with weights laid out for the processor once, not for every product.

torch's own float32 product (MKL) re-reads a plain weight at every call and is slow where the batch
is small and the processor not Intel's; oneDNN, which is in torch too, takes a weight packed in
advance. Whether that is faster is measured here at load, for each shape of the model, on the
machine that will run it. The operators are private to torch: where they are missing or wrong,
nothing is replaced.

Layers that read the same input (query, key and value; gate and up) become one product. Which those
are is told by how the modules lie beside each other, not by the name of the model.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from engine.attention.cpu.kernel import switched_off

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that are called with one input, in the order of the calls."""
TRIAL_ROWS = (1, 8, 64)
"""Batch sizes of the trial: decodes and a chunk."""
TRIAL_OUTPUTS = 4096
"""A trial takes at most so many outputs: the head of a model would take too long."""
TRIAL_ROUNDS = 5
TOLERANCE = 1e-5
"""Largest error in a trial, relative to the largest value."""


@dataclass(frozen=True)
class Replaced:
    """What became of a model's linear layers. `extra_bytes`: packed copies of weights whose
    original is still needed (a head tied to the embedding)."""

    packed: int
    kept: int
    extra_bytes: int


class PackedLinear(nn.Module):
    """`y = x Wᵀ + b` with a packed `W`; `weight`: `[out, in]`, `x`: `[..., in]`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = _pack(weight)
        self.bias = None if bias is None else bias.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., out]`"""
        return _product(x, self.packed, self.bias)


class _Shared:
    """One packed product whose columns belong to several layers that get the same input."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        weights, biases = zip(*map(_weight_and_bias, layers), strict=True)
        sizes = [len(weight) for weight in weights]
        bias = None
        if any(b is not None for b in biases):
            bias = torch.cat(
                [torch.zeros(n) if b is None else b for n, b in zip(sizes, biases, strict=True)]
            )
        self.linear = PackedLinear(torch.cat(weights), bias)
        self.sizes = sizes
        self._input: torch.Tensor | None = None
        self._left: dict[int, torch.Tensor] = {}

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The columns of one layer; computed for all of them when the first one asks."""
        if self._input is not x or index not in self._left:
            self._left = dict(enumerate(self.linear(x).split(self.sizes, dim=-1)))
            self._input = x
        part = self._left.pop(index)
        if not self._left:
            self._input = None
        return part


class FusedPart(nn.Module):
    """A layer whose product is computed together with those of its siblings."""

    def __init__(self, shared: _Shared, index: int) -> None:
        super().__init__()
        self._shared = shared
        self._index = index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., out]` for `x`: `[..., in]`."""
        return self._shared.part(self._index, x)


def pack_linears(model: nn.Module) -> Replaced:
    """Replace what is faster packed. Nothing happens except in float32 on CPU, nor where
    `CBVIZ_CPU_KERNEL=0` asks for torch's public operators."""
    parameters = list(model.parameters())
    if switched_off() or any(
        p.dtype is not torch.float32 or p.device.type != "cpu" for p in parameters
    ):
        return Replaced(0, 0, 0)
    trial = _Trial()
    packed = kept = extra = 0
    for parent in list(model.modules()):
        for layers in _fusable(parent, trial):
            shared = _Shared([getattr(parent, name) for name in layers])
            for index, name in enumerate(layers):
                setattr(parent, name, FusedPart(shared, index))
            packed += len(layers)
        for name, layer in list(parent.named_children()):
            if isinstance(layer, NewGELUActivation):
                setattr(parent, name, nn.GELU("tanh"))
            if not _is_linear(layer):
                continue
            weight, bias = _weight_and_bias(layer)
            if not trial.packing_wins(weight):
                kept += 1
                continue
            if _used_elsewhere(model, layer):
                extra += weight.numel() * weight.element_size()
            setattr(parent, name, PackedLinear(weight, bias))
            packed += 1
    return Replaced(packed, kept, extra)


class _Trial:
    """Short measurements, one for each shape, and what they said."""

    def __init__(self) -> None:
        self._verdicts: dict[tuple[int, int], bool] = {}

    @torch.inference_mode()
    def packing_wins(self, weight: torch.Tensor) -> bool:
        shape = (weight.shape[0], weight.shape[1])
        if shape not in self._verdicts:
            try:
                self._verdicts[shape] = _packing_wins(weight[:TRIAL_OUTPUTS])
            except (RuntimeError, AttributeError, NotImplementedError):
                self._verdicts[shape] = False
        return self._verdicts[shape]


def _packing_wins(weight: torch.Tensor) -> bool:
    weight = weight.contiguous()
    packed = _pack(weight)
    plain_s = packed_s = 0.0
    for rows in TRIAL_ROWS:
        x = torch.linspace(-1, 1, rows * weight.shape[1]).reshape(rows, -1)
        expected, found = linear(x, weight), _product(x, packed, None)
        if float((found - expected).abs().max()) > TOLERANCE * float(expected.abs().max()):
            return False
        # In turn, so that what else runs on the machine meets both.
        times = [
            (_seconds(linear, x, weight), _seconds(_product, x, packed, None))
            for _ in range(TRIAL_ROUNDS)
        ]
        plain_s += min(plain for plain, _ in times)
        packed_s += min(ours for _, ours in times)
    return packed_s < plain_s


def _seconds(function: Any, *arguments: Any) -> float:
    started = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - started


def _fusable(parent: nn.Module, trial: _Trial) -> Iterator[tuple[str, ...]]:
    for names in SIBLINGS:
        layers = [getattr(parent, name, None) for name in names]
        if not all(type(layer) is nn.Linear for layer in layers):
            continue
        weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        if len({w.shape[1] for w in weights}) == 1 and all(map(trial.packing_wins, weights)):
            yield names


def _is_linear(layer: nn.Module) -> bool:
    """Exactly these: a class derived from them may do more."""
    return type(layer) in (nn.Linear, Conv1D)


def _weight_and_bias(layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`[out, in]` and `[out]`; GPT-2's Conv1D holds its weight the other way round."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, torch.Tensor)
    assert bias is None or isinstance(bias, torch.Tensor)
    return (weight.detach().t() if isinstance(layer, Conv1D) else weight.detach()), bias


def _used_elsewhere(model: nn.Module, layer: nn.Module) -> bool:
    return any(
        other is not layer and any(p is layer.weight for p in other.parameters(recurse=False))
        for other in model.modules()
    )


def _pack(weight: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())
    return packed


def _product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return product
