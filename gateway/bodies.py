"""A request's body, whole, within a size and a time: what a client sends is not waited for without end."""

from __future__ import annotations

import asyncio
from typing import Final

from aiohttp import hdrs, web

from gateway.errors import BadRequest, BodyTooLarge, BodyTooSlow, UnsupportedEncoding

BODY_TIMEOUT_S: Final = 120.0
FORM_BYTES: Final = 1 << 20
"""Enough for whatever operators tell the gateway."""


async def whole_body(
    request: web.Request, cap_bytes: int, *, timeout_s: float = BODY_TIMEOUT_S, may_be_packed: bool = False
) -> bytes:
    """Return the body. Raises ``BodyTooLarge``, ``UnsupportedEncoding`` for a compressed one, ``BodyTooSlow``, and
    ``BadRequest`` for one that broke off.

    ``may_be_packed``: the caller unpacks it, within a limit of its own.
    """
    too_large = BodyTooLarge(f"the body is over the limit of {cap_bytes} bytes")
    is_packed = request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() not in ("", "identity")
    if is_packed and not may_be_packed:
        raise UnsupportedEncoding("the body must not be compressed")
    if (request.content_length or 0) > cap_bytes:
        raise too_large
    try:
        async with asyncio.timeout(timeout_s):
            body = await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise too_large from None
    except TimeoutError:
        raise BodyTooSlow("the body did not arrive in time") from None
    except web.RequestPayloadError:
        raise BadRequest("the body could not be read", code="body_broken") from None
    if len(body) > cap_bytes:  # it came in chunks, and the application's own limit is higher
        raise too_large
    return body
