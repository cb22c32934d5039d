"""How the gateway listens, answers, chooses and retries."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, IPvAnyNetwork

from gateway.settings.section import Count, Name, Seconds, Section


class TlsSettings(Section):
    """TLS of the listening socket. Files that change are read again; connections that are open keep what they have."""

    certificate: Path  # PEM, with the chain
    key: Path  # PEM, without a passphrase
    minimum: Literal["1.2", "1.3"] = "1.2"
    look_s: Seconds = 10.0  # how often the files are looked at


AnswerHeader = Literal["run", "step", "instance", "hit", "predicted-hit", "cost"]


Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/\s]+)$")]
"""As a browser names it: scheme, host and port, nothing behind."""


class ServerSettings(Section):
    """The listening socket and the limits of what comes in through it."""

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65_535)] = 8400  # 0: any free one, told in the log
    body_cap_bytes: Count = 64 << 20
    answer_cap_bytes: Count = 64 << 20
    drain_grace_s: Annotated[float, Field(ge=0, le=300)] = 0.0  # still taking requests, for balancers to see /readyz
    drain_limit_s: Seconds = 30.0  # then for requests in flight to end
    workers: Annotated[int, Field(ge=1, le=32)] = 1  # processes on the one port
    tls: TlsSettings | None = None
    allowed_hosts: tuple[str, ...] = ()  # names that requests may be for; empty: any
    allowed_origins: tuple[Origin, ...] = ()  # whose pages a browser lets ask: https://chat.example, or *
    trusted_proxies: tuple[IPvAnyNetwork, ...] = ()  # whose X-Forwarded-For and -Proto are believed
    # What answers tell, as x-keepwarm-…; "hit" and "cost" of a stream come as a comment after it, if stream_summary.
    answer_headers: tuple[AnswerHeader, ...] = ("run", "step", "instance", "hit", "predicted-hit")
    stream_summary: bool = False


class StreamSettings(Section):
    """Times of one answer."""

    heartbeat_s: Seconds = 15.0  # a comment goes to the client when nothing else did for this long
    first_byte_timeout_s: Seconds = 600.0  # from sending to the engine's first byte
    idle_timeout_s: Seconds = 20.0  # between two pieces of an answer; then another engine goes on with it
    call_timeout_s: Seconds = 300.0  # the same with tools: engines hold calls back. One that is silent to probes: idle
    total_timeout_s: Seconds | None = None  # of one answer; beyond it the client gets an error
    client_stall_s: Seconds = 60.0  # a client that takes nothing for this long is cut off
    event_cap_bytes: Count = 8 << 20  # one event of a stream


class RoutingSettings(Section):
    """How an instance is chosen. Rates are where learning starts."""

    policy: Literal["expected-ttft", "fewest-requests", "fewest-tokens", "prefix", "round-robin", "session-hash"] = (
        "expected-ttft"
    )
    seed: int = 0
    through: Name | None = None  # gets every request; which of the others would have been chosen is recorded
    prefill_tokens_per_s: Annotated[float, Field(gt=0)] = 2_000.0
    host_tokens_per_s: Annotated[float, Field(gt=0)] = 200_000.0
    disk_tokens_per_s: Annotated[float, Field(gt=0)] = 20_000.0
    pool_tokens_per_s: Annotated[float, Field(gt=0)] = 10_000.0
    run_idle_s: Seconds = 1800.0  # a run of which nothing came for so long has ended. See docs/routing.md
    index_bytes: Count = 256 << 20
    index_snapshot_s: Seconds = 15.0  # how often the index is written down, for a gateway that comes after a crash


class AdmissionSettings(Section):
    """Who waits where more is asked than can be served; off without ``requests_per_instance``. See docs/routing.md."""

    requests_per_instance: Count | None = None  # under way at once, for each instance that takes requests
    queue: Count = 1000  # that wait, for each model; beyond it 429
    deadline_s: Seconds = 30.0  # that one waits at most
    quantum_tokens: Count = 20_000  # tenants that had so many tokens more than others come after them
    huge_tokens: Count = 50_000  # uncached prompts of this length share a lane
    huge_at_once: Count = 2
    memory_share: Annotated[float, Field(gt=0, le=10)] | None = None  # of the fleet's device memory, for active runs
    run_idle_s: Seconds = 120.0  # then a run has given its place back


class RetrySettings(Section):
    """Attempts of one request. See ``docs/failover.md``."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 3  # the first one included, whatever the reason of the others
    repeats: bool = False  # what may have run, and brought its client nothing, may run again elsewhere
    continues: bool = True  # another engine goes on with a stream whose engine died


class HealthSettings(Section):
    """How instances are watched."""

    interval_s: Seconds = 2.0  # between probes; also the longest that one waits for another request once it failed some
    timeout_s: Seconds = 2.0
    breaker_failures: Annotated[int, Field(ge=1, le=1000)] = 3  # in a row; 4xx, 429 and 503 are none
    breaker_window_s: Seconds = 30.0  # failures further apart are not in a row
    slow_start_s: Annotated[float, Field(ge=0, le=3600)] = 10.0  # until one that came up gets its full share


class LogSettings(Section):
    """The process's log, on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    access: bool = True
