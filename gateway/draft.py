"""One request while it runs; the pipeline's stages write what they learn into it, and it becomes one record."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping

import msgspec

from billing.budgets import Ticket
from billing.usage import recovered_usage, with_inferred_tiers
from gateway.errors import GatewayError
from gateway.identity import ANONYMOUS, Caller
from gateway.limits.limiter import Passage
from gateway.limits.rules import Taken
from gateway.priority import Priority
from gateway.prompt_job import Prompt
from gateway.protocols.base import Answering, AnswerReader, Ask, EndpointProtocol
from gateway.protocols.counting import is_counted
from gateway.residency import Watch
from gateway.run_ends import run_name
from gateway.splice import Journal
from tracing.messages import MessageChain
from tracing.record import (
    Attempt,
    AttemptRole,
    Charge,
    Decision,
    HitSource,
    Identity,
    Outcome,
    PrefixMarks,
    PromptNote,
    RunLink,
    Stamps,
    Usage,
    UsageSource,
)

LABEL_CHARS = 64
HEADER_CHARS = 1024
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,128})?", re.ASCII)


class Settled(msgspec.Struct, frozen=True, gc=False):
    """What a request came to, once its answer is there."""

    usage: Usage
    problems: tuple[str, ...]
    charge: Charge


class Draft(msgspec.Struct):
    """What is known so far. Times are wall-clock ns, taken from one reading of the wall clock and a monotonic clock."""

    request_id: str
    protocol: EndpointProtocol
    traceparent: str | None = None
    exports_spans: bool = False  # engines' own spans are to hang under ours
    forwarded: Mapping[str, str] = msgspec.field(default_factory=dict)  # the protocol's own headers, as they came
    identity: Identity = ANONYMOUS
    is_admitted: bool = False  # a key let it in
    caller: Caller | None = None
    model: str = ""
    served_model: str = ""
    stream: bool = False
    link: RunLink | None = None
    ends_run: bool = False  # its client says that it is its run's last
    priority: Priority = Priority.NORMAL
    decision: Decision | None = None
    attempts: list[Attempt] = msgspec.field(default_factory=list)
    attempt_instance: str | None = None  # of the attempt that runs now
    attempt_started_ns: int = 0
    failed_at: str = ""  # the instance that the attempt failed at, if it does
    attempt_role: AttemptRole = AttemptRole.ANSWER
    ask: Ask | None = None  # the request as it was read
    verdict: str | None = None  # how it follows the request before it, where the client asks
    prompt: Prompt | None = None
    repairs: tuple[str, ...] = ()  # policies that changed the body
    unrepaired: Prompt | None = None  # of the body as it came
    unrepaired_hits: int = 0  # what that prompt would have hit
    prompt_tokens: int | None = None
    counts_checked: bool = True
    salted: bool = False
    tool_results: tuple[str, ...] = ()
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    chain: MessageChain = ()
    message_tip: str | None = None
    marks: PrefixMarks | None = None
    reader: AnswerReader | None = None
    journal: Journal = msgspec.field(default_factory=Journal)  # ids of the answer's tokens, where engines tell them
    is_native: bool = True  # the reader follows an engine that speaks the endpoint itself
    adapter_name: str = ""  # of the engine that the reader was made for
    ticket: Ticket = msgspec.field(default_factory=Ticket)  # what is reserved in budgets
    passage: Passage | None = None  # what is taken of the caller's limits
    limits: tuple[Taken, ...] = ()  # how its limits stood, for the client to know
    settled: Settled | None = None  # once it is known before the request is closed
    watch: Watch | None = None  # wants to know what the last instance reports of the prompt
    prefilled: Usage | None = None  # what an engine counted of the prompt that it computed for another one
    text_tokens: int = 0  # of the answer's text, where no engine counted all of them
    begun_hits: Usage | None = None  # where another engine goes on: the prompt's hits at the one that began
    own_hits: Usage | None = None  # … and what the one that goes on had of what it was given
    outcome: Outcome | None = None
    status: int = 0
    error: str | None = None
    engine_may_work: bool = False  # a request was sent, and no answer says that it was refused
    has_lost: bool = False  # an engine that may have worked was given up for another one
    routed_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    arrived_ns: int = msgspec.field(default_factory=time.time_ns)
    _attempt_pieces: int = 0
    _anchor_ns: int = msgspec.field(default_factory=time.monotonic_ns)

    @property
    def endpoint(self) -> str:
        """What the record calls the endpoint."""
        return self.protocol.endpoint

    @property
    def run(self) -> str | None:
        """Its run's name among the runs of all keys."""
        return None if self.link is None else run_name(self.identity.key_id, self.link.run_id)

    def answering(self) -> Answering:
        """Return what the answer needs to know of the request, once it is routed."""
        hits = self.predicted_hits() if self.prompt_tokens is not None else ()
        return Answering(
            request_id=self.request_id,
            tenant=self.identity.tenant,
            model=self.model,
            served_model=self.served_model,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=sum(hits),
            created_s=self.arrived_ns // 10**9,
        )

    def now_ns(self) -> int:
        """Return the time; it never runs backwards within a request."""
        return self.arrived_ns + time.monotonic_ns() - self._anchor_ns

    @property
    def delivered_pieces(self) -> int:
        """Events with output that the client has got of a stream."""
        return self.reader.seen.pieces if self.reader is not None else 0

    def begin_attempt(self, instance: str, role: AttemptRole = AttemptRole.ANSWER) -> None:
        """An engine is about to be asked."""
        self.attempt_instance, self.attempt_started_ns = instance, self.now_ns()
        self.attempt_role, self._attempt_pieces = role, self.delivered_pieces

    def keep_hits(self) -> None:
        """Another engine is to go on with the answer: what the prompt hit is what it hit where the answer began, as
        that engine told or, where it died before, as the index knew. The first one's word stands."""
        if self.begun_hits is not None:
            return
        told, reading = self.prefilled, self.reader.usage() if self.reader is not None else None
        if told is None and reading is not None and reading.usage.source is UsageSource.ENGINE:
            told = reading.usage
        if told is None or told.hit_source is HitSource.UNKNOWN:
            self.begun_hits = self._expected_usage(0)
        else:
            self.begun_hits = with_inferred_tiers(told, known) if any(known := self.predicted_hits()) else told

    def end_attempt(self, status: int | None, error: str | None = None) -> None:
        """The attempt that runs is over. Does nothing when none runs."""
        if self.attempt_instance is not None:
            self.attempts.append(
                Attempt(
                    self.attempt_instance,
                    self.attempt_started_ns,
                    self.now_ns(),
                    status=status,
                    error=error,
                    role=self.attempt_role,
                    delivered_pieces=self._attempt_pieces,
                )
            )
            self.attempt_instance = None

    def output_seen(self) -> bool:
        """An event brought output; returns whether it was the first."""
        self.last_token_ns = self.now_ns()
        if self.first_token_ns is not None:
            return False
        self.first_token_ns = self.last_token_ns
        return True

    def end(self, outcome: Outcome, status: int, error: str | None = None) -> None:
        """The request ended like this. The first word stands."""
        if self.outcome is None:
            self.outcome, self.status, self.error = outcome, status, error

    def fail(self, error: GatewayError, outcome: Outcome) -> None:
        """The request ended with this error."""
        self.end(outcome, error.status, error.code)

    def stamps(self) -> Stamps:
        """Return when each stage ended."""
        return Stamps(
            arrived_ns=self.arrived_ns,
            routed_ns=self.routed_ns,
            sent_ns=self.sent_ns,
            first_token_ns=self.first_token_ns,
            last_token_ns=self.last_token_ns,
            closed_ns=self.now_ns(),
        )

    def prompt_note(self, usage: Usage) -> PromptNote | None:
        """Return what became of the conversation on its way into a prompt."""
        prompt, repairs = self.prompt, self.repairs
        if prompt is None or not (prompt.is_exact or prompt.special_tokens or repairs):
            return None
        handling = prompt.special_tokens.value if prompt.special_tokens is not None else None
        won = usage.hit_tokens - self.unrepaired_hits if self.unrepaired is not None else 0
        echo = prompt.echo
        return PromptNote(
            echo.state.value, echo.won_of(usage.hit_tokens), handling, repairs, won, echo_lost_tokens=echo.lost_tokens
        )

    @property
    def is_undercounted(self) -> bool:
        """Whether the answer stopped before its end, and its engine had counted less of it by then than was seen."""
        if self.outcome is Outcome.OK or self.reader is None or self.reader.seen.is_answered:
            return False
        reading = self.reader.usage()
        return reading is not None and is_counted(reading) and reading.usage.output_tokens < self.reader.seen.pieces

    @property
    def seen_tokens(self) -> int:
        """How many tokens of the answer were seen: as many as its text has, where that was counted (an event may bring
        several), and at least one for each event that brought output."""
        return 0 if self.reader is None else max(self.reader.seen.pieces, self.text_tokens)

    def recovered_usage(self) -> Usage:
        """Return what can be said without the engine's own count.

        Nothing, where no engine worked; *missing*, where one may have and nothing was seen of it; else the prompt as we
        counted it, its hits as the index knew them, and as many output tokens as were seen.
        """
        if not (self.engine_may_work or self.has_lost):
            return Usage(source=UsageSource.NONE)
        seen_tokens = self.seen_tokens
        if self.prompt_tokens is None or not seen_tokens:
            return Usage(source=UsageSource.MISSING)
        return self._expected_usage(seen_tokens)

    def _expected_usage(self, output_tokens: int) -> Usage:
        is_known = self.decision is not None and self.decision.exact
        predicted = self.predicted_hits() if is_known else None
        return recovered_usage(self.prompt_tokens or 0, output_tokens, predicted).usage

    def predicted_hits(self) -> tuple[int, int, int, int]:
        """Return the hits (by tier) that the index knew of at the chosen instance; none where it did not know all."""
        decision = self.decision
        if decision is None or not decision.exact:
            return 0, 0, 0, 0
        return next(c.hit_tokens for c in decision.candidates if c.instance == decision.instance)


def labels_of(headers: Mapping[str, str], agent: str | None = None) -> dict[str, str]:
    """Return the bounded labels that a client may give a step, as text that can be stored and shown.

    ``agent``: what the URL calls the agent. Header bytes that are no UTF-8 arrive as lone surrogates, which no JSON and
    no database takes.
    """
    given = {"agent": agent, "step_name": headers.get("x-keepwarm-step-name")}
    return {name: _printable(value[:LABEL_CHARS]) for name, value in given.items() if value}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else "\ufffd" for c in text)


def forwarded_of(headers: Mapping[str, str], protocol: EndpointProtocol) -> dict[str, str]:
    """Return the headers that belong to the protocol; anything that is no short ASCII line counts as not sent."""
    given = {name: headers.get(name) or "" for name in protocol.forwarded}
    return {n: v for n, v in given.items() if 0 < len(v) <= HEADER_CHARS and v.isascii() and v.isprintable()}


def traceparent_of(headers: Mapping[str, str]) -> str | None:
    """Return the trace that the client says it is part of; anything malformed counts as none (W3C trace context)."""
    value = headers.get("traceparent", "")
    return value if _TRACEPARENT.fullmatch(value) else None
