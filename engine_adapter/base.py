"""The contract between the gateway and an engine: what it can do, how it is asked, and how its answers are read.

An adapter holds no connection and no state; it is a table of answers about one kind of engine. The gateway never asks
which engine it talks to: it asks for ``capabilities``. Bodies go through untouched except for the members that
``prepare`` names, and nothing of an engine's extras reaches a client that did not ask for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from engine_adapter.http import UpstreamClient


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a kind of engine can do for the gateway."""

    events: bool = False  # publishes KV events
    cached_detail: bool = False  # reports hits for each tier
    salt: bool = False  # takes a cache salt
    priority: bool = False
    input_ids: bool = False  # takes token ids beside messages
    abort: bool = False  # can be told to stop a request by id


@dataclass(frozen=True, slots=True)
class Merge:
    """Members to set inside an object member, whose other members stay."""

    members: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Ask:
    """What the gateway wants of one request besides what the client wrote."""

    request_id: str
    stream: bool
    model: str | None = None  # the instance's own name for the model; ``None``: as the client wrote it
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """Members of the body to set, by name, and headers to add; everything else goes as the client sent it."""

    members: Mapping[str, object | Merge]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class UsageParts:
    """The engine's own usage object and its extension about cached tokens, as they stood in the answer."""

    usage: Mapping[str, object] | None
    extension: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class EventSource:
    """Where one cache of an instance publishes its events (ZMQ endpoints)."""

    endpoint: str
    replay_endpoint: str | None
    topic: str
    rank: int = 0


@dataclass(frozen=True, slots=True)
class InstanceFacts:
    """What a running instance says of itself."""

    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    block_size: int | None = None
    event_sources: tuple[EventSource, ...] = ()
    capacity_tokens: int | None = None
    model_path: str | None = None
    weights_id: str | None = None
    pool: str | None = None  # name of the shared pool that it reads and writes
    version: str | None = None
    tiers: tuple[str, ...] = field(default=("device",))


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

    def prepare(self, ask: Ask) -> Prepared:
        """Return what to change in the client's request. Pure."""

    def read_usage(self, answer: Mapping[str, object]) -> UsageParts | None:
        """Return the token counts in an answer or a stream's chunk, or ``None`` where there are none. Pure."""

    async def describe(self, client: UpstreamClient, url: str, headers: Mapping[str, str]) -> InstanceFacts:
        """Ask the instance what it is. Raises ``UpstreamError`` when it cannot be asked or understood."""


def mapping(value: object) -> Mapping[str, object] | None:
    """Return a JSON object as a mapping, ``None`` for anything else."""
    return value if isinstance(value, Mapping) else None


def whole_number(value: object) -> int | None:
    """Return a JSON integer, ``None`` for anything else (booleans included)."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
