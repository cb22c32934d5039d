"""Which tokens the engine's pages are: SGLang hands its storage hashes alone, its KV events tell what they stand for.

A page that is stored with its tokens can be announced to the index, by whoever opens the tier later, too. Keys of the
storage and hashes in events are the same chain (``kvstore.block``) but for its beginning: a salted storage chain begins
with another digest, so it is recomputed here from the events' tokens.

Source: SGLang 0.5.23 ``srt/mem_cache/utils.py`` (``storage_namespace_seed``), recomputed over recorded keys in
``tests/unit/kvstore``. Blocks of adapters are left out: events do not tell what their storage chains begin with.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec

from kvstore.block import content_hashes, token_bytes
from kvstore.page import PageMeta

_ARRAY_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
_NAMESPACE_TAG = b"sglang-cache-namespace-v1"


def storage_root(salt: str | None) -> bytes:
    """Return what the storage chain of this cache salt begins with."""
    if salt is None:
        return b""
    encoded = salt.encode()
    digest = hashlib.sha256(_NAMESPACE_TAG)
    digest.update(b"\0")  # no extra key
    digest.update(b"\1" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


class BlockBook:
    """What is known of blocks lately, by their storage digests: at most ``blocks`` of some 500 bytes. Thread-safe."""

    def __init__(self, blocks: int = 65_536) -> None:
        self.blocks = blocks
        self.unnamed = 0
        """Blocks of events whose storage digests cannot be known."""
        self._metas: OrderedDict[bytes, PageMeta] = OrderedDict()
        self._names: OrderedDict[int, bytes] = OrderedDict()  # the engine's name → storage digest
        self._changed = threading.Condition()

    def learn(self, payload: bytes) -> bool:
        """Take in one batch of the engine's events; ``False`` for one that cannot be understood. O(tokens)."""
        try:
            _, events, *_ = msgspec.msgpack.decode(payload)
            chains = [fields for event in events if (fields := _stored(event)) is not None]
            with self._changed:
                for fields in chains:
                    self._learn(fields)
                self._changed.notify_all()
        except (msgspec.DecodeError, TypeError, ValueError, KeyError, OverflowError):
            return False
        return True

    def lookup(self, digests: Sequence[bytes], wait_s: float = 0.0) -> list[PageMeta | None]:
        """Return what is known of blocks, waiting at most so long for events that are on their way."""
        until_s = time.monotonic() + wait_s
        with self._changed:
            while any(digest not in self._metas for digest in digests):
                left_s = until_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    break
            for digest in digests:
                if digest in self._metas:
                    self._metas.move_to_end(digest)
            return [self._metas.get(digest) for digest in digests]

    def _knows(self, names: Sequence[int]) -> bool:
        digests = [self._names.get(name) for name in names]
        if any(digest is None or digest not in self._metas for digest in digests):
            return False
        for name, digest in zip(names, digests, strict=True):
            self._names.move_to_end(name)
            if digest is not None:
                self._metas.move_to_end(digest)
        return True

    def __len__(self) -> int:
        return len(self._metas)

    def _learn(self, fields: dict[str, Any]) -> None:
        names, tokens, size = fields["block_hashes"], fields["token_ids"], fields["block_size"]
        if self._knows(names):  # told again for another tier: not hashed again
            return
        parent_name, salt = fields.get("parent_block_hash"), fields.get("cache_salt")
        adapted = fields.get("lora_name") is not None or fields.get("lora_id") is not None
        parent = storage_root(salt) if parent_name is None else self._names.get(parent_name)
        if (
            parent is None
            or adapted
            or not tokens
            or len(tokens) != len(names) * size
            or not isinstance(tokens[0], int)
        ):
            self.unnamed += len(names)
            return
        known_parent: bytes | None = None if parent_name is None else parent
        digests = content_hashes(tokens, size, parent=parent)
        for place, (name, digest) in enumerate(zip(names, digests, strict=True)):
            if digest not in self._metas:
                block = token_bytes(tokens[place * size : (place + 1) * size])
                self._metas[digest] = PageMeta(known_parent, block, salt)
            self._metas.move_to_end(digest)
            self._names[name] = digest
            self._names.move_to_end(name)
            known_parent = digest
        while len(self._metas) > self.blocks:
            self._metas.popitem(last=False)
        while len(self._names) > self.blocks:
            self._names.popitem(last=False)


def _stored(event: Any) -> dict[str, Any] | None:
    """Return the fields of a ``BlockStored``, which older versions write as an array; ``None`` for other events."""
    if isinstance(event, dict):
        return event if event["type"] == "BlockStored" else None
    kind, *values = event
    if kind != "BlockStored":
        return None
    fields = {name: value for name, value in zip(_ARRAY_FIELDS, values, strict=False) if not isinstance(value, dict)}
    for value in values:
        if isinstance(value, dict):  # optional fields, at the end
            fields.update(value)
    return fields
