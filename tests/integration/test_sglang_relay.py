"""The relay between an engine's events and the gateway: real sockets, a publisher in the engine's place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import zmq

from engine_adapter.wire_events import decode_batch
from kvstore.block import content_hashes, event_hash, routing_hash_array, routing_seed
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, TierCleared
from kvstore.page import Tier
from kvstore.plugins.sglang.blocks import storage_root
from kvstore.plugins.sglang.engine import EngineEvents, EngineFacts
from kvstore.plugins.sglang.relay import EventRelay, relay_for
from kvstore.publisher import EventPublisher, PublisherOptions
from kvstore.tiers.pool_server import PoolServer
from radix_index.index import RadixIndex
from radix_index.source import SourceFold
from tests.samples.ports import two_free_ports
from tests.samples.sglang_host import FACTS, Engine
from tests.samples.waiting import until

TOKENS = list(range(100, 164))
SALT = "tenant"
PATIENCE_S = 30.0


def replay(port: int) -> list[EventBatch]:
    """Ask for everything that was published."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as asker:
        asker.linger, asker.rcvtimeo = 0, int(PATIENCE_S * 1000)
        asker.connect(f"tcp://127.0.0.1:{port}")
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        batches = []
        while (frames := asker.recv_multipart())[-2] != b"\xff" * 8:
            batches.append(decode_batch(int.from_bytes(frames[-2], "big"), frames[-1]))
        return batches


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    """In the engine's place."""
    publisher = EventPublisher(PublisherOptions())
    yield publisher
    publisher.close()


def events_of(publisher: EventPublisher, *, replays: bool = True) -> EngineEvents:
    replay_endpoint = f"tcp://127.0.0.1:{publisher.replay_port}" if replays else None
    return EngineEvents(f"tcp://127.0.0.1:{publisher.port}", replay_endpoint, publisher.topic)


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=32 << 20) as started:
        yield started


@pytest.fixture
def relays() -> Iterator[list[EventRelay]]:
    made: list[EventRelay] = []
    yield made
    for relay in made:
        relay.close()


def relay_of(publisher: EventPublisher, relays: list[EventRelay], *, replays: bool = True) -> EventRelay:
    relay = EventRelay(events_of(publisher, replays=replays), PublisherOptions())
    relays.append(relay)
    return relay


def stored(tokens: list[int], tier: Tier = Tier.DEVICE) -> BlocksStored:
    names = tuple(event_hash(digest) for digest in content_hashes(tokens, 16, salt=SALT))
    return BlocksStored(names, None, tuple(tokens), 16, tier, salt=SALT)


def connected(publisher: EventPublisher, relay: EventRelay) -> None:
    """Publish until the relay hears of it: subscribing takes a moment, and replays make good for what came before."""

    def heard() -> bool:
        publisher.publish([TierCleared((Tier.HOST,))])
        assert relay.publisher is not None
        return relay.publisher.sequence > 1

    until(heard)


def test_engine_and_tiers_speak_in_one_order(publisher: EventPublisher, relays: list[EventRelay]) -> None:
    relay = relay_of(publisher, relays)
    connected(publisher, relay)
    publisher.publish([stored(TOKENS)])
    key = content_hashes(TOKENS, 16, parent=storage_root(SALT))[0]
    until(lambda: relay.book.lookup([key]) != [None])
    relay.publish([BlocksRemoved((7,), Tier.DISK)])
    assert relay.publisher is not None
    until(
        lambda: bool(relay.publisher) and isinstance(replay(relay.publisher.replay_port)[-1].events[0], BlocksRemoved)
    )
    batches = replay(relay.publisher.replay_port)
    assert [batch.sequence for batch in batches] == list(range(len(batches)))
    assert batches[0].events == (TierCleared((Tier.DEVICE, Tier.HOST)), TierCleared((Tier.DISK,)))
    kinds = [type(batch.events[0]).__name__ for batch in batches]
    assert kinds.index("BlocksStored") < kinds.index("BlocksRemoved")


def test_what_was_published_before_the_relay_came_is_replayed(
    publisher: EventPublisher, relays: list[EventRelay]
) -> None:
    publisher.publish([stored(TOKENS)])
    relay = relay_of(publisher, relays)
    connected(publisher, relay)
    key = content_hashes(TOKENS, 16, parent=storage_root(SALT))[-1]
    until(lambda: relay.book.lookup([key]) != [None])
    assert relay.lost_batches == 0


def test_what_cannot_be_replayed_shows_as_a_gap(publisher: EventPublisher, relays: list[EventRelay]) -> None:
    for _ in range(3):
        publisher.publish([stored(TOKENS)])
    relay = relay_of(publisher, relays, replays=False)
    connected(publisher, relay)
    assert relay.publisher is not None
    assert relay.lost_batches >= 3
    sequences = [batch.sequence for batch in replay(relay.publisher.replay_port)]
    assert not set(range(1, 1 + relay.lost_batches)) & set(sequences)


def folded(port: int) -> tuple[RadixIndex, SourceFold]:
    """Return an index that was told everything that a relay has published."""
    index = RadixIndex()
    fold = SourceFold(index, "a", model="m", block_size=16, pool="p")
    for batch in replay(port):
        fold.apply(batch)
    return index, fold


def blocks_by_tier(index: RadixIndex, salt: str | None) -> tuple[int, int, int, int]:
    hashes = routing_hash_array(TOKENS, 16, routing_seed("m", None, salt))
    return index.match(hashes, ["a"])["a"].tier_blocks


@pytest.mark.parametrize("salt", [None, SALT])
def test_the_index_learns_of_disk_and_pool_in_this_life_and_the_next(
    tmp_path: Path, publisher: EventPublisher, relays: list[EventRelay], server: PoolServer, salt: str | None
) -> None:
    names = tuple(event_hash(digest) for digest in content_hashes(TOKENS, 16, salt=salt))
    keys = [digest.hex() for digest in content_hashes(TOKENS, 16, parent=storage_root(salt))]
    tiers = {"disk": str(tmp_path), "disk_gb": 0.01, "pool": server.url, "pool_gb": 0.01, "namespace": str(salt)}

    def start(facts: EngineFacts) -> tuple[Engine, int]:
        port = two_free_ports()
        engine = Engine({**tiers, "events": f"tcp://127.0.0.1:{port}"}, facts=facts)
        publish = PublisherOptions(host="127.0.0.1", port=port, replay_port=port + 1)
        relays.append(relay_for(facts.events, publish))
        return engine, port + 1

    engine, told_at = start(replace(FACTS, events=events_of(publisher)))
    connected(publisher, relays[-1])
    publisher.publish([BlocksStored(names, None, tuple(TOKENS), 16, Tier.DEVICE, salt=salt)])
    engine.store(keys)
    publisher.publish([TierCleared((Tier.DEVICE, Tier.HOST))])
    until(lambda: blocks_by_tier(folded(told_at)[0], salt) == (0, 0, 4, 0))
    engine.backend.clear()
    until(lambda: blocks_by_tier(folded(told_at)[0], salt) == (0, 0, 0, 0))
    engine.store(keys)
    until(lambda: blocks_by_tier(folded(told_at)[0], salt) == (0, 0, 4, 0))
    engine.backend.close()
    until(lambda: blocks_by_tier(folded(told_at)[0], salt) == (0, 0, 0, 4))  # its disk is out of reach, the pool is not

    engine, told_at = start(FACTS)  # another life: no event of an engine tells of these blocks
    until(lambda: blocks_by_tier(folded(told_at)[0], salt) == (0, 0, 4, 0))
    _, fold = folded(told_at)
    assert not fold.orphans
    assert not fold.stats.ignored
    engine.backend.close()
