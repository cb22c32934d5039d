"""What our tiers hold as vLLM's own KV events, which it then publishes with those of its device cache.

Blocks go by the names that vLLM's events have for them, so that whoever follows them knows a block in every tier as
one. Media by name: ``CPU`` for memory, ``DISK``, ``EXTERNAL`` for the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.page import PageMeta, Tier
from kvstore.plugins.vllm.messages import Change, Stored

_MEDIA: Mapping[Tier, str] = {Tier.HOST: "CPU", Tier.DISK: "DISK", Tier.POOL: "EXTERNAL"}


@dataclass(frozen=True, slots=True)
class EventKinds:
    """vLLM's own classes of events, and how its events name a block."""

    stored: Callable[..., Any]
    removed: Callable[..., Any]
    name_of: Callable[[bytes], bytes | int]


def engine_events(changes: Iterable[Change], block_tokens: int, kinds: EventKinds) -> Iterator[Any]:
    """Yield the events of these changes in order; neighbours of one chain become one event."""
    for change in changes:
        medium = _MEDIA[change.tier]
        if not isinstance(change, Stored):
            yield kinds.removed(block_hashes=[kinds.name_of(name) for name in change.hashes], medium=medium)
            continue
        for run in _chains(change.pages):
            yield _stored(run, medium, block_tokens, kinds)


def _chains(pages: Sequence[tuple[bytes, PageMeta]]) -> Iterator[list[tuple[bytes, PageMeta]]]:
    run: list[tuple[bytes, PageMeta]] = []
    for page in pages:
        if run and page[1].parent != run[-1][0]:
            yield run
            run = []
        run.append(page)
    if run:
        yield run


def _stored(run: Sequence[tuple[bytes, PageMeta]], medium: str, block_tokens: int, kinds: EventKinds) -> Any:
    first = run[0][1]
    is_salted = first.parent is None and first.salt is not None
    return kinds.stored(
        block_hashes=[kinds.name_of(name) for name, _ in run],
        parent_block_hash=None if first.parent is None else kinds.name_of(first.parent),
        token_ids=[token for _, meta in run for token in np.frombuffer(meta.token_ids, "<u4").tolist()],
        block_size=block_tokens,
        lora_id=None,
        medium=medium,
        lora_name=None,
        extra_keys=[(first.salt,), *[None] * (len(run) - 1)] if is_salted else None,
    )
