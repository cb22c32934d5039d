"""The class that vLLM loads: ``"kv_connector": "Keepwarm"`` of ``kvstore.plugins.vllm.connector``.

vLLM makes one in its scheduler and one in every worker; each has one half. Written for the connector interface of vLLM
0.32 (``KVConnectorBase_V1``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from vllm import __version__ as vllm_version
from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvstore.page import PageLayout, Tier
from kvstore.plugins.vllm.assembly import open_lookup, open_worker
from kvstore.plugins.vllm.events import EventKinds, engine_events
from kvstore.plugins.vllm.identity import CONTENT_HASHES
from kvstore.plugins.vllm.messages import Hello, StepPlan, WorkerReport
from kvstore.plugins.vllm.options import read_options
from kvstore.plugins.vllm.scheduler import SchedulerHalf
from kvstore.plugins.vllm.shared_lookup import SharedLookup
from kvstore.plugins.vllm.worker import WorkerHalf
from kvstore.worth import FetchWorth

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_EVENTS = EventKinds(BlockStored, BlockRemoved, lambda name: maybe_convert_block_hash(BlockHash(name)))
_SOURCES = {Tier.HOST: CacheHitSource.HOST, Tier.DISK: CacheHitSource.DISK}


class Plan(KVConnectorMetadata):
    """A step's plan, in vLLM's wrapping."""

    def __init__(self, step: StepPlan) -> None:
        self.step = step


class Report(KVConnectorWorkerMetadata):
    """The workers' report of a step, in vLLM's wrapping."""

    def __init__(self, workers: WorkerReport) -> None:
        self.workers = workers

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        """Return both ranks' reports."""
        assert isinstance(other, Report)
        return Report(self.workers.aggregate(other.workers))


class Greeting(KVConnectorHandshakeMetadata):
    """What a rank says of itself at the start, in vLLM's wrapping."""

    def __init__(self, hello: Hello) -> None:
        self.hello = hello


class Keepwarm(KVConnectorBase_V1):
    """Pages in host memory, on disk and in a shared pool, for vLLM."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        """Raise ``ValueError`` for a set-up in which pages could be wrong, or a lost one would be an error."""
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._options = read_options(self._kv_transfer_config.kv_connector_extra_config)
        _check(vllm_config, kv_cache_config)
        self._block_tokens: int = vllm_config.cache_config.block_size
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            worth = FetchWorth(self._options.worth)
            self._scheduler = SchedulerHalf(self._block_tokens, worth, self._open_lookup)

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a dropped save would be an error: it is a miss, later."""
        return False

    # --- scheduler ---

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Take in what the workers said when they had their caches."""
        hellos = [each.hello for each in metadata.values() if isinstance(each, Greeting)]
        self._half.greet(hellos)

    def on_new_request(self, request: Request) -> None:
        """See the base class."""
        self._half.track(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See the base class. Loads are asynchronous: other requests go on meanwhile."""
        pages = self._half.offer(request, num_computed_tokens)
        if not pages:
            return pages, False
        return pages * self._block_tokens, True

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See the base class."""
        self._half.allocated(request, blocks.get_block_ids()[0] if num_external_tokens else (), num_external_tokens)

    def get_external_cache_hit_sources(self, request: Request, num_external_tokens: int) -> dict[CacheHitSource, int]:
        """See the base class. Pages of the pool are of no source that vLLM has a name for."""
        counted: dict[CacheHitSource, int] = {}
        for tier, tokens in self._half.sources(request).items():
            source = _SOURCES.get(tier, CacheHitSource.EXTERNAL_UNSPECIFIED)
            counted[source] = counted.get(source, 0) + tokens
        return counted

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Plan:
        """See the base class."""
        state = scheduler_output.kv_connector_block_state

        def block_ids_of(request_id: str) -> Sequence[int]:
            ids = None if state is None else state.get_block_ids(request_id)
            return () if ids is None else ids[0]

        guessed = {name: len(ids) for name, ids in scheduler_output.scheduled_spec_decode_tokens.items()}
        return Plan(self._half.plan(scheduler_output.num_scheduled_tokens, guessed, block_ids_of))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See the base class."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            self._half.reported(report.workers)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See the base class. Blocks need not be kept: what is to be stored was copied in its step."""
        self._half.finished(request.request_id)
        return False, None

    def take_events(self) -> Iterable[KVCacheEvent]:
        """See the base class."""
        return list(engine_events(self._half.take_changes(), self._block_tokens, _EVENTS))

    def has_pending_push_work(self) -> bool:
        """Tell whether the engine should go on stepping: until pages are written, and their events are told."""
        return self._half.has_work

    def reset_cache(self) -> bool:
        """See the base class."""
        self._half.clear()
        return True

    # --- workers ---

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Open the tiers."""
        blocks = self._kv_cache_config.num_blocks
        self._worker = open_worker(self._options, self._vllm_config, kv_caches, blocks, vllm_version)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """See the base class."""
        return Greeting(self._other_half.hello())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """See the base class."""
        plan = self._get_connector_metadata()
        assert isinstance(plan, Plan)
        self._other_half.begin(plan.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded for the requests of the step that runs."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Pages hold all layers: they are copied when the step is over."""

    def wait_for_save(self) -> None:
        """See the base class."""
        self._other_half.save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """See the base class."""
        return None, self._other_half.finished()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """See the base class."""
        return self._other_half.failed()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """See the base class."""
        return Report(self._other_half.report())

    def shutdown(self) -> None:
        """See the base class."""
        if self._worker is not None:
            self._worker.close()
        if self._scheduler is not None:
            self._scheduler.close()

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "called in a worker"
        return self._scheduler

    @property
    def _other_half(self) -> WorkerHalf:
        assert self._worker is not None, "called in the scheduler, or before there are caches"
        return self._worker

    def _open_lookup(self, layouts: Sequence[PageLayout]) -> SharedLookup | None:
        return open_lookup(self._options, layouts)


def _check(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_load_failure_policy != "recompute":
        raise ValueError(
            'keepwarm: add "kv_load_failure_policy": "recompute" to --kv-transfer-config; '
            "without it vLLM fails a request of which a page cannot be loaded"
        )
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in CONTENT_HASHES:
        raise ValueError(
            f"keepwarm: pages are named by vLLM's block hashes, and {algorithm} may give two blocks one name: "
            f"use --prefix-caching-hash-algo {' or '.join(sorted(CONTENT_HASHES))}"
        )
    if kv_cache_config is not None and len(kv_cache_config.kv_cache_groups) != 1:
        raise ValueError("keepwarm: models with several kinds of KV cache (sliding windows, Mamba) are not supported")
