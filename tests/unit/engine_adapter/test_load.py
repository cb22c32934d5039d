"""How busy engines say they are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from engine_adapter.flavours import FLAVOURS, FlavouredOpenAI
from engine_adapter.llamacpp import LlamaCpp
from engine_adapter.load import EngineLoad, decode_load_stat, labels_of
from engine_adapter.sglang import Sglang, load_sources
from engine_adapter.vllm import Vllm

_CAPTURES = Path(__file__).parents[2] / "captures"


def _page(*lines: str) -> bytes:
    return "\n".join(["# HELP a b", *lines, ""]).encode()


def test_a_real_page_of_sglang() -> None:
    page = (_CAPTURES / "sglang_metrics_0.5.23.txt").read_bytes()
    (load,) = Sglang().read_load(page)
    assert (load.running, load.waiting) == (0, 0)
    assert load.used_share is not None


def test_sglang_tells_more_in_its_loads() -> None:
    body = {"loads": [{"dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 2, "token_usage": 0.5,
                       "num_waiting_uncached_tokens": 700}, {"dp_rank": 2}, "odd"]}  # fmt: skip
    assert Sglang().read_load(msgspec.json.encode(body)) == [EngineLoad(3, 2, 0.5, 700, 1)]
    for odd in (b"{", b"{}", b'{"loads": 3}'):
        assert Sglang().read_load(odd) == []


def test_each_rank_of_vllm_has_its_own() -> None:
    page = _page(
        'vllm:num_requests_running{engine="0",model_name="m"} 4.0',
        'vllm:num_requests_waiting{engine="0",model_name="m"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25',
        'vllm:num_requests_running{engine="1",model_name="m"} 2.0',
        'vllm:num_requests_waiting{engine="1",model_name="m"} 0.0',
        'vllm:num_requests_running{engine="2",model_name="m"} 2.0',
        'vllm:num_requests_waiting{engine="1" broken',
    )
    assert Vllm().read_load(page) == [EngineLoad(4, 1, 0.25), EngineLoad(2, 0, None, rank=1)]


def test_tensor_parallel_ranks_are_not_added_up() -> None:
    lines = [f'sglang:{name}{{tp_rank="{rank}"}} 5.0' for rank in (0, 1) for name in ("num_running_reqs",)]
    page = _page(*lines, 'sglang:num_queue_reqs{tp_rank="0"} 0.0')
    assert Sglang().read_load(page) == [EngineLoad(5, 0)]


def test_llama_cpp() -> None:
    assert LlamaCpp().read_load(_page("llamacpp:requests_processing 2", "llamacpp:requests_deferred 7")) == [
        EngineLoad(2, 7)
    ]
    assert LlamaCpp().read_load(b"\xff\xfe not a page") == []


def test_an_answer_with_timings_alone_is_counted() -> None:
    read = LlamaCpp().read_usage({"timings": {"cache_n": 236, "prompt_n": 1, "predicted_n": 35}})
    assert read is not None
    assert read.usage == {
        "prompt_tokens": 237,
        "completion_tokens": 35,
        "prompt_tokens_details": {"cached_tokens": 236},
    }
    assert LlamaCpp().read_usage({"timings": {"cache_n": 1}}) is None
    assert LlamaCpp().read_usage({}) is None


@pytest.mark.parametrize(
    ("name", "lines", "load"),
    [
        ("tgi", ["tgi_batch_current_size 4", "tgi_queue_size 7"], EngineLoad(4, 7)),
        (
            "lmdeploy",
            [f'lmdeploy:{name}{{engine="1"}} {value}' for name, value in
             (("num_requests_running", 2), ("num_requests_waiting", 1), ("gpu_cache_usage_perc", 0.5))],
            EngineLoad(2, 1, 0.5, rank=1),
        ),
        ("tensorrt-llm", ["trtllm_num_requests_running 1", "trtllm_num_requests_waiting 0"], EngineLoad(1, 0)),
    ],
)  # fmt: skip
def test_engines_of_the_table(name: str, lines: list[str], load: EngineLoad) -> None:
    """Pages as these engines' documentation has them: none of the engines is here."""
    adapter = FlavouredOpenAI(FLAVOURS[name])
    assert adapter.read_load(_page(*lines)) == [load]
    assert adapter.read_load(b"") == []


def test_engines_without_gauges_are_not_asked() -> None:
    for name in ("ollama", "mlc-llm", "rtp-llm", "deepinfer", "xllm"):
        adapter = FlavouredOpenAI(FLAVOURS[name])
        assert list(adapter.load_paths) == []
        assert adapter.read_load(b"x 1") == []


def test_the_load_socket() -> None:
    told = ["LoadStat", 3, 2, 500, 1000, 1, 700, 800, 64, 12, 34]
    assert decode_load_stat(msgspec.msgpack.encode(told)) == EngineLoad(3, 2, 0.5, 700, 1)
    assert decode_load_stat(msgspec.msgpack.encode(told[:6])) == EngineLoad(3, 2, 0.5, None, 1)
    assert decode_load_stat(msgspec.msgpack.encode(["LoadStat", 3, 2, 500, 0, None])) == EngineLoad(3, 2)
    for odd in (b"", b"\xc1", msgspec.msgpack.encode(["Other", 1, 2, 3, 4, 5]), msgspec.msgpack.encode(7)):
        assert decode_load_stat(odd) is None
    info = {"kv_events": {"load_endpoint_port_base": 5600, "dp_size": 2}}
    assert [(each.endpoint, each.topic, each.rank) for each in load_sources(info, "h")] == [
        ("tcp://h:5600", "load", 0),
        ("tcp://h:5601", "load", 1),
    ]
    assert load_sources({"kv_events": None}, "h") == ()


def test_labels_of_an_info_metric() -> None:
    assert labels_of(_page('x:info{a="1",b="two"} 1.0'), "x:info") == {"a": "1", "b": "two"}
    assert labels_of(b"", "x:info") == {}
