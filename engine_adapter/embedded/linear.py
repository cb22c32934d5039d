"""A matrix product with weights that are packed once.

On CPUs PyTorch's ``F.linear`` packs the weights again at every call, which for the few rows of a decode step costs two
to three times the product itself. oneDNN's operator takes them packed; it is what PyTorch's own compiler emits for
frozen weights.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

Linear = Callable[[torch.Tensor], torch.Tensor]
"""Maps (tokens, in) to (tokens, out)."""

_ROWS_HINT = 64  # rows the packing is chosen for; it serves every number of rows, about equally well


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    """Return x ↦ x · weightᵀ + bias for weight (out, in); packed where that is available (float32 on CPU)."""
    if weight.device.type == "cpu" and weight.dtype == torch.float32 and torch._C._has_mkldnn:
        return _PackedLinear(weight, bias)
    return _PlainLinear(weight, bias)


class _PlainLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


class _PackedLinear:
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS_HINT)
        self._bias = bias
        self._product = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self._product(x, self._weight, self._bias, "none", [], "")
        return y
