"""The compiled loops against the same in Python: copies, hashes, and many requests to a file at once."""

from __future__ import annotations

import errno
import gc
import mmap
import os
import random
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvstore import memory
from kvstore.memory import copy_and_hash, page_rows
from kvstore.tiers import page_io as page_io_module
from kvstore.tiers.page_io import LATE, KernelQueue, PageIO, Run, ThreadedIO, neighbours, page_io

PAGE = 4096
LATER_S = time.monotonic() + 3600


@pytest.mark.parametrize("length", [1, 240, 241, 255, 1023, 1024, 1025, 1087, 1088, 1089, 4096, 100_001])
@pytest.mark.parametrize("shift", [0, 1])
def test_a_copy_is_hashed_as_the_library_hashes_it(length: int, shift: int) -> None:
    source = random.Random(length).randbytes(length + shift)
    target = bytearray(length + shift + 1)
    sums = copy_and_hash([memoryview(target)[shift : shift + length]], [memoryview(source)[shift:]])
    assert sums == [xxhash.xxh3_64_intdigest(source[shift:])]
    assert target[shift : shift + length] == source[shift:]
    assert target[shift + length] == 0


def test_what_does_not_fit_is_refused() -> None:
    page, other = memoryview(bytearray(PAGE)), memoryview(bytearray(2 * PAGE))
    for targets, sources in [([page], [other]), ([page, page], [other]), ([], [other])]:
        with pytest.raises(ValueError, match=r"."):
            copy_and_hash(targets, sources)


def test_without_a_compiler_pages_are_copied_and_hashed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_compiled", None)
    source, target = random.Random(1).randbytes(PAGE), bytearray(PAGE)
    assert copy_and_hash([memoryview(target)], [memoryview(source)]) == [xxhash.xxh3_64_intdigest(source)]
    assert target == source


@pytest.fixture(params=["kernel", "threads"])
def io(request: pytest.FixtureRequest) -> Iterator[PageIO]:
    made: PageIO = KernelQueue(4) if request.param == "kernel" else ThreadedIO(2)
    yield made
    made.close()


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield fd
    os.close(fd)


def move(
    io: PageIO, fd: int, runs: list[Run], *, write: bool, direct_fd: int | None = None, deadline_s: float = LATER_S
) -> list[tuple[int, list[int]]]:
    moved = io.move(runs, fd=fd, direct_fd=direct_fd, write=write, deadline_s=deadline_s)
    return [(one.result, list(one.sums)) for one in moved]


def test_what_is_written_is_read_with_its_hashes(io: PageIO, file: int, tmp_path: Path) -> None:
    data = page_rows(12, PAGE)
    data[:] = [[i + 1] * PAGE for i in range(12)]
    rows = [memoryview(row) for row in data]
    direct_fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    runs = [Run(PAGE * first, rows[first : first + 3]) for first in (9, 0, 3, 6)]
    assert [result for result, _ in move(io, file, runs, write=True, direct_fd=direct_fd)] == [3 * PAGE] * 4
    out = [memoryview(row) for row in page_rows(12, PAGE)]
    back = [
        Run(PAGE * first, out[first : first + 2]) for first in range(0, 12, 2)
    ]  # more runs than may be on their way
    answers = move(io, file, back, write=False, direct_fd=direct_fd)
    sums = [xxhash.xxh3_64_intdigest(row) for row in rows]
    assert answers == [(2 * PAGE, sums[first : first + 2]) for first in range(0, 12, 2)]
    assert [bytes(row) for row in out] == [bytes(row) for row in rows]
    unaligned = memoryview(bytearray(PAGE + 1))[1:]
    assert move(io, file, [Run(0, [unaligned])], write=False, direct_fd=direct_fd) == [(PAGE, sums[:1])]
    os.close(direct_fd)


def foreign(pages: int) -> list[memoryview]:
    """Return pages of memory that is nobody's here, aligned."""
    area = memoryview(mmap.mmap(-1, pages * PAGE))
    return [area[at : at + PAGE] for at in range(0, len(area), PAGE)]


@given(st.data())
def test_what_is_somebody_elses_goes_by_way_of_our_memory_and_arrives(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=12), label="pages of runs")
    places, depth = data.draw(st.integers(0, 12), label="pages of the dock"), data.draw(st.integers(1, 4))
    cut = data.draw(st.integers(0, sum(lengths)), label="pages that there are")
    with tempfile.TemporaryDirectory() as folder:
        io = KernelQueue(depth, max(places * PAGE, 1))
        path = Path(folder) / "file"
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        direct_fd = os.open(path, os.O_RDWR | os.O_DIRECT)
        rows, out = foreign(sum(lengths)), foreign(sum(lengths))
        for number, row in enumerate(rows):
            row[:] = bytes([number + 1]) * PAGE
        firsts = [sum(lengths[:at]) for at in range(len(lengths))]
        runs = list(zip(firsts, lengths, strict=True))
        written = [Run(PAGE * first, rows[first : first + count]) for first, count in runs]
        assert [r for r, _ in move(io, fd, written, write=True, direct_fd=direct_fd)] == [PAGE * n for n in lengths]
        os.ftruncate(fd, cut * PAGE)
        random.Random(places).shuffle(runs)
        read = [Run(PAGE * first, out[first : first + count]) for first, count in runs]
        answers = move(io, fd, read, write=False, direct_fd=direct_fd)
        for (first, count), (result, sums) in zip(runs, answers, strict=True):
            whole = max(0, min(cut - first, count))
            assert result == whole * PAGE
            assert sums[:whole] == [xxhash.xxh3_64_intdigest(row) for row in rows[first : first + whole]]
            assert out[first : first + whole] == rows[first : first + whole]
            assert all(not any(row) for row in out[first + whole : first + count])
        os.close(fd)
        os.close(direct_fd)


def test_only_one_caller_goes_by_way_of_our_memory_and_the_others_without(file: int, tmp_path: Path) -> None:
    os.pwrite(file, b"".join(bytes([number]) * PAGE for number in range(64)), 0)
    direct_fd = os.open(tmp_path / "file", os.O_RDWR | os.O_DIRECT)
    io, seen = KernelQueue(4), list[bool]()

    def read(number: int) -> None:
        for _ in range(20):
            out = foreign(8)
            runs = [Run(PAGE * (8 * number + at), [out[at]]) for at in range(8)]
            answers = move(io, file, runs, write=False, direct_fd=direct_fd)
            seen.append(answers == [(PAGE, [xxhash.xxh3_64_intdigest(row)]) for row in out])
            assert [row[0] for row in out] == [8 * number + at for at in range(8)]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(read, range(8)))
    assert seen == [True] * 160
    os.close(direct_fd)


def test_own_memory_is_known_as_long_as_it_is_there() -> None:
    rows = page_rows(3, PAGE)
    inside, address = memoryview(rows[1]), rows.ctypes.data
    assert memory.is_own(inside)
    assert not memory.is_own(foreign(1)[0])
    del rows, inside
    gc.collect()
    assert not memory._areas.holds(address)


def test_a_run_past_the_end_is_short_and_one_that_fails_says_why(io: PageIO, file: int, tmp_path: Path) -> None:
    os.pwrite(file, b"x" * (PAGE + 10), 0)
    out = [memoryview(bytearray(PAGE)) for _ in range(2)]
    ((result, sums),) = move(io, file, [Run(0, out)], write=False)
    assert (result, sums[0]) == (PAGE + 10, xxhash.xxh3_64_intdigest(b"x" * PAGE))
    read_only = os.open(tmp_path / "file", os.O_RDONLY)
    failed = move(io, read_only, [Run(0, out[:1]), Run(0, out[1:])], write=True)
    assert [result for result, _ in failed] == [-errno.EBADF] * 2
    os.close(read_only)


def test_after_the_deadline_nothing_is_begun(io: PageIO, file: int) -> None:
    os.pwrite(file, b"x" * PAGE, 0)
    out = bytearray(PAGE)
    moved = move(io, file, [Run(0, [memoryview(out)])], write=False, deadline_s=time.monotonic() - 1)
    assert [result for result, _ in moved] == [LATE]
    assert out == bytes(PAGE)


def test_no_runs_are_no_work(io: PageIO, file: int) -> None:
    assert move(io, file, [], write=False) == []


def test_threads_stand_in_where_the_kernel_has_no_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(depth: int) -> object:
        raise OSError(errno.EAGAIN, "no queue")

    monkeypatch.setattr(page_io_module._pages, "queue", refused)
    made = page_io(PAGE, 8)
    assert isinstance(made, ThreadedIO)
    made.close()
    monkeypatch.setattr(page_io_module, "_pages", None)
    page_io(PAGE, 8).close()


def test_runs_are_of_neighbours_and_bounded() -> None:
    assert list(neighbours([3, 9, 4, 5, 0, 6], page_bytes=PAGE, run_bytes=3 * PAGE)) == [[4], [0, 2, 3], [5], [1]]
    assert list(neighbours([1, 2], page_bytes=PAGE, run_bytes=1)) == [[0], [1]]
