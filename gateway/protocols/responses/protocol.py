"""``POST /v1/responses``, put together, and the requests about responses that are kept.

A request that continues another, or refers to its items, is expanded here from what the gateway keeps: engines get the
whole conversation, whoever answered before, and a client can continue only what its own tenant was answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from engine_adapter.base import EngineAdapter
from gateway.errors import BadRequest, BodyTooLarge, NotFound
from gateway.protocols.base import Answering, AnswerReader, Ask, Sent, ask_of_dialog, untranslatable_ask
from gateway.protocols.form import Form, scan_text
from gateway.protocols.openai_errors import OpenAIShape
from gateway.protocols.responses.answer import Echo
from gateway.protocols.responses.items import input_items, references, resolved
from gateway.protocols.responses.listing import page_of
from gateway.protocols.responses.native import NativeResponseReader
from gateway.protocols.responses.request import read_dialog
from gateway.protocols.responses.store import ResponseStore, Stored
from gateway.protocols.responses.stream import ResponseWriter
from gateway.protocols.responses.tools import given_tools
from gateway.protocols.translated import TranslatedReader

Json = dict[str, object]
Query = Mapping[str, str]

MAX_REFERENCES = 4096
MAX_REFERRED_BYTES = 64 << 20
"""What a request may refer to, an item counted as often as it is named: else some bytes could stand for any number."""

_CHAT_NAMES: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
}


@dataclass(frozen=True, slots=True)
class Past:
    """What a request refers to: the items before its own, and those that it names by id."""

    items: Sequence[Mapping[str, object]] = ()
    referred: Mapping[str, Mapping[str, object]] | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """What its answer needs to know of a request."""

    values: Mapping[str, object]
    items: Sequence[Json]  # its own, without those before it
    conversation: Sequence[Mapping[str, object]]  # … and with them

    @property
    def is_kept(self) -> bool:
        """Whether the client wants the response kept: unless it says otherwise."""
        return self.values.get("store") is not False


class Responses(OpenAIShape):
    """The Responses endpoint."""

    endpoint = "responses"
    path = "/v1/responses"
    forwarded = ("openai-beta",)
    grows: str | None = "input"
    chat_names = _CHAT_NAMES

    def __init__(self, store: ResponseStore) -> None:
        self._store = store

    async def past(self, form: Form, tenant: str) -> Past | None:
        """Return what the request refers to, if anything. Raises ``BadRequest`` for what is not this tenant's, and
        ``BodyTooLarge``."""
        values = form.values
        named = references(input_items(values))
        referred = await self._referred(tenant, named) if named else None
        previous = values.get("previous_response_id")
        if previous is None:
            return None if referred is None else Past(referred=referred)
        chain = await self._store.chain(tenant, previous) if isinstance(previous, str) else None
        if chain is None:
            raise BadRequest(
                f"Previous response with id {str(previous)[:128]!r} not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return Past([item for stored in chain for item in (*stored.input, *stored.output())], referred)

    async def _referred(self, tenant: str, named: Sequence[str]) -> Mapping[str, Json]:
        if len(named) > MAX_REFERENCES:
            raise BadRequest(f"at most {MAX_REFERENCES} items can be referred to", param="input")
        referred = await self._store.items(tenant, named)
        if await asyncio.to_thread(_bytes_of, named, referred) > MAX_REFERRED_BYTES:
            raise BodyTooLarge(f"the items that are referred to are over the limit of {MAX_REFERRED_BYTES} bytes")
        return referred

    def read(self, sent: Sent, past: object = None) -> Ask:
        """Read a request. Raises ``BadRequest``."""
        earlier = past if isinstance(past, Past) else Past()
        values = sent.form.values
        own = resolved(input_items(values), earlier.referred or {})
        items = [*earlier.items, *own]
        request = _Request(values, own, items)
        previous = values.get("previous_response_id")
        previous_id = previous if isinstance(previous, str) else None
        native = sent if not earlier.items and earlier.referred is None else _expanded(sent, items)
        try:
            dialog = read_dialog(values, items)
        except BadRequest as error:
            return untranslatable_ask(
                native,
                self.endpoint,
                error,
                conversation=items,
                request=request,
                previous_response_id=previous_id,
            )
        return ask_of_dialog(dialog, native, self.endpoint, request=request, previous_response_id=previous_id)

    def reader(self, ask: Ask, adapter: EngineAdapter, answering: Answering, *, is_native: bool) -> AnswerReader:
        """Return what follows an answer."""
        request = ask.request
        assert isinstance(request, _Request)

        def keep(response: Json) -> None:
            if request.is_kept:
                stored = Stored(ask.previous_response_id, _named(request.items, str(response["id"])), response)
                self._store.put(answering.tenant, stored)

        if is_native:
            native = NativeResponseReader(keep, answering.model if answering.model != answering.served_model else None)
            native.seen.may_call = ask.may_call
            return native
        echo = Echo(answering, request.values, given_tools(request.values, request.conversation))
        reader = TranslatedReader(adapter, ResponseWriter(echo, keep))
        reader.seen.response_id, reader.seen.may_call = echo.response_id, ask.may_call
        return reader

    def failed_stream(self, error_body: bytes) -> bytes:
        """Return the error as the stream's one event."""
        return NativeResponseReader(lambda response: None).failure(error_body)

    # ---- responses that are kept

    async def get(self, tenant: str, response_id: str, query: Query) -> Json:
        """Return a kept response. Raises ``NotFound``, and ``BadRequest`` where its events are wanted again."""
        stored = await self._kept(tenant, response_id)
        if query.get("stream") in ("true", "1"):
            raise BadRequest("only responses that run in the background can be streamed again", param="stream")
        return stored.response

    async def items(self, tenant: str, response_id: str, query: Query) -> Json:
        """Return a page of the items that a kept response was asked with. Raises ``NotFound``, ``BadRequest``."""
        return page_of((await self._kept(tenant, response_id)).input, query)

    async def delete(self, tenant: str, response_id: str, query: Query) -> Json:
        """Forget a kept response. Raises ``NotFound``."""
        if not await self._store.delete(tenant, response_id):
            raise _missing(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, tenant: str, response_id: str, query: Query) -> Json:
        """Refuse: what is kept has ended, and what runs ends when its client leaves. Raises ``GatewayError``."""
        await self._kept(tenant, response_id)
        raise BadRequest("only responses that run in the background can be cancelled", code="not_cancellable")

    async def _kept(self, tenant: str, response_id: str) -> Stored:
        stored = await self._store.get(tenant, response_id)
        if stored is None:
            raise _missing(response_id)
        return stored


def _missing(response_id: str) -> NotFound:
    return NotFound(f"Response with id {response_id[:128]!r} not found.", code="response_not_found")


def _bytes_of(named: Sequence[str], referred: Mapping[str, Json]) -> int:
    sizes = {item_id: len(msgspec.json.encode(item)) for item_id, item in referred.items()}
    return sum(sizes.get(item_id, 0) for item_id in named)


def _expanded(sent: Sent, items: Sequence[object]) -> Sent:
    """Return the request with all that it refers to written out, for an engine that never saw it."""
    text = sent.form.edited({"input": items}, drop=frozenset({"previous_response_id"}))
    return Sent(scan_text(text), text.encode())


def _named(items: Sequence[Json], response_id: str) -> Sequence[Json]:
    """Return the items with ids, which a listing needs."""
    stem = response_id.removeprefix("resp_")
    return [
        item if isinstance(item.get("id"), str) else item | {"id": f"in_{stem}_{n}"} for n, item in enumerate(items)
    ]
