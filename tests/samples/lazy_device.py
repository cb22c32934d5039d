"""A device that does nothing before it must; it stands for a GPU where there is none.

A GPU may put off whatever its streams are given for as long as nobody waits for it, and then need do only that which
the waiting needs. This one always does so: work runs when it is waited for, with what was put in front of it, and not
before. What is not put in order with it is thus seen to be out of order, each time and not once in a thousand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Work = Callable[[], object]


class LazyDevice:
    """CPU tensors, and streams that put off. ``log`` tells in which order things were begun and done."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.gate = threading.Event()  # waiting passes it
        self.gate.set()
        self.is_waited_for = threading.Event()
        self.faults: set[str] = set()  # of "follow", "copy", "wait": what fails, as CUDA's errors do
        self._lock = threading.RLock()
        self._names = iter(("out", "in"))
        self.engine = LazyStream(self, "engine", self._lock)  # every thread's current stream

    def open_stream(self, device: torch.device) -> LazyStream:
        """Return a side stream: the first is that of ``StreamCopies`` for reading pages, the second for writing."""
        return LazyStream(self, next(self._names), self._lock)

    def fail(self, what: str) -> None:
        """Raise as torch does, if this is to fail."""
        if what in self.faults:
            raise RuntimeError(f"CUDA error: {what} failed")


class LazyStream:
    """Work in its order. Satisfies ``SideStream``."""

    def __init__(self, device: LazyDevice, name: str, lock: threading.RLock) -> None:
        self.device, self.name = device, name
        self._lock, self._work, self._done = lock, list[Work](), 0

    def give(self, work: Work) -> None:
        """Enqueue anything, as an engine does with its kernels."""
        with self._lock:
            self._work.append(work)

    def follow(self) -> None:
        self.device.fail("follow")
        engine = self.device.engine
        with self._lock:
            given = len(engine._work)
            self._work.append(lambda: engine._run(given))
            self.device.log.append(f"{self.name} follows {engine.name}")

    @contextmanager
    def enqueuing(self) -> Iterator[None]:
        with _PuttingOff(self):
            yield

    def wait(self) -> None:
        self.device.is_waited_for.set()
        self.device.gate.wait()
        self.device.fail("wait")
        with self._lock:
            self._run(len(self._work))
            self.device.log.append(f"{self.name} is over")

    def _run(self, until: int) -> None:
        while self._done < until:
            self._done += 1
            self._work[self._done - 1]()


class _PuttingOff(TorchDispatchMode):
    """Copies that may be made later are."""

    def __init__(self, stream: LazyStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        is_copy = func is torch.ops.aten.copy_.default
        if not is_copy or not (args[2] if len(args) > 2 else (kwargs or {}).get("non_blocking")):
            return func(*args, **(kwargs or {}))
        stream, device, (target, source) = self._stream, self._stream.device, args[:2]
        device.fail("copy")
        device.log.append(f"{stream.name} is given a copy")

        def copy() -> None:
            target.copy_(source)
            device.log.append(f"{stream.name} copies")

        stream.give(copy)
        return target
