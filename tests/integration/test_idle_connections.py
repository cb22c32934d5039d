"""Whoever says nothing, or never comes to an end of its head, holds no connection for long: front and aiohttp alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.listening import ListenOptions
from tests.gateways import Client, gateway_for
from tests.scripted_engine import ScriptedEngine

pytestmark = pytest.mark.asyncio(loop_scope="module")

_CHAT = b'{"model":"m","messages":[]}'
_ASK = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n%b" % (len(_CHAT), _CHAT)
_LOOK = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Client]:
    def impatient(*args: object, **more: object) -> ListenOptions:
        return ListenOptions(*args, **more, idle_timeout_s=0.3)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.assembly.ListenOptions", impatient)
        async with ScriptedEngine() as engine, gateway_for([engine], tmp_path_factory.mktemp("home")) as client:
            yield client


@pytest.mark.parametrize(
    ("said", "answers"),
    [
        (b"", 0),
        (b"POST /v1/chat/comp", 0),
        (b"GET /v1/models HTTP/1.1\r\nhost: local", 0),
        (b"PRI * HT", 0),
        (_ASK, 1),
        (_ASK + b"POST /v1", 1),
        (_LOOK, 1),
        (_LOOK + b"GET /he", 1),
        (_ASK + _LOOK, 2),
    ],
    ids=range(9),
)
async def test_who_says_nothing_more_is_hung_up_on(gateway: Client, said: bytes, answers: int) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(said)
    async with asyncio.timeout(20):
        told = await reader.read()
    writer.close()
    assert told.count(b"HTTP/1.1 200 OK") == answers


async def test_a_head_that_comes_byte_by_byte_is_not_waited_for(gateway: Client) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    for head in (b"POST /v1/chat/completions HTTP/1.1\r\n", b"GET /v1/models HTTP/1.1\r\n"):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        ended = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(20):
            while not ended.done():
                writer.write(b"x")
                await asyncio.wait([ended], timeout=0.02)
        writer.close()
        await asyncio.gather(ended, return_exceptions=True)  # a reset, where a byte met the closed door
