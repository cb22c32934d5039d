"""Puts one engine together: model, tiers, store, events, service, routes. The only module that knows all others."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from engine_adapter.embedded.constraint import GrammarCompiler
from engine_adapter.embedded.engine import Engine, EngineOptions
from engine_adapter.embedded.folders import DEFAULT_MODEL, DEFAULT_MODEL_NAME, resolve_model
from engine_adapter.embedded.metrics import EngineMetrics
from engine_adapter.embedded.options import EngineConfig
from engine_adapter.embedded.server import EngineServer, ServerFacts
from engine_adapter.embedded.service import EngineService
from engine_adapter.embedded.weights import load_model, weights_id
from engine_adapter.prompt import PromptEncoder
from kvstore.announce import tier_events
from kvstore.deadline import Allowance
from kvstore.events import TierCleared
from kvstore.page import PageLayout, Tier
from kvstore.publisher import EventPublisher, PublisherOptions
from kvstore.store import StoreOptions, TieredStore
from kvstore.tiers.base import PageTier, TierChange
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_topology import PoolOptions

_log = logging.getLogger(__name__)
_FETCH_S = 2.0  # small models on a few cores: a prompt's pages cost more to compute than to wait for
_PATIENCE = Allowance(0.25)  # of one read of disk or pool


@dataclass(slots=True)
class Assembly:
    """The parts that live and end together. ``server`` takes requests once ``start`` has returned and it is opened."""

    config: EngineConfig
    engine: Engine
    store: TieredStore
    publisher: EventPublisher | None
    service: EngineService
    server: EngineServer

    def start(self) -> None:
        """Start the engine and announce what the lower tiers hold already. Blocks: a pool may have much."""
        self.engine.start()
        if self.publisher is not None:
            self.store.announce()

    def close(self) -> None:
        """End the engine, let accepted pages reach the lower tiers, then send the last events. Idempotent."""
        self.engine.stop()
        if not self.store.flush(self.config.flush_s):
            _log.warning("some pages did not reach the lower tiers within %g s", self.config.flush_s)
        self.store.close()
        if self.publisher is not None:
            self.publisher.close()
        self.service.close()


def assemble(config: EngineConfig) -> Assembly:
    """Build everything; nothing runs yet. Fetches and converts the model the first time.

    Raises ``WeightsError``, ``ModelError``, ``TemplateError``, ``MediumError`` for a disk that cannot be opened, and
    ``zmq.ZMQError`` for an event port that is taken.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    model_dir = resolve_model(config.model, config.cache_dir)
    encoder = PromptEncoder.load(model_dir, template=config.template)
    model = load_model(model_dir, None if config.dtype == "auto" else getattr(torch, config.dtype), device)
    layout = model.page_layout(weights_id(model_dir), config.page_tokens)
    publisher = _publisher(config)
    store = _store(config, layout, device, publisher)
    options = EngineOptions(
        max_model_len=config.max_model_len, max_running=config.max_running, max_waiting=config.max_waiting
    )
    engine = Engine(model, store, options)
    name = config.served_model_name or served_name(config.model)
    metrics = EngineMetrics(name)
    metrics.observe_engine(engine.load, store.stats)
    compiler = GrammarCompiler(
        encoder.tokenizer, vocab_size=model.config.vocab_size, stop_token_ids=encoder.stop_token_ids
    )
    service = EngineService(engine, encoder, compiler, metrics)
    facts = _facts(config, layout, engine, store, publisher, encoder, device)
    server = EngineServer(service, ServerFacts(name, str(model_dir), facts), clear=_clear(store, publisher))
    return Assembly(config, engine, store, publisher, service, server)


def served_name(model: str) -> str:
    """Return the name of a model that was given none: the last part of its path or hub id."""
    return DEFAULT_MODEL_NAME if model == DEFAULT_MODEL else Path(model).name


def _publisher(config: EngineConfig) -> EventPublisher | None:
    if not config.kv_events:
        return None
    options = PublisherOptions(
        host=config.host, port=config.kv_events_port, replay_port=config.kv_replay_port, topic=config.kv_events_topic
    )
    publisher = EventPublisher(options)
    # As SGLang does: whoever follows from the first batch knows that nothing of an earlier life is true any more.
    publisher.publish([TierCleared((Tier.DEVICE, Tier.HOST, Tier.DISK))])  # what the disk holds is announced next
    return publisher


def _store(config: EngineConfig, layout: PageLayout, device: str, publisher: EventPublisher | None) -> TieredStore:
    lower: list[PageTier] = []
    if config.host_bytes:
        lower.append(HostTier(layout, capacity_bytes=config.host_bytes))
    if config.disk_path is not None and config.disk_bytes:
        config.disk_path.mkdir(parents=True, exist_ok=True)
        disk_options = DiskOptions(read_s=_PATIENCE)
        lower.append(DiskTier(layout, config.disk_path, capacity_bytes=config.disk_bytes, options=disk_options))
    if config.pool_url is not None and config.pool_bytes:
        pool_options = PoolOptions(read_s=_PATIENCE)
        lower.append(PoolTier(layout, config.pool_url, capacity_bytes=config.pool_bytes, options=pool_options))

    def tell(change: TierChange) -> None:
        assert publisher is not None
        publisher.publish(tier_events(change, config.page_tokens))

    return TieredStore(
        DeviceTier(layout, pages=config.device_tokens // config.page_tokens, device=device),
        lower,
        options=StoreOptions(fetch_s=Allowance(_FETCH_S)),
        on_change=tell if publisher is not None else None,
    )


def _clear(store: TieredStore, publisher: EventPublisher | None) -> Callable[[bool], None]:
    def clear(storage: bool) -> None:
        store.clear(storage=storage)
        if publisher is not None:
            publisher.publish([TierCleared((Tier.DEVICE, Tier.HOST))])

    return clear


def _facts(
    config: EngineConfig,
    layout: PageLayout,
    engine: Engine,
    store: TieredStore,
    publisher: EventPublisher | None,
    encoder: PromptEncoder,
    device: str,
) -> dict[str, Any]:
    pooled = config.pool_url is not None and config.pool_bytes > 0
    return {
        "version": _version(),
        "weights_id": layout.weights_id,
        "device": device,
        "dtype": layout.dtype,
        "page_size": layout.page_tokens,
        "max_total_num_tokens": store.device.slots * layout.page_tokens,
        "max_req_input_len": engine.max_model_len - 1,
        "max_running_requests": config.max_running,
        "chat_template": encoder.template_name,
        "enable_priority_scheduling": True,
        "enable_session_radix_cache": True,
        "kv_events": None if publisher is None else _event_facts(publisher, layout.page_tokens),
        "keepwarm": {
            "tiers": [tier.tier.label for tier in (store.device, *store.lower)],
            "pool_id": _pool_id(config) if pooled else None,
            "page_bytes": layout.page_bytes,
            "capacity_bytes": {tier.tier.label: tier.capacity_bytes for tier in (store.device, *store.lower)},
        },
    }


def _event_facts(publisher: EventPublisher, page_tokens: int) -> dict[str, Any]:
    return {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": publisher.port,
        "replay_endpoint_port_base": publisher.replay_port,
        "topic": publisher.topic,
        "block_size": page_tokens,
        "dp_size": 1,
    }


def _pool_id(config: EngineConfig) -> str:
    """Return the pool's name; one made of its URL tells nothing of the password in it."""
    return config.pool_id or "pool-" + hashlib.sha256((config.pool_url or "").encode()).hexdigest()[:12]


def _version() -> str:
    try:
        return version("keepwarm")
    except PackageNotFoundError:
        return "unknown"
