"""How the pool tier speaks to its servers: batches with a deadline, no retries, and breakers in front.

Values go between the sockets and the callers' memory; nothing of a page's size is allocated. A server that does not
answer in time is out of use at once for everybody, and its keys are ``UNAVAILABLE`` without waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Final, TypeVar

from kvstore.breaker import Breaker
from kvstore.tiers.pool_topology import PoolOptions, PoolServers, Server
from kvstore.tiers.pool_url import parse_pool_url, without_secret
from kvstore.tiers.resp import Connection, ConnectionFault, ErrorReply, Reply, Value, command

SCAN_NAMES = 256
_MOVED = ("MOVED", "ASK")
_OF_NO_USE = ("LOADING", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "NOAUTH", "NOPERM", "WRONGPASS", "TRYAGAIN")


class Unavailable(Enum):
    """The type of ``UNAVAILABLE``."""

    UNAVAILABLE = "unavailable"


UNAVAILABLE: Final = Unavailable.UNAVAILABLE
"""What stands for an answer that did not come."""

AnswerT = TypeVar("AnswerT")
Work = Callable[[Connection, Sequence[int], float], list[AnswerT]]


class PoolClient:
    """One server, the master that sentinels name, or a cluster. Thread-safe; raises nothing once it is made."""

    def __init__(self, url: str, options: PoolOptions) -> None:
        """Raises ``MediumError`` for a URL that is not one of a pool; does not connect yet."""
        self._options = options
        self._closed = False
        self._servers = PoolServers(parse_pool_url(url), f"pool tier {without_secret(url)}", options)

    @property
    def breaker(self) -> Breaker:
        """The breaker of the only server, or of the cluster's whereabouts."""
        return self._servers.breaker

    @property
    def available(self) -> bool:
        """Whether asking makes sense."""
        return self.breaker.closed and not self._closed

    def ask(
        self, verb: bytes, names: Sequence[bytes], *more: bytes, deadline_s: float | None = None
    ) -> list[Reply | Unavailable]:
        """Send ``verb name more…`` for each name at once; return the replies."""

        def work(connection: Connection, places: Sequence[int], until_s: float) -> list[Reply]:
            connection.send([b"".join([command(verb, names[place], *more) for place in places])], until_s)
            return [connection.reply(until_s) for _ in places]

        return self._route(names, deadline_s or self._options.write_s.deadline_s(), work)

    def get(
        self, names: Sequence[bytes], bodies: Sequence[memoryview], deadline_s: float, *, sums: bool = False
    ) -> list[Value | ErrorReply | Unavailable | None]:
        """Read each value so that its last bytes fill the body beside its name; ``None`` for one that is not there.

        With ``sums`` bodies are hashed as they come.
        """
        window = max(1, self._options.request_bytes // max(1, len(bodies[0]) if bodies else 1))

        def work(connection: Connection, places: Sequence[int], until_s: float) -> list[Value | ErrorReply | None]:
            windows = [places[start : start + window] for start in range(0, len(places), window)]
            answers: list[Value | ErrorReply | None] = []
            for number in range(-1, len(windows)):
                if number + 1 < len(windows):  # asked for while the one before it is read
                    asked = b"".join([command(b"GET", names[place]) for place in windows[number + 1]])
                    connection.send([asked], until_s)
                if number >= 0:
                    answers += [connection.value_into(bodies[place], until_s, sums=sums) for place in windows[number]]
            return answers

        return self._route(names, deadline_s, work)

    def set(
        self, names: Sequence[bytes], values: Sequence[tuple[bytes, memoryview, int]], deadline_s: float
    ) -> list[Reply | Unavailable]:
        """Store for each name a head and a body, for so many ms (0: for good); return the replies."""

        window = max(1, self._options.put_bytes // max(1, len(values[0][1]) if values else 1))

        def work(connection: Connection, places: Sequence[int], until_s: float) -> list[Reply]:
            replies: list[Reply] = []
            for start in range(0, len(places), window):
                part = places[start : start + window]
                connection.send(
                    [piece for place in part for piece in _set_command(names[place], *values[place])], until_s
                )
                replies += [connection.reply(until_s) for _ in part]
            return replies

        return self._route(names, deadline_s, work)

    def names(self, prefix: bytes) -> Iterator[bytes]:
        """Go through the keys that begin so, on every server; ends early where one stops answering."""
        return (name for name in self.walk(prefix) if isinstance(name, bytes))

    def walk(self, prefix: bytes) -> Iterator[bytes | Unavailable]:
        """Do what ``names`` does, with ``UNAVAILABLE`` for each server that was not gone through to its end."""
        if not self.available or not self._servers.find(self._options.read_s.deadline_s()):
            yield UNAVAILABLE
            return
        for server in self._servers.masters():
            cursor = b"0"
            while True:
                words = (b"SCAN", cursor, b"MATCH", prefix + b"*", b"COUNT", b"%d" % SCAN_NAMES)
                answer = self._call(server, words)
                match answer:
                    case [bytes(following), list(found)]:
                        cursor = following
                        yield from (name for name in found if isinstance(name, bytes))
                    case _:
                        yield UNAVAILABLE
                        break
                if cursor == b"0":
                    break

    def close(self) -> None:
        """Close every connection that is not in use. Idempotent."""
        self._closed = True
        self._servers.close()

    def _call(self, server: Server, words: tuple[bytes, ...]) -> Reply:
        if not server.breaker.closed or self._closed:
            return None
        try:
            return server.call(*words, deadline_s=self._options.write_s.deadline_s())
        except ConnectionFault as fault:
            server.breaker.trip(str(fault))
            return None

    def _route(self, names: Sequence[bytes], deadline_s: float, work: Work[AnswerT]) -> list[AnswerT | Unavailable]:
        """Let the server of each name do its part of the work; what has moved is asked of its new server, once."""
        answers: list[AnswerT | Unavailable] = [UNAVAILABLE] * len(names)
        if not names or not self.available or not self._servers.find(deadline_s):
            return answers
        places: Sequence[int] = range(len(names))
        for _ in range(2):
            for server, group in self._servers.group(names, places).items():
                done = self._on(server, group, deadline_s, work)
                for place, answer in zip(group, done or [], strict=False):
                    answers[place] = answer
            places = [place for place in places if _code(answers[place]) in _MOVED]
            if not places or not self._servers.refresh(deadline_s):
                break
        for place in places:
            answers[place] = UNAVAILABLE if _code(answers[place]) in _MOVED else answers[place]
        return answers

    def _on(
        self, server: Server, places: Sequence[int], deadline_s: float, work: Work[AnswerT]
    ) -> list[AnswerT | Unavailable] | None:
        """Work on a connection of one server. One on which anything went wrong, or was cut short, is closed."""
        if not server.breaker.closed:
            return None
        try:
            connection = server.take(deadline_s)
            try:
                answers = work(connection, places, deadline_s)
            except BaseException:
                connection.close()
                raise
        except ConnectionFault as fault:
            server.breaker.trip(str(fault))
            return None
        server.give(connection)
        refused = next((answer for answer in answers if _code(answer) in _OF_NO_USE), None)
        if isinstance(refused, ErrorReply):
            server.breaker.trip(f"it says {refused.message}")
            return [UNAVAILABLE if _code(answer) in _OF_NO_USE else answer for answer in answers]
        return list(answers)


def _set_command(name: bytes, head: bytes, body: memoryview, ttl_ms: int) -> tuple[bytes, memoryview, bytes]:
    words, size = 5 if ttl_ms else 3, len(head) + len(body)
    start = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n%s" % (words, len(name), name, size, head)
    ttl = b"%d" % ttl_ms
    return start, body, b"\r\n$2\r\nPX\r\n$%d\r\n%s\r\n" % (len(ttl), ttl) if ttl_ms else b"\r\n"


def _code(answer: object) -> str:
    return answer.code if isinstance(answer, ErrorReply) else ""
