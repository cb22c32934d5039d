"""Conversations: what is known of the prompts that longer ones begin with.

An agent sends its whole history at every step. The memo keeps, for each conversation seen, its final ids and *points*:
places where rendering and encoding can go on. A request is matched by content: the messages' serialization must begin
with the one remembered, byte for byte (a digest only says where to look), so one client never gets another's ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from engine_adapter.resumption import LoopState

Ids: TypeAlias = npt.NDArray[np.uint32]
Hashes: TypeAlias = npt.NDArray[np.uint64]
HashKey: TypeAlias = tuple[int, int]
"""A chain's seed and its block size."""

MAX_POINTS = 32
"""Places in one conversation from which a later request can go on; the oldest is forgotten first."""

_LOOK_BACK = (8, 56, 448)
"""How many messages may be new, in portions: most requests bring few."""

_POINT_BYTES = 600
_MESSAGE_BYTES = 700  # a dictionary with three members and what a list of text parts adds, measured
_PointKey: TypeAlias = tuple[bytes, int, int]  # scope, messages, digest of their content
_encode = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class Point:
    """A place behind a conversation's message from which a longer one goes on."""

    messages: int
    content_bytes: int
    state: LoopState
    tokens: int
    """Ids before the last seal; they stay."""
    seal: str
    open_text: str
    """Rendered text behind the seal: it is encoded together with what follows."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to its newest point. Immutable."""

    content: bytes
    messages: Sequence[Mapping[str, object]]
    """As the template saw them."""
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    guard: str
    cut: str
    ids: Ids
    points: tuple[Point, ...]
    hashes: Mapping[HashKey, Hashes]

    def used_bytes(self) -> int:
        """Return about what this takes: text twice (serialized, and as objects), ids, hashes, points."""
        texts = 2 * len(self.content) + _MESSAGE_BYTES * len(self.messages) + 2 * len(self.points[-1].state.head)
        return texts + self.ids.nbytes + sum(h.nbytes for h in self.hashes.values()) + _POINT_BYTES * len(self.points)


@dataclass(frozen=True, slots=True)
class Content:
    """A request's messages as bytes, under a digest of what else its prompt depends on."""

    scope: bytes
    data: bytes
    messages: Sequence[Mapping[str, object]]

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, object]], scope: object) -> Content | None:
        """Return the content; ``None`` where there is no exact serialization (a lone surrogate, a huge number)."""
        try:
            data = _encode(messages)
            return cls(sha256(_encode(scope)).digest(), data[_header_bytes(len(messages)) :], messages)
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
            return None

    def places(self) -> Iterator[tuple[int, int, int]]:
        """Yield (messages, bytes, digest of these bytes) for the ends of the newest messages, the newest first.

        One fast digest of the bytes for each portion of ``_LOOK_BACK`` that is asked for, and about 1 µs a message.
        """
        end, length = len(self.messages), len(self.data)
        view = memoryview(self.data)
        for portion in _LOOK_BACK:
            sizes = [len(_encode(message)) for message in self.messages[max(end - portion, 0) : end]]
            if not sizes:
                return
            at = length - sum(sizes)
            digest = xxhash.xxh3_64(view[:at])
            found = []
            for number, size in enumerate(sizes, end - len(sizes) + 1):
                digest.update(view[at : at + size])
                at += size
                found.append((number, at, digest.intdigest()))
            yield from reversed(found)
            end, length = end - len(sizes), length - sum(sizes)


class _Slot:
    """The place of one conversation while it grows; only the memo changes it, under its lock."""

    __slots__ = ("conversation", "keys", "used_bytes")

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.keys: list[_PointKey] = []  # one for each of the conversation's points
        self.used_bytes = 0


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation with which a request begins, and the point to go on from."""

    conversation: Conversation
    point: Point
    slot: _Slot

    def ends_there(self) -> bool:
        """Whether the point is the conversation's newest, and the conversation still the newest of its kind."""
        return self.slot.conversation is self.conversation and self.point is self.conversation.points[-1]


@dataclass(frozen=True, slots=True)
class ConversationStats:
    """The memo at one moment. ``resumed`` and ``fresh`` count what was added: from a known beginning, and whole."""

    conversations: int
    used_bytes: int
    resumed: int
    fresh: int


class ConversationMemo:
    """Conversations by content. Thread-safe; stays within ``limit_bytes``, the least recently used go first."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self._slots: OrderedDict[_Slot, None] = OrderedDict()
        self._points: dict[_PointKey, tuple[_Slot, Point]] = {}
        self._resumed = self._fresh = 0
        self._lock = threading.Lock()

    def find(self, content: Content) -> Known | None:
        """Return the longest conversation known with which ``content`` begins, compared byte for byte."""
        for messages, length, digest in content.places():
            with self._lock:
                slot, point = self._points.get((content.scope, messages, digest), (None, None))
                conversation = slot.conversation if slot is not None else None
                if slot is not None and slot in self._slots:
                    self._slots.move_to_end(slot)
            if slot is None or point is None or conversation is None or point.content_bytes != length:
                continue
            known = conversation.content
            if content.data.startswith(known if len(known) == length else known[:length]):
                return Known(conversation, point, slot)
        return None

    def keep(self, content: Content, conversation: Conversation, base: Known | None) -> None:
        """Remember a conversation whose newest point is the end of ``content``.

        It takes the place of ``base`` when that ended where this goes on; other branches stay beside it. Points before
        the newest count only where ``conversation`` has them, so a history that was rewritten leaves none behind.
        """
        messages, _, digest = next(content.places())
        key, point = (content.scope, messages, digest), conversation.points[-1]
        with self._lock:
            self._resumed, self._fresh = self._resumed + (base is not None), self._fresh + (base is None)
            slot = base.slot if base is not None and base.ends_there() else _Slot()
            for old in slot.keys[: max(len(slot.keys) + 1 - len(conversation.points), 0)]:
                self._drop(old, slot)
            slot.keys = [*slot.keys[max(len(slot.keys) + 1 - len(conversation.points), 0) :], key]
            self._points[key] = (slot, point)
            slot.conversation = conversation
            self._used_bytes -= slot.used_bytes
            slot.used_bytes = conversation.used_bytes()
            self._used_bytes += slot.used_bytes
            self._slots[slot] = None
            self._slots.move_to_end(slot)
            while self._used_bytes > self._limit_bytes:
                evicted, _ = self._slots.popitem(last=False)
                self._used_bytes -= evicted.used_bytes
                for old in evicted.keys:
                    self._drop(old, evicted)
                evicted.conversation, evicted.keys, evicted.used_bytes = None, [], 0

    def stats(self) -> ConversationStats:
        """Return the memo's counters."""
        with self._lock:
            return ConversationStats(len(self._slots), self._used_bytes, self._resumed, self._fresh)

    def _drop(self, key: _PointKey, slot: _Slot) -> None:
        owner, _ = self._points.get(key, (None, None))
        if owner is slot:  # another branch may have the same beginning
            del self._points[key]


def _header_bytes(items: int) -> int:
    """Return how long MessagePack's head of an array is; the items stand behind it one after the other."""
    return 1 if items < 16 else 3 if items < 1 << 16 else 5
