"""The embedded engine's HTTP surface: SGLang's, as far as a gateway and its clients use it.

Routes decode, ask ``EngineService`` and encode; a client that goes away cancels its handler and with it the engine's
work. Errors are SGLang's ``{"object": "error", …}``; the gateway turns them into OpenAI's shape.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from aiohttp import web

from engine_adapter.embedded.answers import ChunkWriter, chat_answer, error_body, text_answer
from engine_adapter.embedded.chat import Call, Json, read_chat, read_completion
from engine_adapter.embedded.errors import RequestError
from engine_adapter.embedded.metrics import CONTENT_TYPE
from engine_adapter.embedded.service import EngineService, Generation, GenerationError
from engine_adapter.prompt import PromptError

MAX_BODY_BYTES = 64 << 20
_BUSY_CODES = frozenset({"busy", "queue_full", "stopping"})
_OUTPUT_IDS_HEADER = "x-sglext-return-output-ids"
_STREAMED_IDS_HEADER = "x-keepwarm-streamed-ids"
_PRIORITY_HEADER = "x-override-priority"
_ID_HEADERS = ("x-override-rid", "x-request-id")
_log = logging.getLogger(__name__)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the server says of itself."""

    served_model_name: str
    model_path: str
    facts: Mapping[str, Any] = field(default_factory=dict)  # further members of /server_info


class EngineServer:
    """The routes of one engine, and whether it takes requests."""

    def __init__(
        self, service: EngineService, facts: ServerFacts, *, clear: Callable[[bool], None] = lambda storage: None
    ) -> None:
        """``clear`` forgets every page of device and host, and with ``True`` of the storage tiers too."""
        self._service, self._facts, self._clear = service, facts, clear
        self._started_s = int(time.time())
        self._ready = False
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def app(self) -> web.Application:
        """Return the application. Run it with ``handler_cancellation=True``, or disconnects go unnoticed."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_json])
        app.add_routes(
            [
                web.post("/v1/chat/completions", self._chat),
                web.post("/v1/completions", self._completion),
                web.post("/v1/tokenize", self._tokenize),
                web.post("/tokenize", self._tokenize),
                web.get("/v1/models", self._models),
                web.get("/v1/loads", self._loads),
                web.get("/health", self._health),
                web.get("/ready", self._health),
                web.get("/metrics", self._metrics),
                web.get("/server_info", self._server_info),
                web.get("/get_server_info", self._server_info),
                web.route("*", "/flush_cache", self._flush_cache),
                web.post("/abort_request", self._abort),
                web.route("*", "/close_session", self._close_session),
            ]
        )
        return app

    def open(self) -> None:
        """Say healthy and take requests from now on."""
        self._ready = True

    async def drain(self, timeout_s: float) -> bool:
        """Take no new requests and wait for those that run; ``False`` if some still do after ``timeout_s``."""
        self._ready = False
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        call = read_chat(await request.read(), request_id=_request_id(request), wants_ids=_wants_ids(request))
        return await self._answer(request, _prioritized(call, request), chat=True)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        call = read_completion(await request.read(), request_id=_request_id(request), wants_ids=_wants_ids(request))
        return await self._answer(request, _prioritized(call, request), chat=False)

    async def _answer(self, request: web.Request, call: Call, *, chat: bool) -> web.StreamResponse:
        if not self._ready:
            return _error("the engine takes no requests now", 503)
        self._in_flight += 1
        self._idle.clear()
        try:
            async with self._service.generate(call) as generation:
                if call.stream:
                    return await self._stream(request, generation, chat=chat)
                parts = [part async for batch in generation.parts() for part in batch]
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()
        write = chat_answer if chat else text_answer
        return _json(write(call, parts, generation.outcome, created_s=int(time.time()), model=self._name(call)))

    async def _stream(self, request: web.Request, generation: Generation, *, chat: bool) -> web.StreamResponse:
        """Send the parts as they come; nothing before the first token, so that a failure until then has a status."""
        call = generation.call
        ids = _StreamedIds(generation, is_wanted=request.headers.get(_STREAMED_IDS_HEADER) == "1")
        writer = ChunkWriter(call, chat=chat, created_s=int(time.time()), model=self._name(call))
        response = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-cache"})
        try:
            async for batch in generation.parts():
                chunks = [writer.part(part) for part in batch]
                if not response.prepared:
                    await response.prepare(request)
                    chunks = [*writer.opening(), *chunks]
                if chunks:
                    await response.write(ids.new() + _events(chunks))
        except (GenerationError, RequestError) as error:
            if not response.prepared:
                raise
            _log.error("request %s failed in the middle of its stream: %s", call.request_id, error)
            status = 400 if isinstance(error, RequestError) else 500
            await response.write(_events([{"error": error_body(str(error), status=status)}]) + _DONE)
            return response
        if not response.prepared:
            await response.prepare(request)
        await response.write(ids.new() + _events(writer.closing(generation.outcome)) + _DONE)
        return response

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        body = _object(await request.read())
        prompt = body.get("prompt", body.get("text", body.get("messages")))
        if not isinstance(prompt, (str, list)):
            raise RequestError("send a prompt or messages", param="prompt")
        tokens = await self._service.encode(prompt, body.get("tools"))
        limit = self._service.engine.max_model_len
        return _json({"tokens": tokens, "count": len(tokens), "max_model_len": limit})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        card = {
            "id": self._facts.served_model_name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "keepwarm",
            "root": self._facts.model_path,
            "max_model_len": self._service.engine.max_model_len,
        }
        return _json({"object": "list", "data": [card]})

    async def _loads(self, request: web.Request) -> web.StreamResponse:
        load = self._service.engine.load()
        return _json(
            {
                "loads": [
                    {
                        "dp_rank": 0,
                        "num_running_reqs": load.running,
                        "num_waiting_reqs": load.waiting,
                        "num_used_tokens": load.used_tokens,
                        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
                        "max_total_num_tokens": load.total_tokens,
                        "token_usage": load.used_tokens / max(1, load.total_tokens),
                    }
                ]
            }
        )

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(status=200 if self._ready else 503)

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._service.metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        own = {"served_model_name": self._facts.served_model_name, "model_path": self._facts.model_path}
        return _json({**own, **self._facts.facts})

    async def _flush_cache(self, request: web.Request) -> web.StreamResponse:
        load = self._service.engine.load()
        if load.running or load.waiting:
            return _error("requests are running or waiting: nothing was flushed", 400)
        storage = request.query.get("storage") in ("1", "true")
        await asyncio.to_thread(self._clear, storage)
        return web.Response(text="Cache flushed.\n")

    async def _abort(self, request: web.Request) -> web.StreamResponse:
        body = _object(await request.read())
        if not isinstance(rid := body.get("rid"), str):
            raise RequestError("rid must name a request", param="rid")
        self._service.engine.abort(rid)
        return web.Response()

    async def _close_session(self, request: web.Request) -> web.StreamResponse:
        body = _object(await request.read())
        if not isinstance(session := body.get("session_id"), str):
            raise RequestError("session_id must name a session", param="session_id")
        self._service.engine.close_session(session)
        return web.Response()

    def _name(self, call: Call) -> str:
        return call.model or self._facts.served_model_name


_DONE = b"data: [DONE]\n\n"


class _StreamedIds:
    """Tells a stream's token ids as it goes, for who asks: in a comment before the first event that they made.

    Who has got an event so knows the ids of all that was generated up to it, those whose text is held back included.
    """

    def __init__(self, generation: Generation, *, is_wanted: bool) -> None:
        self._ids, self._is_wanted = generation.outcome.token_ids, is_wanted
        self._told = len(generation.call.given_ids)

    def new(self) -> bytes:
        """Return the comment's line; nothing where no id is new."""
        new, self._told = self._ids[self._told :], len(self._ids)
        return b": ids %b\n" % " ".join(map(str, new)).encode() if new and self._is_wanted else b""


def _events(chunks: list[Json]) -> bytes:
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks)


def _json(value: Json, *, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(message: str, status: int, *, param: str | None = None, code: str | None = None) -> web.Response:
    response = _json(error_body(message, status=status, param=param, code=code), status=status)
    if status == 503:
        response.headers["retry-after"] = "1"
    return response


def _request_id(request: web.Request) -> str | None:
    return next((request.headers[name] for name in _ID_HEADERS if name in request.headers), None)


def _prioritized(call: Call, request: web.Request) -> Call:
    """Return the call with the priority that a header gives it instead of its body. Raises ``RequestError``."""
    told = request.headers.get(_PRIORITY_HEADER)
    if told is None:
        return call
    try:
        return replace(call, priority=int(told))
    except ValueError:
        raise RequestError(f"{_PRIORITY_HEADER} must be a whole number", param="priority") from None


def _wants_ids(request: web.Request) -> bool:
    return request.headers.get(_OUTPUT_IDS_HEADER) == "1"


def _object(data: bytes) -> Json:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the body is not a JSON object: {error}") from error


@web.middleware
async def _errors_as_json(request: web.Request, handler: _Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestError as error:
        status = 503 if error.code in _BUSY_CODES else 400
        return _error(str(error), status, param=error.param, code=error.code)
    except PromptError as error:
        return _error(str(error), 400, param=error.param, code="invalid_prompt")
    except GenerationError as error:
        return _error(str(error), 500)
    except web.HTTPException as error:
        return _error(error.reason, error.status)
    except ConnectionError:  # the client is gone; nobody reads what we say
        raise
    except Exception:  # the request boundary: one request's fault must not look like the server's
        _log.exception("%s %s failed", request.method, request.path)
        return _error("internal error", 500)
