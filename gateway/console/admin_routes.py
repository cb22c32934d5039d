"""Settings and keys over HTTP: what holds, without secrets; only forms of our own pages make and revoke keys."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final
from urllib.parse import parse_qs

from aiohttp import web

from gateway.access.errors import AccessError, AccessRefused
from gateway.access.records import Actor
from gateway.access.roles import Right, Role
from gateway.bodies import whole_body
from gateway.console.answers import download, forbidden, form_of, page
from gateway.console.frame import render
from gateway.console.key_desk import KeyDesk
from gateway.console.settings_view import setting_sections
from gateway.console.sources import Sources
from gateway.console.visitor import Visitor, is_own_form
from gateway.errors import BadRequest

_MAX_FORM_BYTES: Final = 16 << 10
_FORM_TYPE: Final = "application/x-www-form-urlencoded"


class AdminRoutes:
    """See the module."""

    def __init__(self, sources: Sources) -> None:
        self._sources = sources

    def routes(self) -> list[web.RouteDef]:
        """Their addresses."""
        return [
            web.get("/console/settings", self._settings),
            web.get("/console/keys", self._keys),
            web.post("/console/keys", self._create),
            web.post("/console/keys/{key_id}/revoke", self._revoke),
        ]

    async def _settings(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        sections = setting_sections(self._sources.settings, self._sources.default_settings)
        if (form := form_of(request)) is not None:
            rows = [
                {"path": row.path, "value": row.value, "changed": row.is_changed} for s in sections for row in s.rows
            ]
            return download(rows, form, "settings")
        return page(render("settings.html", visitor, sections=sections))

    async def _keys(self, request: web.Request) -> web.Response:
        visitor = self._sources.visitor_of(request)
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        return await self._keys_page(visitor)

    async def _create(self, request: web.Request) -> web.Response:
        def make(desk: KeyDesk, form: dict[str, list[str]], actor: Actor) -> str | None:
            word = {name: values[0].strip() for name, values in form.items()}
            return desk.create(
                word.get("id", ""), word.get("tenant", ""), word.get("team", ""), form.get("role", []),
                word.get("note", ""), actor,
            )  # fmt: skip

        return await self._change(request, make)

    async def _revoke(self, request: web.Request) -> web.Response:
        def end(desk: KeyDesk, form: dict[str, list[str]], actor: Actor) -> str | None:
            desk.store.revoke_key(request.match_info["key_id"], actor)
            return None

        return await self._change(request, end)

    async def _change(
        self, request: web.Request, change: Callable[[KeyDesk, dict[str, list[str]], Actor], str | None]
    ) -> web.Response:
        visitor, desk = self._sources.visitor_of(request), self._sources.keys
        if not visitor.may(Right.ADMINISTER):
            return forbidden(visitor, Right.ADMINISTER)
        form = await _form(request)
        if not is_own_form(visitor, request.headers, form.get("word", [""])[0]):
            return page(render("refused.html", visitor), 403)
        if desk is None:
            return await self._keys_page(visitor, trouble="There is no store of keys here.")
        actor = Actor(visitor.name, request.remote or "console")
        try:
            secret = await asyncio.to_thread(change, desk, form, actor)
        except AccessRefused as error:
            return await self._keys_page(visitor, trouble=str(error), status=400)
        except AccessError as error:
            return await self._keys_page(visitor, trouble=str(error), status=503)
        if desk.changed is not None:
            await desk.changed()
        if secret is None:
            raise web.HTTPSeeOther("/console/keys")
        return await self._keys_page(visitor, secret=secret, made=form.get("id", [""])[0])

    async def _keys_page(
        self,
        visitor: Visitor,
        *,
        trouble: str | None = None,
        secret: str | None = None,
        made: str = "",
        status: int = 200,
    ) -> web.Response:
        desk = self._sources.keys
        rows, audit = [], []
        if desk is not None:
            try:
                rows = await asyncio.to_thread(desk.rows, self._sources.clock())
                audit = await asyncio.to_thread(desk.audit)
            except AccessError as error:
                trouble = trouble or str(error)
        html = render(
            "keys.html", visitor, rows=rows, audit=audit, fixed=() if desk is None else desk.fixed, roles=list(Role),
            trouble=trouble, secret=secret, made=made, has_store=desk is not None,
        )  # fmt: skip
        return page(html, status)


async def _form(request: web.Request) -> dict[str, list[str]]:
    """Return the fields of a form as our own pages send them. Raises ``GatewayError`` for any other body."""
    if request.content_type != _FORM_TYPE:
        raise BadRequest(f"a form comes as {_FORM_TYPE}", code="unsupported_media_type")
    body = await whole_body(request, _MAX_FORM_BYTES)
    try:
        return parse_qs(body.decode("ascii"), keep_blank_values=True, errors="replace", max_num_fields=64)
    except ValueError:
        raise BadRequest("the form could not be read", code="body_broken") from None
