"""Models, and the engines that serve them: named, discovered, or our own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, field_validator

from gateway.settings.section import Count, Name, Seconds, Section

Adapter = Literal[
    "sglang", "vllm", "llamacpp", "embedded", "openai",
    "tensorrt-llm", "lmdeploy", "tgi", "ollama", "mlc-llm", "rtp-llm", "deepinfer", "xllm",
]  # fmt: skip
"""The engines that have an adapter: ``engine_adapter.named``."""
Endpoint = Literal["chat", "completions", "responses", "messages", "embeddings", "tokenize"]


class ModelSettings(Section):
    """What the gateway knows of a model that instances serve."""

    name: str
    aliases: tuple[str, ...] = ()
    tokenizer: str = "auto"  # "auto": the instance's own folder where it is readable; "default"; "none"; a folder
    template: str | None = None
    usage_counts: Literal["checked", "ignored"] = "checked"
    # Text that spells a special token such as <|im_start|>: it stays text ("literal": by token ids where the engine
    # takes them, else as with "escape"), gets an invisible character, has its request refused, or goes as it is.
    special_tokens: Literal["literal", "escape", "reject", "pass"] = "literal"
    # An answer that a request quotes goes to the engine as the ids that were generated ("ids"), or rendered anew.
    quoted_answers: Literal["ids", "rendered"] = "ids"


class KvEventSettings(Section):
    """Where an engine publishes its KV events, for those that don't tell (vLLM); as the gateway reaches it."""

    endpoint: Annotated[str, Field(pattern=r"^(tcp://[^\s*]+:\d+|ipc://\S+)$")]
    replay_endpoint: Annotated[str, Field(pattern=r"^(tcp://[^\s*]+:\d+|ipc://\S+)$")] | None = None
    topic: str = ""
    ranks: Annotated[int, Field(ge=1, le=64)] = 1  # data-parallel ones; rank n publishes n ports above rank 0


class EngineSettings(Section):
    """What holds of an engine wherever it is reached."""

    adapter: Adapter = "sglang"
    # Engines that separate the two: one computes prompts, another one answers from what it was handed.
    role: Literal["both", "prefill", "decode"] = "both"
    bootstrap_port: Annotated[int, Field(ge=1, le=65_535)] = 8998  # of an SGLang engine with role "prefill"
    api_key: SecretStr | None = None
    api_key_header: Literal["authorization", "x-api-key"] = "authorization"  # where it wants its key
    models: tuple[str, ...] = ()  # empty: ask it
    events: Literal["auto", "off"] = "auto"
    kv_events: KvEventSettings | None = None  # None: ask it
    pool: str | None = None  # name of the shared pool, where the instance doesn't tell
    tiers: tuple[Literal["device", "host", "disk"], ...] | None = None  # of its events, where it doesn't tell
    speaks: tuple[Endpoint, ...] | None = None  # endpoints that it has itself; None: what its adapter says
    region: str | None = None  # where it runs, for prices that differ by region
    capacity_tokens: Count | None = None  # what its cache holds, for engines without events that don't tell
    connect_timeout_s: Seconds | None = None  # None: 5 s
    first_byte_timeout_s: Seconds | None = None  # None: as [stream] says; so the next two
    idle_timeout_s: Seconds | None = None
    total_timeout_s: Seconds | None = None
    repeats: bool | None = None  # None: as [retry] says
    network: Literal["own", "outside"] | None = None  # None: by its address, see ``gateway.network``
    takes_over: bool = False  # outside: may get requests for models that instances inside serve


class InstanceSettings(EngineSettings):
    """One engine that runs already."""

    id: Name
    url: Annotated[str, Field(pattern=r"^https?://[^\s/]+(/[^\s]*)?$")]

    @field_validator("url")
    @classmethod
    def _no_trailing_slash(cls, url: str) -> str:
        return url.rstrip("/").removesuffix("/v1")


class InstancesFile(Section):
    """A file that names instances, as the settings do."""

    instances: tuple[InstanceSettings, ...] = ()


class NameDiscovery(EngineSettings):
    """Instances at all addresses of a DNS name or, without ``port``, at all targets of a service (SRV)."""

    name: str
    prefix: Name  # of the instances' names
    port: Annotated[int, Field(ge=1, le=65_535)] | None = None
    servers: tuple[str, ...] = ()  # address or address:port; empty: the system's


class KubernetesDiscovery(EngineSettings):
    """Instances at the ready endpoints of a Kubernetes service."""

    service: str
    namespace: str
    prefix: Name
    port: str | int | None = None  # name or number; None: the only one
    api: Annotated[str, Field(pattern=r"^https?://[^\s]+$")] = "https://kubernetes.default.svc"
    token: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
    ca: Path | None = Path("/var/run/secrets/kubernetes.io/serviceaccount/ca.crt")


class DiscoverySettings(Section):
    """Instances that come and go while the gateway runs. See ``docs/failover.md``."""

    period_s: Seconds = 5.0  # how often files are looked at and DNS is asked
    files: tuple[Path, ...] = ()
    dns: tuple[NameDiscovery, ...] = ()
    kubernetes: tuple[KubernetesDiscovery, ...] = ()

    @property
    def is_on(self) -> bool:
        """Whether there is any."""
        return bool(self.files or self.dns or self.kubernetes)


class EmbeddedSettings(Section):
    """Engines that keepwarm starts itself. Without ``enabled`` they run exactly when no other instance is named."""

    enabled: bool | None = None
    instances: Annotated[int, Field(ge=1, le=64)] = 1
    model: str = "default"
    served_model_name: str | None = None
    template: str | None = None
    device_tokens: Count = 16_384
    host_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    disk_bytes: Annotated[int, Field(ge=0)] = 4 << 30
    pool_bytes: Annotated[int, Field(ge=0)] = 1 << 30  # 0: no pool
    pool_url: str | None = None  # None: a Valkey of our own
    page_tokens: Count = 16
    threads: Annotated[int, Field(ge=0)] = 0  # 0: the cores, shared by the instances
    ports: tuple[Annotated[int, Field(ge=1, le=65_535)], ...] = ()  # HTTP ports; empty: free ones
    ready_timeout_s: Seconds = 900.0  # the first start fetches and converts the model
    arguments: tuple[str, ...] = ()  # passed to every engine as they are
