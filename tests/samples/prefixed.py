"""Priced requests whose prompts have marks: ``prefixed("abc", …)`` has three, and shares two with ``"abx"``."""

from __future__ import annotations

import xxhash

from billing.meter import charge
from billing.prices import PriceBook
from tests.samples.billed import START_NS
from tracing.record import (
    Attempt,
    Candidate,
    Decision,
    HitSource,
    Identity,
    Outcome,
    PrefixMarks,
    RequestRecord,
    RunLink,
    Stamps,
    Usage,
    UsageSource,
)

STRIDE = 128
SECOND = 10**9


def marks_of(parts: str) -> tuple[int, ...]:
    """Return one chained mark for each letter."""
    found, value = [], 7
    for part in parts:
        value = xxhash.xxh3_64_intdigest(part.encode(), value)
        found.append(value)
    return tuple(found)


def prefixed(
    number: int,
    parts: str,
    book: PriceBook,
    *,
    hits: int = 0,
    rest: int = 10,
    output: int = 20,
    at_s: int | None = None,
    team: str = "a",
    instance: str = "engine-0",
    seen: dict[str, int] | None = None,
    exact: bool = True,
    run: str | None = None,
    previous: int | None = None,
    outcome: Outcome = Outcome.OK,
    hit_source: HitSource = HitSource.REPORTED,
    digest: str | None = None,
    model: str = "m",
) -> RequestRecord:
    """Return a request with one mark a letter and ``rest`` tokens after the last; ``seen``: hits by instance."""
    prompt = len(parts) * STRIDE + rest
    usage = Usage(
        fresh_tokens=prompt - hits,
        hit_device_tokens=hits,
        output_tokens=output,
        source=UsageSource.ENGINE,
        hit_source=hit_source,
    )
    arrived = START_NS + (number if at_s is None else at_s) * SECOND
    decision = None
    if seen is not None:
        candidates = tuple(Candidate(name, (tokens, 0, 0, 0), 0, 0) for name, tokens in seen.items())
        decision = Decision("expected-ttft", instance, candidates, seen.get(instance, 0), exact)
    hashes = b"".join(mark.to_bytes(8, "little") for mark in marks_of(parts))
    return RequestRecord(
        request_id=f"req-{number}",
        endpoint="chat",
        model=model,
        served_model=model,
        identity=Identity("acme", team, f"key-{team}"),
        stream=True,
        stamps=Stamps(arrived, first_token_ns=arrived + SECOND // 4, closed_ns=arrived + SECOND // 2),
        outcome=outcome,
        status=200,
        usage=usage,
        charge=charge(usage, book, model, arrived, team=team),
        link=None if run is None else RunLink(run, 1, "x", 1.0, None if previous is None else f"req-{previous}"),
        decision=decision,
        attempts=(Attempt(instance, arrived, arrived + SECOND // 2, 200),),
        labels={"agent": f"agent-{team}"},
        prefix=PrefixMarks(STRIDE, hashes, digest=digest),
    )
