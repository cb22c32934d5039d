"""A scripted engine with a real event publisher, for tests of what the gateway makes of events."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.block import content_hashes, event_hash
from kvstore.events import BlocksStored
from kvstore.page import Tier
from kvstore.publisher import EventPublisher, PublisherOptions
from tests.scripted_engine import Json, ScriptedEngine

BLOCK = 16


class PublishingEngine:
    """Says in ``/server_info`` where its events are, and publishes what a test says that it holds."""

    def __init__(self, engine: ScriptedEngine, pool: str | None = None, *, replay_batches: int = 10_000) -> None:
        self._replay_batches, self._pool = replay_batches, pool
        self.engine = engine
        self.publisher = EventPublisher(PublisherOptions(replay_batches=replay_batches))
        self.tell()

    def tell(self) -> None:
        """Say in ``/server_info`` where events are."""
        events: Json = {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": self.publisher.port,
            "replay_endpoint_port_base": self.publisher.replay_port,
            "topic": self.publisher.topic,
            "block_size": BLOCK,
            "dp_size": 1,
        }
        self.engine.info = {"kv_events": events, "keepwarm": {"pool_id": self._pool}}

    def holds(
        self, tokens: Sequence[int], tier: Tier = Tier.DEVICE, salt: str | None = None, adapter: str | None = None
    ) -> tuple[int, ...]:
        """Publish that these tokens' blocks are stored; returns the engine's names of them."""
        names = tuple(event_hash(digest) for digest in content_hashes(tokens, BLOCK, salt=salt))
        whole = tuple(tokens[: len(names) * BLOCK])
        self.publisher.publish([BlocksStored(names, None, whole, BLOCK, tier, salt=salt, adapter=adapter)])
        return names

    def lives_anew(self) -> None:
        """Be another process: other sockets, nothing held."""
        self.publisher.close()
        self.publisher = EventPublisher(PublisherOptions(replay_batches=self._replay_batches))
        self.tell()

    def restarts_in_place(self) -> None:
        """Be another process on the same sockets."""
        port, replay = self.publisher.port, self.publisher.replay_port
        self.publisher.close()
        self.publisher = EventPublisher(
            PublisherOptions(port=port, replay_port=replay, replay_batches=self._replay_batches)
        )
