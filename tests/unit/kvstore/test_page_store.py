"""The tiers below an engine's memory, on the caller's buffers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from kvstore.deadline import Allowance
from kvstore.fetching import BufferTarget
from kvstore.page import Namespace, PageKey, PageMeta, Tier
from kvstore.page_store import PageStore, PageStoreOptions, WritePolicy
from kvstore.tiers.base import Found, Page
from kvstore.tiers.disk import DiskTier
from kvstore.tiers.host import HostTier
from tests.samples.gated_tier import GatedTier
from tests.samples.pages import LAYOUT, buffers, chain, page, page_data, strangers

PAGE = LAYOUT.page_bytes
PATIENT = PageStoreOptions(get_s=Allowance(60.0), window_bytes=2 * PAGE)


def keys_of(pages: Sequence[tuple[PageKey, PageMeta]]) -> list[PageKey]:
    return [key for key, _ in pages]


def reads(store: PageStore, keys: list[PageKey]) -> list[tuple[Tier, bytes] | None]:
    out = buffers(len(keys))
    found = store.get(keys, out)
    return [None if tier is None else (tier, bytes(buffer)) for tier, buffer in zip(found, out, strict=True)]


def right(tier: Tier, keys: Sequence[PageKey]) -> list[tuple[Tier, bytes]]:
    return [(tier, page_data(key)) for key in keys]


def host(pages: int = 16) -> HostTier:
    return HostTier(LAYOUT, capacity_bytes=pages * PAGE)


@pytest.fixture
def gated() -> Iterator[GatedTier]:
    tier = GatedTier()
    yield tier
    tier.gate.set()


@pytest.fixture
def filled(gated: GatedTier) -> GatedTier:
    """Three pages of a chain on a disk that hangs from now on."""
    gated.gate.set()
    gated.put([page(entry) for entry in chain(3)])
    gated.gate.clear()
    return gated


KEYS = keys_of(chain(3))


def test_pages_are_found_wherever_they_are(tmp_path: Path) -> None:
    pages = chain(7)
    store = PageStore([host(), DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)], PATIENT)
    memory, disk = store.tiers
    memory.put([page(entry) for entry in pages[:3]])
    disk.put([page(entry) for entry in pages[2:6]])
    keys = keys_of(pages)
    assert store.exists(keys) == [True] * 6 + [False]
    assert store.match(keys) == 6
    assert store.match(keys[6:]) == 0
    assert reads(store, keys) == [*right(Tier.HOST, keys[:3]), *right(Tier.DISK, keys[3:6]), None]
    assert reads(store, keys[:6]) == right(Tier.HOST, keys[:6])  # promoted
    store.check()
    store.close()
    store.close()
    assert store.put([page(pages[6])]) == [False]
    assert reads(store, keys[:1]) == [None]


def test_a_put_returns_while_the_disk_hangs_and_is_found_before_it_lands(gated: GatedTier) -> None:
    pages = chain(5)
    store = PageStore([host(), gated], PATIENT)
    assert store.put([page(entry) for entry in pages]) == [True] * 5
    assert reads(store, keys_of(pages)) == right(Tier.HOST, keys_of(pages))
    assert not store.flush(0.0)
    assert list(gated.scan()) == []
    gated.gate.set()
    assert store.flush(60)
    assert gated.exists(keys_of(pages)) == [True] * 5
    store.close()


def test_pages_that_wait_to_be_written_stay_and_what_finds_no_room_is_refused(gated: GatedTier) -> None:
    first, second = strangers(4), strangers(3, first_token=9000)
    store = PageStore([host(4), gated], PATIENT)
    assert store.put([page(entry) for entry in first]) == [True] * 4
    assert store.put([page(entry) for entry in second]) == [False] * 3
    gated.gate.set()
    assert store.flush(60)
    assert store.put([page(entry) for entry in second]) == [True] * 3
    assert store.flush(60)
    assert gated.exists(keys_of(first + second)) == [True] * 7
    store.close()


def test_what_exceeds_the_bytes_that_may_wait_is_not_written_and_counted(gated: GatedTier) -> None:
    pages = chain(6)
    store = PageStore([host(), gated], PageStoreOptions(behind_bytes=4 * PAGE, window_bytes=PAGE))
    assert store.put([page(entry) for entry in pages]) == [True] * 6
    assert store.dropped == 2
    assert store.stats()[Tier.DISK].dropped == 2
    gated.gate.set()
    assert store.flush(60)
    assert gated.exists(keys_of(pages)) == [True] * 4 + [False] * 2
    store.close()


def test_a_medium_that_hangs_costs_one_deadline_and_writes_nothing_afterwards(filled: GatedTier) -> None:
    store = PageStore([filled], PageStoreOptions(get_s=Allowance(0.02), fetch_threads=1))
    out = buffers(3)
    assert store.get(KEYS, out) == [None] * 3
    filled.gate.set()
    store.close()  # waits for the read that hung
    assert filled.stats().hits == 3
    assert [bytes(buffer) for buffer in out] == [bytes(PAGE)] * 3


def test_a_read_that_is_given_up_is_told_of_at_once_and_when_it_has_ended(filled: GatedTier) -> None:
    told: list[tuple[Tier, int, float]] = []
    store = PageStore([filled], PageStoreOptions(get_s=Allowance(0.02)), on_read=lambda *read: told.append(read))
    assert store.get(KEYS, buffers(3)) == [None] * 3
    while not told:  # the deadline's thread tells when it has answered
        pass
    assert told == [(Tier.DISK, 0, math.inf)]
    filled.gate.set()
    store.close()
    assert [read[:2] for read in told[1:]] == [(Tier.DISK, 3 * PAGE)]


def test_a_page_that_comes_up_between_looking_for_it_and_claiming_it_is_not_read_again(
    filled: GatedTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = host()
    store = PageStore([memory, filled], PageStoreOptions(get_s=Allowance(60.0)))
    outs, look = [buffers(3), buffers(3)], memory.get
    first = store.start_get(KEYS, BufferTarget(outs[0]), timeout_s=60)
    filled.reading.acquire()

    def look_and_wait(keys: Sequence[PageKey], out: Sequence[memoryview]) -> list[Found | None]:
        answers = look(keys, out)
        filled.gate.set()
        assert first.result(60) == [Tier.DISK] * 3
        return answers

    monkeypatch.setattr(memory, "get", look_and_wait)
    assert store.start_get(KEYS, BufferTarget(outs[1]), timeout_s=60).result(60) == [Tier.HOST] * 3
    assert [[bytes(b) for b in out] for out in outs] == [[page_data(key) for key in KEYS]] * 2
    assert filled.stats().hits == 3
    store.close()


def test_two_who_want_a_page_cost_one_read(filled: GatedTier) -> None:
    memory = host()
    store = PageStore([memory, filled], PageStoreOptions(get_s=Allowance(60.0)))
    outs = [buffers(3), buffers(3)]
    first = store.start_get(KEYS, BufferTarget(outs[0]), timeout_s=60)
    filled.reading.acquire()
    second = store.start_get(KEYS, BufferTarget(outs[1]), timeout_s=60)
    while memory.stats().misses != {"absent": 6}:  # until the second has asked the host tier in vain
        pass
    filled.gate.set()
    assert first.result(60) == [Tier.DISK] * 3
    assert second.result(60) == [Tier.HOST] * 3
    assert [[bytes(b) for b in out] for out in outs] == [[page_data(key) for key in KEYS]] * 2
    assert filled.stats().hits == 3
    store.close()


def test_a_page_whose_write_is_under_way_is_waited_for(gated: GatedTier) -> None:
    store = PageStore([gated], PATIENT)
    writer = threading.Thread(target=store.put, args=([page(entry) for entry in chain(3)],))
    writer.start()
    while not store.in_flight.claims(KEYS[0]):
        pass
    found = store.start_get(KEYS, BufferTarget(buffers(3)), timeout_s=60)
    gated.gate.set()
    assert found.result(60) == [Tier.DISK] * 3
    writer.join()
    store.close()


def test_a_cancelled_get_never_writes(filled: GatedTier) -> None:
    store = PageStore([filled], PageStoreOptions(get_s=Allowance(60.0), fetch_threads=1))
    out, other = buffers(3), buffers(3)
    running = store.start_get(KEYS, BufferTarget(other), timeout_s=60)
    filled.reading.acquire()
    waiting = store.start_get(KEYS, BufferTarget(out), timeout_s=60)
    assert waiting.cancel()
    filled.gate.set()
    assert running.result(60) == [Tier.DISK] * 3
    store.close()
    assert [bytes(buffer) for buffer in out] == [bytes(PAGE)] * 3


def test_selective_writing_waits_for_a_second_use(tmp_path: Path) -> None:
    options = PageStoreOptions(get_s=Allowance(60.0), write_policy=WritePolicy.SELECTIVE)
    store = PageStore([host(), DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)], options)
    once, twice, read = strangers(3)
    disk = store.tiers[1]
    store.put([page(once), page(twice), page(read)])
    assert store.flush(60)
    assert list(disk.scan()) == []
    store.put([page(twice)])
    reads(store, [read[0]])
    assert store.flush(60)
    assert disk.exists([once[0], twice[0], read[0]]) == [False, True, True]
    store.close()


def test_removed_forgotten_and_pinned_mean_every_tier(tmp_path: Path) -> None:
    store = PageStore([host(), DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)], PATIENT)
    mine, others = chain(2, salt="mine"), chain(3)
    store.put([page(entry) for entry in mine + others])
    assert store.flush(60)
    assert store.pin(keys_of(others)) == [True] * 3
    store.unpin(keys_of(others))
    assert store.forget(Namespace("mine")) == 4
    assert store.remove(keys_of(others)[:1] * 3) == 1
    assert store.exists(keys_of(mine + others)) == [False] * 3 + [True] * 2
    store.close()


def test_a_page_is_not_asked_for_into_a_buffer_that_cannot_take_it() -> None:
    store, entries = PageStore([host()], PATIENT), chain(1)
    store.put([page(entry) for entry in entries])
    with pytest.raises(ValueError, match="read-only"):
        store.get(keys_of(entries), [memoryview(bytes(PAGE))])
    store.close()


def test_a_store_of_no_tiers_has_nothing() -> None:
    store = PageStore([])
    (entry,) = chain(1)
    assert store.put([page(entry)]) == [False]
    assert store.exists([entry[0]]) == [False]
    assert store.pin([entry[0]]) == [False]
    store.close()


def test_tiers_in_disorder_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match="fast to slow"):
        PageStore([host(), host()])


def test_where_a_page_lies_is_asked_of_some_tiers_or_all(tmp_path: Path) -> None:
    pages = chain(4)
    store = PageStore([host(), DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)], PATIENT)
    memory, disk = store.tiers
    memory.put([page(entry) for entry in pages[:2]])
    disk.put([page(entry) for entry in pages[1:3]])
    keys = keys_of(pages)
    assert store.locate(keys) == [Tier.HOST, Tier.HOST, Tier.DISK, None]
    assert store.locate(keys, among={Tier.DISK}) == [None, Tier.DISK, Tier.DISK, None]
    store.clear()
    assert store.locate(keys) == [None] * 4
    store.close()


def test_pages_are_completed_on_their_way_down(tmp_path: Path) -> None:
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)
    late = PageMeta(None, b"told later")

    def complete(pages: list[Page], put_s: float) -> list[Page]:
        assert 0 < put_s <= time.monotonic()
        return [structs.replace(each, meta=late) for each in pages]

    store = PageStore([host(), disk], PATIENT, complete=complete)
    store.put([page(entry) for entry in chain(3)])
    assert store.flush(60.0)
    assert [meta for _, meta in disk.scan()] == [late] * 3
    store.close()


def test_a_store_that_does_not_promote_reads_from_below_again(tmp_path: Path) -> None:
    read: list[tuple[Tier, int]] = []
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)
    disk.put([page(entry) for entry in chain(3)])
    store = PageStore(
        [host(), disk],
        replace(PATIENT, promotes=False),
        on_read=lambda tier, moved_bytes, took_s: read.append((tier, moved_bytes)),
    )
    for _ in range(2):
        assert reads(store, KEYS) == right(Tier.DISK, KEYS)
    assert read == [(Tier.DISK, 2 * PAGE), (Tier.DISK, PAGE)] * 2
    store.close()


def test_room_is_waited_for_and_not_for_ever(gated: GatedTier) -> None:
    store = PageStore([host(), gated], replace(PATIENT, behind_bytes=4 * PAGE))
    assert store.wait_for_room(4, 0.0)
    store.put([page(entry) for entry in chain(3)])
    assert store.wait_for_room(1, 0.0)
    assert not store.wait_for_room(2, 0.01)
    opener = threading.Timer(0.05, gated.gate.set)
    opener.start()
    assert store.wait_for_room(4, 60.0)
    opener.join()
    store.close()
    assert store.wait_for_room(100, 0.0), "a closed store holds nobody up"


class BrokenTarget:
    """Memory that no tier reaches, and that cannot be written."""

    def view(self, place: int) -> memoryview | None:
        return None

    def fill(self, places: Sequence[int], data: Sequence[memoryview]) -> bool:
        raise RuntimeError("the device is lost")


def test_a_target_that_raises_keeps_no_page_pinned(caplog: pytest.LogCaptureFixture) -> None:
    memory = host()
    store = PageStore([memory], PATIENT)
    store.put([page(entry) for entry in chain(3)])
    with caplog.at_level(logging.ERROR):
        assert store.start_get(KEYS, BrokenTarget(), timeout_s=60.0).result(60) == [None] * 3
        store.close()
    assert [record.getMessage() for record in caplog.records] == ["a background task of the store failed"]
    assert memory.evictable_pages == 3


def test_the_host_tier_is_cleared_alone_with_what_waits_there(tmp_path: Path) -> None:
    disk = DiskTier(LAYOUT, tmp_path, capacity_bytes=64 * PAGE)
    disk.put([page(entry) for entry in chain(3)])
    memory = host()
    store = PageStore([memory, disk], replace(PATIENT, write_policy=WritePolicy.BACK, back_bytes=8 * PAGE))
    store.put([page(entry) for entry in strangers(3, first_token=900)])
    store.clear(storage=False)
    assert memory.free_pages == 16  # those that were kept from being written, too
    assert store.locate(KEYS) == [Tier.DISK] * 3
    store.close()
    assert disk.stats().puts == 3
