"""Stage 1 and half of 3: a body read once, and only what is new of it; long texts in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

import msgspec

from engine_adapter.conversations import Anchors
from gateway.beginnings import Beginning, BodyMemo, Words, words_of
from gateway.protocols.base import Ask, EndpointProtocol, Sent, scan_body

LONG_BYTES = 1 << 17
"""More new text than this is read in a thread: it would hold up everybody else."""


_Read = TypeVar("_Read")


async def read_aside(read: Callable[[bytes], _Read], body: bytes) -> _Read:
    """Read a body in whichever way, one after which nobody has to wait: a long one in a thread."""
    return await asyncio.to_thread(read, body) if len(body) > LONG_BYTES else read(body)


class Scanned(msgspec.Struct, frozen=True):
    """A body's members, and what of them was known."""

    sent: Sent
    known: Beginning | None
    new_bytes: int
    """The body behind what was known of it."""


class Reading(msgspec.Struct, frozen=True):
    """All that a body says."""

    ask: Ask
    words: Words
    anchors: Anchors | None
    """What earlier prompts left at the messages' ends; ``None`` where the messages are not told apart."""


class BodyReader:
    """Reads bodies. For one event loop."""

    def __init__(self) -> None:
        self._memo = BodyMemo()

    async def scan(self, protocol: EndpointProtocol, body: bytes, tenant: str) -> Scanned:
        """Read a body's members. Raises ``BadRequest`` for what is no JSON object."""
        grows = protocol.grows
        known = self._memo.find((tenant, protocol.endpoint), body) if grows is not None else None
        opening = known.opening if known is not None else None
        new_bytes = len(body) - (opening.length if opening is not None else 0)
        if new_bytes > LONG_BYTES:
            sent = await asyncio.to_thread(scan_body, body, grows, opening)
        else:
            sent = scan_body(body, grows, opening)
        return Scanned(sent, known, new_bytes)

    async def read(self, protocol: EndpointProtocol, scanned: Scanned, tenant: str) -> Reading:
        """Read what the members say. Raises ``BadRequest``."""
        sent, known = scanned.sent, scanned.known
        past = await protocol.past(sent.form, tenant)
        is_told = known is not None and known.chain is not None  # else all of it is looked at, message by message
        looked_at = scanned.new_bytes if is_told else len(sent.body)
        if past is not None or looked_at > LONG_BYTES:
            ask, words = await asyncio.to_thread(_read, protocol, sent, past, known)
        else:
            ask, words = _read(protocol, sent, past, known)
        if protocol.grows is None:
            return Reading(ask, words, None)
        is_as_sent = ask.messages is sent.form.values.get(protocol.grows)
        owner = (tenant, protocol.endpoint)
        anchors = self._memo.keep(owner, sent, protocol.grows, known, words if is_as_sent else None)
        return Reading(ask, words, anchors if is_as_sent else None)


def _read(protocol: EndpointProtocol, sent: Sent, past: object, known: Beginning | None) -> tuple[Ask, Words]:
    """All that is linear in the body and needs nothing but it. Raises ``BadRequest``."""
    ask = protocol.read(sent, past)
    messages = (ask.messages if ask.linked is None else ask.linked) or ()
    is_as_sent = known is not None and messages is sent.form.values.get(known.opening.name)
    return ask, words_of(messages, known if is_as_sent else None)
