"""Who asks: API keys, what they may do, and the cache salt that follows from their tenant.

Secrets are kept as SHA-256 only. Keys are long random strings, so that a slow hash would protect nothing and cost every
request. The salt of a request is a digest over its tenant and over what the client itself wished as ``cache_salt``: a
client can narrow its namespace and never leave it, whatever it sends.
"""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from gateway.errors import Forbidden, Unauthorized
from tracing.record import Identity

ANONYMOUS = Identity(tenant="default", team="default", key_id="anonymous")
_SALT_DOMAIN = b"keepwarm-salt-v1"
_KEY_HEADERS = ("x-api-key", "api-key")


@dataclass(frozen=True, slots=True)
class Key:
    """One API key. ``digest`` is the SHA-256 of the secret in hex."""

    digest: str
    identity: Identity
    models: frozenset[str] | None = None  # None: all
    is_admin: bool = False


@dataclass(frozen=True, slots=True)
class Caller:
    """An authenticated caller. ``is_salted``: whether its tenant has a namespace of its own in every cache."""

    identity: Identity
    is_salted: bool
    models: frozenset[str] | None = None
    is_admin: bool = False  # may see every tenant, and administer instances

    def may_use(self, model: str) -> bool:
        """Tell whether the caller's key allows the model."""
        return self.models is None or model in self.models


class KeyRing:
    """The keys of a gateway. An empty ring lets everybody in, as one tenant without a salt (loopback only)."""

    def __init__(self, keys: Iterable[Key] = ()) -> None:
        self._keys = {key.digest: key for key in keys}

    def authenticate(self, headers: Mapping[str, str]) -> Caller:
        """Return who asks.

        Raises ``Unauthorized``, which tells nothing about the keys there are; without any, ``Forbidden`` for what a web
        page from elsewhere makes a browser ask.
        """
        if not self._keys:
            _refuse_strangers(headers)
            return Caller(ANONYMOUS, is_salted=False, is_admin=True)
        secret = presented_secret(headers)
        key = self._keys.get(digest_of(secret)) if secret else None
        if key is None:
            raise Unauthorized("a valid API key is needed: 'Authorization: Bearer …' or 'x-api-key: …'")
        return Caller(key.identity, is_salted=True, models=key.models, is_admin=key.is_admin)

    def authorize_admin(self, headers: Mapping[str, str]) -> Caller:
        """Return who asks, if it may administer. Raises ``Unauthorized``, ``Forbidden``."""
        caller = self.authenticate(headers)
        if not caller.is_admin:
            raise Forbidden("this needs a key with admin rights")
        return caller


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
