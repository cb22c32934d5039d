from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvstore.plugins.sglang.engine import EngineEvents, engine_events, local_model, read_engine_facts
from kvstore.plugins.sglang.options import host_and_port, read_options
from tests.samples.sglang_host import Engine, FakeHostPool


def test_options_beside_sglangs_own() -> None:
    options = read_options(
        {"backend_name": "keepwarm", "module_path": "m", "class_name": "c", "interface_v1": 1, "disk": "~/x",
         "disk_gb": 2, "pool": "redis://h", "pool_gb": 0.5, "buffer_gb": 1, "host_gb": 2}
    )  # fmt: skip
    assert (options.disk_bytes, options.pool_bytes) == (2 * 10**9, 5 * 10**8)
    assert (options.host_bytes(writes=True), options.host_bytes(writes=False)) == (3 * 10**9, 2 * 10**9)
    assert options.disk_path is not None
    assert options.disk_path.is_absolute()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nowhere to keep pages"),
        ({"disk": "/x"}, "disk_gb"),
        ({"pool": "redis://h", "pol": 1}, "pol"),
        ({"pool": 7}, "pool"),
        ({"pool": "redis://h", "pool_gb": -1}, "negative"),
        ({"pool": "redis://h", "claim_margin": 0}, "positive"),
        ({"pool": "redis://h", "prefill_tokens_per_s": -5}, "positive"),
        ({"pool": "redis://h", "events": "5557"}, "tcp://HOST:PORT"),
        ({"pool": "redis://h", "events": "tcp://*:65535"}, "tcp://HOST:PORT"),
        ({"pool": "redis://h", "engine_events": "ipc:///x"}, "tcp://HOST:PORT"),
    ],
)
def test_wrong_options_are_refused_with_what_is_wrong(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_options(given)


def test_a_server_that_does_not_know_its_weights_does_not_start() -> None:
    with pytest.raises(ValueError, match="weights_id"):
        Engine({"pool": "redis://127.0.0.1:1", "weights_id": None})


def test_a_layout_whose_pages_cannot_be_reached_does_not_start() -> None:
    class Scattered(FakeHostPool):
        def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
            raise ValueError("Unsupported layout: page_odd")

    with pytest.raises(ValueError, match="hicache-mem-layout"):
        Engine({"pool": "redis://127.0.0.1:1"}, pool=Scattered(layout="page_odd"))


@pytest.mark.parametrize(
    ("endpoint", "parts"),
    [("tcp://*:5557", ("*", 5557)), ("tcp://10.0.0.1:1", ("10.0.0.1", 1)), ("tcp://[::1]:80", ("[::1]", 80))],
)
def test_endpoints_are_taken_apart(endpoint: str, parts: tuple[str, int]) -> None:
    assert host_and_port(endpoint) == parts


def test_where_an_engine_publishes_by_rank() -> None:
    config = '{"publisher": "zmq", "topic": "kv", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}'
    events = engine_events(config, 2)
    assert events is not None
    assert (events.endpoint, events.replay_endpoint, events.topic) == (
        "tcp://127.0.0.1:5559",
        "tcp://127.0.0.1:5659",
        "kv",
    )
    assert engine_events(None, 0) is None
    assert engine_events('{"publisher": "null"}', 0) is None
    bare = engine_events('{"publisher": "zmq", "endpoint": "inproc://x"}', 1)
    assert bare is not None
    assert (bare.endpoint, bare.replay_endpoint, bare.topic) == ("inproc://x", None, "")


def test_a_model_is_found_by_its_folder_and_nothing_is_made_up(tmp_path: Path) -> None:
    assert local_model(str(tmp_path)) == tmp_path
    assert local_model("nobody/has-this-model") is None
    assert local_model("not a name / of anything") is None


@pytest.mark.parametrize(("dp_attention", "rank"), [(False, 1), (True, 3)])
def test_what_a_running_engine_tells(monkeypatch: pytest.MonkeyPatch, dp_attention: bool, rank: int) -> None:
    """Stand-ins for SGLang's modules: the real ones are asked in ``tests/e2e/real_sglang``."""
    arguments = SimpleNamespace(
        model_path="/m", kv_cache_dtype="auto", dtype="bfloat16", load_format="auto", random_seed=7, dp_size=4,
        kv_events_config='{"publisher": "zmq", "endpoint": "tcp://*:100"}',
    )  # fmt: skip
    parallel = SimpleNamespace(attn_dp_size=4 if dp_attention else 1, attn_dp_rank=3, dp_rank=1)
    context = ModuleType("sglang.srt.runtime_context")
    context.get_server_args = lambda: arguments  # type: ignore[attr-defined]
    context.get_parallel = lambda: parallel  # type: ignore[attr-defined]
    sglang = ModuleType("sglang")
    sglang.__version__ = "0.5.23"  # type: ignore[attr-defined]
    for module in (sglang, ModuleType("sglang.srt"), context):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    facts = read_engine_facts()
    assert (facts.version, facts.model_path, facts.dp_rank, facts.dp_size) == ("0.5.23", "/m", rank, 4)
    assert facts.events == EngineEvents(f"tcp://127.0.0.1:{100 + rank}", None)
    assert facts.settings["kv_cache_dtype"] == "auto"
    assert "random_seed" not in facts.settings, "it makes no page differ where weights are read from files"
    arguments.load_format = "dummy"
    assert read_engine_facts().settings["random_seed"] == "7"
