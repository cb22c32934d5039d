"""Streams of real SGLang that outlive it: one of two servers is killed, the other goes on with the answer's ids.

    KEEPWARM_SGLANG_PYTHON=…/bin/python .venv/bin/python -m tests.e2e.real_sglang_failover [--json FILE]

Two servers of SmolLM2-135M-Instruct on the CPU (a random model's noise is other tokens when it is read again); see
``real_sglang_index/README.md`` for the interpreter. What must hold is what ``real_llamacpp_failover`` says. Some four
minutes, most of them the servers' start.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.e2e.failover import MODEL
from tests.e2e.killed_engine import of_two, options, show, spoken_model
from tests.e2e.real_sglang_index.processes import SglangServer, sglang_python

PAGE, TOKENS = 16, 8192


def main() -> int:
    """Run it."""
    told = options(__doc__)
    python = sglang_python()
    if python is None:
        return 2
    with tempfile.TemporaryDirectory(prefix="keepwarm-sglang-") as scratch:
        folder = Path(scratch)
        model = spoken_model(folder / "model")
        servers = [
            SglangServer(python, model, name, page=PAGE, tokens=TOKENS, folder=folder, served=MODEL)
            for name in ("one", "two")
        ]
        found = of_two(servers, "SGLang", "sglang", model, folder / "gateway", told)
    return show(found, told.json)


if __name__ == "__main__":
    sys.exit(main())
