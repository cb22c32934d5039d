"""Conversations: what is known of the prompts that longer ones begin with.

An agent sends its whole history at every step. The memo keeps, for each conversation seen, its final ids and *points*:
places where rendering and encoding can go on. A request is matched by content: the messages' serialization must begin
with the one remembered, byte for byte (a digest only says where to look), so one client never gets another's ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias

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

_LOOK_BACK = 512
"""How many messages may be new, as far as anything known is looked for."""

_MAX_ALIKE = 64
"""How many conversations with equal counts, lengths and last messages are told apart; they are compared in full."""

_POINT_BYTES = 600
_MESSAGE_BYTES = 700  # a dictionary with three members and what a list of text parts adds, measured
_SLACK = 8  # a growing conversation's ids have room for an eighth more
_BUFFER_BYTES = 4 << 20
_PointKey: TypeAlias = tuple[bytes, int, int, int]  # scope, messages, their bytes, digest of the last
_encoder = msgspec.msgpack.Encoder()
_of_thread = threading.local()


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

    messages: Sequence[Mapping[str, object]]
    """As the template saw them."""
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    guard: str
    cut: str
    has_markers: bool
    ids: Ids
    points: tuple[Point, ...]
    hashes: Mapping[HashKey, Hashes]


class Place(NamedTuple):
    """The end of a message in a content: how many messages and bytes end there, and a digest of that message."""

    messages: int
    length: int
    digest: int


class Content:
    """A request's messages as bytes, under a digest of what else its prompt depends on.

    The bytes stand in a buffer of this thread, so a content is good until the thread makes the next one.
    """

    def __init__(self, scope: bytes, buffer: bytearray, start: int, messages: Sequence[Mapping[str, object]]) -> None:
        self.scope, self.buffer, self.start = scope, buffer, start
        self.length = len(buffer) - start
        self.messages = messages

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, object]], scope: object) -> Content | None:
        """Return the content; ``None`` where there is no exact serialization (a lone surrogate, a huge number)."""
        buffer = _buffer()
        try:
            _encoder.encode_into(messages, buffer)
            return cls(sha256(_encoder.encode(scope)).digest(), buffer, _header_bytes(len(messages)), messages)
        except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
            return None

    def starts_with(self, known: bytearray, length: int) -> bool:
        """Tell whether the content begins with so many bytes of ``known``. At memory's speed."""
        with memoryview(known) as whole, whole[:length] as beginning:
            return self.buffer.startswith(beginning, self.start)

    def behind(self, length: int) -> bytes:
        """Return the bytes behind the first ``length``."""
        return bytes(memoryview(self.buffer)[self.start + length :])

    def places(self) -> Iterator[Place]:
        """Yield the ends of the newest messages, the newest first. About 1 µs a message."""
        length = self.length
        for number in range(len(self.messages), max(len(self.messages) - _LOOK_BACK, 0), -1):
            last = _encoder.encode(self.messages[number - 1])
            yield Place(number, length, xxhash.xxh3_64_intdigest(last))
            length -= len(last)


class _Slot:
    """The place of one conversation while it grows; only the memo changes it, under its lock."""

    __slots__ = ("content", "conversation", "ids", "keys", "used_bytes")

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.content = bytearray()
        self.ids: Ids = np.empty(0, np.uint32)  # with room to grow: what is written once is never changed
        self.keys: list[_PointKey] = []  # one for each of the conversation's points
        self.used_bytes = 0

    def take(self, content: Content, conversation: Conversation) -> None:
        """Hold ``conversation``, which goes on from the one held where it has points before its newest."""
        self.content += content.behind(len(self.content))
        count = len(conversation.ids)
        kept_ids = len(self.conversation.ids) if self.conversation is not None and len(conversation.points) > 1 else 0
        if not kept_ids or count > len(self.ids):
            self.ids, kept_ids = np.empty(count + count // _SLACK + 256, np.uint32), 0
        self.ids[kept_ids:count] = conversation.ids[kept_ids:]
        ids = self.ids[:count]
        ids.flags.writeable = False
        self.conversation = replace(conversation, ids=ids)

    def measure(self) -> int:
        """Return about what this takes: text twice (serialized, and as objects), ids, hashes, points."""
        assert self.conversation is not None
        points, hashes = self.conversation.points, self.conversation.hashes.values()
        texts = 2 * len(self.content) + _MESSAGE_BYTES * points[-1].messages + 2 * len(points[-1].state.head)
        return texts + self.ids.nbytes + sum(chain.nbytes for chain in hashes) + _POINT_BYTES * len(points)


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
        self._points: dict[_PointKey, list[tuple[_Slot, Point]]] = {}
        self._resumed = self._fresh = 0
        self._lock = threading.Lock()

    def find(self, content: Content) -> Known | None:
        """Return the longest conversation known with which ``content`` begins, compared byte for byte."""
        for place in content.places():
            with self._lock:
                for slot, point in reversed(self._points.get((content.scope, *place), ())):
                    if slot.conversation is not None and content.starts_with(slot.content, place.length):
                        self._slots.move_to_end(slot)
                        return Known(slot.conversation, point, slot)
        return None

    def keep(self, content: Content, conversation: Conversation, base: Known | None) -> None:
        """Remember a conversation whose newest point is the end of ``content``.

        It takes the place of ``base`` when that ended where this goes on; other branches stay beside it. Points before
        the newest count only where ``conversation`` has them, so a history that was rewritten leaves none behind.
        """
        key, point = (content.scope, *next(content.places())), conversation.points[-1]
        with self._lock:
            self._resumed, self._fresh = self._resumed + (base is not None), self._fresh + (base is None)
            slot = base.slot if base is not None and base.ends_there() else _Slot()
            superfluous = max(len(slot.keys) + 1 - len(conversation.points), 0)
            for old in slot.keys[:superfluous]:
                self._drop(old, slot)
            slot.keys = [*slot.keys[superfluous:], key]
            alike = self._points.setdefault(key, [])
            alike.append((slot, point))
            del alike[:-_MAX_ALIKE]
            slot.take(content, conversation)
            self._used_bytes -= slot.used_bytes
            slot.used_bytes = slot.measure()
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
        left = [found for found in self._points.get(key, ()) if found[0] is not slot]
        if left:
            self._points[key] = left
        else:
            self._points.pop(key, None)


def _buffer() -> bytearray:
    """Return this thread's buffer: to fill fresh memory for each request takes twice as long. Long ones are let go."""
    buffer: bytearray | None = getattr(_of_thread, "buffer", None)
    if buffer is None or len(buffer) > _BUFFER_BYTES:
        buffer = _of_thread.buffer = bytearray()
    return buffer


def _header_bytes(items: int) -> int:
    """Return how long MessagePack's head of an array is; the items stand behind it one after the other."""
    return 1 if items < 16 else 3 if items < 1 << 16 else 5
