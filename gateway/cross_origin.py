"""Pages of other origins that a browser lets ask the gateway and read its answers: those that the settings name.

Without it a browser sends such a page's requests all the same and shows it nothing of the answers; keys are what keeps
strangers out, here as elsewhere. No cookie is taken for a key, so that ``*`` gives nobody's rights away.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection
from typing import Final

from aiohttp import hdrs, web

ANY: Final = "*"
_REMEMBERED_S: Final = 600

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def allow_origins(app: web.Application, origins: Collection[str]) -> None:
    """Let pages of these origins (``https://chat.example``, or ``*`` for all) use everything that ``app`` serves."""

    def allowed(request: web.Request) -> str | None:
        origin = request.headers.get(hdrs.ORIGIN)
        return origin if origin is not None and (ANY in origins or origin in origins) else None

    @web.middleware
    async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        method = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_METHOD)
        if request.method != hdrs.METH_OPTIONS or method is None or allowed(request) is None:
            return await handler(request)
        asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS)
        headers = {hdrs.ACCESS_CONTROL_ALLOW_METHODS: method, hdrs.ACCESS_CONTROL_MAX_AGE: str(_REMEMBERED_S)}
        return web.Response(status=204, headers=headers | ({hdrs.ACCESS_CONTROL_ALLOW_HEADERS: asked} if asked else {}))

    async def name(request: web.Request, response: web.StreamResponse) -> None:
        if (origin := allowed(request)) is not None:
            response.headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = origin
            response.headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = ANY
            response.headers.add(hdrs.VARY, hdrs.ORIGIN)

    if origins:
        app.middlewares.insert(0, preflight)
        app.on_response_prepare.append(name)
