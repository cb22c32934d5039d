"""The overview as plain values: a time's sums, its course as a chart, what is in flight, the fleet, the newest runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.console.fleet_map import FleetRow, fleet_rows
from gateway.console.formats import NOTHING, count, duration, moment, share
from gateway.console.scale import Segment, token_bar
from gateway.console.sources import Sources
from gateway.console.views import LegendEntry, MoneyView, RunRow, legend, money_views, run_row
from gateway.flights import Underway
from tracing.store import RunFilter
from tracing.store_series import Bucket

WINDOWS: Final = {
    "15m": (15 * 60 * 10**9, "Last 15 minutes"),
    "1h": (3600 * 10**9, "Last hour"),
    "24h": (24 * 3600 * 10**9, "Last 24 hours"),
    "7d": (7 * 24 * 3600 * 10**9, "Last 7 days"),
}
DEFAULT_WINDOW: Final = "1h"
BUCKETS: Final = 60
MAX_UNDERWAY: Final = 12
_RECENT_RUNS: Final = 6


@dataclass(frozen=True, slots=True)
class BucketView:
    """One stretch of the time: how many requests (a bar, in percent of the busiest) and how warm they were."""

    x: str
    width: str
    y: str
    height: str
    failed_y: str
    failed_height: str
    title: str


@dataclass(frozen=True, slots=True)
class FlightView:
    """One request that is not over."""

    name: str
    step: str
    run_id: str | None
    tenant: str
    model: str
    instance: str
    state: str
    waited: str
    bar: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Overview:
    """Everything on the page."""

    window: str
    requests: str
    runs: str
    prompt: str
    hits: str
    hit_share: str
    failed: str
    money: tuple[MoneyView, ...]
    bar: tuple[Segment, ...]
    legend: tuple[LegendEntry, ...]
    ttft: tuple[tuple[str, str], ...]
    buckets: tuple[BucketView, ...]
    line: str  # points of the hit rate
    since: str
    until: str
    in_flight: str
    flights: tuple[FlightView, ...]
    more_flights: int
    fleet: tuple[FleetRow, ...] | None
    recent: tuple[RunRow, ...]


def overview(sources: Sources, tenant: str | None, window: str) -> Overview:
    """Read it. Blocks; cost: the records of the window."""
    now_ns = sources.clock()
    length_ns = WINDOWS[window][0]
    since_ns, traces = now_ns - length_ns, sources.traces
    totals = traces.totals(tenant, since_ns)
    buckets = traces.buckets(tenant, since_ns, now_ns + 1, length_ns // BUCKETS)
    ttfts = traces.ttfts(tenant, since_ns, now_ns + 1)
    hits = sum(totals.hit_tokens)
    counts = (*totals.hit_tokens, totals.prompt_tokens - hits, 0, totals.output_tokens)
    failed = sum(bucket.failed for bucket in buckets)
    flights = [each for each in sources.underway() if tenant in (None, each.identity.tenant)]
    return Overview(
        window=window,
        requests=count(totals.requests),
        runs=count(totals.runs),
        prompt=count(totals.prompt_tokens),
        hits=count(hits),
        hit_share=share(hits, totals.prompt_tokens),
        failed=share(failed, totals.requests) if failed else "none",
        money=money_views(totals.money),
        bar=token_bar(counts, sum(counts)),
        legend=legend(counts),
        ttft=tuple((f"p{percentile}", duration(_percentile(ttfts, percentile))) for percentile in (50, 90, 99)),
        buckets=_bucket_views(buckets, since_ns, length_ns),
        line=_line(buckets, since_ns, length_ns),
        since=moment(since_ns)[5:16],
        until=moment(now_ns)[5:16] + " UTC",
        in_flight=count(len(flights)),
        flights=tuple(flight_view(each, now_ns) for each in flights[:MAX_UNDERWAY]),
        more_flights=max(len(flights) - MAX_UNDERWAY, 0),
        fleet=None if tenant is not None else tuple(fleet(sources)),
        recent=tuple(run_row(each, now_ns) for each in traces.runs(_RECENT_RUNS, RunFilter(tenant=tenant))),
    )


def overview_data(sources: Sources, tenant: str | None, window: str) -> list[dict[str, object]]:
    """The course of the time for machines. Blocks."""
    now_ns = sources.clock()
    length_ns = WINDOWS[window][0]
    found = sources.traces.buckets(tenant, now_ns - length_ns, now_ns + 1, length_ns // BUCKETS)
    return [
        {
            "start_ns": bucket.start_ns,
            "requests": bucket.requests,
            "failed": bucket.failed,
            "prompt_tokens": bucket.prompt_tokens,
            "hit_tokens": bucket.hit_tokens,
            "output_tokens": bucket.output_tokens,
        }
        for bucket in found
    ]


def fleet(sources: Sources) -> list[FleetRow]:
    """The fleet as it is now."""
    index = sources.index
    held = {} if index is None else index.held()
    return fleet_rows(list(sources.instances()), held, {} if index is None else index.instances())


def flight_view(request: Underway, now_ns: int) -> FlightView:
    """One request under way; what it is expected to hit is shown to the scale of its prompt."""
    link, decision = request.link, request.decision
    if request.first_token_ns is not None:
        state = "streaming" if request.last_token_ns != request.first_token_ns else "first token"
    elif request.sent_ns is not None:
        state = "prefill"
    else:
        state = "sent" if request.routed_ns is not None else "queued"
    bar: tuple[Segment, ...] = ()
    if decision is not None and request.prompt_tokens:
        chosen = next((each for each in decision.candidates if each.instance == decision.instance), None)
        hits = (0, 0, 0, 0) if chosen is None else chosen.hit_tokens
        bar = token_bar((*hits, 0, max(request.prompt_tokens - sum(hits), 0)), request.prompt_tokens)
    return FlightView(
        name=request.labels.get("step_name") or request.labels.get("agent") or (link.run_id if link else "request"),
        step="" if link is None else str(link.step),
        run_id=None if link is None else link.run_id,
        tenant=request.identity.tenant,
        model=request.model or NOTHING,
        instance=request.attempt_instance or (decision.instance if decision else NOTHING),
        state=state,
        waited=duration(max(now_ns - request.arrived_ns, 0)),
        bar=bar,
    )


def _percentile(ascending: Sequence[int], percentile: int) -> int | None:
    """The smallest value that so many percent do not exceed (nearest rank)."""
    return ascending[max(-(-len(ascending) * percentile // 100) - 1, 0)] if ascending else None


def _bucket_views(buckets: Sequence[Bucket], since_ns: int, length_ns: int) -> tuple[BucketView, ...]:
    busiest = max((bucket.requests for bucket in buckets), default=0) or 1
    each_ns = length_ns // BUCKETS
    found = []
    for bucket in buckets:
        height = 100 * bucket.requests / busiest
        failed = 100 * bucket.failed / busiest
        warm = share(bucket.hit_tokens, bucket.prompt_tokens)
        words = f", {count(bucket.failed)} failed" if bucket.failed else ""
        found.append(
            BucketView(
                x=f"{100 * (bucket.start_ns - since_ns) / length_ns:.2f}%",
                width=f"{86 * each_ns / length_ns:.2f}%",
                y=f"{100 - height:.1f}%",
                height=f"{height:.1f}%",
                failed_y=f"{100 - failed:.1f}%",
                failed_height=f"{failed:.1f}%",
                title=f"{moment(bucket.start_ns)} UTC: {count(bucket.requests)} requests, {warm} warm{words}",
            )
        )
    return tuple(found)


def _line(buckets: Sequence[Bucket], since_ns: int, length_ns: int) -> str:
    """The hit rate as points of a box of 100 by 100; buckets without a prompt are passed over."""
    half_ns = length_ns // BUCKETS // 2
    return " ".join(
        f"{100 * (bucket.start_ns + half_ns - since_ns) / length_ns:.2f},"
        f"{100 - 100 * bucket.hit_tokens / bucket.prompt_tokens:.2f}"
        for bucket in buckets
        if bucket.prompt_tokens
    )
