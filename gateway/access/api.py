"""``/admin/v1``: keys, tenants, teams, limits, aliases and the audit log over HTTP, for keys with the role ``admin``.

Every body is strict: a member that is not known is refused. A secret stands in one answer only, that of the request
that made it. What is changed counts in this process, and in its workers, before the answer goes out.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from gateway.access.errors import AccessError, AccessRefused, AccessUnavailable
from gateway.access.records import (
    DEFAULT,
    Actor,
    LimitKind,
    NewKey,
    Period,
    StoredKey,
    StoredLimit,
    Subject,
)
from gateway.access.roles import Role
from gateway.access.shown import Json, shown_alias, shown_entry, shown_key, shown_limit, shown_team, shown_tenant
from gateway.access.store import AccessStore
from gateway.access.words import moment_ns, money_limit, span_s
from gateway.bodies import FORM_BYTES, whole_body
from gateway.errors import BadRequest, Conflict, GatewayError, KeysAway, NotFound
from gateway.identity import KeyRing
from gateway.limits.rules import Level, Outage
from gateway.settings.callers import RepairPolicy
from gateway.settings.serving import AnswerHeader

ROOT = "/admin/v1"
MOST_ENTRIES = 1000
_HEADERS = {"cache-control": "no-store"}
_Form = TypeVar("_Form", bound=msgspec.Struct)
_Found = TypeVar("_Found")


class NewKeyForm(msgspec.Struct, forbid_unknown_fields=True):
    """What a key shall be."""

    id: str
    tenant: str = DEFAULT
    team: str = DEFAULT
    roles: list[Role] = msgspec.field(default_factory=lambda: [Role.USER])
    models: list[str] | None = None
    answer_headers: list[AnswerHeader] | None = None
    repairs: list[RepairPolicy] = msgspec.field(default_factory=list)
    note: str = ""
    expires_at: str | None = None  # a moment, or a span from now


class RepairsForm(msgspec.Struct, forbid_unknown_fields=True):
    """The policies of prefix repair that see to what a key sends."""

    repairs: list[RepairPolicy]


class RotationForm(msgspec.Struct, forbid_unknown_fields=True):
    """For how long what a key had is still good."""

    overlap: str = "24h"


class GroupForm(msgspec.Struct, forbid_unknown_fields=True):
    """A tenant, or a team."""

    models: list[str] | None = None
    disabled: bool = False


class LimitForm(msgspec.Struct, forbid_unknown_fields=True):
    """A limit. ``amount``: a number, or for money a decimal number in a text."""

    level: Level
    subject: str
    kind: LimitKind
    amount: int | float | str
    period: Period | None = None
    on_outage: Outage | None = None


class AliasForm(msgspec.Struct, forbid_unknown_fields=True):
    """A name that means a model."""

    level: Level
    subject: str
    name: str
    model: str


class AccessApi:
    """The routes. ``changed`` is awaited after each change; ``peer`` tells where a request comes from."""

    def __init__(
        self,
        store: AccessStore,
        keys: KeyRing,
        *,
        fixed: Sequence[str],
        changed: Callable[[], Awaitable[object]],
        peer: Callable[[web.Request], str],
    ) -> None:
        """``fixed``: ids of the settings' keys, which are shown and cannot be changed here."""
        self._store, self._keys, self._fixed, self._changed, self._peer = store, keys, list(fixed), changed, peer

    def routes(self) -> list[web.RouteDef]:
        """Return the routes."""
        team = f"{ROOT}/tenants/{{tenant}}/teams"
        return [
            web.get(f"{ROOT}/keys", self._list_keys),
            web.post(f"{ROOT}/keys", self._create_key),
            web.get(f"{ROOT}/keys/{{id}}", self._show_key),
            web.put(f"{ROOT}/keys/{{id}}/repairs", self._set_repairs),
            web.post(f"{ROOT}/keys/{{id}}/rotate", self._rotate_key),
            web.post(f"{ROOT}/keys/{{id}}/revoke", self._revoke_key),
            web.get(f"{ROOT}/tenants", self._list_tenants),
            web.put(f"{ROOT}/tenants/{{tenant}}", self._put_tenant),
            web.get(team, self._list_teams),
            web.put(f"{team}/{{team}}", self._put_team),
            web.get(f"{ROOT}/limits", self._list_limits),
            web.put(f"{ROOT}/limits", self._set_limit),
            web.delete(f"{ROOT}/limits", self._remove_limit),
            web.get(f"{ROOT}/aliases", self._list_aliases),
            web.put(f"{ROOT}/aliases", self._set_alias),
            web.delete(f"{ROOT}/aliases", self._remove_alias),
            web.get(f"{ROOT}/audit", self._audit),
        ]

    # --- keys ---

    async def _list_keys(self, request: web.Request) -> web.Response:
        keys = await self._ask(request, lambda: self._store.keys(request.query.get("tenant")))
        return _answer({"keys": [shown_key(key) for key in keys], "settings": self._fixed})

    async def _create_key(self, request: web.Request) -> web.Response:
        actor, form = self._actor(request), await _form(request, NewKeyForm)
        if form.id in self._fixed:
            raise Conflict(f"the settings have a key {form.id!r}")
        new = NewKey(
            form.id,
            form.tenant,
            form.team,
            tuple(form.roles),
            None if form.models is None else tuple(form.models),
            None if form.answer_headers is None else tuple(form.answer_headers),
            form.note,
            None if form.expires_at is None else _told(moment_ns, form.expires_at, time.time_ns()),
            tuple(form.repairs),
        )
        return _with_secret(*await self._change(lambda: self._store.create_key(new, actor)), status=201)

    async def _show_key(self, request: web.Request) -> web.Response:
        key = await self._ask(request, lambda: self._store.key(request.match_info["id"]))
        return _answer({"key": shown_key(key)})

    async def _set_repairs(self, request: web.Request) -> web.Response:
        actor, form, key_id = self._actor(request), await _form(request, RepairsForm), request.match_info["id"]
        changed = await self._change(lambda: self._store.set_repairs(key_id, form.repairs, actor))
        return _answer({"key": shown_key(changed)})

    async def _rotate_key(self, request: web.Request) -> web.Response:
        actor, form = self._actor(request), await _form(request, RotationForm)
        overlap_s, key_id = _told(span_s, form.overlap), request.match_info["id"]
        return _with_secret(*await self._change(lambda: self._store.rotate_key(key_id, overlap_s, actor)))

    async def _revoke_key(self, request: web.Request) -> web.Response:
        actor, key_id = self._actor(request), request.match_info["id"]
        return _answer({"key": shown_key(await self._change(lambda: self._store.revoke_key(key_id, actor)))})

    # --- tenants and teams ---

    async def _list_tenants(self, request: web.Request) -> web.Response:
        tenants = await self._ask(request, self._store.tenants)
        return _answer({"tenants": [shown_tenant(tenant) for tenant in tenants]})

    async def _put_tenant(self, request: web.Request) -> web.Response:
        actor, form, name = self._actor(request), await _form(request, GroupForm), request.match_info["tenant"]
        put = await self._change(lambda: self._store.put_tenant(name, form.models, disabled=form.disabled, actor=actor))
        return _answer({"tenant": shown_tenant(put)})

    async def _list_teams(self, request: web.Request) -> web.Response:
        teams = await self._ask(request, lambda: self._store.teams(request.match_info["tenant"]))
        return _answer({"teams": [shown_team(team) for team in teams]})

    async def _put_team(self, request: web.Request) -> web.Response:
        actor, form = self._actor(request), await _form(request, GroupForm)
        tenant, name = request.match_info["tenant"], request.match_info["team"]
        put = await self._change(
            lambda: self._store.put_team(tenant, name, form.models, disabled=form.disabled, actor=actor)
        )
        return _answer({"team": shown_team(put)})

    # --- limits and aliases ---

    async def _list_limits(self, request: web.Request) -> web.Response:
        limits = await self._ask(request, self._store.limits)
        return _answer({"limits": [shown_limit(limit) for limit in limits]})

    async def _set_limit(self, request: web.Request) -> web.Response:
        actor, limit = self._actor(request), _told(limit_of, await _form(request, LimitForm))
        await self._change(lambda: self._store.set_limit(limit, actor))
        return _answer({"limit": shown_limit(limit)})

    async def _remove_limit(self, request: web.Request) -> web.Response:
        actor, query = self._actor(request), request.query
        try:
            subject = Subject(Level(query.get("level", "")), query.get("subject", ""))
            kind = LimitKind(query.get("kind", ""))
            period = Period(query["period"]) if "period" in query else _usual(kind)
        except ValueError as error:
            raise BadRequest(f"say level, subject, kind and period: {error}") from None
        await self._change(lambda: self._store.remove_limit(subject, kind, period, actor))
        return _answer({"removed": True})

    async def _list_aliases(self, request: web.Request) -> web.Response:
        aliases = await self._ask(request, self._store.aliases)
        return _answer({"aliases": [shown_alias(alias) for alias in aliases]})

    async def _set_alias(self, request: web.Request) -> web.Response:
        actor, form = self._actor(request), await _form(request, AliasForm)
        subject = Subject(form.level, form.subject)
        await self._change(lambda: self._store.set_alias(subject, form.name, form.model, actor))
        return _answer({"alias": msgspec.to_builtins(form)})

    async def _remove_alias(self, request: web.Request) -> web.Response:
        actor, query = self._actor(request), request.query
        try:
            subject = Subject(Level(query.get("level", "")), query.get("subject", ""))
        except ValueError as error:
            raise BadRequest(f"say level, subject and name: {error}") from None
        await self._change(lambda: self._store.set_alias(subject, query.get("name", ""), None, actor))
        return _answer({"removed": True})

    # --- the log ---

    async def _audit(self, request: web.Request) -> web.Response:
        limit = min(_number(request, "limit") or 100, MOST_ENTRIES)
        before, subject = _number(request, "before"), request.query.get("subject")
        entries = await self._ask(request, lambda: self._store.audit(limit, before, subject))
        return _answer({"entries": [shown_entry(entry) for entry in entries]})

    # --- how ---

    def _actor(self, request: web.Request) -> Actor:
        caller = self._keys.authorize_admin(request.headers)
        return Actor(caller.identity.key_id, self._peer(request))

    async def _ask(self, request: web.Request, read: Callable[[], _Found]) -> _Found:
        self._keys.authorize_admin(request.headers)
        return await _in_thread(read)

    async def _change(self, change: Callable[[], _Found]) -> _Found:
        found = await _in_thread(change)
        await self._changed()
        return found


def limit_of(form: LimitForm) -> StoredLimit:
    """Return the limit that a form describes. Raises ``AccessRefused``."""
    subject = Subject(form.level, form.subject)
    if form.kind is LimitKind.MONEY:
        nano, period = money_limit(f"{form.amount}/{(form.period or Period.MONTH).value}")
        return StoredLimit(subject, form.kind, period, nano, form.on_outage or Outage.DENY)
    text = f"{form.amount:.0f}" if isinstance(form.amount, float) and form.amount.is_integer() else str(form.amount)
    if not re.fullmatch(r"-?[0-9]{1,18}", text, re.ASCII):
        raise AccessRefused("amount: a whole number")
    period = form.period or _usual(form.kind)
    return StoredLimit(subject, form.kind, period, int(text), form.on_outage or Outage.ADMIT)


def _usual(kind: LimitKind) -> Period:
    return {LimitKind.MONEY: Period.MONTH, LimitKind.CONCURRENCY: Period.NONE}.get(kind, Period.MINUTE)


async def _form(request: web.Request, kind: type[_Form]) -> _Form:
    body = await whole_body(request, FORM_BYTES)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except msgspec.MsgspecError as error:
        raise BadRequest(str(error)) from None
    except UnicodeDecodeError:
        raise BadRequest("the body is no UTF-8") from None


async def _in_thread(work: Callable[[], _Found]) -> _Found:
    try:
        return await asyncio.to_thread(work)
    except AccessError as error:
        raise _shaped(error) from None


def _told(read: Callable[..., _Found], *words: object) -> _Found:
    try:
        return read(*words)
    except AccessRefused as error:
        raise BadRequest(str(error)) from None


def _shaped(error: AccessError) -> GatewayError:
    if isinstance(error, AccessUnavailable):
        return KeysAway("the store of keys cannot be used now", retry_after_s=5)
    if isinstance(error, AccessRefused):
        return NotFound(str(error)) if error.is_missing else Conflict(str(error))
    return GatewayError("the store of keys cannot be used")


def _number(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 15):
        raise BadRequest(f"{name}: a whole number", param=name)
    return int(text)


def _with_secret(key: StoredKey, secret: str, *, status: int = 200) -> web.Response:
    return _answer({"key": shown_key(key), "secret": secret}, status=status)


def _answer(value: Json, *, status: int = 200) -> web.Response:
    return web.json_response(value, status=status, headers=_HEADERS)
