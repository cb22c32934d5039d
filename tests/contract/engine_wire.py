"""Exchanges with real engines, recorded once and played back: a client that knows an answer to what was asked before.

A request that differs in anything but its id from what was recorded has no answer, so a recording also holds an adapter
to what the real engine was asked.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

from engine_adapter.errors import UpstreamError
from engine_adapter.wire_client import WireClient

_KEPT_METRICS = re.compile(r"^(vllm|sglang|llamacpp):[a-z_]*(num_|usage|requests_|cache_config|queue)")
_OF_THE_MACHINE = frozenset({"vllm_env", "system_env", "internal_states", "launch_command"})
_FOLDERS = re.compile(r'(?<=")/[^"]*/(?=[^"/]+")')


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer."""

    method: str
    path: str  # with its query
    body: object
    status: int
    answer: str

    @property
    def key(self) -> str:
        return json.dumps([self.method, self.path, self.body], sort_keys=True)


class Played:
    """An answer that is all there; see ``UpstreamResponse``."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.headers = status, dict[str, str]()
        self._body = body

    async def read_some(self) -> bytes:
        body, self._body = self._body, b""
        return body

    async def read_all(self, limit_bytes: int) -> bytes:
        return await self.read_some()

    def interrupt(self) -> None:
        pass

    def carry(self, take: Callable[[bytes], None] | None) -> None:
        pass

    def close(self) -> None:
        pass


class Player:
    """Answers as the engine did. The same request gets the recorded answers in their order, the last one again."""

    def __init__(self, recording: Path) -> None:
        self._answers = defaultdict[str, deque[Exchange]](deque)
        for entry in json.loads(recording.read_text()):
            exchange = Exchange(**entry)
            self._answers[exchange.key].append(exchange)

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None) -> Played:
        asked = Exchange(method, _path(url), None if body is None else json.loads(body), 0, "")
        known = self._answers.get(asked.key)
        if not known:
            raise UpstreamError(f"nobody asked {asked.key[:300]} when this was recorded")
        exchange = known[0] if len(known) == 1 else known.popleft()
        return Played(exchange.status, exchange.answer.encode())


class Recorder:
    """Asks a real engine, each time over a connection of its own, and keeps what it answered."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    async def request(self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None) -> Played:
        async with WireClient() as client:
            response = await client.request(method, url, headers, body)
            try:
                status, answer = response.status, await response.read_all(1 << 24)
            finally:
                response.close()
        self.exchanges.append(
            Exchange(
                method,
                _path(url),
                None if body is None else json.loads(body),
                status,
                _shortened(_path(url), answer.decode()),
            )
        )
        return Played(status, answer)

    def write(self, path: Path) -> None:
        """Keep it all, without the folders of the machine that it ran on."""
        path.write_text(json.dumps([asdict(each) for each in self.exchanges], indent=1) + "\n")


def _path(url: str) -> str:
    parts = urlsplit(url)
    return parts.path + (f"?{parts.query}" if parts.query else "")


def _shortened(path: str, answer: str) -> str:
    """Leave out metrics that nobody reads here, and where files were."""
    if path.endswith("/metrics"):
        answer = "\n".join(line for line in answer.splitlines() if _KEPT_METRICS.match(line)) + "\n"
    if path.startswith("/server_info"):
        told = json.loads(answer)
        told = {name: told[name] for name in told if name not in _OF_THE_MACHINE}
        answer = json.dumps(told)
    return _FOLDERS.sub("/models/", answer)
