"""Packed products: the same numbers, and half the bytes only where that loses nothing."""

from __future__ import annotations

import pytest
import torch

from engine_adapter.embedded.linear import make_linear


def weights(kind: str) -> torch.Tensor:
    torch.manual_seed(3)
    weight = torch.randn(96, 64) / 8
    if kind == "half":
        return weight.half().float()
    if kind == "too small for half":
        weight = weight.bfloat16().float()
        weight[5, 7] = 2.0**-30
    if kind == "too great for half":
        weight = weight.half().float()
        weight[5, 7] = 2.0**17
    return weight


@pytest.mark.parametrize("kind", ["float32", "half", "too small for half", "too great for half"])
@pytest.mark.parametrize("rows", [1, 8, 130])
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_float32(kind: str, rows: int, biased: bool) -> None:
    weight, bias = weights(kind), torch.randn(96) if biased else None
    x = torch.randn(rows, 64)
    x[0, 7] = 1e5  # beyond half's range: inputs must not be narrowed
    exact = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    got = make_linear(weight, bias)(x)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=2e-6 * float(exact.abs().max(1).values.median()))


def test_half_the_bytes_only_where_nothing_is_lost() -> None:
    full = weights("float32").nbytes
    halves = full // 2 if torch.backends.quantized.engine in ("x86", "fbgemm") else full
    assert make_linear(weights("half")).weight_bytes == halves
    for kind in ("float32", "too small for half", "too great for half"):
        assert make_linear(weights(kind)).weight_bytes == full


def test_other_types_stay_what_they_are() -> None:
    weight = weights("half").double()
    x = torch.randn(3, 64, dtype=torch.float64)
    assert torch.equal(make_linear(weight)(x), torch.nn.functional.linear(x, weight))
