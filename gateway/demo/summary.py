"""The demonstration's summary, read back from the trace store and the ledger and from nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from tracing.record import RequestRecord

TWIN_MIN_PROMPT_TOKENS = 1000
"""Below this many prompt tokens a cold twin says little: fixed costs hide the prefill."""


def step_summary(record: RequestRecord, twin: RequestRecord | None) -> dict[str, Any]:
    """Return one step as the summary shows it; ``twin`` is the same prompt sent cold, or ``None``."""
    usage = record.usage
    return {
        "step": record.link.step if record.link else None,
        "instance": record.instance,
        "prompt_tokens": usage.prompt_tokens,
        "hit_tokens": {
            "device": usage.hit_device_tokens,
            "host": usage.hit_host_tokens,
            "disk": usage.hit_disk_tokens,
            "pool": usage.hit_pool_tokens,
        },
        "output_tokens": usage.output_tokens,
        "ttft_ms": _milliseconds(record.stamps.ttft_ns),
        "cold_ttft_ms": _milliseconds(twin.stamps.ttft_ns) if twin else None,
        "cost_nano": record.charge.amount_nano,
        "saved_nano": record.charge.saved_nano,
        "tool_calls": [call.name for call in record.tool_calls],
    }


def run_summary(
    model: str,
    run: str,
    records: Sequence[RequestRecord],
    twins: Mapping[str, RequestRecord],
    ledger_nano: Mapping[str, int | None],
) -> dict[str, Any]:
    """Return the summary of a run whose last two steps are the restart step and the new instance's step.

    ``twins`` and ``ledger_nano`` are keyed by request id; the amounts of the ledger and of the trace store are summed
    apart, so that they can disagree.
    """
    steps = [step_summary(record, twins.get(record.request_id)) for record in records]
    return {
        "model": model,
        "run": run,
        "steps": steps[:-2],
        "restart_step": steps[-2],
        "new_instance_step": steps[-1],
        "totals": {
            "ledger_nano": sum(ledger_nano[record.request_id] or 0 for record in records),
            "trace_nano": sum(record.charge.amount_nano or 0 for record in records),
            "hit_tokens": sum(record.usage.hit_tokens for record in records),
            "prompt_tokens": sum(record.usage.prompt_tokens for record in records),
        },
    }


def broken_promises(summary: Mapping[str, Any], page_tokens: int) -> list[str]:
    """Return what the run should have shown and did not; empty when all is well.

    Times are shown, not judged: a busy machine must not fail a demonstration.
    """
    problems = []
    steps = [*summary["steps"], summary["restart_step"], summary["new_instance_step"]]
    for before, step in pairwise(steps):
        least, hit = before["prompt_tokens"] // page_tokens * page_tokens, sum(step["hit_tokens"].values())
        if hit < least:
            problems.append(
                f"step {step['step']} hit {hit} tokens of the {least} in full pages of the prompt before it"
            )
    if not summary["restart_step"]["hit_tokens"]["disk"]:
        problems.append("the step after the restart was not served from disk")
    if not summary["new_instance_step"]["hit_tokens"]["pool"]:
        problems.append("the step on an instance that never saw the run was not served from the pool")
    totals = summary["totals"]
    if any(step["cost_nano"] is None for step in steps):
        problems.append("a step has no price")
    if totals["ledger_nano"] != totals["trace_nano"]:
        problems.append(f"the ledger says {totals['ledger_nano']} nano-units, the trace {totals['trace_nano']}")
    return problems


def _milliseconds(nanoseconds: int | None) -> float | None:
    return None if nanoseconds is None else round(nanoseconds / 1e6, 1)
