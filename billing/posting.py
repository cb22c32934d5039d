"""Rows that stand for no request: credits, and cache storage by the hour. Pure.

Their ids say what they are for, and their revisions begin at 1, so that no count of requests has them. What they come
to later is a difference under the same id with the next revision, as with a request's corrections.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from billing.row import LedgerRow
from tracing.record import ChargeLine, HitSource, Outcome, UsageSource

#: What such rows say in place of an endpoint.
CREDIT, STORAGE = "credit", "storage"
POSTED_ENDPOINTS = (CREDIT, STORAGE)


@dataclass(frozen=True, slots=True)
class Place:
    """Who a row is for: every dimension of a report, but for step, request and outcome."""

    tenant: str
    team: str
    key_id: str
    model: str
    served_model: str
    instance: str | None
    run_id: str | None
    agent: str | None
    currency: str
    price_version: str


def place_of(row: LedgerRow) -> Place:
    """Return who a row is for."""
    return Place(
        row.tenant,
        row.team,
        row.key_id,
        row.model,
        row.served_model,
        row.instance,
        row.run_id,
        row.agent,
        row.currency,
        row.price_version,
    )


def is_request(row: LedgerRow) -> bool:
    """Tell whether a row is a request's, or corrects one."""
    return row.endpoint not in POSTED_ENDPOINTS


def is_correction(row: LedgerRow) -> bool:
    """Tell whether a row changes what stood before it."""
    return row.revision > (0 if is_request(row) else 1)


def posting(
    endpoint: str,
    request_id: str,
    revision: int,
    place: Place,
    line: ChargeLine,
    *,
    rule: str,
    span_ns: tuple[int, int],
    posted_ns: int,
    saved_nano: int = 0,
    region: str | None = None,
) -> LedgerRow:
    """Return a row of one line that stands for no request; ``span_ns``: what it charges for, as a request's times."""
    start_ns, end_ns = span_ns
    return LedgerRow(
        request_id=request_id,
        revision=revision,
        arrived_ns=start_ns,
        first_token_ns=None,
        closed_ns=end_ns,
        posted_ns=posted_ns,
        settles_unpriced=0,
        endpoint=endpoint,
        model=place.model,
        served_model=place.served_model,
        tenant=place.tenant,
        team=place.team,
        key_id=place.key_id,
        instance=place.instance,
        run_id=place.run_id,
        step=None,
        agent=place.agent,
        outcome=Outcome.OK.value,
        status=0,
        stream=0,
        finish_reason=None,
        error=None,
        fresh_tokens=0,
        hit_device_tokens=0,
        hit_host_tokens=0,
        hit_disk_tokens=0,
        hit_pool_tokens=0,
        hit_unknown_tokens=0,
        write_tokens=0,
        write_5m_tokens=0,
        write_1h_tokens=0,
        output_tokens=0,
        reasoning_tokens=0,
        usage_source=UsageSource.NONE.value,
        hit_source=HitSource.UNKNOWN.value,
        gateway_prompt_tokens=None,
        currency=place.currency,
        price_version=place.price_version,
        amount_nano=line.amount_nano,
        saved_nano=saved_nano,
        unpriced_reason=None,
        price_model=place.served_model,
        price_at_ns=start_ns,
        price_team=place.team,
        price_region=region,
        price_service_tier=None,
        price_rule=rule,
        lines=msgspec.json.encode([(line.token_class, line.quantity, line.amount_nano)]).decode(),
        attempts="[]",
        usage_problems="[]",
        labels="{}",
    )
