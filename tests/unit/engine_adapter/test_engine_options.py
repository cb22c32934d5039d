"""The engine's flags and file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from engine_adapter.embedded.options import _HELP, ConfigError, EngineConfig, read_config, size_bytes


def test_flags_go_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "engine.json"
    path.write_text(json.dumps({"port": 1, "host_bytes": "2GiB", "disk_path": "d", "kv_events": False}))
    config = read_config(["--config", str(path), "--port", "2", "--disk-bytes", "10MB", "--kv-events"])
    assert (config.port, config.host_bytes, config.disk_bytes) == (2, 2 << 30, 10_000_000)
    assert (config.disk_path, config.kv_events, config.page_tokens) == (Path("d"), True, 16)
    assert read_config([]) == EngineConfig()
    assert read_config(["--no-kv-events"]).kv_events is False


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"prot": 1}', "prot"),
        ('{"port": "x"}', "port"),
        ('{"dtype": "int3"}', "dtype"),
        ('{"host_bytes": "many"}', "many"),
        ('{"device_tokens": 8}', "device_tokens"),
        ("[]", "object"),
        ("{", "engine.json"),
    ],
)
def test_a_mistake_is_named(tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=named):
        read_config(["--config", str(path)])


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.json"):
        read_config(["--config", str(tmp_path / "nothing.json")])


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("17", 17), ("1k", 1000), ("1KiB", 1024), ("3 MiB", 3 << 20), ("2gb", 2 * 10**9)]
)
def test_sizes(text: str, size: int) -> None:
    assert size_bytes(text) == size


def test_every_flag_is_explained() -> None:
    assert set(_HELP) == {field.name for field in msgspec.structs.fields(EngineConfig)}
