"""Keeps the fleet in step with what its sources tell: instances come and go, and streams do not notice."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gateway.discovery.base import DiscoveryError, Source
from gateway.fleet import Fleet
from gateway.instance import InstanceSpec

_log = logging.getLogger(__name__)
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 30.0


class Keeper:
    """Reconciles: what is wanted and missing comes, what is not wanted any more, or is another now, goes.

    Instances of the settings stay what they are. A name that several sources tell belongs to the first of them.
    """

    def __init__(self, fleet: Fleet, sources: Sequence[Source], *, first_pause_s: float = _FIRST_PAUSE_S) -> None:
        self._fleet, self._sources, self._first_pause_s = fleet, sources, first_pause_s
        self._told: dict[str, Mapping[str, InstanceSpec]] = {}
        self._held: dict[str, InstanceSpec] = {}
        self._changed = asyncio.Event()
        self._refused: set[str] = set()
        self._chance = random.Random()  # many gateways should not ask a server that came back at one moment

    async def run(self) -> None:
        """Follow all sources until cancelled."""
        async with asyncio.TaskGroup() as group:
            for source in self._sources:
                group.create_task(self._follow(source), name=f"discovery {source.name}")
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._reconcile()

    async def _follow(self, source: Source) -> None:
        pause_s, trouble = self._first_pause_s, ""

        def tell(specs: Mapping[str, InstanceSpec]) -> None:
            nonlocal pause_s, trouble
            if trouble:
                _log.info("%s: tells again", source.name)
            pause_s, trouble = self._first_pause_s, ""
            self._told[source.name] = dict(specs)
            self._changed.set()

        while True:
            try:
                await source.run(tell)
            except DiscoveryError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("%s: %s; what it told last stands", source.name, trouble)
            await asyncio.sleep(pause_s * self._chance.uniform(0.8, 1.0))
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _reconcile(self) -> None:
        wanted: dict[str, InstanceSpec] = {}
        for source in reversed(self._sources):
            wanted |= self._told.get(source.name, {})
        for name, spec in list(self._held.items()):
            if name not in wanted or not _are_same(spec, wanted[name]):
                del self._held[name]
                await self._fleet.remove(name)
        for name, spec in wanted.items():
            if name in self._held:
                continue
            if name in self._fleet.instances:
                if name not in self._refused:
                    self._refused.add(name)
                    _log.error("discovery tells of an instance %r, which the settings name: it is left out", name)
                continue
            self._fleet.add(spec)
            self._held[name] = spec


def _are_same(one: InstanceSpec, other: InstanceSpec) -> bool:
    return one.adapter.name == other.adapter.name and one == replace(other, adapter=one.adapter)
