"""Who asks: API keys, what they may do, and the cache salt that follows from their tenant.

Secrets are kept as SHA-256 only. Keys are long random strings, so that a slow hash would protect nothing and cost every
request. The salt of a request is a digest over its tenant and over what the client itself wished as ``cache_salt``: a
client can narrow its namespace and never leave it, whatever it sends.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from urllib.parse import urlsplit

from billing.budgets import Budget
from gateway.access.roles import ALL_RIGHTS, RIGHTS, Right, Role
from gateway.errors import Forbidden, KeysAway, Misdirected, Unauthorized
from gateway.limits.rules import LimitRule
from tracing.record import Identity

ANONYMOUS = Identity(tenant="default", team="default", key_id="anonymous")
_SALT_DOMAIN = b"keepwarm-salt-v1"
_KEY_HEADERS = ("x-api-key", "api-key")


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. ``is_salted``: whether its tenant has a namespace of its own in every cache.

    ``aliases``: names that mean another model for this caller alone; ``limits`` and ``budgets``: what it may take, its
    team's and tenant's included; ``shows``: the headers that its answers carry (``None``: the gateway's own choice).
    """

    identity: Identity
    is_salted: bool
    models: frozenset[str] | None = None
    rights: frozenset[Right] = RIGHTS[Role.USER]
    aliases: Mapping[str, str] = field(default_factory=dict)
    limits: tuple[LimitRule, ...] = ()
    budgets: tuple[Budget, ...] = ()
    shows: frozenset[str] | None = None
    repairs: tuple[str, ...] = ()  # policies of prefix repair

    @property
    def is_admin(self) -> bool:
        """Whether it may see every tenant, and administer."""
        return Right.ADMINISTER in self.rights

    def may_use(self, model: str) -> bool:
        """Tell whether the caller's key allows the model."""
        return self.models is None or model in self.models


@dataclass(frozen=True, slots=True)
class Key:
    """One API key. ``digest`` is the SHA-256 of the secret in hex; ``expires_ns``: when it stops, if ever."""

    digest: str
    caller: Caller
    expires_ns: int | None = None


class KeyRing:
    """The keys of a gateway. An empty ring lets everybody in, as one tenant without a salt (loopback only).

    ``authenticate`` is one digest and one look-up, whatever there is: what a key means was put together when it was
    read. A digest cannot be steered towards that of a key, so that the time of a look-up tells nothing about keys.
    """

    def __init__(self, keys: Iterable[Key] = (), *, hosts: frozenset[str] | None = None) -> None:
        """``keys``: those that stay whatever happens; ``hosts``: the names that requests may be for (``None``: any)."""
        self._fixed = {key.digest: key for key in keys}
        self._keys: Mapping[str, Key] = self._fixed
        self._is_open, self._hosts = not self._fixed, hosts
        self.is_trusted = True  # what is known of stored keys is fresh enough to act by

    @property
    def is_open(self) -> bool:
        """Whether everybody on this machine is let in, since there is no key."""
        return self._is_open

    def replace(self, stored: Iterable[Key], fixed: Iterable[Key], *, is_used: bool) -> None:
        """Take these in the place of all keys. ``is_used``: some are stored, or were once: no more open doors."""
        self._fixed = {key.digest: key for key in fixed}
        self._keys = {**{key.digest: key for key in stored}, **self._fixed}
        self._is_open = not self._fixed and not is_used

    def authenticate(self, headers: Mapping[str, str], right: Right = Right.INFER) -> Caller:
        """Return who asks, if it may do so.

        Raises ``Unauthorized``, which tells nothing about the keys there are; ``Forbidden`` for a key without the
        right and, without any keys, for what a web page from elsewhere makes a browser ask; ``Misdirected``.
        """
        if self._hosts is not None:
            refuse_other_hosts(headers.get("host"), self._hosts)
        if self._is_open:
            _refuse_strangers(headers)
            return _ANYBODY
        secret = presented_secret(headers)
        key = self._keys.get(digest_of(secret)) if secret else None
        if key is None:
            raise Unauthorized("a valid API key is needed: 'Authorization: Bearer …' or 'x-api-key: …'")
        if key.expires_ns is not None and key.expires_ns <= time.time_ns():
            raise Unauthorized("this API key has expired", code="expired_api_key")
        if not self.is_trusted and key.digest not in self._fixed:
            raise KeysAway("keys cannot be checked now", retry_after_s=5)
        if right not in key.caller.rights:
            raise Forbidden(f"this key's role does not allow it: {right.value} is needed")
        return key.caller

    def authorize_admin(self, headers: Mapping[str, str]) -> Caller:
        """Return who asks, if it may administer. Raises ``Unauthorized``, ``Forbidden``."""
        return self.authenticate(headers, Right.ADMINISTER)


_ANYBODY = Caller(ANONYMOUS, is_salted=False, rights=ALL_RIGHTS)


def refuse_other_hosts(host: str | None, allowed: frozenset[str]) -> None:
    """Raises ``Misdirected`` for a request that was meant for another host. ``allowed``: names in lower case."""
    try:
        name = urlsplit(f"//{host or ''}").hostname
    except ValueError:
        name = None
    if name not in allowed:
        raise Misdirected("this host is not served here")


def _refuse_strangers(headers: Mapping[str, str]) -> None:
    """Without keys whoever is on this machine may ask, and a browser is, whatever page it shows: what it sends names
    the page's origin, or, where the page's name was made to lead here, a host that is not this machine's."""
    host, origin = headers.get("host"), headers.get("origin")
    if not (host is None or _is_here(host)) or not (origin is None or _is_here(origin.partition("://")[2])):
        raise Forbidden("without keys only this machine's own names and pages are answered; add [[keys]] for others")


def _is_here(place: str) -> bool:
    """Tell whether ``host[:port]`` is a name of the loopback interface."""
    try:
        host = urlsplit(f"//{place}").hostname or ""
        return host == "localhost" or host.endswith(".localhost") or ip_address(host).is_loopback
    except ValueError:
        return False


def presented_secret(headers: Mapping[str, str]) -> str | None:
    """Return the secret in whichever header carries one; names must be matched case-insensitively by ``headers``."""
    scheme, _, secret = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and secret.strip():
        return secret.strip()
    if scheme.lower() == "basic":  # what a browser can send to the console: any user, the key as password
        try:
            return base64.b64decode(secret, validate=True).decode().partition(":")[2] or None
        except ValueError:
            return None
    return next((value.strip() for name in _KEY_HEADERS if (value := headers.get(name))), None)


def digest_of(secret: str) -> str:
    """Return how a secret is kept."""
    return hashlib.sha256(secret.encode(errors="surrogateescape")).hexdigest()


def effective_salt(caller: Caller, wished: str | None) -> str | None:
    """Return the cache salt of a request: ``None`` only for an unsalted caller that wished for none."""
    if not caller.is_salted and wished is None:
        return None
    digest = hashlib.sha256(_SALT_DOMAIN)
    for part in (caller.identity.tenant if caller.is_salted else None, wished):
        encoded = b"" if part is None else part.encode(errors="surrogatepass")
        digest.update(b"\x00" if part is None else b"\x01" + len(encoded).to_bytes(8, "little") + encoded)
    return digest.hexdigest()[:32]


def new_secret() -> str:
    """Return a fresh API key."""
    return f"sk-kw-{secrets.token_urlsafe(32)}"
