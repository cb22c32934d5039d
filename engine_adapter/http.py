"""What is needed of the HTTP client that speaks to engines (``wire_client`` is one), and what is built on it.

It sends bytes and reads bytes. What it adds is the one distinction on which a safe retry rests: ``ConnectFailed`` says
that nothing was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from engine_adapter.errors import UpstreamBroken, UpstreamError

READ_BYTES = 1 << 16
"""Bytes that are read ahead of a slow client before the connection is paused (twice this at most)."""

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before engines close theirs (uvicorn, llama.cpp: 5 s): a request that meets a closing one
costs another connection, and where it was delivered it cannot be sent again safely."""


class UpstreamResponse(Protocol):
    """An answer whose head has arrived. ``close`` must be called on every path; it is idempotent."""

    @property
    def status(self) -> int:
        """The HTTP status."""

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers by lower-case name."""

    async def read_some(self) -> bytes:
        """Return what has arrived, at least a byte; ``b""`` at the end. Raises ``UpstreamBroken``."""

    def interrupt(self) -> None:
        """Let a ``read_some`` that waits raise ``TimeoutError``; nothing is lost, it may be called again."""

    def carry(self, take: Callable[[bytes], None] | None) -> None:
        """Let ``take`` have what comes while somebody waits in ``read_some``, who then sleeps on; ``None``: nobody."""

    async def read_all(self, limit_bytes: int) -> bytes:
        """Return the rest of the body. Raises ``UpstreamBroken``, ``AnswerTooLong``."""

    def give_up(self) -> None:
        """Let whoever reads it find it broken off, now."""

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else cut it, which stops the engine's work."""


class UpstreamClient(Protocol):
    """What the gateway needs of an HTTP client."""

    async def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | None = None,
        *,
        connect_timeout_s: float | None = None,
    ) -> UpstreamResponse:
        """Send and wait for the answer's head. Raises ``ConnectFailed``, ``UpstreamBroken``. Cancelling cuts it.

        ``connect_timeout_s``: instead of the client's own, where a connection must be made.
        """


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Limits of the client; there is none on the whole time, which belongs to the caller."""

    connect_timeout_s: float = 5.0


async def get_bytes(
    client: UpstreamClient, url: str, headers: Mapping[str, str], *, timeout_s: float = 5.0, limit_bytes: int = 1 << 22
) -> bytes:
    """Return what is at ``url``. Raises ``UpstreamError`` for any other status than 200, too much, or silence."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request("GET", url, headers)
            try:
                if response.status != 200:
                    raise UpstreamError(f"{url} answers {response.status}")
                return await response.read_all(limit_bytes)
            finally:
                response.close()
    except TimeoutError:
        raise UpstreamBroken(f"{url} is silent for {timeout_s:g} s") from None


async def get_json(
    client: UpstreamClient, url: str, headers: Mapping[str, str], *, timeout_s: float = 5.0, limit_bytes: int = 1 << 22
) -> Mapping[str, object]:
    """Return the JSON object at ``url``. Raises ``UpstreamError`` for any other status, shape or silence."""
    body = await get_bytes(client, url, headers, timeout_s=timeout_s, limit_bytes=limit_bytes)
    try:
        return msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, RecursionError):
        raise UpstreamError(f"{url} does not answer a JSON object") from None
