"""The servers of a pool, and which of them has a key: one, the master that sentinels name, or a cluster's masters."""

from __future__ import annotations

import binascii
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from kvstore.at_rest import AtRest, at_rest_from_environment
from kvstore.breaker import Breaker, BreakerOptions
from kvstore.deadline import Allowance
from kvstore.tiers.pool_url import PoolKind, PoolUrl
from kvstore.tiers.resp import Address, Connection, ConnectionFault, ErrorReply, Reply, command

CLUSTER_SLOTS = 16384
_IDLE_CONNECTIONS = 4


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Limits of one pool tier."""

    read_s: Allowance = field(default_factory=Allowance)  # of one exists or get
    write_s: Allowance = field(
        default_factory=lambda: Allowance(fixed_s=2.0)
    )  # of one put or remove, behind the engine
    request_bytes: int = 1 << 20  # of answers asked for at once: larger ones cost the server fresh memory
    put_bytes: int = 512 << 10  # sent before the server has answered, or one page: what waits in the way costs both
    at_rest: AtRest = field(default_factory=at_rest_from_environment)
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class Server:
    """One server: its idle connections, and a breaker that keeps callers away while it is of no use."""

    def __init__(self, address: Address, name: str, probe: Callable[[Server], bool], options: BreakerOptions) -> None:
        self.address = address
        self.breaker = Breaker(name, lambda: probe(self), options)
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def take(self, deadline_s: float) -> Connection:
        """Return a connection of the caller's own. Raises ``ConnectionFault``."""
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return Connection(self.address, deadline_s)
            if connection.is_quiet:
                return connection
            connection.close()  # the server was restarted since

    def give(self, connection: Connection) -> None:
        """Keep a connection on which every answer was read."""
        with self._lock:
            if len(self._idle) < _IDLE_CONNECTIONS:
                self._idle.append(connection)
                return
        connection.close()

    def move_to(self, address: Address) -> None:
        """Speak to another address from now on."""
        self.address = address
        self.close_idle()

    def close_idle(self) -> None:
        """Close the connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def call(self, *words: bytes, deadline_s: float) -> Reply:
        """Ask one thing. Raises ``ConnectionFault``."""
        connection = self.take(deadline_s)
        try:
            connection.send([command(*words)], deadline_s)
            answer = connection.reply(deadline_s)
        except BaseException:
            connection.close()
            raise
        self.give(connection)
        return answer


class PoolServers:
    """Who has which key. ``breaker`` is open while it is not known, or the only server is of no use."""

    def __init__(self, url: PoolUrl, name: str, options: PoolOptions) -> None:
        self._url, self._name, self._options = url, name, options
        self._lock = threading.Lock()  # of refreshing
        self._by_slot: list[Server] = []
        self._masters: dict[tuple[str, int], Server] = {}
        if url.kind is PoolKind.CLUSTER:
            self._single = None
            self.breaker = Breaker(name, self._find_masters, options.breaker)
        else:
            self._single = Server(url.servers[0], name, self._probe_single, options.breaker)
            self.breaker = self._single.breaker
        self._known = url.kind is PoolKind.SINGLE

    def masters(self) -> list[Server]:
        """Return every server that has keys of its own."""
        return [self._single] if self._single is not None else list(self._masters.values())

    def find(self, deadline_s: float) -> bool:
        """Learn where the servers are, unless that is known; ``False``, with the breaker open, if it cannot be."""
        if self._known or self.refresh(deadline_s):
            return True
        self.breaker.trip("none of the servers named tells where the masters are")
        return False

    def group(self, names: Sequence[bytes], places: Iterable[int]) -> dict[Server, list[int]]:
        """Return the places of ``names`` by the server that has them."""
        if self._single is not None:
            return {self._single: list(places)}
        groups: dict[Server, list[int]] = {}
        by_slot = self._by_slot
        for place in places:
            groups.setdefault(by_slot[key_slot(names[place])], []).append(place)
        return groups

    def refresh(self, deadline_s: float) -> bool:
        """Learn again where the servers are; ``False`` if nobody tells."""
        if self._url.kind is PoolKind.SINGLE:
            return True
        with self._lock:
            look = self._ask_sentinel if self._url.kind is PoolKind.SENTINEL else self._ask_node
            masters = [server.address for server in self.masters()] if self._single is None else []
            addresses = [*masters, *self._url.servers]
            for number, address in enumerate(addresses):
                until_s = time.monotonic() + max(0.0, deadline_s - time.monotonic()) / (len(addresses) - number)
                try:
                    if look(address, until_s):
                        self._known = True
                        return True
                except ConnectionFault:
                    continue
        return False

    def close(self) -> None:
        """End every probe and close every idle connection."""
        self.breaker.stop()
        for server in self.masters():
            server.breaker.stop()
            server.close_idle()

    def _ask_sentinel(self, sentinel: Address, deadline_s: float) -> bool:
        asked = replace(sentinel, database=0, username="", password="")
        answer = _ask_once(asked, deadline_s, b"SENTINEL", b"get-master-addr-by-name", self._url.service.encode())
        match answer:
            case [bytes(host), bytes(port)] if port.isdigit() and self._single is not None:
                address = replace(self._url.template, host=host.decode(), port=int(port))
                if address != self._single.address:
                    self._single.move_to(address)
                return True
        return False

    def _ask_node(self, node: Address, deadline_s: float) -> bool:
        answer = _ask_once(node, deadline_s, b"CLUSTER", b"SLOTS")
        if not isinstance(answer, list):
            return False
        ranges = []
        for entry in answer:
            match entry:
                case [int(first), int(last), [host, int(port), *_], *_]:
                    name = host.decode() if isinstance(host, bytes) and host else node.host
                    ranges.append((first, last, (name, port)))
        if sum(last - first + 1 for first, last, _ in ranges) != CLUSTER_SLOTS:
            return False  # some keys are nobody's: not now
        self._take_over(ranges)
        return True

    def _take_over(self, ranges: Sequence[tuple[int, int, tuple[str, int]]]) -> None:
        masters = {}
        for _, _, where in ranges:
            masters[where] = self._masters.get(where) or Server(
                replace(self._url.template, host=where[0], port=where[1]),
                f"{self._name} at {where[0]}:{where[1]}",
                self._probe_master,
                self._options.breaker,
            )
        by_slot: list[Server] = [masters[ranges[0][2]]] * CLUSTER_SLOTS
        for first, last, where in ranges:
            by_slot[first : last + 1] = [masters[where]] * (last + 1 - first)
        gone = [server for where, server in self._masters.items() if where not in masters]
        self._masters, self._by_slot = masters, by_slot
        for server in gone:
            server.close_idle()

    def _find_masters(self) -> bool:
        return self.refresh(self._options.read_s.deadline_s())

    def _probe_single(self, server: Server) -> bool:
        deadline_s = self._options.read_s.deadline_s()
        return self.refresh(deadline_s) and _answers(server, deadline_s)

    def _probe_master(self, server: Server) -> bool:
        """A master of a cluster was of no use; it is again, or others have its keys now."""
        self.refresh(self._options.read_s.deadline_s())
        if server not in self._masters.values():
            return True
        return _answers(server, self._options.read_s.deadline_s())


def key_slot(name: bytes) -> int:
    """Return a cluster's slot of a key without braces (https://redis.io/docs/latest/operate/oss_and_stack/reference)."""
    return binascii.crc_hqx(name, 0) % CLUSTER_SLOTS


def _answers(server: Server, deadline_s: float) -> bool:
    """Tell whether a server takes writes and reads: it answers, has loaded its data and is not somebody's replica."""
    try:
        pong, role = server.call(b"PING", deadline_s=deadline_s), server.call(b"ROLE", deadline_s=deadline_s)
        health = server.call(b"CLUSTER", b"INFO", deadline_s=deadline_s)
    except ConnectionFault:
        return False
    is_master = isinstance(role, ErrorReply) or (isinstance(role, list) and role[:1] == [b"master"])
    is_whole = not isinstance(health, bytes) or b"cluster_state:fail" not in health
    return pong == b"PONG" and is_master and is_whole


def _ask_once(address: Address, deadline_s: float, *words: bytes) -> Reply:
    connection = Connection(address, deadline_s)
    try:
        connection.send([command(*words)], deadline_s)
        return connection.reply(deadline_s)
    finally:
        connection.close()
