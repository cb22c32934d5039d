"""Agents for ``gateway``: bodies that share their beginnings as agents' do, and connections that send them."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

_SAID = "token model line function value request step check error return data user test plan agent search"
_NUMBER_CHARS = 16
_PLACE = "#" * _NUMBER_CHARS


def bodies(size: int, agents: int, *, stream: bool = False, model: str = "mock-model") -> list[bytes]:
    """Return one body an agent: a common system prompt (two fifths), its own history, a last turn with a place for a
    number."""
    rng = random.Random(7)
    system = _text(rng, size * 2 // 5)
    made = []
    for agent in range(agents):
        own, turns = random.Random(1000 + agent), max(1, min(40, size // 3000))
        messages = [{"role": "system", "content": system}]
        for turn in range(2 * turns):
            role = ("user", "assistant")[turn % 2]
            messages.append({"role": role, "content": f"a{agent} t{turn} " + _text(own, size * 3 // 5 // (2 * turns))})
        messages.append({"role": "user", "content": f"turn {_PLACE} please go on"})
        body = {"model": model, "messages": messages, "max_tokens": 16, "temperature": 0}
        made.append(json.dumps(body | ({"stream": True} if stream else {})).encode())
    return made


def _text(rng: random.Random, size: int) -> str:
    words = _SAID.split()
    text = " ".join(rng.choice(words) for _ in range(size // 5 + 1))
    return text[:size]


def numbered(made: Sequence[bytes], fresh_share: float = 0.0) -> Iterator[bytes]:
    """Yield bodies in turn without end, each with a number of its own; of a share even the beginning is new."""
    rng, number = random.Random(3), 0
    while True:
        for body in made:
            number += 1
            told = f"{number:0{_NUMBER_CHARS}}".encode()
            if rng.random() < fresh_share:
                body = body.replace(b'"content": "', b'"content": "' + told + b" ", 1)
            yield body.replace(_PLACE.encode(), told, 1)


@dataclass(slots=True)
class Tally:
    """What came of a load."""

    requests: int = 0
    pieces: int = 0
    errors: int = 0
    seconds: list[float] = field(default_factory=list)


class _Connection(asyncio.Protocol):
    """One connection of a client, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._waiter: asyncio.Future[bytes] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """It stands."""
        self.transport = transport  # type: ignore[assignment]  # uvloop's is none by class

    def data_received(self, data: bytes) -> None:
        """Collect an answer."""
        buffer = self._buffer
        buffer += data
        end = buffer.find(b"\r\n\r\n")
        if end < 0 or self._waiter is None or self._waiter.done():
            return
        head = bytes(buffer[:end]).lower()
        at = head.find(b"content-length:")
        if at >= 0:
            length = int(head[at + 15 :].split(b"\r\n", 1)[0])
            is_whole = len(buffer) >= end + 4 + length
        else:
            is_whole = buffer.endswith(b"0\r\n\r\n")
        if is_whole:
            self._waiter.set_result(bytes(buffer))
            buffer.clear()

    def connection_lost(self, error: Exception | None) -> None:
        """It is gone."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_exception(error or ConnectionError("closed"))

    async def ask(self, data: bytes) -> bytes:
        """Send a request, return the whole answer."""
        assert self.transport is not None
        self._waiter = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        return await self._waiter


async def run(
    port: int,
    source: Iterator[bytes],
    *,
    connections: int,
    requests: int,
    key: str,
    gap_s: float = 0.0,
) -> Tally:
    """Send ``requests`` over some connections, as fast as they are answered, or so far apart on each."""
    loop, tally, left = asyncio.get_running_loop(), Tally(), iter(range(requests))
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nauthorization: Bearer {key}\r\n"
        "content-type: application/json\r\ncontent-length: %d\r\n\r\n"
    ).encode()

    async def client(number: int) -> None:
        await asyncio.sleep(number * gap_s / connections)
        _, connection = await loop.create_connection(_Connection, "127.0.0.1", port)
        for _ in left:
            body = next(source)
            began = time.perf_counter()
            answer = await connection.ask(head % len(body) + body)
            took = time.perf_counter() - began
            tally.requests += 1
            tally.errors += not answer.startswith(b"HTTP/1.1 200")
            tally.pieces += answer.count(b"word ")
            tally.seconds.append(took)
            if gap_s > took:
                await asyncio.sleep(gap_s - took)
        if connection.transport is not None:
            connection.transport.close()

    await asyncio.gather(*(client(number) for number in range(connections)))
    return tally
