"""Stage 7: one engine is asked, and its answer goes to the client.

One try and no more. What became of it is an exception that says how far it came, and with that what may be done next:
``ConnectFailed`` (nothing was sent) and ``Refused`` (the engine said that it took nothing on) leave every way open;
after ``Lost`` the engine may have worked. ``failover`` decides.
"""

from __future__ import annotations

from engine_adapter.base import OPENAI_ENDPOINTS, Continuation
from engine_adapter.errors import ConnectFailed
from engine_adapter.http import UpstreamResponse
from gateway.asking import Asker, Lost
from gateway.dispatch import Route
from gateway.draft import Draft
from gateway.errors import EngineGaveUp, GatewayError, OverTime, UpstreamUnusable
from gateway.fleet import Fleet
from gateway.instance import Instance
from gateway.prefilling import Handed, Prefiller
from gateway.prompts import PromptBook
from gateway.protocols.base import Ask
from gateway.protocols.decode import whole_pairs
from gateway.protocols.openai_errors import named_status
from gateway.relay import RelayOptions, Reply, StreamWriter, Through, relay
from gateway.replies import MAY_GO_ELSEWHERE, Refused, Replies
from gateway.takeover import Plan
from tracing.messages import message_chain
from tracing.record import AttemptRole, Outcome
from tracing.runs import RunLinker

_ERROR_BODY_BYTES = 1 << 20


class Attempter:
    """Asks engines and relays their answers."""

    def __init__(self, asker: Asker, fleet: Fleet, linker: RunLinker, prompts: PromptBook, replies: Replies) -> None:
        self._asker, self._fleet, self._linker = asker, fleet, linker
        self._prompts, self._replies, self._prefiller = prompts, replies, Prefiller(asker, fleet)

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
        limits = self._asker.limits_of(instance)
        writer = StreamWriter(reply, limits) if ask.stream else None
        if prefill is not None:
            async with self._prefiller.prefilled(prefill, ask, salt, draft, writer, plan) as handed:
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
        send = await self._asker.sending(instance, ask, salt, draft, plan, is_native=is_native, more=more)
        role = AttemptRole.CONTINUATION if plan is not None else AttemptRole.DECODE if handed else AttemptRole.ANSWER
        draft.begin_attempt(instance.id, role)
        draft.sent_ns, draft.engine_may_work, draft.prefilled = draft.now_ns(), True, None
        try:
            response = await self._asker.head(send, instance, limits, writer, draft)
            instance.answers.add(response)
            try:
                if draft.reader is None:
                    self._read_by(instance, ask, draft, is_native=is_native)
                if handed is not None and response.status == 200:
                    await handed.computed(writer)
                    draft.prefilled = handed.counts.prompt_usage()
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

    def _read_by(self, instance: Instance, ask: Ask, draft: Draft, *, is_native: bool) -> None:
        adapter = instance.spec.adapter
        draft.is_native, draft.adapter_name = is_native, adapter.name
        reader = draft.reader = draft.protocol.reader(ask, adapter, draft.answering(), is_native=is_native)
        draft.journal.follow(lambda: reader.seen.pieces)

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
        elif writer is not None or plan is not None:
            error = UpstreamUnusable("the engine does not answer with a stream", code="engine_no_stream")
            raise Lost(error, in_stream=plan is not None)
        else:
            await self._whole(response, limits, draft, reply, handed)
            self._fleet.request_answered(route.instance, route.ticket)

    async def _refusal(
        self, response: UpstreamResponse, limits: RelayOptions, draft: Draft, reply: Reply, *, is_first: bool
    ) -> None:
        body = await self._asker.read(response, limits, _ERROR_BODY_BYTES, draft)
        draft.end_attempt(response.status, f"status_{response.status}")
        refused = Refused(response.status, body, response.headers)
        if response.status >= 500 and response.status not in MAY_GO_ELSEWHERE:
            code = f"engine_{response.status}"
            raise Lost(UpstreamUnusable(f"the engine answered {response.status}", code=code), refused=refused)
        draft.engine_may_work = not is_first
        if response.status in MAY_GO_ELSEWHERE or not is_first:
            raise refused
        draft.reader = None
        await self._replies.show_refusal(refused, draft, reply)

    async def _whole(
        self, response: UpstreamResponse, limits: RelayOptions, draft: Draft, reply: Reply, handed: Handed | None
    ) -> None:
        body = whole_pairs(await self._asker.read(response, limits, self._asker.options.answer_cap_bytes, draft))
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
        if plan is not None:
            reader.seen.count_anew()
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
        if isinstance(error, EngineGaveUp) and plan is None and reader.seen.head is None and not reader.seen.pieces:
            status = named_status(error.engine_body)
            if status in MAY_GO_ELSEWHERE:  # the stream's first word: it took nothing on
                draft.reader, draft.engine_may_work = None, False
                raise Refused(status, error.engine_body, {})
        draft.own_hits = plan.splice.own_hits() if plan is not None else None
        if error is not None:
            raise Lost(error, in_stream=True)
        draft.end(Outcome.OK, 200)

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
