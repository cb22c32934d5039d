"""What-if over HTTP: a form, and the answer beside what happened."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Final

from aiohttp import web

from billing.calendar import HOUR_NS
from billing.errors import BillingError
from gateway.access.roles import Right
from gateway.console.answers import download, forbidden, form_of, page
from gateway.console.frame import render
from gateway.console.sources import Sources
from gateway.console.visitor import Visitor
from gateway.console.whatif_view import whatif_view
from gateway.replay.errors import ParameterError
from gateway.replay.performance import PRESETS
from gateway.routing import POLICIES
from gateway.whatif.compare import Comparison
from gateway.whatif.question import Question, answer
from gateway.whatif.report import lines
from tracing.errors import TracingError

WINDOWS: Final = {"1h": HOUR_NS, "24h": 24 * HOUR_NS, "7d": 7 * 24 * HOUR_NS}
HOST_GIB: Final = (0, 16, 64, 256)
_ASKED: Final = ("run", "window", "policy", "host", "engine")
MAX_REQUESTS: Final = 20_000
MAX_SIMULATED: Final = 4_000
"""Requests that a page plays on simulated engines; the command line plays more."""


class WhatIfRoutes:
    """See the module. One question at a time: an answer takes a core for seconds."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._turn = asyncio.Semaphore(1)

    def routes(self) -> list[web.RouteDef]:
        """Its address."""
        return [web.get("/console/what-if", self._whatif)]

    async def _whatif(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        asked = {name: request.query.get(name, "").strip()[:200] for name in _ASKED}
        is_asked = bool(asked["run"] or asked["window"])
        trouble: str | None = None
        found: Comparison | None = None
        if is_asked:
            try:
                async with self._turn:
                    question = self._question(asked, visitor, request.query.get("tenant"))
                    found = await asyncio.to_thread(self._answer, question)
            except (ParameterError, TracingError, BillingError) as error:
                trouble = str(error)
        if found is not None and (form := form_of(request)) is not None:
            return download([asdict(line) for line in lines(found)], form, "what-if")
        html = render(
            "whatif.html",
            visitor,
            asked=asked,
            view=None if found is None else whatif_view(found),
            trouble=trouble,
            policies=list(POLICIES),
            engines=list(PRESETS),
            host_gib=HOST_GIB,
            windows=(("1h", "Last hour"), ("24h", "Last 24 hours"), ("7d", "Last 7 days")),
        )
        return page(html, 400 if trouble is not None else 200)

    def _answer(self, question: Question) -> Comparison:
        return answer(question, self._sources.traces, self._sources.books())

    def _question(self, asked: dict[str, str], visitor: Visitor, tenant: str | None) -> Question:
        engine = asked["engine"] or next(iter(PRESETS))
        if engine not in PRESETS:
            raise ParameterError(f"there is no engine {engine!r}")
        window_ns = WINDOWS.get(asked["window"])
        gib = int(asked["host"]) if asked["host"].isascii() and asked["host"].isdigit() else 0
        host_tokens = min(gib, 1 << 20) * 2**30 // PRESETS[engine].kv_bytes_per_token
        policies = (asked["policy"],) if asked["policy"] else ()
        is_simulated = bool(policies or host_tokens)
        return Question(
            run_id=asked["run"] or None,
            tenant=(tenant or None) if visitor.tenant is None else visitor.tenant,
            since_ns=None if window_ns is None else self._sources.clock() - window_ns,
            policies=policies,
            more_host_tokens=host_tokens,
            engine=engine,
            limit=MAX_SIMULATED if is_simulated else MAX_REQUESTS,
        )
