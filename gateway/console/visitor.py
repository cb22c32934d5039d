"""Who looks at the console: whose data, which pages, and the word that their forms must bring back."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from gateway.access.roles import ALL_RIGHTS, Right
from gateway.errors import Forbidden
from gateway.identity import KeyRing, presented_secret

_DOMAIN: Final = b"keepwarm-console-form"


@dataclass(frozen=True, slots=True)
class Visitor:
    """A visitor. ``tenant``: whose data may be seen (``None``: everybody's); ``form_word``: what a form of this visitor
    brings back, which no other site's page can know."""

    tenant: str | None = None
    rights: frozenset[Right] = ALL_RIGHTS
    name: str = "anonymous"
    form_word: str = ""

    def may(self, right: Right) -> bool:
        """Tell whether the visitor has the right."""
        return right in self.rights


EVERYBODY: Final = Visitor()


def visitor_of(keys: KeyRing, headers: Mapping[str, str]) -> Visitor:
    """Return who asks. Raises ``Unauthorized``, and ``Forbidden`` for a key that may see nothing here."""
    try:
        caller = keys.authenticate(headers, Right.SEE_RUNS)
    except Forbidden:
        caller = keys.authenticate(headers, Right.SEE_COSTS)
    secret = presented_secret(headers) or ""
    word = hmac.new(sha256(secret.encode(errors="surrogateescape")).digest(), _DOMAIN, "sha256").hexdigest()
    return Visitor(None if caller.is_admin else caller.identity.tenant, caller.rights, caller.identity.key_id, word)


def is_own_form(visitor: Visitor, headers: Mapping[str, str], word: object) -> bool:
    """Tell whether a form was sent from one of our own pages: browsers say where it comes from, and it knows the word.

    A browser adds a visitor's password to whatever any page makes it send, so that the password alone proves nothing.
    """
    site, origin, host = headers.get("sec-fetch-site"), headers.get("origin"), headers.get("host")
    if site not in (None, "same-origin") or (origin is not None and origin.partition("://")[2] != host):
        return False
    return isinstance(word, str) and hmac.compare_digest(word.encode(), visitor.form_word.encode())
