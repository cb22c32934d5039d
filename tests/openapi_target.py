"""A gateway in front of a scripted engine, for tools that test an API by its document.

    python -m tests.openapi_target 9320 /tmp/openapi.json &
    pip install schemathesis
    schemathesis run /tmp/openapi.json --url http://127.0.0.1:9320 --checks all -H 'x-api-key: sk-schema'

The file is the gateway's own ``/openapi.json`` with ``model`` pinned to the one that the engine serves, and without a
response to continue or not to keep, so that what is generated gets past both.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import tempfile
from pathlib import Path

from tests.gateways import gateway_for
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, stream

KEY = {"id": "root", "secret": "sk-schema", "admin": True}


def script_for(asked: Asked) -> Script:
    """Return an answer that fits the endpoint."""
    if asked.path == "/v1/embeddings":
        vector = {"object": "embedding", "index": 0, "embedding": [0.5]}
        usage = {"prompt_tokens": 1, "total_tokens": 1}
        return Script(body={"object": "list", "model": "m", "data": [vector], "usage": usage})
    if asked.path == "/tokenize":
        return Script(body={"tokens": [1], "count": 1, "max_model_len": 9})
    if asked.path == "/detokenize":
        return Script(body={"text": "x"})
    return Script(events=stream(["x"])) if asked.json.get("stream") else Script(body=answer("x"))


async def serve(port: int, path: Path) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ScriptedEngine() as engine:
        engine.script_for = script_for
        with tempfile.TemporaryDirectory() as home:
            async with gateway_for([engine], Path(home), server={"port": port}, keys=[KEY]) as client:
                async with client.session.get(f"{client.url}/openapi.json") as response:
                    document = await response.json()
                for name, schema in document["components"]["schemas"].items():
                    if (
                        name.endswith("Request")
                        and "model" in schema.get("properties", {})
                        and "model" in schema.get("required", ())
                    ):
                        schema["properties"]["model"] = {"const": "m"}
                        for member in ("previous_response_id", "store"):
                            schema["properties"].pop(member, None)
                await asyncio.to_thread(path.write_text, json.dumps(document))
                await stop.wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), Path(sys.argv[2])))
