"""The contract between the gateway and an engine: what it can do, how it is asked, and how its answers are read.

An adapter holds no connection and no state; it is a table of answers about one kind of engine. The gateway never asks
which engine it talks to: it asks for ``capabilities``. Bodies go through untouched except for the members that
``prepare`` names, and nothing of an engine's extras reaches a client that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from engine_adapter.http import UpstreamClient
from engine_adapter.load import EngineLoad, LoadSource
from kvstore.event_wire import FLUSHED_TIERS
from kvstore.page import Tier

OPENAI_ENDPOINTS = frozenset({"chat", "completions"})
"""Endpoints by the names that records have for them: what everything that is called compatible with OpenAI speaks."""


class Continuation(StrEnum):
    """How an engine goes on with an answer that another one began."""

    NONE = "none"
    MESSAGE = "message"  # when told to continue the final message, which then is the assistant's: SGLang, vLLM
    PREFILL = "prefill"  # by itself, where the final message is the assistant's: llama.cpp
    IDS = "ids"  # given the ids of its tokens, with all that hangs on them: our own


class Handover(StrEnum):
    """How an engine that computed a prompt hands it to one that decodes; see ``separation``."""

    NONE = "none"
    BOOTSTRAP = "bootstrap"  # both are asked at once and meet in a room: SGLang
    PARAMS = "params"  # the first one answers with what the second one needs: vLLM


class LoadSignal(StrEnum):
    """How an engine tells its load."""

    NONE = "none"  # it does not
    SCRAPE = "scrape"  # when it is asked: ``load_paths`` and ``read_load``
    PUSH = "push"  # by itself, over a socket that ``InstanceFacts.load_sources`` names; also when it is asked


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kind of engine can do for the gateway, or one instance of it (``InstanceFacts.capabilities``)."""

    events: bool = False  # publishes KV events
    cached_detail: bool = False  # reports hits for each tier
    salt: bool = False  # takes a cache salt
    priority: bool = False  # orders its queue by the priority of requests
    session: bool = False  # takes the name of a request's run, and does something with it
    media: bool = False  # reads images, sound and files, where its model does
    load: LoadSignal = LoadSignal.NONE
    input_ids: bool = False  # takes token ids beside messages, and then reads those alone
    output_ids: bool = False  # tells an answer's token ids when it is asked to
    literal_text: bool = False  # by itself keeps special tokens that messages spell as ordinary text
    abort: bool = False  # can be told to stop a request by id
    threads: bool = False  # may hold conversations that requests to Messages only continue: a vendor's own API does
    continuation: Continuation = Continuation.NONE
    handover: Handover = Handover.NONE
    endpoints: frozenset[str] = OPENAI_ENDPOINTS  # which it speaks itself; others are translated to chat
    salted_endpoints: frozenset[str] = OPENAI_ENDPOINTS  # of these, where ``salt`` holds


@dataclass(frozen=True, slots=True)
class Merge:
    """Members to set inside an object member, whose other members stay."""

    members: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Begun:
    """An answer that another engine began: the ids of its tokens, where they are known, and how many pieces of text and
    calls were delivered of them."""

    ids: Sequence[int] = ()
    parts: int = 0


class Ask(msgspec.Struct, frozen=True):
    """What the gateway wants of one request besides what the client wrote."""

    request_id: str
    stream: bool
    model: str | None = None  # the instance's own name for the model; ``None``: as the client wrote it
    endpoint: str = "chat"  # where the body goes: the engine's own, not always the client's
    salt: str | None = None
    input_ids: Sequence[int] | None = None  # what the engine must read instead of the messages
    wants_output_ids: bool = False
    priority: int | None = None  # more is sooner, 0 is most requests'; only for instances that heed it
    session: str | None = None  # the run's name; only for instances that heed it
    begun: Begun | None = None  # what there is of the answer; its text stands in the body's final message


class Prepared(msgspec.Struct, frozen=True, gc=False):
    """Members of the body to set, by name, and headers to add; everything else goes as the client sent it."""

    members: Mapping[str, object | Merge]
    headers: Mapping[str, str]


class UsageParts(msgspec.Struct, frozen=True, gc=False):
    """The engine's own usage object and its extension about cached tokens, as they stood in the answer."""

    usage: Mapping[str, object] | None
    extension: Mapping[str, object] | None
    output_ids: Sequence[int] | None = None
    """The ids of the first choice's tokens, the one that ended it included, where the engine tells them."""


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one cache of an instance publishes its events (ZMQ endpoints)."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    rank: int = 0
    cleared: tuple[Tier, ...] = FLUSHED_TIERS
    """What has nothing any more when it says that all blocks are cleared, and not where."""


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What a running instance says of itself."""

    models: tuple[str, ...] = ()
    adapters: frozenset[str] = frozenset()  # which of the models are LoRA adapters of another
    max_model_len: int | None = None
    block_size: int | None = None
    event_sources: tuple[EventSource, ...] = ()
    capacity_tokens: int | None = None
    model_path: str | None = None
    weights_id: str | None = None
    pool: str | None = None  # name of the shared pool that it reads and writes
    version: str | None = None
    tiers: tuple[str, ...] = field(default=("device",))
    capabilities: Capabilities | None = None  # where they are not those of its kind
    load_sources: tuple[LoadSource, ...] = ()


class EngineAdapter(Protocol):
    """One kind of engine."""

    @property
    def name(self) -> str:
        """What the settings call it."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @property
    def health_path(self) -> str:
        """A cheap path that answers 200 exactly when the instance can serve."""

    @property
    def private_members(self) -> frozenset[str]:
        """Top-level members of its answers that only a client that asked for them may see."""

    @property
    def id_members(self) -> Mapping[str, str]:
        """Where ids of output tokens stand in answers: the member, by the name of the object that holds it."""

    def prompt_tools(
        self, tools: Sequence[Mapping[str, object]] | None, tool_choice: object, version: str | None
    ) -> Sequence[Mapping[str, object]] | None:
        """Return the tools that this version's chat template is given. Pure; ``version`` as ``describe`` told it."""

    def prepare(self, ask: Ask) -> Prepared:
        """Return what to change in the client's request. Pure."""

    def rank_headers(self, rank: int) -> Mapping[str, str]:
        """Return what sends a request to this data-parallel rank of the instance. Pure."""

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return the token counts in an answer or a stream's chunk, or ``None`` where there are none. Pure."""

    @property
    def load_paths(self) -> Sequence[str]:
        """Where it can be asked for its load; the first that answers 200 tells. None where it can't."""

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Return what an answer of ``load_paths`` says, one for each rank; nothing where it says nothing. Pure."""

    def abort(self, request_id: str) -> tuple[str, bytes] | None:
        """Return path and body of the request that stops another one by the id it was prepared with. Pure."""

    def close_session(self, session: str) -> tuple[str, bytes] | None:
        """Return path and body of what tells an instance that heeds sessions that this one has ended. Pure."""

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Ask the instance what it is. Raises ``UpstreamError`` when it cannot be asked or understood."""


def mapping(value: object) -> Mapping[str, object] | None:
    """Return a JSON object as a mapping, ``None`` for anything else."""
    if value is None or type(value) is dict:  # mostly, and a tenth of what the other question takes
        return value
    return value if isinstance(value, Mapping) else None


def whole_number(value: object) -> int | None:
    """Return a JSON integer, ``None`` for anything else (booleans included)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
