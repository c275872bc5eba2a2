"""Packed linear layers give what torch's own give."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers.activations import NewGELUActivation
from transformers.pytorch_utils import Conv1D

from engine import linear as module
from engine.linear import FusedPart, PackedLinear, pack_linears


@pytest.fixture
def always(monkeypatch):
    """Every shape is packed: which one is faster is no matter here."""
    monkeypatch.delenv("CBVIZ_CPU_KERNEL", raising=False)
    monkeypatch.setattr(module, "_packing_wins", lambda weight: True)


class Attention(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 24, bias=bias)
        self.k_proj = nn.Linear(24, 8, bias=bias)
        self.v_proj = nn.Linear(24, 8, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_a_packed_layer_is_a_linear_layer(rows, bias):
    torch.manual_seed(rows)
    weight, b = torch.randn(37, 19), torch.randn(37) if bias else None
    x = torch.randn(1, rows, 19)
    torch.testing.assert_close(PackedLinear(weight, b)(x), linear(x, weight, b))


@torch.inference_mode()
def test_a_conv1d_of_gpt2_is_turned_around(always):
    model = nn.Sequential(Conv1D(40, 16), NewGELUActivation(), nn.Linear(40, 3))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(1, 5, 16)
    expected = model(x)
    assert pack_linears(model).packed == 2
    assert isinstance(model[0], PackedLinear)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_layers_with_one_input_become_one_product(always, monkeypatch, bias):
    model = nn.ModuleDict({"attention": Attention(bias)})
    x, other = torch.randn(1, 4, 24), torch.randn(1, 4, 24)
    expected, of_other = model["attention"](x), model["attention"](other)
    pack_linears(model)
    assert isinstance(model["attention"].k_proj, FusedPart)
    products = []
    original = module._product
    monkeypatch.setattr(module, "_product", lambda *a: products.append(1) or original(*a))
    for given, wanted in ((x, expected), (other, of_other), (x, expected)):
        found = model["attention"](given)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)
    assert len(products) == 3


@torch.inference_mode()
def test_fused_layers_called_in_any_order_see_their_own_input(always):
    model = nn.ModuleDict({"attention": Attention()})
    attention = model["attention"]
    x, other = torch.randn(1, 2, 24), torch.randn(1, 2, 24)
    expected = attention.v_proj(x), attention.q_proj(other), attention.q_proj(x)
    pack_linears(model)
    torch.testing.assert_close(attention.v_proj(x), expected[0])
    torch.testing.assert_close(attention.q_proj(other), expected[1])
    torch.testing.assert_close(attention.q_proj(x), expected[2])
    torch.testing.assert_close(attention.q_proj(x), expected[2])


@torch.inference_mode()
def test_a_tied_weight_is_counted_and_stays_with_its_embedding(always):
    model = nn.ModuleDict({"embedding": nn.Embedding(50, 8), "head": nn.Linear(8, 50, bias=False)})
    model["head"].weight = model["embedding"].weight
    untied = nn.Linear(8, 4)
    model["other"] = untied
    before = model["embedding"].weight
    replaced = pack_linears(model)
    assert replaced.extra_bytes == 50 * 8 * 4
    assert model["embedding"].weight is before
    assert [name for name, _ in model.named_parameters()] == ["embedding.weight"]


def test_nothing_is_replaced_where_packing_loses_or_is_not_wanted(monkeypatch):
    monkeypatch.setattr(module, "_packing_wins", lambda weight: False)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model).kept == 1
    monkeypatch.setattr(module, "_packing_wins", lambda weight: True)
    monkeypatch.setenv("CBVIZ_CPU_KERNEL", "0")
    assert pack_linears(model).packed == 0
    monkeypatch.delenv("CBVIZ_CPU_KERNEL")
    assert pack_linears(nn.Sequential(nn.Linear(8, 8)).bfloat16()).packed == 0
    assert type(model[0]) is nn.Linear


def test_a_torch_without_the_operators_keeps_its_layers(monkeypatch):
    def missing(weight: torch.Tensor) -> torch.Tensor:
        raise AttributeError("no such operator")

    monkeypatch.delenv("CBVIZ_CPU_KERNEL", raising=False)
    monkeypatch.setattr(module, "_pack", missing)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model).kept == 1


def test_operators_that_compute_something_else_are_not_used(monkeypatch):
    original = module._product
    monkeypatch.setattr(module, "_product", lambda *a: original(*a) * 1.001)
    assert not module._packing_wins(torch.randn(16, 16))
