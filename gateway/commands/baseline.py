"""The baseline of savings, as commands ask for it: records from the trace store, replayed and priced."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace

from billing.attribution import UNITS
from billing.database import Place
from billing.ledger_read import LedgerReader
from billing.prices import PriceBook
from billing.reports import format_money
from billing.tables import aligned, counted, printable
from gateway.commands.moments import utc_text
from gateway.replay.errors import ParameterError
from gateway.replay.performance import PRESETS
from gateway.replay.recorded import ROUND_ROBIN, Baseline, BaselineFleet, BaselineSums, round_robin
from tracing.record import RequestRecord
from tracing.store import TraceStore
from tracing.store_database import Place as TracePlace


def add_baseline_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the fleet of the baseline."""
    parser.add_argument(
        "--baseline", choices=["none", ROUND_ROBIN], default="none",
        help="also replay the requests on the same engines with only their own caches, and price that",
    )  # fmt: skip
    parser.add_argument("--baseline-instances", type=int, metavar="N", help="default: as many as the records name")
    parser.add_argument("--baseline-model", default="llama8b-h100", choices=sorted(PRESETS), help="how fast they are")
    parser.add_argument(
        "--baseline-device-tokens", type=int, metavar="N", help="what each keeps (default: the model's)"
    )


def load(
    place: Place, traces: TracePlace, since_ns: int | None, until_ns: int | None
) -> tuple[list[RequestRecord], dict[str, PriceBook]]:
    """Return the records of a time, in order of arrival, and all price versions of the ledger.

    Raises ``BillingError``, ``TraceStoreError``.
    """
    with LedgerReader(place) as reader:
        books = reader.price_books()
    store = TraceStore(traces, read_only=True)
    try:
        return list(store.arrived(since_ns, until_ns)), books
    finally:
        store.close()


def replay(args: argparse.Namespace, records: Iterable[RequestRecord], books: Mapping[str, PriceBook]) -> Baseline:
    """Run the baseline that the arguments name. Raises ``ReplayError``."""
    performance = PRESETS[args.baseline_model]
    if args.baseline_device_tokens is not None:
        performance = replace(performance, device_tokens=args.baseline_device_tokens)
    fleet = BaselineFleet(performance, args.baseline_instances, args.baseline)
    return round_robin(records, books, fleet, _unit(args.by))


def _unit(by: str) -> Callable[[RequestRecord], str]:
    """Return what a report groups by, as records have it; nothing is the whole."""
    if not by:
        return lambda _: "all"
    if by not in UNITS:
        raise ParameterError(f"a baseline is told by {', '.join(UNITS)}, not by {by!r}")
    return UNITS[by]


def baseline_json(found: Baseline) -> dict[str, object]:
    """Return a baseline as values that JSON holds."""

    def sums_of(sums: BaselineSums) -> dict[str, object]:
        return {
            **asdict(sums),
            "saved_nano": sums.saved_nano,
            "saved_beyond_baseline_nano": sums.saved_beyond_baseline_nano,
        }

    return {
        "policy": found.policy,
        "stride_tokens": found.stride_tokens,
        "instances": found.instances,
        "left_out": dict(found.left_out),
        "tier_cost_nano": found.tier_cost_nano,
        "units": [{"unit": u, "currency": c, **sums_of(s)} for (u, c), s in sorted(found.sums.items())],
        "totals": [{"currency": c, **sums_of(s)} for c, s in sorted(found.totals().items())],
    }


def render_baseline(found: Baseline, unit: str) -> str:
    """Return a baseline as a table, and what is left of the savings when the tiers are paid."""
    head = [unit, "requests", "prompt", "hit", "hit then", "no cache", found.policy, "cost", "saved", "beyond", "GPU s"]
    head.append("currency")
    lines = [
        [printable(name), *_cells(sums), currency]
        for (name, currency), sums in sorted(found.sums.items(), key=lambda each: -each[1].cost_nano)
    ]
    lines += [["total", *_cells(sums), currency] for currency, sums in sorted(found.totals().items())]
    text = [
        f"Against {found.policy} on {counted(found.instances, 'instance')} with caches of their own only "
        f"({utc_text(found.first_ns)} to {utc_text(found.last_ns)}, prompts known to {found.stride_tokens} tokens)",
        aligned([head, *lines], 1).rstrip(),
    ]
    for currency, cost in sorted(found.tier_cost_nano.items()):
        if (sums := found.totals().get(currency)) is not None:
            beyond = sums.saved_beyond_baseline_nano
            text.append(
                f"net of {format_money(cost)} {currency} that the tiers cost in this time: "
                f"{format_money(sums.saved_nano - cost)} against no cache, {format_money(beyond - cost)} beyond it"
            )
    text += [f"left out: {counted(count, 'request')}, {reason}" for reason, count in sorted(found.left_out.items())]
    return "\n".join(text) + "\n"


def _cells(sums: BaselineSums) -> list[str]:
    counts = (sums.requests, sums.prompt_tokens, sums.hit_tokens, sums.baseline_hit_tokens)
    money = (
        sums.no_cache_nano,
        sums.baseline_nano,
        sums.cost_nano,
        sums.saved_nano,
        sums.saved_beyond_baseline_nano,
    )
    gpu_s = f"{sums.baseline_saved_gpu_ns / 1e9:.3f}"
    return [*(f"{count:,}" for count in counts), *map(format_money, money), gpu_s]
