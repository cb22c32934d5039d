"""A gateway in front of a scripted engine, for tools that test an API by its document.

    python -m tests.openapi_target /tmp/openapi.json --port 9320 &
    pip install schemathesis
    schemathesis --config-file tests/schemathesis.toml run /tmp/openapi.json --url http://127.0.0.1:9320 \\
        -H 'x-api-key: sk-schema'

``--open``: without any key. ``--of URL``: no gateway, but the document of one that runs, for ``--model``.

The file is the gateway's own ``/openapi.json`` with ``model`` pinned to the one that the engine serves, and without a
response to continue or not to keep, so that what is generated gets past both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from tests.gateways import gateway_for
from tests.scripted_engine import Asked, Json, Script, ScriptedEngine, answer, stream

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


async def pinned(url: str, model: str) -> Json:
    """Return the document of a gateway, for requests that get as far as an engine."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/openapi.json") as response:
        document: Json = await response.json()
    for name, schema in document["components"]["schemas"].items():
        members = schema.get("properties", {})
        if name.endswith("Request") and "model" in members and "model" in schema.get("required", ()):
            members["model"] = {"const": model}
            for member in ("previous_response_id", "store"):
                members.pop(member, None)
    return document


async def serve(port: int, path: Path, *, is_open: bool) -> None:
    """Serve until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with ScriptedEngine() as engine:
        engine.script_for = script_for
        with tempfile.TemporaryDirectory() as home:
            keys = [] if is_open else [KEY]
            async with gateway_for([engine], Path(home), server={"port": port}, keys=keys) as client:
                await asyncio.to_thread(path.write_text, json.dumps(await pinned(client.url, "m")))
                await stop.wait()


async def main(argv: Sequence[str]) -> None:
    """Write the document; serve, unless another gateway does."""
    parser = argparse.ArgumentParser(prog="python -m tests.openapi_target")
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=9320)
    parser.add_argument("--open", action="store_true")
    parser.add_argument("--of", metavar="URL")
    parser.add_argument("--model", default="mock-model")
    args = parser.parse_args(argv)
    if args.of is None:
        await serve(args.port, args.file, is_open=args.open)
    else:
        await asyncio.to_thread(args.file.write_text, json.dumps(await pinned(args.of, args.model)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
