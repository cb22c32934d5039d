"""One of several workers, as the composition root sees it: what it shares with the others, and what it does for all."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client import CollectorRegistry

from gateway.instance import Instance
from gateway.run_ends import RunEnds, Why
from gateway.workers.mesh import Mesh
from gateway.workers.place import WorkerPlace
from gateway.workers.shared_loads import SharedLoads
from gateway.workers.shared_metrics import SharedMetrics
from gateway.workers.shared_runs import SharedRunLinker
from gateway.workers.turn import Turn


class Worker:
    """Made before the parts that it connects; ``open`` when they are there."""

    def __init__(self, place: WorkerPlace) -> None:
        self.place = place
        self.mesh = Mesh(place.lines)
        self.linker = SharedRunLinker(self.mesh, Turn(place.metrics / "linking.lock"))
        self._instances: Mapping[str, Instance] = {}
        self.loads = SharedLoads(self.mesh, self._load_of)
        self.mesh.on("draining", self._drained_there)

    def open(self, instances: Mapping[str, Instance], ends: RunEnds, keys_changed: Callable[[], object]) -> None:
        """Hear the others from now on. ``keys_changed`` is called when one of them changed keys."""
        self._instances = instances
        self.mesh.on("run ended", lambda _, run, why: ends.end_here(run, Why(why)))
        self.mesh.on("keys", lambda _: keys_changed())
        self.mesh.open()
        self.loads.open()

    def metrics(self, own: CollectorRegistry, common: CollectorRegistry) -> SharedMetrics:
        """Return the counters of all workers."""
        return SharedMetrics(self.place.metrics, self.place.number, own, common)

    def drained(self, instance: str, is_draining: bool) -> None:
        """An instance was taken out, or back, by somebody who asked this worker."""
        self.mesh.tell("draining", instance, is_draining)

    def run_ended(self, run: str, why: str) -> None:
        """A run has ended, by what this worker was told."""
        self.mesh.tell("run ended", run, why)

    def changing(self, refresh: Callable[[], Awaitable[object]]) -> Callable[[], Awaitable[None]]:
        """Return what is awaited after a change of keys: it counts here, and the others look at once."""

        async def changed() -> None:
            await refresh()
            self.mesh.tell("keys")

        return changed

    def _load_of(self, instance: str) -> Any:
        found = self._instances.get(instance)
        return None if found is None else found.load

    def _drained_there(self, _: int, instance: str, is_draining: bool) -> None:
        found = self._instances.get(instance)
        if found is not None:
            found.is_draining = is_draining
