"""The requests that are in the air: how many, and how to bring them down when the gateway must go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from tracing.record import Decision, Identity, RunLink


class Underway(Protocol):
    """What can be told of a request while it runs; ``gateway.draft.Draft`` is one."""

    request_id: str
    model: str
    identity: Identity
    link: RunLink | None
    decision: Decision | None
    labels: dict[str, str]
    prompt_tokens: int | None
    attempt_instance: str | None
    arrived_ns: int
    routed_ns: int | None
    sent_ns: int | None
    first_token_ns: int | None
    last_token_ns: int | None


class CutOff(Exception):
    """The request was in the air when the gateway had to go."""


class Flights:
    """Counts requests in flight; ``cut_all`` ends those that are left, each by ``CutOff`` at its boundary."""

    def __init__(self) -> None:
        self._scopes: dict[asyncio.Timeout, Underway | None] = {}
        self._landed = asyncio.Event()
        self.is_leaving = False  # readiness fails, requests are still taken
        self.is_draining = False  # requests are refused

    @property
    def count(self) -> int:
        """Requests in flight."""
        return len(self._scopes)

    def underway(self) -> list[Underway]:
        """Return what is in the air and said what it is."""
        return [request for request in self._scopes.values() if request is not None]

    @asynccontextmanager
    async def flight(self, request: Underway | None = None) -> AsyncIterator[None]:
        """Be in the air within the block. Raises ``CutOff`` when cut; a ``TimeoutError`` from inside is another's."""
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scopes[scope] = request
                try:
                    yield
                finally:
                    self._scopes.pop(scope, None)
                    if not self._scopes:
                        self._landed.set()
        except TimeoutError:
            if scope.expired():
                raise CutOff from None
            raise

    async def drain(self, limit_s: float) -> bool:
        """Wait until none is in the air; ``False`` when some still were at the limit."""
        self.is_draining = True
        try:
            async with asyncio.timeout(limit_s):
                while self._scopes:
                    self._landed.clear()
                    await self._landed.wait()
        except TimeoutError:
            return False
        return True

    def cut_all(self) -> None:
        """End what is left."""
        now = asyncio.get_running_loop().time()
        for scope in list(self._scopes):
            if not scope.expired():
                scope.reschedule(now)
