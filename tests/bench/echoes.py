"""``./bench echoes [--steps N] [--json FILE]``: what it wins to send an agent's quoted answers as they were generated.

A scripted agent of forced tool calls runs on the embedded engine (SmolLM2), its client printing each call anew; once
through a gateway that keeps generated ids, once through one that renders answers anew. For each: the tokens of all
prompts, those that hit, those that were computed, and the hits that the policy claims for itself. Everything else is
the same: one engine, a cold cache namespace for each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.gateways import gateway_for
from tests.samples.echo_agent import MODEL, run_agent
from tracing.record import RequestRecord

PAGE_TOKENS = 16


def summary(records: Sequence[RequestRecord]) -> dict[str, Any]:
    """Return the sums over a run."""
    usages = [record.usage for record in records]
    return {
        "prompt_tokens": sum(usage.prompt_tokens for usage in usages),
        "hit_tokens": sum(usage.hit_tokens for usage in usages),
        "fresh_tokens": sum(usage.fresh_tokens for usage in usages),
        "output_tokens": sum(usage.output_tokens for usage in usages),
        "won_tokens": sum(record.prompt.echo_won_tokens for record in records if record.prompt is not None),
        "steps": [(usage.prompt_tokens, usage.hit_tokens) for usage in usages],
    }


async def run(steps: int) -> dict[str, Any]:
    """Run both agents."""
    embedded = {"enabled": True, "device_tokens": 16_384, "host_bytes": 0, "disk_bytes": 0, "pool_bytes": 0,
                "page_tokens": PAGE_TOKENS}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        async with gateway_for(
            [], home / "kept", instances=[], embedded=embedded, ready_limit_s=240, ready_count=1
        ) as client:
            url = client.gateway.fleet.instances["embedded-0"].spec.url
            engine = {"id": "embedded-0", "url": url, "adapter": "embedded"}
            model = {"name": MODEL, "quoted_answers": "rendered"}
            async with gateway_for([], home / "plain", ready_count=1, models=[model], instances=[engine]) as plain:
                await run_agent(client, "warm-up", steps=1)
                results = {
                    "rendered": summary(await run_agent(plain, "rendered", steps=steps)),
                    "ids": summary(await run_agent(client, "ids", steps=steps)),
                }
    return {"benchmark": "echoes", "steps": steps, "page_tokens": PAGE_TOKENS, "quoted_answers": results}


def main(argv: list[str]) -> int:
    """Run the benchmark and print what it measured."""
    parser = argparse.ArgumentParser(prog="./bench echoes", description="Quoted answers as ids, and rendered anew.")
    parser.add_argument("--steps", type=int, default=12, help="of each agent (default 12)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there as well")
    args = parser.parse_args(argv)
    text = json.dumps(asyncio.run(run(args.steps)), indent=2)
    print(text)
    if args.json is not None:
        args.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
