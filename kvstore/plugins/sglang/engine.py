"""What the running SGLang says of itself: the only place that reads its arguments.

``storage_config`` names the served model, which anybody may call as they like; the weights, the KV dtype and the event
ports stand in the server's arguments, which every scheduler process has. Read: 0.5.23; older versions keep them in
``sglang.srt.server_args``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.plugins.sglang.options import host_and_port

_BYTES_DEPEND_ON = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "json_model_override_args",
    "load_format",
    "random_seed",
    "speculative_algorithm",
    "model_impl",
)
"""Arguments that change the bytes of pages and stand in none of the model's files; ``random_seed`` only where weights
are random."""


_FIRST_VERSION = "default"


@dataclass(frozen=True, slots=True)
class EngineEvents:
    """Where the engine publishes its KV events, as this process reaches it."""

    endpoint: str
    replay_endpoint: str | None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """``settings``: arguments that a page's bytes depend on. ``dp_rank``: which of the server's caches this is."""

    version: str
    model_path: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    events: EngineEvents | None = None
    dp_rank: int = 0
    dp_size: int = 1


def read_engine_facts() -> EngineFacts:
    """Ask the SGLang in this process. Raises ``ImportError`` where there is none of a known kind."""
    import sglang

    arguments, dp_rank = _arguments()
    settings = {name: str(getattr(arguments, name, None)) for name in _BYTES_DEPEND_ON}
    if settings["load_format"] != "dummy":
        del settings["random_seed"]
    return EngineFacts(
        version=sglang.__version__,
        model_path=getattr(arguments, "model_path", None),
        settings=settings,
        events=engine_events(getattr(arguments, "kv_events_config", None), dp_rank),
        dp_rank=dp_rank,
        dp_size=getattr(arguments, "dp_size", 1) or 1,
    )


def weights_version() -> Callable[[], str]:
    """Return what tells how the weights that run now are called: an update in place names new ones. It says "" before
    the first, and always where the engine doesn't tell (before 0.5.23)."""
    try:
        from sglang.srt.runtime_context import get_serving
    except ImportError:
        return lambda: ""

    def version() -> str:
        told = getattr(get_serving(), "weight_version", None)
        return "" if told in (None, _FIRST_VERSION) else str(told)

    return version


def _arguments() -> tuple[Any, int]:
    """Return the server's arguments and the data-parallel rank, as the running version keeps them."""
    try:
        from sglang.srt.runtime_context import get_parallel, get_server_args
    except ImportError:
        from sglang.srt.server_args import get_global_server_args

        return get_global_server_args(), 0
    parallel = get_parallel()
    if parallel.attn_dp_size > 1:
        return get_server_args(), parallel.attn_dp_rank
    return get_server_args(), parallel.dp_rank or 0


def engine_events(config: str | None, dp_rank: int) -> EngineEvents | None:
    """Return where an engine with this ``--kv-events-config`` publishes; ``None`` where it doesn't."""
    if not config:
        return None
    told = json.loads(config)
    if told.get("publisher") != "zmq":
        return None
    endpoint = _reached(told.get("endpoint") or "tcp://*:5557", dp_rank)
    replay = told.get("replay_endpoint")
    return EngineEvents(endpoint, None if replay is None else _reached(replay, dp_rank), told.get("topic") or "")


def _reached(endpoint: str, dp_rank: int) -> str:
    """Return the address of one rank's socket; a wildcard is reached on the loopback interface."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    host, port = host_and_port(endpoint)
    return f"tcp://{'127.0.0.1' if host == '*' else host}:{port + dp_rank}"


def local_model(model_path: str) -> Path | None:
    """Return the folder of a model given by path or by its name on the hub; ``None`` where it isn't on this machine."""
    folder = Path(model_path)
    if folder.is_dir():
        return folder
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        config = try_to_load_from_cache(model_path, "config.json")
    except ValueError:  # not a name that the hub could have
        return None
    return Path(config).parent if isinstance(config, str) else None
