"""``python -m tests.sim``: a million requests through 64 instances that break.

Prints what became of them; exits with 1 and the seed where an invariant fails. ``--seeds N`` runs so many seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from gateway.routing import POLICIES
from tests.sim.fleet import Options, Simulation


def main(argv: Sequence[str] | None = None) -> int:
    """Run."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--policy", choices=list(POLICIES), default="expected-ttft")
    chosen = parser.parse_args(argv)
    for seed in range(chosen.seed, chosen.seed + chosen.seeds):
        began = time.perf_counter()
        options = Options(chosen.requests, chosen.instances, seed, chosen.policy)
        try:
            summary = Simulation(options).run()
        except AssertionError as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        figures = {
            "seed": seed,
            "ends": dict(summary.ends),
            "attempts": summary.attempts,
            "faults": dict(summary.faults),
            "block_hit_share": round(summary.hit_blocks / max(summary.prompt_blocks, 1), 4),
            "simulated_s": round(summary.simulated_s),
            "wall_s": round(time.perf_counter() - began, 1),
        }
        print(json.dumps(figures), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
