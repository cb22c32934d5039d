"""Moving pages between a device's memory and the host's: by the processor where it reaches them, else by streams.

A GPU computes behind the back of the thread that told it to, so a copy beside its computing has to be put in order
with it, twice. A page may be read once all is done that its publisher's stream had been given when it was published
(``order_reads``); a slot may be written once all is done that the last owner's stream had been given when it let go of
it (``order_writes``). Everything else is the store's: a slot is pinned while it is copied, and a copy is over when the
call returns, so what is read after it needs no further order.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvstore.codec import checksum
from kvstore.memory import ByteRows, copy_and_hash, copy_bytes
from kvstore.tiers.device_streams import SideStream, TorchStream, lock_pages

log = logging.getLogger(__name__)


class PageCopies(Protocol):
    """Copies of whole pages from and to the slots of one tensor. Thread-safe; raises for no fault of the device."""

    def view(self, slot: int) -> memoryview | None:
        """Return a slot's memory where the processor reaches it, else ``None``."""

    def order_reads(self) -> None:
        """Pages are read from now on only after what the calling thread's stream has been given so far."""

    def order_writes(self) -> None:
        """Pages are written from now on only after what the calling thread's stream has been given so far."""

    def read(self, slots: Sequence[int], out: Sequence[memoryview]) -> list[int] | None:
        """Copy each slot's page to the buffer beside it; return the xxh3_64 of what arrived.

        ``None`` when the device failed; the buffers' content is then unspecified.
        """

    def write(self, slots: Sequence[int], data: Sequence[memoryview]) -> bool:
        """Fill each slot from the buffer beside it; ``False`` when the device failed: their content is unspecified."""

    def lock(self, rows: ByteRows) -> None:
        """Make copies from and to this memory fast, if that can be done; it is kept until ``close``."""

    def close(self) -> None:
        """Let go of the memory that was locked. Nothing is copied any more. Idempotent."""


OpenCopies = Callable[[torch.Tensor], PageCopies]
"""Takes a tensor of shape (pages, page bytes), uint8, contiguous."""


def open_copies(pages: torch.Tensor) -> PageCopies:
    """Return the right way for the memory in which the pages lie."""
    return DirectCopies(pages) if pages.device.type == "cpu" else StreamCopies(pages)


class DirectCopies:
    """By the processor. What it has done is done, so there is nothing to put in order."""

    def __init__(self, pages: torch.Tensor) -> None:
        self._rows: ByteRows = pages.numpy()

    def view(self, slot: int) -> memoryview:
        """See ``PageCopies``."""
        return memoryview(self._rows[slot])

    def order_reads(self) -> None:
        """See ``PageCopies``."""

    def order_writes(self) -> None:
        """See ``PageCopies``."""

    def read(self, slots: Sequence[int], out: Sequence[memoryview]) -> list[int]:
        """See ``PageCopies``. One pass that copies and hashes."""
        return copy_and_hash(out, [memoryview(self._rows[slot]) for slot in slots])

    def write(self, slots: Sequence[int], data: Sequence[memoryview]) -> bool:
        """See ``PageCopies``."""
        for slot, one in zip(slots, data, strict=True):
            copy_bytes(self._rows[slot], one)
        return True

    def lock(self, rows: ByteRows) -> None:
        """See ``PageCopies``."""

    def close(self) -> None:
        """See ``PageCopies``."""


class StreamCopies:
    """By the device, on a stream for each direction, beside what the engine computes.

    The copies of a call are enqueued together and waited for once. From and to memory that is locked they cost the
    processor nothing but enqueuing; pages are hashed where they have arrived, in the host's memory.

    A copy that cannot be enqueued is one call's failure. A stream that cannot be put in order or waited for is the
    end: no copy is begun any more, since nothing would say what it finds. CUDA fails so when its context has ended, and
    then no copy is under way either.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        *,
        open_stream: Callable[[torch.device], SideStream] = TorchStream,
        lock_pages: Callable[[ByteRows, torch.device], Callable[[], object] | None] = lock_pages,
    ) -> None:
        self._pages = pages
        self._out, self._in = open_stream(pages.device), open_stream(pages.device)
        self._lock_pages = lock_pages
        self._locked: list[tuple[ByteRows, Callable[[], object]]] = []  # the memory has to outlive its lock
        self._is_lost = self._is_failing = False
        self.order_reads()  # after whatever has made the tensor
        self.order_writes()

    def view(self, slot: int) -> None:
        """See ``PageCopies``."""

    def order_reads(self) -> None:
        """See ``PageCopies``."""
        self._succeeds(self._out.follow, is_vital=True)

    def order_writes(self) -> None:
        """See ``PageCopies``."""
        self._succeeds(self._in.follow, is_vital=True)

    def read(self, slots: Sequence[int], out: Sequence[memoryview]) -> list[int] | None:
        """See ``PageCopies``."""
        copies = [(_tensor(buffer), self._pages[slot]) for slot, buffer in zip(slots, out, strict=True)]
        return [checksum(buffer) for buffer in out] if self._copy(self._out, copies) else None

    def write(self, slots: Sequence[int], data: Sequence[memoryview]) -> bool:
        """See ``PageCopies``."""
        return self._copy(
            self._in, [(self._pages[slot], _tensor(buffer)) for slot, buffer in zip(slots, data, strict=True)]
        )

    def lock(self, rows: ByteRows) -> None:
        """See ``PageCopies``."""
        unlock = self._lock_pages(rows, self._pages.device)
        if unlock is not None:
            self._locked.append((rows, unlock))

    def close(self) -> None:
        """See ``PageCopies``."""
        self._is_lost = True
        while self._locked:
            _, unlock = self._locked.pop()
            unlock()

    def _copy(self, stream: SideStream, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Make copies, each (target, source); ``False`` if not all were made. None is under way afterwards."""

        def enqueue() -> None:
            with stream.enqueuing():
                for target, source in copies:
                    target.copy_(source, non_blocking=True)

        if self._is_lost:
            return False
        is_enqueued = self._succeeds(enqueue)
        is_over = self._succeeds(stream.wait, is_vital=True)  # also of those before the one that failed
        if is_enqueued and is_over:
            self._is_failing = False
        return is_enqueued and is_over

    def _succeeds(self, step: Callable[[], None], *, is_vital: bool = False) -> bool:
        """Do it; ``False`` if the device fails, which is logged once until copies are made again."""
        try:
            step()
        except RuntimeError as error:  # torch's, for every CUDA error
            if not self._is_failing:
                log.error("pages cannot be copied from or to %s: %s", self._pages.device, error)
            self._is_failing = True
            self._is_lost |= is_vital
            return False
        return True


def _tensor(buffer: memoryview) -> torch.Tensor:
    """Return a buffer as a tensor of bytes; one that may only be read as a copy, since torch knows no such tensors."""
    data = np.frombuffer(buffer, dtype=np.uint8)
    return torch.from_numpy(data if data.flags.writeable else data.copy())
