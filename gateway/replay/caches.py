"""The prefix caches of a simulated engine: device, then host and disk of its own, then a pool that all share.

Each is an LRU over segments in which a suffix is always older than its prefix, so that what is resident is closed under
prefixes. Running requests pin their path on the device. A computed prompt is written through to host and pool; what the
host evicts goes to disk (without a host tier, computed prompts go to disk at once). Generated tokens take memory while
they run and are not kept: a trace does not tell which of the next prompt's blocks they became.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from kvstore.page import Tier

OnChange = Callable[[Tier, bool, Sequence[int]], None]
"""(tier, whether stored or removed, segments)"""


class LowerCache:
    """One lower tier of ``capacity_tokens``; 0 keeps nothing."""

    def __init__(self, tier: Tier, capacity_tokens: int, segment_tokens: Sequence[int], on_change: OnChange) -> None:
        self.tier, self.capacity_tokens, self.used_tokens = tier, capacity_tokens, 0
        self._tokens, self._on_change = segment_tokens, on_change
        self._lru: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, segment: int) -> bool:
        return segment in self._lru

    def put(self, path: Sequence[int]) -> list[int]:
        """Use a path, storing what is not there; return what had to go for it, oldest first."""
        if not self.capacity_tokens:
            return []
        lru, fresh = self._lru, []
        for segment in reversed(path):
            if segment in lru:
                lru.move_to_end(segment)
            else:
                lru[segment] = None
                fresh.append(segment)
        fresh.reverse()
        self.used_tokens += sum(self._tokens[segment] for segment in fresh)
        gone = []
        while self.used_tokens > self.capacity_tokens:
            segment, _ = lru.popitem(last=False)
            self.used_tokens -= self._tokens[segment]
            gone.append(segment)
        if fresh:
            self._on_change(self.tier, True, fresh)
        if gone:
            self._on_change(self.tier, False, gone)
        return gone

    def use(self, path: Sequence[int]) -> None:
        """Use what is there of a path."""
        for segment in reversed(path):
            if segment in self._lru:
                self._lru.move_to_end(segment)

    def check(self) -> None:
        """Verify the size; raises ``AssertionError``."""
        assert self.used_tokens == sum(self._tokens[segment] for segment in self._lru) <= self.capacity_tokens


class DeviceCache:
    """The device tier. ``used_tokens`` counts resident segments and what running requests have taken beside them."""

    def __init__(self, capacity_tokens: int, segment_tokens: Sequence[int], on_change: OnChange) -> None:
        self.capacity_tokens, self.used_tokens = capacity_tokens, 0
        self._tokens, self._on_change = segment_tokens, on_change
        self._pins: dict[int, int] = {}
        self._lru: OrderedDict[int, None] = OrderedDict()  # resident and not pinned; oldest first
        self._resident: set[int] = set()

    def match(self, path: Sequence[int]) -> int:
        """Return how many leading segments are resident. O(log path), since residency is closed under prefixes."""
        low, high, resident = 0, len(path), self._resident
        while low < high:
            middle = (low + high) // 2
            if path[middle] in resident:
                low = middle + 1
            else:
                high = middle
        return low

    def pin(self, path: Sequence[int]) -> None:
        """Protect resident segments from eviction, once more."""
        for segment in path:
            self._pins[segment] = self._pins.get(segment, 0) + 1
            self._lru.pop(segment, None)

    def unpin(self, path: Sequence[int]) -> None:
        """End one protection; a segment that has none left is the most recently used."""
        for segment in reversed(path):
            if self._pins[segment] > 1:
                self._pins[segment] -= 1
            else:
                del self._pins[segment]
                self._lru[segment] = None

    def take(self, tokens: int) -> bool:
        """Take memory for a request, evicting for it; ``False``, with nothing taken, when pinned ones fill the device.

        What was evicted in vain stays evicted, as in engines.
        """
        gone = []
        while self.used_tokens + tokens > self.capacity_tokens and self._lru:
            segment, _ = self._lru.popitem(last=False)
            self._resident.discard(segment)
            self.used_tokens -= self._tokens[segment]
            gone.append(segment)
        if gone:
            self._on_change(Tier.DEVICE, False, gone)
        if self.used_tokens + tokens > self.capacity_tokens:
            return False
        self.used_tokens += tokens
        return True

    def insert(self, path: Sequence[int]) -> None:
        """Segments whose memory was taken before are resident from now on, pinned once."""
        self._resident.update(path)
        for segment in path:
            self._pins[segment] = 1
        if path:
            self._on_change(Tier.DEVICE, True, path)

    def give(self, tokens: int) -> None:
        """Give back memory that was taken and not inserted."""
        self.used_tokens -= tokens

    def check(self, taken_tokens: int) -> None:
        """Verify sizes, given what running requests hold beside segments; raises ``AssertionError``."""
        assert self._resident == self._pins.keys() | self._lru.keys()
        assert not self._pins.keys() & self._lru.keys()
        assert self.used_tokens == taken_tokens + sum(self._tokens[segment] for segment in self._resident)
        assert 0 <= self.used_tokens <= self.capacity_tokens


class EngineCaches:
    """All tiers as one engine sees them; ``pool`` is shared with others."""

    def __init__(self, device: DeviceCache, host: LowerCache, disk: LowerCache, pool: LowerCache) -> None:
        self.device, self.host, self.disk, self.pool = device, host, disk, pool
        self.has_lower = bool(host.capacity_tokens or disk.capacity_tokens or pool.capacity_tokens)

    def lower_tier(self, segment: int) -> Tier | None:
        """Return the fastest lower tier that has a segment."""
        for cache in (self.host, self.disk, self.pool):
            if segment in cache:
                return cache.tier
        return None

    def write_through(self, path: Sequence[int]) -> None:
        """A prompt is on the device: keep it in the lower tiers too."""
        if self.host.capacity_tokens:
            self.disk.put(self.host.put(path)[::-1])
            self.disk.use(path)
        else:
            self.disk.put(path)
        self.pool.put(path)
