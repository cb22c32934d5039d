"""What an engine's page size costs a gateway, measured on this machine in a moment, for ``keepwarm check``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from kvstore.block import routing_hash_array
from kvstore.page import Tier
from radix_index.index import RadixIndex

LARGE_ENOUGH = 16
"""Pages of so many tokens and more cost the gateway nothing worth a word."""

RECOMMENDED = (16, 64)
_PROMPT_TOKENS = 8_192
_PROMPTS = 24
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class PageCost:
    """``index_bytes``: for a million tokens held somewhere. ``decision_s``: to hash and match a prompt of 8,192."""

    page_tokens: int
    index_bytes: int
    decision_s: float

    def __str__(self) -> str:
        return f"{self.index_bytes / 2**20:.1f} MiB of index for a million tokens and {self.decision_s * 1e3:.2f} ms"


def measure(page_tokens: int) -> PageCost:
    """Fill a small index with blocks of this size, named as engines name theirs, and ask it. Some 0.1 s at most."""
    index = RadixIndex()
    index.add_instance("a", block_size=page_tokens)
    empty, blocks = index.stats().used_bytes, 0
    tokens = np.arange(_PROMPTS * _PROMPT_TOKENS, dtype=np.uint32).reshape(_PROMPTS, _PROMPT_TOKENS)
    for prompt in tokens:
        hashes = _hashes(prompt, page_tokens)
        index.stored("a", Tier.DEVICE, hashes, hashes ^ np.uint64(1))
        blocks += len(hashes)
    spent = []
    for prompt in tokens[:_REPEATS]:
        begun = time.perf_counter()
        index.match(_hashes(prompt, page_tokens))
        spent.append(time.perf_counter() - begun)
    per_block = (index.stats().used_bytes - empty) / blocks
    return PageCost(page_tokens, round(per_block * 1_000_000 / page_tokens), min(spent))


def _hashes(prompt: npt.NDArray[np.uint32], page_tokens: int) -> npt.NDArray[np.uint64]:
    return routing_hash_array(cast("Sequence[int]", prompt), page_tokens, 0)


def advice(page_tokens: int) -> str | None:
    """Say what smaller pages than are good for the gateway cost, and what others would; ``None`` for good ones."""
    if page_tokens >= LARGE_ENOUGH:
        return None
    own, *others = (measure(size) for size in (page_tokens, *RECOMMENDED))
    better = " or ".join(f"--page-size {cost.page_tokens} ({cost})" for cost in others)
    return (
        f"its pages hold {page_tokens} token{'s' * (page_tokens > 1)}, which costs here {own} for a prompt of "
        f"{_PROMPT_TOKENS} tokens that nobody sent before; consider {better}"
    )
