"""The time to a request's first token, split: queue, send, fetch, prefill.

The gateway's own stages are measured. What the engine did until its first token is one measured time; how it divides
into its queue, its fetches from slower tiers and computing is estimated from what the router expected of the instance,
in proportion, and marked as an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from tracing.record import Candidate, RequestRecord


@dataclass(frozen=True, slots=True)
class Part:
    """One part of the time, from one moment to another."""

    kind: str
    name: str
    start_ns: int
    end_ns: int
    is_estimate: bool = False


def first_token_parts(record: RequestRecord) -> tuple[Part, ...]:
    """The parts in order, empty ones left out; none where no token came."""
    stamps = record.stamps
    if stamps.first_token_ns is None:
        return ()
    parts: list[Part] = []
    start_ns = stamps.arrived_ns
    for kind, name, end_ns in (("route", "Queue and route", stamps.routed_ns), ("send", "Send", stamps.sent_ns)):
        if end_ns is not None and end_ns > start_ns:
            parts.append(Part(kind, name, start_ns, end_ns))
            start_ns = end_ns
    engine_ns = stamps.first_token_ns - start_ns
    if engine_ns > 0:
        parts += _engine_parts(record, start_ns, engine_ns)
    return tuple(parts)


def _engine_parts(record: RequestRecord, start_ns: int, engine_ns: int) -> list[Part]:
    shares = _shares(record)
    if shares is None:
        return [Part("prefill", "Engine: queue, fetch and prefill", start_ns, start_ns + engine_ns)]
    total = sum(share for _, _, share in shares)
    named = [each for each in shares if each[2] > 0]
    parts: list[Part] = []
    passed = 0.0
    at_ns = start_ns
    for kind, name, share in named:
        passed += share
        end_ns = start_ns + round(engine_ns * passed / total)
        parts.append(Part(kind, name, at_ns, end_ns, is_estimate=len(named) > 1))
        at_ns = end_ns
    return parts


def _shares(record: RequestRecord) -> list[tuple[str, str, float]] | None:
    """Expected seconds (of any unit) of queue, fetch and prefill at the chosen instance; ``None`` where unknown."""
    decision, usage = record.decision, record.usage
    chosen = None
    if decision is not None:
        chosen = next((each for each in decision.candidates if each.instance == decision.instance), None)
    if decision is None or chosen is None:
        return None
    computed = max(usage.prompt_tokens - sum(chosen.hit_tokens), 1)
    rate = _tokens_per_ns((chosen, *decision.candidates), usage.prompt_tokens)
    if rate is None:
        return None
    fetch_ns = 0.0
    if any(chosen.hit_tokens[1:]):
        fetch_ns = max(chosen.expected_ttft_ns - (chosen.queued_tokens + computed) / rate, 0.0)
    return [
        ("queue", "Engine's queue", chosen.queued_tokens / rate),
        ("fetch", "Fetch from slower tiers", fetch_ns),
        ("prefill", "Prefill, to the first token", computed / rate),
    ]


def _tokens_per_ns(candidates: tuple[Candidate, ...], prompt_tokens: int) -> float | None:
    """What the router took for the prefill rate, from a candidate that needs no fetch."""
    for each in candidates:
        if each.healthy and not any(each.hit_tokens[1:]) and each.expected_ttft_ns > 0:
            tokens = each.queued_tokens + max(prompt_tokens - sum(each.hit_tokens), 0)
            if tokens > 0:
                return tokens / each.expected_ttft_ns
    return None
