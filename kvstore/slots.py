"""Which page lies in which slot: the bookkeeping that the device, host and disk tiers share.

A tier's memory is cut once into equal slots. A slot is

* *free*: nobody's;
* *private*: handed out by ``allocate`` and not (or no longer) findable; free again when its last pin goes;
* *published*: findable under a key; evictable while nobody pins it.

Whoever touches a slot's bytes holds a pin on it, so a slot never changes hands under a reader or a writer. Not
thread-safe: the tier's lock guards it. Every method is O(1) amortised for each slot or key named.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import inf

from kvstore.page import Namespace, PageKey, PageMeta, key_fingerprint, page_key
from kvstore.policy import EvictionPolicy, PrefixLru


class SlotTable:
    """Slots, their pins and the keys under which they are found."""

    def __init__(
        self,
        slots: int,
        policy: EvictionPolicy[PageKey],
        quota_pages: Callable[[Namespace], int | None] = lambda _: None,
    ) -> None:
        """``quota_pages`` tells how many pages ``grant`` gives a namespace; ``None`` is without limit."""
        if slots < 0:
            raise ValueError(f"a tier cannot have {slots} slots")
        self.slots = slots
        self._policy = policy
        self._free = list(range(slots - 1, -1, -1))  # a stack; neighbours come out in rising order
        self._pins = [0] * slots
        self._entries: list[tuple[PageKey, PageMeta] | None] = [None] * slots
        self._slot_of: dict[PageKey, int] = {}  # in order of publication
        self._held: dict[PageKey, list[float]] = {}  # when pins by key end, soonest first; included in the slot's pins
        self._holds_end: list[tuple[float, PageKey]] = []  # a heap; also of pins that were released before
        self._expires: dict[PageKey, int] = {}  # only of pages that do
        self._quota_pages = quota_pages
        self._of: dict[Namespace, dict[PageKey, None]] = {}
        self._own_policies: dict[Namespace, EvictionPolicy[PageKey]] = {}  # beside the tier's, where there is a quota

    @property
    def free(self) -> int:
        """Slots that are nobody's."""
        return len(self._free)

    @property
    def evictable(self) -> int:
        """Published slots that nobody pins."""
        return len(self._policy)

    @property
    def has_holds(self) -> bool:
        """Whether any ``hold`` may end by itself."""
        return bool(self._holds_end)

    @property
    def published(self) -> int:
        """Slots that can be found."""
        return len(self._slot_of)

    def find(self, key: PageKey) -> int | None:
        """Return the slot of this page, untouched and unpinned."""
        return self._slot_of.get(key)

    def entry(self, slot: int) -> tuple[PageKey, PageMeta] | None:
        """Return what is published in this slot."""
        return self._entries[slot]

    def publication(self, key: PageKey) -> object | None:
        """Return a token of this page's present publication: the same object until it is removed."""
        slot = self._slot_of.get(key)
        return None if slot is None else self._entries[slot]

    def meta(self, slot: int) -> PageMeta:
        """Return what the page published in this slot says of its block."""
        return self._entry(slot)[1]

    def entries(self) -> list[tuple[PageKey, PageMeta]]:
        """Return every published page, oldest publication first (so parents come before what was built on them)."""
        return [entry for slot in self._slot_of.values() if (entry := self._entries[slot]) is not None]

    def allocate(self, count: int) -> tuple[list[int], list[PageKey]] | None:
        """Return ``count`` private slots, each pinned once, and the keys evicted for them; ``None`` if impossible."""
        if count > len(self._free) + len(self._policy):
            return None
        evicted = []
        while len(self._free) < count:
            victim = self._policy.victim()
            assert victim is not None, "the policy counts resting pages that it does not name"
            self.remove(victim)
            evicted.append(victim)
        slots = [self._free.pop() for _ in range(count)]
        for slot in slots:
            self._pins[slot] = 1
        return slots, evicted

    def grant(self, namespace: Namespace, count: int) -> tuple[int, list[PageKey]]:
        """Return how many of ``count`` new pages a namespace may have, and what it had to give up for them.

        What it holds stays within its quota; its own resting pages make room, those of others never.
        """
        quota = self._quota_pages(namespace)
        if quota is None:
            return count, []
        evicted: list[PageKey] = []
        held, own = self._of.get(namespace, {}), self._own_policies.get(namespace)
        while own is not None and len(held) + count > quota and (victim := own.victim()) is not None:
            self.remove(victim)
            evicted.append(victim)
        return max(0, min(count, quota - len(self._of.get(namespace, {})))), evicted

    def counts(self) -> dict[Namespace, int]:
        """Return how many pages each namespace has."""
        return {namespace: len(keys) for namespace, keys in self._of.items()}

    def keys_of(self, namespace: Namespace) -> list[PageKey]:
        """Return the pages of a namespace, oldest publication first."""
        return list(self._of.get(namespace, {}))

    def expires_at_s(self, key: PageKey) -> int:
        """Return when a page ends, 0 if it does not."""
        return self._expires.get(key, 0)

    def is_expired(self, key: PageKey, now_s: float) -> bool:
        """Tell whether a page has ended and is still here."""
        return bool(self._expires) and 0 < self._expires.get(key, 0) <= now_s

    @property
    def can_expire(self) -> bool:
        """Whether any page ends some time."""
        return bool(self._expires)

    def restore(self, pages: Iterable[tuple[int, PageKey, PageMeta, int]]) -> list[PageKey]:
        """Publish, unpinned, what a reopened medium holds; return the keys whose slot is taken or does not exist.

        For an empty table. The first page is the oldest.
        """
        assert len(self._free) == self.slots, "only an empty table can be restored"
        refused, restored = [], []
        for slot, key, meta, expires_at_s in pages:
            if not 0 <= slot < self.slots or self._pins[slot] or key in self._slot_of:
                refused.append(key)
                continue
            self._pins[slot] = 1
            self.publish(slot, key, meta, expires_at_s)
            restored.append(slot)
        self._free = [slot for slot in self._free if not self._pins[slot]]
        self.release(restored[::-1])
        return refused

    def publish(self, slot: int, key: PageKey, meta: PageMeta, expires_at_s: int = 0) -> bool:
        """Make a private, pinned slot findable; ``False`` if the key is taken, and the slot stays private."""
        assert self._pins[slot] > 0, f"slot {slot} is published by somebody who does not pin it"
        assert self._entries[slot] is None, f"slot {slot} is published twice"
        if key in self._slot_of:
            return False
        self._entries[slot] = (key, meta)
        self._slot_of[key] = slot
        if expires_at_s:
            self._expires[key] = expires_at_s
        parent = None if meta.parent is None else page_key(key_fingerprint(key), meta.parent)
        self._policy.add(key, parent)
        namespace = meta.namespace
        held = self._of.get(namespace)
        if held is None:
            held = self._of[namespace] = {}
            if self._quota_pages(namespace) is not None:
                self._own_policies[namespace] = PrefixLru()
        held[key] = None
        if self._own_policies and (own := self._own_policies.get(namespace)) is not None:
            own.add(key, parent)
        return True

    def acquire(self, keys: Sequence[PageKey], *, wanted: bool = True) -> list[int]:
        """Return the slots of the leading run of published keys, each pinned once; ``wanted`` counts it as a hit."""
        use = self._policy.use if wanted else self._policy.hold
        slots = []
        for key in keys:
            slot = self._slot_of.get(key)
            if slot is None:
                break
            self._pins[slot] += 1
            use(key)
            if self._own_policies:
                self._use_own(slot)
            slots.append(slot)
        return slots

    def retain(self, slots: Sequence[int]) -> None:
        """Add a pin to each; they are published, or pinned already."""
        for slot in slots:
            entry = self._entries[slot]
            assert entry is not None or self._pins[slot] > 0, f"slot {slot} is nobody's and cannot be retained"
            self._pins[slot] += 1
            if entry is not None:
                self._policy.hold(entry[0])
                if self._own_policies:
                    self._use_own(slot)

    def release(self, slots: Sequence[int]) -> None:
        """Take one pin from each, last first: a chain given front to back leaves its prefix the most recent."""
        for slot in reversed(slots):
            assert self._pins[slot] > 0, f"slot {slot} is released once too often"
            self._pins[slot] -= 1
            if self._pins[slot] == 0:
                entry = self._entries[slot]
                if entry is None:
                    self._free.append(slot)
                else:
                    self._policy.rest(entry[0])
                    if self._own_policies and (own := self._own_policies.get(entry[1].namespace)) is not None:
                        own.rest(entry[0])

    def retire(self, key: PageKey) -> None:
        """The page's run has ended: it goes first, if it rests."""
        if key in self._slot_of:
            self._policy.retire(key)

    def remove(self, key: PageKey) -> bool:
        """Make the page unfindable at once; its slot is free when its readers are done."""
        slot = self._slot_of.pop(key, None)
        if slot is None:
            return False
        self._policy.discard(key)
        self._expires.pop(key, None)
        namespace = self.meta(slot).namespace
        held = self._of[namespace]
        del held[key]
        if self._own_policies and (own := self._own_policies.get(namespace)) is not None:
            own.discard(key)
        if not held:
            del self._of[namespace]
            self._own_policies.pop(namespace, None)
        self._entries[slot] = None
        self._pins[slot] -= len(self._held.pop(key, ()))
        if self._pins[slot] == 0:
            self._free.append(slot)
        return True

    def _use_own(self, slot: int) -> None:
        own = self._own_policies.get(self.meta(slot).namespace)
        if own is not None:
            own.use(self._entry(slot)[0])

    def _entry(self, slot: int) -> tuple[PageKey, PageMeta]:
        entry = self._entries[slot]
        assert entry is not None, f"nothing is published in slot {slot}"
        return entry

    def hold(self, key: PageKey, until_s: float = inf) -> bool:
        """Pin a page by name; ``False`` if there is none. A removed page loses these pins with its name."""
        if not self.acquire([key], wanted=False):
            return False
        insort(self._held.setdefault(key, []), until_s)
        if until_s < inf:
            heappush(self._holds_end, (until_s, key))
        return True

    def unhold(self, key: PageKey, until_s: float | None = None) -> None:
        """Undo the ``hold`` that ends at ``until_s``, or else the one that would end first, so that no other ends
        before its time; nothing if there is none."""
        held = self._held.get(key)
        if held and (until_s is None or until_s in held):
            held.remove(held[0] if until_s is None else until_s)
            self._let_go(key, held)

    def end_holds(self, now_s: float) -> None:
        """End every ``hold`` whose time is up. O(1) while none is."""
        while self._holds_end and self._holds_end[0][0] <= now_s:
            until_s, key = heappop(self._holds_end)
            held = self._held.get(key)
            if held and held[0] <= until_s:
                del held[0]
                self._let_go(key, held)

    def _let_go(self, key: PageKey, held: list[float]) -> None:
        if not held:
            del self._held[key]
        self.release([self._slot_of[key]])

    def check(self) -> None:
        """Verify every invariant. O(slots)."""
        free = set(self._free)
        assert len(free) == len(self._free), "a slot is free twice"
        for slot, (pins, entry) in enumerate(zip(self._pins, self._entries, strict=True)):
            assert pins >= 0, f"slot {slot} has {pins} pins"
            assert (slot in free) == (pins == 0 and entry is None), f"slot {slot} is lost or given out twice"
            assert entry is None or self._slot_of.get(entry[0]) == slot, (
                f"slot {slot} is published under a name it lost"
            )
        assert sum(entry is not None for entry in self._entries) == len(self._slot_of), "a name points at no slot"
        resting = sum(self._pins[slot] == 0 for slot in self._slot_of.values())
        assert resting == len(self._policy), f"{resting} pages rest, the policy counts {len(self._policy)}"
        assert sum(map(len, self._of.values())) == len(self._slot_of), "a page is in no namespace, or in two"
        assert self._expires.keys() <= self._slot_of.keys(), "a page that is gone will expire"
        for namespace, own in self._own_policies.items():
            resting = sum(self._pins[self._slot_of[key]] == 0 for key in self._of[namespace])
            assert resting == len(own), f"{resting} pages of {namespace} rest, its policy counts {len(own)}"
        for key, held in self._held.items():
            assert 0 < len(held) <= self._pins[self._slot_of[key]], f"{len(held)} pins by name on fewer pins in all"

    def __iter__(self) -> Iterator[PageKey]:
        return iter(self._slot_of)
