"""A circuit breaker: a medium that failed is asked again by one background thread, never by those who want pages.

While it is *closed* the medium is used. A failure *trips* it: every caller gets an immediate miss, and a thread probes
the medium, less and less often, until a probe succeeds and closes it again. One log line for each change of state.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BreakerOptions:
    """How often an open breaker probes: after ``first_probe_s``, then at doubling intervals."""

    first_probe_s: float = 0.25
    longest_probe_s: float = 8.0


class Breaker:
    """Guards one medium. ``probe`` is called from the breaker's own thread, is bounded, and does not raise."""

    def __init__(self, name: str, probe: Callable[[], bool], options: BreakerOptions | None = None) -> None:
        self._name = name
        self._probe = probe
        self._options = options if options is not None else BreakerOptions()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._closed.set()
        self._stopped = threading.Event()
        self._prober: threading.Thread | None = None

    @property
    def closed(self) -> bool:
        """Whether the medium may be used."""
        return self._closed.is_set()

    def trip(self, reason: str) -> None:
        """Stop using the medium until a probe succeeds."""
        with self._lock:
            if not self._closed.is_set() or self._stopped.is_set():
                return
            self._closed.clear()
            log.warning("%s: out of use: %s", self._name, reason)
            self._prober = threading.Thread(target=self._probe_until_back, name=f"{self._name} probe", daemon=True)
            self._prober.start()

    def wait_closed(self, timeout_s: float) -> bool:
        """Wait until the medium may be used; ``False`` if that takes longer."""
        return self._closed.wait(timeout_s)

    def stop(self) -> None:
        """End probing for good. The breaker stays as it is."""
        with self._lock:
            self._stopped.set()
            prober = self._prober
        if prober is not None:
            prober.join()

    def _probe_until_back(self) -> None:
        wait_s = self._options.first_probe_s
        while not self._stopped.wait(wait_s):
            if self._probe():
                with self._lock:
                    self._closed.set()
                log.warning("%s: in use again", self._name)
                return
            wait_s = min(2 * wait_s, self._options.longest_probe_s)
