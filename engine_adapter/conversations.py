"""Conversations: what is known of the prompts that longer ones begin with.

An agent sends its whole history at every step. The memo keeps, for each conversation seen, its final ids and *points*:
places where rendering and encoding can go on. Who has told already that a request begins as another did brings the
*anchors* that were left there. Without any a request is matched by content: the messages' serialization must begin with
the one remembered, byte for byte (a digest only says where to look), so one client never gets another's ids.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import xxhash
from msgspec.structs import replace

from engine_adapter.echoes import Past
from engine_adapter.ids import Hashes, HashKey, Ids, JoinedIds
from engine_adapter.resumption import LoopState

MAX_POINTS = 32
"""Places in one conversation from which a later request can go on; the oldest is forgotten first."""

_LOOK_BACK = 512
"""How many messages may be new, as far as anything known is looked for."""

_MAX_ALIKE = 64
"""How many conversations with equal counts, lengths and last messages are told apart; they are compared in full."""

_NEAR = 8  # messages that one request adds, or fewer, mostly
_POINT_BYTES = 600
_MESSAGE_BYTES = 700  # a dictionary with three members and what a list of text parts adds, measured
_MAX_ANCHORS = 4  # at one place: a conversation is seldom rendered in more ways
_SLACK = 8  # a growing conversation's ids have room for an eighth more
_BUFFER_BYTES = 4 << 20
NOT_SERIALIZABLE = (UnicodeEncodeError, OverflowError, TypeError, RecursionError)
_PointKey: TypeAlias = tuple[bytes, int, int, int]  # scope, messages, their bytes, digest of the last
_encoder = msgspec.msgpack.Encoder()
_of_thread = threading.local()


class Point(msgspec.Struct, frozen=True):
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


class Conversation(msgspec.Struct, frozen=True):
    """A conversation up to its newest point. Immutable."""

    messages: Sequence[Mapping[str, object]]
    """As the template saw them."""
    tools: Sequence[Mapping[str, object]] | None
    variables: Mapping[str, object]
    guard: str
    cut: str
    points: tuple[Point, ...]
    hashes: Mapping[HashKey, Hashes]
    ids: Ids = msgspec.field(default_factory=lambda: np.empty(0, np.uint32))
    """The ids before the newest seal; the memo sets them."""


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


class _Slot:
    """The place of one conversation while it grows; only the memo changes it, under its lock."""

    __slots__ = ("content", "conversation", "ids", "keys", "used_bytes")

    def __init__(self) -> None:
        self.conversation: Conversation | None = None
        self.content = bytearray()  # empty where the conversation is found by anchors only
        self.ids: Ids = np.empty(0, np.uint32)  # with room to grow: what is written once is never changed
        self.keys: list[_PointKey] = []  # one for each of the conversation's points
        self.used_bytes = 0

    def take(self, content: Content | None, conversation: Conversation, ids: JoinedIds) -> None:
        """Hold ``conversation`` with these ids; it goes on from the one held where it has points before its newest."""
        if content is not None:
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
        """Return about what this takes: text (serialized, as objects), ids, hashes, points."""
        assert self.conversation is not None
        points, hashes = self.conversation.points, self.conversation.hashes.values()
        last = points[-1]
        texts = len(self.content) + last.content_bytes + _MESSAGE_BYTES * last.messages + 2 * len(last.state.head)
        return texts + self.ids.nbytes + sum(chain.nbytes for chain in hashes) + _POINT_BYTES * len(points)


class Known(msgspec.Struct, frozen=True):
    """A conversation with which a request begins, and the point to go on from."""

    conversation: Conversation
    point: Point
    slot: _Slot

    def ends_there(self) -> bool:
        """Whether the point is the conversation's newest, and the conversation still the newest of its kind."""
        return self.slot.conversation is self.conversation and self.point is self.conversation.points[-1]


class Anchor(msgspec.Struct, frozen=True):
    """What a conversation leaves at the end of a message, for those who know the place again."""

    slot: _Slot
    point: Point


Anchors: TypeAlias = Sequence[MutableMapping[bytes, Anchor]]
"""The ends of a request's messages, in order: what was left there, by scope."""


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

    def find_anchor(self, anchors: Anchors, scope: bytes) -> Known | None:
        """Return the longest conversation whose anchor lies at one of these places, the last of which is the newest."""
        for place in range(len(anchors) - 1, max(len(anchors) - _LOOK_BACK, 0) - 1, -1):
            anchor = anchors[place].get(scope)
            if anchor is not None and (known := self._held(anchor)) is not None:
                return known
        return None

    def goes_on(self, anchors: Anchors) -> bool:
        """Tell whether one of the last places has an anchor of a conversation held here, in whatever scope."""
        last = anchors[-_NEAR:]
        return any(self._held(anchor) is not None for place in last for anchor in list(place.values()))

    def _held(self, anchor: Anchor) -> Known | None:
        with self._lock:
            conversation = anchor.slot.conversation
            if conversation is None or anchor.slot not in self._slots:
                return None
            if not any(point is anchor.point for point in reversed(conversation.points)):
                return None
            self._slots.move_to_end(anchor.slot)
            return Known(conversation, anchor.point, anchor.slot)

    def keep(
        self,
        scope: bytes,
        content: Content | None,
        conversation: Conversation,
        ids: JoinedIds,
        base: Known | None,
        anchors: Anchors | None = None,
    ) -> Known | None:
        """Remember a conversation with its final ids; its newest point is the end of ``content``, or the last anchor.

        It takes the place of ``base`` when that ended where this goes on; other branches stay beside it. Points before
        the newest count only where ``conversation`` has them, so a history that was rewritten leaves none behind.
        """
        point = conversation.points[-1]
        with self._lock:
            self._resumed, self._fresh = self._resumed + (base is not None), self._fresh + (base is None)
            slot = base.slot if base is not None and base.ends_there() else _Slot()
            if content is not None and not content.fills(slot.content):
                return None  # someone else went on from there meanwhile, and this is only the end of a conversation
            if content is not None:
                self._point(slot, (scope, *content.end()), conversation)
            slot.take(content, conversation, ids)
            self._used_bytes -= slot.used_bytes
            slot.used_bytes = slot.measure()
            self._used_bytes += slot.used_bytes
            self._slots[slot] = None
            self._slots.move_to_end(slot)
            self._shrink()
        if anchors is not None:
            place = anchors[point.messages - 1]
            place.pop(scope, None)
            place[scope] = Anchor(slot, point)
            while len(place) > _MAX_ANCHORS:
                place.pop(next(iter(place)), None)
        return None if slot.conversation is None else Known(slot.conversation, point, slot)

    def _point(self, slot: _Slot, key: _PointKey, conversation: Conversation) -> None:
        """Let the newest point be found by content."""
        superfluous = max(len(slot.keys) + 1 - len(conversation.points), 0)
        for old in slot.keys[:superfluous]:
            self._drop(old, slot)
        slot.keys = [*slot.keys[superfluous:], key]
        alike = self._points.setdefault(key, [])
        alike.append((slot, conversation.points[-1]))
        del alike[:-_MAX_ALIKE]

    def _shrink(self) -> None:
        while self._used_bytes > self._limit_bytes:
            evicted, _ = self._slots.popitem(last=False)
            self._used_bytes -= evicted.used_bytes
            for old in evicted.keys:
                self._drop(old, evicted)
            evicted.conversation, evicted.keys, evicted.used_bytes = None, [], 0
            evicted.content, evicted.ids = bytearray(), np.empty(0, np.uint32)  # anchors may hold the slot still

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
