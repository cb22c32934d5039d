"""The contract of a source of instances: it tells the whole set that there should be, again and again.

Level-triggered: what a source tells is what is now, never what changed, so that an update that was lost, came twice, or
took an odd form (an address that is empty, a port that changed, a name that came back) is set right by the next one.
*Nothing there* and *cannot be asked* are different: a source that cannot be asked tells nothing, and what it told last
stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.instance import InstanceSpec

Make = Callable[[str, str], InstanceSpec]
"""Makes an instance of a name and a URL, all else being set for the source."""

Tell = Callable[[Mapping[str, InstanceSpec]], None]
"""Takes the whole set, by name."""


class DiscoveryError(Exception):
    """A source could not be asked or understood."""


@dataclass(frozen=True, slots=True)
class Place:
    """One address at which an instance listens."""

    host: str
    port: int

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


class Source(Protocol):
    """One place that knows instances."""

    @property
    def name(self) -> str:
        """What logs call it."""

    async def run(self, tell: Tell) -> None:
        """Tell the set, at least whenever it has changed, for ever. Raises ``DiscoveryError``; it is then run anew."""


def specs_of(places: Mapping[str, Place], make: Make) -> dict[str, InstanceSpec]:
    """Return the instances at these places, by name."""
    return {name: make(name, place.url) for name, place in sorted(places.items())}


def named_by_place(prefix: str, places: Sequence[Place]) -> dict[str, Place]:
    """Return places by names that follow from them: the same place has the same name, whoever finds it when."""
    return {f"{prefix}-{place.host.replace(':', '-')}-{place.port}": place for place in places}
