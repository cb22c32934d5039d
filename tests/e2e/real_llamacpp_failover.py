"""Streams of real llama.cpp that outlive it: one of two servers is killed, the other goes on from the text.

    KEEPWARM_LLAMACPP_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_llamacpp_failover [--json FILE]

The interpreter needs ``xllamacpp`` (``pip install xllamacpp``). 0 when every stream that the killed server had begun
went on: what was sent before stays a prefix of what was delivered, there is one id, one role and one finish, and one
record with two attempts whose tokens add up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from engine_adapter.embedded.weights import default_gguf
from tests.e2e.failover import MODEL, Stream
from tests.e2e.real_llamacpp_prediction import PYTHON_VARIABLE
from tests.gateways import gateway_for
from tracing.record import AttemptRole, Outcome

Json = dict[str, Any]
_SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 8192, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
params.use_jinja, params.warmup, params.model_alias = True, True, {sys.argv[2]}
server = xllamacpp.Server(params)
print(xllamacpp.__version__, server.listening_address, flush=True)
sys.stdin.read()
"""


class Server:
    """One llama.cpp server."""

    def __init__(self, python: str, model: Path, stack: ExitStack) -> None:
        self.process = stack.enter_context(
            subprocess.Popen(
                [python, "-c", _SERVE, str(model), MODEL],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )
        )  # fmt: skip
        stack.callback(self.end)
        assert self.process.stdout is not None
        hello = self.process.stdout.readline().split()
        if len(hello) != 2:
            raise RuntimeError(f"{python} cannot serve with xllamacpp")
        self.version, self.url = hello

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()


async def killed(servers: list[Server], home: Path, count: int, tokens: int) -> Json:
    """Kill the first server under streams; return what was seen."""
    instances = [{"id": f"l{n}", "url": s.url, "adapter": "llamacpp"} for n, s in enumerate(servers)]
    async with gateway_for(
        [], home, ready_count=2, ready_limit_s=60, instances=instances, routing={"policy": "fewest-requests"}
    ) as client:
        streams = [Stream(number) for number in range(count)]
        running = [asyncio.create_task(stream.run(client, tokens)) for stream in streams]
        await asyncio.gather(*(stream.begun.wait() for stream in streams))
        before = {stream.number: stream.text for stream in streams}
        servers[0].process.send_signal(signal.SIGKILL)
        await asyncio.gather(*running)
        records = {record.request_id: record for record in await client.records(count)}
    hurt = [stream for stream in streams if stream.instance == "l0"]
    went_on = [stream for stream in hurt if len(records[stream.request_id].attempts) == 2]

    def is_whole(stream: Stream) -> bool:
        record = records[stream.request_id]
        roles = [attempt.role for attempt in record.attempts]
        counts = record.usage.prompt_tokens, record.usage.output_tokens
        return (
            stream.text.startswith(before[stream.number])
            and len({identity for identity, *_ in stream.frames}) == 1  # its time of creation changes as it goes
            and stream.roles == 1
            and stream.finish is not None
            and stream.error is None
            and counts == (stream.usage["prompt_tokens"], stream.usage["completion_tokens"])
            and record.usage.output_tokens <= tokens + 1
            and record.outcome is Outcome.OK
            and roles in ([AttemptRole.ANSWER], [AttemptRole.ANSWER, AttemptRole.CONTINUATION])
        )

    return {
        "llama.cpp": servers[0].version,
        "streams": count,
        "on the killed server": len(hurt),
        "went on": len(went_on),
        "whole": sum(map(is_whole, streams)),
        "an answer that went on": went_on[0].text if went_on else None,
        "its first part": before[went_on[0].number] if went_on else None,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=40)
    options = parser.parse_args()
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        sys.exit(f"{PYTHON_VARIABLE} names the interpreter that has xllamacpp")
    with tempfile.TemporaryDirectory(prefix="keepwarm-llamacpp-") as scratch, ExitStack() as stack:
        model = default_gguf(Path(scratch))
        pair = [Server(python, model, stack) for _ in range(2)]
        found = asyncio.run(killed(pair, Path(scratch) / "gateway", options.streams, options.tokens))
    text = json.dumps(found, indent=1, ensure_ascii=False)
    print(text)
    if options.json is not None:
        options.json.write_text(text + "\n")
    sys.exit(0 if found["went on"] and found["whole"] == found["streams"] else 1)
