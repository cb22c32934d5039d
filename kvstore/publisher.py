"""KV events over ZeroMQ, in SGLang's current wire format, with replay.

Live: a PUB socket sends ``[topic, sequence (8 bytes, big-endian), payload]``. Replay: a ROUTER socket takes
``[b"", first sequence (8 bytes, big-endian)]`` and answers every remembered batch from there on as
``[b"", topic, sequence, payload]``, then ``[b"", b"", -1 (8 bytes), b""]``. The sequence starts at 0 in each life.

Both sockets live in one thread. ``publish`` only numbers a batch and wakes it; a batch that finds the queue full is
lost, but its number is used, so that every subscriber sees the gap.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq

from kvstore.event_wire import encode_sglang
from kvstore.events import EventBatch, KvEvent

DEFAULT_TOPIC = "kv-events"
_END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
_LINGER_MS = 200
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """Where to listen and how much to keep. A port of 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 0
    replay_port: int = 0
    topic: str = DEFAULT_TOPIC
    replay_batches: int = 10_000  # batches that a late subscriber can still ask for
    queued_batches: int = 100_000  # batches that wait to be sent; more are lost and show as a gap


class EventPublisher:
    """Publishes one engine's KV events. ``publish`` and its like are thread-safe and return at once."""

    def __init__(self, options: PublisherOptions = PublisherOptions()) -> None:
        """Bind both sockets and start the thread. Raises ``zmq.ZMQError`` where an address is taken."""
        self._options = options
        self._context = zmq.Context()
        try:
            self._events = self._bind(zmq.PUB, options.port, options.queued_batches)
            self._replay = self._bind(zmq.ROUTER, options.replay_port, options.replay_batches + 1)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self.port, self.replay_port = _bound_port(self._events), _bound_port(self._replay)
        self.topic = options.topic
        self._queue: deque[tuple[int, Callable[[int], bytes]]] = deque()
        self._remembered: deque[tuple[int, bytes]] = deque(maxlen=options.replay_batches)
        self._lock = threading.Lock()
        self._next_sequence = self._lost = 0
        self._closing = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def sequence(self) -> int:
        """How many batches were numbered so far."""
        return self._next_sequence

    @property
    def lost(self) -> int:
        """How many batches found the queue full."""
        return self._lost

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Send these events as one batch, after all that came before. No events, no batch."""
        if events:
            now_s = time.time()
            self._append(lambda sequence: encode_sglang(EventBatch(sequence, now_s, tuple(events))))

    def forward(self, payload: bytes) -> None:
        """Send a batch that an engine has encoded, under a number of ours."""
        self._append(lambda sequence: payload)

    def skip(self) -> None:
        """Use up a number: something is missing here that nobody can replay, and every subscriber must see it."""
        with self._lock:
            self._next_sequence += 1

    def _append(self, encode: Callable[[int], bytes]) -> None:
        with self._lock:
            if self._closing:
                return
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            if len(self._queue) >= self._options.queued_batches:
                self._lost += 1
                return
            self._queue.append((sequence, encode))
            first = len(self._queue) == 1
        if first:
            self._wake()

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._wake()
        self._thread.join()
        self._context.destroy(linger=_LINGER_MS)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _bind(self, kind: int, port: int, high_water_mark: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.sndhwm = high_water_mark
        socket.bind(f"tcp://{self._options.host}:{port or '*'}")
        return socket

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:  # a full pipe wakes the thread as well
            pass

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._replay, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._wake_read in ready:
                os.read(self._wake_read, 4096)
            self._send_queued()
            if self._replay in ready:
                self._answer_replay()
            if self._closing and not self._queue:
                return

    def _send_queued(self) -> None:
        while True:
            with self._lock:
                batches = list(self._queue)
                self._queue.clear()
            if not batches:
                return
            for sequence, encode in batches:
                payload = encode(sequence)
                self._remembered.append((sequence, payload))
                self._events.send_multipart([self.topic.encode(), sequence.to_bytes(8, "big"), payload])

    def _answer_replay(self) -> None:
        frames = self._replay.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            _log.warning("a malformed replay request of %d frames was ignored", len(frames))
            return
        client, first = frames[0], int.from_bytes(frames[2], "big")
        for sequence, payload in self._remembered:
            if sequence >= first:
                self._replay.send_multipart([client, b"", self.topic.encode(), sequence.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", b"", _END_OF_REPLAY, b""])


def _bound_port(socket: zmq.Socket[bytes]) -> int:
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    return int(endpoint.rpartition(":")[2])
