"""One request on its way through the engine: its tokens, its page table, and how far it has been computed."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from engine_adapter.embedded.request import GenerationRequest, Sink
from kvstore.page import Tier


@dataclass(slots=True, eq=False)
class Sequence:
    """Mutable, of the engine's thread alone. ``tokens`` are prompt and output; KV exists for the first ``computed``."""

    request: GenerationRequest
    sink: Sink
    number: int  # order of arrival
    generator: torch.Generator | None = None  # None: greedy
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    slots: list[int] = field(default_factory=list)  # page table: pages of the device tier, each pinned once
    hashes: list[bytes] = field(default_factory=list)  # content hashes of the leading full pages, made as needed
    published: int = 0  # leading pages that others can find
    loading: Future[list[Tier]] | None = None  # pages on their way from the lower tiers
    hit_tokens: tuple[int, int, int, int] | None = None  # of the first admission; None: not admitted yet
    announced: bool = False  # its sink was told of the admission
    stalled_pages: int = -1  # pages there were when it last found too few

    def __post_init__(self) -> None:
        self.tokens = [*self.request.token_ids, *self.request.given_ids]

    @property
    def remaining(self) -> int:
        """Tokens still to be computed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far, those that were given included."""
        return len(self.tokens) - len(self.request.token_ids)

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts who goes first: higher priority, then earlier arrival."""
        return (-self.request.priority, self.number)
