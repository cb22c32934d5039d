"""What the connector needs of one of vLLM's requests: its blocks that are pages, and what a page says of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.block import token_bytes
from kvstore.page import PageMeta, Tier


@dataclass(slots=True)
class Tracked:
    """One request in the scheduler. ``request`` is vLLM's own, which grows as tokens are generated."""

    request: Any
    saved: int = 0  # leading blocks that were stored, or looked at for that
    claimed_from: int = 0  # block at which the last claim began …
    claimed: Sequence[Tier] = field(default_factory=tuple)  # … and where each of its pages lies
    loading: Sequence[Tier] = field(default_factory=tuple)  # those of which vLLM took up the offer
    has_failed: bool = False  # a load; it is offered nothing more

    @property
    def id(self) -> str:
        """Its name."""
        return str(self.request.request_id)

    @property
    def hashes(self) -> Sequence[bytes]:
        """The names of its full blocks, by now."""
        names: Sequence[bytes] = self.request.block_hashes
        return names

    def pages(self, block_tokens: int) -> int:
        """Return how many leading blocks are pages by now.

        Blocks are named by an adapter's name and by what a client calls an image, neither of which is its content; so
        nothing of a request with an adapter is a page, and nothing from the first medium on.
        """
        request = self.request
        if request.lora_request is not None or request.prompt_embeds is not None:
            return 0
        offsets: list[int] = [feature.mm_position.offset for feature in request.mm_features or ()]
        return min([len(self.hashes), *(offset // block_tokens for offset in offsets)])

    def loadable(self, block_tokens: int) -> int:
        """Return how many leading blocks may come from elsewhere: at least one token is left to compute."""
        tokens: int = self.request.num_tokens
        return min(self.pages(block_tokens), (tokens - 1) // block_tokens)

    def meta(self, block: int, block_tokens: int) -> PageMeta:
        """Return what the page of a block says of itself."""
        request, start = self.request, block * block_tokens
        return PageMeta(
            parent=bytes(request.block_hashes[block - 1]) if block else None,
            token_ids=token_bytes(list(request.all_token_ids[start : start + block_tokens])),
            salt=request.cache_salt or None,
        )
