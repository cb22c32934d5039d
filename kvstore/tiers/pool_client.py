"""How the pool tier speaks to its server: pipelines with a deadline, no retries, and a breaker in front."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry

from kvstore.breaker import Breaker, BreakerOptions
from kvstore.errors import MediumError

SCAN_NAMES = 256
_READ_BYTES = 1 << 20  # of one recv: redis-py's 32 KiB would take 23 for a page of 737,280 bytes
_CLUSTER = "redis+cluster://"

Client = redis.Redis | RedisCluster
Command = tuple[str | bytes | int | memoryview, ...]


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Limits of one pool tier."""

    read_deadline_s: float = 0.25  # of one exists or get, and of the connection
    write_deadline_s: float = 2.0  # of one put or remove: behind the engine's back
    request_bytes: int = 8 << 20  # larger answers cost the server fresh memory
    breaker: BreakerOptions = field(default_factory=BreakerOptions)


class PoolClient:
    """One server or cluster. Thread-safe; raises nothing once it is made."""

    def __init__(self, url: str, options: PoolOptions) -> None:
        """Raises ``MediumError`` for a URL that is not one of a server; does not connect yet."""
        if urlsplit(url).scheme not in ("redis", "rediss", "unix", "redis+cluster"):
            raise MediumError(f"{_without_secret(url)} is not the URL of a Redis or Valkey server")
        self._url = url
        self._options = options
        self._lock = threading.Lock()
        self._clients: dict[float, Client] = {}
        self._closed = False
        self.breaker = Breaker(f"pool tier {_without_secret(url)}", self._probe, options.breaker)

    @property
    def available(self) -> bool:
        """Whether asking makes sense."""
        return self.breaker.closed and not self._closed

    def ask(self, commands: Sequence[Command], deadline_s: float | None = None) -> list[object] | None:
        """Send the commands at once and return their replies (an error reply as an exception), or ``None``.

        ``None`` means that the server did not answer within the deadline; the breaker is then open.
        """
        if not commands or not self.available:
            return None if commands else []
        try:
            pipeline = self._client(deadline_s or self._options.write_deadline_s).pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            replies: list[object] = pipeline.execute(raise_on_error=False)
        except (redis.RedisError, OSError) as error:
            self.breaker.trip(str(error) or type(error).__name__)
            return None
        for reply in replies:
            if isinstance(reply, (redis.ConnectionError, redis.TimeoutError)):  # one node of a cluster
                self.breaker.trip(str(reply) or type(reply).__name__)
                return None
        return replies

    def names(self, prefix: bytes) -> Iterator[bytes]:
        """Go through the keys that begin so; ends early if the server stops answering."""
        if not self.available:
            return
        try:
            yield from self._client(self._options.write_deadline_s).scan_iter(match=prefix + b"*", count=SCAN_NAMES)
        except (redis.RedisError, OSError) as error:
            self.breaker.trip(str(error) or type(error).__name__)

    def close(self) -> None:
        """Close every connection. Idempotent."""
        self._closed = True
        self.breaker.stop()
        with self._lock:
            clients, self._clients = list(self._clients.values()), {}
        for client in clients:
            client.close()

    def _probe(self) -> bool:
        try:
            return bool(self._client(self._options.read_deadline_s).ping())
        except (redis.RedisError, OSError):
            return False

    def _client(self, deadline_s: float) -> Client:
        """Return the client whose every wait ends after ``deadline_s``, connecting a cluster's first time."""
        with self._lock:
            client = self._clients.get(deadline_s)
        if client is None:
            client = _connect(self._url, deadline_s, self._options.read_deadline_s)
            with self._lock:
                client = self._clients.setdefault(deadline_s, client)
        return client


def _connect(url: str, deadline_s: float, connect_s: float) -> Client:
    """Return a client that never retries: a deadline that is missed once is not missed ten times."""
    if url.startswith(_CLUSTER):
        return RedisCluster.from_url(
            "redis://" + url.removeprefix(_CLUSTER),
            socket_timeout=deadline_s,
            socket_connect_timeout=connect_s,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
    return redis.Redis.from_url(
        url,
        socket_timeout=deadline_s,
        socket_connect_timeout=connect_s,
        socket_read_size=_READ_BYTES,
        retry=Retry(NoBackoff(), 0),
        protocol=2,
    )


def _without_secret(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
