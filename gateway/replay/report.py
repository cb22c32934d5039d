"""A replay's summaries as a table for the terminal and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from gateway.replay.measures import Summary
from gateway.replay.pricing import Cost
from gateway.replay.simulation import FleetOptions, LoadOptions
from gateway.replay.workload import Workload

_NANO = 10**9


def render_head(workload: Workload, fleet: FleetOptions, load: LoadOptions) -> str:
    """Return what was replayed against what, in a few lines."""
    performance, header = fleet.performance, workload.header
    tiers = {
        "device": performance.device_tokens,
        "host": performance.host_tokens,
        "disk": performance.disk_tokens,
        "shared pool": fleet.pool_tokens,
    }
    sizes = ", ".join(f"{name} {tokens:,}" for name, tokens in tiers.items() if tokens)
    horizon = "" if load.horizon_s is None else f" for {load.horizon_s:g} s"
    play = f"{load.users} users{horizon}" if header.closed else f"recorded arrivals at {load.speed:.3g} x speed"
    return (
        f"{header.name} ({header.format}, {header.block_tokens}-token blocks): {len(workload.requests):,} requests, "
        f"{workload.prompt_tokens:,} prompt tokens, {workload.distinct_tokens:,} in distinct blocks\n"
        f"{fleet.instances} x {performance.name}, KV tokens: {sizes}\n"
        f"{play}, seed {load.seed}; every figure is simulated but those marked as measured\n"
    )


def render_table(summaries: Sequence[Summary]) -> str:
    """Return the summaries as text tables, one line a policy."""
    good = summaries[0].objectives
    parts = [
        _table(
            ("policy", "requests", "hit %", "bound %", "of bound %", "imbalance %", "busy %"),
            [
                (s.policy, f"{s.requests:,}", _percent(s.hit_share), _percent(s.bound_hit_share), _percent(s.of_bound),
                 f"{100 * s.imbalance:.0f}", f"{100 * s.busy_share:.0f}")
                for s in summaries
            ],
        ),
        _table(
            ("policy", "TTFT p50", "p90", "p99", "mean s", "TPOT p50", "p90", "p99 ms", "good %", "goodput/s"),
            [
                (s.policy, *(f"{v:.3f}" for v in (s.ttft_s.p50, s.ttft_s.p90, s.ttft_s.p99, s.ttft_s.mean)),
                 *(f"{1000 * v:.1f}" for v in (s.tpot_s.p50, s.tpot_s.p90, s.tpot_s.p99)),
                 _percent(s.good_share), f"{s.goodput_per_s:.3f}")
                for s in summaries
            ],
        )
        + f"good: TTFT within {good.ttft_s:g} s and TPOT within {1000 * good.tpot_s:g} ms\n",
        _tiers(summaries),
        _table(
            ("policy", "prefill : decode", "P instances", "D instances", "D batch", "KV moved GB/s"),
            [_separation(s) for s in summaries],
        )
        + "for a separated fleet, estimated from this run's work at full use\n",
        _table(
            ("policy", "index blocks", "index MB", "hit error tokens", "exact %", "decision us p50", "p99"),
            [
                (s.policy, f"{s.index_blocks:,}", f"{s.index_bytes / 1e6:.1f}",
                 f"{s.prediction.mean_error_tokens:+.1f}", _percent(s.prediction.exact_share),
                 f"{s.measured.decision_us.p50:.0f}", f"{s.measured.decision_us.p99:.0f}")
                for s in summaries
            ],
        )
        + "hit error: what the router counted on less what came; decision times are measured on this machine\n",
    ]  # fmt: skip
    costs = [(s.policy, s.cost) for s in summaries if s.cost is not None]
    if costs:
        parts.append(_costs(costs))
    refused = summaries[0].refused_requests
    if refused:
        parts.append(f"{refused} requests are larger than an instance's device memory and were refused\n")
    return "\n".join(parts)


def render_json(workload: Workload, fleet: FleetOptions, load: LoadOptions, summaries: Iterable[Summary]) -> str:
    """Return everything as JSON. Deterministic but for each policy's ``measured``."""
    return json.dumps(
        {
            "trace": {
                **asdict(workload.header),
                "requests": len(workload.requests),
                "prompt_tokens": workload.prompt_tokens,
                "distinct_tokens": workload.distinct_tokens,
            },
            "fleet": asdict(fleet),
            "load": asdict(load),
            "policies": [
                {
                    **asdict(summary),
                    "of_bound": summary.of_bound,
                    "prefill_per_decode": summary.separation.prefill_per_decode,
                }
                for summary in summaries
            ],
        },
        indent=1,
    )


def _tiers(summaries: Sequence[Summary]) -> str:
    names = list(summaries[0].tiers)
    rows = [
        (s.policy, name, _percent(s.tier_hit_shares[name]), f"{b.hit_tokens / 1e6:.1f}", f"{b.fetch_s:.1f}",
         f"{b.recompute_s:.1f}", f"{b.declined_tokens / 1e6:.1f}")
        for s in summaries
        for name, b in s.tiers.items()
    ]  # fmt: skip
    shares = _table(
        ("policy", "device hit %", *(f"{name} hit %" for name in names)),
        [
            (s.policy, _percent(s.tier_hit_shares["device"]), *(_percent(s.tier_hit_shares[name]) for name in names))
            for s in summaries
        ],
    )
    if not names:
        return shares
    heads = ("policy", "tier", "hit %", "fetched Mtok", "fetch s", "recompute s", "declined Mtok")
    return (
        shares
        + "\n"
        + _table(heads, rows)
        + "recompute: what computing the fetched tokens had cost; declined: held there, but faster to recompute\n"
    )


def _separation(summary: Summary) -> tuple[str, ...]:
    plan = summary.separation
    ratio, decode = plan.prefill_per_decode, plan.decode_instances
    return (
        summary.policy,
        "-" if ratio is None else f"{ratio:.2f} : 1",
        f"{plan.prefill_instances:.2f}",
        "none meets TPOT" if decode is None else f"{decode:.2f}",
        str(plan.decode_batch),
        f"{plan.transfer_bytes_per_s / 1e9:.2f}",
    )


def _costs(costs: Sequence[tuple[str, Cost]]) -> str:
    rows = []
    for policy, cost in costs:
        missing = ", ".join(f"{count} {reason}" for reason, count in sorted(cost.unpriced.items()))
        rows.append((policy, _money(cost.amount_nano), _money(cost.saved_nano), missing or "-"))
    first = costs[0][1]
    heads = ("policy", f"cost {first.currency}", "saved by hits", "unpriced requests")
    return _table(heads, rows) + f"price book version {first.price_version}\n"


def _money(nano: int) -> str:
    sign, nano = ("-", -nano) if nano < 0 else ("", nano)
    return f"{sign}{nano // _NANO:,}.{nano % _NANO:09d}"[:-5]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an aligned table; the first column is text, the others are numbers."""
    widths = [max(len(line[column]) for line in (heads, *rows)) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in (heads, *rows)
    ]
    return "\n".join(lines) + "\n"
