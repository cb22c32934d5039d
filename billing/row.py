"""One ledger row: a request record, flattened into the columns that are stored, reported and verified.

The row holds everything that its amount follows from (token classes, model, instant, price version), so that anyone can
compute it again, and nothing of what was said in the request.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache

import msgspec

from billing.rates import TOOLS
from tracing.record import (
    Attempt,
    Charge,
    ChargeBasis,
    ChargeLine,
    HitSource,
    Identity,
    Outcome,
    RequestRecord,
    RunLink,
    Stamps,
    Usage,
    UsageSource,
)

SqlValue = str | int | None


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One logical request. Its fields are the table's columns, in order; times are ns, money is nano-units."""

    request_id: str
    revision: int  # 0 for the request itself; corrections are further rows, from 1
    arrived_ns: int
    first_token_ns: int | None
    closed_ns: int
    posted_ns: int  # the accounting instant: arrival, or later where that period was closed already
    settles_unpriced: int  # 1: a correction that gives a price to a request that had none
    endpoint: str
    model: str
    served_model: str
    tenant: str
    team: str
    key_id: str
    instance: str | None
    run_id: str | None
    step: int | None
    agent: str | None
    outcome: str
    status: int
    stream: int
    finish_reason: str | None
    error: str | None
    fresh_tokens: int
    hit_device_tokens: int
    hit_host_tokens: int
    hit_disk_tokens: int
    hit_pool_tokens: int
    hit_unknown_tokens: int
    write_tokens: int
    write_5m_tokens: int
    write_1h_tokens: int
    output_tokens: int
    reasoning_tokens: int
    usage_source: str
    hit_source: str
    gateway_prompt_tokens: int | None
    currency: str
    price_version: str
    amount_nano: int | None  # None: unpriced
    saved_nano: int | None
    unpriced_reason: str | None
    price_model: str | None  # the basis of the charge, for computing it again
    price_at_ns: int | None
    price_team: str | None
    price_region: str | None
    price_service_tier: str | None
    price_rule: str | None
    lines: str  # JSON: [[token class, quantity, nano-units], …]
    attempts: str  # JSON: [{instance, started_ns, ended_ns, status, error}, …]
    usage_problems: str  # JSON: [text, …]
    labels: str  # JSON: {name: value}

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return self.usage().hit_tokens

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return self.usage().prompt_tokens

    def usage(self) -> Usage:
        """Return what was billed: the token classes, and the uses of tools, which stand in the lines."""
        return Usage(
            fresh_tokens=self.fresh_tokens,
            hit_device_tokens=self.hit_device_tokens,
            hit_host_tokens=self.hit_host_tokens,
            hit_disk_tokens=self.hit_disk_tokens,
            hit_pool_tokens=self.hit_pool_tokens,
            hit_unknown_tokens=self.hit_unknown_tokens,
            output_tokens=self.output_tokens,
            reasoning_tokens=self.reasoning_tokens,
            source=UsageSource(self.usage_source),
            write_tokens=self.write_tokens,
            write_5m_tokens=self.write_5m_tokens,
            write_1h_tokens=self.write_1h_tokens,
            hit_source=HitSource(self.hit_source),
            tool_uses=self._tool_uses(),
        )

    def _tool_uses(self) -> tuple[tuple[str, int], ...]:
        if not any(tool in self.lines for tool in TOOLS):
            return ()
        return tuple((line.token_class, line.quantity) for line in self.charge().lines if line.token_class in TOOLS)

    def charge(self) -> Charge:
        """Return the charge as it was stored."""
        basis = None
        if self.price_model is not None and self.price_at_ns is not None:
            basis = ChargeBasis(
                self.price_model,
                self.price_at_ns,
                self.price_team,
                self.price_region,
                self.price_service_tier,
                self.price_rule,
            )
        lines = msgspec.json.decode(self.lines, type=list[tuple[str, int, int]])
        return Charge(
            currency=self.currency,
            price_version=self.price_version,
            lines=tuple(ChargeLine(*line) for line in lines),
            amount_nano=self.amount_nano,
            saved_nano=self.saved_nano,
            unpriced_reason=self.unpriced_reason,
            basis=basis,
        )

    def attempt_list(self) -> list[Attempt]:
        """Return the attempts of the request, in order."""
        return msgspec.json.decode(self.attempts, type=list[Attempt])

    def label(self, name: str) -> str | None:
        """Return one label of the request."""
        return msgspec.json.decode(self.labels, type=dict[str, str]).get(name)


@cache
def columns() -> tuple[str, ...]:
    """Return the names of the stored columns, in order."""
    return tuple(field.name for field in fields(LedgerRow))


def _json(value: Iterable[object] | Mapping[str, str]) -> str:
    try:
        return msgspec.json.encode(value).decode()
    except UnicodeEncodeError:  # half a surrogate pair, out of a client's JSON
        return json.dumps(msgspec.to_builtins(value), ensure_ascii=False).encode("utf-8", "replace").decode()


UNKNOWN_MODEL = "(unknown model)"
"""What rows call a model that a request was refused for: names that nobody serves are as many as clients think of, and
a bill is summed by model. The record keeps the name."""


def row_values(record: RequestRecord) -> tuple[SqlValue, ...]:
    """Flatten a record into the values of ``columns()``. Cost: some 10 µs; the path of every request pays it."""
    usage, charge, stamps, link = record.usage, record.charge, record.stamps, record.link
    basis = charge.basis
    return (
        record.request_id,
        0,
        stamps.arrived_ns,
        stamps.first_token_ns,
        stamps.closed_ns,
        stamps.arrived_ns,
        0,
        record.endpoint,
        record.model if record.served_model or not record.model else UNKNOWN_MODEL,
        record.served_model,
        record.identity.tenant,
        record.identity.team,
        record.identity.key_id,
        record.instance,
        link.run_id if link else None,
        link.step if link else None,
        record.labels.get("agent"),
        record.outcome.value,
        record.status,
        int(record.stream),
        record.finish_reason,
        record.error,
        usage.fresh_tokens,
        usage.hit_device_tokens,
        usage.hit_host_tokens,
        usage.hit_disk_tokens,
        usage.hit_pool_tokens,
        usage.hit_unknown_tokens,
        usage.write_tokens,
        usage.write_5m_tokens,
        usage.write_1h_tokens,
        usage.output_tokens,
        usage.reasoning_tokens,
        usage.source.value,
        usage.hit_source.value,
        record.gateway_prompt_tokens,
        charge.currency,
        charge.price_version,
        charge.amount_nano,
        charge.saved_nano,
        charge.unpriced_reason,
        basis.model if basis else None,
        basis.at_ns if basis else None,
        basis.team if basis else None,
        basis.region if basis else None,
        basis.service_tier if basis else None,
        basis.rule if basis else None,
        _json([(line.token_class, line.quantity, line.amount_nano) for line in charge.lines]),
        _json(record.attempts),
        _json(record.usage_problems),
        _json(record.labels),
    )


def storable(values: tuple[SqlValue, ...]) -> tuple[SqlValue, ...]:
    """Replace what UTF-8 has no bytes for (half of a surrogate pair) in a row's texts."""
    return tuple(v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for v in values)


def row_of(record: RequestRecord) -> LedgerRow:
    """Return the row that the ledger stores for a record."""
    return LedgerRow(*row_values(record))  # type: ignore[arg-type]


def record_of(row: LedgerRow) -> RequestRecord:
    """Return what a row still tells of its request: all that was billed, and less of how it was served.

    What rows do not hold is absent: the routing decision, tool calls, the evidence of the run, some instants.
    """
    return RequestRecord(
        request_id=row.request_id,
        endpoint=row.endpoint,
        model=row.model,
        served_model=row.served_model,
        identity=Identity(tenant=row.tenant, team=row.team, key_id=row.key_id),
        stream=bool(row.stream),
        stamps=Stamps(row.arrived_ns, first_token_ns=row.first_token_ns, closed_ns=row.closed_ns),
        outcome=Outcome(row.outcome),
        status=row.status,
        usage=row.usage(),
        charge=row.charge(),
        link=None if row.run_id is None else RunLink(row.run_id, row.step or 1, "ledger", 1.0),
        attempts=tuple(row.attempt_list()),
        error=row.error,
        gateway_prompt_tokens=row.gateway_prompt_tokens,
        finish_reason=row.finish_reason,
        labels=msgspec.json.decode(row.labels, type=dict[str, str]),
        usage_problems=tuple(msgspec.json.decode(row.usage_problems, type=list[str])),
    )
