"""The embedded engine's command line and configuration file: one schema, flags over the file over the defaults."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvstore.publisher import DEFAULT_TOPIC

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_SIZE = re.compile(r"(\d+)\s*([kmgt]?i?)b?", re.IGNORECASE)


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything that one engine process is told. Sizes are bytes; 0 leaves a tier out."""

    model: str = "default"
    served_model_name: str | None = None
    template: str | None = None
    cache_dir: Path | None = None
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = 0
    host: str = "127.0.0.1"
    port: int = 8100
    page_tokens: int = 16
    device_tokens: int = 16_384
    host_bytes: int = 0
    disk_path: Path | None = None
    disk_bytes: int = 4 << 30
    pool_url: str | None = None
    pool_bytes: int = 1 << 30
    pool_id: str | None = None
    kv_events: bool = True
    kv_events_port: int = 0
    kv_replay_port: int = 0
    kv_events_topic: str = DEFAULT_TOPIC
    max_model_len: int | None = None
    max_running: int = 32
    max_waiting: int = 1024
    drain_s: float = 10.0
    flush_s: float = 5.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"


_HELP = {
    "model": "'default' (SmolLM2-135M-Instruct, fetched once), a Hugging Face folder, or a hub id",
    "served_model_name": "the name that /v1/models shows and answers carry",
    "template": "a chat template: a name of engine_adapter/templates, 'model', or a Jinja file",
    "cache_dir": "where fetched models are kept",
    "device": "cpu, cuda, cuda:0 …; auto takes CUDA where there is one",
    "dtype": "of weights and pages; auto is float32 on the CPU and bfloat16 elsewhere",
    "threads": "torch's threads on the CPU; 0 leaves torch's own choice",
    "host": "address to listen on, HTTP and events",
    "port": "HTTP port; 0 takes a free one",
    "page_tokens": "tokens of a KV page, the unit of reuse",
    "device_tokens": "tokens of KV that fit the device tier",
    "host_bytes": "host tier; 0 for none (sizes take units: 512MiB, 2GiB)",
    "disk_path": "folder of the disk tier; none without it",
    "disk_bytes": "disk tier",
    "pool_url": "Redis or Valkey server of the pool tier (redis://, rediss://, unix://, redis+cluster://)",
    "pool_bytes": "what this engine keeps in the pool",
    "pool_id": "name under which the pool's pages are announced, equal for all engines that share it",
    "kv_events": "publish KV events over ZeroMQ",
    "kv_events_port": "port of the events; 0 takes a free one, /server_info tells it",
    "kv_replay_port": "port of their replay; as above",
    "kv_events_topic": "topic of the events",
    "max_model_len": "tokens of a sequence at most; the model's own without it",
    "max_running": "sequences in a batch",
    "max_waiting": "requests in the queue; more are refused",
    "drain_s": "seconds that running requests get at the end",
    "flush_s": "seconds that pages get to reach the lower tiers at the end",
    "log_level": "of the process's log, on standard error",
}


class ConfigError(Exception):
    """The file or a flag is wrong; the message names it."""


def read_config(arguments: Sequence[str] | None = None) -> EngineConfig:
    """Return the configuration. Raises ``ConfigError``; ``--help`` and unknown flags end the process as usual."""
    parser = argparse.ArgumentParser(
        prog="python -m engine_adapter.embedded", description="Serve one model with a tiered KV cache."
    )
    parser.add_argument("--config", type=Path, metavar="FILE.json", help="the same names, with underscores, as JSON")
    for field in msgspec.structs.fields(EngineConfig):
        flag, text = f"--{field.name.replace('_', '-')}", f"{_HELP[field.name]} (default: {field.default})"
        if field.type is bool:
            parser.add_argument(flag, action=argparse.BooleanOptionalAction, default=None, help=_HELP[field.name])
        else:
            parser.add_argument(flag, metavar="X", help=text)
    flags = vars(parser.parse_args(arguments))
    values = _read_file(flags.pop("config"))
    values |= {name: value for name, value in flags.items() if value is not None}
    for name, value in values.items():
        if name.endswith("_bytes") and isinstance(value, str):
            values[name] = size_bytes(value)
    try:
        config = msgspec.convert(values, EngineConfig, strict=False, dec_hook=_to_path)
    except msgspec.ValidationError as error:
        raise ConfigError(str(error)) from error
    if min(config.page_tokens, config.device_tokens // max(1, config.page_tokens)) < 1:
        raise ConfigError("device_tokens must hold at least one page of page_tokens")
    return config


def size_bytes(text: str) -> int:
    """Return the bytes of ``512MiB``, ``2GB``, ``1073741824``. Raises ``ConfigError``."""
    match = _SIZE.fullmatch(text.strip())
    unit = match[2].lower() if match else None
    if match is None or unit not in _UNITS:
        raise ConfigError(f"{text!r} is not a size such as 512MiB or 2GB")
    return int(match[1]) * _UNITS[unit]


def _to_path(kind: type, value: object) -> Path:
    if kind is not Path or not isinstance(value, str):
        raise NotImplementedError(kind)
    return Path(value).expanduser()


def _read_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must be an object")
    return values
