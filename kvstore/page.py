"""Pages: the KV bytes of one block in one layout, and everything that their bytes depend on.

A page is found by ``PageKey``: the block's content hash plus the *fingerprint* of the layout. Two engines share pages
exactly when their fingerprints are equal; anything that changes a byte (weights, dtype, shape, order, rank) is in it.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import NamedTuple

import msgspec

PAGE_FORMAT_VERSION = 1
KEY_BYTES = 48

_DTYPE_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1,
}  # fmt: skip


class Tier(IntEnum):
    """Where a page lies, fastest first. The values order tiers and index per-tier tuples; they are not persisted."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    POOL = 3

    @property
    def label(self) -> str:
        """The lower-case name used in metrics, JSON and bills."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Everything that the bytes of a page depend on besides its tokens."""

    weights_id: str  # content digest of the weights, never just a model's served name
    dtype: str  # "float32", "bfloat16", …
    page_tokens: int
    layers: int
    kv_heads: int
    head_dim: int
    order: str = "layer,kv,token,head,dim"
    rank: int = 0
    ranks: int = 1
    is_mla: bool = False
    format_version: int = PAGE_FORMAT_VERSION

    @property
    def fingerprint(self) -> bytes:
        """16 bytes that differ whenever any field differs."""
        return hashlib.sha256(msgspec.msgpack.encode(sorted(asdict(self).items()))).digest()[:16]

    @property
    def page_shape(self) -> tuple[int, int, int, int, int]:
        """Dims of one page: layers, planes (K and V; one latent plane under MLA), tokens, heads, head dim."""
        return (self.layers, 1 if self.is_mla else 2, self.page_tokens, self.kv_heads, self.head_dim)

    @property
    def page_bytes(self) -> int:
        """The length of every page of this layout. Raises ``ValueError`` for a dtype that has no known width."""
        if self.dtype not in _DTYPE_BYTES:
            raise ValueError(f"unknown page dtype {self.dtype!r}; known: {', '.join(_DTYPE_BYTES)}")
        return math.prod(self.page_shape) * _DTYPE_BYTES[self.dtype]


PageKey = bytes
"""48 bytes: 16 of the layout's fingerprint, then 32 of the block's content hash."""


def page_key(fingerprint: bytes, content_hash: bytes) -> PageKey:
    """Return the name under which every tier keeps the page of this block in this layout."""
    return fingerprint + content_hash


def key_fingerprint(key: PageKey) -> bytes:
    """Return the layout's part of a page key."""
    return key[:16]


def key_content_hash(key: PageKey) -> bytes:
    """Return the block's part of a page key."""
    return key[16:]


class Namespace(NamedTuple):
    """Whose pages are whose: the salt and the adapter that a block was computed under. Never shared across."""

    salt: str | None = None
    adapter: str | None = None


class PageMeta(msgspec.Struct, frozen=True, gc=False):
    """What a page says of its block, so that a reopened tier can announce what it holds to the index.

    ``parent`` is the content hash of the block before it (``None`` for a first block); ``token_ids`` are little-endian
    ``uint32`` bytes; ``salt`` and ``adapter`` are the namespace that the block was computed under. Tiers keep one for
    each page, out of the garbage collector's sight: one full round of it in an engine's process takes 0.1 s and more.
    """

    parent: bytes | None
    token_ids: bytes
    salt: str | None = None
    adapter: str | None = None

    @property
    def namespace(self) -> Namespace:
        """Whose page it is."""
        return Namespace(self.salt, self.adapter)
