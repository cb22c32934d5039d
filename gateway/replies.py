"""What a client is shown that is no engine's answer: refusals and errors."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gateway.answer_headers import AnswerHeaders
from gateway.draft import Draft
from gateway.errors import EngineGaveUp, GatewayError, UpstreamUnusable
from gateway.protocols.own_names import engine_error, named_by
from gateway.relay import RelayOptions, Reply, StreamWriter
from tracing.record import Outcome

MAY_GO_ELSEWHERE = frozenset({429, 503, 529})
"""With these an engine says that it took nothing on; 529 is Anthropic's word for being overloaded."""

_NOT_THE_CLIENTS = frozenset({401, 407})
"""With these an engine refuses the gateway's own key; what it says of it may quote it."""

_PASSED_HEADERS = ("retry-after", "x-ratelimit-", "anthropic-ratelimit-")


class Refused(Exception):
    """The engine took nothing on; the request may go elsewhere."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"the engine answered {status}")
        self.status, self.body, self.headers = status, body, headers


class Waiting:
    """A client that asked for a stream and waits for its beginning: heartbeats show it in time that it is heard. With
    the first one the status is 200, and what is refused later comes as an error event."""

    def __init__(self, writer: StreamWriter, headers: Callable[[], Mapping[str, str]]) -> None:
        self._writer, self._headers = writer, headers

    def due_s(self) -> float:
        """Return the time until a heartbeat is due."""
        return self._writer.heartbeat_due_s()

    async def heartbeat(self) -> None:
        """Show one. Raises ``ClientGone``."""
        await self._writer.start(self._headers())
        await self._writer.heartbeat()


class Replies:
    """Shows what it is told to, as a status or, once a stream has begun, as its last event."""

    def __init__(self, headers: AnswerHeaders, options: RelayOptions) -> None:
        self.headers, self._options = headers, options

    def waiting(self, draft: Draft, reply: Reply) -> Waiting | None:
        """Return what shows the client that it waits; nothing where it didn't ask for a stream."""
        if not draft.stream:
            return None
        return Waiting(StreamWriter(reply, self._options), lambda: self.headers.of(draft))

    async def show_refusal(self, refused: Refused, draft: Draft, reply: Reply) -> None:
        """Give the client the engine's own refusal: status, words and Retry-After. One that is no client's business (a
        redirection, the gateway's own key) is a failure of the engine's."""
        if refused.status < 400 or refused.status in _NOT_THE_CLIENTS:
            error = UpstreamUnusable(f"the engine answered {refused.status}", code=f"engine_{refused.status}")
            draft.fail(error, Outcome.UPSTREAM_FAILED)
            await self.show_error(error, draft, reply)
            return
        outcome = Outcome.UPSTREAM_REFUSED if refused.status < 500 else Outcome.UPSTREAM_FAILED
        draft.end(outcome, refused.status, f"engine_{refused.status}")
        body = self._engines_words(refused.status, refused.body, draft)
        if reply.is_started:
            await self._end_stream(body, draft, reply)
            return
        told = refused.headers.items()
        passed = {n: v for n, v in told if n.startswith(_PASSED_HEADERS) and v.isascii() and v.isprintable()}
        await reply.send(refused.status, {**self.headers.of(draft), **passed, "content-type": "application/json"}, body)

    async def show_error(self, error: GatewayError, draft: Draft, reply: Reply) -> None:
        """Give the client an error of ours."""
        body = draft.protocol.error_body(named_by(error, draft.protocol.chat_names), draft.request_id)
        if reply.is_started:
            await self._end_stream(body, draft, reply)
            return
        headers = {**self.headers.of(draft), "content-type": "application/json"}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        await reply.send(error.status, headers, body)

    async def show_break(self, error: GatewayError, draft: Draft, reply: Reply) -> None:
        """End a stream that broke off and that nobody goes on with, in the engine's words where it had some."""
        draft.end(Outcome.TRUNCATED, 200, error.code)
        if draft.reader is not None and draft.reader.has_ended():
            return  # the engine's own last event went through, and was an error
        if isinstance(error, EngineGaveUp):
            body = self._engines_words(error.status, error.engine_body, draft)
        else:
            body = draft.protocol.error_body(error, draft.request_id)
        await self._end_stream(body, draft, reply)

    def _engines_words(self, status: int, body: bytes, draft: Draft) -> bytes:
        """Return an engine's error as the client expects it, about what the client sent."""
        names = draft.protocol.chat_names
        told = body if draft.is_native or not names else engine_error(status, body, names)
        return draft.protocol.engine_error_body(status, told, draft.request_id)

    async def _end_stream(self, error_body: bytes, draft: Draft, reply: Reply) -> None:
        failure = draft.reader.failure if draft.reader is not None else draft.protocol.failed_stream
        await StreamWriter(reply, self._options).end(failure(error_body))
