"""The URLs by which pools are named.

::

    redis://[user:password@]host[:port][/database]      one server
    rediss://…                                          the same over TLS
    unix:///path/to/socket[?db=database]                one server beside us
    redis+sentinel://host[:port],host…/service[/database]   the master that these sentinels name
    redis+cluster://host[:port],host…                   a cluster, by some of its nodes (rediss+cluster:// over TLS)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from urllib.parse import parse_qs, unquote, urlsplit

from kvstore.errors import MediumError
from kvstore.tiers.resp import Address

_PORT = 6379
_SENTINEL_PORT = 26379


class PoolKind(Enum):
    """How the servers of a pool are found."""

    SINGLE = "single"
    SENTINEL = "sentinel"
    CLUSTER = "cluster"


@dataclass(frozen=True, slots=True)
class PoolUrl:
    """A URL taken apart. ``servers``: whom to ask first; ``service``: what sentinels call the master."""

    kind: PoolKind
    servers: tuple[Address, ...]
    service: str = ""

    @property
    def template(self) -> Address:
        """The credentials, for servers that are learned of later."""
        return replace(self.servers[0], host="", port=0)


_SCHEMES = {
    "redis": (PoolKind.SINGLE, False),
    "rediss": (PoolKind.SINGLE, True),
    "unix": (PoolKind.SINGLE, False),
    "redis+sentinel": (PoolKind.SENTINEL, False),
    "redis+cluster": (PoolKind.CLUSTER, False),
    "rediss+cluster": (PoolKind.CLUSTER, True),
}


def parse_pool_url(url: str) -> PoolUrl:
    """Take a pool's URL apart. Raises ``MediumError``, which tells nothing of a password."""
    parts = urlsplit(url)
    if parts.scheme not in _SCHEMES:
        raise MediumError(f"{without_secret(url)} is not the URL of a Redis or Valkey server")
    kind, tls = _SCHEMES[parts.scheme]
    credentials, _, hosts = parts.netloc.rpartition("@")
    username, _, password = credentials.partition(":")
    path = [unquote(part) for part in parts.path.split("/") if part]
    try:
        if parts.scheme == "unix":
            database = int(parse_qs(parts.query).get("db", ["0"])[0])
            where = Address(path=unquote(parts.path))
            hosts = ""
        else:
            service = path.pop(0) if kind is PoolKind.SENTINEL else ""
            database = int(path[0]) if path and kind is not PoolKind.CLUSTER else 0
            where = Address(tls=tls)
        where = replace(where, username=unquote(username), password=unquote(password), database=database)
        if parts.scheme == "unix":
            return PoolUrl(kind, (where,))
        port = _SENTINEL_PORT if kind is PoolKind.SENTINEL else _PORT
        servers = tuple(replace(where, host=host, port=at) for host, at in _hosts(hosts, port))
    except (ValueError, IndexError):
        raise MediumError(f"{without_secret(url)} is not a whole URL of a Redis or Valkey pool") from None
    if kind is PoolKind.SINGLE and len(servers) > 1:
        raise MediumError(f"{without_secret(url)} names several servers; redis+cluster:// does")
    return PoolUrl(kind, servers, service)


def without_secret(url: str) -> str:
    """Return the URL as it may be logged."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _hosts(text: str, port: int) -> list[tuple[str, int]]:
    """Read ``host[:port],…``; IPv6 addresses stand in brackets. Raises ``ValueError``."""
    found = []
    for item in text.split(","):
        parts = urlsplit(f"//{item}")
        found.append((parts.hostname or "localhost", parts.port or port))
    return found
