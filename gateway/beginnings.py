"""Beginnings of bodies: what was read of a conversation that grows is not read again.

An agent sends its whole history at every step, so all of a body but the last few messages is known, byte for byte. The
memo is a tree whose edges are the bytes of one array element each (the first edge holds all that stands before it too):
a body is followed along the edges, at the speed of hashing, to the last element that is known, and read from there on.
Each eighth node is also found from the eighth before it, by all bytes in between: so a long history takes few steps.
An element is told apart by its length and 128 bits of it; only objects count, which end where they end whatever
follows. One caller's beginnings are never another's: how fast a body is read tells nobody what others send.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import msgspec

from engine_adapter.conversations import Anchor, Anchors
from gateway.edges import Edges, Key
from gateway.protocols.base import Sent
from gateway.protocols.form import Form, Member, Opening
from tracing.messages import ChainLink, MessageChain, message_chain, new_tool_result_ids, tool_result_ids

LEAP = 8
"""So many elements are followed at once where they are known."""

MAX_ITEMS = 4096
"""Elements of one array that are remembered."""

_NODE_BYTES = 1300  # a node, its place among its siblings, the dictionary of a message
_BYTES_PER_BYTE = 3  # what a message's text takes as an object: its characters may take up to four


class Words(msgspec.Struct, frozen=True):
    """What a conversation says of the run that it belongs to."""

    chain: MessageChain
    result_ids: tuple[str, ...]
    new_result_ids: tuple[str, ...]
    """Of those that the request brings."""


class Beginning(msgspec.Struct, frozen=True):
    """What is known of a body: how it begins, and what the elements up to there say."""

    opening: Opening
    chain: MessageChain | None
    """``None``: the elements are not the conversation."""
    result_ids: tuple[str, ...]
    nodes: Sequence[_Node]

    @property
    def last(self) -> _Node:
        """The end of what is known."""
        return self.nodes[-1]


def words_of(messages: Sequence[Mapping[str, object]], known: Beginning | None = None) -> Words:
    """Return what ``messages`` say, which begin with what is known. O(what is new), and copying the known."""
    if known is None or known.chain is None:
        return Words(message_chain(messages), tool_result_ids(messages), new_tool_result_ids(messages))
    new = messages[len(known.chain) :]
    return Words(
        message_chain(new, known.chain),
        known.result_ids + tool_result_ids(new),
        new_tool_result_ids(messages),
    )


class _Node:
    """The end of an element."""

    __slots__ = (
        "anchors", "chars", "children", "depth", "head", "item", "key", "leap", "leaps", "length", "link", "parent",
        "result_ids",
    )  # fmt: skip

    def __init__(self, parent: _Node | None, key: Key | None, item: object, length: int, chars: int) -> None:
        self.parent, self.key, self.item, self.length, self.chars = parent, key, item, length, chars
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children = Edges[_Node]()
        self.leaps: Edges[_Node] | None = None  # to the nodes ``LEAP`` further on
        self.leap: Key | None = None  # the key under which this one stands in such a node's ``leaps``
        self.head: _Head | None = None  # of the first element's node
        self.link: ChainLink | None = None
        self.result_ids: tuple[str, ...] = ()
        self.anchors: dict[bytes, Anchor] = {}  # what encoding left here


@dataclass(frozen=True, slots=True)
class _Head:
    """What stands before the array."""

    object_start: int
    members: tuple[Member, ...]
    name: str
    key_start: int
    start: int


class BodyMemo:
    """Bodies' beginnings, by caller. For one event loop; within ``limit_bytes``, the least recent ends go first."""

    def __init__(self, limit_bytes: int = 128 << 20) -> None:
        self._limit_bytes, self.used_bytes = limit_bytes, 0
        self._roots: dict[object, _Node] = {}
        self._ends: OrderedDict[_Node, None] = OrderedDict()  # nodes without children

    def find(self, owner: object, body: bytes) -> Beginning | None:
        """Return the longest known beginning of a body. O(body) at the speed of hashing, and about 1 µs an element."""
        root = self._roots.get(owner)
        if root is None:
            return None
        node = root
        with memoryview(body) as view:
            while (ahead := _ahead(node, view)) is not None:
                node = ahead
        if node is root:
            return None
        if not len(node.children):
            self._ends.move_to_end(node)
        path = list[_Node]()
        while node is not root:
            path.append(node)
            assert node.parent is not None
            node = node.parent
        path.reverse()
        return _beginning(path)

    def keep(
        self, owner: object, sent: Sent, array: str, known: Beginning | None, words: Words | None
    ) -> Anchors | None:
        """Remember the elements of ``array`` that were read now, behind ``known``.

        ``words``: what the whole array says, where it is the conversation. Returns what was left at the end of each
        element, where all are remembered.
        """
        form, items = sent.form, sent.form.values.get(array)
        before = len(known.nodes) if known is not None else 0
        place = _place(form, array)
        if place is None or not isinstance(items, list) or before + len(form.ends) != len(items):
            return None
        if len(items) > MAX_ITEMS or (known is not None and not self._is_held(known.last)):
            return None
        nodes = list(known.nodes) if known is not None else []
        nodes += self._grown(nodes[-1] if nodes else self._root(owner), sent, items, place, known)
        if words is not None and len(words.chain) == len(items):
            for node, link in zip(nodes[before:], words.chain[before:], strict=False):
                if node.link is None:
                    node.link, node.result_ids = link, tool_result_ids((cast("Mapping[str, object]", node.item),))
        self._shrink()
        return [node.anchors for node in nodes] if len(nodes) == len(items) else None

    def _grown(
        self, node: _Node, sent: Sent, items: Sequence[object], place: int, known: Beginning | None
    ) -> list[_Node]:
        """Return the nodes of the elements behind ``node``, up to the first that is no object."""
        form, body, grown = sent.form, sent.body, list[_Node]()
        before = len(items) - len(form.ends)
        ends = _byte_ends(form, body, known.opening if known is not None else None)
        with memoryview(body) as view:
            for item, chars, end in zip(items[before:], form.ends, ends, strict=True):
                if type(item) is not dict:
                    break
                node = self._child(node, Key.of(view[node.length : end]), item, end, chars)
                grown.append(node)
                if not node.depth % LEAP and node.leap is None:
                    foot = _foot(node)
                    node.leap = Key.of(view[foot.length : node.length])
                    if foot.leaps is None:
                        foot.leaps = Edges()
                    foot.leaps.put(node.leap, node)
        if not before and grown:
            member = form.members[place]
            grown[0].head = _Head(form.start, form.members[:place], member.name, member.key_start, member.start)
        return grown

    def _child(self, parent: _Node, key: Key, item: object, length: int, chars: int) -> _Node:
        node = parent.children.get(key)
        if node is None:
            node = _Node(parent, key, item, length, chars)
            parent.children.put(key, node)
            self.used_bytes += _cost(node)
            self._ends.pop(parent, None)
            self._ends[node] = None
        return node

    def _root(self, owner: object) -> _Node:
        root = self._roots.get(owner)
        if root is None:
            root = self._roots[owner] = _Node(None, None, owner, 0, 0)
        return root

    def _is_held(self, node: _Node) -> bool:
        return node in self._ends or len(node.children) > 0

    def _shrink(self) -> None:
        while self.used_bytes > self._limit_bytes and self._ends:
            node, _ = self._ends.popitem(last=False)
            parent = node.parent
            assert parent is not None
            assert node.key is not None
            parent.children.remove(node.key)
            if node.leap is not None:
                leaps = _foot(node).leaps
                assert leaps is not None
                leaps.remove(node.leap)
            self.used_bytes -= _cost(node)
            if len(parent.children):
                continue
            if parent.parent is None:
                del self._roots[parent.item]
            else:
                self._ends[parent] = None
                self._ends.move_to_end(parent, last=False)


def _ahead(node: _Node, view: memoryview) -> _Node | None:
    """Return the next node on the way of a body, ``LEAP`` elements ahead where there is such a one."""
    ahead = node.leaps.ahead(view, node.length) if node.leaps is not None else None
    return ahead if ahead is not None else node.children.ahead(view, node.length)


def _foot(node: _Node) -> _Node:
    """Return the node from which a leap leads to this one."""
    for _ in range(LEAP):
        assert node.parent is not None
        node = node.parent
    return node


def _beginning(path: Sequence[_Node]) -> Beginning:
    head, last = path[0].head, path[-1]
    assert head is not None
    opening = Opening(
        head.object_start,
        head.members,
        head.name,
        head.key_start,
        head.start,
        [node.item for node in path],
        last.chars,
        last.length,
    )
    links = [node.link for node in path if node.link is not None]
    ids = tuple(found for node in path for found in node.result_ids)
    return Beginning(opening, tuple(links) if len(links) == len(path) else None, ids, path)


def _place(form: Form, array: str) -> int | None:
    """Return which member the array is, ``None`` where there is none or more than one."""
    places = [place for place, member in enumerate(form.members) if member.name == array]
    return places[0] if len(places) == 1 else None


def _byte_ends(form: Form, body: bytes, opening: Opening | None) -> Sequence[int]:
    """Return where in the body the elements end that were read now."""
    if body.isascii():
        return form.ends
    at_char, at = (opening.chars, opening.length) if opening is not None else (0, 0)
    text, first, ends = body[at:].decode(), at_char, list[int]()
    for end in form.ends:
        at += len(text[at_char - first : end - first].encode())
        at_char = end
        ends.append(at)
    return ends


def _cost(node: _Node) -> int:
    assert node.key is not None
    return _NODE_BYTES + _BYTES_PER_BYTE * node.key.length
