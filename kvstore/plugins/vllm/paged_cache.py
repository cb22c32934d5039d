"""The engine's KV cache as pages: one block of every layer, one after the other, in vLLM's logical order.

vLLM gives each layer as a tensor whose first axis is the block (``[blocks, heads, tokens, content]``, whatever the
order in memory). Copies go through that logical order, so a page's bytes do not depend on the order in memory.

On a GPU the same copies go through host memory, synchronously; that was written for CUDA and ran on CPU tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvstore.memory import ByteRows


class UnsupportedCache(ValueError):
    """A cache whose blocks this store cannot take for pages."""


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """One block of the cache, for ``PageStore.start_get``."""

    cache: PagedCache
    block_id: int

    def view(self) -> memoryview | None:
        """Return nothing: a block lies in as many places as there are layers."""
        return None

    def fill(self, data: memoryview) -> None:
        """Copy a page there."""
        self.cache.copy_in(self.block_id, data)


class PagedCache:
    """All layers' blocks. Not thread-safe for one block; different blocks may be copied at once."""

    def __init__(self, layers: Mapping[str, torch.Tensor], blocks: int) -> None:
        """``layers`` in the model's order; layers that share one tensor count once. Raises ``UnsupportedCache``."""
        self._layers: list[torch.Tensor] = []
        self.shapes: list[tuple[str, tuple[int, ...], str]] = []
        seen: set[int] = set()
        for name, tensor in layers.items():
            if tensor.data_ptr() in seen:
                continue
            seen.add(tensor.data_ptr())
            by_block = _by_block(name, tensor, blocks)
            self._layers.append(by_block)
            self.shapes.append((name, tuple(by_block.shape[1:]), str(tensor.dtype)))
        if not self._layers:
            raise UnsupportedCache("the engine has no KV cache")
        self.device = self._layers[0].device
        self._widths = [layer[0].numel() for layer in self._layers]
        self.page_bytes = sum(self._widths)

    def copy_out(self, block_ids: Sequence[int], rows: ByteRows) -> None:
        """Copy block ``block_ids[i]`` of every layer into ``rows[i]`` (uint8, ``page_bytes`` wide)."""
        picked = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        into = torch.from_numpy(rows[: len(block_ids)])
        start = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            into[:, start : start + width].copy_(layer.index_select(0, picked).reshape(len(block_ids), width))
            start += width

    def copy_in(self, block_id: int, data: memoryview) -> None:
        """Copy a page into a block."""
        source = torch.frombuffer(data, dtype=torch.uint8)
        start = 0
        for layer, width in zip(self._layers, self._widths, strict=True):
            block = layer[block_id]
            block.copy_(source[start : start + width].view(block.shape))
            start += width


def _by_block(name: str, tensor: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a layer as bytes, with the engine's blocks as its first axis."""
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedCache(
            f"{name} keeps {type(tensor).__name__}, not one tensor: only attention layers are stored"
        )
    if tensor.shape[0] % blocks or tensor.stride(-1) != 1:
        raise UnsupportedCache(f"{name}: a cache of shape {tuple(tensor.shape)} for {blocks} blocks")
    if tensor.shape[0] != blocks:  # attention may cut a block into smaller ones
        tensor = tensor.unflatten(0, (blocks, -1))  # type: ignore[no-untyped-call]
    return tensor.view(torch.uint8)
