"""Streams of real llama.cpp that outlive it: one of two servers is killed, the other goes on from the text.

    KEEPWARM_LLAMACPP_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_llamacpp_failover [--json FILE]

The interpreter needs ``xllamacpp`` (``pip install xllamacpp``). 0 when every stream that the killed server had begun
went on: what was sent before stays a prefix of what was delivered, there is one id, one role and one finish, and one
record and one row with two attempts, whose tokens add up and whose prompt counts as undisturbed.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from engine_adapter.embedded.folders import default_gguf
from tests.e2e.failover import MODEL
from tests.e2e.killed_engine import Pair, killed, options, show
from tests.e2e.real_llamacpp_prediction import PYTHON_VARIABLE

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
        """Let it end by itself."""
        assert self.process.stdin is not None
        self.process.stdin.close()


def main() -> int:
    """Run it."""
    told = options(__doc__)
    python = os.environ.get(PYTHON_VARIABLE)
    if python is None:
        print(f"{PYTHON_VARIABLE} names the interpreter that has xllamacpp", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-llamacpp-") as scratch, ExitStack() as stack:
        model = default_gguf(Path(scratch))
        servers = [Server(python, model, stack) for _ in range(2)]
        pair = Pair([server.url for server in servers], "llamacpp", servers[0].process.kill)
        found = asyncio.run(killed(pair, Path(scratch) / "gateway", told))
    return show({"llama.cpp": servers[0].version, **found}, told.json)


if __name__ == "__main__":
    sys.exit(main())
