"""An engine that computes nothing, and a plain proxy, for ``gateway``: processes of their own on ports of their own.

``python -m tests.bench._chat_server engine PORT [CHUNKS] [GAP_MS]`` answers every chat with one word, or with a stream
of ``CHUNKS`` words so far apart. ``python -m tests.bench._chat_server proxy PORT ENGINE_URL…`` is what aiohttp takes to
pass bodies on in turn, reading nothing of them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

import uvloop
from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

MODEL = "mock-model"
_USAGE = {"prompt_tokens": 100, "completion_tokens": 1, "total_tokens": 101}
_WORD = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
_PIECE = _WORD | {"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
_LAST = _WORD | {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
_MESSAGE = {"index": 0, "message": {"role": "assistant", "content": "word"}, "finish_reason": "stop"}
_WHOLE = {"id": "c1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [_MESSAGE], "usage": _USAGE}


def _answer(kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


_CHAT = _answer(b"application/json", json.dumps(_WHOLE).encode())
_MODELS = _answer(b"application/json", json.dumps({"object": "list", "data": [{"id": MODEL}]}).encode())
_STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _event(value: object) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


_PIECE_EVENT = _event(_PIECE)
_END_EVENTS = _event(_LAST) + _event({**_WORD, "choices": [], "usage": _USAGE}) + _event(b"[DONE]") + b"0\r\n\r\n"


class Engine(asyncio.Protocol):
    """One connection of the engine; requests come one after the other."""

    def __init__(self, chunks: int, gap_s: float) -> None:
        self._chunks, self._gap_s = chunks, gap_s
        self._buffer = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Somebody connected."""
        self._transport = transport  # type: ignore[assignment]  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """Answer once a request is whole."""
        self._buffer += data
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._buffer[:end].lower()
        at = head.find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(self._buffer) < end + 4 + length:
            return
        body, self._buffer = self._buffer[end + 4 : end + 4 + length], self._buffer[end + 4 + length :]
        assert self._transport is not None
        if head.startswith(b"get"):
            self._transport.write(_MODELS)
        elif b'"stream": true' in body[-300:] or b'"stream":true' in body[-300:]:
            self._transport.write(_STREAM_HEAD)
            self._piece(self._chunks)
        else:
            self._transport.write(_CHAT)

    def _piece(self, left: int) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        if left:
            self._transport.write(_PIECE_EVENT)
            asyncio.get_running_loop().call_later(self._gap_s, self._piece, left - 1)
        else:
            self._transport.write(_END_EVENTS)


async def serve_engine(port: int, chunks: int, gap_ms: float) -> None:
    """Be the engine until killed."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Engine(chunks, gap_ms / 1000), "127.0.0.1", port)
    async with server:
        await server.serve_forever()


async def serve_proxy(port: int, engines: list[str]) -> None:
    """Be the proxy until killed."""
    turn = itertools.cycle(engines)
    async with ClientSession(
        connector=TCPConnector(limit=0), timeout=ClientTimeout(total=None), auto_decompress=False
    ) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            url = next(turn) + request.path
            async with session.post(url, data=body, headers={"content-type": "application/json"}) as answer:
                kind = answer.headers["content-type"]
                if not kind.startswith("text/event-stream"):
                    return web.Response(body=await answer.read(), content_type="application/json")
                response = web.StreamResponse(headers={"content-type": kind})
                await response.prepare(request)
                async for data in answer.content.iter_any():
                    await response.write(data)
                await response.write_eof()
                return response

        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", handle)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        await asyncio.Event().wait()


if __name__ == "__main__":
    kind, port, *rest = sys.argv[1:]
    if kind == "engine":
        uvloop.run(serve_engine(int(port), int(rest[0]) if rest else 1, float(rest[1]) if len(rest) > 1 else 0.0))
    else:
        uvloop.run(serve_proxy(int(port), rest))
