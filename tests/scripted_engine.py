"""A scripted engine for tests: a real HTTP server on OpenAI's (and a little of SGLang's) surface that says what a test
wants and remembers what it was asked. It computes nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from aiohttp import web

Json = dict[str, Any]


@dataclass
class Script:
    """One answer. With ``events`` it is a stream: raw pieces of bytes, written one by one."""

    status: int = 200
    body: Json | bytes = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    events: Sequence[bytes] | None = None
    end: Literal["clean", "reset", "hang"] = "clean"
    wait_for: asyncio.Event | None = None  # before anything is answered
    pause: Callable[[int], asyncio.Event | None] = lambda number: None  # before piece ``number``


@dataclass
class Asked:
    """What came in."""

    path: str
    headers: dict[str, str]
    body: bytes
    peer: object = None  # the connection's other end

    @property
    def json(self) -> Json:
        decoded: Json = json.loads(self.body)
        return decoded


def event(chunk: Json) -> bytes:
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunk(delta: Json, finish: str | None = None, **more: Any) -> Json:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return {"id": "c", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}


def usage(prompt: int, output: int, cached: int = 0) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def usage_chunk(prompt: int, output: int, cached: int = 0, **more: Any) -> Json:
    return {
        "id": "c",
        "object": "chat.completion.chunk",
        "model": "m",
        "choices": [],
        "usage": usage(prompt, output, cached),
        **more,
    }


def stream(words: Sequence[str], prompt: int = 10, cached: int = 0, **more: Any) -> list[bytes]:
    """Return a whole stream: role, words, finish, usage, end."""
    return [
        event(chunk({"role": "assistant", "content": ""})),
        *(event(chunk({"content": word})) for word in words),
        event(chunk({}, finish="stop")),
        event(usage_chunk(prompt, len(words), cached, **more)),
        DONE,
    ]


def answer(text: str, prompt: int = 10, output: int = 2, cached: int = 0, **more: Any) -> Json:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return {
        "id": "c",
        "object": "chat.completion",
        "model": "m",
        "choices": [choice],
        "usage": usage(prompt, output, cached),
        **more,
    }


class ScriptedEngine:
    """Serves ``script`` (or what ``script_for`` returns) to every request until told otherwise."""

    def __init__(self, *, models: Sequence[str] = ("m",), info: Json | None = None) -> None:
        self.models, self.info = models, info or {}
        self.parents: dict[str, str] = {}  # of those models that are adapters
        self.script = Script(body=answer("hello"))
        self.script_for: Callable[[Asked], Script] = lambda asked: self.script
        self.asked: list[Asked] = []
        self.pages: dict[str, bytes] = {}  # what else it has, by path
        self.looked_up: list[Asked] = []  # what was asked of these, whether it has it or not
        self.is_healthy = True
        self.hung_up = 0  # answers that the client of this engine cut short
        self.in_flight = 0
        self.changed = asyncio.Condition()
        self.url = ""
        self._runner: web.AppRunner | None = None
        self._port = 0

    async def __aenter__(self) -> ScriptedEngine:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Listen, on the same port as before if there was one."""
        app = web.Application(client_max_size=1 << 28)
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._complete),
                web.post("/v1/completions", self._complete),
                web.post("/v1/messages", self._complete),
                web.post("/v1/responses", self._complete),
                web.post("/v1/embeddings", self._complete),
                web.post("/tokenize", self._complete),
                web.post("/detokenize", self._complete),
                web.get("/health", self._health),
                web.get("/v1/models", self._models),
                web.get("/server_info", self._server_info),
                web.get("/{path:.*}", self._page),
                web.post("/{path:.*}", self._page),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self._port, reuse_address=True).start()
        self._port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self._port}"

    async def close(self) -> None:
        """Be gone."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def forget(self) -> None:
        """Be as if just opened: nothing was asked, and the answer is hello."""
        self.asked.clear()
        self.script = Script(body=answer("hello"))
        self.script_for = lambda asked: self.script

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something about this engine is so."""
        async with asyncio.timeout(10), self.changed:
            await self.changed.wait_for(condition)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.is_healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        entries = [{"id": m, "max_model_len": 8192, "parent": self.parents.get(m)} for m in self.models]
        return web.json_response({"object": "list", "data": entries})

    async def _server_info(self, request: web.Request) -> web.Response:
        return web.json_response(self.info)

    async def _page(self, request: web.Request) -> web.Response:
        headers = {k.lower(): v for k, v in request.headers.items()}
        self.looked_up.append(Asked(request.path, headers, await request.read()))
        page = self.pages.get(request.path)
        return web.Response(status=404) if page is None else web.Response(body=page, content_type="text/plain")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(request.path, {k.lower(): v for k, v in request.headers.items()}, await request.read())
        asked.peer = request.transport.get_extra_info("peername") if request.transport else None
        self.asked.append(asked)
        async with self._flight():
            return await self._play(request, self.script_for(asked))

    async def _play(self, request: web.Request, script: Script) -> web.StreamResponse:
        if script.wait_for is not None:
            await script.wait_for.wait()
        if script.events is None:
            if script.end == "reset":
                assert request.transport is not None
                request.transport.abort()
            body = script.body if isinstance(script.body, bytes) else json.dumps(script.body).encode()
            headers = {"content-type": "application/json", **script.headers}
            return web.Response(status=script.status, body=body, headers=headers)
        response = web.StreamResponse(
            status=script.status, headers={"content-type": "text/event-stream", **script.headers}
        )
        await response.prepare(request)
        for number, piece in enumerate(script.events):
            if (gate := script.pause(number)) is not None:
                await gate.wait()
            await response.write(piece)
        if script.end == "reset":
            assert request.transport is not None
            request.transport.abort()
        elif script.end == "hang":
            await asyncio.Event().wait()
        return response

    def _flight(self) -> _Flight:
        return _Flight(self)


class _Flight:
    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine

    async def __aenter__(self) -> None:
        self._engine.in_flight += 1
        await self._tell()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._engine.in_flight -= 1
        self._engine.hung_up += isinstance(error, asyncio.CancelledError | ConnectionError)
        await self._tell()

    async def _tell(self) -> None:
        async with self._engine.changed:
            self._engine.changed.notify_all()
