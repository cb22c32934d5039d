"""One numbered stream of events for the gateway: what the engine says of device and host, what we say of disk and pool.

SGLang's events know nothing below its host tier. This relay follows the engine's own publisher, hands every batch on as
it is, under a number of its own, and puts our tiers' changes between them: so the index has one source for an instance,
in one order, and a replay brings everything. On the way the batches tell which tokens a page is (``blocks``).

A relay belongs to the process, not to a backend: it goes on while the storage is detached at run time.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

import zmq

from kvstore.events import KvEvent, TierCleared
from kvstore.page import Tier
from kvstore.plugins.sglang.blocks import BlockBook
from kvstore.plugins.sglang.engine import EngineEvents
from kvstore.publisher import EventPublisher, PublisherOptions

log = logging.getLogger(__name__)

_END_OF_REPLAY = b"\xff" * 8
_REPLAY_MS = 2_000
_POLL_MS = 500
_QUEUE_FRAMES = 100_000


class EngineFollower:
    """Gives every batch of one engine, in order, to ``take``; ``lost`` is called where some are gone for good."""

    def __init__(self, events: EngineEvents) -> None:
        self._events = events
        self._expected = 0
        self._stopped = threading.Event()
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.rcvhwm = _QUEUE_FRAMES
        self._live.subscribe(events.topic)
        self._live.connect(events.endpoint)

    def stop(self) -> None:
        """Make ``run`` return soon."""
        self._stopped.set()

    def run(self, sink: EventRelay) -> None:
        """Follow until stopped. The engine may not be publishing yet."""
        try:
            while not self._stopped.is_set():
                if self._live.poll(_POLL_MS):
                    self._arrived(self._live.recv_multipart(), sink)
        finally:
            self._context.destroy(linger=0)

    def _arrived(self, frames: Sequence[bytes], sink: EventRelay) -> None:
        if len(frames) < 2 or len(frames[-2]) != 8:
            return
        number = int.from_bytes(frames[-2], "big")
        if number < self._expected:
            return  # a replay has brought it
        if number > self._expected:
            missed = self._replay(self._expected)
            for each in range(self._expected, number):
                payload = missed.get(each)
                if payload is None:
                    sink.lost()
                else:
                    sink.take(payload)
        sink.take(frames[-1])
        self._expected = number + 1

    def _replay(self, first: int) -> dict[int, bytes]:
        """Return the batches from ``first`` on that the engine still has, as far as they come in time."""
        if self._events.replay_endpoint is None:
            return {}
        found: dict[int, bytes] = {}
        with self._context.socket(zmq.DEALER) as asker:
            asker.linger = 0
            asker.connect(self._events.replay_endpoint)
            asker.send_multipart([b"", first.to_bytes(8, "big")])
            while asker.poll(_REPLAY_MS):
                frames = asker.recv_multipart()
                if len(frames) < 2 or frames[-2] == _END_OF_REPLAY:
                    break
                found[int.from_bytes(frames[-2], "big")] = frames[-1]
        return found


class EventRelay:
    """The stream of one engine process. Made once, by ``relay_for``."""

    def __init__(self, events: EngineEvents | None, publish: PublisherOptions | None) -> None:
        """Without ``events`` only our own changes are told, without ``publish`` nothing is; raises ``zmq.ZMQError``
        where an address is taken."""
        self.book = BlockBook()
        self.follows = events is not None
        self.lost_batches = 0
        self.publisher = None if publish is None else EventPublisher(publish)
        self.publish([TierCleared((Tier.DEVICE, Tier.HOST, Tier.DISK))])  # nothing of an earlier life is true any more
        self._follower = None if events is None else EngineFollower(events)
        if self._follower is not None:
            thread = threading.Thread(target=self._follower.run, args=(self,), name="keepwarm-events", daemon=True)
            thread.start()
            self._thread: threading.Thread | None = thread
        else:
            self._thread = None

    def take(self, payload: bytes) -> None:
        """One batch of the engine's."""
        self.book.learn(payload)
        if self.publisher is not None:
            self.publisher.forward(payload)

    def lost(self) -> None:
        """One batch of the engine's is gone for good."""
        self.lost_batches += 1
        if self.publisher is not None:
            self.publisher.skip()

    def publish(self, events: Sequence[KvEvent]) -> None:
        """Tell of our own tiers."""
        if self.publisher is not None:
            self.publisher.publish(events)

    def close(self) -> None:
        """End it with its process; a new one may take its addresses then."""
        if self._follower is not None and self._thread is not None:
            self._follower.stop()
            self._thread.join()
        if self.publisher is not None:
            self.publisher.close()


_relays: dict[tuple[EngineEvents | None, PublisherOptions | None], EventRelay] = {}
_lock = threading.Lock()


def relay_for(events: EngineEvents | None, publish: PublisherOptions | None) -> EventRelay:
    """Return this process's relay for these addresses, also to a backend that is attached anew."""
    with _lock:
        relay = _relays.get((events, publish))
        if relay is None:
            relay = _relays[events, publish] = EventRelay(events, publish)
        return relay
