"""What of a device moves pages beside its computing: a stream of its own, and host memory locked for it.

Every call to CUDA that the store makes is in this file. On CPU tensors ``torch.cpu`` stands for ``torch.cuda``: its
streams do nothing, since a copy is done when it returns, and so what is built on them runs there as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from kvstore.memory import ByteRows

log = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device, whichever thread asked


class SideStream(Protocol):
    """Copies that a device makes in their order, beside what its other streams do. Thread-safe.

    Its methods raise ``RuntimeError``, torch's, when the device fails.
    """

    def follow(self) -> None:
        """What is enqueued from now on begins after all that the calling thread's current stream has been given."""

    def enqueuing(self) -> AbstractContextManager[object]:
        """Copies that this thread begins in here belong to the stream."""

    def wait(self) -> None:
        """Return when all that was enqueued so far is done, without the interpreter's lock and without spinning."""


class TorchStream:
    """A stream of ``torch.cuda``, or of ``torch.cpu``. Satisfies ``SideStream``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = getattr(torch, device.type)  # torch.cuda, torch.cpu
        on_cuda = device.type == "cuda"
        self._stream = self._module.Stream(device=device) if on_cuda else self._module.Stream()
        self._event_options = {"blocking": True} if on_cuda else {}

    def follow(self) -> None:
        """See ``SideStream``. An event recorded there and waited for here: some microseconds, nothing waits."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def enqueuing(self) -> AbstractContextManager[object]:
        """See ``SideStream``."""
        entered: AbstractContextManager[object] = self._module.stream(self._stream)
        return entered

    def wait(self) -> None:
        """See ``SideStream``."""
        done = self._module.Event(**self._event_options)
        done.record(self._stream)
        done.synchronize()


def lock_pages(rows: ByteRows, device: torch.device) -> Callable[[], object] | None:
    """Page-lock host memory, so that a CUDA device reads and writes it by itself; return what unlocks it.

    ``None`` where the device needs no such thing, and, with one line in the log, where it refuses: copies then go
    through the driver's own memory, slower and as right. The memory must outlive the lock.
    """
    if device.type != "cuda" or not rows.nbytes:
        return None
    address, cudart = rows.ctypes.data, torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def in_its_own_thread(call: Callable[[], object]) -> int:
        # CUDA keeps a refusal as the last error of the thread that asked, and torch raises that at the thread's next
        # kernel, whatever that is. So the thread that asks does nothing else.
        def asking() -> object:
            with torch.cuda.device(device):
                return call()

        with ThreadPoolExecutor(1) as thread:
            return int(thread.submit(asking).result())  # type: ignore[call-overload, no-any-return]

    code = in_its_own_thread(lambda: cudart.cudaHostRegister(address, rows.nbytes, _PORTABLE))
    if code:
        log.warning("%d bytes of host memory stay pageable: CUDA error %d when locking them", rows.nbytes, code)
        return None

    return lambda: in_its_own_thread(lambda: cudart.cudaHostUnregister(address))
