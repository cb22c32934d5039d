"""The one HTTP client that speaks to engines, behind an interface small enough to be replaced.

It sends bytes and reads bytes: no cookies, no redirects, no decompression, no proxies from the environment, no retries.
What it adds is the one distinction on which a safe retry rests: ``ConnectFailed`` says that nothing was sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import aiohttp
import msgspec

from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken, UpstreamError

READ_BYTES = 1 << 16
"""Bytes that are read ahead of a slow client before the connection is paused (twice this at most)."""

KEEP_ALIVE_S = 4.0
"""Idle connections are closed before engines close theirs (uvicorn: 5 s), since a request that meets a closing one
cannot be sent again safely."""


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

    async def read_all(self, limit_bytes: int) -> bytes:
        """Return the rest of the body. Raises ``UpstreamBroken``, ``AnswerTooLong``."""

    def close(self) -> None:
        """Give the connection back if the answer was read to its end, else cut it, which stops the engine's work."""


class UpstreamClient(Protocol):
    """What the gateway needs of an HTTP client."""

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> UpstreamResponse:
        """Send and wait for the answer's head. Raises ``ConnectFailed``, ``UpstreamBroken``. Cancelling cuts it."""


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Limits of the client; there is none on the whole time, which belongs to the caller."""

    connect_timeout_s: float = 5.0
    connections_per_instance: int = 4096


class AiohttpClient:
    """``UpstreamClient`` on aiohttp; an asynchronous context manager."""

    def __init__(self, options: ClientOptions | None = None) -> None:
        self._options = options or ClientOptions()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        options = self._options
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, limit_per_host=options.connections_per_instance, keepalive_timeout=KEEP_ALIVE_S
            ),
            timeout=aiohttp.ClientTimeout(total=None, connect=None, sock_connect=options.connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=READ_BYTES,
            skip_auto_headers=("User-Agent", "Accept-Encoding", "Content-Type"),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def request(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> UpstreamResponse:
        """Send and wait for the answer's head; see ``UpstreamClient``."""
        if self._session is None:
            raise RuntimeError("the client is not open")
        try:
            response = await self._session.request(method, url, data=body, headers=headers, allow_redirects=False)
        except aiohttp.ClientConnectorError as error:
            raise ConnectFailed(f"no connection: {error.os_error.strerror or type(error).__name__}") from error
        except (aiohttp.ServerTimeoutError, aiohttp.InvalidURL) as error:
            raise ConnectFailed(f"no connection: {type(error).__name__}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken(f"no answer: {type(error).__name__}") from error
        return _AiohttpResponse(response)


class _AiohttpResponse:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.headers: Mapping[str, str] = {name.lower(): value for name, value in response.headers.items()}

    @property
    def status(self) -> int:
        return self._response.status

    async def read_some(self) -> bytes:
        try:
            return await self._response.content.readany()
        except (aiohttp.ClientError, OSError) as error:
            raise UpstreamBroken(f"the answer broke off: {type(error).__name__}") from error

    async def read_all(self, limit_bytes: int) -> bytes:
        pieces, total = [], 0
        while piece := await self.read_some():
            total += len(piece)
            if total > limit_bytes:
                raise AnswerTooLong(f"the answer is longer than {limit_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)

    def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()


async def get_json(
    client: UpstreamClient, url: str, headers: Mapping[str, str], *, timeout_s: float = 5.0, limit_bytes: int = 1 << 22
) -> Mapping[str, object]:
    """Return the JSON object at ``url``. Raises ``UpstreamError`` for any other status, shape or silence."""
    try:
        async with asyncio.timeout(timeout_s):
            response = await client.request("GET", url, headers)
            try:
                if response.status != 200:
                    raise UpstreamError(f"{url} answers {response.status}")
                return msgspec.json.decode(await response.read_all(limit_bytes), type=dict[str, object])
            finally:
                response.close()
    except TimeoutError:
        raise UpstreamBroken(f"{url} is silent for {timeout_s:g} s") from None
    except (msgspec.DecodeError, RecursionError):
        raise UpstreamError(f"{url} does not answer a JSON object") from None
