"""Instances from DNS: every address of a name, or every target of a service (SRV, RFC 2782)."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import dns.asyncresolver
import dns.exception
import dns.nameserver
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from gateway.discovery.base import DiscoveryError, Make, Place, Tell, named_by_place, specs_of

_LEAST_S = 1.0


@dataclass(frozen=True, slots=True)
class NameOptions:
    """``port``: of every address; without one the name is that of a service, whose targets tell theirs.

    ``servers``: name servers to ask, ``address`` or ``address:port``; empty: the system's.
    """

    name: str
    prefix: str
    port: int | None = None
    period_s: float = 5.0
    timeout_s: float = 3.0
    servers: tuple[str, ...] = ()


class NameSource:
    """Asks each ``period_s``, sooner where answers live shorter. A name that does not exist has no instances; a server
    that cannot be asked changes nothing."""

    def __init__(self, options: NameOptions, make: Make) -> None:
        self._options, self._make = options, make
        self.name = f"DNS {options.name}"
        self._resolver = _resolver(options)

    async def run(self, tell: Tell) -> None:
        """See ``Source``."""
        while True:
            places, lives_s = await self._places()
            tell(specs_of(named_by_place(self._options.prefix, places), self._make))
            await asyncio.sleep(max(min(self._options.period_s, lives_s), _LEAST_S))

    async def _places(self) -> tuple[list[Place], float]:
        options = self._options
        if options.port is not None:
            addresses, lives_s = await self._addresses(options.name)
            return [Place(address, options.port) for address in addresses], lives_s
        answer = await self._ask(options.name, "SRV")
        if answer is None:
            return [], options.period_s
        places, lives_s = list[Place](), float(answer.rrset.ttl if answer.rrset is not None else options.period_s)
        for record in answer:
            if not isinstance(record, SRV) or str(record.target) == ".":  # RFC 2782: decidedly not available
                continue
            addresses, address_lives_s = await self._addresses(str(record.target))
            lives_s = min(lives_s, address_lives_s)
            places += [Place(address, record.port) for address in addresses]
        return places, lives_s

    async def _addresses(self, name: str) -> tuple[list[str], float]:
        answers = await asyncio.gather(self._ask(name, "A"), self._ask(name, "AAAA"))
        found = [answer for answer in answers if answer is not None]
        lives_s = min((float(a.rrset.ttl) for a in found if a.rrset is not None), default=self._options.period_s)
        return sorted({record.to_text() for answer in found for record in answer}), lives_s

    async def _ask(self, name: str, kind: str) -> dns.resolver.Answer | None:
        """Return the answer, ``None`` for a name that has nothing of the kind. Raises ``DiscoveryError``."""
        try:
            return await self._resolver.resolve(name, kind, lifetime=self._options.timeout_s)
        except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
            return None
        except (dns.exception.DNSException, OSError) as error:
            raise DiscoveryError(f"{name} ({kind}) cannot be asked for: {type(error).__name__}") from None


def _resolver(options: NameOptions) -> dns.asyncresolver.Resolver:
    """Return a resolver without a cache: what changed must be seen."""
    if not options.servers:
        return dns.asyncresolver.Resolver()
    resolver = dns.asyncresolver.Resolver(configure=False)
    found: list[dns.nameserver.Nameserver | str] = []
    for server in options.servers:
        address, _, port = server.rpartition(":") if server.count(":") == 1 else (server, "", "53")
        found.append(dns.nameserver.Do53Nameserver(address, int(port)))
    resolver.nameservers = found
    return resolver
