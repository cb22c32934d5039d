"""Whether an engine is inside the operator's own network, as far as its address tells. Pure: no name is looked up.

Requests hold what nobody outside may read. So an instance outside gets no request for a model that instances inside
serve, or may serve, unless its entry allows it by name (``takes_over``): neither when they fail nor when they are busy.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

_OWN_SUFFIXES = (".local", ".localhost", ".internal", ".lan", ".home.arpa", ".svc", ".cluster.local", ".intranet")


def is_own(url: str) -> bool:
    """Tell whether an address is private: loopback, a private range, a name without a dot or of a private domain."""
    host = (urlsplit(url).hostname or "").rstrip(".")
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return "." not in host or host.endswith(_OWN_SUFFIXES)
    return not address.is_global
