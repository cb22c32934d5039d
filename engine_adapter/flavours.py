"""Engines that speak OpenAI's API and differ in little else: where they tell that they live, and how busy they are.

Each is a row of a table. What a row doesn't say, the engine isn't asked for. Sources are the engines' documentation
and the routes and gauges in their published code, of autumn 2026; none of these engines ran beside this code.
``tests/contract/test_flavours.py`` puts a gateway in front of servers that have what a row says, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from engine_adapter.base import OPENAI_ENDPOINTS, Capabilities, LoadSignal
from engine_adapter.load import EngineLoad, gauges_by_rank
from engine_adapter.openai_compatible import OpenAICompatible


@dataclass(frozen=True, slots=True)
class LoadGauges:
    """Where a Prometheus page has the load, and by which names."""

    path: str
    running: str
    waiting: str
    used_share: str | None = None
    rank_label: str = ""


@dataclass(frozen=True, slots=True)
class Flavour:
    """One engine's differences."""

    name: str
    health_path: str = "/v1/models"
    gauges: LoadGauges | None = None
    media: bool = False
    endpoints: frozenset[str] = OPENAI_ENDPOINTS


FLAVOURS: Mapping[str, Flavour] = MappingProxyType(
    {
        flavour.name: flavour
        for flavour in (
            Flavour(
                "tensorrt-llm",  # trtllm-serve
                health_path="/health",
                gauges=LoadGauges("/prometheus/metrics", "trtllm_num_requests_running", "trtllm_num_requests_waiting"),
                media=True,
            ),
            Flavour(
                "lmdeploy",  # api_server --metrics
                health_path="/health",
                gauges=LoadGauges(
                    "/metrics",
                    "lmdeploy:num_requests_running",
                    "lmdeploy:num_requests_waiting",
                    "lmdeploy:gpu_cache_usage_perc",
                    rank_label="engine",
                ),
                media=True,
            ),
            Flavour(
                "tgi",
                health_path="/health",
                gauges=LoadGauges("/metrics", "tgi_batch_current_size", "tgi_queue_size"),
                media=True,
            ),
            Flavour("ollama", media=True, endpoints=OPENAI_ENDPOINTS | {"embeddings"}),
            Flavour("mlc-llm", media=True),
            Flavour("rtp-llm", endpoints=frozenset({"chat"})),  # its front has no completions
            Flavour("deepinfer"),  # published without a server of its own: what others put in front of it
            Flavour("xllm", endpoints=OPENAI_ENDPOINTS | {"embeddings"}),
        )
    }
)


class FlavouredOpenAI(OpenAICompatible):
    """An engine of the table."""

    def __init__(self, flavour: Flavour) -> None:
        self._gauges = flavour.gauges
        self.name = flavour.name
        self.health_path = flavour.health_path
        self.load_paths = () if flavour.gauges is None else (flavour.gauges.path,)
        self.capabilities = Capabilities(
            media=flavour.media,
            load=LoadSignal.NONE if flavour.gauges is None else LoadSignal.SCRAPE,
            endpoints=flavour.endpoints,
        )

    def read_load(self, body: bytes) -> Sequence[EngineLoad]:
        """Return what the gauges of the table's row say."""
        gauges = self._gauges
        if gauges is None:
            return []
        names = frozenset(filter(None, (gauges.running, gauges.waiting, gauges.used_share)))
        return [
            EngineLoad(
                running=int(found[gauges.running]),
                waiting=int(found[gauges.waiting]),
                used_share=found.get(gauges.used_share) if gauges.used_share is not None else None,
                rank=rank,
            )
            for rank, found in sorted(gauges_by_rank(body, names, gauges.rank_label).items())
            if gauges.running in found and gauges.waiting in found
        ]
