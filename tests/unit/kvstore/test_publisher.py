"""KV events on the wire: order, replay, bounds."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import zmq

from engine_adapter.wire_events import decode_batch
from kvstore import publisher as publisher_module
from kvstore.block import content_hashes, event_hash
from kvstore.events import BlocksRemoved, BlocksStored, EventBatch, TierCleared
from kvstore.page import Tier
from kvstore.publisher import EventPublisher, PublisherOptions

TOKENS = tuple(range(100, 132))
HASHES = tuple(event_hash(digest) for digest in content_hashes(TOKENS, 16, salt="s"))
STORED = BlocksStored(HASHES, None, TOKENS, 16, Tier.DISK, salt="s")
PATIENCE_MS = 20_000


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def publisher() -> Iterator[EventPublisher]:
    publisher = EventPublisher(PublisherOptions(replay_batches=5))
    yield publisher
    publisher.close()


def ask_replay(context: zmq.Context[zmq.Socket[bytes]], port: int, first: int) -> list[EventBatch]:
    socket = context.socket(zmq.DEALER)
    socket.rcvtimeo = PATIENCE_MS
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"", first.to_bytes(8, "big")])
    batches = []
    while True:
        empty, topic, sequence, payload = socket.recv_multipart()
        assert empty == b""
        if sequence == b"\xff" * 8:
            assert (topic, payload) == (b"", b"")
            socket.close(0)
            return batches
        assert topic == b"kv-events"
        batches.append(decode_batch(int.from_bytes(sequence, "big"), payload))


def test_a_subscriber_gets_every_event_in_order(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    socket = context.socket(zmq.SUB)
    socket.rcvtimeo = PATIENCE_MS
    socket.subscribe(b"kv-events")
    socket.connect(f"tcp://127.0.0.1:{publisher.port}")
    sent = 0
    while not socket.poll(50):  # until the subscription has arrived
        publisher.publish([TierCleared((Tier.DEVICE, Tier.HOST))])
        sent += 1
    publisher.publish([STORED, BlocksRemoved(HASHES[:1], Tier.POOL)])
    received = []
    while not received or received[-1].sequence < sent:
        topic, sequence, payload = socket.recv_multipart()
        assert topic == b"kv-events"
        received.append(decode_batch(int.from_bytes(sequence, "big"), payload))
    assert [batch.sequence for batch in received] == list(range(received[0].sequence, sent + 1))
    stored, removed = received[-1].events
    assert isinstance(stored, BlocksStored)
    assert (stored.tier, stored.salt, tuple(stored.token_ids)) == (Tier.DISK, "s", TOKENS)
    unsigned = [name % 2**64 for name in HASHES]
    assert [name % 2**64 for name in stored.hashes] == unsigned
    assert isinstance(removed, BlocksRemoved)
    assert (removed.tier, [name % 2**64 for name in removed.hashes]) == (Tier.POOL, unsigned[:1])


def test_replay_gives_what_is_remembered_from_any_place(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    for number in range(9):
        publisher.publish([BlocksRemoved((number,), Tier.HOST)])
    wait_sent(publisher, context, 9)
    assert [b.sequence for b in ask_replay(context, publisher.replay_port, 0)] == [4, 5, 6, 7, 8]
    assert [b.sequence for b in ask_replay(context, publisher.replay_port, 7)] == [7, 8]
    assert ask_replay(context, publisher.replay_port, 9) == []
    assert ask_replay(context, publisher.replay_port, 2**64 - 2) == []


def test_a_malformed_replay_request_harms_nobody(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher.publish([STORED])
    socket = context.socket(zmq.DEALER)
    socket.connect(f"tcp://127.0.0.1:{publisher.replay_port}")
    for frames in ([b""], [b"", b"short"], [b"x", bytes(8)], [b"", bytes(8), b"more"]):
        socket.send_multipart(frames)
    wait_sent(publisher, context, 1)
    assert [b.sequence for b in ask_replay(context, publisher.replay_port, 0)] == [0]


def test_batches_of_many_threads_are_numbered_without_gaps(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    publisher = EventPublisher()
    threads = [threading.Thread(target=lambda: [publisher.publish([STORED]) for _ in range(200)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wait_sent(publisher, context, 800)
    assert [b.sequence for b in ask_replay(context, publisher.replay_port, 0)] == list(range(800))
    publisher.close()


def test_what_the_queue_cannot_hold_shows_as_a_gap(
    context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, go_on = threading.Event(), threading.Event()
    encode = publisher_module.encode_sglang

    def slow(batch: EventBatch) -> bytes:
        reached.set()
        go_on.wait()
        return encode(batch)

    monkeypatch.setattr(publisher_module, "encode_sglang", slow)
    publisher = EventPublisher(PublisherOptions(queued_batches=2))
    publisher.publish([STORED])
    reached.wait()
    for _ in range(4):
        publisher.publish([STORED])
    assert (publisher.sequence, publisher.lost) == (5, 2)
    go_on.set()
    wait_sent(publisher, context, 3)
    sequences = [b.sequence for b in ask_replay(context, publisher.replay_port, 0)]
    assert sequences[:3] == [0, 1, 2]
    assert not {3, 4} & set(sequences)
    publisher.close()


def test_no_events_make_no_batch_and_closing_twice_is_closing_once() -> None:
    publisher = EventPublisher()
    publisher.publish([])
    assert publisher.sequence == 0
    publisher.close()
    publisher.close()
    publisher.publish([STORED])
    assert publisher.sequence == 0


def test_an_address_that_is_taken_is_an_error(publisher: EventPublisher) -> None:
    with pytest.raises(zmq.ZMQError):
        EventPublisher(PublisherOptions(port=publisher.port))


def wait_sent(publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]], count: int) -> None:
    """Return once the publisher's thread has sent ``count`` batches: it answers replays in between."""
    while not (batches := ask_replay(context, publisher.replay_port, 0)) or batches[-1].sequence < count - 1:
        pass


def test_what_an_engine_encoded_goes_on_under_a_number_of_ours(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher.publish([TierCleared((Tier.DISK,))])
    publisher.forward(publisher_module.encode_sglang(EventBatch(41, 7.0, (STORED,))))
    wait_sent(publisher, context, 2)
    first, second = ask_replay(context, publisher.replay_port, 0)
    assert first.events == (TierCleared((Tier.DISK,)),)
    assert (second.sequence, second.published_at_s, len(second.events)) == (1, 7.0, 1)


def test_a_number_that_was_skipped_shows_as_a_gap(
    publisher: EventPublisher, context: zmq.Context[zmq.Socket[bytes]]
) -> None:
    publisher.publish([STORED])
    publisher.skip()
    publisher.publish([STORED])
    wait_sent(publisher, context, 2)
    assert [batch.sequence for batch in ask_replay(context, publisher.replay_port, 0)] == [0, 2]
