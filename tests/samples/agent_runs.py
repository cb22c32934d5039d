"""Records of plausible agent runs: what a gateway with two engines and four tiers would have closed."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Final

from msgspec.structs import replace

from tracing.record import (
    Attempt,
    Candidate,
    Charge,
    ChargeLine,
    Decision,
    HitSource,
    Identity,
    Outcome,
    RequestRecord,
    RunLink,
    Stamps,
    ToolCall,
    Usage,
    UsageSource,
)
from tracing.store import TraceStore

MS: Final = 1_000_000
START_NS: Final = 1_790_000_000 * 10**9
RATES_NANO: Final = {
    "fresh": 150, "hit_device": 15, "hit_host": 18, "hit_disk": 24, "hit_pool": 30, "hit_unknown": 15, "output": 600,
}  # fmt: skip
_TOOLS: Final = ("search_orders", "read_file", "get_weather", "run_tests", "fetch_invoice")


@dataclass(frozen=True)
class RunShape:
    """What distinguishes one sample run from another."""

    run_id: str = "run-7f3a90c2"
    steps: int = 9
    seed: int = 1
    start_ns: int = START_NS
    tenant: str = "default"
    agent: str | None = "support-agent"
    model: str = "smollm2-135m"
    first_prompt: int = 1840
    explicit: bool = False


def charge_of(usage: Usage, currency: str = "USD") -> Charge:
    """The charge of ``usage`` at :data:`RATES_NANO`."""
    counts = {
        "fresh": usage.fresh_tokens,
        "hit_device": usage.hit_device_tokens,
        "hit_host": usage.hit_host_tokens,
        "hit_disk": usage.hit_disk_tokens,
        "hit_pool": usage.hit_pool_tokens,
        "hit_unknown": usage.hit_unknown_tokens,
        "output": usage.output_tokens,
    }
    lines = tuple(ChargeLine(name, count, count * RATES_NANO[name]) for name, count in counts.items() if count)
    amount = sum(line.amount_nano for line in lines)
    cold = usage.prompt_tokens * RATES_NANO["fresh"] + usage.output_tokens * RATES_NANO["output"]
    return Charge(currency, "2026-11", lines, amount, cold - amount)


def agent_run(shape: RunShape | None = None) -> list[RequestRecord]:
    """A run's records in step order: a cold start, hits from every tier, a failover, a wait and parallel tools."""
    shape = shape or RunShape()
    random = Random(shape.seed)
    records: list[RequestRecord] = []
    prompt, at_ns = shape.first_prompt, shape.start_ns
    for step in range(1, shape.steps + 1):
        previous = records[-1] if records else None
        record = _step(shape, step, prompt, at_ns, previous, random)
        records.append(record)
        prompt += record.usage.output_tokens + random.randrange(40, 700)
        gap_ms = random.randrange(40, 900) if record.tool_calls else random.randrange(2_000, 4_000)
        at_ns = record.stamps.closed_ns + gap_ms * MS
    return records


def plain_record(request_id: str = "req-1", **changes: object) -> RequestRecord:
    """One small answered request without a run, with ``changes`` applied."""
    usage = Usage(fresh_tokens=100, output_tokens=10, source=UsageSource.ENGINE, hit_source=HitSource.REPORTED)
    record = RequestRecord(
        request_id=request_id,
        endpoint="chat",
        model="small",
        served_model="small",
        identity=Identity("default", "core", "key-1"),
        stream=True,
        stamps=Stamps(START_NS, START_NS + MS, START_NS + 2 * MS, START_NS + 50 * MS, START_NS + 90 * MS,
                      START_NS + 91 * MS),
        outcome=Outcome.OK,
        status=200,
        usage=usage,
        charge=charge_of(usage),
        attempts=(Attempt("engine-a", START_NS + 2 * MS, START_NS + 90 * MS, 200),),
        finish_reason="stop",
    )  # fmt: skip
    return replace(record, **changes)  # type: ignore[arg-type]


def _step(
    shape: RunShape, step: int, prompt: int, at_ns: int, previous: RequestRecord | None, random: Random
) -> RequestRecord:
    known = previous.usage.prompt_tokens + previous.usage.output_tokens if previous else 0
    hits = _hits(step, known // 16 * 16)
    last = step == shape.steps
    output = random.randrange(18, 90) * (3 if last else 1)
    usage = Usage(
        prompt - sum(hits), *hits, output_tokens=output, source=UsageSource.ENGINE, hit_source=HitSource.REPORTED
    )
    calls = () if last or step == 4 else tuple(
        ToolCall(f"call_{shape.seed:04x}{step:04x}{n:04x}", random.choice(_TOOLS)) for n in range(1 + (step % 4 == 2))
    )  # fmt: skip
    instance = "engine-b" if step in (6, 7) else "engine-a"
    fetch_ms = (hits[1] // 400, hits[2] // 160, hits[3] // 120)
    prefill_ms = 6 + usage.fresh_tokens // 4 + sum(fetch_ms)
    sent = at_ns + random.randrange(900, 2600) * 1000
    first = sent + prefill_ms * MS
    ended = first + output * 9 * MS
    attempts = [Attempt(instance, sent, ended, 200)]
    if step == 6:
        attempts.insert(0, Attempt("engine-a", sent - 900_000, sent - 100_000, None, "connect_refused"))
    seen = (
        Candidate("engine-a", hits if instance == "engine-a" else (0, 0, hits[2], 0), 480 * (step == 6), 34 * MS,
                  step != 6),
        Candidate("engine-b", (0, 0, 0, sum(hits)) if instance == "engine-a" else hits, 0, prefill_ms * MS),
    )  # fmt: skip
    return RequestRecord(
        request_id=f"{shape.run_id.removeprefix('run-')}-{step:03d}",
        endpoint="chat",
        model=shape.model,
        served_model="SmolLM2-135M-Instruct",
        identity=Identity(shape.tenant, "payments", "key-4f"),
        stream=True,
        stamps=Stamps(at_ns, sent - 950_000, sent, first, ended, ended + 400_000),
        outcome=Outcome.OK,
        status=200,
        usage=usage,
        charge=charge_of(usage),
        link=RunLink(
            shape.run_id, step, "header" if shape.explicit else "tool_call_id" if previous else "new",
            1.0 if shape.explicit or not previous else 0.99, previous.request_id if previous else None,
        ),
        decision=Decision("expected-ttft", instance, seen, sum(hits), True),
        attempts=tuple(attempts),
        gateway_prompt_tokens=prompt,
        tool_calls=calls,
        tool_results=tuple(call.id for call in previous.tool_calls) if previous else (),
        finish_reason="tool_calls" if calls else "stop",
        labels={"agent": shape.agent} if shape.agent else {},
    )  # fmt: skip


def _hits(step: int, known: int) -> tuple[int, int, int, int]:
    """Device on an ordinary step; host after eviction, disk after a restart, pool on another instance."""
    if step == 3:
        return (known // 2 // 16 * 16, known - known // 2 // 16 * 16, 0, 0)
    if step == 5:
        return (0, 0, known, 0)
    if step == 6:
        return (0, 0, 0, known)
    return (known, 0, 0, 0)


def put(store: TraceStore, *records: RequestRecord) -> None:
    """Append records, and wait until they are stored."""
    for record in records:
        store.append(record)
    assert store.flush(30)
