"""The front, on both event loops: what it serves itself, what it gives away, and that nothing is lost in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.errors import BodyTooSlow
from gateway.front import Front, FrontConnection, FrontReply, Headers, read_head
from gateway.relay import ClientGone

HEAD = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nX-Name: Gr\xc3\xbc\xc3\x9fe \r\n\r\n"
LARGE = bytes(64 << 20)  # more than the kernel keeps for a client
ANSWER = b"HTTP/1.1 200 OK\r\nx-got: 5\r\ncontent-length: 5\r\n\r\nhello"


pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(120, method="thread")]  # no signal ends uvloop


class Others(asyncio.Protocol):
    """Stands where aiohttp does: takes connections over, and says what it was given."""

    def __init__(self) -> None:
        self.data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        self._transport.write(b"OTHER:" + data)  # type: ignore[attr-defined]


async def echo(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
    body = await read_body()
    await reply.send(200, {"x-got": str(len(body))}, body)


Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@contextlib.asynccontextmanager
async def connected(front: Front) -> AsyncIterator[Client]:
    server = await asyncio.get_running_loop().create_server(front, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
    try:
        yield reader, writer
    finally:
        writer.close()
        server.close()
        await front.close()


def front_of(handle: object = echo, **limits: float) -> Front:
    return Front({"/v1/x": handle}.get, Others, **{"body_cap_bytes": 1 << 20, **limits})  # type: ignore[dict-item, arg-type]


async def test_requests_are_served_one_after_the_other_on_one_connection() -> None:
    async with connected(front_of()) as (reader, writer):
        writer.write((HEAD % 5 + b"hello") * 3)  # sent ahead
        assert await reader.readexactly(3 * len(ANSWER)) == 3 * ANSWER
        writer.write(HEAD % 0)
        assert (await reader.readuntil(b"\r\n\r\n")).endswith(b"x-got: 0\r\ncontent-length: 0\r\n\r\n")


@given(cuts=st.sets(st.integers(1, 2 * len(HEAD) + 5), max_size=5))
def test_a_request_is_the_same_however_it_is_cut(cuts: set[int]) -> None:
    data = (HEAD % 5 + b"hello") * 2

    async def scenario() -> bytes:
        async with connected(front_of()) as (reader, writer):
            start = 0
            for cut in [*sorted(cuts), len(data)]:
                writer.write(data[start:cut])
                await writer.drain()
                await asyncio.sleep(0)
                start = cut
            return await reader.readexactly(2 * len(ANSWER))

    assert asyncio.run(scenario()) == 2 * ANSWER


@pytest.mark.parametrize(
    "head",
    [
        b"GET /v1/x HTTP/1.1\r\nhost: h\r\n\r\n",
        b"POST /v1/y HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/x?a=1 HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/x HTTP/1.0\r\nhost: h\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\ncontent-length: 0\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: +1\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length : 1\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\n folded: 1\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nx: a\x00b\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\nx: a\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nexpect: 100-continue\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\ncontent-encoding: gzip\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 1\r\nconnection: close\r\n\r\n",
        b"POST /v1/x HTTP/1.1\r\nhost: h\r\ncontent-length: 99999999\r\n\r\n",
        b"PUT",
        b"\x16\x03\x01\x02\x00",
        b"POST /" + b"x" * (1 << 15),
    ],
)
async def test_what_is_not_plain_is_given_away_whole(head: bytes) -> None:
    async with connected(front_of()) as (reader, writer):
        writer.write(HEAD % 5 + b"hello" + head)
        assert await reader.readexactly(len(ANSWER)) == ANSWER
        assert await reader.readexactly(6 + len(head)) == b"OTHER:" + head
        writer.write(b"and so on")
        assert await reader.readexactly(15) == b"OTHER:and so on"


async def test_half_a_head_is_waited_for_and_then_given_away() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\n"
    async with connected(front_of()) as (reader, writer):
        writer.write(head[:30])
        await writer.drain()
        writer.write(head[30:])
        assert await reader.readexactly(6 + len(head)) == b"OTHER:" + head


def test_header_names_are_found_in_any_case_and_values_are_text() -> None:
    read = read_head(HEAD % 3)
    assert read is not None
    path, headers, length = read
    assert (path, length, headers.get("X-NAME"), headers["Host"]) == ("/v1/x", 3, "Grüße", "h")
    assert "content-LENGTH" in headers
    assert headers.get("nothing") is None


async def test_an_unread_body_does_not_lose_the_answer_nor_the_connection() -> None:
    async def refuse(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        await reply.send(401, {}, b"no")

    async with connected(front_of(refuse)) as (reader, writer):
        for _ in range(2):
            writer.write(HEAD % (1 << 20))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 401 Unauthorized\r\n")
            assert await reader.readexactly(2) == b"no"
            writer.write(b"x" * (1 << 20))
            await writer.drain()


async def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    async def wait(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        try:
            await read_body()
        except BodyTooSlow as error:
            await reply.send(error.status, {}, error.code.encode())

    async with connected(front_of(wait, body_timeout_s=0.1)) as (reader, writer):
        writer.write(HEAD % 9 + b"half")
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 408 Request Timeout\r\n")
        assert await reader.readexactly(12) == b"body_timeout"


async def test_a_client_that_leaves_ends_its_request() -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    has_begun = asyncio.Event()

    async def wait(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        await reply.start(200, {})
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            with pytest.raises(ClientGone):
                await reply.write(b"x")
            ended.set_result("ended")

    async with connected(front_of(wait)) as (_, writer):
        writer.write(HEAD % 0)
        await has_begun.wait()
        writer.close()
        assert await ended == "ended"


async def test_a_slow_client_holds_its_stream_up_and_gets_all_of_it() -> None:
    written = 0

    async def stream(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        nonlocal written
        await reply.start(200, {})
        for _ in range(256):
            await reply.write(b"y" * (1 << 16))
            written += 1 << 16
        await reply.finish()

    async with connected(front_of(stream)) as (reader, writer):
        writer.write(HEAD % 0)
        turns_without = before = 0
        while turns_without < 100:
            turns_without, before = turns_without + 1 if written == before else 0, written
            await asyncio.sleep(0)
        assert written < 16 << 20
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(256):
            assert await reader.readuntil(b"\r\n") == b"10000\r\n"
            assert len(await reader.readexactly((1 << 16) + 2)) == (1 << 16) + 2
        assert await reader.readexactly(5) == b"0\r\n\r\n"


@pytest.mark.parametrize("then", ["send", "start", "write", "finish"])
async def test_a_client_that_takes_nothing_is_given_up_whatever_is_to_be_sent(then: str) -> None:
    given_up = asyncio.get_running_loop().create_future()

    async def fill(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        if not await read_body():
            await reply.send(200, {}, LARGE)
            return
        try:
            if then == "send":
                await reply.send(200, {}, b"")
            await reply.start(200, {})
            if then == "write":
                await reply.write(b"more")
            await reply.finish()
        except ClientGone as error:
            given_up.set_result(str(error))
            raise

    async def finish(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        await reply.start(200, {})
        await reply.write(LARGE)
        try:
            await reply.finish()
        except ClientGone as error:
            given_up.set_result(str(error))
            raise

    front = front_of(finish if then == "finish" else fill, client_stall_s=0.05)
    async with connected(front) as (_, writer):
        writer.write(HEAD % 0 + HEAD % 1 + b"x")
        async with asyncio.timeout(20):
            assert await given_up == "the client takes nothing"
            while front.connections:  # noqa: ASYNC110 - there is nothing to wait on
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("takes", [True, False])
async def test_an_idle_connection_is_cut_where_its_answer_is_not_taken(
    takes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, look = asyncio.Event(), FrontConnection._look_at_the_clock

    def seen(self: FrontConnection) -> None:
        look(self)
        looked.set()

    async def send(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        await reply.send(200, {}, LARGE)

    monkeypatch.setattr(FrontConnection, "_look_at_the_clock", seen)
    front = front_of(send, client_stall_s=60 if takes else 0.05, idle_timeout_s=0.3)
    async with connected(front) as (reader, writer), asyncio.timeout(40):
        writer.write(HEAD % 0)
        await looked.wait()  # the time is over, and the answer not taken yet
        if takes:
            await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(len(LARGE)) == LARGE
        while not takes and front.connections:  # noqa: ASYNC110 - there is nothing to wait on
            await asyncio.sleep(0.01)


async def test_a_handler_that_stops_in_the_middle_cuts_the_connection() -> None:
    async def stop(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        await reply.start(200, {})
        await reply.write(b"half")

    async with connected(front_of(stop)) as (reader, writer):
        writer.write(HEAD % 0)
        with contextlib.suppress(ConnectionResetError):
            assert not (await reader.read()).endswith(b"0\r\n\r\n")


async def test_a_header_of_an_answer_cannot_break_out_of_its_line() -> None:
    async def handle(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        with pytest.raises(ValueError, match="cannot be sent"):
            await reply.send(200, {"x": "a\r\nevil: 1"}, b"")
        await reply.send(200, {}, b"")

    async with connected(front_of(handle)) as (reader, writer):
        writer.write(HEAD % 0)
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


async def test_who_says_nothing_is_hung_up_on() -> None:
    async with connected(front_of(idle_timeout_s=0.01)) as (reader, writer):
        assert await reader.read() == b""
    async with connected(front_of(idle_timeout_s=0.01)) as (reader, writer):
        writer.write(b"POST /v1/x HT")
        assert await reader.read() == b""


async def test_leaving_lets_requests_end_and_closes_the_rest() -> None:
    go_on, has_begun = asyncio.Event(), asyncio.Event()

    async def wait(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
        has_begun.set()
        await go_on.wait()
        await reply.send(200, {}, b"done")

    front = front_of(wait)
    async with connected(front) as (reader, writer):
        writer.write(HEAD % 0)
        await has_begun.wait()
        front.leave()
        go_on.set()
        assert (await reader.read()).endswith(b"connection: close\r\n\r\ndone")
