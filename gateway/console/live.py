"""What pages show while they are open: one broadcaster looks once a second, for as long as anybody is there.

A *topic* is what a page shows (the overview of one tenant, or one run). Once a tick each topic that has a client is
rendered, in a thread, and what of it has changed is put into every client's queue; one that takes long is looked at
less often. Queues are bounded: a client that does not read is dropped, and its browser comes back by itself. All end
when the gateway drains. Nothing here touches a request's path, and with no client nothing is read at all.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topic:
    """What is shown: the kind of page, whose data (``None``: all), and the page's window or run."""

    name: str
    tenant: str | None
    subject: str = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """A topic's HTML by element id: what takes the place of the element, and what is added where there is none yet."""

    replaced: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """Limits."""

    tick_s: float = 1.0
    share: float = 0.05  # of the time that may go into one topic: the rest of a core is for requests
    clients: int = 64
    queue: int = 8  # messages that may wait for one client
    stall_s: float = 10.0  # a client that takes nothing for so long is dropped
    heartbeat_s: float = 15.0


class TooManyClients(Exception):
    """There are as many as may be."""


class Client:
    """One open page: an iterator over messages, until it is dropped or all end."""

    def __init__(self, topic: Topic, size: int, known: frozenset[str] = frozenset()) -> None:
        """``known``: ids of elements that the page has."""
        self.topic, self._known = topic, known
        self.is_dropped = False
        self._queue: asyncio.Queue[str | None] = asyncio.Queue(size)

    def tell(self, parts: Parts) -> None:
        """Hand it what of these parts its page does not have, as one message."""
        added = {key: html for key, html in parts.added.items() if key not in self._known}
        if parts.replaced or added:
            self.offer(_message(parts.replaced, added))

    def offer(self, message: str) -> None:
        """Hand it a message; a client whose queue is full is dropped."""
        if self.is_dropped:
            return
        try:
            self._queue.put_nowait(message)
        except asyncio.QueueFull:
            self.drop()

    def drop(self) -> None:
        """End it; what waits is forgotten."""
        self.is_dropped = True
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(None)

    async def messages(self, heartbeat_s: float) -> AsyncIterator[str | None]:
        """Yield messages, ``None`` where there was none for so long."""
        while True:
            try:
                async with asyncio.timeout(heartbeat_s):
                    message = await self._queue.get()
            except TimeoutError:
                yield None
                continue
            if message is None:
                return
            yield message


class Live:
    """The broadcaster. ``run`` must be running for clients to hear anything."""

    def __init__(
        self,
        render: Callable[[Topic], Parts],
        is_leaving: Callable[[], bool] = lambda: False,
        options: LiveOptions | None = None,
    ) -> None:
        """``render`` blocks and is called in a thread, once a tick for each topic."""
        self.options = options or LiveOptions()
        self._render, self._is_leaving = render, is_leaving
        self._clients: set[Client] = set()
        self._shown: dict[Topic, Parts] = {}
        self._due_s: dict[Topic, float] = {}  # when a topic that took long is looked at again
        self._some = asyncio.Event()

    @property
    def clients(self) -> int:
        """How many pages are open."""
        return len(self._clients)

    def join(self, topic: Topic, known: Iterable[str] = ()) -> Client:
        """Add a client, which is told at once of what it does not know. Raises :class:`TooManyClients`.

        ``known``: ids of elements that its page has; what replaces those comes anyhow.
        """
        if len(self._clients) >= self.options.clients or self._is_leaving():
            raise TooManyClients
        client = Client(topic, self.options.queue, frozenset(known))
        shown = self._shown.get(topic)
        if shown is not None:
            client.tell(shown)
        self._clients.add(client)
        self._some.set()
        return client

    def leave(self, client: Client) -> None:
        """Take a client away. Idempotent."""
        self._clients.discard(client)
        if not any(each.topic == client.topic for each in self._clients):
            self._shown.pop(client.topic, None)
            self._due_s.pop(client.topic, None)
        if not self._clients:
            self._some.clear()

    async def run(self) -> None:
        """Look and tell until cancelled; then every client ends."""
        try:
            while True:
                await self._some.wait()
                if self._is_leaving():
                    self._end_all()
                else:
                    await self._tick()
                await asyncio.sleep(self.options.tick_s)
        finally:
            self._end_all()

    async def _tick(self) -> None:
        clock = asyncio.get_running_loop().time
        for topic in {client.topic for client in self._clients}:
            began_s = clock()
            if began_s < self._due_s.get(topic, 0.0):
                continue
            try:
                parts = await asyncio.to_thread(self._render, topic)
            except Exception:  # the boundary of a page: a fault of ours costs those who look, and not the gateway
                _log.exception("the live page %s failed", topic.name)
                self._end(topic)
                continue
            clients = [each for each in self._clients if each.topic == topic]
            if not clients:
                continue  # all left meanwhile
            ended_s = clock()
            self._due_s[topic] = ended_s + (ended_s - began_s) / self.options.share
            before = self._shown.get(topic, Parts())
            self._shown[topic] = parts
            replaced = {key: html for key, html in parts.replaced.items() if before.replaced.get(key) != html}
            added = {key: html for key, html in parts.added.items() if key not in before.added}
            for client in clients:
                client.tell(Parts(replaced, added))

    def _end(self, topic: Topic) -> None:
        for client in [each for each in self._clients if each.topic == topic]:
            client.drop()

    def _end_all(self) -> None:
        for client in list(self._clients):
            client.drop()


def _message(replaced: dict[str, str], added: dict[str, str]) -> str:
    """One server-sent event. JSON has no line breaks, so that it is one line."""
    return f"data: {json.dumps({'replaced': replaced, 'added': added})}\n\n"
