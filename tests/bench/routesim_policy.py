"""The production index and policy, plugged into the routing simulator ``routesim``.

    PYTHONPATH=.:CHECKOUT:CHECKOUT/tests/bench python -m routesim.suite TRACES --plug routesim_policy:KeepwarmPolicy

Fed by what a gateway gets: KV events of the device and of the slower tiers, its own dispatches, first tokens and
completions. Of a request it reads the prompt and the session that it belongs to; of the fleet, how much the device
holds and whether instances can read each other's pages. All else is learned while it runs. One set of parameters: the
product's.
"""

from __future__ import annotations

import importlib.util
import random
import site
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
if importlib.util.find_spec("msgspec") is None:  # started by an interpreter without our packages: the checkout's own
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    site.addsitedir(str(ROOT / ".venv" / "lib" / version / "site-packages"))
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

from gateway.policy.costs import EngineCosts, Rates  # noqa: E402
from gateway.policy.load import Load, Reservation  # noqa: E402
from gateway.policy.places import Places  # noqa: E402
from gateway.routing import (  # noqa: E402
    POLICIES,
    InstanceView,
    Request,
    decide,
    fastest_tier,
    usable_hits,
)
from kvstore.block import routing_hash_array  # noqa: E402
from kvstore.page import Tier  # noqa: E402
from radix_index.base import HashArray  # noqa: E402
from radix_index.index import RadixIndex  # noqa: E402

POOL = "pool"
FIRST_RATES = Rates(prefill=8_000.0, host=200_000.0, disk=50_000.0, pool=20_000.0, peer=40_000.0, decode=50.0)
"""Where learning starts, whatever runs: the same for every scenario, and right for none."""

_MOST_TIPS = 200_000


class TierEvents(OrderedDict[int, None]):
    """One slower tier, which tells of what comes and goes as engines do of theirs."""

    def __init__(self, tell: Callable[[bool, int], None]) -> None:
        super().__init__()
        self._tell = tell

    def __setitem__(self, node: int, value: None) -> None:
        is_new = node not in self
        super().__setitem__(node, value)
        if is_new:
            self._tell(True, node)

    def popitem(self, last: bool = True) -> tuple[int, None]:
        item = super().popitem(last)
        self._tell(False, item[0])
        return item


class Routed(NamedTuple):
    """What is kept of a request until its end."""

    reservation: Reservation
    ticket: int | None
    run: object
    tip: int | None


class KeepwarmPolicy:
    """See the module."""

    name = "keepwarm"
    policy = "expected-ttft"

    def reset(self, view: Any) -> None:
        """Begin a simulation."""
        sim, count = view.sim, view.n
        self._trie, self._block = sim.trace.trie, view.block
        self._names = [f"i{number}" for number in range(count)]
        self.index, has_pool = RadixIndex(), bool(view.perf.pool_cap)
        for name in self._names:
            self.index.add_instance(name, block_size=self._block, pool=POOL if has_pool else None)
        if sim.tiered:
            for name, instance in zip(self._names, view.instances, strict=True):
                instance.ram, instance.ssd = self._tier(name, Tier.HOST), self._tier(name, Tier.DISK)
            if has_pool:
                sim.pool = self._tier(POOL, Tier.POOL)
        costs = EngineCosts(FIRST_RATES)
        self.loads = {name: Load(costs) for name in self._names}
        self.places = Places()
        self._capacity, self._pulls = view.instances[0].cap, bool(view.perf.net_bw)
        self._policy, self._chance = POLICIES[self.policy](), random.Random(0)
        self._node_hashes: dict[int, HashArray] = {}
        self._routed: dict[int, Routed] = {}
        self._tips: OrderedDict[int, int] = OrderedDict()
        self._runs = 0

    # --- what engines say ---

    def on_kv_event(self, instance: int, kind: str, node: int) -> None:
        """Blocks came to an instance's device, or went."""
        self._told(self._names[instance], Tier.DEVICE, kind == "stored", node)

    def _tier(self, holder: str, tier: Tier) -> TierEvents:
        return TierEvents(lambda stored, node: self._told(holder, tier, stored, node))

    def _told(self, holder: str, tier: Tier, stored: bool, node: int) -> None:
        (self.index.stored if stored else self.index.removed)(holder, tier, self._hashes(node))

    def _hashes(self, node: int) -> HashArray:
        """Return the routing hashes of a node's blocks: each id counts as one token, chained from the root."""
        found = self._node_hashes.get(node)
        if found is None:
            parent = self._trie.parent[node]
            before = int(self._hashes(parent)[-1]) if parent else 0
            ids = [block & 0xFFFFFFFF for block in self._trie.blocks[node]]
            found = self._node_hashes[node] = routing_hash_array(ids, 1, before)
        return found

    # --- what requests ask ---

    def on_request(self, request: Any, view: Any) -> Any:
        """Choose an instance, or an instance and the one that it pulls pages from."""
        now_s, tokens = view.now, request.n_in
        parts = [self._hashes(node) for node in request.path]
        hashes = np.concatenate(parts) if parts else np.empty(0, np.uint64)
        run = (request.sid, request.ctx) if request.sid >= 0 else self._run_of(hashes, tokens)
        asked = self.places.asked(run, tokens)
        views = self._views(hashes, tokens, now_s)
        decision = decide(views, Request(asked, str(run), self._pulls), self._policy, self._chance, now_s)
        assert decision is not None
        at = self._names.index(decision.instance)
        chosen, fetched = views[at], sum(decision.fetch_tokens or ())
        new = tokens - chosen.hit_tokens[0] - chosen.pending_tokens - fetched
        reservation = chosen.load.reserve(tokens, max(new, 1), now_s, asked.output_tokens, decision.fetch_tokens)
        self.places.served(reservation.prompt_tokens, reservation.prompt_s)
        self.places.begun(run, now_s)
        coming = hashes[chosen.matched_blocks :]
        ticket = self.index.reserve(decision.instance, coming) if len(coming) else None
        self._routed[request.idx] = Routed(reservation, ticket, run, int(hashes[-1]) if len(hashes) else None)
        return at if decision.fetch_from is None else (at, self._names.index(decision.fetch_from))

    def _views(self, hashes: HashArray, tokens: int, now_s: float) -> list[InstanceView]:
        counts = self.index.match(hashes).counts.tolist()
        views = []
        for name, (*tiers, pending) in zip(self._names, counts, strict=True):
            load = self.loads[name]
            hits = usable_hits(tiers, self._block, tokens)
            coming = min(pending * self._block, max(tokens - 1 - sum(hits), 0)) if pending else 0
            around = self.places.around(name, load, self._capacity, now_s)
            views.append(InstanceView(name, hits, load, around, pending_tokens=coming, matched_blocks=sum(tiers)))
        return views

    def _run_of(self, hashes: HashArray, tokens: int) -> int:
        """Link a request that has no session to the one that it goes on from: as a gateway does by its messages."""
        listed = hashes.tolist()
        run = next((self._tips[block] for block in reversed(listed) if block in self._tips), None)
        if run is None:
            self._runs += 1
            run = self._runs
        if (
            listed
        ):  # its last full block: what is behind is another one in the next step, what is before others' opening
            self._tips[listed[max(tokens // self._block, 1) - 1]] = run
        while len(self._tips) > _MOST_TIPS:
            self._tips.popitem(last=False)
        return run

    # --- what becomes of them ---

    def on_first_token(self, request: Any, instance: Any, now_s: float) -> None:
        """An answer begins."""
        self._routed[request.idx].reservation.answered(now_s)

    def on_complete(self, request: Any, instance: Any, now_s: float) -> None:
        """An answer is whole, and its tokens are counted."""
        routed, name = self._routed.pop(request.idx), self._names[instance.id]
        routed.reservation.release(now_s)
        routed.reservation.counted(request.n_out)
        if routed.ticket is not None:
            self.index.release(routed.ticket)
        self.places.outputs.seen(routed.run, request.n_out)
        self.places.ended(routed.run, name, routed.tip, now_s, lambda block: self._tier_of(name, block))

    def _tier_of(self, name: str, block: int) -> int | None:
        return fastest_tier(self.index.match([block], (name,))[name].tier_blocks)
