"""The fleet over HTTP: instances, their page stores, the index, and which prefixes are held where."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import web

from gateway.access.roles import Right
from gateway.console.answers import download, forbidden, form_of, page
from gateway.console.frame import render
from gateway.console.index_view import index_data, index_view
from gateway.console.instances import instance_data, instance_row
from gateway.console.prefix_map import RECORDS, HoldersOf, prefix_data, prefix_map
from gateway.console.sources import Sources
from gateway.console.stores import store_data, store_view
from tracing.record import RequestRecord

_SCANNED: Final = 5 * RECORDS
"""The newest records that are looked at for those of one tenant."""


class FleetRoutes:
    """See the module. All but the prefixes are for those who may administer."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def routes(self) -> list[web.RouteDef]:
        """Their addresses."""
        return [
            web.get("/console/instances", self._instances),
            web.get("/console/stores", self._stores),
            web.get("/console/index", self._index),
            web.get("/console/prefixes", self._prefixes),
        ]

    async def _instances(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        found = list(self._sources.instances())
        if (form := form_of(request)) is not None:
            return download([instance_data(each) for each in found], form, "instances")
        return page(render("instances.html", visitor, rows=[instance_row(each) for each in found]))

    async def _stores(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        instances = list(self._sources.instances())
        async with asyncio.TaskGroup() as group:
            tasks = {each.id: group.create_task(self._metrics(each.id)) for each in instances}
        told = {name: task.result() for name, task in tasks.items()}
        if (form := form_of(request)) is not None:
            return download(store_data(told), form, "stores")
        views = await asyncio.to_thread(lambda: [store_view(name, metrics) for name, metrics in told.items()])
        return page(render("stores.html", visitor, stores=views))

    async def _metrics(self, name: str) -> str | None:
        instance = next((each for each in self._sources.instances() if each.id == name), None)
        return None if instance is None or not instance.is_healthy else await self._sources.metrics_of(instance)

    async def _index(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        index, instances = self._sources.index, list(self._sources.instances())
        held = {} if index is None else index.held()
        if (form := form_of(request)) is not None:
            return download(index_data(instances, held), form, "index")
        view = None if index is None else index_view(index.stats(), instances, held)
        return page(render("index.html", visitor, view=view))

    async def _prefixes(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.SEE_RUNS):
            return forbidden(visitor, Right.SEE_RUNS)
        records = await asyncio.to_thread(self._newest, visitor.tenant)
        index = self._sources.index
        holders: HoldersOf | None = None if index is None else index.holders  # it belongs to the loop: no thread here
        if (form := form_of(request)) is not None:
            return download(prefix_data(records, holders), form, "prefixes")
        return page(render("prefixes.html", visitor, map=prefix_map(records, holders, self._sources.clock())))

    def _newest(self, tenant: str | None) -> list[RequestRecord]:
        wanted = RECORDS if tenant is None else _SCANNED
        found = self._sources.traces.recent(wanted)
        mine = [record for record in found if tenant in (None, record.identity.tenant)]
        return mine[-RECORDS:]
