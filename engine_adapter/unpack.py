"""msgpack for KV events: long arrays of integers come out packed, everything else as usual.

An array of eight or more integers becomes ``array('I')`` when all are in 0 … 2**32-1, else ``array('Q')`` of the
integers modulo 2**64 (event hashes may be signed or unsigned; their 64 bits are what counts). Extension values become
``None`` in the compiled version and are nothing that events use. Compiled (``_unpack.c``) where there was a C compiler
at installation; ``COMPILED`` tells.
"""

from __future__ import annotations

from array import array
from typing import Any

import msgspec

MIN_PACKED = 8
_decoder = msgspec.msgpack.Decoder()


def unpack(payload: bytes) -> Any:
    """Decode one msgpack value. Raises ``ValueError`` (``msgspec.DecodeError`` is one) or ``RecursionError``."""
    return _pack(_decoder.decode(payload))


def _pack(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pack(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) < MIN_PACKED or not all(type(item) is int for item in value):
        return [_pack(item) for item in value]
    try:
        return array("I", value)
    except OverflowError:
        return array("Q", [item & 0xFFFF_FFFF_FFFF_FFFF for item in value])


INTERPRETED = unpack
COMPILED = False
try:
    from engine_adapter._unpack import unpack as _compiled
except ImportError:
    pass
else:
    COMPILED, unpack = True, _compiled
