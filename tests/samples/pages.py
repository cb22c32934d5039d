"""Small pages whose bytes follow from their keys, so that any byte of any tier can be told right from wrong."""

from __future__ import annotations

import hashlib

from kvstore.block import content_hashes, token_bytes
from kvstore.codec import checksum
from kvstore.deadline import Allowance
from kvstore.page import PageKey, PageLayout, PageMeta, page_key
from kvstore.tiers.base import Page

LAYOUT = PageLayout(weights_id="sample", dtype="float32", page_tokens=4, layers=2, kv_heads=2, head_dim=32)
"""Pages of 4,096 bytes: the smallest that direct I/O takes."""

PATIENCE = Allowance(60.0)
"""For tiers whose deadlines are not what is tested: machines that run tests are busy."""


def chain(
    pages: int, *, layout: PageLayout = LAYOUT, first_token: int = 0, salt: str | None = None
) -> list[tuple[PageKey, PageMeta]]:
    """Return the pages of one prompt, front to back."""
    width = layout.page_tokens
    token_ids = range(first_token, first_token + pages * width)
    hashes = content_hashes(token_ids, width, salt=salt)
    parents = [None, *hashes]
    return [
        (
            page_key(layout.fingerprint, digest),
            PageMeta(parents[i], token_bytes(token_ids[i * width : (i + 1) * width]), salt),
        )
        for i, digest in enumerate(hashes)
    ]


def strangers(pages: int, *, layout: PageLayout = LAYOUT, first_token: int = 0) -> list[tuple[PageKey, PageMeta]]:
    """Return first pages of as many prompts: none is another's prefix."""
    return [chain(1, layout=layout, first_token=first_token + 1000 * i)[0] for i in range(pages)]


def page_data(key: PageKey, *, layout: PageLayout = LAYOUT) -> bytes:
    """Return the one right content of a page."""
    return hashlib.shake_128(key).digest(layout.page_bytes)


def page(entry: tuple[PageKey, PageMeta], *, layout: PageLayout = LAYOUT) -> Page:
    """Return a page on its way into a tier."""
    key, meta = entry
    data = page_data(key, layout=layout)
    return Page(key, meta, memoryview(data), checksum(data))


def buffers(count: int, *, layout: PageLayout = LAYOUT) -> list[memoryview]:
    """Return room for as many pages."""
    return [memoryview(bytearray(layout.page_bytes)) for _ in range(count)]
