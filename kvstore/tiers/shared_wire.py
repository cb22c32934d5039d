"""What engines and the daemon of a shared host tier say to each other: frames of msgpack over a Unix socket.

No page crosses the socket: pages lie in one area of memory that both have mapped. A frame is a length and a message;
the reply to ``Hello`` brings the area's descriptor along. ``Release`` and ``Unpin`` have no reply.
"""

from __future__ import annotations

import socket
import struct
from typing import Generic, TypeVar

import msgspec

from kvstore.page import PageMeta

WIRE_VERSION = 1
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 28
_AT_ONCE = 1 << 16


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A page and what is known of it."""

    key: bytes
    meta: PageMeta
    checksum: int
    expires_at_s: int
    slot: int = -1


class Hello(msgspec.Struct, frozen=True, tag=True):
    """Who wants to share: a layout, and how much memory its pages may have if they have none yet."""

    version: int
    fingerprint: bytes
    page_bytes: int
    capacity_bytes: int
    follows: bool = False  # wants to know of changes
    quota_pages: int | None = None  # of every namespace but these
    quotas: list[tuple[str | None, str | None, int | None]] = []


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The area of memory that comes with this has so many slots."""

    slots: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Why not."""

    reason: str


class Exists(msgspec.Struct, frozen=True, tag=True):
    """Which of these are there?"""

    keys: list[bytes]


class Acquire(msgspec.Struct, frozen=True, tag=True):
    """Pin those of these that are there; ``wanted``: as hits. Slot -1 is for one whose time is up."""

    keys: list[bytes]
    wanted: bool = True


class Reserve(msgspec.Struct, frozen=True, tag=True):
    """Give slots to those of these that are not there."""

    pages: list[Entry]


class Publish(msgspec.Struct, frozen=True, tag=True):
    """These were written to their last byte; the other ``slots`` that were given are not."""

    pages: list[Entry]
    slots: list[int]


class Release(msgspec.Struct, frozen=True, tag=True):
    """Take one pin of each; ``spoiled``: keys and slots whose bytes were not right."""

    slots: list[int]
    spoiled: list[tuple[bytes, int]] = []


class Remove(msgspec.Struct, frozen=True, tag=True):
    """Forget these."""

    keys: list[bytes]


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Forget a namespace."""

    salt: str | None
    adapter: str | None


class Pin(msgspec.Struct, frozen=True, tag=True):
    """Keep these for so long, or until this connection ends."""

    keys: list[bytes]
    for_s: float


class Unpin(msgspec.Struct, frozen=True, tag=True):
    """Undo one ``Pin`` of each."""

    keys: list[bytes]


class Retire(msgspec.Struct, frozen=True, tag=True):
    """These go before all others."""

    keys: list[bytes]


class Scan(msgspec.Struct, frozen=True, tag=True):
    """What is there?"""


class Clear(msgspec.Struct, frozen=True, tag=True):
    """Forget everything of this layout."""


class Check(msgspec.Struct, frozen=True, tag=True):
    """Is everything in order?"""


Request = (
    Hello | Exists | Acquire | Reserve | Publish | Release | Remove
    | Forget | Pin | Unpin | Retire | Scan | Clear | Check
)  # fmt: skip


class Change(msgspec.Struct, frozen=True, array_like=True):
    """Pages that became readable, or by their keys alone pages that are gone."""

    stored: list[tuple[bytes, PageMeta]]
    removed: list[bytes]


class Reply(msgspec.Struct, frozen=True, tag=True):
    """An answer, one ``flag`` or ``entry`` for each page asked for where it is about pages.

    ``changes`` are those since the last reply on this connection, by whomever.
    """

    flags: list[bool] = []
    entries: list[Entry | None] = []
    count: int = 0
    problem: str = ""
    used: int = 0  # pages in all
    changes: list[Change] = []


Answer = Welcome | Refused | Reply
MessageT = TypeVar("MessageT")


def frame(message: msgspec.Struct) -> bytes:
    """Return a message as it is sent."""
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames(Generic[MessageT]):
    """Reads messages off a socket; one call to the kernel for a short one."""

    def __init__(self, connection: socket.socket, decoder: msgspec.msgpack.Decoder[MessageT]) -> None:
        self._socket = connection
        self._decoder = decoder
        self._ahead = bytearray()

    def receive(self) -> MessageT | None:
        """Return the next message, ``None`` at the end. Raises ``OSError``, ``msgspec.DecodeError`` for no message."""
        if not self._read(_LENGTH.size):
            return None
        (length,) = _LENGTH.unpack_from(self._ahead)
        if length > _LONGEST:
            raise msgspec.DecodeError(f"a message of {length} bytes")
        end = _LENGTH.size + length
        if not self._read(end):
            return None
        message = self._decoder.decode(self._ahead[_LENGTH.size : end])
        del self._ahead[:end]
        return message

    def _read(self, least: int) -> bool:
        """Read until so many bytes are here; ``False`` if the other end has closed before."""
        while len(self._ahead) < least:
            data = self._socket.recv(max(_AT_ONCE, least - len(self._ahead)))
            if not data:
                return False
            self._ahead += data
        return True
