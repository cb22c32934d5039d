"""Carries one stream from an engine to a client.

* Events go on whole, as soon as they are whole; several that came in one read go in one write.
* The client's pace is the upstream's: nothing is read while a write waits, so that at most one read and one event lie
  in between.
* When nothing went to the client for ``heartbeat_s``, a comment does; it is no token and no event.
* A stream ends as its protocol wants it. One that stops before its end is told to the caller, who lets another engine
  go on with it or ends it with an error event of that protocol; no finish reason is ever made up, and half an event is
  never shown.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from engine_adapter.errors import UpstreamBroken
from engine_adapter.http import UpstreamResponse
from gateway.errors import EngineGaveUp, GatewayError, OverTime, UpstreamTimeout, UpstreamUnusable
from gateway.protocols.base import AnswerReader
from gateway.protocols.half_pairs import PairJoiner
from gateway.protocols.mould import Mould
from gateway.protocols.sse import HEARTBEAT, EventCutter, EventTooLong, is_whole_event

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}
_DRAIN_S = 1.0
_LOOK_S = 1.0

Through = Callable[[bytes], Sequence[bytes]]
"""Turns an event of the engine that answers into those that the reader of this answer follows."""


class ClientGone(Exception):
    """The client left, or takes nothing any more."""


class Reply(Protocol):
    """The way back to one client. Every method raises ``ClientGone``, also for a client that takes nothing any more."""

    @property
    def is_started(self) -> bool:
        """Whether a status went out."""

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer whole."""

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a stream."""

    def write_soon(self, data: bytes) -> bool:
        """Send a piece if that needs no waiting: whether it was sent."""

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while the client is behind."""

    async def finish(self) -> None:
        """End a stream."""


@dataclass(frozen=True, slots=True)
class RelayOptions:
    """Times and sizes of one stream; see ``gateway.settings.serving.StreamSettings``."""

    heartbeat_s: float = 15.0
    first_byte_timeout_s: float = 600.0  # until the first output, however much else comes
    idle_timeout_s: float = 20.0
    call_timeout_s: float = 300.0  # the same where calls may come, while the engine answers probes
    total_timeout_s: float = math.inf  # of one attempt
    event_cap_bytes: int = 8 << 20


class StreamWriter:
    """Writes to a client whose stream has begun, and knows when it last did."""

    def __init__(self, reply: Reply, options: RelayOptions) -> None:
        self._reply, self._options = reply, options
        self._clock = asyncio.get_running_loop().time
        self._wrote_at = self._clock()
        self.last_words: Callable[[], bytes] | None = None  # what goes out after a whole stream's last event

    async def start(self, headers: Mapping[str, str]) -> None:
        """Begin, unless begun."""
        if not self._reply.is_started:
            await self._reply.start(200, {**STREAM_HEADERS, **headers})
            self._wrote_at = self._clock()

    @property
    def has_begun(self) -> bool:
        """Whether the stream has."""
        return self._reply.is_started

    def heartbeat_due_s(self) -> float:
        """Return the time until a heartbeat is due."""
        return max(self._wrote_at + self._options.heartbeat_s - self._clock(), 0.0)

    async def heartbeat(self) -> None:
        """Show the client that the stream lives."""
        await self.write(HEARTBEAT)

    def write_soon(self, data: bytes) -> bool:
        """Send, if that needs no waiting: whether it was sent. Raises ``ClientGone``."""
        is_sent = self._reply.write_soon(data)
        if is_sent:
            self._wrote_at = self._clock()
        return is_sent

    async def write(self, data: bytes) -> None:
        """Send. Raises ``ClientGone``."""
        if not self.write_soon(data):
            await self._reply.write(data)
            self._wrote_at = self._clock()

    async def end(self, last: bytes) -> None:
        """End the stream with these events."""
        await self.write(last)
        await self._reply.finish()

    async def finish(self) -> None:
        """End the stream."""
        if self.last_words is not None and (words := self.last_words()):
            await self.write(words)
        await self._reply.finish()


async def relay(
    response: UpstreamResponse,
    writer: StreamWriter,
    reader: AnswerReader,
    options: RelayOptions,
    on_output: Callable[[], None],
    on_done: Callable[[], None],
    *,
    through: Through | None = None,
    is_gone: Callable[[], bool] | None = None,
) -> GatewayError | None:
    """Carry the stream to its end; return what was wrong with the upstream, ``None`` for a whole answer.

    A client has got the end of a whole answer, and the whole events of any other. ``on_output`` is called at each event
    that brings output, before it is written; ``on_done`` once, before the end of a whole answer is. ``through`` stands
    between engine and reader. ``is_gone`` tells, while no output has come or a call may be held back, that nobody is
    there any more whom to wait for. Raises ``ClientGone``; does not close ``response``.
    """
    course = _Course(reader, options, on_output, on_done, through)
    with _Carrier(response, writer, course, options.total_timeout_s, is_gone) as carrier:
        while not course.is_over:
            try:
                data = await carrier.next()
            except TimeoutError:
                if carrier.is_over:
                    return OverTime(f"the engine took longer than {options.total_timeout_s:g} s")
                return UpstreamTimeout(f"the engine was silent for {carrier.waited_s:.3g} s")
            except UpstreamBroken:
                if reader.seen.is_answered and reader.seen.error is None:
                    break  # the answer is whole: only its end mark, and perhaps its usage, are lost
                return UpstreamUnusable("the engine's connection broke", code="stream_truncated")
            try:
                out = carrier.left() if data is None else course.take(data)
            except EventTooLong as error:
                return UpstreamUnusable(str(error), code="event_too_long")
            if out:
                await writer.write(out)
            course.shown()
            if course.has_stopped:
                break
    seen = reader.seen
    if seen.error_body is not None:
        return EngineGaveUp(seen.error_body, code=seen.error)
    if not reader.has_ended() and seen.error is None and not seen.is_answered:
        return UpstreamUnusable("the stream stopped before its end", code="stream_truncated")
    return await _end(response, writer, reader, on_done)


class _Course:
    """What became of a stream so far, and what a client gets of each read of it."""

    def __init__(
        self,
        reader: AnswerReader,
        options: RelayOptions,
        on_output: Callable[[], None],
        on_done: Callable[[], None],
        through: Through | None,
    ) -> None:
        self._reader, self._on_output, self._on_done, self._through = reader, on_output, on_done, through
        self._cutter, self._pairs = EventCutter(options.event_cap_bytes), PairJoiner()
        self._mould = Mould()  # of the last read, where that was one event with one text more
        self.may_call, self.has_output_come = reader.seen.may_call, False
        self.is_over = self._is_over()  # the last event was seen, or the engine gave up: nothing behind that counts
        self.has_stopped = False  # nothing more comes
        self._first_s = options.first_byte_timeout_s
        self._idle_s = max(options.idle_timeout_s, options.call_timeout_s) if self.may_call else options.idle_timeout_s

    @property
    def limit_s(self) -> float:
        """How long the next read may take."""
        return self._idle_s if self.has_output_come else self._first_s

    def take(self, data: bytes) -> bytes:
        """Return what a client gets of a read; ``b""`` is the end. Raises ``EventTooLong``."""
        if (like := self._mould.take(data)) is not None:  # nothing of the last read is left in cutter or joiner
            self._reader.seen.more(like[0])
            self._on_output()
            return like[1]
        self._mould.forget()
        self.has_stopped = not data
        events: Sequence[bytes] = self._pairs.join(self._cutter.feed(data) if data else _last(self._cutter.rest()))
        if self._through is not None:
            events = [event for raw in events for event in self._through(raw)]
        reader, seen, shown = self._reader, self._reader.seen, list[bytes]()
        texts, has_output = seen.texts, False
        for event in events:
            piece, has_output = reader.event(event)
            if has_output:
                self.has_output_come = True
                self._on_output()
            shown.append(piece)
            self.is_over = self._is_over()
            if self.is_over:
                break
        if reader.has_ended():
            self._on_done()
        elif has_output and seen.is_all and seen.texts == texts + 1 and events[0] is data and self._through is None:
            self._mould.learn(data, shown[0], seen.last_text)
        return shown[0] if len(shown) == 1 else b"".join(shown)

    def shown(self) -> None:
        """What was taken has gone to the client."""
        seen = self._reader.seen
        is_whole = self.is_over and seen.error_body is None
        seen.is_shown = is_whole or (seen.usage is not None and seen.is_answered)

    def _is_over(self) -> bool:
        return self._reader.has_ended() or self._reader.seen.error_body is not None


class _Carrier:
    """Reads, with heartbeats while it lasts, up to a limit; and carries on at once what comes while somebody waits.

    To wake a task for each read of a stream takes longer than all that is done with it. So a read is taken in the
    moment it comes, and goes to the client if that is not behind. Whatever needs waiting, an end or an error is left
    to ``next``, which is woken then. And there is one timer a stream, looked at when it fires: timeouts set anew at
    each read would cost more than the read.
    """

    def __init__(
        self,
        response: UpstreamResponse,
        writer: StreamWriter,
        course: _Course,
        total_s: float,
        is_gone: Callable[[], bool] | None,
    ) -> None:
        self._response, self._writer, self._course = response, writer, course
        self._loop = asyncio.get_running_loop()
        self._is_gone = is_gone
        self._from = self._loop.time()
        self._end = self._from + total_s
        self._until = self._fires_at = math.inf
        self._timer: asyncio.TimerHandle | None = None
        self._left: bytes | None = None  # of what was taken at once: what must be waited for
        self._failure: Exception | None = None  # that it met

    @property
    def is_over(self) -> bool:
        """Whether all the time that there was is over."""
        return self._loop.time() >= self._end

    @property
    def waited_s(self) -> float:
        """How long the read that runs, or the last one, took."""
        return self._loop.time() - self._from

    async def next(self) -> bytes | None:
        """Return the next read that was not taken at once; ``None`` where one was that needs ``left``. Raises
        ``TimeoutError`` at the limit, ``UpstreamBroken``, ``ClientGone``."""
        self._begin()
        while True:
            if self._timer is None:
                self._set_timer()
            try:
                return await self._response.read_some()
            except TimeoutError:
                if self._left is not None:
                    return None
                if self._loop.time() >= self._until or (self._is_gone is not None and self._is_gone()):
                    raise
                if not self._writer.heartbeat_due_s():
                    await self._writer.heartbeat()

    def left(self) -> bytes:
        """Return what the client must still get of what was taken at once. Raises whatever taking or sending it did."""
        if self._failure is not None:
            raise self._failure
        left, self._left = self._left, None
        return left or b""

    def _carry(self, data: bytes) -> None:
        """Take a read that ``next`` waits for, and send it on."""
        course, left = self._course, b""
        try:
            out = course.take(data)
            if out and not self._writer.write_soon(out):
                left = out
            else:
                course.shown()  # before whoever waits is woken: its client may leave at this word
                if not course.is_over:
                    self._begin()
                    return
        except Exception as error:  # any: it is for who waits, and not for the connection's parser that calls this
            self._failure = error
        self._left = left
        self._response.interrupt()

    def _begin(self) -> None:
        """The time of another read begins."""
        course = self._course
        if course.has_output_come and not course.may_call:
            self._is_gone = None  # from here on the idle limit is what counts
        self._from = self._loop.time()
        self._until = min(self._from + course.limit_s, self._end)
        if self._fires_at > self._until:
            self._set_timer()

    def _left_s(self) -> float:
        return max(min(self._until - self._loop.time(), self._writer.heartbeat_due_s()), 0.0)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left_s = self._left_s() if self._is_gone is None else min(self._left_s(), _LOOK_S)
        self._fires_at = self._loop.time() + left_s
        self._timer = self._loop.call_later(left_s, self._look_at_the_clock)

    def _look_at_the_clock(self) -> None:
        self._timer = None
        if self._left_s() and not (self._is_gone is not None and self._is_gone()):
            self._set_timer()
        else:
            self._response.interrupt()

    def __enter__(self) -> Self:
        self._response.carry(self._carry)
        return self

    def __exit__(self, *_: object) -> None:
        self._response.carry(None)
        if self._timer is not None:
            self._timer.cancel()


def _last(rest: bytes) -> list[bytes]:
    """Return the event at the very end of a stream whose blank line is missing, when it is whole all the same."""
    whole = rest.strip()
    if not is_whole_event(whole):
        return []
    return [rest if rest.endswith(b"\r\r") else whole + b"\n\n"]


async def _end(
    response: UpstreamResponse, writer: StreamWriter, reader: AnswerReader, on_done: Callable[[], None]
) -> GatewayError | None:
    seen = reader.seen
    if not reader.has_ended():
        on_done()
        await writer.write(reader.closing())
    await writer.finish()
    try:
        async with asyncio.timeout(_DRAIN_S):
            while await response.read_some():  # the connection can be used again once its end was read
                pass
    except (TimeoutError, UpstreamBroken):
        pass
    return None if seen.error is None else UpstreamUnusable("the engine sent an error", code=seen.error)
