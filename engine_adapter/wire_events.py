"""Engines' KV event payloads to ``kvstore.events``; ``kvstore.event_wire`` is the way back.

A payload is msgpack ``[published_at, [event, …], dp_rank]``. Events differ by engine and version; all of these are
read:

| engine | event |
|---|---|
| SGLang to 0.5.5 | ``["BlockStored", hashes, parent, token_ids, block_size, lora_id]`` |
| SGLang 0.5.10 … 0.5.15 | the same and ``medium`` |
| SGLang 0.5.19 | the same and a map ``{cache_salt}`` |
| SGLang from 0.5.20 | a map of ``type`` and the same by name, ``cache_salt`` and ``lora_name`` among them |
| vLLM, older | an array as above, then ``medium``, ``lora_name``, ``extra_keys`` |
| vLLM 0.32 | a map as above, with ``extra_keys`` for salts, ``group_idx``, ``kv_cache_spec_kind`` |

Hashes come out as ``array('Q')``, token ids as ``array('I')``. One ``BlockStored`` may announce a whole chain. Hashes
may be signed or unsigned integers or byte strings (the low 64 bits count) and come out unsigned. Unknown fields are
ignored. Unknown event types, unknown media and blocks that a token chain cannot name (sparse groups, pairs of tokens,
images) are left out and named in ``EventBatch.ignored``. An event of a known type that does not make sense spoils its
batch: a removal may have been in it, so the caller must resynchronise.

Sources: recorded frames in ``tests/captures``; SGLang ``srt/disaggregation/kv_events.py``; vLLM
``distributed/kv_events.py``.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

from engine_adapter.unpack import unpack
from kvstore.event_wire import FLUSHED_TIERS, MEDIA
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, KvEvent, TierCleared
from kvstore.page import Tier

Fields: TypeAlias = Mapping[str, Any]  # one event as it came over the wire

CHAIN_KINDS = frozenset({"full_attention", "mla_attention"})
"""Cache groups in which a block is usable exactly when its whole prefix is."""

_ARRAY_FIELDS: Mapping[str, tuple[str, ...]] = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
_UNSIGNED = 2**64 - 1


class WireError(Exception):
    """A frame or a payload that cannot be understood as KV events; what it said is lost."""


def decode_batch(sequence: int, payload: bytes, cleared: tuple[Tier, ...] = FLUSHED_TIERS) -> EventBatch:
    """Decode one payload of any supported engine; ``cleared``: what ``AllBlocksCleared`` covers where it does not say.

    O(bytes). Raises ``WireError``.
    """
    decoded: list[KvEvent] = []
    ignored: list[str] = []
    try:
        published_at, events, *rest = unpack(payload)
        if not isinstance(events, list):
            raise ValueError("events are not a list")
        for wire in events:
            event = _event(wire if isinstance(wire, dict) else _fields(wire), ignored, cleared)
            if event is not None:
                decoded.append(event)
        rank = rest[0] if rest and isinstance(rest[0], int) else 0
        return EventBatch(sequence, float(published_at), tuple(decoded), rank, tuple(ignored))
    except (TypeError, ValueError, KeyError, IndexError, OverflowError, RecursionError) as error:
        raise WireError(f"batch {sequence}: {type(error).__name__}: {error}") from error


def _fields(wire: object) -> Fields:
    """Return an event that came as an array as a map."""
    if not isinstance(wire, list):
        raise ValueError("an event is neither a map nor a list")
    kind, *values = wire
    names = _ARRAY_FIELDS.get(kind, ())
    fields = dict(zip(names, values, strict=False))
    for name, value in zip(names, values, strict=False):
        if isinstance(value, dict):  # SGLang 0.5.19 ends its array with a map of optional fields
            fields.pop(name)
            fields.update(value)
    return {**fields, "type": kind}


def _event(fields: Fields, ignored: list[str], cleared: tuple[Tier, ...]) -> KvEvent | None:
    """Return what one event says, ``None`` if it says nothing that the index can use."""
    kind, medium = fields["type"], fields.get("medium")
    if kind not in _ARRAY_FIELDS:
        ignored.append("unknown type")
        return None
    tier = Tier.DEVICE if medium is None else MEDIA.get(medium)
    if tier is None:
        ignored.append("unknown medium")
        return None
    if kind == "BlockStored":
        return _stored(fields, tier, ignored)
    if kind == "BlockRemoved":
        # Whichever group lost the block, the prefix is no longer whole: groups need no telling apart here.
        return BlocksRemoved(_hashes(fields["block_hashes"]), tier)
    return TierCleared(cleared if medium is None else (tier,))


def _stored(fields: Fields, tier: Tier, ignored: list[str]) -> BlocksStored | None:
    hashes, tokens, block_size = _hashes(fields["block_hashes"]), fields["token_ids"], fields["block_size"]
    if not isinstance(block_size, int) or block_size < 1:
        raise ValueError(f"block_size {block_size!r}")
    if (reason := _unnameable(fields, len(hashes), tokens, block_size)) is not None:
        ignored.append(reason)
        return None
    parent, adapter, salt = fields["parent_block_hash"], _adapter(fields), fields.get("cache_salt")
    if extra_keys := fields.get("extra_keys"):
        own_keys = [_without(adapter, keys or ()) for keys in extra_keys]
        salt, usable = _read_extra_keys(own_keys, is_first=parent is None, limit=len(hashes))
        if usable < len(hashes):
            ignored.append("image or other non-text key")
            hashes, tokens = hashes[:usable], tokens[: usable * block_size]
        if not usable:
            return None
    parent = None if parent is None else _hash(parent)
    return BlocksStored(hashes, parent, _tokens(tokens), block_size, tier, salt or None, adapter)


def _unnameable(fields: Fields, blocks: int, tokens: Sequence[object], block_size: int) -> str | None:
    """Say why a chain of plain token ids can't name these blocks, if so."""
    kind, group = fields.get("kv_cache_spec_kind"), fields.get("group_idx")
    if kind not in CHAIN_KINDS if kind is not None else group not in (None, 0):
        return "sparse group"
    if tokens and not isinstance(tokens[0], int):
        return "token pairs"
    return None if len(tokens) == blocks * block_size else "sparse blocks"


def _adapter(fields: Fields) -> str | None:
    """Return the adapter's name, or its number as text from engines that give no name."""
    name, number = fields.get("lora_name"), fields.get("lora_id")
    if name is None and number is not None:
        return str(number)
    return None if name is None else str(name)


def _without(adapter: str | None, keys: Sequence[object]) -> list[object]:
    """Return the keys but the adapter's, once: a salt may be spelled like it."""
    own = list(keys)
    if adapter is not None and adapter in own:
        own.remove(adapter)
    return own


def _read_extra_keys(own_keys: list[list[object]], *, is_first: bool, limit: int) -> tuple[str | None, int]:
    """Return the salt and how many leading blocks only tokens and salt name.

    vLLM puts the salt on a prompt's first block, and the hashes of images on the blocks that they touch.
    """
    salt = None
    if is_first and len(own_keys[0]) == 1 and isinstance(own_keys[0][0], str):
        salt = own_keys[0][0]
        own_keys = [[], *own_keys[1:]]
    return salt, min(limit, sum(1 for _ in takewhile(lambda keys: not keys, own_keys)))


def _hash(value: int | bytes) -> int:
    return (int.from_bytes(value, "big") if isinstance(value, bytes) else value) & _UNSIGNED


def _hashes(values: array[int] | list[int | bytes]) -> array[int]:
    if isinstance(values, array):
        return values if values.typecode == "Q" else array("Q", values)
    return array("Q", [_hash(value) for value in values])


def _tokens(values: array[int] | list[int]) -> array[int]:
    if isinstance(values, array) and values.typecode == "I":
        return values
    return array("I", values)  # refuses what is not a number, or not in 0 … 2**32-1
