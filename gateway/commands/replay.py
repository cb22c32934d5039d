"""``keepwarm replay TRACE``: what a fleet would do with recorded traffic; a capacity planner."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import fields, replace
from os.path import realpath
from pathlib import Path

from billing.errors import BillingError
from billing.prices import PriceBook
from gateway.commands.arguments import YEAR_S, real_number, seconds, told, whole_number
from gateway.commands.report import parse_moment
from gateway.replay.errors import ParameterError, ReplayError
from gateway.replay.measures import Objectives, Summary, counted, summarize
from gateway.replay.performance import PRESETS, EnginePerformance
from gateway.replay.picture import render_picture
from gateway.replay.placement import arrivals, place, render_placement, render_placements_json
from gateway.replay.pricing import Pricing, price
from gateway.replay.report import render_head, render_json, render_table
from gateway.replay.router import Learning, RouterOptions
from gateway.replay.simulation import FleetOptions, LoadOptions, Simulation, load_for_share
from gateway.replay.workload import Workload, load_workload
from gateway.routing import POLICIES
from kvstore.policies.named import POLICIES as EVICTION_POLICIES
from radix_index.blocks import MIN_BYTE_BUDGET

DEFAULT_LOAD = 0.6
DEFAULT_HORIZON_S = 3600.0
_RAMP_SHARE, _RAMP_LIMIT_S = 0.1, 600.0
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kKMGT]?)(i?)B?")
_POWERS = {"": 0, "k": 1, "K": 1, "M": 2, "G": 3, "T": 4}
_MOST_INSTANCES = 4096
_MAY_BE_NOTHING = {"request_overhead_s", "step_overhead_s", "sequence_overhead_s", "host_tokens", "disk_tokens"}
_SETTABLE = {field.name for field in fields(EnginePerformance)} - {"name"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="rst1, Mooncake or keepwarm-requests-1; maybe gzipped"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON; - is the terminal")
    parser.add_argument("--picture", type=Path, metavar="FILE.svg", help="draw it, as SVG")
    fleet = parser.add_argument_group("fleet (sizes: 1.5TB, 300GB, 512MiB; tokens: 1.3M)")
    fleet.add_argument(
        "--instances", type=whole_number(1, _MOST_INSTANCES), default=4, metavar="N", help="default: %(default)s"
    )
    fleet.add_argument("--model", default="llama8b-h100", choices=sorted(PRESETS), help="default: %(default)s")
    fleet.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", dest="settings",
        help=f"change a parameter of the model: {', '.join(sorted(_SETTABLE))}",
    )  # fmt: skip
    fleet.add_argument("--device-tokens", type=parse_size, metavar="SIZE", help="KV tokens on an instance's device")
    for tier, owner in (("host", "an instance"), ("disk", "an instance"), ("pool", "all together")):
        either = fleet.add_mutually_exclusive_group()
        either.add_argument(f"--{tier}-bytes", type=parse_size, metavar="SIZE", help=f"{tier} tier of {owner}")
        either.add_argument(f"--{tier}-tokens", type=parse_size, metavar="SIZE", help="… in tokens")
    routing = parser.add_argument_group("routing")
    routing.add_argument(
        "--policy", default="expected-ttft", metavar="NAME[,…]", help=f"of {', '.join(POLICIES)}, or all; (%(default)s)"
    )
    routing.add_argument(
        "--learning", type=Learning, default=Learning.EVENTS, choices=list(Learning), metavar="HOW",
        help="events, or predicted (engines that publish none); default: events",
    )  # fmt: skip
    routing.add_argument(
        "--event-delay", type=real_number(0, YEAR_S), default=0.05, metavar="S", help="default: %(default)s"
    )
    routing.add_argument("--index-bytes", type=parse_size, default=256 << 20, metavar="SIZE", help="default: 256MiB")
    load = parser.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument("--users", type=whole_number(1), metavar="N", help="closed traces: sessions at a time")
    how.add_argument(
        "--speed", type=real_number(0, 1e9, above=True), metavar="X", help="open traces: faster than recorded"
    )
    how.add_argument(
        "--load",
        type=real_number(0, 1e3, above=True),
        metavar="SHARE",
        help=f"of an ideal fleet's capacity ({DEFAULT_LOAD})",
    )
    load.add_argument(
        "--horizon",
        type=real_number(0, 100 * YEAR_S),
        metavar="S",
        help=f"closed traces: ask no longer ({DEFAULT_HORIZON_S:g})",
    )
    load.add_argument(
        "--think-limit", type=real_number(0, 100 * YEAR_S), default=600.0, metavar="S", help="default: %(default)s"
    )
    load.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    store = parser.add_argument_group("page store (no fleet: one store of each size, under each eviction policy)")
    store.add_argument(
        "--store",
        metavar="POLICY[,…]",
        help=f"of {', '.join(EVICTION_POLICIES)}, or all: what it keeps, against LRU and the bound",
    )
    store.add_argument(
        "--store-tokens", default="400k,1.6M,6.4M", metavar="SIZE[,…]", help="sizes of the store (%(default)s)"
    )
    store.add_argument("--store-page", type=parse_size, default=512, metavar="TOKENS", help="default: %(default)s")
    store.add_argument(
        "--store-sessions", type=whole_number(1), default=32, metavar="N", help="closed traces: at a time (%(default)s)"
    )
    store.add_argument("--run-ends", action="store_true", help="also with the hint that a session has ended")
    good = parser.add_argument_group("objectives and prices")
    good.add_argument("--ttft-objective", type=seconds, default=4.0, metavar="S", help="default: %(default)s")
    good.add_argument("--tpot-objective", type=seconds, default=0.1, metavar="S", help="default: %(default)s")
    good.add_argument("--prices", metavar="FILE", help="bill it: a price book, or 'default' for the packaged one")
    good.add_argument("--price-model", metavar="NAME", help="the model's name in the price book (default: --model)")
    good.add_argument("--starts-at", metavar="TIME", help="the moment that prices with dates are read at (now)")


def run(args: argparse.Namespace) -> int:
    """Do it; return the exit status: 0, or 1 when something is wrong with the trace, a parameter or the price book."""
    try:
        _check_files(args)  # told before hours of work
        _check_contradictions(args)
        return _replay(args) if args.store is None else _place(args)
    except (ReplayError, BillingError) as error:
        print(f"keepwarm replay: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of a file that is to be written: one that is read has words of its own
        print(f"keepwarm replay: {told(error)}", file=sys.stderr)
        return 1


def _check_files(args: argparse.Namespace) -> None:
    written = [path for path in (args.json, args.picture) if path is not None and str(path) != "-"]
    for path in written:
        if path.is_dir() or not path.parent.is_dir():
            raise ParameterError(f"{path} cannot be written")
        if realpath(path) == realpath(args.trace):
            raise ParameterError(f"{path} is the trace itself")
    if len({realpath(path) for path in written}) < len(written):
        raise ParameterError(f"--json and --picture name one file: {args.picture}")
    if args.picture is not None and args.picture.suffix.lower() != ".svg":
        raise ParameterError(f"--picture {args.picture}: pictures are SVG; name a file that ends in .svg")


def _check_contradictions(args: argparse.Namespace) -> None:
    """Refuse what would be without effect. What has a default can't be told from what was said, and is let through."""
    if args.store is None and args.run_ends:
        raise ParameterError("--run-ends is of a page store: name its policies by --store")
    if args.store is not None and (args.picture is not None or args.prices is not None):
        raise ParameterError("--store replays page stores, without a fleet: nothing is drawn or billed")
    if args.prices is None and (args.price_model is not None or args.starts_at is not None):
        raise ParameterError("--price-model and --starts-at say how to bill: name a price book by --prices")


def _loaded(args: argparse.Namespace, **options: int) -> Workload:
    workload = load_workload(args.trace, **options)
    if lines := workload.early_lines:
        more = "" if len(lines) == 1 else f", as in {len(lines) - 1:,} further lines"
        told = f"{args.trace}, line {lines[0]:,}: the time goes back{more}; requests are replayed in order of time"
        print(f"keepwarm replay: warning: {told}", file=sys.stderr)
    return workload


def parse_size(text: str) -> int:
    """Return the number that ``1.5TB``, ``512MiB`` or ``400k`` means. Raises ``argparse.ArgumentTypeError``."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write 1.5TB, 300GB, 512MiB or 400k")
    unit: int = (1024 if match[3] else 1000) ** _POWERS[match[2]]
    return round(float(match[1]) * unit)


def _place(args: argparse.Namespace) -> int:
    names = _names(args.store, EVICTION_POLICIES)
    try:
        sizes = [parse_size(size) for size in args.store_tokens.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ParameterError(f"--store-tokens: {error}") from None
    if args.store_page < 1:
        raise ParameterError("--store-page must be at least 1")
    workload = _loaded(args, segment_tokens=args.store_page)
    order = arrivals(workload, args.store_sessions)
    policies = {name: EVICTION_POLICIES[name] for name in names}
    quiet = args.json is not None and str(args.json) == "-"
    placements = []
    for size in sizes:
        placements.append(place(workload, order, policies, size, run_ends=args.run_ends))
        if not quiet:
            print(render_placement(placements[-1], with_head=len(placements) == 1), flush=True)
    if args.json is not None:
        text = render_placements_json(workload, placements)
        print(text) if quiet else args.json.write_text(text + "\n", "utf-8")
    return 0


def _replay(args: argparse.Namespace) -> int:
    fleet, pricing, policies = _fleet(args), _pricing(args), _names(args.policy, POLICIES)
    workload = _loaded(args)
    load = _load(args, workload, fleet)
    quiet = args.json is not None and str(args.json) == "-"
    if not quiet:
        print(render_head(workload, fleet, load), flush=True)
    summaries = [_one(args, workload, fleet, load, policy, pricing) for policy in policies]
    if not quiet:
        print(render_table(summaries), end="")
    if args.json is not None:
        text = render_json(workload, fleet, load, summaries)
        print(text) if quiet else args.json.write_text(text + "\n", "utf-8")
    if args.picture is not None:
        title = f"{workload.header.name} on {fleet.instances} x {fleet.performance.name}"
        args.picture.write_text(render_picture(title, summaries), "utf-8")
    return 0


def _one(
    args: argparse.Namespace,
    workload: Workload,
    fleet: FleetOptions,
    load: LoadOptions,
    policy: str,
    pricing: Pricing | None,
) -> Summary:
    begun = time.perf_counter()
    router = RouterOptions(policy, args.learning, args.event_delay, args.seed)
    replayed = Simulation(workload, fleet, load, router).run()
    wall_s = time.perf_counter() - begun
    flights = counted(replayed.flights)
    if not flights:
        raise ParameterError("no request was served: is the device smaller than every prompt, or the horizon 0?")
    cost = None if pricing is None else price(flights, pricing)
    return summarize(replayed, Objectives(args.ttft_objective, args.tpot_objective), cost, wall_s)


def _names(text: str, known: Iterable[str]) -> list[str]:
    known = list(known)
    names = known if text == "all" else [name for name in text.split(",") if name]
    for name in names:
        if name not in known:
            raise ParameterError(f"there is no policy {name!r}; there are {', '.join(known)}")
    if not names:
        raise ParameterError("name at least one policy")
    return names


def _fleet(args: argparse.Namespace) -> FleetOptions:
    performance = PRESETS[args.model]
    changes: dict[str, float] = dict(_setting(text, performance) for text in args.settings)
    if changes:
        performance = replace(performance, name=f"{performance.name} (changed)", **changes)  # type: ignore[arg-type]
    per_token = performance.kv_bytes_per_token
    performance = replace(
        performance,
        device_tokens=performance.device_tokens if args.device_tokens is None else args.device_tokens,
        host_tokens=_tokens(args.host_tokens, args.host_bytes, per_token, performance.host_tokens),
        disk_tokens=_tokens(args.disk_tokens, args.disk_bytes, per_token, performance.disk_tokens),
    )
    pool = _tokens(args.pool_tokens, args.pool_bytes, per_token, 0)
    if args.index_bytes < MIN_BYTE_BUDGET:
        raise ParameterError(f"--index-bytes: an index needs {MIN_BYTE_BUDGET:,} at least")
    return FleetOptions(performance, args.instances, pool, args.index_bytes)


def _setting(text: str, performance: EnginePerformance) -> tuple[str, float]:
    name, _, value = text.partition("=")
    if name not in _SETTABLE:
        raise ParameterError(f"--set {name}: no such parameter; there are {', '.join(sorted(_SETTABLE))}")
    kind = type(getattr(performance, name))
    try:
        number: float = kind(float(value))
    except (ValueError, OverflowError):
        raise ParameterError(f"--set {name}: {value!r} is no number") from None
    if not 0 <= number < float("inf"):
        raise ParameterError(f"--set {name}: must be a number of at least 0")
    if not number and name not in _MAY_BE_NOTHING:
        raise ParameterError(f"--set {name}: must be above 0")
    return name, number


def _tokens(tokens: int | None, size_bytes: int | None, per_token: int, otherwise: int) -> int:
    if tokens is not None:
        return tokens
    return otherwise if size_bytes is None else size_bytes // per_token


def _load(args: argparse.Namespace, workload: Workload, fleet: FleetOptions) -> LoadOptions:
    closed = workload.header.closed
    if closed and args.speed is not None:
        raise ParameterError("this trace is closed: its load is set by --users or --load")
    if not closed and (args.users is not None or args.horizon is not None):
        raise ParameterError("this trace is open: its load is set by --speed or --load, and it has no horizon")
    horizon_s = (DEFAULT_HORIZON_S if args.horizon is None else args.horizon) if closed else None
    ramp_s = min(_RAMP_LIMIT_S, _RAMP_SHARE * horizon_s) if horizon_s is not None else 0.0
    base = LoadOptions(horizon_s=horizon_s, think_limit_s=args.think_limit, ramp_s=ramp_s, seed=args.seed)
    if args.users is not None or args.speed is not None:
        return replace(base, users=args.users or 1, speed=args.speed or 1.0)
    share = DEFAULT_LOAD if args.load is None else args.load
    speed, users = load_for_share(workload, fleet, share, base)
    return replace(base, speed=speed, users=users)


def _pricing(args: argparse.Namespace) -> Pricing | None:
    if args.prices is None:
        return None
    book = PriceBook.default() if args.prices == "default" else PriceBook.load(Path(args.prices))
    now_ns = time.time_ns()
    starts_ns = now_ns if args.starts_at is None else parse_moment(args.starts_at, now_ns)
    return Pricing(book, args.price_model or args.model, starts_ns)
