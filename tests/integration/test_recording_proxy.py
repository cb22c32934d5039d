"""The recording proxy changes nothing and counts what the engine said."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gateways import gateway_for
from tests.integration.recording_proxy import RecordingProxy, counts_in
from tests.scripted_engine import DONE, Script, ScriptedEngine, answer, event, stream, usage

_EXTENSION = {
    "cached_tokens_details": {"device": 2, "host": 0, "storage": 6, "storage_backend": "keepwarm", "disk": 1, "pool": 5}
}


@pytest.mark.parametrize("is_stream", [False, True])
async def test_it_sees_the_same_tokens_as_ledger_and_trace(tmp_path: Path, is_stream: bool) -> None:
    async with ScriptedEngine() as engine, RecordingProxy(engine.url) as proxy:
        whole = answer("a b c", prompt=20, output=3, cached=8, sglext=_EXTENSION)
        pieces = stream(["a", "b", "c"], prompt=20, cached=8, sglext=_EXTENSION)
        engine.script = Script(events=pieces) if is_stream else Script(body=whole)
        instances = [{"id": "e0", "url": proxy.url}]
        async with gateway_for([engine], tmp_path, instances=instances) as client:
            async with client.chat(stream=is_stream) as response:
                assert response.status == 200
                await response.read()
            (record,) = await client.records(1)
        (seen,) = proxy.answers
        assert (seen.request_id, seen.status, seen.path) == (record.request_id, 200, "/v1/chat/completions")
        counted = record.usage
        assert (seen.prompt_tokens, seen.cached_tokens, seen.output_tokens) == (20, 8, 3)
        assert (counted.prompt_tokens, counted.hit_tokens, counted.output_tokens) == (20, 8, 3)
        assert seen.cached_by_tier == {
            "device": counted.hit_device_tokens,
            "host": counted.hit_host_tokens,
            "disk": counted.hit_disk_tokens,
            "pool": counted.hit_pool_tokens,
        }


def test_counts_are_found_in_any_answer() -> None:
    assert counts_in(b"".join([event({"usage": None}), event({"usage": usage(3, 1), "sglext": {"x": 1}}), DONE])) == (
        usage(3, 1),
        {"x": 1},
    )
    assert counts_in(b' {"usage": {"prompt_tokens": 1}}') == ({"prompt_tokens": 1}, None)
    assert counts_in(b"") == (None, None)
