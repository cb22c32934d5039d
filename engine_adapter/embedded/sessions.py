"""Which pages the runs that gateways name were computed in, so that a run's end can free what was its alone."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvstore.page import PageKey

MAX_PAGES = 1 << 18
"""Over all sessions; beyond it the one that is idle longest is forgotten, and its pages age like any other's."""


class SessionPages:
    """Pages by session. Used from the engine's thread alone."""

    def __init__(self, max_pages: int = MAX_PAGES) -> None:
        self._max_pages, self._pages = max_pages, 0
        self._sessions: OrderedDict[str, dict[PageKey, None]] = OrderedDict()
        self._users: Counter[PageKey] = Counter()  # sessions, by page

    def used(self, session: str, keys: Sequence[PageKey]) -> None:
        """A request of the session has these pages, prefix first."""
        own = self._sessions.setdefault(session, {})
        self._sessions.move_to_end(session)
        new = [key for key in keys if key not in own]
        own.update(dict.fromkeys(new))
        self._users.update(new)
        self._pages += len(new)
        while self._pages > self._max_pages and len(self._sessions) > 1:
            self._forget(next(iter(self._sessions)))

    def close(self, session: str) -> list[PageKey]:
        """Return the pages that no other session has used, suffix first; none of a session that is not known."""
        return self._forget(session) if session in self._sessions else []

    def _forget(self, session: str) -> list[PageKey]:
        own = self._sessions.pop(session)
        self._pages -= len(own)
        self._users.subtract(own.keys())
        private = [key for key in reversed(own) if not self._users[key]]
        for key in private:
            del self._users[key]
        return private
