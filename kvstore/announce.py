"""From what a tier did to what an engine tells of it: tier changes become KV events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from kvstore.block import event_hash
from kvstore.events import BlocksRemoved, BlocksStored, KvEvent
from kvstore.page import PageKey, PageMeta, Tier, key_content_hash
from kvstore.tiers.base import PagesStored, TierChange


def tier_events(change: TierChange, page_tokens: int) -> list[KvEvent]:
    """Return the events of one change, blocks named by ``event_hash`` of their content hash. Pure; O(pages).

    Neighbours in ``change`` that continue one another's chain become one event.
    """
    if not isinstance(change, PagesStored):
        return [BlocksRemoved(tuple(event_hash(key_content_hash(key)) for key in change.keys), change.tier)]
    return [_stored(run, change.tier, page_tokens) for run in _chains(change.pages)]


def parents_first(pages: Sequence[tuple[PageKey, PageMeta]]) -> list[tuple[PageKey, PageMeta]]:
    """Return the pages so that each chain stands together, front to back: fewer events, and no orphans. O(pages)."""
    present = {key_content_hash(key) for key, _ in pages}
    successors: dict[bytes | None, list[tuple[PageKey, PageMeta]]] = {}
    for page in pages:
        parent = page[1].parent
        successors.setdefault(parent if parent in present else None, []).append(page)
    ordered, waiting = [], successors.get(None, [])[::-1]
    while waiting:
        page = waiting.pop()
        ordered.append(page)
        waiting += successors.get(key_content_hash(page[0]), [])[::-1]
    return ordered


def _chains(pages: tuple[tuple[PageKey, PageMeta], ...]) -> Iterator[list[tuple[PageKey, PageMeta]]]:
    """Cut the pages where one does not continue the one before it."""
    run: list[tuple[PageKey, PageMeta]] = []
    for key, meta in pages:
        if run:
            last_key, last_meta = run[-1]
            same_namespace = (meta.salt, meta.adapter) == (last_meta.salt, last_meta.adapter)
            if meta.parent != key_content_hash(last_key) or not same_namespace:
                yield run
                run = []
        run.append((key, meta))
    if run:
        yield run


def _stored(run: list[tuple[PageKey, PageMeta]], tier: Tier, page_tokens: int) -> BlocksStored:
    first = run[0][1]
    token_ids = chain.from_iterable(np.frombuffer(meta.token_ids, dtype="<u4").tolist() for _, meta in run)
    return BlocksStored(
        hashes=tuple(event_hash(key_content_hash(key)) for key, _ in run),
        parent=None if first.parent is None else event_hash(first.parent),
        token_ids=tuple(token_ids),
        block_size=page_tokens,
        tier=tier,
        salt=first.salt,
        adapter=first.adapter,
    )
