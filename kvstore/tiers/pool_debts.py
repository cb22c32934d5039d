"""What a pool is still to forget: namespaces that were given up while their server was away.

One thread, alive only while something is owed, waits for the server and asks again until all of it was gone through.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.page import Namespace

log = logging.getLogger(__name__)

_LOOK_S = 0.25
_BETWEEN_S = 0.25
"""Between two attempts with a server that answers and yet not all of it could be reached."""


class ForgetDebts:
    """Namespaces to forget. Thread-safe. ``wait_back`` waits so many seconds for the server, and tells whether it is
    there; ``forget`` tells whether all of a namespace is gone; both return within their deadlines and raise nothing."""

    def __init__(self, name: str, wait_back: Callable[[float], bool], forget: Callable[[Namespace], bool]) -> None:
        self._name = name
        self._wait_back = wait_back
        self._forget = forget
        self._lock = threading.Lock()
        self._owed: frozenset[Namespace] = frozenset()
        self._stopped = threading.Event()
        self._worker: threading.Thread | None = None

    @property
    def owed(self) -> frozenset[Namespace]:
        """Namespaces that are not gone yet."""
        return self._owed

    def owe(self, namespace: Namespace) -> None:
        """Forget a namespace as soon as it can be done."""
        log.warning("%s: cannot be reached whole; a namespace is forgotten in it when it can", self._name)
        with self._lock:
            self._owed |= {namespace}
            if self._worker is None and not self._stopped.is_set():
                self._worker = threading.Thread(target=self._work, name=f"{self._name} forgetting", daemon=True)
                self._worker.start()

    def close(self) -> None:
        """Stop; what is owed by now stays so, and is told. Idempotent."""
        with self._lock:
            first = not self._stopped.is_set()
            self._stopped.set()
            worker = self._worker
        if worker is not None:
            worker.join()
        if first and self._owed:
            log.error("%s: %d namespaces were not forgotten in it", self._name, len(self._owed))

    def _work(self) -> None:
        while not self._stopped.is_set():
            if not self._wait_back(_LOOK_S):
                continue
            for namespace in self._owed:
                if self._forget(namespace):
                    with self._lock:
                        self._owed -= {namespace}
            with self._lock:
                if not self._owed:
                    self._worker = None
                    log.warning("%s: what was to be forgotten in it is gone", self._name)
                    return
            self._stopped.wait(_BETWEEN_S)
