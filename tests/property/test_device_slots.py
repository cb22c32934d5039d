"""The device tier's slots against a naive model: a dictionary, a set of slots, a count of pins."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.block import content_hashes, token_bytes
from kvstore.page import PageKey, PageMeta, key_content_hash, page_key
from kvstore.tiers.device import DeviceTier
from tests.samples.pages import LAYOUT, chain

PAGES = 6


def branch(at: tuple[PageKey, PageMeta], pages: int) -> list[tuple[PageKey, PageMeta]]:
    """Return pages that continue a prompt otherwise than it went on."""
    entries, parent = [], key_content_hash(at[0])
    for i in range(pages):
        tokens = range(500 + 4 * i, 504 + 4 * i)
        digest = content_hashes(tokens, 4, parent=parent)[0]
        entries.append((page_key(LAYOUT.fingerprint, digest), PageMeta(parent, token_bytes(tokens))))
        parent = digest
    return entries


# Two prompts that share a first page, and one that shares nothing.
PROMPTS = [chain(5), [*chain(1), *branch(chain(1)[0], 3)], chain(4, salt="other")]
META_OF: dict[PageKey, PageMeta] = {key: meta for prompt in PROMPTS for key, meta in prompt}
TAG_OF = {key: float(i + 1) for i, key in enumerate(META_OF)}


class DeviceSlots(RuleBasedStateMachine):
    """Every rule does to tier and model what an engine does."""

    @initialize()
    def start(self) -> None:
        self.tier = DeviceTier(LAYOUT, pages=PAGES)
        self.found: dict[PageKey, int] = {}  # published key -> slot
        self.pins: Counter[int] = Counter()
        self.mine: list[list[int]] = []  # what release is owed for

    def resting(self) -> list[PageKey]:
        return [key for key, slot in self.found.items() if not self.pins[slot]]

    def free(self) -> int:
        return PAGES - len(set(self.found.values()) | {slot for slot, pins in self.pins.items() if pins})

    @rule(count=st.integers(0, PAGES + 1))
    def allocate(self, count: int) -> None:
        possible = self.free() + len(self.resting())
        slots = self.tier.allocate(count)
        assert (slots is None) == (count > possible)
        if slots is None:
            return
        resting = set(self.resting())
        keys = list(self.found)
        evicted = [key for key, there in zip(keys, self.tier.exists(keys), strict=True) if not there]
        assert len(evicted) == max(0, count - self.free())
        assert set(evicted) <= resting
        for key in evicted:
            del self.found[key]
        for key in evicted:  # no successor that could have gone instead is left behind
            assert not any(META_OF[left].parent == key_content_hash(key) for left in self.resting())
        assert len(set(slots)) == count
        assert not set(slots) & {slot for slot, pins in self.pins.items() if pins}
        assert not set(slots) & set(self.found.values())
        self.pins.update(slots)
        if slots:
            self.mine.append(slots)

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted({slot for slots in self.mine for slot in slots})))
        if slot in self.found.values():
            return
        key = data.draw(st.sampled_from(list(META_OF)))
        self.tier.kv[slot].fill_(TAG_OF[key])
        assert self.tier.publish(slot, key, META_OF[key]) == (key not in self.found)
        self.found.setdefault(key, slot)

    @rule(prompt=st.sampled_from(PROMPTS))
    def acquire(self, prompt: list[tuple[PageKey, PageMeta]]) -> None:
        keys = [key for key, _ in prompt]
        run = next((i for i, key in enumerate(keys) if key not in self.found), len(keys))
        slots = self.tier.acquire(keys)
        assert slots == [self.found[key] for key in keys[:run]]
        for slot, key in zip(slots, keys, strict=False):
            assert bool((self.tier.kv[slot] == TAG_OF[key]).all())
        self.pins.update(slots)
        if slots:
            self.mine.append(slots)

    @precondition(lambda self: self.mine)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = self.mine.pop(data.draw(st.integers(0, len(self.mine) - 1)))
        self.tier.release(slots)
        self.pins.subtract(slots)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(list(META_OF)))
        assert self.tier.remove([key]) == (key in self.found)
        self.found.pop(key, None)

    @rule()
    def clear(self) -> None:
        self.tier.clear()
        self.found.clear()

    @invariant()
    def agree(self) -> None:
        self.tier.check()
        assert (self.tier.free_pages, self.tier.evictable_pages) == (self.free(), len(self.resting()))
        assert {key for key, _ in self.tier.scan()} == set(self.found)


TestDeviceSlots = DeviceSlots.TestCase
TestDeviceSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
