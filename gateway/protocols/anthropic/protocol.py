"""``POST /v1/messages``, put together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from engine_adapter.base import EngineAdapter
from gateway.errors import BadRequest, GatewayError
from gateway.protocols.anthropic.answer import Shown
from gateway.protocols.anthropic.errors import engine_error_body, error_body, error_event
from gateway.protocols.anthropic.native import NativeMessageReader
from gateway.protocols.anthropic.request import continued, read_dialog, shows_thinking
from gateway.protocols.anthropic.stream import MessageWriter
from gateway.protocols.base import Answering, AnswerReader, Ask, Sent, ask_of_dialog, objects, untranslatable_ask
from gateway.protocols.form import Form
from gateway.protocols.translated import TranslatedReader

_CHAT_NAMES = {
    "messages": "messages",
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "user": "metadata.user_id",
}


@dataclass(frozen=True, slots=True)
class Messages:
    """The Messages endpoint."""

    chat_names: ClassVar[Mapping[str, str]] = _CHAT_NAMES
    endpoint: str = "messages"
    path: str = "/v1/messages"
    forwarded: tuple[str, ...] = ("anthropic-version", "anthropic-beta")
    grows: str | None = "messages"

    async def past(self, form: Form, tenant: str) -> None:
        """Nothing: each request says everything."""

    def read(self, sent: Sent, past: object = None, *, needs_limit: bool = True) -> Ask:
        """Read a request. Raises ``BadRequest``."""
        values = sent.form.values
        try:
            dialog = read_dialog(values, needs_limit=needs_limit)
        except BadRequest as error:
            return untranslatable_ask(
                sent,
                self.endpoint,
                error,
                conversation=objects(values.get("messages")),
                request=shows_thinking(values),
                previous_response_id=continued(values),
            )
        return ask_of_dialog(dialog, sent, self.endpoint, request=shows_thinking(values))

    def reader(self, ask: Ask, adapter: EngineAdapter, answering: Answering, *, is_native: bool) -> AnswerReader:
        """Return what follows an answer."""
        reader: AnswerReader
        if is_native:
            reader = NativeMessageReader(answering.model if answering.model != answering.served_model else None)
        else:
            reader = TranslatedReader(adapter, MessageWriter(Shown(answering, thinking=ask.request is not False)))
        reader.seen.may_call = ask.may_call
        return reader

    def error_body(self, error: GatewayError, request_id: str | None = None) -> bytes:
        """Return an error in Anthropic's shape."""
        return error_body(error, request_id)

    def engine_error_body(self, status: int, body: bytes, request_id: str | None = None) -> bytes:
        """Return an engine's error in Anthropic's shape."""
        return engine_error_body(status, body, request_id)

    def failed_stream(self, error_body: bytes) -> bytes:
        """Return the error as the stream's one event."""
        return error_event(error_body)

    def headers(self, request_id: str) -> Mapping[str, str]:
        """Return the header that Anthropic's clients show as the request's id."""
        return {"request-id": request_id}


MESSAGES = Messages()
