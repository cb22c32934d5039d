"""A reverse proxy that stands between the gateway and an engine and keeps what the engine itself said of its tokens.

It shares no code with the gateway, so that its count is an independent one: bytes go through as they come, and each
answer's ``usage`` and ``sglext`` are read from them afterwards.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp
from aiohttp import web

Json = dict[str, Any]
_HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "content-length", "host", "te", "upgrade"})
_DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Recorded:
    """One answer of the engine. ``request_id`` is what the gateway called the request; counts are the engine's own."""

    path: str
    request_id: str
    status: int
    usage: Json | None
    sglext: Json | None

    @property
    def prompt_tokens(self) -> int:
        return int((self.usage or {}).get("prompt_tokens", 0))

    @property
    def output_tokens(self) -> int:
        return int((self.usage or {}).get("completion_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        return int(((self.usage or {}).get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    @property
    def cached_by_tier(self) -> dict[str, int]:
        """Hit tokens by tier, as the engine told them."""
        details = (self.sglext or {}).get("cached_tokens_details") or {}
        return {tier: int(details.get(tier) or 0) for tier in ("device", "host", "disk", "pool")}


class RecordingProxy:
    """Serves on a loopback port of its own in front of ``target``. ``answers`` grows with every finished POST."""

    def __init__(self, target: str) -> None:
        self.target, self.url = target, ""
        self.answers: list[Recorded] = []
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RecordingProxy:
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP}
        url = f"{self.target}{request.path_qs}"
        try:
            upstream = await self._session.request(request.method, url, data=await request.read(), headers=headers)
        except aiohttp.ClientConnectorError:
            assert request.transport is not None
            request.transport.abort()
            return web.Response(status=502)
        async with upstream:
            passed = {name: value for name, value in upstream.headers.items() if name.lower() not in _HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=passed)
            await response.prepare(request)
            kept = bytearray()
            async for piece in upstream.content.iter_any():
                kept += piece
                if kept.endswith(_DONE):  # who reads this has read everything, and may ask at once what was said
                    self._keep(request, upstream.status, bytes(kept))
                await response.write(piece)
            if not kept.endswith(_DONE):
                self._keep(request, upstream.status, bytes(kept))
            await response.write_eof()
            return response

    def _keep(self, request: web.Request, status: int, body: bytes) -> None:
        if request.method == "POST":
            usage, sglext = counts_in(body)
            self.answers.append(Recorded(request.path, request.headers.get("x-request-id", ""), status, usage, sglext))


def counts_in(body: bytes) -> tuple[Json | None, Json | None]:
    """Return the last ``usage`` and ``sglext`` in an answer, whole or a stream."""
    usage, sglext = None, None
    if body.lstrip().startswith(b"{"):
        documents = [body]
    else:
        documents = [line[5:] for line in body.split(b"\n") if line.startswith(b"data:") and b"[DONE]" not in line]
    for document in documents:
        answer = json.loads(document)
        usage, sglext = answer.get("usage") or usage, answer.get("sglext") or sglext
    return usage, sglext
