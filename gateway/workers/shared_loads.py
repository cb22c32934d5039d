"""The load of each instance as all workers make it: what one reserves the others reserve too, and release with it.

So whatever a policy looks at (requests, tokens, times, what is learned from them) it sees of the whole gateway. Times
are of the machine's one monotonic clock. Messages of one round of the loop go together. What a worker had under way
when it died is released when the one in its place says hello.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from gateway.workers.mesh import Mesh


class Reservation(Protocol):
    """One request's share of a load; see ``gateway.routing``."""

    def answered(self, *words: Any) -> None:
        """The first token came."""

    def release(self, *words: Any) -> None:
        """The request is over."""


class Load(Protocol):
    """The load of one instance."""

    def reserve(self, *words: Any) -> Any:
        """Count a request from now on."""


class SharedLoads:
    """Tells the others what is reserved here, and does here what they do. ``load_of`` finds an instance's load."""

    def __init__(self, mesh: Mesh, load_of: Callable[[str], Load | None]) -> None:
        self._mesh, self._load_of = mesh, load_of
        self._names = count(1)
        self._theirs: dict[int, dict[int, Reservation]] = {}
        mesh.on("hello", self._hello)
        mesh.on("reserve", self._reserved_there)
        mesh.on("answered", self._answered_there)
        mesh.on("release", self._released_there)

    def open(self) -> None:
        """Say that this worker begins with nothing under way."""
        self._mesh.tell("hello")

    def reserve(self, instance: str, load: Load, *words: Any) -> Any:
        """Reserve here and everywhere; what is returned does the rest everywhere, too."""
        name = next(self._names)
        self._mesh.tell_soon("reserve", instance, name, words)
        return SharedReservation(self._mesh, name, load.reserve(*words))

    def _hello(self, worker: int) -> None:
        for reservation in self._theirs.pop(worker, {}).values():
            reservation.release(time.monotonic())

    def _reserved_there(self, worker: int, instance: str, name: int, words: tuple[Any, ...]) -> None:
        load = self._load_of(instance)
        if load is not None:
            self._theirs.setdefault(worker, {})[name] = load.reserve(*words)

    def _answered_there(self, worker: int, name: int, words: tuple[Any, ...]) -> None:
        reservation = self._theirs.get(worker, {}).get(name)
        if reservation is not None:
            reservation.answered(*words)

    def _released_there(self, worker: int, name: int, words: tuple[Any, ...]) -> None:
        reservation = self._theirs.get(worker, {}).pop(name, None)
        if reservation is not None:
            reservation.release(*words)


class SharedReservation:
    """A reservation that is held in every worker."""

    __slots__ = ("_is_answered", "_is_over", "_mesh", "_name", "own")

    def __init__(self, mesh: Mesh, name: int, own: Any) -> None:
        self._mesh, self._name, self.own = mesh, name, own
        self._is_answered = self._is_over = False

    def answered(self, *words: Any) -> None:
        """See ``Reservation``; idempotent."""
        self.own.answered(*words)
        if not self._is_answered:
            self._is_answered = True
            self._mesh.tell_soon("answered", self._name, words)

    def release(self, *words: Any) -> None:
        """See ``Reservation``; idempotent."""
        self.own.release(*words)
        if not self._is_over:
            self._is_over = self._is_answered = True
            self._mesh.tell_soon("release", self._name, words)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)
