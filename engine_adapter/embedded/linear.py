"""A matrix product with weights that are packed once, in the fewest bytes that lose nothing.

A decode step reads every weight for a few rows of input, so its time is the bytes of the weights. On CPUs ``F.linear``
moreover packs them again at every call. What is used instead, always with float32 inputs, sums and outputs:

* weights that half precision holds exactly (all of a 4-bit or float16 checkpoint, most of a bfloat16 one) are kept in
  half and widened in registers, by FBGEMM: the same numbers from half the bytes. On x86;
* other float32 weights are packed by oneDNN, by the operator that PyTorch's own compiler emits for frozen weights.

Both give a row the same result to the bit, however many there are.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional

_ROWS_HINT = 64  # rows that oneDNN's packing is chosen for; it serves every number of rows, about equally well


class Linear(Protocol):
    """Maps (tokens, in) to (tokens, out)."""

    weight_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return x · weightᵀ + bias."""


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return the fastest product for weight (out, in) that computes with exactly these values."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32:
        if torch.backends.quantized.engine in ("x86", "fbgemm") and torch.equal(weight, weight.half().float()):
            return _HalfLinear(weight, bias)
        if torch._C._has_mkldnn:
            return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class _HalfLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        self._product = torch.ops.quantized.linear_dynamic_fp16.default  # the inputs stay float32, whatever its name
        self.weight_bytes = weight.nbytes // 2

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product(x, self._packed)
        return y


class _PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self.weight_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:  # oneDNN sums one row in another order; two take no longer
            return self(x.expand(2, -1))[:1]
        y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y
