"""Attention of one step over KV that lies in pages.

A step's tokens are flattened: first every sequence that adds one token (*decode*), grouped by length so that a group is
one padded product; then each sequence that adds more (*prefill*). Pages are gathered layer by layer, which costs one
more pass over the context and lets PyTorch's fused attention do the rest on any device.

A sequence's result is the same to the bit whatever is computed beside it, and however its tokens are cut into steps:
what is padded adds zeros to its sums, and padding is such that they are always taken in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn import functional

_BLOCK = 512
"""Keys that the fused kernel sums at a time on a CPU. Where more than half of them are there, a product with that many
is summed in two parts: so a rest of more than half is padded to the whole, and no prompt's part goes over a half."""

_LANES = 16  # keys that are summed side by side
_ROWS = 4  # fewer queries than that go another way through a product


@dataclass(frozen=True, slots=True)
class Span:
    """The next tokens of one sequence: ``token_ids`` at positions ``start``…, the KV before them lying in ``slots``.

    ``slots`` is the sequence's page table and has room for the new tokens too. ``wants_logits``: the last of these
    tokens is to be followed by a sampled one.
    """

    token_ids: Sequence[int]
    start: int
    slots: Sequence[int]
    wants_logits: bool = True

    @property
    def end(self) -> int:
        """Tokens of the sequence once this span is computed."""
        return self.start + len(self.token_ids)


def padded_tokens(tokens: int) -> int:
    """Return how many tokens a context of so many is padded to."""
    full, rest = divmod(tokens, _BLOCK)
    return full * _BLOCK + (_BLOCK if rest > _BLOCK // 2 else rest + -rest % _LANES)


class PagedKv:
    """The step's view of the device tier: where new K and V go, and how a context is gathered.

    ``kv`` is (pages, layers, 2, page_tokens, kv_heads, head_dim), contiguous.
    """

    def __init__(self, kv: torch.Tensor, spans: Sequence[Span]) -> None:
        pages, self.layers, _, self.page_tokens, self.kv_heads, self.head_dim = kv.shape
        self._device = kv.device
        self._tokens = kv.view(pages * self.layers * 2 * self.page_tokens, self.kv_heads, self.head_dim)
        self._halves = kv.view(pages * self.layers * 2, self.page_tokens * self.kv_heads * self.head_dim)
        rows = [
            span.slots[position // self.page_tokens] * self.layers * 2 * self.page_tokens + position % self.page_tokens
            for span in spans
            for position in range(span.start, span.end)
        ]
        steps = torch.arange(self.layers * 2).view(self.layers, 2, 1) * self.page_tokens
        self._rows = (torch.tensor(rows) + steps).to(self._device)  # (layers, 2, tokens)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store the step's K and V, each (tokens, kv_heads, head_dim), in its pages."""
        rows = self._rows[layer]
        self._tokens.index_copy_(0, rows[0], keys)
        self._tokens.index_copy_(0, rows[1], values)

    def gather(self, tables: Sequence[Sequence[int]], tokens: int) -> _Gather:
        """Prepare to collect the first ``tokens`` tokens of these page tables; what a table lacks is any page's."""
        pages = -(-tokens // self.page_tokens)
        whole = [[*table[:pages], *[table[0]] * (pages - len(table))] for table in tables]
        base = torch.tensor(whole, dtype=torch.int64).flatten() * (self.layers * 2)
        steps = torch.arange(self.layers * 2).view(self.layers, 2, 1)
        rows = (base + steps).flatten(1).to(self._device)
        shape = (2, len(tables), pages * self.page_tokens, self.kv_heads, self.head_dim)
        return _Gather(self._halves, rows, self._halves.new_empty(rows.shape[1], self._halves.shape[1]), shape, tokens)

    def mask(self, widths: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return which of ``tokens`` keys are seen, where ``widths`` of them are: their shape, which ends with 1, times
        ``tokens``."""
        return (torch.arange(tokens) < widths).to(self._device)


@dataclass(frozen=True, slots=True)
class _Gather:
    """Collects the K and V of some sequences, layer by layer, into one buffer: a fresh one each time is slow."""

    pages: torch.Tensor  # (pages · layers · 2, page elements)
    rows: torch.Tensor  # (layers, 2 · sequences · pages)
    buffer: torch.Tensor
    shape: tuple[int, int, int, int, int]  # (2, sequences, page tokens, kv_heads, head_dim)
    tokens: int

    def __call__(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V, each (sequences, kv_heads, tokens, head_dim), valid until the next call."""
        torch.index_select(self.pages, 0, self.rows[layer], out=self.buffer)
        both = self.buffer.view(self.shape).transpose(2, 3)[:, :, :, : self.tokens]
        return both[0], both[1]


class DecodeGroup:
    """Sequences of similar length that add one token each: one attention product, padded to the longest."""

    def __init__(self, paged: PagedKv, spans: Sequence[Span]) -> None:
        self.tokens = len(spans)
        padded = padded_tokens(max(span.end for span in spans))
        self._gather = paged.gather([span.slots for span in spans], padded)
        self._mask = paged.mask(torch.tensor([span.end for span in spans]).view(-1, 1, 1, 1), padded)

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return (tokens, heads, head_dim) for queries of that shape. All keys and values are in the pages."""
        k, v = self._gather(layer)
        # The query heads that share a K head take the place of positions: nothing is repeated, nothing is causal.
        q = queries.view(self.tokens, k.shape[1], -1, k.shape[3])
        return _attend(q, k, v, self._mask).reshape(queries.shape)


class PrefillSpan:
    """One sequence that adds several tokens. Its queries go in parts, each against the keys up to its end."""

    def __init__(self, paged: PagedKv, span: Span) -> None:
        self.tokens = len(span.token_ids)
        self._gather = paged.gather([span.slots], padded_tokens(span.end))
        half = _BLOCK // 2
        bounds = [span.start, *range(span.start + half - span.start % half, span.end, half), span.end]
        self._rows = [end - start for start, end in pairwise(bounds)]
        self._masks = [
            paged.mask(torch.arange(start, start + _padded_rows(end - start)).view(-1, 1) + 1, padded_tokens(end))
            for start, end in pairwise(bounds)
        ]

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Return (tokens, heads, head_dim) for queries of that shape. All keys and values are in the pages."""
        k, v = self._gather(layer)
        parts = [
            _attend(q.transpose(0, 1).unsqueeze(0), k[:, :, : mask.shape[1]], v[:, :, : mask.shape[1]], mask)
            for q, mask in zip(torch.split(queries, self._rows), self._masks, strict=True)
        ]
        return torch.cat(parts, 2)[0].transpose(0, 1)


def _padded_rows(rows: int) -> int:
    return rows + -rows % _ROWS


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return (sequences, heads, rows, head_dim) for queries of that shape. The rows of ``mask`` are padded, or one."""
    rows = q.shape[2]
    if (lacking := _padded_rows(rows) - rows) > 0:
        q = functional.pad(q, (0, 0, 0, lacking))
    return functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])[:, :, :rows]


@dataclass(slots=True)
class StepPlan:
    """A step's sequences in the order in which they are computed, with what attention needs, made once a step."""

    order: list[int]  # order[i] = index of the i-th computed span among those given
    spans: list[Span]
    paged: PagedKv
    groups: list[DecodeGroup | PrefillSpan]

    @classmethod
    def make(cls, spans: Sequence[Span], kv: torch.Tensor) -> StepPlan:
        """Order and group the spans. O(tokens + pages)."""

        def length_class(index: int) -> int:
            span = spans[index]
            return span.end.bit_length() if len(span.token_ids) == 1 else 1 << 30

        order = sorted(range(len(spans)), key=length_class)
        ordered = [spans[index] for index in order]
        paged = PagedKv(kv, ordered)
        groups: list[DecodeGroup | PrefillSpan] = []
        together: list[Span] = []
        for position, index in enumerate(order):
            if len(spans[index].token_ids) > 1:
                groups.append(PrefillSpan(paged, spans[index]))
                continue
            together.append(spans[index])
            after = order[position + 1] if position + 1 < len(order) else None
            if after is None or length_class(after) != length_class(index):
                groups.append(DecodeGroup(paged, together))
                together = []
        return cls(order, ordered, paged, groups)

    def attend(self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Store K and V of the step, then return the attention output of every token: (tokens, heads, head_dim)."""
        self.paged.write(layer, keys, values)
        if len(self.groups) == 1:
            return self.groups[0].attend(layer, queries)
        parts = torch.split(queries, [group.tokens for group in self.groups])
        return torch.cat([group.attend(layer, q) for group, q in zip(self.groups, parts, strict=True)])
