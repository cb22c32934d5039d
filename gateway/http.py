"""The edge: HTTP in, HTTP out, errors always in the shape that the path's clients expect."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from billing.errors import LedgerUnavailable
from gateway import paths
from gateway.bodies import BODY_TIMEOUT_S, whole_body
from gateway.catalog import model_card, model_list
from gateway.draft import forwarded_of
from gateway.errors import (
    BadRequest,
    BodyTooLarge,
    GatewayError,
    LedgerAway,
    MethodNotAllowed,
    NotFound,
    Unauthorized,
)
from gateway.front import CLIENT_STALL_S, HIGH_WATER_BYTES, FrontReply, Handle, Headers
from gateway.identity import Caller, KeyRing
from gateway.models import ModelDirectory
from gateway.openapi.document import document
from gateway.pipeline import Arrival, Pipeline
from gateway.protocols.anthropic.errors import error_body as anthropic_error_body
from gateway.protocols.anthropic.protocol import MESSAGES
from gateway.protocols.base import EndpointProtocol
from gateway.protocols.embeddings import EMBEDDINGS
from gateway.protocols.openai import CHAT, COMPLETIONS
from gateway.protocols.openai_errors import error_body as openai_error_body
from gateway.protocols.responses.protocol import Responses
from gateway.relay import ClientGone
from gateway.tokens import Tokens

_log = logging.getLogger(__name__)


class _WithoutContent(logging.Filter):
    """Makes a line of each malformed request that says nothing of it: a broken header may hold a key."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, HttpProcessingError):
            record.msg, record.args = "a client's HTTP is malformed: %s", (type(error).__name__,)
            record.exc_info, record.levelno, record.levelname = None, logging.INFO, "INFO"
        return True


protocol_log = logging.getLogger(f"{__name__}.protocol")
"""For aiohttp's server, which would log the client's bytes."""
protocol_log.addFilter(_WithoutContent())

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class EdgeOptions:
    """Limits of what comes in."""

    body_cap_bytes: int = 64 << 20
    body_timeout_s: float = BODY_TIMEOUT_S
    client_stall_s: float = CLIENT_STALL_S


class AiohttpReply:
    """``gateway.relay.Reply`` on aiohttp."""

    def __init__(self, request: web.Request, client_stall_s: float = CLIENT_STALL_S) -> None:
        self._request, self._client_stall_s = request, client_stall_s
        self.response: web.StreamResponse | None = None

    @property
    def is_started(self) -> bool:
        """Whether a status went out."""
        return self.response is not None

    async def send(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        """Answer whole. Raises ``RuntimeError`` behind the beginning of a stream."""
        if self.is_started:
            raise RuntimeError("a stream has begun")
        self.response = web.StreamResponse(status=status, headers=headers)
        self.response.content_length = len(body)
        await self._taken(self.response.prepare(self._request))
        await self.write(body)
        await self.finish()

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        """Begin a stream."""
        self.response = web.StreamResponse(status=status, headers=headers)
        await self._taken(self.response.prepare(self._request))

    def write_soon(self, data: bytes) -> bool:
        """Nothing is sent without waiting here."""
        return False

    async def write(self, data: bytes) -> None:
        """Send a piece; waits while more than the transport's high-water mark (64 KiB) is unsent."""
        assert self.response is not None
        for at in range(0, len(data), HIGH_WATER_BYTES):  # so that a slow client is not taken for one that has stopped
            await self._taken(self.response.write(data[at : at + HIGH_WATER_BYTES]))

    async def finish(self) -> None:
        """End a stream."""
        assert self.response is not None
        await self._taken(self.response.write_eof())

    async def _taken(self, sending: Awaitable[object]) -> None:
        try:
            async with asyncio.timeout(self._client_stall_s):
                await sending
        except TimeoutError:
            if self._request.transport is not None:
                self._request.transport.abort()  # else aiohttp goes on to wait, and ends the answer as if it were whole
            raise ClientGone("the client takes nothing") from None
        except ConnectionError:
            raise ClientGone("the client left") from None


class Edge:
    """The client-facing routes."""

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        keys: KeyRing,
        models: ModelDirectory,
        tokens: Tokens,
        responses: Responses,
        options: EdgeOptions,
    ) -> None:
        self._pipeline, self._keys, self._models, self._options = pipeline, keys, models, options
        self._tokens, self._responses = tokens, responses
        served: tuple[EndpointProtocol, ...] = (CHAT, COMPLETIONS, MESSAGES, responses, EMBEDDINGS)
        self._protocols = {protocol.path.removeprefix("/v1"): protocol for protocol in served}

    @property
    def protocols(self) -> dict[str, EndpointProtocol]:
        """The protocols by their endpoints' names."""
        return {protocol.endpoint: protocol for protocol in self._protocols.values()}

    def routes(self) -> list[web.RouteDef]:
        """Return the routes, each at all of ``paths.ROOTS``."""
        found = [web.get("/openapi.json", self._document)]
        for root in paths.ROOTS:
            for path, protocol in self._protocols.items():
                found.append(web.post(f"{root}{path}", self._completion(protocol)))
            found.append(web.post(f"{root}/messages/count_tokens", self._counted(MESSAGES, self._tokens.count_message)))
            found.append(
                web.post(f"{root}/responses/input_tokens", self._counted(self._responses, self._tokens.count_response))
            )
            found.append(web.post(f"{root}/responses/compact", self._no_compaction))
            found.append(web.post(f"{root}/tokenize", self._told(self._tokens.tokenize)))
            found.append(web.post(f"{root}/detokenize", self._told(self._tokens.detokenize)))
            kept, responses = f"{root}/responses/{{id}}", self._responses
            found.append(web.get(kept, self._about(responses.get)))
            found.append(web.delete(kept, self._about(responses.delete)))
            found.append(web.get(f"{kept}/input_items", self._about(responses.items)))
            found.append(web.post(f"{kept}/cancel", self._about(responses.cancel)))
            found.append(web.get(f"{root}/models", self._list_models))
            found.append(web.get(f"{root}/models/{{model:.+}}", self._one_model))
        return found

    def front_handler(self, target: str) -> Handle | None:
        """Return what serves a ``POST`` to this target if it is of the load, for ``gateway.front``."""
        label, path = paths.split(target)
        if path not in self._protocols:
            label, path = paths.split(paths.tidied(target.partition("?")[0]))
        protocol = self._protocols.get(path)
        return None if protocol is None else self._front_completion(protocol, label)

    def _front_completion(self, protocol: EndpointProtocol, label: str | None) -> Handle:
        async def handle(headers: Headers, read_body: Callable[[], Awaitable[bytes]], reply: FrontReply) -> None:
            await self._pipeline.handle(Arrival(protocol, headers, read_body, label), reply)

        return handle

    def _told(self, answer: Callable[[bytes, Caller], Awaitable[dict[str, object]]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = self._keys.authenticate(request.headers)
            return _json(await answer(await self._read(request), caller))

        return handle

    def _counted(
        self,
        protocol: EndpointProtocol,
        count: Callable[[bytes, Caller, Mapping[str, str]], Awaitable[dict[str, object]]],
    ) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = self._keys.authenticate(request.headers)
            return _json(await count(await self._read(request), caller, forwarded_of(request.headers, protocol)))

        return handle

    def _about(self, answer: Callable[[str, str, Mapping[str, str]], Awaitable[dict[str, object]]]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            tenant = self._keys.authenticate(request.headers).identity.tenant
            return _json(await answer(tenant, request.match_info["id"], request.query))

        return handle

    def _completion(self, protocol: EndpointProtocol) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            reply = AiohttpReply(request, self._options.client_stall_s)
            label = request.match_info.get("label")
            arrival = Arrival(protocol, request.headers, lambda: self._read(request), label)
            await self._pipeline.handle(arrival, reply)
            if reply.response is None:  # the client is gone: aiohttp wants something to throw away
                return web.Response(status=499)
            return reply.response

        return handle

    async def _read(self, request: web.Request) -> bytes:
        return await whole_body(request, self._options.body_cap_bytes, timeout_s=self._options.body_timeout_s)

    async def _document(self, request: web.Request) -> web.Response:
        return web.Response(body=document(), content_type="application/json")

    async def _no_compaction(self, request: web.Request) -> web.Response:
        """Refuse: a compacted conversation is sealed for its vendor's models, and no engine could go on from one."""
        self._keys.authenticate(request.headers)
        raise BadRequest(
            "responses/compact is not served: no engine here could read what it returns;"
            " send the conversation, or a summary of it",
            code="endpoint_not_supported",
        )

    async def _list_models(self, request: web.Request) -> web.Response:
        caller = self._keys.authenticate(request.headers)
        return web.json_response(model_list(self._models.visible(caller), is_anthropic=_is_anthropic(request)))

    async def _one_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._models.look_up(name, self._keys.authenticate(request.headers))
        return web.json_response(model_card(name, is_anthropic=_is_anthropic(request)))


def _is_anthropic(request: web.Request) -> bool:
    """Tell whether the client speaks Anthropic's API: by the path, or by the header that such clients always send."""
    _, path = paths.split(request.path)
    return path == "/messages" or path.startswith("/messages/") or "anthropic-version" in request.headers


def _json(value: dict[str, object]) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", charset="utf-8")


@web.middleware
async def errors_in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every error of this process as the path's clients expect it, unknown paths and methods included."""
    is_anthropic = _is_anthropic(request)
    try:
        return await handler(request)
    except GatewayError as error:
        return error_response(error, is_anthropic=is_anthropic)
    except LedgerUnavailable:
        return error_response(LedgerAway("the ledger cannot be read now", retry_after_s=5), is_anthropic=is_anthropic)
    except web.HTTPMethodNotAllowed as refusal:
        allowed = refusal.headers.get(hdrs.ALLOW, "")
        why = f"there is no {request.method} {request.path[:200]} here, only {allowed.replace(',', ', ')}"
        answer = error_response(MethodNotAllowed(why), is_anthropic=is_anthropic)
        answer.headers[hdrs.ALLOW] = allowed
        return answer
    except web.HTTPNotFound:
        if (meant := await _meant(request)) is not None:
            return web.Response(status=308, headers={hdrs.LOCATION: meant})
        missing = NotFound(f"there is no {request.method} {request.path[:200]} here", code="unknown_url")
        return error_response(missing, is_anthropic=is_anthropic)
    except web.HTTPRequestEntityTooLarge:
        return error_response(BodyTooLarge("the body is over the limit"), is_anthropic=is_anthropic)
    except web.HTTPException as refusal:
        if refusal.status < 400:
            raise  # a redirect
        shaped = BadRequest(refusal.reason)
        shaped.status = refusal.status
        return error_response(shaped, is_anthropic=is_anthropic)
    except Exception:  # the request boundary
        _log.exception("%s %s failed inside the gateway", request.method, request.path)
        return error_response(GatewayError("the gateway failed"), is_anthropic=is_anthropic)


async def _meant(request: web.Request) -> str | None:
    """Return where a target leads that is none of ours, if anywhere; see ``paths.tidied``."""
    asked, query = request.rel_url.raw_path, request.rel_url.raw_query_string
    path = paths.tidied(asked)
    if path == asked:
        return None
    found = await request.app.router.resolve(request.clone(rel_url=path))
    if found.http_exception is not None:
        return None
    return f"{path}?{query}" if query else path


def error_response(error: GatewayError, *, is_anthropic: bool = False) -> web.Response:
    """Return an error as a response."""
    headers = {} if error.retry_after_s is None else {"retry-after": str(error.retry_after_s)}
    if isinstance(error, Unauthorized):
        headers["www-authenticate"] = 'Bearer, Basic realm="keepwarm"'
    body = anthropic_error_body(error) if is_anthropic else openai_error_body(error)
    return web.Response(status=error.status, body=body, content_type="application/json", headers=headers)


class ShapedRequestHandler(web.RequestHandler):
    """aiohttp's connection, whose answer to what is no HTTP it understands is an error like all others.

    Nothing says which API the client meant, so that the body has the members of both: OpenAI's clients read ``error``,
    Anthropic's also ``type`` around it.
    """

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the error, and close after it."""
        plain = super().handle_error(request, status, exc, message)  # which logs it, and says what it is about
        is_long = isinstance(exc, LineTooLong)
        why = "a line of the request's head is too long" if is_long else "this is no HTTP that could be understood"
        error = BadRequest(why, code="head_too_long" if is_long else "malformed_http")
        body = {"type": "error", "error": json.loads(openai_error_body(error))["error"], "request_id": None}
        shaped = web.json_response(body, status=plain.status)
        shaped.force_close()
        return shaped


def make_app(options: EdgeOptions) -> web.Application:
    """Return an application without routes, with the limits and error shapes that all of them share."""
    return web.Application(client_max_size=options.body_cap_bytes, middlewares=[errors_in_shape])
