"""What a page store keeps under each eviction policy, replayed on a trace, between LRU and what nobody can beat.

One cache of a given size serves every request in order: it counts the leading run that it holds, then takes in the
whole prompt. Pages are a trace's segments, so that a policy meets some hundred thousand of them and not tens of
millions; in a trace of 512-token blocks, cut into segments of 512, they are its blocks. The *clairvoyant* bound gives
up what is wanted again last (Belady); it knows the future, so nothing that runs can do better by more than what unequal
pages allow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from gateway.replay.workload import TraceRequest, Workload
from kvstore.policy import EvictionPolicy, PrefixLru

Policy = EvictionPolicy[Any]
_NEVER = 1 << 60
_SERVICE_S = 2.0  # of a request in a closed trace: only the order that it makes matters


@dataclass(frozen=True, slots=True)
class Placement:
    """Hit tokens as shares of all prompt tokens, at one size, by policy."""

    capacity_tokens: int
    clairvoyant: float
    hits: dict[str, float]

    def gap_closed(self, policy: str) -> float | None:
        """Return which share of the way from LRU to the bound a policy goes; ``None`` where there is no way."""
        way = self.clairvoyant - self.hits["lru"]
        return (self.hits[policy] - self.hits["lru"]) / way if way > 1e-9 else None


def arrivals(workload: Workload, concurrent: int) -> list[TraceRequest]:
    """Return the requests in the order in which a store sees them.

    An open trace has one. In a closed one so many sessions are under way at a time, each waiting for its answers and
    then for as long as it did when it was recorded.
    """
    if not workload.header.closed:
        return workload.requests
    first = iter([request for request in workload.requests if request.is_first])
    under_way = [(0.0, request.number, request) for request in islice(first, concurrent)]
    heapify(under_way)
    order = []
    while under_way:
        now_s, _, request = heappop(under_way)
        order.append(request)
        following = request.next if request.next is not None else next(first, None)
        if following is not None:
            heappush(under_way, (now_s + _SERVICE_S + following.think_s, following.number, following))
    return order


def place(
    workload: Workload,
    order: Sequence[TraceRequest],
    policies: dict[str, Callable[[], Policy]],
    capacity_tokens: int,
    *,
    run_ends: bool,
) -> Placement:
    """Replay one size under LRU and each policy.

    With ``run_ends`` the store is told when a session has had its last answer, and the policies come a second time
    under names that say so.
    """
    total = max(1, sum(request.prompt_tokens for request in order))
    hits = {}
    for name, make in ({"lru": PrefixLru} | policies).items():
        hits[name] = _hit_tokens(workload, order, make(), capacity_tokens, {}) / total
    if run_ends:
        ended = _private_pages(order)
        for name, make in ({"lru": PrefixLru} | policies).items():
            hits[f"{name}+ends"] = _hit_tokens(workload, order, make(), capacity_tokens, ended) / total
    return Placement(capacity_tokens, clairvoyant_tokens(workload, order, capacity_tokens) / total, hits)


def render_placement(placement: Placement, *, with_head: bool) -> str:
    """Return a line for the terminal: shares of prompt tokens hit, and of the gap to the bound that is closed."""
    names = list(placement.hits)
    lines = []
    if with_head:
        lines.append("hit % of prompt tokens, and % of the gap from LRU to the clairvoyant bound that is closed")
        lines.append(f"{'tokens':>12}" + "".join(f"{name:>18}" for name in names) + f"{'clairvoyant':>14}")
    cells = []
    for name in names:
        closed = placement.gap_closed(name)
        gap = f"{100 * closed:+.0f}" if closed is not None and name != "lru" else ""
        cells.append(f"{100 * placement.hits[name]:.2f} {gap:>5}".rjust(18))
    lines.append(f"{placement.capacity_tokens:>12}" + "".join(cells) + f"{100 * placement.clairvoyant:>14.2f}")
    return "\n".join(lines)


def render_placements_json(workload: Workload, placements: Sequence[Placement]) -> str:
    """Return everything as JSON."""
    rows = [
        {
            "capacity_tokens": placement.capacity_tokens,
            "clairvoyant": placement.clairvoyant,
            "hits": placement.hits,
            "gap_closed": {name: placement.gap_closed(name) for name in placement.hits},
        }
        for placement in placements
    ]
    return json.dumps({"trace": workload.header.name, "requests": len(workload.requests), "sizes": rows}, indent=2)


def _hit_tokens(
    workload: Workload,
    order: Sequence[TraceRequest],
    policy: Policy,
    capacity_tokens: int,
    ended: dict[int, list[int]],
) -> int:
    tokens = workload.segment_tokens
    present: set[int] = set()
    used = hits = 0
    for position, request in enumerate(order):
        path = request.path
        known = next((n for n, segment in enumerate(path) if segment not in present), len(path))
        hits += min(workload.prefix_tokens(path, known), request.prompt_tokens)
        taken = 0
        for segment, parent in zip(path, (None, *path), strict=False):
            if segment in present:
                policy.use(segment)
            else:
                while used + tokens[segment] > capacity_tokens and (victim := policy.victim()) is not None:
                    policy.discard(victim)
                    present.discard(victim)
                    used -= tokens[victim]
                if used + tokens[segment] > capacity_tokens:
                    break
                policy.add(segment, parent)
                present.add(segment)
                used += tokens[segment]
            taken += 1
        for segment in reversed(path[:taken]):
            policy.rest(segment)
        for segment in ended.get(position, ()):
            if segment in present:
                policy.retire(segment)
    return hits


def _private_pages(order: Sequence[TraceRequest]) -> dict[int, list[int]]:
    """Return, for each position at which a session ends, the pages that it alone has used, last ones first."""
    users: dict[int, int] = {}
    of_session: dict[int, dict[int, None]] = {}
    ended: dict[int, list[int]] = {}
    for position, request in enumerate(order):
        if request.session < 0:
            continue
        own = of_session.setdefault(request.session, {})
        for segment in request.path:
            own[segment] = None
            users[segment] = request.session if users.get(segment, request.session) == request.session else -1
        if request.next is None:
            pages = of_session.pop(request.session)
            ended[position] = [segment for segment in reversed(pages) if users[segment] == request.session]
    return ended


def clairvoyant_tokens(workload: Workload, order: Sequence[TraceRequest], capacity_tokens: int) -> int:
    """Return the hit tokens of a cache that gives up what is wanted again last, suffix before prefix."""
    tokens = workload.segment_tokens
    following: list[list[int]] = []
    last: dict[int, int] = {}
    for position in reversed(range(len(order))):
        path = order[position].path
        following.append([last.get(segment, _NEVER) for segment in path])
        last.update(dict.fromkeys(path, position))
    following.reverse()
    wanted: dict[int, int] = {}  # of what is present: when it is wanted again
    heap: list[tuple[int, int, int]] = []
    used = hits = 0
    for request, next_times in zip(order, following, strict=True):
        path = request.path
        known = next((n for n, segment in enumerate(path) if segment not in wanted), len(path))
        hits += min(workload.prefix_tokens(path, known), request.prompt_tokens)
        for segment, next_time in zip(path, next_times, strict=True):
            used += 0 if segment in wanted else tokens[segment]
            wanted[segment] = next_time
            heappush(heap, (-next_time, -workload.segment_end_tokens[segment], segment))
        while used > capacity_tokens:
            next_time, _, segment = heappop(heap)
            if wanted.get(segment) == -next_time:
                del wanted[segment]
                used -= tokens[segment]
    return hits
