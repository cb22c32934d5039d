"""What adapters ask of engines and read from them."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine_adapter.base import Ask, Capabilities, Merge
from engine_adapter.embedded.adapter import Embedded
from engine_adapter.errors import AnswerTooLong, ConnectFailed, UpstreamBroken, UpstreamError
from engine_adapter.http import get_json
from engine_adapter.openai_compatible import OpenAICompatible
from engine_adapter.sglang import Sglang, event_sources
from engine_adapter.wire_client import WireClient
from tests.scripted_engine import Script, ScriptedEngine, answer, stream

_EVENTS = {
    "publisher": "zmq",
    "endpoint_host": "*",
    "endpoint_port_base": 5557,
    "replay_endpoint_port_base": 6557,
    "topic": "kv",
    "block_size": 32,
    "dp_size": 2,
}
_NO_EVENTS = (
    {},
    {"kv_events": None},
    {"kv_events": {**_EVENTS, "publisher": "null"}},
    {"kv_events": {"publisher": "zmq"}},
)


def test_a_plain_engine_is_asked_for_nothing_it_may_not_know() -> None:
    plain = OpenAICompatible()
    assert plain.prepare(Ask("r", stream=False)).members == {}
    prepared = plain.prepare(Ask("r", stream=True, model="theirs", salt="s"))
    assert prepared.members == {"model": "theirs", "stream_options": Merge({"include_usage": True})}
    assert plain.capabilities == Capabilities(media=True, threads=True)


def test_sglang_is_asked_for_salt_and_hits_by_tier() -> None:
    prepared = Sglang().prepare(Ask("r", stream=True, salt="s"))
    assert prepared.members == {
        "stream_options": Merge({"include_usage": True}),
        "return_cached_tokens_details": True,
        "cache_salt": "s",
    }
    assert prepared.headers["x-override-rid"] == "r"
    assert "cache_salt" not in Sglang().prepare(Ask("r", stream=False)).members


def test_ids_go_in_and_come_out_where_they_are_asked_for() -> None:
    prepared = Sglang().prepare(Ask("r", stream=False, input_ids=[1, 2], wants_output_ids=True))
    assert prepared.members["input_ids"] == [1, 2]
    assert prepared.headers["x-sglext-return-output-ids"] == "1"
    plain = Sglang().prepare(Ask("r", stream=False))
    assert "input_ids" not in plain.members
    assert "x-sglext-return-output-ids" not in plain.headers
    read = Sglang().read_usage({"sglext": {"output_ids": [[5, 6], [7]]}})
    assert read is not None
    assert read.output_ids == [5, 6]
    for odd in (None, [], [None], [["a"]], [[True]], "ids"):
        read = Sglang().read_usage({"sglext": {"output_ids": odd}})
        assert read is not None
        assert read.output_ids is None


_TOOLS: list[dict[str, object]] = [
    {"type": "function", "function": {"name": "a", "parameters": {"z": 1}, "strict": True, "odd": 1}, "odd": 2},
    {"function": {"name": "b", "description": "d"}},
]


def test_tools_are_in_the_prompt_as_each_engine_puts_them_there() -> None:
    """SGLang's forms are what its own model of a tool printed: 0.5.23 run, 0.5.22 read."""
    for choice in (None, "auto", "none", "required", {"type": "function", "function": {"name": "b"}}):
        assert OpenAICompatible().prompt_tools(_TOOLS, choice, "1") == _TOOLS
        assert Embedded().prompt_tools(_TOOLS, choice, "1") == _TOOLS
    sglang = Sglang()
    assert sglang.prompt_tools(_TOOLS, "none", None) is None
    assert sglang.prompt_tools(None, "auto", None) is None
    named = sglang.prompt_tools(_TOOLS, {"type": "function", "function": {"name": "b"}}, "0.5.23")
    function = {"name": "b", "description": "d", "parameters": None}
    assert json.dumps(named) == json.dumps([{"type": "function", "function": function, "defer_loading": None}])
    new = {"name": "a", "parameters": {"z": 1}, "strict": True, "description": None}
    old = {"description": None, "name": "a", "parameters": {"z": 1}, "strict": True}
    for version, function in (("0.5.23", new), ("0.5.23.post1", new), (None, new), ("dev", new), ("0.5.22", old)):
        first, second = sglang.prompt_tools(_TOOLS, "auto", version) or ()
        assert json.dumps(first) == json.dumps({"type": "function", "function": function, "defer_loading": None})
        assert ("strict" in json.dumps(second)) == (version == "0.5.22")


def test_usage_and_extension_are_read_where_they_stand() -> None:
    both = Sglang().read_usage({"usage": {"prompt_tokens": 1}, "sglext": {"a": 1}})
    assert both is not None
    assert (both.usage, both.extension) == ({"prompt_tokens": 1}, {"a": 1})
    alone = Sglang().read_usage({"usage": None, "sglext": {"a": 1}})
    assert alone is not None
    assert (alone.usage, alone.extension) == (None, {"a": 1})
    assert Sglang().read_usage({"usage": None}) is None
    assert OpenAICompatible().read_usage({"usage": "many"}) is None


@pytest.mark.parametrize(
    "last",
    [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop", "usage": {"prompt_tokens": 7}}]},
        {"choices": [], "x_groq": {"id": "r", "usage": {"prompt_tokens": 7}}},
        {"choices": [{"usage": None}], "usage": None, "x_groq": {"usage": {"prompt_tokens": 7}}},
        {"choices": [{"usage": {"prompt_tokens": 8}}], "usage": {"prompt_tokens": 7}},
    ],
)
def test_a_vendors_usage_is_found_where_it_stands(last: dict[str, object]) -> None:
    read = OpenAICompatible().read_usage(last)
    assert read is not None
    assert read.usage == {"prompt_tokens": 7}


@pytest.mark.parametrize("odd", [{"choices": [None]}, {"choices": {}}, {"x_groq": []}, {"x_groq": {"usage": 1}}])
def test_what_is_no_usage_is_none(odd: dict[str, object]) -> None:
    assert OpenAICompatible().read_usage(odd) is None


def test_event_sockets_are_found_in_server_info() -> None:
    first, second = event_sources({"kv_events": _EVENTS}, "10.0.0.7")
    assert (first.endpoint, first.replay_endpoint, first.topic, first.rank) == (
        *("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", "kv", 0),
    )
    assert (second.endpoint, second.replay_endpoint, second.rank) == ("tcp://10.0.0.7:5558", "tcp://10.0.0.7:6558", 1)
    (alone,) = event_sources({"kv_events": {"publisher": "zmq", "endpoint_host": "h", "endpoint_port_base": 1}}, "x")
    assert (alone.endpoint, alone.replay_endpoint) == ("tcp://h:1", None)
    assert [event_sources(info, "x") for info in _NO_EVENTS] == [()] * 4


async def test_an_instance_describes_itself() -> None:
    info = {
        "kv_events": _EVENTS,
        "max_total_num_tokens": 20_000,
        "model_path": "/models/m",
        "weights_id": "w",
        "version": "1",
        "keepwarm": {"tiers": ["device", "host"], "pool_id": "p"},
    }
    async with ScriptedEngine(models=("m", "n"), info=info) as engine, WireClient() as client:
        facts = await Sglang().describe(client, engine.url, {})
        assert (facts.models, facts.max_model_len, facts.block_size) == (("m", "n"), 8192, 32)
        assert (facts.pool, facts.tiers, facts.weights_id) == ("p", ("device", "host"), "w")
        assert len(facts.event_sources) == 2
        assert (await OpenAICompatible().describe(client, engine.url, {})).models == ("m", "n")
        engine.info = {"page_size": 16}
        plain = await Sglang().describe(client, engine.url, {})
        assert (plain.block_size, plain.event_sources, plain.pool) == (16, (), None)


async def test_the_client_tells_what_was_sent_from_what_was_not() -> None:
    async with WireClient() as client, ScriptedEngine() as engine:
        url = f"{engine.url}/v1/chat/completions"
        engine.script = Script(end="reset")
        with pytest.raises(UpstreamBroken):
            await client.request("POST", url, {}, b"{}")
        engine.script = Script(events=stream(["a"])[:1], end="reset")
        response = await client.request("POST", url, {}, b"{}")
        assert await response.read_some() == stream(["a"])[0]
        with pytest.raises(UpstreamBroken):
            await response.read_some()
        response.close()
        engine.script = Script(body=answer("x"))
        response = await client.request("POST", url, {}, b"{}")
        with pytest.raises(AnswerTooLong):
            await response.read_all(10)
        response.close()
        await engine.close()
        async with WireClient() as another:  # a kept connection would break instead
            with pytest.raises(ConnectFailed):
                await another.request("POST", url, {}, b"{}")


async def test_get_json_takes_objects_only() -> None:
    async with WireClient() as client, ScriptedEngine() as engine:
        assert await get_json(client, f"{engine.url}/server_info", {}) == {}
        with pytest.raises(UpstreamError, match="404"):
            await get_json(client, f"{engine.url}/nothing", {})
        with pytest.raises(UpstreamError, match="does not answer a JSON object"):
            await get_json(client, f"{engine.url}/health", {})


async def test_cancelling_a_request_stops_the_engines_work() -> None:
    async with WireClient() as client, ScriptedEngine() as engine:
        engine.script = Script(wait_for=asyncio.Event())
        sending = asyncio.ensure_future(client.request("POST", f"{engine.url}/v1/completions", {}, b"{}"))
        await engine.until(lambda: engine.in_flight == 1)
        sending.cancel()
        await engine.until(lambda: engine.in_flight == 0)
        assert engine.hung_up == 1
