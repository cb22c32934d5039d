"""Stage 7: one engine is asked, and its answer goes to the client.

One try and no more. What became of it is an exception that says how far it came, and with that what may be done next:
``ConnectFailed`` (nothing was sent) and ``Refused`` (the engine said that it took nothing on) leave every way open;
after ``Lost`` the engine may have worked. ``failover`` decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from engine_adapter.base import OPENAI_ENDPOINTS, Continuation, Handover, Merge
from engine_adapter.base import Ask as EngineAsk
from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken
from engine_adapter.http import UpstreamClient, UpstreamResponse
from engine_adapter.separation import bootstrap_members, merged, prefill_members, transfer_answer, transfer_request
from gateway.dispatch import Route
from gateway.draft import Draft
from gateway.errors import EngineGaveUp, GatewayError, OverTime, UpstreamTimeout, UpstreamUnusable
from gateway.fleet import Fleet, Instance, Timeouts
from gateway.handover import PromptCounts
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask, Sent
from gateway.protocols.decode import json_object
from gateway.relay import RelayOptions, Reply, StreamWriter, Through, relay
from gateway.replies import Refused, Replies
from gateway.takeover import Plan
from tracing.messages import message_chain
from tracing.record import Attempt, AttemptRole, Outcome
from tracing.runs import RunLinker
from tracing.spans import upstream_traceparent

LONG_BODY_BYTES = 1 << 17
"""Bodies longer than this are read and edited in a thread: other streams must not wait for them."""

_ERROR_BODY_BYTES = 1 << 20
_MAY_GO_ELSEWHERE = frozenset({429, 503})
_LOOK_S = 1.0
_CHAT_PATH = "/v1/chat/completions"


class Lost(Exception):
    """The engine got the request and failed then: it may have worked.

    ``refused``: what it answered, where that was an error of its own (5xx). ``in_stream``: its stream had begun.
    """

    def __init__(self, error: GatewayError, *, refused: Refused | None = None, in_stream: bool = False) -> None:
        super().__init__(error.message)
        self.error, self.refused, self.in_stream = error, refused, in_stream


@dataclass(frozen=True, slots=True)
class Handed:
    """What the engine that decodes is told, and what the one that prefilled counted."""

    members: Mapping[str, object]
    counts: PromptCounts
    computing: asyncio.Future[Mapping[str, object]] | None = None  # the prompt, where it is not computed yet

    async def computed(self, writer: StreamWriter | None) -> None:
        """Wait until the prompt is computed, with heartbeats: before that there is no output, and no count of it."""
        while self.computing is not None and not self.computing.done():
            await asyncio.wait({self.computing}, timeout=None if writer is None else writer.heartbeat_due_s())
            if writer is not None and writer.has_begun and not writer.heartbeat_due_s():
                await writer.heartbeat()


@dataclass(frozen=True, slots=True)
class AttemptOptions:
    """Limits of one attempt, for instances that have none of their own."""

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
        replies: Replies,
        options: AttemptOptions,
    ) -> None:
        self._client, self._fleet, self._linker, self._options = client, fleet, linker, options
        self._prompts, self._replies = prompts, replies
        self._limits: dict[Timeouts, RelayOptions] = {}

    async def run(
        self,
        route: Route,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        reply: Reply,
        plan: Plan | None = None,
        prefill: Route | None = None,
    ) -> None:
        """Ask the instance of ``route`` and carry its answer to the client. With a ``plan`` it goes on with an answer
        that another began; with ``prefill`` it decodes what that route's instance computed.

        Raises ``ConnectFailed``, ``Refused`` and ``Lost``, after which the client may still be answered otherwise; a
        refusal that is the client's own fault it gets at once. Raises ``ClientGone``.
        """
        instance = route.instance
        limits = self._limits_of(instance)
        writer = StreamWriter(reply, limits) if ask.stream else None
        if prefill is not None:
            async with self._prefilled(prefill, instance, ask, salt, draft, writer, plan) as handed:
                await self._run(route, ask, salt, draft, reply, limits, writer, plan, handed)
        else:
            await self._run(route, ask, salt, draft, reply, limits, writer, plan, None)

    async def _run(
        self,
        route: Route,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        reply: Reply,
        limits: RelayOptions,
        writer: StreamWriter | None,
        plan: Plan | None,
        handed: Handed | None,
    ) -> None:
        instance = route.instance
        is_native = _goes_natively(ask, instance, salt) if plan is None else ask.endpoint in OPENAI_ENDPOINTS
        more = None if handed is None else handed.members
        send = await self._sending(instance, ask, salt, draft, plan, is_native=is_native, more=more)
        role = AttemptRole.CONTINUATION if plan is not None else AttemptRole.DECODE if handed else AttemptRole.ANSWER
        draft.begin_attempt(instance.id, role)
        draft.sent_ns, draft.engine_may_work = draft.now_ns(), True
        try:
            response = await self._head(send, instance, limits, writer, draft)
            instance.answers.add(response)
            try:
                if draft.reader is None:
                    self._read_by(instance, ask, draft, is_native=is_native)
                if handed is not None and response.status == 200:
                    await handed.computed(writer)
                await self._answer(response, route, limits, writer, draft, reply, plan, handed)
            finally:
                instance.answers.discard(response)
                response.close()
        except ConnectFailed as error:
            draft.engine_may_work = plan is not None
            draft.end_attempt(None, "connect_failed")
            self._fleet.connect_failed(instance, error)
            raise
        except Lost as lost:
            if _tells_of_health(lost.error) and not instance.is_draining:
                self._fleet.request_failed(instance, route.ticket, lost.error)
            raise

    async def _sending(
        self,
        instance: Instance,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        plan: Plan | None,
        *,
        is_native: bool,
        more: Mapping[str, object] | None = None,
        streams: bool | None = None,
    ) -> Coroutine[Any, Any, UpstreamResponse]:
        """Return what sends the request. ``more``: members that part prefill from decode."""
        adapter = instance.spec.adapter
        if is_native and ask.endpoint not in OPENAI_ENDPOINTS:
            draft.counts_checked = False  # what prompt it makes of the request is its own affair
        sent = ask.native if is_native and ask.native is not None else ask.translated
        prompt = draft.prompt if draft.prompt is not None and not (is_native and ask.endpoint != "chat") else None
        input_ids = prompt.input_ids if prompt is not None and (plan is None or plan.keeps_input_ids) else None
        prepared = adapter.prepare(
            EngineAsk(
                request_id=draft.request_id,
                stream=ask.stream if streams is None else streams,
                model=None if ask.model == draft.served_model else draft.served_model,
                salt=salt if instance.capabilities.salt else None,
                endpoint=ask.endpoint if is_native else "chat",
                input_ids=plan.input_ids if plan is not None and plan.input_ids is not None else input_ids,
                wants_output_ids=prompt is not None and prompt.answerable is not None,
                begun=plan.begun if plan is not None else None,
            )
        )
        members = prepared.members if prompt is None else {**prepared.members, **prompt.members}
        if plan is not None:
            members = {**members, **plan.members}
        if more is not None:
            parts = {
                n: merged(members.get(n), value) if isinstance(value, Merge) else value for n, value in more.items()
            }
            members = {**members, **parts}
        own = {**(draft.forwarded if is_native else {}), **instance.spec.headers, **prepared.headers}
        headers = {"content-type": "application/json", **_traced(draft), **own}
        url = f"{instance.spec.url}{draft.protocol.path if is_native else _CHAT_PATH}"
        body = await _edited(sent, members)
        return self._client.request("POST", url, headers, body, connect_timeout_s=instance.spec.timeouts.connect_s)

    @asynccontextmanager
    async def _prefilled(
        self,
        route: Route,
        decoding: Instance,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        writer: StreamWriter | None,
        plan: Plan | None,
    ) -> AsyncIterator[Handed]:
        """Let a prompt be computed: before the block, or beside it where both engines must be asked at once."""
        if route.instance.capabilities.handover is Handover.PARAMS:
            counts = PromptCounts(route.instance.spec.adapter)
            wanted: dict[str, object] = {"kv_transfer_params": transfer_request()}
            answer = await self._prefill(route, ask, salt, draft, writer, plan, wanted)
            counts.told(answer)
            told = transfer_answer(answer)
            yield Handed({} if told is None else {"kv_transfer_params": told}, counts)
            return
        room = bootstrap_members(route.instance.spec.url, route.instance.spec.bootstrap_port)
        beside = asyncio.ensure_future(self._prefill(route, ask, salt, draft, None, plan, room))
        handed = Handed(room, PromptCounts(route.instance.spec.adapter), beside)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(None) as scope:

                def ended(task: asyncio.Future[Mapping[str, object]]) -> None:
                    if task.cancelled():
                        return
                    if task.exception() is None:
                        handed.counts.told(task.result())
                    elif not scope.expired():
                        scope.reschedule(loop.time())  # nobody hands anything over: it is no use to wait

                beside.add_done_callback(ended)
                yield handed
        except TimeoutError:
            failure = beside.exception() if beside.done() and not beside.cancelled() else None
            draft.end_attempt(None, "given_up")
            raise (
                failure if failure is not None else Lost(UpstreamTimeout("the engine did not answer in time"))
            ) from None
        finally:
            beside.cancel()
            await asyncio.wait({beside})

    async def _prefill(
        self,
        route: Route,
        ask: Ask,
        salt: str | None,
        draft: Draft,
        writer: StreamWriter | None,
        plan: Plan | None,
        wanted: Mapping[str, object],
    ) -> Mapping[str, object]:
        """Let an engine compute the prompt; return its answer. Raises as ``run``; its attempt is noted."""
        instance, started_ns, error = route.instance, draft.now_ns(), "cut"
        limits, status = self._limits_of(instance), None
        is_native = ask.endpoint in OPENAI_ENDPOINTS
        members = {**prefill_members(ask.form.values), **wanted}
        try:
            send = await self._sending(
                instance, ask, salt, draft, plan, is_native=is_native, more=members, streams=False
            )
            response = await self._head(send, instance, limits, writer, draft)
            try:
                status = response.status
                body = await self._read(response, limits, self._options.answer_cap_bytes, draft)
            finally:
                response.close()
            error = f"status_{status}"
            if status in _MAY_GO_ELSEWHERE or 400 <= status < 500:
                raise Refused(status, body, response.headers)
            answer = json_object(body)
            if status != 200 or answer is None:
                raise Lost(UpstreamUnusable("the prompt was not computed", code="prefill_failed"))
            error = ""
            route.answered()
            self._fleet.request_answered(instance, route.ticket)
            return answer
        except ConnectFailed as failed:
            error, draft.failed_at = "connect_failed", instance.id
            self._fleet.connect_failed(instance, failed)
            raise
        except Refused:
            draft.failed_at = instance.id
            raise
        except Lost as lost:
            error, draft.failed_at = error if error != "cut" else lost.error.code, instance.id
            self._fleet.request_failed(instance, route.ticket, lost.error)
            raise
        finally:
            draft.attempts.append(
                Attempt(instance.id, started_ns, draft.now_ns(), status, error or None, role=AttemptRole.PREFILL)
            )

    def _read_by(self, instance: Instance, ask: Ask, draft: Draft, *, is_native: bool) -> None:
        adapter = instance.spec.adapter
        draft.is_native, draft.adapter_name = is_native, adapter.name
        reader = draft.reader = draft.protocol.reader(ask, adapter, draft.answering(), is_native=is_native)
        draft.journal.follow(lambda: reader.seen.pieces)

    async def _head(
        self,
        send: Coroutine[Any, Any, UpstreamResponse],
        instance: Instance,
        limits: RelayOptions,
        writer: StreamWriter | None,
        draft: Draft,
    ) -> UpstreamResponse:
        """Wait for the answer's head, with heartbeats for a client that streams, while the instance is there."""
        limit_s = min(limits.first_byte_timeout_s, limits.total_timeout_s)
        task, is_taken = asyncio.ensure_future(send), False
        try:
            async with asyncio.timeout(limit_s if limit_s < float("inf") else None):
                while True:
                    due_s = _LOOK_S if writer is None else min(writer.heartbeat_due_s(), _LOOK_S)
                    await asyncio.wait({task}, timeout=due_s)
                    if task.done():
                        is_taken = True
                        return task.result()
                    if instance.is_silent_for(limits.idle_timeout_s):
                        raise TimeoutError
                    if writer is not None and not writer.heartbeat_due_s():
                        await writer.start(self._replies.headers.of(draft))
                        await writer.heartbeat()
        except TimeoutError:
            draft.end_attempt(None, "timeout")
            error = UpstreamTimeout("the engine did not answer in time")
            raise Lost(error, in_stream=False) from None
        except UpstreamBroken:
            draft.end_attempt(None, "broken")
            raise Lost(UpstreamUnusable("the engine closed the connection without an answer")) from None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
            if not is_taken and not task.cancelled() and task.exception() is None:
                task.result().close()  # it came at the very moment when nobody wanted it any more

    async def _answer(
        self,
        response: UpstreamResponse,
        route: Route,
        limits: RelayOptions,
        writer: StreamWriter | None,
        draft: Draft,
        reply: Reply,
        plan: Plan | None,
        handed: Handed | None,
    ) -> None:
        if response.status != 200:
            await self._refusal(response, limits, draft, reply, is_first=plan is None)
        elif writer is not None and response.headers.get("content-type", "").startswith("text/event-stream"):
            await self._stream(response, route, limits, writer, draft, plan, handed)
        elif plan is not None:
            raise Lost(UpstreamUnusable("the engine does not answer with a stream"), in_stream=True)
        else:
            await self._whole(response, limits, draft, reply, handed)
            self._fleet.request_answered(route.instance, route.ticket)

    async def _refusal(
        self, response: UpstreamResponse, limits: RelayOptions, draft: Draft, reply: Reply, *, is_first: bool
    ) -> None:
        body = await self._read(response, limits, _ERROR_BODY_BYTES, draft)
        draft.end_attempt(response.status, f"status_{response.status}")
        refused = Refused(response.status, body, response.headers)
        if response.status >= 500 and response.status not in _MAY_GO_ELSEWHERE:
            code = f"engine_{response.status}"
            raise Lost(UpstreamUnusable(f"the engine answered {response.status}", code=code), refused=refused)
        draft.engine_may_work = not is_first
        if response.status in _MAY_GO_ELSEWHERE or not is_first:
            raise refused
        draft.reader = None
        await self._replies.show_refusal(refused, draft, reply)

    async def _whole(
        self, response: UpstreamResponse, limits: RelayOptions, draft: Draft, reply: Reply, handed: Handed | None
    ) -> None:
        body = await self._read(response, limits, self._options.answer_cap_bytes, draft)
        draft.end_attempt(200)
        assert draft.reader is not None
        shown = draft.reader.answer(body if handed is None else handed.counts.answer(body))
        self.remember_answer(draft)
        kind = response.headers.get("content-type", "application/json")
        await reply.send(200, {**self._replies.headers.of(draft, is_whole=True), "content-type": kind}, shown)
        draft.end(Outcome.OK, 200)

    async def _stream(
        self,
        response: UpstreamResponse,
        route: Route,
        limits: RelayOptions,
        writer: StreamWriter,
        draft: Draft,
        plan: Plan | None,
        handed: Handed | None,
    ) -> None:
        instance, reader = route.instance, draft.reader
        assert reader is not None
        is_answering = False

        def on_output() -> None:
            nonlocal is_answering
            is_first = draft.output_seen()
            if is_answering:
                return
            is_answering = True
            route.answered()
            self._fleet.request_answered(instance, route.ticket)
            if is_first and route.watch is not None:
                route.watch.computed()

        draft.status = 200
        writer.last_words = lambda: self._replies.headers.summary(draft)
        await writer.start(self._replies.headers.of(draft))
        error = await relay(
            response,
            writer,
            reader,
            limits,
            on_output,
            lambda: self.remember_answer(draft),
            through=_through(instance, draft, plan, handed),
            is_gone=lambda: instance.is_silent_for(limits.idle_timeout_s),
        )
        draft.end_attempt(200, None if error is None else error.code)
        if error is not None:
            raise Lost(error, in_stream=True)
        draft.end(Outcome.OK, 200)

    async def _read(self, response: UpstreamResponse, limits: RelayOptions, limit_bytes: int, draft: Draft) -> bytes:
        limit_s = min(limits.first_byte_timeout_s, limits.total_timeout_s)
        try:
            async with asyncio.timeout(limit_s if limit_s < float("inf") else None):
                return await response.read_all(limit_bytes)
        except TimeoutError:
            draft.end_attempt(response.status, "timeout")
            raise Lost(UpstreamTimeout("the engine stopped in the middle of its answer")) from None
        except UpstreamBroken:
            draft.end_attempt(response.status, "broken")
            error = UpstreamUnusable("the engine's connection broke in the middle of its answer")
            raise Lost(error) from None
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
            draft.link,
            draft.request_id,
            ids,
            chain,
            key_id=draft.identity.key_id,
            response_id=seen.response_id,
            message=message,
        )

    def _remember_ids(self, draft: Draft) -> None:
        seen = draft.reader.seen if draft.reader is not None else None
        if draft.prompt is None or seen is None or seen.output_ids is None or seen.stop_text is not None:
            return
        message = seen.message()
        if message is not None:
            counted = seen.usage.get("prompt_tokens") if seen.usage is not None else None
            self._prompts.remember(draft.prompt, message, seen.output_ids, counted)

    def _limits_of(self, instance: Instance) -> RelayOptions:
        """Return the limits that hold at this instance."""
        own = instance.spec.timeouts
        limits = self._limits.get(own)
        if limits is None:
            common = self._options.relay
            limits = self._limits[own] = replace(
                common,
                first_byte_timeout_s=own.first_byte_s or common.first_byte_timeout_s,
                idle_timeout_s=own.idle_s or common.idle_timeout_s,
                total_timeout_s=own.total_s or common.total_timeout_s,
            )
        return limits


async def _edited(sent: Sent, members: Mapping[str, object | Merge]) -> bytes:
    """Return the body with these members set; long ones are edited in a thread."""
    if not members:
        return sent.body
    return await asyncio.to_thread(sent.edited, members) if len(sent.body) > LONG_BODY_BYTES else sent.edited(members)


def _goes_natively(ask: Ask, instance: Instance, salt: str | None) -> bool:
    """Tell whether the client's own bytes go there: not where that would lose the tenant's salt."""
    if ask.native is None or not instance.speaks(ask.endpoint):
        return False
    takes = instance.capabilities
    loses_salt = salt is not None and takes.salt and ask.endpoint not in takes.salted_endpoints
    return not (loses_salt and ask.refusal is None)


def _through(instance: Instance, draft: Draft, plan: Plan | None, handed: Handed | None) -> Through | None:
    """Return what the engine's events go through before the reader sees them."""
    if handed is not None:
        draft.journal.is_whole = False
        if plan is None:
            return handed.counts
        counts, further = handed.counts, plan.splice
        return lambda event: [made for told in counts(event) for made in further(told)]
    journal = draft.journal if instance.capabilities.continuation is Continuation.IDS else None
    if journal is None:
        draft.journal.is_whole = False
    if plan is None or journal is None:
        return journal if plan is None else plan.splice
    splice = plan.splice
    return lambda event: [made for told in journal(event) for made in splice(told)]


def _tells_of_health(error: GatewayError) -> bool:
    """Tell whether a failure says something of the instance, and not of one request."""
    return not isinstance(error, OverTime | EngineGaveUp) and error.code not in ("event_too_long", "answer_too_long")


def _traced(draft: Draft) -> dict[str, str]:
    """Return the trace that the engine is part of: the client's own, or our attempt in it where spans are exported."""
    if not draft.exports_spans:
        return {} if draft.traceparent is None else {"traceparent": draft.traceparent}
    run_id, number = None if draft.link is None else draft.link.run_id, len(draft.attempts) + 1
    told = upstream_traceparent(draft.request_id, number, draft.identity.tenant, run_id, draft.traceparent)
    return {"traceparent": told}
