"""What an engine without events probably holds: predicted from what was routed to it, corrected by what it reports.

The prediction is fed into the same index as everybody's knowledge (``Tier.DEVICE``, marked ``Knowledge.STALE``, which
means "a prediction at best"), rather than answering matches itself. That is the simpler of the two: routing asks one
structure about all instances, and engines that have the same blocks share their memory there.

The model is an LRU cache over prefixes, as real engines keep one: a prompt that was computed is resident, the block
used longest ago goes first, of one prompt the suffix before the prefix. Its capacity is not believed but learned.
Each answer tells how many prompt tokens were cached:

* Fewer than predicted: the first missing block was evicted, hence everything that was used before it was too. All of
  that is forgotten, and the capacity moves halfway down to the number of blocks that had been used since. Halfway,
  because an engine that was flushed behind our back looks the same for one answer. Under a true LRU engine the
  estimate never falls below the real capacity, and about log2 of the excess of such answers suffices.
* More than predicted: it remembers longer than we do. The capacity grows by what was found, up to a limit that bounds
  our memory.

Tokens that the engine generated also take up its memory; they appear here as a smaller learned capacity. What they are
is not known here, only how many there were: a prompt that goes on where an answered one ended (an agent's next step) is
expected to find as many blocks beyond that end as the answer filled. Such a *tail* is part of the prediction and its
error; it is never in the index, and its absence says nothing of evictions.

Prompts that are known by their text only (``is_approximate``) have hashes of chunks that are about a block long. The
engine's counts are scaled to chunks by the prompt's two lengths, a block too few or too many is no error, what differs
by up to a quarter corrects nothing, and their errors are counted apart.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np

from kvstore.page import Tier
from radix_index.base import HashArray, Hashes, Knowledge, PrefixIndex
from radix_index.recency import Recency, Uses


@dataclass(slots=True)
class PredictionStats:
    """How good the predictions were, over the answers that reported cached tokens. Errors: predicted less reported."""

    answers: int = 0
    exact: int = 0
    error_tokens: int = 0
    absolute_error_tokens: int = 0
    shortened: int = 0  # answers that reported less than predicted
    extended: int = 0  # answers that reported more

    @property
    def mean_error_tokens(self) -> float:
        """The mean signed error; above 0 when too much is predicted."""
        return self.error_tokens / self.answers if self.answers else 0.0

    @property
    def mean_absolute_error_tokens(self) -> float:
        """The mean of the errors' sizes."""
        return self.absolute_error_tokens / self.answers if self.answers else 0.0

    @property
    def exact_share(self) -> float:
        """The share of answers whose cached blocks were predicted exactly."""
        return self.exact / self.answers if self.answers else 0.0

    def count(
        self, predicted_blocks: int, cached_tokens: int, block_size: int, most_blocks: int, *, slack_blocks: int = 0
    ) -> None:
        """Take in one answer to a prompt of ``most_blocks`` full blocks; a difference of ``slack_blocks`` is none."""
        reported = min(cached_tokens // block_size, most_blocks)
        is_exact = abs(predicted_blocks - reported) <= slack_blocks
        # Tokens beyond the last full block are nobody's mistake.
        error = 0 if is_exact else predicted_blocks * block_size - cached_tokens
        self.answers += 1
        self.exact += is_exact
        self.error_tokens += error
        self.absolute_error_tokens += abs(error)
        self.shortened += error > 0
        self.extended += error < 0


@dataclass(slots=True)
class Expectation:
    """What was expected of one request when it was routed, at ``clock``.

    ``uses``, when each of the leading resident blocks was last used, are of just before it was computed.
    """

    hashes: Hashes
    prompt_tokens: int
    blocks: int
    life: int
    clock: int
    tail_blocks: int = 0
    is_approximate: bool = False
    uses: Uses = field(default_factory=lambda: np.empty(0, np.int64))
    is_computed: bool = False

    @property
    def tolerance_blocks(self) -> int:
        """How far an answer may be off without proving anything."""
        return len(self.hashes) // 4 + 1 if self.is_approximate else 0

    @property
    def known_blocks(self) -> int:
        """How many of the leading blocks were resident."""
        return len(self.uses)

    def last_use_of(self, position: int) -> int:
        """Return when the block at this position, one of those known, had been used last before it was routed."""
        return min(int(self.uses[position]), self.clock)


@dataclass(slots=True)
class PredictedResidency:
    """One engine's predicted device cache. At most ``limit_tokens`` (default: twice the capacity) are remembered.

    For each request: ``expect`` when it is routed, ``computed`` at its first token, ``answered`` when its usage is
    known; an answer that never comes needs no call. ``expect`` costs a match, ``computed`` two look-ups of the prompt's
    blocks in compiled loops; forgetting is paid for by the blocks that came.
    """

    index: PrefixIndex
    instance: str
    block_size: int
    capacity_tokens: int
    limit_tokens: int | None = None
    pool: str | None = None
    stats: PredictionStats = field(default_factory=PredictionStats)
    approximate_stats: PredictionStats = field(default_factory=PredictionStats)
    capacity_blocks: int = field(init=False)  # as learned so far
    limit_blocks: int = field(init=False)
    _used: Recency = field(default_factory=Recency, init=False)
    _tails: dict[int, int] = field(default_factory=dict, init=False)  # a prompt's last block → blocks of its answer
    _clock: int = field(default=0, init=False)
    _life: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        limit = 2 * self.capacity_tokens if self.limit_tokens is None else self.limit_tokens
        self.limit_blocks = limit // self.block_size
        self.capacity_blocks = min(self.capacity_tokens // self.block_size, self.limit_blocks)
        self.index.add_instance(self.instance, block_size=self.block_size, pool=self.pool)
        self.index.set_knowledge(self.instance, Knowledge.STALE)

    @property
    def blocks(self) -> int:
        """Blocks predicted to be resident now."""
        return len(self._used)

    def expect(self, hashes: Hashes, prompt_tokens: int, *, is_approximate: bool = False) -> Expectation:
        """A prompt with these full blocks is about to be sent there."""
        leading = self.index.match(hashes, (self.instance,))[self.instance].tier_blocks[Tier.DEVICE]
        tail = self.tail_blocks(hashes, leading)
        return Expectation(hashes, prompt_tokens, leading, self._life, self._clock, tail, is_approximate)

    def tail_blocks(self, hashes: Hashes, leading: int) -> int:
        """Return how many blocks an answer probably left beyond the ``leading`` ones that are resident. O(1)."""
        if not 0 < leading < len(hashes):
            return 0
        return min(self._tails.get(int(hashes[leading - 1]), 0), len(hashes) - leading)

    def computed(self, expectation: Expectation) -> None:
        """Its first token came, so the whole prompt is resident. Idempotent."""
        if expectation.is_computed or expectation.life != self._life:
            return
        expectation.is_computed = True
        hashes = _as_array(expectation.hashes)
        if expectation.tail_blocks:
            self._tails.pop(int(hashes[expectation.blocks - 1]), None)  # its blocks have names from now on
        expectation.uses = self._touch(hashes, expectation.blocks)

    def answered(
        self,
        expectation: Expectation,
        cached_tokens: int | None,
        *,
        prompt_tokens: int | None = None,
        output_tokens: int = 0,
    ) -> None:
        """Its usage is known. ``cached_tokens`` of ``None``: the engine does not tell, so nothing can be learned.

        ``prompt_tokens``: as the engine counted them, which is what approximate prompts are scaled by.
        """
        if expectation.life != self._life:
            return
        self.computed(expectation)
        scale = expectation.prompt_tokens / prompt_tokens if expectation.is_approximate and prompt_tokens else 1.0
        self._remember_tail(expectation, round(output_tokens * scale))
        if cached_tokens is not None:
            self._compare(expectation, round(cached_tokens * scale))

    def _remember_tail(self, expectation: Expectation, output_tokens: int) -> None:
        held = expectation.prompt_tokens + output_tokens - 1  # the last token generated was never read
        tail = held // self.block_size - len(expectation.hashes)
        if tail > 0 and len(expectation.hashes) and (last := int(expectation.hashes[-1])) in self._used:
            self._tails[last] = tail

    def _compare(self, expectation: Expectation, cached_tokens: int) -> None:
        usable = max(expectation.prompt_tokens - 1, 0) // self.block_size  # the last token is always computed
        resident = min(expectation.blocks, usable)
        predicted = min(expectation.blocks + expectation.tail_blocks, usable)
        known = max(predicted, min(expectation.known_blocks, usable))
        stats = self.approximate_stats if expectation.is_approximate else self.stats
        slack = int(expectation.is_approximate)  # the ends of chunks and of blocks do not line up
        stats.count(predicted, cached_tokens, self.block_size, len(expectation.hashes), slack_blocks=slack)
        reported = min(cached_tokens // self.block_size, len(expectation.hashes))
        if reported < min(resident, expectation.known_blocks) - expectation.tolerance_blocks:
            self._shorten(expectation, reported)
        elif reported > known + expectation.tolerance_blocks:
            self._extend(reported - known, _as_array(expectation.hashes))

    def restarted(self) -> None:
        """The engine lost its cache. What is still on its way from its former life is ignored."""
        self._life += 1
        self._used.clear()
        self._tails.clear()
        self.capacity_blocks = min(self.capacity_tokens // self.block_size, self.limit_blocks)
        self.index.cleared(self.instance, (Tier.DEVICE,))

    def check(self) -> None:
        """Verify the bounds and the order of ages; raises ``AssertionError``. O(blocks)."""
        assert len(self._used) <= max(self.capacity_blocks, 0) <= self.limit_blocks
        assert all(block in self._used for block in self._tails)
        self._used.check()

    def _touch(self, hashes: HashArray, told: int) -> Uses:
        """The blocks are used now, the last one first, so that suffixes are older than their prefixes.

        The index had the first ``told`` of them when it was asked, and those stay that are resident. Returns when each
        of the leading resident ones was used before.
        """
        self._clock += 1
        uses = self._used.touch(hashes, self._clock)
        oldest = uses.argmin() if len(uses) else 0  # the first that is gone, if one is: no clock is less than 0
        known = uses[:oldest] if len(uses) and not uses[oldest] else uses
        if len(new := hashes[min(told, len(known)) :]):
            self.index.stored(self.instance, Tier.DEVICE, new)
        self._trim()
        return known

    def _trim(self) -> None:
        self._forget(len(self._used) - self.capacity_blocks)

    def _forget(self, count: int) -> None:
        """Forget so many blocks, the oldest first."""
        if count > 0:
            self._gone(self._used.pop_oldest(count))

    def _gone(self, blocks: HashArray) -> None:
        if self._tails:
            for block in blocks.tolist():
                self._tails.pop(block, None)
        if len(blocks):
            self.index.removed(self.instance, Tier.DEVICE, blocks)

    def _shorten(self, expectation: Expectation, reported: int) -> None:
        """The block after ``reported`` was gone: so is all that was last used when it was, or before."""
        last_use = expectation.last_use_of(reported)
        self._gone(self._used.pop_until(last_use))
        brought = len(expectation.hashes) - reported
        newer = max(len(self._used) - brought, len(expectation.hashes))
        if newer < self.capacity_blocks:
            self.capacity_blocks = (self.capacity_blocks + newer) // 2
            self._trim()

    def _extend(self, found: int, hashes: HashArray) -> None:
        """Blocks that we had forgotten were still there."""
        self.capacity_blocks = min(self.capacity_blocks + found, self.limit_blocks)
        if not self._used.uses(hashes).all():
            self._touch(hashes, 0)


def _as_array(hashes: Hashes) -> HashArray:
    if isinstance(hashes, np.ndarray):
        return np.ascontiguousarray(hashes, np.uint64)
    return np.frombuffer(array("Q", hashes), np.uint64)
