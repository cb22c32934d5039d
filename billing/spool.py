"""The journal files of a running ledger, and what each still has to be kept for.

As long as the database keeps up, every row is in a file and in memory, and a file goes when it is full and the database
holds all of it. When too many rows wait in memory, further ones are *spilled*: they are in files only, until the writer
has caught up and reads them back. So a database that is away for hours costs disk, not memory, and loses nothing.

The file being written to moves on, when it is full or the mode changes, to one of three places: ``sealed`` (all its
rows are committed or in the group being committed), ``waiting`` (all are committed or in memory), ``backlog`` (its rows
are nowhere else). Requests that were admitted and have no row yet are repeated at the head of the next file.

Nothing here takes a lock: the ledger's is held, but for ``prepare_spare``.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections import deque
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from billing.journal import Segment

log = logging.getLogger("keepwarm.billing.ledger")


class Spool:
    """The files of one writer. Every method that may write raises ``OSError``."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.directory = directory
        self.writer_id = uuid.uuid4().hex
        self.is_spilling = False
        self.spilled_rows = 0
        self._segment_bytes = segment_bytes
        self._serials = count(1)
        self._current = self._new()
        self._spare: Segment | None = None  # the next file, made before it is needed
        self._sealed: list[Segment] = []
        self._waiting: list[Segment] = []
        self._backlog: deque[tuple[Segment, int]] = deque()  # with the number of its rows
        self._backlog_bytes = 0
        self._rows_here = 0  # spilled rows in the current file
        self._admitted: dict[str, bytes] = {}  # the records of requests that have no row yet
        self._carried_bytes = 0  # of those, what the current file began with

    @property
    def spilled_bytes(self) -> int:
        """What is on disk and nowhere else."""
        return self._backlog_bytes + (self._current.size_bytes if self.is_spilling else 0)

    @property
    def has_admitted(self) -> bool:
        """Whether requests are under way that have no row yet."""
        return bool(self._admitted)

    def admit(self, request_id: str, payload: bytes) -> None:
        """Write that a request was admitted."""
        self._admitted[request_id] = payload
        self._current.append(payload)

    def refused(self, request_id: str) -> None:
        """Forget an admission that could not be written: nobody was let in."""
        del self._admitted[request_id]

    def append(self, request_id: str, payload: bytes) -> None:
        """Write a row that is kept in memory as well."""
        self._admitted.pop(request_id, None)
        self._current.append(payload)

    def spill(self, request_id: str, payload: bytes) -> None:
        """Write a row that is kept nowhere else."""
        if not self.is_spilling:
            self._waiting.append(self._turn())
            self.is_spilling = True
        elif self._is_full():
            self._to_backlog(self._turn())
        self._current.append(payload)
        self._admitted.pop(request_id, None)
        self._rows_here += 1
        self.spilled_rows += 1

    def all_taken(self) -> None:
        """Memory holds no row but those of the group that is being committed: let go of full files after it."""
        self._sealed += self._waiting
        self._waiting = []
        if not self.is_spilling and self._spare is not None and self._is_full():
            self._sealed.append(self._turn())

    def take_sealed(self) -> list[Segment]:
        """Return the files that may go now that the group is committed."""
        done, self._sealed = self._sealed, []
        return done

    def oldest_spilled(self) -> tuple[Segment, int] | None:
        """Return the file that is to be read back next and how many rows it should hold; rows that come from now on are
        kept in memory again when it is the last."""
        if not self._backlog and self.is_spilling:
            self._to_backlog(self._turn())
            self.is_spilling = False
        return self._backlog[0] if self._backlog else None

    def drop_oldest_spilled(self) -> None:
        """Forget that file: the database holds its rows."""
        segment, rows = self._backlog.popleft()
        self._backlog_bytes -= segment.size_bytes
        self.spilled_rows -= rows

    def prepare_spare(self, lock: threading.Lock) -> None:
        """Make the next file when this one is full, outside the lock: a slow disk keeps nobody waiting."""
        if self._spare is not None or not self._is_full():
            return
        try:
            made = self._new()
            with lock:
                if self._spare is None and made.serial > self._current.serial:
                    self._spare = made
                    return
            made.remove()  # somebody needed the next file meanwhile and made one: files are read in their order
        except OSError as error:
            log.error("journal %s: no new file: %s", self.directory, error)

    def close(self, done: Sequence[Segment], *, keep: bool) -> None:
        """Leave the files, those that are done with among them, for whoever opens the ledger next, or remove them."""
        for segment in (
            *done,
            *self._sealed,
            *self._waiting,
            *(segment for segment, _ in self._backlog),
            self._current,
            self._spare,
        ):
            if segment is not None:
                if keep:
                    segment.close()
                else:
                    segment.remove()

    def _is_full(self) -> bool:
        return self._current.size_bytes - self._carried_bytes >= self._segment_bytes

    def _new(self) -> Segment:
        return Segment(self.directory, self.writer_id, next(self._serials))

    def _turn(self) -> Segment:
        """Begin the next file with what the last one still has to be kept for; return the last one."""
        following, self._spare = self._spare or self._new(), None
        try:
            for payload in self._admitted.values():
                following.append(payload)
        except OSError:
            following.remove()  # a disk may be full for long, and each try would leave a file open
            raise
        self._carried_bytes = following.size_bytes
        last, self._current = self._current, following
        return last

    def _to_backlog(self, segment: Segment) -> None:
        self._backlog.append((segment, self._rows_here))
        self._rows_here = 0
        self._backlog_bytes += segment.size_bytes
