"""Events that are like the one before but for its text: nearly all of a stream are, and they need no parser.

The bytes around a text are kept. An event that begins and ends with them, and has between them the inside of one JSON
string, is the same JSON with another text there, whatever else it says.
"""

from __future__ import annotations

import msgspec

_string = msgspec.json.Decoder(str).decode


class Mould:
    """The shape of the last event of a stream, where that is known."""

    __slots__ = ("_head", "_least", "_tail")

    def __init__(self) -> None:
        self._head = self._tail = b""
        self._least = 0  # bytes of an event of this shape, whose text is not empty; 0: no shape is known

    def learn(self, event: bytes, text: str) -> None:
        """Keep the shape of an event of whose JSON's strings ``text`` is one, where it is certain which one.

        Without a backslash in the event each of its strings stands there as it is. So there is a place for each string
        of this text where the text is found in quotes, and if it is found once, that is the place.
        """
        literal = b'"%b"' % text.encode()
        at = event.find(literal)
        if len(literal) > 2 and at == event.rfind(literal) and event.find(b"\\") < 0:
            self._head, self._tail = event[: at + 1], event[at + len(literal) - 1 :]
            self._least = len(self._head) + len(self._tail) + 1
        else:
            self._least = 0

    def forget(self) -> None:
        """Know no shape."""
        self._least = 0

    def text_of(self, event: bytes) -> str | None:
        """Return the text of an event of the shape, ``None`` of any other."""
        head, tail = self._head, self._tail
        if not self._least or len(event) < self._least or not (event.startswith(head) and event.endswith(tail)):
            return None
        try:
            return _string(event[len(head) - 1 : len(event) - len(tail) + 1])
        except msgspec.DecodeError:
            return None
