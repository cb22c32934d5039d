"""Closed, priced requests for tests of billing."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from msgspec.structs import replace

from billing.meter import charge
from billing.prices import PriceBook
from tracing.record import (
    Attempt,
    HitSource,
    Identity,
    Outcome,
    RequestRecord,
    RunLink,
    Stamps,
    Usage,
    UsageSource,
)

START_NS = 1_790_000_000 * 10**9
MODEL = "SmolLM2-135M-Instruct"


def billed(number: int, book: PriceBook, *, model: str = MODEL, usage: Usage | None = None) -> RequestRecord:
    """Return request ``number``: the same number gives the same record, always."""
    random = Random(number)
    if usage is None:
        usage = Usage(
            fresh_tokens=random.randrange(1, 400),
            hit_device_tokens=random.randrange(0, 4000, 16),
            hit_host_tokens=random.randrange(0, 800, 16),
            hit_disk_tokens=random.choice((0, 0, 64)),
            hit_pool_tokens=random.choice((0, 0, 0, 128)),
            output_tokens=random.randrange(1, 300),
            source=UsageSource.ENGINE,
            hit_source=HitSource.REPORTED,
        )
    arrived = START_NS + number * 1_000_000_000
    team = f"team-{number % 3}"
    return RequestRecord(
        request_id=f"req-{number}",
        endpoint="chat",
        model=model,
        served_model=model,
        identity=Identity("acme", team, f"key-{number % 5}"),
        stream=number % 2 == 0,
        stamps=Stamps(arrived, arrived + 10, arrived + 20, arrived + 30, arrived + 40, arrived + 50),
        outcome=Outcome.OK,
        status=200,
        usage=usage,
        charge=charge(usage, book, model, arrived, team=team),
        link=RunLink(f"run-{number // 10}", number % 10 + 1, "tool_call_id", 1.0),
        attempts=(Attempt(f"engine-{number % 2}", arrived + 20, arrived + 50, 200),),
        labels={"agent": f"agent-{number % 4}", "step_name": "plan"},
    )


def unpriced(number: int, book: PriceBook) -> RequestRecord:
    """Return a request to a model without a price."""
    return billed(number, book, model="nobody-priced-this")


def died_in_flight(number: int, book: PriceBook) -> RequestRecord:
    """Return what stands for request ``number`` when its process dies before it ends."""
    record = billed(number, book)
    usage = Usage(source=UsageSource.MISSING)
    at_ns = record.stamps.arrived_ns
    return replace(
        record,
        outcome=Outcome.DIED,
        status=0,
        stamps=Stamps(at_ns, closed_ns=at_ns),
        attempts=(),
        usage=usage,
        charge=charge(usage, book, record.served_model, at_ns, team=record.identity.team),
    )


def many(count: int, make: Callable[[int, PriceBook], RequestRecord] = billed) -> list[RequestRecord]:
    """Return requests 0 to ``count - 1``, priced by the packaged book."""
    book = PriceBook.default()
    return [make(number, book) for number in range(count)]


def altered(record: RequestRecord, **changes: object) -> RequestRecord:
    """Return the record with some fields changed."""
    return replace(record, **changes)  # type: ignore[arg-type]
