"""Who is really at the other end where proxies stand between: the headers of those that were named are believed."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

Network = IPv4Network | IPv6Network
Address = IPv4Address | IPv6Address
_MOST_HOPS = 32


class Peers:
    """Tells a request's client. Without trusted proxies it is whoever is connected, whatever headers say."""

    def __init__(self, trusted: Sequence[Network] = ()) -> None:
        self._trusted = tuple(trusted)

    def client(self, connected: str | None, forwarded_for: str | None) -> str:
        """Return the address of the client: the last one in ``X-Forwarded-For`` that is no trusted proxy's.

        ``connected``: the other end of the connection. What stands before an address that nobody vouches for, or that
        is none, is the client's own invention.
        """
        at = _address(connected or "")
        if at is None or not self._trusts(at):
            return connected or "unknown"
        hops = (forwarded_for or "").split(",")[-_MOST_HOPS:]
        for hop in reversed([hop.strip() for hop in hops if hop.strip()]):
            told = _address(hop)
            if told is None:
                break
            at = told
            if not self._trusts(at):
                break
        return str(at)

    def _trusts(self, address: Address) -> bool:
        plain = address.ipv4_mapped if isinstance(address, IPv6Address) and address.ipv4_mapped else address
        return any(plain in network for network in self._trusted)


def _address(text: str) -> Address | None:
    """Return an address, written with or without a port or brackets."""
    text = text.strip('"')
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        return ip_address(text)
    except ValueError:
        return None
