"""Events that are like the one before but for its text: nearly all of a stream are, and they need no parser.

The bytes around a text are kept. An event that begins and ends with them, and has between them the inside of one JSON
string, is the same JSON with another text there, whatever else it says.
"""

from __future__ import annotations

import msgspec

Around = tuple[bytes, bytes]
"""What stands before and behind a text, with its quotes."""

_string = msgspec.json.Decoder(str).decode


class Mould:
    """The shape of the last event of a stream, and of what was shown of it, where that is known."""

    __slots__ = ("_shape",)

    def __init__(self) -> None:
        self._shape: tuple[Around, Around] | None = None

    def learn(self, event: bytes, shown: bytes, text: str) -> None:
        """Keep the shape of an event of whose JSON's strings ``text`` is one, where it is certain which one.

        ``shown``: what clients get of it, with all of its strings as they stand in it, but for some that do not depend
        on the text.
        """
        literal = b'"%b"' % text.encode()
        around = _around(event, literal)
        around_shown = around if shown is event else _around(shown, literal)
        self._shape = None if around is None or around_shown is None else (around, around_shown)

    def forget(self) -> None:
        """Know no shape."""
        self._shape = None

    def take(self, event: bytes) -> tuple[str, bytes] | None:
        """Return the text of an event of the shape, and what is shown of it; ``None`` of any other."""
        if self._shape is None:
            return None
        around, shown = self._shape
        before, behind = around
        if not (event.startswith(before) and event.endswith(behind)):
            return None
        literal = event[len(before) - 1 : len(event) - len(behind) + 1]
        try:
            text = _string(literal)
        except msgspec.DecodeError:
            return None
        if not text:
            return None
        return text, event if shown is around else shown[0] + literal[1:-1] + shown[1]


def _around(event: bytes, literal: bytes) -> Around | None:
    """Return what stands around a text whose literal this is, where it is certain.

    Without a backslash each string stands as it is: where one has this text, there is the literal. So if that is found
    once, there is the string.
    """
    at, end = event.find(literal), event.rfind(literal) + len(literal)
    if len(literal) == 2 or at < 0 or end - at != len(literal) or event.find(b"\\") >= 0:
        return None
    return event[: at + 1], event[end - 1 :]
