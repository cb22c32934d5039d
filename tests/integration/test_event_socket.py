"""The event socket against real ZMQ sockets that speak as engines' publishers do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from engine_adapter import turns
from engine_adapter.event_socket import Arrival, EventSocket, EventSocketOptions, Reconnected, Replay, Undecodable
from kvstore.event_wire import FLUSHED_TIERS, encode_sglang
from kvstore.events import BlocksRemoved, EventBatch, TierCleared
from kvstore.page import Tier

END = b"\xff" * 8
DEADLINE_S = 20.0


def batch(sequence: int) -> EventBatch:
    return EventBatch(sequence, float(sequence), (BlocksRemoved((sequence,), Tier.DEVICE),))


def frames(sequence: int, topic: bytes = b"kv") -> list[bytes]:
    return [topic, sequence.to_bytes(8, "big"), encode_sglang(batch(sequence))]


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    made = zmq.asyncio.Context()
    yield made
    made.destroy(linger=0)


class Publisher:
    """An XPUB, so that a test can wait until its subscriber is there."""

    def __init__(self, context: zmq.asyncio.Context, endpoint: str = "tcp://127.0.0.1:*") -> None:
        self.socket = context.socket(zmq.XPUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(endpoint)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    async def subscribed(self) -> bytes:
        return await self.socket.recv()

    async def send(self, *parts: bytes) -> None:
        await self.socket.send_multipart(list(parts))

    def close(self) -> None:
        self.socket.close(0)

    async def leave(self) -> None:
        """Close, and return once the address is free for another."""
        monitor = self.socket.get_monitor_socket(zmq.EVENT_CLOSED)
        self.socket.unbind(self.endpoint)
        async with asyncio.timeout(DEADLINE_S):
            await monitor.recv_multipart()
        self.socket.disable_monitor()
        self.close()


@asynccontextmanager
async def replayer(context: zmq.asyncio.Context, answers: list[list[bytes]]) -> AsyncIterator[tuple[str, list[int]]]:
    """A ROUTER that gives the same answer to every request; yields its endpoint and the numbers asked for."""
    socket = context.socket(zmq.ROUTER)
    socket.bind("tcp://127.0.0.1:*")
    asked: list[int] = []

    async def serve() -> None:
        while True:
            identity, empty, first = await socket.recv_multipart()
            assert empty == b""
            asked.append(int.from_bytes(first, "big"))
            for answer in answers:
                await socket.send_multipart([identity, b"", *answer])

    task = asyncio.create_task(serve())
    yield socket.getsockopt_string(zmq.LAST_ENDPOINT), asked
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    socket.close(0)


async def take(arrivals: AsyncIterator[Arrival], count: int) -> list[Arrival]:
    async with asyncio.timeout(DEADLINE_S):
        return [await anext(arrivals) for _ in range(count)]


async def test_batches_arrive_in_order_and_other_topics_do_not(context: zmq.asyncio.Context) -> None:
    publisher = Publisher(context)
    async with EventSocket(publisher.endpoint, options=EventSocketOptions(topic="kv"), context=context) as socket:
        assert await publisher.subscribed() == b"\x01kv"
        await publisher.send(*frames(7))
        await publisher.send(*frames(8, b"other"))
        await publisher.send(*frames(9))
        arrivals = await take(aiter(socket), 2)
    assert [arrival.sequence for arrival in arrivals if isinstance(arrival, EventBatch)] == [7, 9]
    publisher.close()


async def test_a_clearing_covers_what_its_source_says(context: zmq.asyncio.Context) -> None:
    publisher = Publisher(context)
    cleared = EventBatch(3, 3.0, (TierCleared(FLUSHED_TIERS),))
    options = EventSocketOptions(cleared=(Tier.DEVICE,))
    async with EventSocket(publisher.endpoint, options=options, context=context) as socket:
        await publisher.subscribed()
        await publisher.send(b"kv", (3).to_bytes(8, "big"), encode_sglang(cleared))
        (arrival,) = await take(aiter(socket), 1)
    assert isinstance(arrival, EventBatch)
    assert arrival.events == (TierCleared((Tier.DEVICE,)),)
    publisher.close()


@pytest.mark.parametrize(
    ("parts", "number"),
    [
        ([b""], None),
        ([b"kv"], None),
        ([b"kv", b"short", encode_sglang(batch(1))], None),
        ([b"kv", (1).to_bytes(8, "big"), b"nonsense"], 1),
    ],
)
async def test_a_frame_that_cannot_be_understood_is_handed_on_as_such(
    context: zmq.asyncio.Context, parts: list[bytes], number: int | None
) -> None:
    publisher = Publisher(context)
    async with EventSocket(publisher.endpoint, context=context) as socket:
        await publisher.subscribed()
        await publisher.send(*parts)
        await publisher.send(*frames(2))
        broken, whole = await take(aiter(socket), 2)
    assert isinstance(broken, Undecodable)
    assert broken.sequence == number
    assert isinstance(whole, EventBatch)
    publisher.close()


async def test_frames_without_a_topic_are_read(context: zmq.asyncio.Context) -> None:
    publisher = Publisher(context)
    async with EventSocket(publisher.endpoint, context=context) as socket:
        await publisher.subscribed()
        await publisher.send(*frames(3)[1:])
        (arrival,) = await take(aiter(socket), 1)
    assert isinstance(arrival, EventBatch)
    assert arrival.sequence == 3
    publisher.close()


async def test_a_publisher_that_comes_back_is_reported_before_what_it_says(context: zmq.asyncio.Context) -> None:
    first = Publisher(context)
    async with EventSocket(first.endpoint, context=context) as socket:
        arrivals = aiter(socket)
        await first.subscribed()
        await first.send(*frames(5))
        await take(arrivals, 1)
        await first.leave()
        second = Publisher(context, first.endpoint)
        waiting = asyncio.ensure_future(take(arrivals, 2))
        async with asyncio.timeout(DEADLINE_S):
            await second.subscribed()
        await second.send(*frames(0))
        reconnected, batch_of_new_life = await waiting
    assert isinstance(reconnected, Reconnected)
    assert isinstance(batch_of_new_life, EventBatch)
    assert batch_of_new_life.sequence == 0
    second.close()


class Path:
    """TCP between a subscriber and a publisher; ``lose`` lets what there is of it fall silent, without a word."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._lost: set[asyncio.StreamWriter] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()

    def lose(self) -> None:
        self._lost |= self._writers

    async def _pass_on(self, near: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        far, on = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers |= {back, on}
        await asyncio.gather(self._copy(near, on), self._copy(far, back))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if target not in self._lost:
                target.write(data)


async def test_a_connection_that_fell_silent_without_a_word_is_made_anew(context: zmq.asyncio.Context) -> None:
    publisher = Publisher(context)
    path = Path(int(publisher.endpoint.rpartition(":")[2]))
    options = EventSocketOptions(silence_s=0.3)
    async with path as endpoint, EventSocket(endpoint, options=options, context=context) as socket:
        arrivals = aiter(socket)
        await publisher.subscribed()
        await publisher.send(*frames(1))
        await take(arrivals, 1)
        path.lose()
        await publisher.send(*frames(2))
        (arrival,) = await take(arrivals, 1)
        assert isinstance(arrival, Reconnected)
    publisher.close()


async def test_others_have_their_turns_while_a_long_replay_is_read(
    context: zmq.asyncio.Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.0)
    receiver = context.socket(zmq.DEALER)
    port = receiver.bind_to_random_port("tcp://127.0.0.1")
    sender = context.socket(zmq.DEALER)
    sender.connect(f"tcp://127.0.0.1:{port}")
    for number in range(200):
        await sender.send_multipart(frames(number))
    await sender.send_multipart([b"", END, b""])
    others = 0

    async def have_turns() -> None:
        nonlocal others
        while True:
            await asyncio.sleep(0)
            others += 1

    async with asyncio.timeout(DEADLINE_S):
        await receiver.poll()
        task = asyncio.create_task(have_turns())
        replay = await EventSocket("", context=context)._read_replay(receiver)
    task.cancel()
    assert replay is not None
    assert len(replay.batches) == 200
    assert others >= 199
    receiver.close(0)
    sender.close(0)


async def test_an_absent_publisher_is_silent_and_leaving_does_not_hang(context: zmq.asyncio.Context) -> None:
    probe = Publisher(context)
    probe.close()
    async with asyncio.timeout(DEADLINE_S), EventSocket(probe.endpoint, context=context) as socket:
        waiting = asyncio.ensure_future(anext(aiter(socket)))
        await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def test_a_replay_is_everything_up_to_the_end_mark(context: zmq.asyncio.Context) -> None:
    answers = [frames(4), frames(5)[1:], [b"kv", (6).to_bytes(8, "big"), b"nonsense"], frames(7), [b"", END, b""]]
    async with replayer(context, answers) as (endpoint, asked):
        async with EventSocket("tcp://127.0.0.1:1", endpoint, context=context) as socket:
            got = await socket.replay(4)
            again = await socket.replay(5)
        assert asked == [4, 5]
    assert got == again
    assert got is not None
    assert [b.sequence for b in got.batches] == [4, 5, 7]
    assert got.last == 7


async def test_an_empty_replay_is_not_a_failed_one(context: zmq.asyncio.Context) -> None:
    async with (
        replayer(context, [[b"", END, b""]]) as (endpoint, _),
        EventSocket("tcp://127.0.0.1:1", endpoint, context=context) as socket,
    ):
        assert await socket.replay(0) == Replay([], None)


async def test_a_replay_without_an_end_ends_at_the_deadline_or_the_limit(context: zmq.asyncio.Context) -> None:
    async with replayer(context, [frames(n) for n in range(20)]) as (endpoint, _):
        hasty = EventSocketOptions(replay_timeout_s=0.2)
        async with EventSocket("tcp://127.0.0.1:1", endpoint, options=hasty, context=context) as socket:
            assert await socket.replay(0) is None
        strict = EventSocketOptions(replay_timeout_s=DEADLINE_S, replay_batches=5)
        async with EventSocket("tcp://127.0.0.1:1", endpoint, options=strict, context=context) as socket:
            assert await socket.replay(0) is None


async def test_without_a_replay_socket_there_is_no_replay(context: zmq.asyncio.Context) -> None:
    async with EventSocket("tcp://127.0.0.1:1", context=context) as socket:
        assert await socket.replay(0) is None


async def test_a_first_connection_that_was_waited_for_is_not_reported_and_one_that_came_too_late_is(
    context: zmq.asyncio.Context,
) -> None:
    publisher = Publisher(context)
    async with EventSocket(publisher.endpoint, context=context) as socket:
        assert await socket.until_connected(DEADLINE_S)
        await publisher.subscribed()
        await publisher.send(*frames(1))
        (arrival,) = await take(aiter(socket), 1)
        assert isinstance(arrival, EventBatch)
    endpoint = publisher.endpoint
    await publisher.leave()
    async with EventSocket(endpoint, context=context) as socket:
        assert not await socket.until_connected(0.01)
        publisher = Publisher(context, endpoint)
        (arrival,) = await take(aiter(socket), 1)
        assert isinstance(arrival, Reconnected)
    publisher.close()
