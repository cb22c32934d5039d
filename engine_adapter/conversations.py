"""Conversations: what is known of the prompts that longer ones begin with.

An agent sends its whole history at every step. The memo keeps, for each conversation seen, its final ids and *points*:
places where rendering and encoding can go on. A request is matched by content: the messages' serialization must begin
with the one remembered, byte for byte (a digest only says where to look), so one client never gets another's ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash

from engine_adapter.echoes import Past
from engine_adapter.ids import Hashes, HashKey, Ids, JoinedIds
from engine_adapter.resumption import LoopState

MAX_POINTS = 32
"""Places in one conversation from which a later request can go on; the oldest is forgotten first."""

_LOOK_BACK = 512
"""How many messages may be new, as far as anything known is looked for."""

_MAX_ALIKE = 64
"""How many conversations with equal counts, lengths and last messages are told apart; they are compared in full."""

_POINT_BYTES = 600
_MESSAGE_BYTES = 700  # a dictionary with three members and what a list of text parts adds, measured
_WireKey: TypeAlias = tuple[bytes, int, int]  # scope, messages, digest of the array's beginning
_OPENING_BYTES = 256
_LOOK_BACK_ON_WIRE = 16
_SLACK = 8  # a growing conversation's ids have room for an eighth more
_BUFFER_BYTES = 4 << 20
NOT_SERIALIZABLE = (UnicodeEncodeError, OverflowError, TypeError, RecursionError)
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
    has_markers: bool
    """Something up to here spells a control token."""
    past: Past
    """What the ids hold of the answers up to here."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation up to its newest point. Immutable."""

    messages: Sequence[Mapping[str, object]]
    """As the template saw them."""
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    guard: str
    cut: str
    points: tuple[Point, ...]
    hashes: Mapping[HashKey, Hashes]
    ids: Ids = field(default_factory=lambda: np.empty(0, np.uint32))
    """The ids before the newest seal; the memo sets them."""


@dataclass(frozen=True, slots=True)
class Wire:
    """Where a body holds the messages' JSON array, from ``[`` at ``start`` to ``]`` before ``end``.

    The same text is the same messages, so a long conversation that grows is recognized without being serialized.
    """

    body: bytes
    start: int
    end: int

    def __post_init__(self) -> None:
        if self.body[self.start : self.start + 1] != b"[" or self.body[self.end - 1 : self.end] != b"]":
            raise ValueError("there is no JSON array at this place of the body")

    def opening(self) -> int:
        """Return a digest of the array's beginning, to look for arrays that begin alike."""
        return xxhash.xxh3_64_intdigest(self.body[self.start : min(self.start + _OPENING_BYTES, self.end)])

    def goes_on(self, known: bytearray) -> bool:
        """Tell whether the array begins with all the elements of ``known``, an array without its ``]``."""
        at = self.start + len(known)
        if at >= self.end or not self.body.startswith(known, self.start):
            return False
        while self.body[at] in b" \t\r\n":
            at += 1
        return self.body[at] in b",]"

    def elements_behind(self, length: int) -> bytes:
        """Return the array's text behind its first ``length`` bytes, without ``]``."""
        return self.body[self.start + length : self.end - 1].rstrip(b" \t\r\n")


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
    def of(cls, messages: Sequence[Mapping[str, object]], scope: bytes) -> Content | None:
        """Return the content; ``None`` where there is no exact serialization (a lone surrogate, a huge number)."""
        buffer = _buffer()
        try:
            _encoder.encode_into(messages, buffer)
        except NOT_SERIALIZABLE:
            return None
        return cls(scope, buffer, _header_bytes(len(messages)), messages)

    def fills(self, known: bytearray) -> bool:
        """Whether ``behind`` can go on from what is known."""
        return len(known) <= self.length

    def end(self) -> Place:
        """Return the content's own end."""
        return next(self.places())

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


class Growth:
    """What new messages add to the content of a conversation that the wire told."""

    def __init__(self, scope: bytes, known: Known, messages: Sequence[Mapping[str, object]]) -> None:
        """Serialize the messages behind ``known``. Raises what ``Content.of`` catches."""
        pieces = [_encoder.encode(message) for message in messages[known.point.messages :]]
        self.scope, self._known_length, self._new = scope, known.point.content_bytes, b"".join(pieces)
        self.length = self._known_length + len(self._new)
        self._end = Place(len(messages), self.length, xxhash.xxh3_64_intdigest(pieces[-1]) if pieces else 0)

    @classmethod
    def of(cls, scope: bytes, known: Known, messages: Sequence[Mapping[str, object]]) -> Growth | None:
        """Return the growth, ``None`` like ``Content.of``."""
        try:
            return cls(scope, known, messages)
        except NOT_SERIALIZABLE:
            return None

    def fills(self, known: bytearray) -> bool:
        """Whether ``behind`` can go on from what is known."""
        return len(known) == self._known_length

    def end(self) -> Place:
        """Return the content's own end."""
        return self._end

    def behind(self, length: int) -> bytes:
        """Return the bytes behind the first ``length``, which must be what was known."""
        assert length == self._known_length
        return self._new


class _Slot:
    """The place of one conversation while it grows; only the memo changes it, under its lock."""

    __slots__ = ("content", "conversation", "ids", "keys", "used_bytes", "wire", "wire_key")

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.content = bytearray()
        self.wire = bytearray()  # the messages' array as it was sent, without its end; empty where that is unknown
        self.wire_key: _WireKey | None = None
        self.ids: Ids = np.empty(0, np.uint32)  # with room to grow: what is written once is never changed
        self.keys: list[_PointKey] = []  # one for each of the conversation's points
        self.used_bytes = 0

    def take(self, content: Content | Growth, conversation: Conversation, ids: JoinedIds) -> None:
        """Hold ``conversation`` with these ids; it goes on from the one held where it has points before its newest."""
        self.content += content.behind(len(self.content))
        count, known = len(ids), len(ids.known)
        is_same = self.conversation is not None and len(conversation.points) > 1 and known == len(self.conversation.ids)
        if not is_same or count > len(self.ids):
            self.ids = np.empty(count + count // _SLACK + 256, np.uint32)
            self.ids[:known] = ids.known
        self.ids[known:count] = ids.new
        held = self.ids[:count]
        held.flags.writeable = False
        self.conversation = replace(conversation, ids=held)

    def measure(self) -> int:
        """Return about what this takes: text twice or thrice (serialized, as objects, as sent), ids, hashes, points."""
        assert self.conversation is not None
        points, hashes = self.conversation.points, self.conversation.hashes.values()
        texts = (
            2 * len(self.content)
            + len(self.wire)
            + _MESSAGE_BYTES * points[-1].messages
            + 2 * len(points[-1].state.head)
        )
        return texts + self.ids.nbytes + sum(chain.nbytes for chain in hashes) + _POINT_BYTES * len(points)


@dataclass(frozen=True, slots=True)
class Known:
    """A conversation with which a request begins, and the point to go on from."""

    conversation: Conversation
    point: Point
    slot: _Slot
    by_wire: bool = False

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
        self._wires: dict[_WireKey, list[_Slot]] = {}
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

    def find_wire(self, wire: Wire, scope: bytes, messages: int) -> Known | None:
        """Return a conversation that was sent in the same text up to one of the last few messages."""
        opening = wire.opening()
        for count in range(messages, max(messages - _LOOK_BACK_ON_WIRE, 0), -1):
            with self._lock:
                for slot in reversed(self._wires.get((scope, count, opening), ())):
                    if slot.conversation is not None and wire.goes_on(slot.wire):
                        self._slots.move_to_end(slot)
                        return Known(slot.conversation, slot.conversation.points[-1], slot, by_wire=True)
        return None

    def keep(
        self,
        content: Content | Growth,
        conversation: Conversation,
        ids: JoinedIds,
        base: Known | None,
        wire: Wire | None = None,
    ) -> None:
        """Remember a conversation whose newest point is the end of ``content``, with its final ids.

        It takes the place of ``base`` when that ended where this goes on; other branches stay beside it. Points before
        the newest count only where ``conversation`` has them, so a history that was rewritten leaves none behind.
        """
        key, point = (content.scope, *content.end()), conversation.points[-1]
        with self._lock:
            self._resumed, self._fresh = self._resumed + (base is not None), self._fresh + (base is None)
            grows = base is not None and base.ends_there()
            slot = base.slot if base is not None and grows else _Slot()
            if not content.fills(slot.content):
                return  # someone else went on from there meanwhile, and this is only the end of a conversation
            superfluous = max(len(slot.keys) + 1 - len(conversation.points), 0)
            for old in slot.keys[:superfluous]:
                self._drop(old, slot)
            slot.keys = [*slot.keys[superfluous:], key]
            alike = self._points.setdefault(key, [])
            alike.append((slot, point))
            del alike[:-_MAX_ALIKE]
            slot.take(content, conversation, ids)
            self._take_wire(slot, wire, content.scope, base if grows else None)
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
                self._take_wire(evicted, None, content.scope, None)
                evicted.conversation, evicted.keys, evicted.used_bytes = None, [], 0

    def stats(self) -> ConversationStats:
        """Return the memo's counters."""
        with self._lock:
            return ConversationStats(len(self._slots), self._used_bytes, self._resumed, self._fresh)

    def _take_wire(self, slot: _Slot, wire: Wire | None, scope: bytes, base: Known | None) -> None:
        """Remember how the conversation of ``slot`` was sent; nothing without ``wire``."""
        if slot.wire_key is not None:
            left = [other for other in self._wires.get(slot.wire_key, ()) if other is not slot]
            if left:
                self._wires[slot.wire_key] = left
            else:
                self._wires.pop(slot.wire_key, None)
            slot.wire_key = None
        if wire is None or slot.conversation is None:
            slot.wire = bytearray()
            return
        if base is None or not base.by_wire:
            slot.wire = bytearray()
        slot.wire += wire.elements_behind(len(slot.wire))
        slot.wire_key = (scope, slot.conversation.points[-1].messages, wire.opening())
        alike = self._wires.setdefault(slot.wire_key, [])
        alike.append(slot)
        del alike[:-_MAX_ALIKE]

    def _drop(self, key: _PointKey, slot: _Slot) -> None:
        left = [found for found in self._points.get(key, ()) if found[0] is not slot]
        if left:
            self._points[key] = left
        else:
            self._points.pop(key, None)


def scope_of(*parts: object) -> bytes | None:
    """Return a digest of what else a prompt depends on, beside its messages; ``None`` like ``Content.of``."""
    try:
        return sha256(_encoder.encode(parts)).digest()
    except NOT_SERIALIZABLE:
        return None


def _buffer() -> bytearray:
    """Return this thread's buffer: to fill fresh memory for each request takes twice as long. Long ones are let go."""
    buffer: bytearray | None = getattr(_of_thread, "buffer", None)
    if buffer is None or len(buffer) > _BUFFER_BYTES:
        buffer = _of_thread.buffer = bytearray()
    return buffer


def _header_bytes(items: int) -> int:
    """Return how long MessagePack's head of an array is; the items stand behind it one after the other."""
    return 1 if items < 16 else 3 if items < 1 << 16 else 5
