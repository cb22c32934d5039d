"""The data plane's HTTP client, against servers that say exactly what a test wants, cut where it wants."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_adapter import wire_client
from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken
from engine_adapter.wire_client import WireClient
from engine_adapter.wire_connection import Connection, Origin

pytestmark = [pytest.mark.both_loops, pytest.mark.timeout(120, method="thread")]  # no signal ends uvloop
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-A: 1\r\nx-a: 2\r\n\r\n5\r\nhello\r\n7\r\n, world\r\n0\r\n\r\n"
)


class Server:
    """Counts connections and remembers requests' heads."""

    def __init__(self, serve: Serve) -> None:
        self._serve, self.connections, self.heads = serve, 0, list[bytes]()

    async def __aenter__(self) -> Server:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/path?q=1"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                length = next(
                    (int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.startswith(b"content-length")), 0
                )
                await reader.readexactly(length)
                await self._serve(reader, writer)
        writer.close()


def saying(*pieces: bytes, close: bool = False) -> Serve:
    """Answer every request in these pieces, each in a packet of its own."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        if close:
            writer.close()

    return serve


@contextlib.asynccontextmanager
async def asked(*pieces: bytes, close: bool = False) -> AsyncIterator[tuple[WireClient, Server]]:
    async with Server(saying(*pieces, close=close)) as server, WireClient() as client:
        yield client, server


async def whole(client: WireClient, url: str) -> tuple[int, bytes]:
    response = await client.request("POST", url, {"content-type": "application/json"}, b"{}")
    try:
        return response.status, await response.read_all(1 << 20)
    finally:
        response.close()


async def test_a_kept_connection_carries_the_next_request() -> None:
    async with asked(CHUNKED) as (client, server):
        assert [await whole(client, server.url) for _ in range(3)] == [(200, b"hello, world")] * 3
        assert server.connections == 1
        assert server.heads[0].startswith(b"POST /path?q=1 HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"content-length: 2\r\n" in server.heads[0]


async def test_headers_are_lower_case_and_joined() -> None:
    async with asked(CHUNKED) as (client, server):
        response = await client.request("GET", server.url, {})
        assert response.headers["x-a"] == "1, 2"
        assert b"content-length" not in server.heads[0]
        response.close()


@given(cuts=st.sets(st.integers(1, len(CHUNKED) - 1), max_size=6))
def test_an_answer_is_the_same_however_it_is_cut(cuts: set[int]) -> None:
    edges = [0, *sorted(cuts), len(CHUNKED)]

    async def scenario() -> None:
        async with asked(*(CHUNKED[a:b] for a, b in itertools.pairwise(edges))) as (client, server):
            assert [await whole(client, server.url) for _ in range(2)] == [(200, b"hello, world")] * 2

    asyncio.run(scenario())


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with asked(b"HTTP/1.1 200 OK\r\n\r\nabc", b"def", close=True) as (client, server):
        assert await whole(client, server.url) == (200, b"abcdef")
        assert await whole(client, server.url) == (200, b"abcdef")
        assert server.connections == 2


async def test_interim_answers_are_passed_over() -> None:
    pieces = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    async with asked(*pieces) as (client, server):
        response = await client.request("POST", server.url, {}, b"{}")
        assert (response.status, "link" in response.headers) == (200, False)
        assert await response.read_all(10) == b"ok"
        response.close()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nab",
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH\r\n",
        b"",
    ],
)
async def test_half_answers_and_nonsense_are_told_as_broken(answer: bytes) -> None:
    async with asked(answer, close=True) as (client, server):
        with pytest.raises(UpstreamBroken):
            await whole(client, server.url)


async def test_a_head_without_an_end_is_cut() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        for number in range(100_000):
            writer.write(b"x-%d: %b\r\n" % (number, b"y" * 1000))
            await writer.drain()

    async with Server(serve) as server, WireClient() as client:
        with pytest.raises(UpstreamBroken, match="no end"):
            await client.request("POST", server.url, {}, b"{}")


async def test_what_nobody_asked_for_ends_the_connection() -> None:
    twice = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
    async with asked(twice) as (client, server):
        assert [await whole(client, server.url) for _ in range(2)] == [(200, b"ok")] * 2
        assert server.connections == 2


async def test_a_slow_reader_stops_the_engine_and_loses_nothing() -> None:
    sent = 0

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (64 << 20))
        for _ in range(64):
            writer.write(b"x" * (1 << 20))
            await writer.drain()
            sent += 1 << 20

    async with Server(serve) as server, WireClient() as client:
        response = await client.request("POST", server.url, {}, b"{}")
        turns_without = before = 0
        while turns_without < 100:  # as long as the server can send, it does
            turns_without, before = turns_without + 1 if sent == before else 0, sent
            await asyncio.sleep(0)
        assert sent < 32 << 20
        with pytest.raises(AnswerTooLong):
            await response.read_all(1 << 20)
        assert len(await response.read_all(64 << 20)) < 64 << 20
        response.close()


async def test_a_reader_that_waits_can_be_called_back() -> None:
    go_on = asyncio.Event()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n")
        await go_on.wait()
        writer.write(b"ok")

    async with Server(serve) as server, WireClient() as client:
        response = await client.request("POST", server.url, {}, b"{}")
        asyncio.get_running_loop().call_soon(response.interrupt)
        with pytest.raises(TimeoutError):
            await response.read_some()
        go_on.set()
        assert await response.read_some() == b"ok"
        assert await response.read_some() == b""
        response.close()


async def test_what_comes_while_somebody_waits_goes_to_who_carries_it_on() -> None:
    go_on, taken = asyncio.Event(), list[bytes]()

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\nab")
        for part in (b"cd", b"ef", b"gh"):
            await go_on.wait()
            go_on.clear()
            writer.write(part)

    def take(data: bytes) -> None:
        taken.append(data)
        go_on.set()
        if data == b"ef":
            response.interrupt()

    async with Server(serve) as server, WireClient() as client:
        response = await client.request("POST", server.url, {}, b"{}")
        response.carry(take)
        assert await response.read_some() == b"ab"  # it was there before anybody waited
        go_on.set()
        with pytest.raises(TimeoutError):
            await response.read_some()
        assert taken == [b"cd", b"ef"]
        response.carry(None)
        assert await response.read_some() == b"gh"
        assert await response.read_some() == b""
        response.close()


class Doorman:
    """A server that answers one request on each connection and is told when to close it, and how."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}/"
        self.requests = 0

    async def serve(self) -> socket.socket:
        """Take one connection and answer a request on it."""
        loop = asyncio.get_running_loop()
        connection, _ = await loop.sock_accept(self._listener)
        await self.read(connection)
        await loop.sock_sendall(connection, b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        return connection

    async def read(self, connection: socket.socket) -> None:
        """Read a request, whose body ends in ``}``."""
        connection.setblocking(False)
        data = b""
        while not data.endswith(b"}"):
            data += await asyncio.get_running_loop().sock_recv(connection, 1 << 20)
        self.requests += 1

    def __enter__(self) -> Doorman:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()


async def asked_twice(
    doorman: Doorman, client: WireClient, body: bytes, between: Callable[[socket.socket], None]
) -> int:
    """Ask, let something be done to the kept connection that the client has not seen, and ask again; the status."""
    serving = asyncio.ensure_future(doorman.serve())
    response = await client.request("POST", doorman.url, {}, b"{}")
    await response.read_all(10)
    response.close()
    between(await serving)
    again = asyncio.ensure_future(doorman.serve())
    try:
        response = await client.request("POST", doorman.url, {}, body)
        response.close()
        await again
        return response.status
    finally:
        again.cancel()


@pytest.mark.parametrize("size", [2, 100_000, 10_000_000])
@pytest.mark.parametrize("is_half", [False, True])
async def test_a_connection_that_was_closed_while_idle_costs_nothing(size: int, is_half: bool) -> None:
    def close(connection: socket.socket) -> None:
        if is_half:
            connection.shutdown(socket.SHUT_RDWR)
        else:
            connection.close()

    with Doorman() as doorman:
        async with WireClient() as client:
            body = b"{" + b" " * (size - 2) + b"}"
            assert await asked_twice(doorman, client, body, close) == 200
            assert doorman.requests == 2


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-keyout", key, "-out", cert, "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.mark.parametrize("size", [2, 1_000_000])
async def test_so_it_is_under_tls(size: int, certificate: tuple[Path, Path]) -> None:
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    answered, is_answered = list[ssl.SSLSocket](), threading.Event()

    def serve(context: ssl.SSLContext) -> None:
        for _ in range(2):
            connection = context.wrap_socket(listener.accept()[0], server_side=True)
            data = b""
            while not data.endswith(b"}"):
                data += connection.recv(1 << 20)
            connection.sendall(answer)
            answered.append(connection)
            is_answered.set()

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=serve, args=(context,), daemon=True)
        serving.start()
        url = f"https://localhost:{listener.getsockname()[1]}/"
        async with WireClient() as client:
            client._tls = ssl.create_default_context(cafile=certificate[0])
            first = await client.request("POST", url, {}, b"{}")
            await first.read_all(10)
            first.close()
            assert await asyncio.to_thread(is_answered.wait, 10)
            answered[0].close()  # and the client's loop, which does not run now, has not seen it
            second = await client.request("POST", url, {}, b"{" + b" " * (size - 2) + b"}")
            assert second.status == 200
            second.close()
        serving.join(10)
        answered[1].close()


@pytest.mark.parametrize("resets", [False, True])
async def test_a_request_that_may_have_been_read_is_sent_once(resets: bool) -> None:
    async def scene(doorman: Doorman, client: WireClient) -> None:
        serving = asyncio.ensure_future(doorman.serve())
        response = await client.request("POST", doorman.url, {}, b"{}")
        await response.read_all(10)
        response.close()
        connection = await serving
        again = asyncio.ensure_future(client.request("POST", doorman.url, {}, b"{}"))
        await doorman.read(connection)
        if resets:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        await again

    with Doorman() as doorman:
        async with WireClient() as client:
            with pytest.raises(UpstreamBroken):
                await scene(doorman, client)
            assert doorman.requests == 2


async def test_what_may_be_read_twice_is_sent_again_once() -> None:
    calls = 0

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            writer.write(CHUNKED)
        else:
            writer.close()

    async with Server(serve) as server, WireClient() as client:
        first = await client.request("GET", server.url, {})
        await first.read_all(100)
        first.close()
        with pytest.raises(UpstreamBroken):
            await client.request("GET", server.url, {})
        assert (calls, server.connections) == (3, 2)


async def test_a_door_that_shuts_at_once_is_none() -> None:
    class Late(WireClient):
        async def _connect(self, origin: Origin, timeout_s: float | None) -> Connection:
            connection = await super()._connect(origin, timeout_s)
            listener.accept()[0].close()
            return connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with Late() as client:
            with pytest.raises(ConnectFailed):
                await client.request("POST", f"http://127.0.0.1:{listener.getsockname()[1]}/", {}, b"{}")


async def test_connections_that_nobody_uses_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_client, "KEEP_ALIVE_S", 0.0)
    monkeypatch.setattr(wire_client, "_SWEEP_S", 0.001)
    gone = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED)
        assert await reader.read() == b""
        gone.set()

    async with Server(serve) as server, WireClient() as client:
        await whole(client, server.url)
        await gone.wait()


@pytest.mark.parametrize("url", ["ftp://127.0.0.1/", "http://", "http://127.0.0.1:99999/", "http://[::1/", "x"])
async def test_what_is_no_address_is_no_connection(url: str) -> None:
    async with WireClient() as client:
        with pytest.raises(ConnectFailed):
            await client.request("GET", url, {})


async def test_a_header_cannot_break_out_of_its_line() -> None:
    async with asked(CHUNKED) as (client, server):
        with pytest.raises(ValueError, match="cannot be sent"):
            await client.request("POST", server.url, {"traceparent": "x\r\nevil: 1"}, b"{}")
        assert server.heads == []
