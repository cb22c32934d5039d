"""Server-sent events, cut where events end and never where a read ended."""

from __future__ import annotations

import re

from gateway.protocols.decode import json_object

_EVENT_END = re.compile(rb"(?:\r\n|\n|\r(?=[^\n]))(?:\r\n|\n|\r(?=[^\n]))")
"""A line's end and an empty line. A carriage return counts once the next byte shows that no line feed follows."""

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"  # which a stream may begin with

HEARTBEAT = b": keepwarm\n\n"


class EventTooLong(Exception):
    """One event is over the cap."""


class EventCutter:
    """Turns reads of any sizes into whole events, each with its own blank line. O(bytes) in all."""

    __slots__ = ("_buffer", "_cap_bytes", "_searched")

    def __init__(self, cap_bytes: int) -> None:
        self._buffer = bytearray()
        self._cap_bytes = cap_bytes
        self._searched = 0

    def feed(self, data: bytes) -> list[bytes]:
        """Return the events that are complete now. Raises ``EventTooLong``."""
        buffer = self._buffer
        is_plain = data.endswith(b"\n\n") and not data.endswith(b"\n\n\n") and b"\r" not in data
        if is_plain and not buffer:  # nearly every read of nearly every engine
            if data.find(b"\n\n") == len(data) - 2:
                return [data]
            return [event + b"\n\n" for event in data[:-2].split(b"\n\n")]
        events, start = list[bytes](), 0
        buffer += data
        at = max(self._searched - 4, 0)
        while found := _EVENT_END.search(buffer, at):
            events.append(bytes(buffer[start : found.end()]))
            start = at = found.end()
        del buffer[:start]
        self._searched = len(buffer)
        if len(buffer) > self._cap_bytes:
            raise EventTooLong(f"an event is longer than {self._cap_bytes} bytes")
        return events

    def rest(self) -> bytes:
        """Return what came after the last complete event."""
        return bytes(self._buffer)


def data_of(event: bytes) -> bytes | None:
    """Return the event's data, ``None`` when it has none (a comment)."""
    if event.startswith(b"data: ") and event.find(b"\n") == len(event) - 2 and b"\r" not in event:
        return event[6:-2]
    told = event.removeprefix(_BYTE_ORDER_MARK)
    lines = [line[5:].removeprefix(b" ") for line in told.splitlines() if line.startswith(b"data:")]
    if len(lines) == 1:
        return lines[0]
    return b"\n".join(lines) if lines else None


def with_data(event: bytes, data: bytes) -> bytes:
    """Return the event with other data, a JSON text or a mark, on one line; its other lines and its line ends stay."""
    mark = _BYTE_ORDER_MARK if event.startswith(_BYTE_ORDER_MARK) else b""
    data = b" ".join(data.splitlines())  # which only the space between values can have in JSON
    lines = event[len(mark) :].splitlines(keepends=True)
    out, is_placed = [mark], False
    for line in lines:
        if not line.startswith(b"data:"):
            out.append(line)
        elif not is_placed:
            is_placed = True
            out.append(b"data: " + data + line[len(line.rstrip(b"\r\n")) :])
    return b"".join(out)


def is_whole_event(event: bytes) -> bool:
    """Tell whether an event whose blank line is missing can only be whole: its data is an object's text or the end.

    That it ends with a brace says nothing: objects within it do, too.
    """
    data = data_of(event)
    return data is not None and (data.strip() == b"[DONE]" or json_object(data) is not None)


def named_event(name: str, data: bytes) -> bytes:
    """Return an event with a name."""
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def event_of(data: bytes) -> bytes:
    """Return a plain event."""
    return b"data: " + data + b"\n\n"
