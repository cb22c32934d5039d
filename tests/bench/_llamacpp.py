"""llama.cpp beside the embedded engine: its own server, from the ``xllamacpp`` wheel, run by another interpreter.

``$KEEPWARM_LLAMACPP_PYTHON`` names a Python that has the wheel (``pip install xllamacpp`` in a virtual environment); it
is no dependency of ours, since it is only a yardstick.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from engine_adapter.embedded.folders import default_gguf

PYTHON_VARIABLE = "KEEPWARM_LLAMACPP_PYTHON"

_SERVE = """
import sys, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.n_ctx, params.n_parallel = sys.argv[1], 4096, 1
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = int(sys.argv[2])
params.warmup = True
server = xllamacpp.Server(params)
print(xllamacpp.__version__, server.listening_address, flush=True)
sys.stdin.read()
"""


class LlamaCpp:
    """A running server: ``version``, and the bytes of weights that it reads for a token."""

    def __init__(self, version: str, url: str, weight_bytes: int) -> None:
        self.version, self.weight_bytes = version, weight_bytes
        self._url = url

    def rates(self, token_ids: Sequence[int], output_tokens: int) -> tuple[float, float]:
        """Return prefill and decode rates in tokens/s for one request, by the server's own clock."""
        body = {"prompt": list(token_ids), "n_predict": output_tokens, "temperature": 0,
                "cache_prompt": False, "ignore_eos": True}  # fmt: skip
        request = urllib.request.Request(
            f"{self._url}/completion", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request) as response:
            timings = json.load(response)["timings"]
        return timings["prompt_per_second"], timings["predicted_per_second"]


@contextmanager
def llama_cpp(threads: int) -> Iterator[LlamaCpp | str]:
    """Serve the default model's GGUF while the context lasts; or yield the reason why that cannot be."""
    python = os.environ.get(PYTHON_VARIABLE)
    if not python:
        yield f"not installed: {PYTHON_VARIABLE} names no Python with xllamacpp"
        return
    scratch = Path(tempfile.mkdtemp(prefix="keepwarm-bench-"))
    try:
        gguf = default_gguf(scratch)
        with subprocess.Popen(
            [python, "-c", _SERVE, str(gguf), str(threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        ) as server:  # fmt: skip
            assert server.stdin is not None
            assert server.stdout is not None
            try:
                hello = server.stdout.readline().split()
                if len(hello) == 2:
                    yield LlamaCpp(hello[0], hello[1], gguf.stat().st_size)
                else:
                    yield f"not installed: {python} cannot import xllamacpp"
            finally:
                server.stdin.close()
    finally:
        shutil.rmtree(scratch)
