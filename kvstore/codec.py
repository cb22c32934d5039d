"""How a page is written down outside this process: its checksum, and the sealed header that goes with its bytes.

A header says which page this is, how long it is and what its bytes must hash to. *Sealed* means prefixed by magic,
format version and a hash over key and content, so that a header that was torn, flipped, moved under another key or
written by another format is refused before any of it is believed::

    offset  0    4          6           10         18
            KWPG version u16 length u32  xxh3 u64   msgpack content …        (little endian)

The same form seals the disk's index records and the header in front of each pooled value.
"""

from __future__ import annotations

import struct
from typing import TypeVar

import msgspec
import xxhash

from kvstore.errors import RecordError
from kvstore.page import PageKey, PageMeta

RECORD_VERSION = 1
"""Bump it when the content of a record changes; older records are then refused with reason "format"."""

FORMED_VERSION = 2
"""Of records of pages that lie in another form than the layout's: refused by those who only know version 1."""

_MAGIC = b"KWPG"
_PREFIX = struct.Struct("<4sHIQ")
PREFIX_BYTES = _PREFIX.size


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a page is encrypted with; see ``kvstore.encryption``."""

    key_id: bytes
    salt: bytes
    number: int
    tag: bytes  # of the page's bytes
    secret: bytes  # the checksum and the meta that the header does not tell


class StoredForm(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What was done to a page's bytes before they were stored: made narrow, then encrypted, or one of the two."""

    length: int  # of what is stored
    narrow: str = ""  # in what; "": as the layout says
    envelope: Envelope | None = None


class PageHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What every stored page says of itself. ``checksum`` is of the bytes in their form, before encryption."""

    key: bytes
    length: int  # of the page, in the layout's form
    checksum: int
    meta: PageMeta
    expires_at_s: int = 0  # of the wall clock; 0: never
    form: StoredForm | None = None  # None: the page as it is


class IndexRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a page lies in a slab. ``generation`` names the slab's life, ``sequence`` orders the writes in it."""

    header: PageHeader
    slot: int
    generation: int
    sequence: int


RecordT = TypeVar("RecordT", bound=msgspec.Struct)


def checksum(data: memoryview | bytes) -> int:
    """Return xxh3_64 of the bytes. About 0.03 CPU s/GB while they are in cache, 0.09 when not."""
    return xxhash.xxh3_64_intdigest(data)


def seal(key: PageKey, record: msgspec.Struct) -> bytes:
    """Return the record as bytes that ``unseal`` accepts under the same key only."""
    content = msgspec.msgpack.encode(record)
    return _PREFIX.pack(_MAGIC, _version_of(record), len(content), _seal_of(key, content)) + content


def unseal(key: PageKey, data: memoryview | bytes, kind: type[RecordT]) -> tuple[RecordT, int]:
    """Return the record at the start of ``data`` and its sealed length. Raises ``RecordError``."""
    if len(data) < PREFIX_BYTES:
        raise RecordError("record")
    magic, version, length, seal_hash = _PREFIX.unpack_from(data)
    if magic != _MAGIC:
        raise RecordError("record")
    if version not in (RECORD_VERSION, FORMED_VERSION):
        raise RecordError("format")
    end = PREFIX_BYTES + length
    content = bytes(data[PREFIX_BYTES:end])
    if len(content) != length or _seal_of(key, content) != seal_hash:
        raise RecordError("record")
    try:
        return msgspec.msgpack.decode(content, type=kind), end
    except msgspec.DecodeError as error:
        raise RecordError("format") from error


def verify_header(header: PageHeader, key: PageKey, page_bytes: int) -> None:
    """Raise ``RecordError`` unless the header speaks of this page in this length."""
    if header.key != key:
        raise RecordError("key")
    if header.length != page_bytes:
        raise RecordError("length")


def sealed_length(data: memoryview | bytes) -> int:
    """Return how long the sealed record at the start of ``data`` claims to be; 0 if it is none."""
    if len(data) < PREFIX_BYTES or bytes(data[:4]) != _MAGIC:
        return 0
    return PREFIX_BYTES + int(_PREFIX.unpack_from(data)[2])


def _version_of(record: msgspec.Struct) -> int:
    header = record.header if isinstance(record, IndexRecord) else record
    return FORMED_VERSION if isinstance(header, PageHeader) and header.form is not None else RECORD_VERSION


def _seal_of(key: PageKey, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(key + content)
