"""The overview, and what is pushed to open pages as server-sent events."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from gateway.access.roles import Right
from gateway.console.answers import HEADERS, download, forbidden, form_of, page, whole_number
from gateway.console.frame import partial, render
from gateway.console.live import Live, Parts, TooManyClients, Topic
from gateway.console.overview import DEFAULT_WINDOW, WINDOWS, flight_view, overview, overview_data
from gateway.console.pages import run_values
from gateway.console.run_routes import RunRoutes
from gateway.console.run_views import run_view
from gateway.console.sources import Sources
from gateway.console.visitor import Visitor
from gateway.errors import GatewayError
from tracing.errors import AmbiguousRunError, TracingError

_OVERVIEW_PARTS: Final = ("figures", "course", "flights", "fleet", "recent")
_MOST_STEPS: Final = 100_000


class LiveRoutes:
    """See the module. ``live.run`` must be running for pages to be told anything."""

    def __init__(self, sources: Sources, runs: RunRoutes) -> None:
        self._sources, self._runs = sources, runs
        self.live = Live(self._parts, sources.is_leaving, sources.live)

    def routes(self) -> list[web.RouteDef]:
        """The overview's address and the stream's."""
        return [
            web.get("/console", self._overview),
            web.get("/console/", self._to_overview),
            web.get("/console/live", self._stream),
        ]

    async def _to_overview(self, request: web.Request) -> web.Response:
        raise web.HTTPPermanentRedirect("/console")

    async def _overview(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            raise web.HTTPSeeOther("/console/cost")
        window = _window(request)
        if (form := form_of(request)) is not None:
            return download(
                await asyncio.to_thread(overview_data, self._sources, visitor.tenant, window), form, "course"
            )
        found = await asyncio.to_thread(overview, self._sources, visitor.tenant, window)
        return page(render("overview.html", visitor, view=found, windows=WINDOWS))

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Tell what changes of a page until it is closed, its reader is too slow, its key ends, or the gateway does."""
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        topic, after = _topic(request, visitor), whole_number(request.query.get("after")) or 0
        try:
            client = self.live.join(topic, known=map("step-{}".format, range(min(after, _MOST_STEPS) + 1)))
        except TooManyClients:
            return web.Response(status=503, headers=HEADERS | {"Retry-After": "30"}, text="too many live pages")
        headers = HEADERS | {"Content-Type": "text/event-stream", "X-Accel-Buffering": "no"}
        response = web.StreamResponse(headers=headers)
        options = self.live.options
        try:
            async with asyncio.timeout(options.stall_s) as limit:
                await response.prepare(request)
                await response.write(b"retry: 3000\n\n")
                limit.reschedule(None)
                async for message in client.messages(options.heartbeat_s):
                    self._sources.visitor_of(request)  # a key that was revoked hears nothing more
                    limit.reschedule(asyncio.get_running_loop().time() + options.stall_s)
                    await response.write(b": still here\n\n" if message is None else message.encode())
                    limit.reschedule(None)
        except (TimeoutError, ConnectionError):
            if request.transport is not None:
                request.transport.abort()
        except GatewayError:
            return response  # the key was revoked meanwhile
        finally:
            self.live.leave(client)
        return response

    def _parts(self, topic: Topic) -> Parts:
        """Render a topic; nothing where the store cannot be read."""
        try:
            return self._overview_parts(topic) if topic.name == "overview" else self._run_parts(topic)
        except TracingError:
            return Parts()

    def _overview_parts(self, topic: Topic) -> Parts:
        found = overview(self._sources, topic.tenant, topic.subject)
        return Parts({name: partial(f"overview_{name}.html", view=found) for name in _OVERVIEW_PARTS})

    def _run_parts(self, topic: Topic) -> Parts:
        now_ns = self._sources.clock()
        flights = [
            flight_view(each, now_ns)
            for each in self._sources.underway()
            if each.link is not None
            and each.link.run_id == topic.subject
            and topic.tenant in (None, each.identity.tenant)
        ]
        replaced = {"flights": partial("overview_flights.html", view={"flights": flights, "more_flights": 0})}
        try:
            part = self._runs.part(topic.subject, topic.tenant, 10**9)
        except AmbiguousRunError:
            part = None
        if part is None:
            return Parts(replaced)
        run, values = run_view(part), run_values(part)
        replaced["run-figures"] = partial("run_figures.html", run=run)
        replaced["axis"] = partial("run_axis.html", run=run)
        for step in run.steps:
            replaced[f"row-{step.step}"] = partial("step_row.html", run=run, step=step)
            replaced[f"gap-{step.step}"] = partial("step_gap.html", run=run, step=step)
        added = {f"step-{step.step}": partial("step.html", run=run, step=step, **values) for step in run.steps}
        return Parts(replaced, added)


def _window(request: web.Request) -> str:
    window = request.query.get("window", "")
    return window if window in WINDOWS else DEFAULT_WINDOW


def _topic(request: web.Request, visitor: Visitor) -> Topic:
    if request.query.get("view") == "run":
        tenant = request.query.get("tenant") if visitor.tenant is None else visitor.tenant
        return Topic("run", tenant, request.query.get("run", "")[:200])
    return Topic("overview", visitor.tenant, _window(request))
