"""The engine's KV cache as pages: one block of every layer, one after the other, in vLLM's logical order.

vLLM gives each layer as a tensor whose first axis is the block (``[blocks, heads, tokens, content]``, whatever the
order in memory). Copies go through that logical order, so a page's bytes do not depend on the order in memory.

On a GPU the copies go through host memory, synchronously, on the stream of the thread that makes them; that ran on CPU
tensors only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import torch

from kvstore.memory import ByteRows


class UnsupportedCache(ValueError):
    """A cache whose blocks this store cannot take for pages."""


@dataclass(frozen=True, slots=True)
class BlockTarget:
    """Blocks of the cache, for ``PageStore.start_get``."""

    cache: PagedCache
    block_ids: Sequence[int]

    def view(self, place: int) -> memoryview | None:
        """Return nothing: a block lies in as many places as there are layers."""
        return None

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Copy pages there."""
        for place, one in zip(places, data, strict=True):
            self.cache.copy_in(self.block_ids[place], one)
        return True


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
        ends = list(accumulate(layer[0].numel() for layer in self._layers))
        self._places = list(pairwise([0, *ends]))
        self.page_bytes = ends[-1]
        # In the processor's memory NumPy copies a block with less ado, and straight to where it belongs.
        self._arrays = [_flat(layer.numpy()) for layer in self._layers] if self.device.type == "cpu" else None

    def copy_out(self, block_ids: Sequence[int], rows: ByteRows) -> None:
        """Copy block ``block_ids[i]`` of every layer into ``rows[i]`` (uint8, ``page_bytes`` wide)."""
        if self._arrays is not None:
            for layer, (start, end) in zip(self._arrays, self._places, strict=True):
                into = rows[:, start:end].reshape(len(rows), *layer.shape[1:])
                for place, block_id in enumerate(block_ids):
                    into[place] = layer[block_id]
            return
        picked = torch.tensor(block_ids, dtype=torch.long, device=self.device)
        pages = torch.from_numpy(rows[: len(block_ids)])
        for tensor, (start, end) in zip(self._layers, self._places, strict=True):
            pages[:, start:end].copy_(tensor.index_select(0, picked).reshape(len(block_ids), end - start))

    def copy_in(self, block_id: int, data: memoryview) -> None:
        """Copy a page into a block."""
        if self._arrays is not None:
            page = np.frombuffer(data, np.uint8)
            for layer, (start, end) in zip(self._arrays, self._places, strict=True):
                layer[block_id] = page[start:end] if layer.ndim == 2 else page[start:end].reshape(layer.shape[1:])
            return
        source = torch.frombuffer(data, dtype=torch.uint8)
        for tensor, (start, end) in zip(self._layers, self._places, strict=True):
            target = tensor[block_id]
            target.copy_(source[start:end].view(target.shape))


def _flat(layer: ByteRows) -> ByteRows:
    """Return a layer with a row for each block, where its blocks lie in one piece; else as it is."""
    rows = layer.reshape(layer.shape[0], -1)
    return rows if np.shares_memory(rows, layer) else layer


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
