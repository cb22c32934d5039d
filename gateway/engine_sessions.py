"""Engines that keep what a run needs until they hear of its end (SGLang's radix sessions) are told of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter

from engine_adapter.errors import UpstreamError
from engine_adapter.http import UpstreamClient
from gateway.instance import Instance

_log = logging.getLogger(__name__)
_ANSWER_BYTES = 1 << 16
_TIMEOUT_S = 5.0
_AT_ONCE = 16


class EngineSessions:
    """Closes the sessions of runs that ended, in the background. What cannot be told is no error: an engine's own
    eviction takes such pages at last."""

    def __init__(
        self, client: UpstreamClient, instances: Mapping[str, Instance], registry: CollectorRegistry | None = None
    ) -> None:
        self._client, self._instances = client, instances
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = Counter(
            "keepwarm_engine_sessions_closed", "Sessions of ended runs, by engines' answers", ("result",),
            registry=registry,
        )  # fmt: skip

    def run_ended(self, run: str, instances: frozenset[str]) -> None:
        """Close the run's session at each of these instances that heeds sessions."""
        for name in instances:
            instance = self._instances.get(name)
            if instance is None or not (instance.capabilities.session and instance.is_healthy):
                continue
            asked = instance.spec.adapter.close_session(run)
            if asked is not None:
                task = asyncio.get_running_loop().create_task(self._close(instance, *asked))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def settled(self) -> None:
        """Wait until every engine that was to be told has been, or could not be."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _close(self, instance: Instance, path: str, body: bytes) -> None:
        spec = instance.spec
        headers = {"content-type": "application/json", **spec.headers}
        try:
            async with self._turns, asyncio.timeout(_TIMEOUT_S):
                response = await self._client.request("POST", f"{spec.url}{path}", headers, body)
                try:
                    await response.read_all(_ANSWER_BYTES)
                finally:
                    response.close()
        except (UpstreamError, TimeoutError) as error:
            self._closed.labels("unreachable").inc()
            _log.info("instance %s was not told that a run has ended: %s", instance.id, error or "no answer")
        else:
            self._closed.labels("closed" if response.status == 200 else "refused").inc()
