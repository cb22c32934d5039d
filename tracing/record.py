"""The one immutable record of a request, from which its bill, its trace, its metrics and its log line follow.

Everything here is a value: the pipeline closes one ``RequestRecord`` when a request ends, however it ends, and nobody
changes it afterwards. Times are integer nanoseconds since the Unix epoch, money is integer nano-units of the price
book's currency, token classes are disjoint. All of them are structs, which are made in a third of the time that a
frozen dataclass takes: each request makes some twenty.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec


class Outcome(StrEnum):
    """How a request ended."""

    OK = "ok"  # the answer was delivered whole
    REJECTED = "rejected"  # refused before any engine saw it (bad request, no key, over a limit)
    UPSTREAM_REFUSED = "upstream_refused"  # the engine answered 4xx
    UPSTREAM_FAILED = "upstream_failed"  # no engine answered, or it answered 5xx
    TRUNCATED = "truncated"  # the engine's stream stopped without an end
    ABORTED = "aborted"  # the client left
    DIED = "died"  # the gateway's process died before the request ended


class UsageSource(StrEnum):
    """Where the token counts come from, best first."""

    ENGINE = "engine"  # the engine's own usage object
    RECOVERED = "recovered"  # counted by the gateway from what was seen of a stream that ended early
    MISSING = "missing"  # something was computed and nobody counted it: never billed as 0
    NONE = "none"  # nothing was computed


class HitSource(StrEnum):
    """Where the split of the prompt into fresh and hit tokens comes from."""

    REPORTED = "reported"  # the engine told the hits of each tier
    INFERRED = "inferred"  # the engine told less (a total, "storage"); the tiers follow from the stores' events
    TOTAL = "total"  # the engine told a total only: it stands in ``hit_unknown_tokens``
    UNKNOWN = "unknown"  # nobody told: hits are 0 for want of a count and lie inside ``fresh_tokens``


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Disjoint token classes of one answer. ``prompt_tokens`` is their sum; reasoning lies inside output.

    The write classes hold tokens that were computed and that the API bills as written to its cache; engines that bill
    no writes leave them 0, and their computed tokens are all ``fresh``.
    """

    fresh_tokens: int = 0  # prompt tokens that were computed (and not billed as written)
    hit_device_tokens: int = 0
    hit_host_tokens: int = 0
    hit_disk_tokens: int = 0
    hit_pool_tokens: int = 0
    hit_unknown_tokens: int = 0  # cached, and the engine does not say in which tier
    output_tokens: int = 0
    reasoning_tokens: int = 0
    source: UsageSource = UsageSource.NONE
    write_tokens: int = 0  # written, the API has one lifetime or doesn't say which
    write_5m_tokens: int = 0  # written to live five minutes
    write_1h_tokens: int = 0  # written to live an hour
    hit_source: HitSource = HitSource.UNKNOWN
    tool_uses: tuple[tuple[str, int], ...] = ()  # tools that the API ran itself and charges for by use, how often each

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed, whatever the tier."""
        return (self.hit_device_tokens + self.hit_host_tokens + self.hit_disk_tokens + self.hit_pool_tokens
                + self.hit_unknown_tokens)  # fmt: skip

    @property
    def written_tokens(self) -> int:
        """Prompt tokens that were computed and billed as written, whatever their lifetime."""
        return self.write_tokens + self.write_5m_tokens + self.write_1h_tokens

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens, as OpenAI counts them."""
        return self.fresh_tokens + self.hit_tokens + self.written_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens."""
        return self.prompt_tokens + self.output_tokens


class ChargeLine(msgspec.Struct, frozen=True, gc=False):
    """One priced token class: ``amount_nano = quantity * unit price``, rounded as the book says."""

    token_class: str  # a rate of billing.prices ("fresh", "hit_device", …, "output"), "request", "minimum", a tool
    quantity: int
    amount_nano: int


class ChargeBasis(msgspec.Struct, frozen=True, gc=False):
    """What a charge was looked up by, so that anyone can do it again, and which price that gave."""

    model: str
    at_ns: int  # the request's arrival: it picks the dates and calendar windows
    team: str | None = None
    region: str | None = None
    service_tier: str | None = None
    rule: str | None = None  # the price that was picked, in words; ``None`` when there was none


class Charge(msgspec.Struct, frozen=True, gc=False):
    """What a request costs. ``amount_nano`` is ``None`` exactly when ``unpriced_reason`` is set: unknown is never 0."""

    currency: str
    price_version: str
    lines: tuple[ChargeLine, ...] = ()
    amount_nano: int | None = None
    saved_nano: int | None = None  # the same tokens with no cache, less ``amount_nano``
    unpriced_reason: str | None = None
    basis: ChargeBasis | None = None


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One instance as the router saw it when it decided."""

    instance: str
    hit_tokens: tuple[int, int, int, int]  # device, host, disk, pool: the leading run that could be read there
    queued_tokens: int  # prompt tokens routed there and not yet answered
    expected_ttft_ns: int
    healthy: bool = True
    cost_ns: int | None = None  # with what others would have waited for it


class Decision(msgspec.Struct, frozen=True, gc=False):
    """Where the request went and why."""

    policy: str
    instance: str
    candidates: tuple[Candidate, ...]
    predicted_hit_tokens: int
    exact: bool  # token ids were hashed (not text chunks) and the chosen source's events were whole
    fetch_tokens: tuple[int, int, int, int] | None = None  # from host, disk, pool, a peer: expected to be read there
    fetch_from: str | None = None  # the instance whose pages are read
    preferred: str | None = None  # what would have been chosen, where routing only watches


class AttemptRole(StrEnum):
    """What an instance was asked for."""

    ANSWER = "answer"
    CONTINUATION = "continuation"  # of an answer that another one had begun
    PREFILL = "prefill"  # the prompt alone, for the instance that decodes
    DECODE = "decode"  # an answer to a prompt that another one computed


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One try at one instance. ``delivered_pieces``: what the client had of the answer when it began."""

    instance: str
    started_ns: int
    ended_ns: int
    status: int | None  # HTTP status, None when there was none
    error: str | None = None
    role: AttemptRole = AttemptRole.ANSWER
    delivered_pieces: int = 0


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call that the model asked for in this answer."""

    id: str
    name: str


class PromptNote(msgspec.Struct, frozen=True, gc=False):
    """What became of a conversation on its way into a prompt. Values of closed sets, never content."""

    echo: str = "none"
    """Of the newest answer that it quotes (``engine_adapter.answers.EchoState``): "none", "unknown", "same", "kept",
    "changed", "template_rewrites". The last two say whose doing it is that generated pages are not found again."""
    echo_won_tokens: int = 0
    """Hit tokens that would not have been, had the answers been rendered anew instead of sent as generated."""
    special_tokens: str | None = None
    """What was done where text spells a special token: "literal", "escaped", "passed"; ``None``: none is spelled."""
    repairs: tuple[str, ...] = ()
    """The policies of prefix repair that changed the request."""
    repair_won_tokens: int = 0
    """Hit tokens beyond those that the request would have had as it came, had all before it gone as they came, too."""
    echo_lost_tokens: int = 0
    """Of the newest answer, where it is quoted otherwise than it was generated: computed again; 0 also if unknown."""


class RunLink(msgspec.Struct, frozen=True, gc=False):
    """Which run and step a request belongs to, and on what evidence."""

    run_id: str
    step: int  # from 1
    method: str  # a value of tracing.runs.LinkMethod
    confidence: float  # 1.0 for explicit evidence
    previous_request_id: str | None = None
    parent_run_id: str | None = None  # the run that called for this one, a sub-agent's
    parent_request_id: str | None = None  # … in the answer to this request
    parent_call_id: str | None = None  # … by this tool call
    conversation_id: str | None = None  # what the client itself calls the conversation


class PrefixMarks(msgspec.Struct, frozen=True, gc=False):
    """Names of a prompt's leading parts, from which it follows who shares which prefix; nothing of what was said.

    The n-th mark names the first ``n * stride_tokens`` tokens (the routing hash of the block that ends there), so equal
    marks mean equal prefixes in one cache namespace. ``digest`` names the whole conversation as the client sent it.
    """

    stride_tokens: int
    hashes: bytes  # 8 bytes a mark, little-endian
    is_cut: bool = False  # the prompt is longer than its marks
    digest: str | None = None

    def marks(self) -> tuple[int, ...]:
        """Return the marks, the shortest prefix first."""
        marks: tuple[int, ...] = struct.unpack(f"<{len(self.hashes) // 8}Q", self.hashes)
        return marks


class Identity(msgspec.Struct, frozen=True, gc=False):
    """Who asked."""

    tenant: str
    team: str
    key_id: str  # public part of the key, never the secret


class Stamps(msgspec.Struct, frozen=True, gc=False):
    """When each stage ended, in order; a stage that was not reached is ``None``."""

    arrived_ns: int
    routed_ns: int | None = None
    sent_ns: int | None = None
    first_token_ns: int | None = None
    last_token_ns: int | None = None
    closed_ns: int = 0

    @property
    def ttft_ns(self) -> int | None:
        """Arrival to first token."""
        return None if self.first_token_ns is None else self.first_token_ns - self.arrived_ns


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """One logical request from arrival to end."""

    request_id: str
    endpoint: str  # "chat", "completions"
    model: str  # as the client named it
    served_model: str  # as the instance names it
    identity: Identity
    stream: bool
    stamps: Stamps
    outcome: Outcome
    status: int  # what the client was answered
    usage: Usage
    charge: Charge
    link: RunLink | None = None
    decision: Decision | None = None
    attempts: tuple[Attempt, ...] = ()
    error: str | None = None  # a short class, never content
    gateway_prompt_tokens: int | None = None  # the gateway's own count, None in approximate mode
    salted: bool = False  # the client narrowed its cache namespace
    tool_calls: tuple[ToolCall, ...] = ()
    tool_results: tuple[str, ...] = ()  # ids of the calls whose results this request brought
    finish_reason: str | None = None
    labels: dict[str, str] = msgspec.field(default_factory=dict)  # bounded: "agent", "step_name", …
    traceparent: str | None = None  # W3C, as the client sent it
    usage_problems: tuple[str, ...] = ()  # what was wrong with the engine's usage: clamps and contradictions
    prefix: PrefixMarks | None = None  # ``None``: the prompt's ids were not known
    message_tip: str | None = None  # chained hash (hex) of prompt and answer: a restarted gateway links by it
    prompt: PromptNote | None = None  # ``None``: it was no chat that could be encoded

    @property
    def instance(self) -> str | None:
        """The instance that answered, or the last one tried."""
        return self.attempts[-1].instance if self.attempts else None
