"""Streams of real vLLM that outlive it: one of two servers is killed, the other goes on with the answer's ids.

    KEEPWARM_VLLM_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_vllm_failover [--json FILE]

Two servers of SmolLM2-135M-Instruct on the CPU; see ``real_vllm/README.md`` for the interpreter. What must hold is what
``real_llamacpp_failover`` says. Some four minutes, most of them the servers' start.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.e2e.failover import MODEL
from tests.e2e.killed_engine import of_two, options, show, spoken_model
from tests.e2e.real_vllm.processes import VllmServer


def main() -> int:
    """Run it."""
    told = options(__doc__)
    python = os.environ.get("KEEPWARM_VLLM_PYTHON")
    if not python:
        print("KEEPWARM_VLLM_PYTHON names no Python with vllm: see tests/e2e/real_vllm/README.md", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-vllm-") as scratch:
        folder = Path(scratch)
        model = spoken_model(folder / "model")
        servers = [VllmServer(python, model, name, folder, None, served=MODEL) for name in ("one", "two")]
        found = of_two(servers, "vLLM", "vllm", model, folder / "gateway", told)
    return show(found, told.json)


if __name__ == "__main__":
    sys.exit(main())
