"""ARC: what was wanted once against what was wanted again, with the share of each learned from what was let go.

Source: Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003.
"""

from __future__ import annotations

from collections import OrderedDict

from kvstore.policies.lineage import PrefixPolicy
from kvstore.policy import KeyT


class Arc(PrefixPolicy[KeyT]):
    """See the module. The cache's size is what is present: it is full whenever somebody asks for a victim."""

    def __init__(self) -> None:
        super().__init__()
        self._again: dict[KeyT, bool] = {}  # of every page present: whether it was wanted again
        self._again_pages = 0
        self._resting_once: OrderedDict[KeyT, None] = OrderedDict()  # least recent first
        self._resting_again: OrderedDict[KeyT, None] = OrderedDict()
        self._gone_once: OrderedDict[KeyT, None] = OrderedDict()  # names only
        self._gone_again: OrderedDict[KeyT, None] = OrderedDict()
        self._once_target = 0.0  # pages

    def _arrive(self, key: KeyT, parent: KeyT | None) -> None:
        once, again = len(self._gone_once), len(self._gone_again)
        returns = True
        if key in self._gone_once:
            self._once_target = min(len(self._again) + 1.0, self._once_target + max(1.0, again / once))
            del self._gone_once[key]
        elif key in self._gone_again:
            self._once_target = max(0.0, self._once_target - max(1.0, once / again))
            del self._gone_again[key]
        else:
            returns = False
        self._again[key] = returns
        self._again_pages += returns

    def _hit(self, key: KeyT) -> None:
        self._again_pages += not self._again[key]
        self._again[key] = True

    def _enter(self, key: KeyT) -> None:
        (self._resting_again if self._again[key] else self._resting_once)[key] = None

    def _leave(self, key: KeyT) -> None:
        self._pass_over(key)

    def _pass_over(self, key: KeyT) -> None:
        self._resting_once.pop(key, None)
        self._resting_again.pop(key, None)

    def _depart(self, key: KeyT) -> None:
        self._pass_over(key)
        again = self._again.pop(key)
        self._again_pages -= again
        gone = self._gone_again if again else self._gone_once
        gone[key] = None
        while len(gone) > max(1, len(self._again)):
            gone.popitem(last=False)

    def _candidate(self) -> KeyT | None:
        once_pages = len(self._again) - self._again_pages
        if self._resting_once and (once_pages > self._once_target or not self._resting_again):
            return next(iter(self._resting_once))
        return next(iter(self._resting_again), None)
