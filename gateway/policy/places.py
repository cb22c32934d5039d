"""What is known of the runs and of the instances they live on: who will come back, where, how soon and for how much."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from gateway.policy.costs import EngineCosts
from gateway.policy.load import Load
from gateway.policy.outputs import OutputLengths
from gateway.policy.pricing import NOTHING, Asked, Surroundings
from gateway.policy.reuse import TIERS, Frontier, ReuseOdds

_HORIZON_S = 10.0
"""How far ahead the steps that are due somewhere are counted: as long as large prompts take."""

_NEWEST = 256
"""Of the runs that are idle at an instance, those that fell idle last: the others step too seldom to matter."""

_LOOK_AGAIN_S = 0.5
_MOST_RUNS, _MOST_IDLE = 65_536, 4096
_SQUARE_WEIGHT = 0.01


@dataclass(slots=True)
class Place:
    """One instance, as runs see it."""

    frontier: Frontier = field(default_factory=Frontier)
    idle: OrderedDict[Hashable, float] = field(default_factory=OrderedDict)  # run → when its last step ended here
    due_rate: float = 0.0
    counted_s: float = -1.0
    look_again_s: float = 0.0
    push_s: tuple[float, float, float, float] = NOTHING  # see ``Surroundings``
    around: Surroundings | None = None  # as last looked at


class Places:
    """Where runs are. Clocks are given; O(1) a call, but for ``look``: some µs twice a second at most."""

    def __init__(self) -> None:
        self.odds, self.outputs = ReuseOdds(), OutputLengths()
        self.mean_square_s = 0.0  # of what prompts take
        self.mean_prompt = 0.0  # tokens
        self._places: dict[str, Place] = {}
        self._last: OrderedDict[Hashable, tuple[str, float]] = OrderedDict()  # run → where its last step ended, when

    def place(self, instance: str) -> Place:
        """Return what is known of an instance."""
        found = self._places.get(instance)
        if found is None:
            found = self._places[instance] = Place()
        return found

    def forget(self, instance: str) -> None:
        """The instance is gone, or has lost its cache."""
        self._places.pop(instance, None)

    def run_ended(self, run: str, instances: frozenset[str] = frozenset()) -> None:
        """No step of this run is to come: nothing is due for it where it was."""
        last = self._last.pop(run, None)
        if last is not None:
            self.place(last[0]).idle.pop(run, None)

    def asked(self, run: Hashable | None, prompt_tokens: int) -> Asked:
        """Return a request as it is priced; ``run`` is ``None`` where it belongs to none."""
        output = self.outputs.expected(run)
        if run is None or run in self._last:
            return Asked(prompt_tokens, output)
        return Asked(prompt_tokens, output, self.odds.further_steps(), self.mean_square_s)

    def is_new(self, run: Hashable) -> bool:
        """Tell whether no step of this run has ended yet, as far as is remembered."""
        return run not in self._last

    def served(self, prompt_tokens: int, prompt_s: float) -> None:
        """An engine took a prompt that was expected to take ``prompt_s``. One that it refused tells nothing: a few that
        are longer than any engine takes would make all others look small."""
        self.mean_prompt += _SQUARE_WEIGHT * (prompt_tokens - self.mean_prompt)
        self.mean_square_s += _SQUARE_WEIGHT * (prompt_s * prompt_s - self.mean_square_s)

    def begun(self, run: Hashable, now_s: float) -> None:
        """A step of this run was routed."""
        last = self._last.get(run)
        if last is not None:
            instance, ended_s = last
            if self.place(instance).idle.pop(run, None) is not None:
                self.odds.came_back(now_s - ended_s)

    def ended(
        self, run: Hashable, instance: str, tip: int | None, now_s: float, tier_of: Callable[[int], int | None]
    ) -> None:
        """A step of this run ended; ``tip`` is its prompt's last full block."""
        self.odds.ended()
        place = self.place(instance)
        place.idle.pop(run, None)
        place.idle[run] = now_s
        if len(place.idle) > _MOST_IDLE:
            place.idle.popitem(last=False)
        self._last.pop(run, None)
        self._last[run] = instance, now_s
        if len(self._last) > _MOST_RUNS:
            self._last.popitem(last=False)
        if tip is not None:
            place.frontier.used(run, tip, now_s, tier_of)

    @property
    def known(self) -> Mapping[str, Place]:
        """What is known of each instance: what ``around`` found last, and from when on it should be asked again."""
        return self._places

    def around(self, instance: str, load: Load, capacity_tokens: float | None, now_s: float) -> Surroundings:
        """Return what is known of an instance beside its load, half a second old at most."""
        place = self._places.get(instance) or self.place(instance)
        if place.around is None or not 0 <= now_s - place.counted_s < _LOOK_AGAIN_S:
            self.look(place, load, now_s)
            place.around = Surroundings(place.due_rate, place.push_s, capacity_tokens)
        return place.around

    def look(self, place: Place, load: Load, now_s: float) -> None:
        """Count anew the steps a second that are due at an instance, and what it costs to push others' tokens out.

        Half of those that decode there are taken to end in time to come back.
        """
        newest = islice(reversed(place.idle.values()), _NEWEST)
        due = self.odds.due([now_s - ended_s for ended_s in newest], _HORIZON_S)
        place.due_rate = (due + 0.5 * load.decoding * self.odds.due((0.0,), _HORIZON_S)) / _HORIZON_S
        place.push_s = self._push_s(place.frontier, load.costs)
        place.counted_s, place.look_again_s = now_s, now_s + _LOOK_AGAIN_S

    def _push_s(self, frontier: Frontier, costs: EngineCosts) -> tuple[float, float, float, float]:
        """Return by tier what a token costs that comes to it, and to those behind it: what it pushes out has to be
        fetched from further away when it is wanted again, or computed."""
        ages_s = frontier.ages_s
        if ages_s[0] == math.inf:
            return NOTHING
        compute_s = costs.token_s(int(self.mean_prompt) // 2)
        ways = [0.0]
        for way_s in (*costs.tier_s, compute_s):
            ways.append(max(ways[-1], min(way_s, compute_s)))
        push, behind = [], 0.0
        for tier in reversed(TIERS):
            behind += self.odds.after(ages_s[tier]) * (ways[tier + 1] - ways[tier])
            push.append(behind)
        pool, disk, host, device = push
        return device, host, disk, pool
