"""OpenAI's Embeddings: bytes go through to engines that have them; a prompt is counted and no output."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from billing.counts import UsageReading
from billing.usage import embeddings_usage
from engine_adapter.base import EngineAdapter
from gateway.errors import BadRequest, NotHere
from gateway.protocols.base import Answering, Ask, Sent, model_of, salt_of, stream_of
from gateway.protocols.decode import refuse_half
from gateway.protocols.form import Form
from gateway.protocols.model_name import renamed
from gateway.protocols.openai_errors import OpenAIShape
from gateway.protocols.seen import Seen
from gateway.protocols.sse import event_of


class EmbeddingsReader:
    """``AnswerReader`` over a list of embeddings."""

    def __init__(self, model: str | None = None) -> None:
        """``model``: the name to show instead of the engine's own."""
        self._model = model
        self.seen = Seen()

    def has_ended(self) -> bool:
        """Tell nothing: embeddings are no stream."""
        return self.seen.is_done

    def event(self, event: bytes) -> tuple[bytes, bool]:
        """Pass an event on."""
        return event, False

    def answer(self, body: bytes) -> bytes:
        """Take the answer; return it. Only its counts are read: the vectors are skipped, not decoded.

        Raises ``UpstreamUnusable`` for a broken one.
        """
        try:
            answer = msgspec.json.decode(body, type=_Answer)
        except (msgspec.DecodeError, RecursionError):
            refuse_half(body)
            return body
        self.seen.usage = answer.usage
        if self._model is None or answer.model is None:
            return body
        return renamed(body, self._model)

    def closing(self) -> bytes:
        """Return nothing."""
        return b""

    def failure(self, error_body: bytes) -> bytes:
        """Return the error as an event."""
        return event_of(error_body)

    def usage(self) -> UsageReading | None:
        """Return the engine's count."""
        return None if self.seen.usage is None else embeddings_usage(self.seen.usage)


class _Answer(msgspec.Struct):
    usage: dict[str, object] | None = None
    model: str | None = None


@dataclass(frozen=True, slots=True)
class Embeddings(OpenAIShape):
    """The Embeddings endpoint. Chat completions cannot stand in for it."""

    endpoint: str = "embeddings"
    path: str = "/v1/embeddings"
    forwarded: tuple[str, ...] = ()
    grows: str | None = None

    async def past(self, form: Form, tenant: str) -> None:
        """Nothing: each request says everything."""

    def read(self, sent: Sent, past: object = None) -> Ask:
        """Read a request. Raises ``BadRequest``."""
        values = sent.form.values
        if not isinstance(values.get("input"), str | list):
            raise BadRequest("you must provide an input: a string or a list", param="input")
        if stream_of(values):
            raise BadRequest("embeddings cannot be streamed", param="stream")
        return Ask(
            form=sent.form,
            body=sent.body,
            native=sent,
            endpoint=self.endpoint,
            model=model_of(values),
            stream=False,
            shows_usage=True,
            shows_detail=False,
            cache_salt=salt_of(values),
            messages=None,
            tools=None,
            prompt=None,
            refusal=NotHere(self.endpoint),
            generates=False,
        )

    def reader(self, ask: Ask, adapter: EngineAdapter, answering: Answering, *, is_native: bool) -> EmbeddingsReader:
        """Return what follows an answer."""
        return EmbeddingsReader(answering.model if answering.model != answering.served_model else None)

    def failed_stream(self, error_body: bytes) -> bytes:
        """Return the error as an event."""
        return event_of(error_body)


EMBEDDINGS = Embeddings()
