"""Whether a page is had sooner from a tier than by computing it again. Pure: values in, values out, no clock.

An engine fetches whatever a plug-in claims to have, and makes the request wait for it. So a plug-in claims the leading
pages for which ``FetchWorth.leading`` says that waiting pays::

    time saved by the first n pages = their tokens / prefill rate - Σ tier: (reads · latency + bytes / rate)

and of all n the best. Rates are measured: each read of a tier is a point (bytes, seconds), and a line through the
latest points, weighted so that old ones are soon forgotten, gives the tier's latency and rate. Before there are any,
an optimistic guess stands in for them: learning that a tier is slow costs one read, and a read has a deadline.

A read also has a deadline, after which what it would have brought is computed after all. So nothing is claimed that is
not expected within it, and nothing at all of a tier whose latest read was late, until one without a request has come in
time; each time that it is late again it is doubted twice as long. Who waits gives up when computing would have been
done (``patience_s``): the first read of a tier that has turned slow costs no more than that.

A tier that was found too slow or late is no longer read, so nothing would ever be learned of it again: ``due`` names
the tiers of which somebody should read a little, with no request waiting for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvstore.deadline import Allowance
from kvstore.page import Tier

_LEAST_PREFILL_S = 1e-4
"""A shorter time than this was no computing of a prompt."""
_MOST_DOUBT_S = 64.0
_FORGOTTEN_AFTER = 8
"""Times the last doubt that a tier must have been in time to be trusted as before."""
_LEAST_PATIENCE_S = 0.1
"""What may pass for other reasons than a slow tier: others' reads before this one, a thread that has to wait."""


@dataclass(frozen=True, slots=True)
class FetchRate:
    """What a read of a tier takes: ``latency_s``, and its bytes at ``bytes_per_s``."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, moved_bytes: int, reads: int = 1) -> float:
        """Return how long so many bytes take, asked for in so many reads."""
        return reads * self.latency_s + moved_bytes / self.bytes_per_s


FIRST_GUESS: Mapping[Tier, FetchRate] = {
    Tier.DEVICE: FetchRate(0.0, 100e9),
    Tier.HOST: FetchRate(0.000_05, 5e9),
    Tier.DISK: FetchRate(0.000_5, 1e9),
    Tier.POOL: FetchRate(0.001, 0.5e9),
}
"""What is believed of a tier that was never read: as fast as any of its kind that was measured."""


@dataclass(frozen=True, slots=True)
class WorthOptions:
    """``prefill_tokens_per_s`` where it is known; else it is learned, and until then everything is worth fetching."""

    prefill_tokens_per_s: float | None = None
    margin: float = 1.0  # how many times as long computing must take
    window_bytes: int = 8 << 20  # of one read
    weight: float = 0.4  # of the newest point against all before it
    doubt_s: float = 5.0  # how long a refusal stands before the tier should be read again
    late_doubt_s: float = 1.0  # … of a tier that was late for the first time
    allowed: Allowance | None = None  # for one read, after which it is late


@dataclass(slots=True)
class RateFit:
    """One tier's line through its latest reads: least squares, older points weighing less and less."""

    weight: float
    rate: FetchRate
    _mass: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    def __post_init__(self) -> None:
        for size in (0, 1 << 20):  # the guess, as two points that are forgotten like all others
            self._add(float(size), self.rate.seconds(size))

    def observe(self, moved_bytes: int, took_s: float) -> None:
        """Take in one read; one that brought nothing says how long nothing takes."""
        self._add(float(moved_bytes), max(took_s, 0.0))
        self.rate = self._line()

    def _add(self, x: float, y: float) -> None:
        keep = 1.0 - self.weight
        self._mass = self._mass * keep + 1.0
        self._x = self._x * keep + x
        self._y = self._y * keep + y
        self._xx = self._xx * keep + x * x
        self._xy = self._xy * keep + x * y

    def _line(self) -> FetchRate:
        mean_x, mean_y = self._x / self._mass, self._y / self._mass
        spread = self._xx / self._mass - mean_x * mean_x
        slope = (self._xy / self._mass - mean_x * mean_y) / spread if spread > 1.0 else 0.0
        least = mean_y / mean_x * 1e-3 if mean_x else 0.0  # bytes are never free
        most = mean_y / mean_x if mean_x else slope
        slope = min(max(slope, least), most)
        if slope <= 0.0:
            return FetchRate(mean_y, self.rate.bytes_per_s)
        return FetchRate(max(mean_y - slope * mean_x, 0.0), 1.0 / slope)


@dataclass(slots=True)
class _TierState:
    fit: RateFit
    ask_s: float = 0.0  # to learn which pages it has
    is_late: bool = False  # its latest read took longer than it may
    late_s: float = 0.0  # when it was late last …
    doubt_s: float = 0.0  # … and how long that is held against it
    measured_s: float | None = None
    refused_pages: int = 0  # since it was last measured

    def was_late(self, now_s: float, least_doubt_s: float) -> None:
        """Doubt it, twice as long as the last time."""
        if not self.is_late:
            self.doubt_s = min(max(least_doubt_s, 2 * self.doubt_s), _MOST_DOUBT_S)
        self.is_late, self.late_s = True, now_s

    def was_in_time(self, now_s: float) -> None:
        """Believe it again; after a while, as if it had never been late: where a little comes in time, much may not."""
        self.is_late = False
        if now_s - self.late_s > _FORGOTTEN_AFTER * self.doubt_s:
            self.doubt_s = 0.0


@dataclass(slots=True)
class PrefillRate:
    """How fast an engine computes prompts, from how long it took to compute some tokens, its queue included.

    Waiting can only make an engine look slower than it is; so the fastest of late counts, fading by ``fade`` with every
    slower one.
    """

    tokens_per_s: float | None = None
    is_given: bool = False
    fade: float = 0.02

    def observe(self, tokens: int, took_s: float) -> None:
        """Take in one prompt, unless the rate was given."""
        if self.is_given or tokens <= 0 or took_s < _LEAST_PREFILL_S:
            return
        seen, known = tokens / took_s, self.tokens_per_s
        self.tokens_per_s = seen if known is None or seen > known else known + self.fade * (seen - known)


@dataclass(slots=True)
class FetchWorth:
    """What is known of one engine's tiers and of its own speed. Not thread-safe: its owner guards it."""

    options: WorthOptions = field(default_factory=WorthOptions)
    prefill: PrefillRate = field(init=False)
    _tiers: dict[Tier, _TierState] = field(init=False)

    def __post_init__(self) -> None:
        given = self.options.prefill_tokens_per_s
        self.prefill = PrefillRate(given, is_given=given is not None)
        self._tiers = {tier: _TierState(RateFit(self.options.weight, rate)) for tier, rate in FIRST_GUESS.items()}

    def rate(self, tier: Tier) -> FetchRate:
        """Return what is believed of a tier now."""
        return self._tiers[tier].fit.rate

    def fetched(self, tier: Tier, moved_bytes: int, took_s: float, now_s: float) -> None:
        """A read of the tier brought so many bytes (0 for none) in this time, infinite when it was given up."""
        state, allowed = self._tiers[tier], self.options.allowed
        state.measured_s, state.refused_pages = now_s, 0
        if math.isinf(took_s) or (allowed is not None and took_s >= allowed.seconds(moved_bytes)):
            state.was_late(now_s, self.options.late_doubt_s)  # how fast it is, nobody knows
            return
        if moved_bytes:
            state.was_in_time(now_s)
        state.ask_s = min(state.ask_s, took_s)  # a read is an answer, too
        state.fit.observe(moved_bytes, took_s)

    def asked(self, tier: Tier, took_s: float) -> None:
        """Asking the tier which pages it has took so long."""
        state = self._tiers[tier]
        state.ask_s += self.options.weight * (took_s - state.ask_s)

    def leading(self, tiers: Sequence[Tier], *, page_bytes: int, page_tokens: int, unasked: Tier | None = None) -> int:
        """Return how many leading pages to claim, each of which lies in the tier given for it. O(pages).

        ``unasked``: the tier that was not asked yet whether it has its pages; then asking counts, too. Pages that are
        refused are counted by tier.
        """
        page_s, allowed = self._page_s(page_tokens), self.options.allowed
        window = max(1, self.options.window_bytes // page_bytes)
        allowed_s = math.inf if allowed is None else allowed.seconds()  # of reading the first pages …
        more_s = 0.0 if allowed is None else page_bytes / allowed.least_bytes_per_s  # … and for each of them
        best, best_s = 0, 0.0
        held: dict[Tier, int] = {}
        at: Tier | None = None
        computing_s = fetching_s = read_s = latency_s = 0.0
        for count, tier in enumerate(tiers, 1):
            if tier is not at:
                at, state = tier, self._tiers[tier]
                if state.is_late:
                    break
                read_s, latency_s = page_bytes / state.fit.rate.bytes_per_s, state.fit.rate.latency_s
                if tier is unasked and tier not in held:
                    fetching_s += state.ask_s
            before = held.get(tier, 0)
            held[tier] = before + 1
            fetching_s += read_s if before % window else read_s + latency_s
            if fetching_s > allowed_s + count * more_s:
                break
            if page_s is None:
                best = count
                continue
            computing_s += page_s
            if computing_s - fetching_s > best_s:
                best, best_s = count, computing_s - fetching_s
        for tier in tiers[best:]:
            self._tiers[tier].refused_pages += 1
        return best

    def pays_to_ask(self, tier: Tier, pages: int, *, page_bytes: int, page_tokens: int) -> bool:
        """Tell whether so many pages of a tier would be worth fetching, and asking for first. O(1).

        Where they would not, they count as refused: what is not asked for is not missed otherwise.
        """
        state, page_s = self._tiers[tier], self._page_s(page_tokens)
        pays = not state.is_late and (
            page_s is None or pages * page_s > state.ask_s + self._fetch_s(tier, pages * page_bytes)
        )
        state.refused_pages += 0 if pays else pages
        return pays

    def patience_s(self, pages: int, page_tokens: int) -> float | None:
        """Return how long to wait for pages that were claimed: as long as computing them takes, since who gives up then
        has lost no more than that. ``None`` while nobody knows how long that is."""
        page_s = self._page_s(page_tokens)
        return None if page_s is None else max(_LEAST_PATIENCE_S, pages * page_s)

    def due(self, now_s: float) -> list[Tier]:
        """Return the tiers whose pages were refused for what was measured longer ago than the doubt lasts."""
        return [tier for tier, state in self._tiers.items() if state.refused_pages and self._is_old(state, now_s)]

    def _is_old(self, state: _TierState, now_s: float) -> bool:
        doubt_s = state.doubt_s if state.is_late else self.options.doubt_s
        return state.measured_s is None or now_s - state.measured_s >= doubt_s

    def _page_s(self, page_tokens: int) -> float | None:
        """How long computing a page takes, for the comparison."""
        speed = self.prefill.tokens_per_s
        return None if speed is None else page_tokens / speed / self.options.margin

    def _fetch_s(self, tier: Tier, moved_bytes: int) -> float:
        reads = -(-moved_bytes // self.options.window_bytes)
        return self._tiers[tier].fit.rate.seconds(moved_bytes, reads)
