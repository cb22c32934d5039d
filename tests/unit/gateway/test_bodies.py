"""Bodies on aiohttp: whole within a size and a time, in whichever way a client fails at that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from gateway.bodies import whole_body
from gateway.http import errors_in_shape

HEAD = b"POST / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"


@pytest.fixture
async def server() -> AsyncIterator[TestServer]:
    async def told(request: web.Request) -> web.Response:
        return web.json_response(len(await whole_body(request, 100, timeout_s=0.2)))

    app = web.Application(client_max_size=1000, middlewares=[errors_in_shape])
    app.router.add_post("/", told)
    async with TestServer(app) as server:
        yield server


async def exchange(server: TestServer, said: bytes) -> tuple[int, Any]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(said)
    async with asyncio.timeout(20):
        head, body = (await reader.read()).split(b"\r\n\r\n", 1)
    writer.close()
    return int(head.split(b" ")[1]), json.loads(body)


async def test_a_body_comes_whole_or_in_chunks(server: TestServer) -> None:
    assert await exchange(server, HEAD + b"content-length: 5\r\n\r\nhello") == (200, 5)
    assert await exchange(server, CHUNKED + b"2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n") == (200, 5)
    assert await exchange(server, HEAD + b"\r\n") == (200, 0)


@pytest.mark.parametrize(
    ("said", "status", "code"),
    [
        (HEAD + b"content-length: 101\r\n\r\n" + b"x" * 101, 413, "body_too_large"),
        (CHUNKED + b"65\r\n" + b"x" * 101 + b"\r\n0\r\n\r\n", 413, "body_too_large"),
        (CHUNKED + b"7d0\r\n" + b"x" * 2000 + b"\r\n0\r\n\r\n", 413, "body_too_large"),
        (HEAD + b"content-length: 9\r\n\r\nhell", 408, "body_timeout"),
        (CHUNKED + b"9\r\nhell", 408, "body_timeout"),
        (HEAD + b"content-encoding: gzip\r\ncontent-length: 3\r\n\r\nabc", 415, "unsupported_encoding"),
    ],
    ids=range(6),
)
async def test_any_other_is_refused_by_name(server: TestServer, said: bytes, status: int, code: str) -> None:
    told, body = await exchange(server, said)
    assert (told, body["error"]["code"]) == (status, code)
