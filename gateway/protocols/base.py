"""What an endpoint's protocol is to the pipeline: how its requests are read, its answers shown, its errors shaped.

The pipeline knows no protocol. Every request, whatever it was written in, is an ``Ask`` with chat messages: that is
what engines see, what prompts are made of and what runs are recognized by. Where the engine that answers speaks the
endpoint itself, the client's own bytes go there and the engine's come back; where it does not, it gets the ``Ask``'s
chat body and its answer is translated. Nothing here knows the HTTP library on either side.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from billing.counts import UsageReading
from engine_adapter.base import EngineAdapter, Merge
from gateway.errors import BadRequest, GatewayError
from gateway.protocols.chat_request import chat_form
from gateway.protocols.dialog import Dialog
from gateway.protocols.form import Form, FormError, Opening, Raw, scan, scan_on
from gateway.protocols.seen import Seen

MAX_MODEL_CHARS = 256

Json = Mapping[str, object]


class Sent(msgspec.Struct, frozen=True):
    """A body for an engine: its bytes, and where its members stand in them."""

    form: Form
    body: bytes

    def edited(self, members: Mapping[str, object | Merge]) -> bytes:
        """Return the bytes with these members set and every other byte kept. O(body)."""
        edits: dict[str, object] = {}
        for name, value in members.items():
            if isinstance(value, Merge):
                inner = self.form.nested(name)
                edits[name] = dict(value.members) if inner is None else Raw(inner.edited(value.members))
            else:
                edits[name] = value
        return self.form.edited(edits).encode() if edits else self.body


class Ask(msgspec.Struct, frozen=True):
    """What the gateway needs of a request.

    ``form`` and ``body`` are what an engine gets that speaks OpenAI's completions and nothing more; ``native`` is what
    an engine gets that speaks this endpoint itself. For OpenAI's own endpoints they are the same.
    """

    form: Form
    endpoint: str
    model: str
    stream: bool
    shows_usage: bool  # the client asked for the usage of a stream
    shows_detail: bool  # the client asked for hits by tier
    cache_salt: str | None
    messages: Sequence[Json] | None  # None where they are not a list of objects: the engine will judge
    tools: Sequence[Json] | None
    prompt: str | Sequence[int] | None
    body: bytes = b""
    native: Sent | None = None
    refusal: GatewayError | None = None  # why only engines that speak the endpoint themselves can answer
    generates: bool = True
    previous_response_id: str | None = None
    linked: Sequence[Json] | None = None  # the conversation by which its run is found, where that is not ``messages``
    request: object = None  # what the protocol's own answers need to know of the request

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold calls of tools."""
        return bool(self.form.values.get("tools"))

    @property
    def translated(self) -> Sent:
        """The body for an engine that speaks chat completions."""
        return Sent(self.form, self.body)


class Answering(msgspec.Struct, frozen=True, gc=False):
    """What an answer needs to know of the request that it answers."""

    request_id: str
    tenant: str = "default"
    model: str = ""  # as the client named it
    served_model: str = ""
    prompt_tokens: int | None = None  # the gateway's own count
    hit_tokens: int = 0  # as predicted
    created_s: int = msgspec.field(default_factory=lambda: int(time.time()))


class AnswerReader(Protocol):
    """Follows one answer: remembers what the record needs, and gives the client what its protocol has for it."""

    @property
    def seen(self) -> Seen:
        """What was seen so far."""

    def has_ended(self) -> bool:
        """Tell whether the stream's last event was seen."""

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Take one event of the engine's stream; return what the client gets for it, and whether it brought output."""

    def answer(self, body: bytes) -> bytes:
        """Take a whole answer; return what the client gets. Raises ``UpstreamUnusable`` for one that is none."""

    def closing(self) -> bytes:
        """Return the end of a stream whose engine said how it finished, and left the end mark out."""

    def failure(self, error_body: bytes) -> bytes:
        """Return the end of a stream that failed, ``error_body`` being an error in the protocol's shape."""

    def usage(self) -> UsageReading | None:
        """Return the engine's counts as disjoint classes, ``None`` while there are none."""


class EndpointProtocol(Protocol):
    """One endpoint as its clients speak it."""

    @property
    def endpoint(self) -> str:
        """Its name in records, settings and capabilities."""

    @property
    def path(self) -> str:
        """Where engines that speak it have it."""

    @property
    def grows(self) -> str | None:
        """The member that is the conversation, an array that longer requests begin with; ``None`` where none is."""

    @property
    def forwarded(self) -> tuple[str, ...]:
        """Headers that belong to the protocol: engines that speak it get them as the client sent them."""

    @property
    def chat_names(self) -> Mapping[str, str]:
        """What it calls a chat completion's members, where that is another name: so that errors about a request that
        was translated name what the client sent."""

    async def past(self, form: Form, tenant: str) -> object:
        """Return what the gateway keeps that the request refers to, ``None`` for nothing. Raises ``BadRequest``."""

    def read(self, sent: Sent, past: object) -> Ask:
        """Read a request. Pure, any thread. Raises ``BadRequest`` for what the gateway cannot work with."""

    def reader(self, ask: Ask, adapter: EngineAdapter, answering: Answering, *, is_native: bool) -> AnswerReader:
        """Return what follows the answer of an engine of this kind."""

    def error_body(self, error: GatewayError, request_id: str | None = None) -> bytes:
        """Return an error as the protocol's clients expect it."""

    def engine_error_body(self, status: int, body: bytes, request_id: str | None = None) -> bytes:
        """Return an engine's error in the protocol's shape, with the engine's words."""

    def failed_stream(self, error_body: bytes) -> bytes:
        """Return a whole stream that says nothing but the error."""

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Return the protocol's own headers of every answer."""


def ask_of_dialog(
    dialog: Dialog, sent: Sent, endpoint: str, *, request: object = None, previous_response_id: str | None = None
) -> Ask:
    """Return the ask of a request that was written in another protocol than OpenAI's completions."""
    form = chat_form(dialog)
    return Ask(
        form=form,
        body=form.text.encode(),
        native=sent,
        endpoint=endpoint,
        model=dialog.model,
        stream=dialog.stream,
        shows_usage=True,
        shows_detail=False,
        cache_salt=salt_of(sent.form.values),
        messages=objects(form.values["messages"]),
        tools=objects(form.values.get("tools")),
        prompt=None,
        previous_response_id=previous_response_id,
        request=request,
    )


def untranslatable_ask(
    sent: Sent,
    endpoint: str,
    refusal: GatewayError,
    *,
    conversation: Sequence[Json] | None = None,
    request: object = None,
    previous_response_id: str | None = None,
) -> Ask:
    """Return the ask of a request that an engine which speaks the endpoint may understand, and no other can be asked.

    ``conversation``: its messages or items as they came. Raises ``BadRequest`` for what not even the gateway can work
    with.
    """
    values = sent.form.values
    return Ask(
        form=sent.form,
        body=sent.body,
        native=sent,
        endpoint=endpoint,
        model=model_of(values),
        stream=stream_of(values),
        shows_usage=True,
        shows_detail=False,
        cache_salt=salt_of(values),
        messages=None,
        tools=None,
        prompt=None,
        refusal=refusal,
        linked=conversation,
        previous_response_id=previous_response_id,
        request=request,
    )


_HANDOVER = ("kv_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room")


def scan_body(body: bytes, grows: str | None = None, opening: Opening | None = None) -> Sent:
    """Read a body's members; of one that begins with ``opening``, the rest. Raises ``BadRequest`` for no JSON object.

    ``grows``: see ``scan``.
    """
    try:
        return Sent(scan(body, grows) if opening is None else scan_on(body, opening), body)
    except FormError as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}", code="invalid_json") from None


def refuse_handover(values: Json) -> None:
    """Raise ``BadRequest`` for members by which engines are told whose pages to take: those are the gateway's to say.

    A client that could name them would have an engine read another tenant's pages, or connect to a place of its choice.
    """
    for name in _HANDOVER:
        if values.get(name) is not None:
            raise BadRequest(
                f"'{name}' is not for clients: the gateway tells engines where pages come from", param=name
            )


def model_of(values: Json) -> str:
    """Return the model that a request names. Raises ``BadRequest``."""
    model = values.get("model")
    if not isinstance(model, str) or not model:
        raise BadRequest("you must provide a model parameter", param="model", code="missing_model")
    if len(model) > MAX_MODEL_CHARS:
        raise BadRequest(f"the model's name is longer than {MAX_MODEL_CHARS} characters", param="model")
    return model


def stream_of(values: Json) -> bool:
    """Tell whether a request wants a stream. Raises ``BadRequest``."""
    stream = values.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise BadRequest("'stream' must be true or false", param="stream")
    return bool(stream)


def salt_of(values: Json) -> str | None:
    """Return the cache salt that a request wishes for. Raises ``BadRequest``.

    SGLang's ``extra_key`` keeps caches apart as well, but its events don't tell of it: as a part of the salt they do.
    """
    salt, extra = values.get("cache_salt"), values.get("extra_key")
    if salt is not None and not isinstance(salt, str):
        raise BadRequest("'cache_salt' must be a string", param="cache_salt")
    return salt if extra is None else msgspec.json.encode([salt, extra]).decode()


def objects(value: object) -> Sequence[Json] | None:
    """Return a list of JSON objects, ``None`` for anything else."""
    return value if isinstance(value, list) and {*map(type, value)} <= {dict} else None
