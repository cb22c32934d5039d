"""An engine's KV event sockets: the live stream (SUB) and the replay of what was missed (DEALER), over ZMQ.

Frames are ``[…, sequence: 8 bytes big-endian, payload]``; whatever stands before the last two (a topic, or nothing in
some versions' replays) is ignored. The replay socket takes ``[b"", first: 8 bytes]`` and answers each buffered batch,
then an end mark with sequence -1. Undecodable frames are handed on as such: only the index can tell what they cost.

Sources: vLLM and SGLang ``ZmqEventPublisher``; recorded exchanges are named in ``tests/captures``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from engine_adapter.turns import Turns
from engine_adapter.wire_events import WireError, decode_batch
from kvstore.event_wire import FLUSHED_TIERS
from kvstore.events import EventBatch
from kvstore.page import Tier

_END = b"\xff" * 8


@dataclass(frozen=True, slots=True)
class Undecodable:
    """A frame that could not be understood; what it said is lost. ``sequence``: its batch's number, if it has one."""

    error: str
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the publisher was made anew: batches may be missing, or it may be another process."""


Arrival = EventBatch | Undecodable | Reconnected


@dataclass(frozen=True, slots=True)
class Replay:
    """A publisher's answer: the ``batches`` that could be understood, in order, and the number of the ``last`` one that
    came, understood or not; ``None``: none came."""

    batches: list[EventBatch]
    last: int | None


@dataclass(frozen=True, slots=True)
class EventSocketOptions:
    """``cleared``: see ``EventSource``. ``queue_frames`` bounds what ZMQ keeps for us; ``replay_timeout_s`` is for the
    whole replay.

    A connection on which nothing came back for ``silence_s`` is made anew: where a machine or a path between is gone
    without a word, nobody else would notice. It is asked for a sign of life three times in that time.
    """

    topic: str = ""
    cleared: tuple[Tier, ...] = FLUSHED_TIERS
    queue_frames: int = 100_000
    replay_timeout_s: float = 10.0
    replay_batches: int = 20_000
    silence_s: float = 15.0


class EventSocket:
    """One publisher, as an asynchronous iterator of arrivals.

    Connecting never fails: an absent publisher is simply silent until it comes. Use it in ``async with``; leaving
    closes the sockets at once. Pass ``context`` to share ZMQ's I/O thread between sockets.
    """

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        *,
        options: EventSocketOptions = EventSocketOptions(),
        context: zmq.asyncio.Context | None = None,
    ) -> None:
        self.endpoint, self.replay_endpoint, self.options = endpoint, replay_endpoint, options
        self._context = context or zmq.asyncio.Context.instance()
        self._live: zmq.asyncio.Socket | None = None
        self._monitor: zmq.asyncio.Socket | None = None
        self._is_first_told = False

    async def __aenter__(self) -> EventSocket:
        live = self._live = self._context.socket(zmq.SUB)
        live.setsockopt(zmq.LINGER, 0)
        live.setsockopt(zmq.RCVHWM, self.options.queue_frames)
        live.setsockopt(zmq.RECONNECT_IVL_MAX, 2_000)
        silence_ms = round(1000 * self.options.silence_s)
        live.setsockopt(zmq.HEARTBEAT_IVL, silence_ms // 3)
        live.setsockopt(zmq.HEARTBEAT_TIMEOUT, silence_ms)
        live.setsockopt(zmq.HANDSHAKE_IVL, silence_ms)  # as long, until what is there has shown that it is a publisher
        live.setsockopt_string(zmq.SUBSCRIBE, self.options.topic)
        self._monitor = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        live.connect(self.endpoint)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.disable_monitor()
            self._live.close(0)
            self._live = self._monitor = None

    async def until_connected(self, limit_s: float) -> bool:
        """Wait for the first connection; from then on nothing is missed that is published.

        ``False`` when it takes longer: then it will be reported like a later one, since what is asked for in replay
        until then says nothing of what is published in between.
        """
        assert self._monitor is not None, "use the socket inside 'async with'"
        self._is_first_told = True
        try:
            async with asyncio.timeout(limit_s):
                parse_monitor_message(await self._monitor.recv_multipart())
        except TimeoutError:
            return False
        return True

    async def __aiter__(self) -> AsyncIterator[Arrival]:
        """Yield arrivals for ever. The first connection is reported only after ``until_connected``; later ones are."""
        assert self._live is not None, "use the socket inside 'async with'"
        assert self._monitor is not None
        live, monitor = self._live, self._monitor
        poller = zmq.asyncio.Poller()
        poller.register(live, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                parse_monitor_message(await monitor.recv_multipart())
                if self._is_first_told:
                    yield Reconnected()
                self._is_first_told = True
            if live in ready:
                yield _arrival(await live.recv_multipart(), self.options.cleared)

    async def replay(self, first: int) -> Replay | None:
        """Fetch the batches from number ``first`` on that the publisher still has.

        ``None`` if there is no replay socket, or it does not answer in time.
        """
        if self.replay_endpoint is None:
            return None
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(self.replay_endpoint)
        try:
            async with asyncio.timeout(self.options.replay_timeout_s):
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                return await self._read_replay(socket)
        except TimeoutError:
            return None
        finally:
            socket.close(0)

    async def _read_replay(self, socket: zmq.asyncio.Socket) -> Replay | None:
        batches: dict[int, EventBatch] = {}
        last: int | None = None
        turns = Turns()  # frames that are there already are received without a pause
        for _ in range(self.options.replay_batches + 1):
            frames = await socket.recv_multipart()
            if len(frames) >= 2 and frames[-2] == _END:
                return Replay([batches[number] for number in sorted(batches)], last)
            arrival = _arrival(frames, self.options.cleared)
            if isinstance(arrival, EventBatch):
                batches[arrival.sequence] = arrival
            if arrival.sequence is not None:
                last = arrival.sequence if last is None else max(last, arrival.sequence)
            await turns.give()
        return None


def _arrival(frames: Sequence[bytes], cleared: tuple[Tier, ...]) -> EventBatch | Undecodable:
    if len(frames) < 2 or len(frames[-2]) != 8:
        return Undecodable(f"{len(frames)} frames without a sequence number")
    sequence = int.from_bytes(frames[-2], "big")
    try:
        return decode_batch(sequence, frames[-1], cleared)
    except WireError as error:
        return Undecodable(str(error), sequence)
