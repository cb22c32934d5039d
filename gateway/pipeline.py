"""The eight stages of one request, and nothing else.

====  ========================================  ==========================================
 1    read the body once, keep its bytes        ``protocols``, one object an endpoint
 2    admit: key, model, salt, budgets          ``identity``, ``models``, ``spending``
 3    run and step                              ``tracing.runs``
 4    tokenize and hash                         ``prompts``
 5    match                                     ``dispatch`` over ``radix_index``
 6    route, reserve                            ``dispatch`` over ``routing``
 7    send, relay, go on elsewhere              ``failover`` over ``attempt``
 8    close the one record                      ``recorder``
====  ========================================  ==========================================

Whatever ends a request (an answer, a refusal, a broken engine, a client that left, a shutdown), ``handle`` closes
exactly one record and gives everything back that it reserved. The key is checked before the body is read, so that a
stranger cannot make the gateway read one.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping

import msgspec

from billing.counts import UsageReading
from billing.usage import with_hits_of
from gateway.admission_gate import AdmissionGate
from gateway.attempt import Attempter
from gateway.diagnosis.watch import PromptWatch
from gateway.dispatch import BYTES_PER_TOKEN, Dispatcher
from gateway.draft import Draft, forwarded_of, labels_of, traceparent_of
from gateway.errors import BadRequest, Draining, GatewayError, NoInstance, UpstreamUnusable
from gateway.failover import Failover
from gateway.flights import CutOff, Flights
from gateway.guard import min_hit_of
from gateway.identity import Caller, KeyRing, effective_salt
from gateway.marks import prefix_marks
from gateway.models import ModelDirectory
from gateway.priority import priority_of
from gateway.prompts import Prompt, PromptBook
from gateway.protocols.base import Ask, EndpointProtocol, model_of, refuse_handover
from gateway.protocols.counting import is_counted
from gateway.reading import BodyReader, Reading, Scanned
from gateway.recorder import Recorder
from gateway.relay import ClientGone, Reply
from gateway.repair.apply import repair
from gateway.repair.unrepaired import Unrepaired
from gateway.replies import Replies
from gateway.run_ends import RunEnds, Why, ends_run
from gateway.sessions import session_of
from gateway.spending import Spending
from tracing.record import Outcome, Usage, UsageSource
from tracing.runs import RunEvidence, RunLinker

_log = logging.getLogger(__name__)
_RUN_ID_CHARS = 128
_IDS_AT_ONCE = 256
_CLIENT_CLOSED = 499  # nothing was answered, since nobody was there any more; nginx's number for it


class Arrival(msgspec.Struct, frozen=True):
    """A request as it came in. ``headers`` are matched case-insensitively; ``read_body`` may raise ``BodyTooLarge``.

    ``label``: what the client's URL calls its runs.
    """

    protocol: EndpointProtocol
    headers: Mapping[str, str]
    read_body: Callable[[], Awaitable[bytes]]
    label: str | None = None


class Admitted(msgspec.Struct, frozen=True):
    """A request after stages 1 and 2."""

    reading: Reading
    caller: Caller
    model: str
    salt: str | None
    new_bytes: int
    """The body behind what was known of it."""
    came: Scanned | None = None
    """The body as it came, where it was repaired."""

    @property
    def ask(self) -> Ask:
        """What is asked."""
        return self.reading.ask


class Pipeline:
    """Carries requests through the stages."""

    def __init__(
        self,
        *,
        keys: KeyRing,
        models: ModelDirectory,
        linker: RunLinker,
        prompts: PromptBook,
        dispatcher: Dispatcher,
        attempter: Attempter,
        failover: Failover,
        replies: Replies,
        recorder: Recorder,
        flights: Flights,
        ends: RunEnds,
        spending: Spending | None = None,
        compared: PromptWatch | None = None,
        gate: AdmissionGate | None = None,
    ) -> None:
        """``compared``: holds each request against the one before it, once it is over. ``gate``: where they wait for
        their turn."""
        self._keys, self._models, self._linker, self._prompts = keys, models, linker, prompts
        self._dispatcher, self._attempter, self._recorder, self._flights = dispatcher, attempter, recorder, flights
        self._failover, self._replies, self._spending, self._compared = failover, replies, spending, compared
        self._gate, self._ends = gate, ends
        self._reader, self._unrepaired, self._request_ids = BodyReader(), Unrepaired(), _request_ids()

    async def handle(self, arrival: Arrival, reply: Reply) -> None:
        """Answer one request. Raises only ``CancelledError``, when the client left."""
        draft = Draft(
            request_id=next(self._request_ids),
            protocol=arrival.protocol,
            traceparent=traceparent_of(arrival.headers),
            exports_spans=self._recorder.exports_spans,
            forwarded=forwarded_of(arrival.headers, arrival.protocol),
            labels=labels_of(arrival.headers, arrival.label),
        )
        try:
            async with self._flights.flight(draft):
                await self._stages(arrival, draft, reply)
        except CutOff:
            outcome = Outcome.TRUNCATED if reply.is_started else Outcome.UPSTREAM_FAILED
            await self._refuse(Draining("the gateway is going down"), outcome, draft, reply)
        except GatewayError as error:
            outcome = Outcome.UPSTREAM_FAILED if isinstance(error, UpstreamUnusable | NoInstance) else Outcome.REJECTED
            await self._refuse(error, outcome, draft, reply)
        except ClientGone:
            self._left(draft)
        except asyncio.CancelledError:
            self._left(draft)
            raise
        except Exception:  # the request boundary: a fault of ours is one request's, and is told as such
            _log.exception("request %s failed inside the gateway", draft.request_id)
            await self._refuse(GatewayError("the gateway failed"), Outcome.UPSTREAM_FAILED, draft, reply)
        finally:
            draft.end_attempt(None, draft.error or "cut")
            self._close(draft)

    async def _stages(self, arrival: Arrival, draft: Draft, reply: Reply) -> None:
        if self._flights.is_draining:
            raise Draining("the gateway is going down", retry_after_s=1)
        admitted = await self._admit(arrival, draft)
        draft.ask = admitted.ask
        self._link(admitted, arrival.headers, draft)
        self._recorder.admit(draft)
        if self._compared is not None and arrival.headers.get("x-keepwarm-explain"):
            previous_id = None if draft.link is None else draft.link.previous_request_id
            draft.verdict = await asyncio.to_thread(self._compared.verdict, previous_id, admitted.ask)
        draft.prompt = prompt = await self._prompt(admitted, admitted.reading, admitted.new_bytes)
        if admitted.came is not None:
            reading = await self._reader.read(arrival.protocol, admitted.came, admitted.caller.identity.tenant)
            draft.unrepaired = await self._prompt(admitted, reading, admitted.came.new_bytes)
        draft.marks = prefix_marks(prompt, draft.chain)
        draft.prompt_tokens = prompt.tokens if prompt is not None and prompt.is_counted else None
        draft.counts_checked = draft.counts_checked and prompt is not None and prompt.is_comparable
        if self._spending is not None and self._spending.holds_for(admitted.caller):
            await self._spending.admit(draft, admitted.ask, admitted.caller)
        unable = self._dispatcher.unable(admitted.model, admitted.ask)
        if (demand := min_hit_of(arrival.headers)) is not None:
            foreseen = self._dispatcher.foresee(admitted.model, prompt, len(admitted.ask.body), unable)
            unable |= demand.cold(foreseen, draft.prompt_tokens)
        answer = self._failover.answer
        if self._gate is None:
            await answer(admitted.model, admitted.ask, admitted.salt, draft, reply, unable)
            return
        foreseen = self._dispatcher.foresee(admitted.model, prompt, len(admitted.ask.body), unable)
        tokens = prompt.tokens if prompt is not None else len(admitted.ask.body) // BYTES_PER_TOKEN
        entry = self._gate.entry(draft, foreseen, tokens)
        async with self._gate.turn(admitted.model, entry, self._replies.waiting(draft, reply)):
            await answer(admitted.model, admitted.ask, admitted.salt, draft, reply, unable)

    async def _prompt(self, admitted: Admitted, reading: Reading, new_bytes: int) -> Prompt | None:
        model, ask = admitted.model, reading.ask
        return await self._prompts.encode(
            model,
            ask,
            self._dispatcher.salt_of(model, admitted.salt),
            self._dispatcher.block_sizes(model),
            ask.body,
            cached_as=self._dispatcher.cached_as(model),
            rules=self._dispatcher.rules(self._models.options(model), ask),
            key_id=admitted.caller.identity.key_id,
            chain=reading.words.chain,
            anchors=reading.anchors,
            new_bytes=new_bytes,
        )

    async def _admit(self, arrival: Arrival, draft: Draft) -> Admitted:
        caller = self._keys.authenticate(arrival.headers)
        draft.identity, draft.is_admitted, draft.caller = caller.identity, True, caller
        protocol, tenant = arrival.protocol, caller.identity.tenant
        scanned = await self._reader.scan(protocol, await arrival.read_body(), tenant)
        came = scanned
        if caller.repairs:
            text, draft.repairs = repair(scanned.sent.form, caller.repairs)
            if text is not None:
                scanned = await self._reader.scan(protocol, text.encode(), tenant)
        draft.model = model_of(scanned.sent.form.values)
        refuse_handover(scanned.sent.form.values)
        model = self._models.resolve(draft.model, caller)
        draft.served_model, draft.counts_checked = model, self._models.options(model).counts_checked
        reading = await self._reader.read(protocol, scanned, tenant)
        ask = reading.ask
        draft.stream, draft.salted = ask.stream, ask.cache_salt is not None
        salt = effective_salt(caller, ask.cache_salt)
        return Admitted(reading, caller, model, salt, scanned.new_bytes, came if draft.repairs else None)

    def _link(self, admitted: Admitted, headers: Mapping[str, str], draft: Draft) -> None:
        words = admitted.reading.words
        run_id = headers.get("x-keepwarm-run") or None
        if run_id is not None and (len(run_id) > _RUN_ID_CHARS or not run_id.isprintable()):
            raise BadRequest(f"x-keepwarm-run must be printable and at most {_RUN_ID_CHARS} characters")
        draft.chain, draft.tool_results = words.chain, words.new_result_ids
        draft.priority, draft.ends_run = priority_of(headers), ends_run(headers)
        ask, session = admitted.ask, session_of(headers, (admitted.ask.native or admitted.ask.translated).form.values)
        draft.link = self._linker.link(
            RunEvidence(
                key_id=admitted.caller.identity.key_id,
                request_id=draft.request_id,
                at_ns=draft.arrived_ns,
                explicit_run_id=run_id,
                session_id=session.key if session is not None else None,
                previous_response_id=ask.previous_response_id,
                tool_result_ids=words.result_ids,
                message_hashes=draft.chain,
                trace_id=None if draft.traceparent is None else draft.traceparent[3:35],
                parent_session_id=session.parent if session is not None else None,
                parent_run_id=headers.get("x-keepwarm-parent-run") or None,
                conversation_id=run_id or (session.name if session is not None else None),
                messages=(ask.messages if ask.linked is None else ask.linked) or (),
            )
        )

        if (run := draft.run) is not None:
            self._ends.begun(run)

    def _left(self, draft: Draft) -> None:
        """The client is gone. Some leave at the last word that they need, before ``[DONE]``: that answer is whole. So
        do all at an engine's error, which is no end of theirs."""
        if draft.reader is not None and (seen := draft.reader.seen).is_shown:
            self._attempter.remember_answer(draft)
            draft.end_attempt(200, seen.error)
            draft.end(Outcome.OK if seen.error is None else Outcome.TRUNCATED, 200, seen.error)
        draft.end(Outcome.ABORTED, draft.status or _CLIENT_CLOSED, "client_gone")

    async def _refuse(self, error: GatewayError, outcome: Outcome, draft: Draft, reply: Reply) -> None:
        draft.fail(error, outcome)
        try:
            await self._replies.show_error(error, draft, reply)
        except ClientGone:
            pass

    def _close(self, draft: Draft) -> None:
        if draft.link is not None and draft.outcome is not Outcome.OK:
            self._linker.unanswered(draft.link, draft.request_id, key_id=draft.identity.key_id)
        if draft.unrepaired is not None and draft.decision is not None:
            draft.unrepaired_hits = self._unrepaired.hits(draft.decision.instance, None, draft.unrepaired)
        reader, model = draft.reader, draft.served_model or draft.model
        if reader is not None and reader.seen.pieces and (draft.is_undercounted or not is_counted(reader.usage())):
            draft.text_tokens = self._prompts.tokens_of(model, reader.seen.said())
        record = self._recorder.close(draft)
        if draft.watch is not None:
            draft.watch.answered(_watched(draft, record.usage))
        counted = record.gateway_prompt_tokens
        if draft.counts_checked and counted is not None and record.usage.source is UsageSource.ENGINE:
            self._prompts.answered(draft.served_model or draft.model, agrees=counted == record.usage.prompt_tokens)
        if self._spending is not None:
            self._spending.settle(draft, record)
        if self._compared is not None and draft.ask is not None:
            self._compared.take(record, draft.ask, draft.reader)
        if (run := draft.run) is not None:
            if draft.ends_run and draft.outcome is Outcome.OK:
                self._ends.end(run, Why.TOLD)
            self._ends.over(run, (attempt.instance for attempt in draft.attempts))


def _watched(draft: Draft, usage: Usage) -> Usage:
    """Return the counts of an answer with the hits of the instance that answered last, whoever began it."""
    if draft.begun_hits is None or draft.own_hits is None or usage.source is not UsageSource.ENGINE:
        return usage
    return with_hits_of(UsageReading(usage, ()), UsageReading(draft.own_hits, ())).usage


def _request_ids() -> Iterator[str]:
    """Yield names for requests that nobody can guess, of one process alone. Each draw is a system call, during which
    other threads take the interpreter: so it is for many."""
    while True:
        drawn = os.urandom(12 * _IDS_AT_ONCE).hex()
        yield from (f"req-{drawn[at : at + 24]}" for at in range(0, len(drawn), 24))
