"""Instances from Kubernetes: the ready endpoints of a service, as its EndpointSlices tell them.

List, then watch from the list's ``resourceVersion`` on; list again when that version is gone (410), when a watch ends
with an error, and each ``relist_s`` in any case, so that nothing that a watch lost can stay. The service account's
token is read anew for every request, since it changes; see ``docs/failover.md`` for the role that it needs.

Source: Kubernetes API concepts (efficient detection of changes), ``discovery.k8s.io/v1``.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from gateway.discovery.base import DiscoveryError, Make, Place, Tell, specs_of
from gateway.instance import InstanceSpec

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_MAX_LINE_BYTES = 1 << 22
_PAGE = 500
_LEAST_WATCH_S = 1.0  # a server that ends watches at once is not asked for ever more
Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """``port``: a port's name or number in the slices; ``None``: the only one. ``token`` and ``ca`` are files."""

    service: str
    namespace: str
    prefix: str
    port: str | int | None = None
    api: str = "https://kubernetes.default.svc"
    token: Path | None = ACCOUNT / "token"
    ca: Path | None = ACCOUNT / "ca.crt"
    watch_s: int = 290
    relist_s: float = 300.0
    timeout_s: float = 10.0


class _Gone(Exception):
    """The version that a watch was to begin at is too old."""


class KubernetesSource:
    """Follows one service."""

    def __init__(self, options: KubernetesOptions, make: Make) -> None:
        self._options, self._make = options, make
        self.name = f"Kubernetes service {options.namespace}/{options.service}"
        self._slices: dict[str, Json] = {}

    async def run(self, tell: Tell) -> None:
        """See ``Source``."""
        async with self._session() as session:
            while True:
                try:
                    await self._follow(session, tell)
                except _Gone:
                    pass  # it is listed anew

    async def _follow(self, session: aiohttp.ClientSession, tell: Tell) -> None:
        """List once, and watch until it is time to list again."""
        version = await self._list(session)
        listed_s = time.monotonic()
        tell(self._specs())
        while time.monotonic() - listed_s < self._options.relist_s:
            began_s = time.monotonic()
            async with aclosing(self._watch(session, version)) as versions:
                async for reached in versions:
                    version = reached or version
                    tell(self._specs())
            await asyncio.sleep(max(_LEAST_WATCH_S - (time.monotonic() - began_s), 0))

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[aiohttp.ClientSession]:
        options = self._options
        tls: ssl.SSLContext | bool = True
        if options.api.startswith("https") and options.ca is not None:
            try:
                tls = await asyncio.to_thread(ssl.create_default_context, cafile=str(options.ca))
            except OSError as error:
                raise DiscoveryError(f"{options.ca}: {error.strerror}") from None
        connector = aiohttp.TCPConnector(ssl=tls)
        async with aiohttp.ClientSession(connector=connector, read_bufsize=_MAX_LINE_BYTES) as session:
            yield session

    async def _list(self, session: aiohttp.ClientSession) -> str:
        """Take in all slices; return the version that they are of."""
        found: dict[str, Json] = {}
        more: dict[str, str] = {"limit": str(_PAGE)}
        while True:
            async with self._get(session, more, self._options.timeout_s) as response:
                listed = _object(await response.read())
            for item in _list_of(listed, "items"):
                found[_name(item)] = item
            meta = _of(listed, "metadata")
            following = _text(meta.get("continue"))
            if not following:
                self._slices = found
                return _text(meta.get("resourceVersion"))
            more = {"limit": str(_PAGE), "continue": following}

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncGenerator[str, None]:
        """Take in changes; yields the version behind each. Ends when the server ends the watch. Raises ``_Gone``."""
        options = self._options
        asked = {"watch": "1", "resourceVersion": version, "allowWatchBookmarks": "true",
                 "timeoutSeconds": str(options.watch_s)}  # fmt: skip
        async with self._get(session, asked, options.watch_s + options.timeout_s) as response:
            while line := await response.content.readline():
                event = _object(line)
                kind, item = event.get("type"), _of(event, "object")
                if kind == "ERROR":
                    if item.get("code") == 410:
                        raise _Gone
                    raise DiscoveryError(f"the watch ended with {item.get('reason')}")
                if kind == "DELETED":
                    self._slices.pop(_name(item), None)
                elif kind in ("ADDED", "MODIFIED"):
                    self._slices[_name(item)] = item
                yield _text(_of(item, "metadata").get("resourceVersion"))

    @asynccontextmanager
    async def _get(
        self, session: aiohttp.ClientSession, query: Mapping[str, str], limit_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        options, headers = self._options, {"accept": "application/json"}
        if options.token is not None:
            try:
                headers["authorization"] = f"Bearer {(await asyncio.to_thread(options.token.read_text)).strip()}"
            except OSError as error:
                raise DiscoveryError(f"{options.token}: {error.strerror}") from None
        url = f"{options.api}/apis/discovery.k8s.io/v1/namespaces/{options.namespace}/endpointslices"
        selected = {"labelSelector": f"kubernetes.io/service-name={options.service}", **query}
        limit = aiohttp.ClientTimeout(total=limit_s)
        try:
            async with session.get(url, params=selected, headers=headers, timeout=limit) as response:
                if response.status == 410:
                    raise _Gone
                if response.status != 200:
                    raise DiscoveryError(f"the API server answers {response.status}")
                yield response
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise DiscoveryError(f"the API server cannot be asked: {type(error).__name__}") from None

    def _specs(self) -> Mapping[str, InstanceSpec]:
        return specs_of(places_of(self._slices.values(), self._options), self._make)


def places_of(slices: Iterable[Json], options: KubernetesOptions) -> dict[str, Place]:
    """Return where the ready endpoints of these slices listen, by pod. An endpoint without an address is none.

    A pod with addresses of two families is one instance: its IPv4 address counts, whatever comes first.
    """
    found: dict[str, Place] = {}
    for item in sorted(slices, key=lambda each: (each.get("addressType") == "IPv4", _name(each))):
        port = _port(item, options.port)
        for endpoint in _list_of(item, "endpoints"):
            conditions = _of(endpoint, "conditions")
            if conditions.get("ready") is False or conditions.get("terminating") is True or port is None:
                continue
            addresses = endpoint.get("addresses")
            address = _text(addresses[0]) if isinstance(addresses, list) and addresses else ""
            if not address:
                continue
            pod = _text(_of(endpoint, "targetRef").get("name")) or address.replace(":", "-")
            found[f"{options.prefix}-{pod}"] = Place(address, port)
    return found


def _port(item: Json, wanted: str | int | None) -> int | None:
    ports = _list_of(item, "ports")
    for port in ports:
        number = port.get("port")
        if isinstance(number, int) and (wanted in (number, port.get("name")) or (wanted is None and len(ports) == 1)):
            return number
    return None


def _object(data: bytes) -> Json:
    try:
        return msgspec.json.decode(data, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        raise DiscoveryError("the API server answers no JSON object") from None


def _of(value: Json, name: str) -> Json:
    inner = value.get(name)
    return inner if isinstance(inner, dict) else {}


def _list_of(value: object, name: str) -> list[Json]:
    inner = value.get(name) if isinstance(value, Mapping) else None
    return [item for item in inner if isinstance(item, dict)] if isinstance(inner, list) else []


def _name(item: Json) -> str:
    return _text(_of(item, "metadata").get("name"))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
