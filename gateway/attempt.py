"""Stage 7: one engine is asked, and its answer goes to the client.

A request goes elsewhere only when it cannot have run: no connection came about (``ConnectFailed``), or the engine said
so (``Refused``: 429 or 503). Anything else that breaks after sending is told to the client, since inference that may
have run is never repeated behind its back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from engine_adapter.base import OPENAI_ENDPOINTS, Merge
from engine_adapter.base import Ask as EngineAsk
from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken
from engine_adapter.http import UpstreamClient, UpstreamResponse
from gateway.answer_headers import AnswerHeaders
from gateway.dispatch import Route
from gateway.draft import Draft
from gateway.errors import GatewayError, UpstreamTimeout, UpstreamUnusable
from gateway.fleet import Fleet, Instance
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask, Sent
from gateway.relay import RelayOptions, Reply, StreamWriter, relay
from tracing.messages import message_chain
from tracing.record import Outcome
from tracing.runs import RunLinker

LONG_BODY_BYTES = 1 << 17
"""Bodies longer than this are read and edited in a thread: other streams must not wait for them."""

_ERROR_BODY_BYTES = 1 << 20
_MAY_GO_ELSEWHERE = frozenset({429, 503})
_PASSED_HEADERS = ("retry-after", "x-ratelimit-", "anthropic-ratelimit-")


class Refused(Exception):
    """The engine took nothing on; the request may go elsewhere."""

    def __init__(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        super().__init__(f"the engine answered {status}")
        self.status, self.body, self.headers = status, body, headers


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """Limits of one attempt."""

    relay: RelayOptions
    answer_cap_bytes: int = 64 << 20


class Attempter:
    """Asks engines and relays their answers."""

    def __init__(
        self,
        client: UpstreamClient,
        fleet: Fleet,
        linker: RunLinker,
        prompts: PromptBook,
        options: AttemptOptions,
        headers: AnswerHeaders,
    ) -> None:
        self._client, self._fleet, self._linker, self._options = client, fleet, linker, options
        self._prompts, self._headers = prompts, headers

    async def run(self, route: Route, ask: Ask, salt: str | None, draft: Draft, reply: Reply) -> None:
        """Ask the instance of ``route`` and carry its answer to the client, whatever it is.

        Raises ``ConnectFailed`` and ``Refused``, after which another instance may be asked; ``UpstreamUnusable`` for a
        failure before anything was shown; ``ClientGone``.
        """
        instance, adapter = route.instance, route.instance.spec.adapter
        is_native = _goes_natively(ask, instance, salt)
        if is_native and ask.endpoint not in OPENAI_ENDPOINTS:
            draft.counts_checked = False  # what prompt it makes of the request is its own affair
        sent = ask.native if is_native and ask.native is not None else ask.translated
        prompt = draft.prompt if draft.prompt is not None and not (is_native and ask.endpoint != "chat") else None
        prepared = adapter.prepare(
            EngineAsk(
                request_id=draft.request_id,
                stream=ask.stream,
                model=None if ask.model == draft.served_model else draft.served_model,
                salt=salt if instance.capabilities.salt else None,
                endpoint=ask.endpoint if is_native else "chat",
                input_ids=prompt.input_ids if prompt is not None else None,
                wants_output_ids=prompt is not None and prompt.answerable is not None,
            )
        )
        members = prepared.members if prompt is None else {**prepared.members, **prompt.members}
        own = {**(draft.forwarded if is_native else {}), **instance.spec.headers, **prepared.headers}
        headers = {"content-type": "application/json", **_traced(draft), **own}
        url = f"{instance.spec.url}{draft.protocol.path if is_native else _CHAT_PATH}"
        send = self._client.request("POST", url, headers, await _edited(sent, members))
        writer = StreamWriter(reply, self._options.relay) if ask.stream else None
        draft.begin_attempt(instance.id)
        draft.sent_ns, draft.engine_may_work = draft.now_ns(), True
        try:
            response = await self._head(send, writer, draft)
        except ConnectFailed as error:
            draft.engine_may_work = False
            draft.end_attempt(None, "connect_failed")
            self._fleet.connect_failed(instance, error)
            raise
        except UpstreamBroken:
            draft.end_attempt(None, "broken")
            instance.wake.set()
            raise UpstreamUnusable("the engine closed the connection without an answer") from None
        draft.reader = draft.protocol.reader(ask, adapter, draft.answering(), is_native=is_native)
        try:
            await self._answer(response, route, writer, draft, reply)
        finally:
            response.close()

    async def _head(
        self, send: Coroutine[Any, Any, UpstreamResponse], writer: StreamWriter | None, draft: Draft
    ) -> UpstreamResponse:
        """Wait for the answer's head, with heartbeats for a client that streams."""
        limit_s = self._options.relay.first_byte_timeout_s
        task, is_taken = asyncio.ensure_future(send), False
        try:
            async with asyncio.timeout(limit_s):
                while True:
                    await asyncio.wait({task}, timeout=writer.heartbeat_due_s() if writer is not None else None)
                    if task.done():
                        is_taken = True
                        return task.result()
                    if writer is not None:
                        await writer.start(self.headers(draft))
                        await writer.heartbeat()
        except TimeoutError:
            draft.end_attempt(None, "timeout")
            raise UpstreamTimeout(f"the engine did not answer within {limit_s:g} s") from None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not is_taken and not task.cancelled() and task.exception() is None:
                task.result().close()  # it came at the very moment when nobody wanted it any more

    async def _answer(
        self, response: UpstreamResponse, route: Route, writer: StreamWriter | None, draft: Draft, reply: Reply
    ) -> None:
        status = response.status
        if status != 200:
            await self._refusal(response, draft, reply)
        elif writer is not None and response.headers.get("content-type", "").startswith("text/event-stream"):
            await self._stream(response, route, writer, draft)
        else:
            await self._whole(response, draft, reply)

    async def _refusal(self, response: UpstreamResponse, draft: Draft, reply: Reply) -> None:
        body = await self._read(response, _ERROR_BODY_BYTES, draft)
        draft.engine_may_work = False
        draft.end_attempt(response.status, f"status_{response.status}")
        refused = Refused(response.status, body, response.headers)
        if response.status in _MAY_GO_ELSEWHERE:
            raise refused
        await self.show_refusal(refused, draft, reply)

    async def _whole(self, response: UpstreamResponse, draft: Draft, reply: Reply) -> None:
        body = await self._read(response, self._options.answer_cap_bytes, draft)
        draft.end_attempt(200)
        assert draft.reader is not None
        shown = draft.reader.answer(body)
        self.remember_answer(draft)
        kind = response.headers.get("content-type", "application/json")
        await reply.send(200, {**self._headers.of(draft, is_whole=True), "content-type": kind}, shown)
        draft.end(Outcome.OK, 200)

    async def _stream(self, response: UpstreamResponse, route: Route, writer: StreamWriter, draft: Draft) -> None:
        instance, sent_ns, reader = route.instance, draft.sent_ns or 0, draft.reader
        assert reader is not None

        def on_output() -> None:
            if draft.output_seen():
                elapsed_s = (draft.now_ns() - sent_ns) / 1e9
                instance.rates = instance.rates.learned(route.reservation.ahead_tokens, elapsed_s)
                route.reservation.answered()
                if route.watch is not None:
                    route.watch.computed()

        draft.status = 200
        writer.last_words = lambda: self._headers.summary(draft)
        await writer.start(self.headers(draft))
        error = await relay(
            response,
            writer,
            reader,
            self._options.relay,
            on_output,
            lambda: self.remember_answer(draft),
            lambda error: draft.protocol.error_body(error, draft.request_id),
        )
        if error is None:
            draft.end_attempt(200)
            draft.end(Outcome.OK, 200)
        else:
            draft.end_attempt(200, error.code)
            draft.end(Outcome.TRUNCATED, 200, error.code)

    async def _read(self, response: UpstreamResponse, limit_bytes: int, draft: Draft) -> bytes:
        try:
            async with asyncio.timeout(self._options.relay.first_byte_timeout_s):
                return await response.read_all(limit_bytes)
        except TimeoutError:
            draft.end_attempt(response.status, "timeout")
            raise UpstreamTimeout("the engine stopped in the middle of its answer") from None
        except UpstreamBroken:
            draft.end_attempt(response.status, "broken")
            raise UpstreamUnusable("the engine's connection broke in the middle of its answer") from None
        except AnswerTooLong as error:
            draft.end_attempt(response.status, "answer_too_long")
            raise UpstreamUnusable(str(error), code="answer_too_long") from None

    def remember_answer(self, draft: Draft) -> None:
        """Let the next request of this run be recognized, and its quotation of this answer; before its last bytes."""
        self._remember_ids(draft)
        if draft.link is None or draft.reader is None:
            return
        seen, message = draft.reader.seen, draft.reader.seen.message()
        chain = message_chain([message], draft.chain) if message is not None and draft.chain else ()
        draft.message_tip = chain[-1].digest.hex() if chain else None
        ids = [call.id for call in seen.tool_calls if call.id]
        self._linker.answered(
            draft.link, draft.request_id, ids, chain, key_id=draft.identity.key_id, response_id=seen.response_id
        )

    def _remember_ids(self, draft: Draft) -> None:
        seen = draft.reader.seen if draft.reader is not None else None
        if draft.prompt is None or seen is None or seen.output_ids is None or seen.stop_text is not None:
            return
        message = seen.message()
        if message is not None:
            counted = seen.usage.get("prompt_tokens") if seen.usage is not None else None
            self._prompts.remember(draft.prompt, message, seen.output_ids, counted)

    async def show_refusal(self, refused: Refused, draft: Draft, reply: Reply) -> None:
        """Give the client the engine's own refusal: status, words and Retry-After."""
        outcome = Outcome.UPSTREAM_REFUSED if refused.status < 500 else Outcome.UPSTREAM_FAILED
        draft.end(outcome, refused.status, f"engine_{refused.status}")
        body = draft.protocol.engine_error_body(refused.status, refused.body, draft.request_id)
        if reply.is_started:
            await self._end_stream(body, draft, reply)
            return
        passed = {name: value for name, value in refused.headers.items() if name.startswith(_PASSED_HEADERS)}
        await reply.send(refused.status, {**self.headers(draft), **passed, "content-type": "application/json"}, body)

    async def show_error(self, error: GatewayError, draft: Draft, reply: Reply) -> None:
        """Give the client an error of ours, as a status or, once a stream has begun, as its last event."""
        body = draft.protocol.error_body(error, draft.request_id)
        if reply.is_started:
            await self._end_stream(body, draft, reply)
            return
        headers = {**self.headers(draft), "content-type": "application/json"}
        if error.retry_after_s is not None:
            headers["retry-after"] = str(error.retry_after_s)
        await reply.send(error.status, headers, body)

    async def _end_stream(self, error_body: bytes, draft: Draft, reply: Reply) -> None:
        failure = draft.reader.failure if draft.reader is not None else draft.protocol.failed_stream
        await StreamWriter(reply, self._options.relay).end(failure(error_body))

    def headers(self, draft: Draft) -> dict[str, str]:
        """Return the headers by which a client finds its request again."""
        return self._headers.of(draft)


_CHAT_PATH = "/v1/chat/completions"


async def _edited(sent: Sent, members: Mapping[str, object | Merge]) -> bytes:
    """Return the body with these members set; long ones are edited in a thread."""
    return await asyncio.to_thread(sent.edited, members) if len(sent.body) > LONG_BODY_BYTES else sent.edited(members)


def _goes_natively(ask: Ask, instance: Instance, salt: str | None) -> bool:
    """Tell whether the client's own bytes go there: not where that would lose the tenant's salt."""
    if ask.native is None or not instance.speaks(ask.endpoint):
        return False
    takes = instance.capabilities
    loses_salt = salt is not None and takes.salt and ask.endpoint not in takes.salted_endpoints
    return not (loses_salt and ask.refusal is None)


def _traced(draft: Draft) -> dict[str, str]:
    return {} if draft.traceparent is None else {"traceparent": draft.traceparent}
