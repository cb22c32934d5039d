"""What can happen to a disk tier: nothing that it hands out is ever wrong."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import lmdb
import pytest

from kvstore import codec
from kvstore.breaker import BreakerOptions
from kvstore.deadline import Allowance
from kvstore.errors import MediumError, MediumInUse
from kvstore.page import PageKey, PageLayout
from kvstore.tiers import slab_index
from kvstore.tiers.disk import DiskOptions, DiskTier
from tests.samples.disk_writer import STAGES, batch_pages
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data, strangers

SLOTS = 8
HEADER_BYTES = 4096
EAGER = DiskOptions(read_s=Allowance(60.0), breaker=BreakerOptions(first_probe_s=0.0, longest_probe_s=0.01))
PATIENT = DiskOptions(read_s=Allowance(60.0), breaker=BreakerOptions(first_probe_s=3600.0))


@contextmanager
def opened(
    folder: Path, *, slots: int = SLOTS, layout: PageLayout = LAYOUT, options: DiskOptions = PATIENT
) -> Iterator[DiskTier]:
    tier = DiskTier(layout, folder, capacity_bytes=slots * layout.page_bytes, options=options)
    try:
        yield tier
        tier.check()
    finally:
        tier.close()


def reads(tier: DiskTier, keys: list[PageKey]) -> list[bytes | None]:
    out = buffers(len(keys))
    return [bytes(b) if found is not None else None for b, found in zip(out, tier.get(keys, out), strict=True)]


PAGES = chain(SLOTS)
KEYS = [key for key, _ in PAGES]
RIGHT = [page_data(key) for key in KEYS]


def fill(folder: Path) -> None:
    with opened(folder) as tier:
        assert all(tier.put([page(entry) for entry in PAGES]))


def flip(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x10]))


def test_pages_outlive_their_process(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == RIGHT
        assert list(tier.scan()) == PAGES
        assert tier.stats().alarms == {}


def test_the_oldest_page_is_still_the_oldest_after_reopening(tmp_path: Path) -> None:
    pages = strangers(SLOTS)
    with opened(tmp_path) as tier:
        for entry in pages:
            tier.put([page(entry)])
    with opened(tmp_path) as tier:
        tier.put([page(entry) for entry in strangers(2, first_token=500)])
        assert tier.exists([key for key, _ in pages]) == [False] * 2 + [True] * (SLOTS - 2)


def test_a_tier_can_grow_and_shrink(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path, slots=2 * SLOTS) as tier:
        assert reads(tier, KEYS) == RIGHT
    with opened(tmp_path, slots=SLOTS // 2) as tier:
        assert sum(tier.exists(KEYS)) == SLOTS // 2
        assert [read for read in reads(tier, KEYS) if read not in (None, *RIGHT)] == []
        assert tier.stats().alarms == {}
        assert (tmp_path / "pages.slab").stat().st_size == HEADER_BYTES + SLOTS // 2 * LAYOUT.page_bytes


def test_a_folder_has_one_owner(tmp_path: Path) -> None:
    with opened(tmp_path), pytest.raises(MediumInUse, match="another process"):
        DiskTier(LAYOUT, tmp_path, capacity_bytes=LAYOUT.page_bytes)
    with opened(tmp_path) as tier:
        assert tier.put([page(PAGES[0])]) == [True]


def test_what_cannot_be_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(MediumError, match="disk tier"):
        DiskTier(LAYOUT, tmp_path / "file", capacity_bytes=LAYOUT.page_bytes)


def test_space_that_is_not_there_is_refused_and_the_folder_is_free_again(tmp_path: Path) -> None:
    huge_pages = replace(LAYOUT, page_tokens=1 << 20)
    with pytest.raises(MediumError, match=r"pages\.slab.*free"):
        DiskTier(huge_pages, tmp_path, capacity_bytes=2 * shutil.disk_usage(tmp_path).total)
    assert (tmp_path / "pages.slab").stat().st_size <= HEADER_BYTES
    with opened(tmp_path) as tier:
        assert tier.put([page(PAGES[0])]) == [True]


@pytest.mark.parametrize("while_open", [True, False])
def test_any_flipped_bit_of_the_pages_is_a_miss(tmp_path: Path, while_open: bool) -> None:
    fill(tmp_path)
    slab = tmp_path / "pages.slab"
    damaged = [slab.read_bytes().index(RIGHT[i]) + at for i, at in [(1, 0), (4, 2000), (6, LAYOUT.page_bytes - 1)]]
    if not while_open:
        for place in damaged:
            flip(slab, place)
    with opened(tmp_path) as tier:
        if while_open:
            for place in damaged:
                flip(slab, place)
        expected = [None if i in (1, 4, 6) else data for i, data in enumerate(RIGHT)]
        assert reads(tier, KEYS) == expected
        assert tier.stats().alarms == {"checksum": 3}
        assert reads(tier, KEYS) == expected
        assert tier.stats().misses == {"checksum": 3, "absent": 3}
        assert tier.breaker.closed
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == expected
        assert tier.stats().alarms == {}


def test_a_flipped_bit_of_a_record_costs_that_page(tmp_path: Path) -> None:
    fill(tmp_path)
    index = tmp_path / "index" / "data.mdb"
    flip(index, index.read_bytes().rindex(KEYS[3]))
    with opened(tmp_path) as tier:
        assert [read for read in reads(tier, KEYS) if read not in (None, *RIGHT)] == []
        assert reads(tier, KEYS).count(None) == 1
        assert sum(tier.stats().alarms.values()) == 1


def test_an_index_that_cannot_be_read_starts_anew(tmp_path: Path) -> None:
    fill(tmp_path)
    index = tmp_path / "index" / "data.mdb"
    index.write_bytes(b"\xff" * index.stat().st_size)
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms == {"index": 1}
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


@pytest.mark.parametrize("lost_bytes", [1, 5000, 20_000], ids="{} lost".format)
def test_an_index_that_was_cut_starts_anew_and_kills_nobody(tmp_path: Path, lost_bytes: int) -> None:
    """LMDB reads by its map: a look past the file's end would end the process, here the one that runs the tests."""
    fill(tmp_path)
    index = tmp_path / "index" / "data.mdb"
    content = len(index.read_bytes().rstrip(b"\0"))
    os.truncate(index, max(content - lost_bytes, 2 * os.sysconf("SC_PAGE_SIZE")))
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms == {"index": 1}
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == RIGHT


def test_an_index_whose_pages_are_damaged_starts_anew(tmp_path: Path) -> None:
    fill(tmp_path)
    index = tmp_path / "index" / "data.mdb"
    data = index.read_bytes()
    metas = 2 * os.sysconf("SC_PAGE_SIZE")
    index.write_bytes(data[:metas] + b"\xff" * (len(data) - metas))
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms == {"index": 1}
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


@pytest.mark.parametrize("is_empty", [True, False], ids=["empty", "gone"])
def test_an_index_that_is_lost_is_told(tmp_path: Path, is_empty: bool) -> None:
    fill(tmp_path)
    index = tmp_path / "index" / "data.mdb"
    os.truncate(index, 0) if is_empty else index.unlink()
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms == {"index": 1}
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


def test_an_index_that_the_system_cannot_open_now_is_kept_for_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        error = lmdb.Error("Too many open files")
        error.code = errno.EMFILE
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(lmdb, "open", refuse)
        with pytest.raises(MediumError, match="Too many open files"), opened(tmp_path):
            pass
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == RIGHT


@pytest.mark.parametrize("kept_bytes", [HEADER_BYTES + 3 * LAYOUT.page_bytes + 100, HEADER_BYTES, 100, 0])
def test_a_slab_that_was_cut_serves_what_is_left(tmp_path: Path, kept_bytes: int) -> None:
    fill(tmp_path)
    slab = tmp_path / "pages.slab"
    left = [data in slab.read_bytes()[:kept_bytes] for data in RIGHT]
    os.truncate(slab, kept_bytes)
    with opened(tmp_path) as tier:
        assert tier.exists(KEYS) == left
        assert reads(tier, KEYS) == [data if there else None for data, there in zip(RIGHT, left, strict=True)]
        assert sum(tier.stats().alarms.values()) >= left.count(False)
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


def test_a_slab_that_is_cut_while_open_serves_what_is_left(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path) as tier:
        slab = tmp_path / "pages.slab"
        kept_bytes = HEADER_BYTES + 3 * LAYOUT.page_bytes
        left = [data in slab.read_bytes()[:kept_bytes] for data in RIGHT]
        os.truncate(slab, kept_bytes)
        assert reads(tier, KEYS) == [data if there else None for data, there in zip(RIGHT, left, strict=True)]
        assert tier.stats().alarms == {"length": left.count(False)}
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


def test_a_slab_that_vanished_takes_its_index_with_it(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "pages.slab").unlink()
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms == {"generation": SLOTS}


def test_a_slot_that_was_reused_under_an_old_record_is_a_miss(tmp_path: Path) -> None:
    fill(tmp_path)
    shutil.copytree(tmp_path / "index", tmp_path / "old index")
    newer = strangers(3, first_token=5000)
    with opened(tmp_path) as tier:
        assert all(tier.put([page(entry) for entry in newer]))
        survivors = tier.exists(KEYS)
    shutil.rmtree(tmp_path / "index")
    (tmp_path / "old index").rename(tmp_path / "index")
    with opened(tmp_path) as tier:
        assert tier.exists(KEYS) == [True] * SLOTS  # so the old index claims
        assert reads(tier, KEYS) == [data if there else None for data, there in zip(RIGHT, survivors, strict=True)]
        assert tier.stats().alarms == {"checksum": 3}


def test_an_index_with_damaged_pages_ends_no_process(tmp_path: Path) -> None:
    """LMDB ends the process that reads some of them: an assertion, a look past its map."""
    patterns = 40
    command = [sys.executable, "-m", "tests.samples.index_opener", str(tmp_path), str(patterns)]
    opener = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert opener.returncode == 0, opener.stderr[-2000:]
    good = [int(line) for line in opener.stdout.split()]
    assert len(good) == patterns
    assert min(good) == 0 < max(good)  # some are given up; damage to pages that are free costs nothing


@pytest.mark.parametrize(
    "change", [{"weights_id": "other"}, {"dtype": "int8", "head_dim": 128}, {"layers": 4}], ids=lambda c: next(iter(c))
)
def test_the_pages_of_another_layout_are_given_up(tmp_path: Path, change: dict[str, object]) -> None:
    fill(tmp_path)
    other = replace(LAYOUT, **change)
    theirs = chain(3, layout=other)
    with opened(tmp_path, layout=other) as tier:
        assert tier.stats().alarms["fingerprint"] == 1
        assert list(tier.scan()) == []
        assert all(tier.put([page(entry, layout=other) for entry in theirs]))
        out = buffers(3, layout=other)
        assert None not in tier.get([key for key, _ in theirs], out)
        assert [bytes(buffer) for buffer in out] == [page_data(key, layout=other) for key, _ in theirs]
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS


def test_an_older_format_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "RECORD_VERSION", codec.RECORD_VERSION - 1)
    fill(tmp_path)
    monkeypatch.undo()
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == [None] * SLOTS
        assert tier.stats().alarms["format"] >= 1
        assert all(tier.put([page(entry) for entry in PAGES]))
    with opened(tmp_path) as tier:
        assert reads(tier, KEYS) == RIGHT
        assert tier.stats().alarms == {}


@contextmanager
def replaced_medium(tier: DiskTier, path: str, flags: int) -> Iterator[None]:
    """Put another file under the tier's open slab for a while."""
    descriptors = [fd for fd in (tier._slab._fd, tier._slab._direct_fd) if fd is not None]
    kept = [os.dup(fd) for fd in descriptors]
    other = os.open(path, flags)
    for fd in descriptors:
        os.dup2(other, fd)
    try:
        yield
    finally:
        for fd, good in zip(descriptors, kept, strict=True):
            os.dup2(good, fd)
            os.close(good)
        os.close(other)


@pytest.mark.parametrize(
    ("path", "flags"), [("/dev/full", os.O_RDWR), ("pages.slab", os.O_RDONLY)], ids=["full", "read-only"]
)
def test_a_disk_that_refuses_writes_is_out_of_use_until_it_is_back(tmp_path: Path, path: str, flags: int) -> None:
    with opened(tmp_path, options=EAGER) as tier:
        assert tier.put([page(PAGES[0])]) == [True]
        with replaced_medium(tier, path if path.startswith("/") else str(tmp_path / path), flags):
            assert tier.put([page(entry) for entry in PAGES[1:3]]) == [False, False]
            assert not tier.breaker.closed
            assert reads(tier, KEYS[:2]) == [None, None]
            assert tier.exists(KEYS[:1]) == [False]
            assert tier.put([page(PAGES[1])]) == [False]
            stats = tier.stats()
            assert (stats.misses, stats.alarms, stats.dropped) == ({"unavailable": 2}, {}, 3)
        assert tier.breaker.wait_closed(30)
        assert reads(tier, KEYS[:1]) == RIGHT[:1]
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


def test_a_disk_that_has_no_room_for_the_index_is_out_of_use_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def no_room(fd: int, offset: int, length: int) -> None:
        asked.append(length)
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path, options=EAGER) as tier:
        assert tier.put([page(PAGES[0])]) == [True]
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", no_room)
            patch.setattr(slab_index, "_SPARE_BYTES", 16 << 20)
            assert tier.put([page(PAGES[1])]) == [False]
            while len(asked) < 5:  # the first was the put's, the others are probes
                assert not tier.breaker.closed
                time.sleep(0.005)
        assert tier.breaker.wait_closed(30)
        assert all(tier.put([page(entry) for entry in PAGES]))
        assert reads(tier, KEYS) == RIGHT


def test_an_index_that_is_full_refuses_pages_and_loses_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_index, "_LEAST_MAP_BYTES", 256 << 10)
    monkeypatch.setattr(slab_index, "_BYTES_PER_PAGE", 1)
    pages = strangers(2000)
    options = DiskOptions(read_s=Allowance(60.0), breaker=BreakerOptions(first_probe_s=0.0, longest_probe_s=0.0))
    kept = []
    with opened(tmp_path, slots=len(pages), options=options) as tier:
        for start in range(0, len(pages), 50):
            batch = pages[start : start + 50]
            stored = tier.put([page(entry) for entry in batch])
            kept += [key for (key, _), done in zip(batch, stored, strict=True) if done]
            if not all(stored):
                break
        assert 0 < len(kept) < len(pages)
        assert tier.breaker.wait_closed(30)
        assert reads(tier, kept) == [page_data(key) for key in kept]
    monkeypatch.undo()
    with opened(tmp_path, slots=len(pages)) as tier:
        assert reads(tier, kept) == [page_data(key) for key in kept]
        assert all(tier.put([page(entry) for entry in pages[-50:]]))


def test_a_disk_that_fails_to_read_keeps_its_pages_for_later(tmp_path: Path) -> None:
    fill(tmp_path)
    with opened(tmp_path, options=EAGER) as tier:
        with replaced_medium(tier, str(tmp_path), os.O_RDONLY):  # reading a folder is EISDIR
            assert reads(tier, KEYS) == [None] * SLOTS
            assert tier.stats().alarms == {}
        assert tier.breaker.wait_closed(30)
        assert reads(tier, KEYS) == RIGHT


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("last_batch", [0, 3])
def test_a_writer_that_is_killed_leaves_only_right_pages(tmp_path: Path, stage: str, last_batch: int) -> None:
    command = [sys.executable, "-m", "tests.samples.disk_writer", str(tmp_path), str(SLOTS), stage, str(last_batch)]
    writer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert writer.returncode == -signal.SIGKILL, writer.stderr
    acknowledged = [int(line) for line in writer.stdout.split()]
    assert acknowledged == list(range(last_batch))
    batches = [[one.key for one in batch_pages(SLOTS, number)] for number in range(last_batch + 1)]
    with opened(tmp_path) as tier:
        for keys in batches:
            assert [
                k for k, read in zip(keys, reads(tier, keys), strict=True) if read not in (None, page_data(k))
            ] == []
        if last_batch:
            # What was acknowledged and not chosen to make room is there: the dying batch takes what is free first.
            room_taken = 2 * len(batches[-1]) - SLOTS
            survivors = sum(read is not None for read in reads(tier, batches[-2]))
            assert survivors >= len(batches[-2]) - room_taken
        if stage == STAGES[-1]:
            assert None not in reads(tier, batches[-1])
        assert all(tier.put(batch_pages(SLOTS, last_batch + 1)))


def test_a_writer_that_is_killed_at_any_moment_leaves_only_right_pages(tmp_path: Path) -> None:
    for life in range(3):
        command = [sys.executable, "-m", "tests.samples.disk_writer", str(tmp_path), str(SLOTS), "", "1000000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            acknowledged = -1
            while acknowledged < 20 + 13 * life:
                acknowledged = int(writer.stdout.readline())
            writer.kill()
            acknowledged = max([acknowledged, *map(int, writer.stdout.read().split())])
        with opened(tmp_path) as tier:
            for number in range(max(0, acknowledged - 2), acknowledged + 3):
                keys = [one.key for one in batch_pages(SLOTS, number)]
                wrong = [
                    key for key, read in zip(keys, reads(tier, keys), strict=True) if read not in (None, page_data(key))
                ]
                assert wrong == []
