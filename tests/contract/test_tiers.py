"""The contract of ``kvstore.tiers.base``, held over all four tiers: real torch, real LMDB, a real Valkey."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import redis
import torch
from msgspec import structs

from kvstore.at_rest import AtRest
from kvstore.encryption import KeyRing
from kvstore.page import Namespace, PageKey, Tier
from kvstore.retention import Retention, RetentionRules
from kvstore.shared_host import SharedHost
from kvstore.tiers.base import OnChange, PagesRemoved, PagesStored, PageTier, TierChange
from kvstore.tiers.device import DeviceTier
from kvstore.tiers.device_copies import OpenCopies, StreamCopies, open_copies
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.shared_client import SharedHostOptions
from kvstore.tiers.shared_host import SharedHostTier
from tests.samples.pages import LAYOUT, PATIENCE, buffers, chain, page, page_data, strangers

CAPACITY_PAGES = 8
RULES = RetentionRules(
    by_namespace={
        Namespace("brief"): Retention(ttl_s=60),
        Namespace("small"): Retention(quota_bytes=3 * LAYOUT.page_bytes + 1),
    }
)


class Clock:
    """A wall clock that the test moves."""

    now_s = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(scope="module")
def pool_server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as server:
        yield server


@dataclass
class Bench:
    """One tier under test, and how to damage what it keeps."""

    tier: PageTier
    changes: list[TierChange]
    flip_a_bit_of: Callable[[PageKey], None]
    clock: Clock

    def put(self, *entries: tuple[PageKey, object]) -> list[bool]:
        return self.tier.put([page(entry) for entry in entries])

    def reads(self, keys: list[PageKey]) -> list[bytes | None]:
        out = buffers(len(keys))
        found = self.tier.get(keys, out)
        return [bytes(buffer) if answer is not None else None for buffer, answer in zip(out, found, strict=True)]


STREAMED, SHARED, ENCRYPTED = "device by streams", "shared host", "encrypted disk"
"""A device that is reached as a GPU is, on CPU tensors; the host tier that several processes have in common beside the
private one; and a disk that tells nothing."""


@pytest.fixture(
    params=[*Tier, STREAMED, SHARED, ENCRYPTED], ids=lambda each: each.label if isinstance(each, Tier) else each
)
def bench(request: pytest.FixtureRequest, tmp_path: Path, pool_server: PoolServer) -> Iterator[Bench]:
    changes: list[TierChange] = []
    size = CAPACITY_PAGES * LAYOUT.page_bytes + LAYOUT.page_bytes // 2  # half a page is no page
    built_by = {
        Tier.DEVICE: _device, Tier.HOST: _host, Tier.DISK: _disk, Tier.POOL: _pool,
        STREAMED: partial(_device, copies=StreamCopies), SHARED: _shared, ENCRYPTED: _encrypted,
    }  # fmt: skip
    build = built_by[request.param]
    clock = Clock()
    tier, flip = build(size, changes.append, tmp_path, pool_server, clock)
    yield Bench(tier, changes, flip, clock)
    tier.check()
    newcomers = [page(entry) for entry in strangers(CAPACITY_PAGES, first_token=900_000)]
    assert all(tier.put(newcomers)), "a pin was left behind"
    tier.close()
    tier.close()


Built = tuple[PageTier, Callable[[PageKey], None]]


def _device(
    size: int,
    on_change: OnChange,
    path: Path,
    server: PoolServer,
    clock: Clock,
    copies: OpenCopies = open_copies,
) -> Built:
    tier = DeviceTier(LAYOUT, pages=size // LAYOUT.page_bytes, on_change=on_change, copies=copies)

    def flip(key: PageKey) -> None:
        slot = tier.acquire([key])[0]
        tier.kv[slot].view(torch.uint8)[0, 0, 0, 0, 100] ^= 1
        tier.release([slot])

    return tier, flip


def _host(size: int, on_change: OnChange, path: Path, server: PoolServer, clock: Clock) -> Built:
    tier = HostTier(LAYOUT, capacity_bytes=size, on_change=on_change, retention=RULES, clock=clock)

    def flip(key: PageKey) -> None:
        rows = tier._rows
        place = next(i for i in range(len(rows)) if rows[i].tobytes() == page_data(key))
        rows[place, 100] ^= 1

    return tier, flip


def _shared(size: int, on_change: OnChange, path: Path, server: PoolServer, clock: Clock) -> Built:
    daemon = SharedHost(path / "host.sock", capacity_bytes=size, clock=clock)
    threading.Thread(target=daemon.serve, daemon=True).start()
    tier = SharedHostTier(
        LAYOUT, path / "host.sock", capacity_bytes=size, on_change=on_change, retention=RULES, clock=clock,
        options=SharedHostOptions(ask_s=PATIENCE),
    )  # fmt: skip
    close = tier.close

    def close_both() -> None:
        close()
        daemon.close()

    tier.close = close_both

    def flip(key: PageKey) -> None:
        loan = tier.lend([key])
        loan.pages[0].data[100] ^= 1
        tier.take_back(loan)

    return tier, flip


def _disk(size: int, on_change: OnChange, path: Path, server: PoolServer, clock: Clock) -> Built:
    tier = DiskTier(
        LAYOUT, path / "disk", capacity_bytes=size, on_change=on_change, retention=RULES, clock=clock,
        options=DiskOptions(read_s=PATIENCE, write_s=PATIENCE),
    )  # fmt: skip
    slab = path / "disk" / "pages.slab"

    def flip(key: PageKey) -> None:
        place = slab.read_bytes().index(page_data(key)) + 100
        with slab.open("r+b") as file:
            file.seek(place)
            byte = file.read(1)[0]
            file.seek(place)
            file.write(bytes([byte ^ 1]))

    return tier, flip


def _encrypted(size: int, on_change: OnChange, path: Path, server: PoolServer, clock: Clock) -> Built:
    options = DiskOptions(read_s=PATIENCE, write_s=PATIENCE, at_rest=AtRest(KeyRing([bytes(range(32))])))
    tier = DiskTier(
        LAYOUT, path / "disk", capacity_bytes=size, on_change=on_change, retention=RULES, clock=clock, options=options
    )

    def flip(key: PageKey) -> None:
        slot = tier._table.find(key)
        with (path / "disk" / "pages.slab").open("r+b") as file:
            file.seek(4096 + slot * LAYOUT.page_bytes + 100)
            byte = file.read(1)[0]
            file.seek(-1, 1)
            file.write(bytes([byte ^ 1]))

    return tier, flip


def _pool(size: int, on_change: OnChange, path: Path, server: PoolServer, clock: Clock) -> Built:
    client = redis.Redis.from_url(server.url)
    client.flushall()
    tier = PoolTier(
        LAYOUT, server.url, capacity_bytes=size, on_change=on_change, retention=RULES, clock=clock,
        options=PoolOptions(read_s=PATIENCE, write_s=PATIENCE),
    )  # fmt: skip

    def flip(key: PageKey) -> None:
        name = next(name for name in client.scan_iter() if name.endswith(key[16:].hex().encode()))
        value = client.get(name)
        client.setrange(name, len(value) - 100, bytes([value[-100] ^ 1]))

    return tier, flip


def test_a_page_comes_back_with_its_bytes_its_checksum_and_its_meta(bench: Bench) -> None:
    pages = chain(5, salt="tenant")
    assert bench.put(*pages) == [True] * 5
    keys = [key for key, _ in pages]
    out = buffers(5)
    found = bench.tier.get(keys, out)
    assert [bytes(buffer) for buffer in out] == [page_data(key) for key in keys]
    assert [(answer.checksum, answer.meta) for answer in found] == [(page(p).checksum, p[1]) for p in pages]
    assert bench.tier.stats().hits == 5


def test_capacity_is_whole_pages_of_what_was_asked_for(bench: Bench) -> None:
    assert bench.tier.capacity_bytes == CAPACITY_PAGES * LAYOUT.page_bytes
    assert bench.tier.page_bytes == LAYOUT.page_bytes


def test_an_absent_page_is_a_miss_among_hits(bench: Bench) -> None:
    first, second, third = strangers(3)
    bench.put(first, third)
    assert bench.tier.exists([first[0], second[0], third[0]]) == [True, False, True]
    assert bench.reads([first[0], second[0], third[0]]) == [page_data(first[0]), None, page_data(third[0])]
    assert bench.tier.stats().misses == {"absent": 1}
    assert bench.tier.stats().alarms == {}


def test_a_page_is_stored_once_however_often_it_is_put(bench: Bench) -> None:
    first, second = strangers(2)
    assert bench.put(first, first) == [True, True]
    assert bench.put(first, second, first) == [True, True, True]
    stats = bench.tier.stats()
    assert stats.puts == 2
    assert stats.used_bytes == 2 * LAYOUT.page_bytes
    assert [key for change in bench.changes for key, _ in change.pages] == [first[0], second[0]]


def test_the_oldest_page_makes_room_and_the_bound_is_never_exceeded(bench: Bench) -> None:
    pages = strangers(CAPACITY_PAGES + 3)
    for entry in pages:
        assert bench.put(entry) == [True]
        assert bench.tier.stats().used_bytes <= bench.tier.capacity_bytes
    assert bench.tier.exists([key for key, _ in pages]) == [False] * 3 + [True] * CAPACITY_PAGES
    assert bench.tier.stats().used_bytes == bench.tier.capacity_bytes
    assert bench.tier.stats().evictions == 3
    removed = [key for change in bench.changes if isinstance(change, PagesRemoved) for key in change.keys]
    assert removed == [key for key, _ in pages[:3]]


def test_of_a_batch_that_does_not_fit_the_leading_pages_stay(bench: Bench) -> None:
    pages = chain(CAPACITY_PAGES + 2)
    assert bench.put(*pages) == [True] * CAPACITY_PAGES + [False] * 2
    assert bench.tier.exists([key for key, _ in pages]) == [True] * CAPACITY_PAGES + [False] * 2
    assert bench.tier.stats().dropped == 2


def test_a_read_page_outlives_an_unread_one(bench: Bench) -> None:
    pages = strangers(CAPACITY_PAGES)
    for entry in pages:
        bench.put(entry)
    keys = [key for key, _ in pages]
    bench.reads(keys[:1])
    bench.put(*strangers(CAPACITY_PAGES - 1, first_token=500))
    assert bench.tier.exists(keys) == [True] + [False] * (CAPACITY_PAGES - 1)


def test_a_suffix_goes_before_its_prefix(bench: Bench) -> None:
    pages = chain(CAPACITY_PAGES)
    for entry in pages:
        bench.put(entry)
    for entry in strangers(3, first_token=500):
        bench.put(entry)
    assert bench.tier.exists([key for key, _ in pages]) == [True] * (CAPACITY_PAGES - 3) + [False] * 3


def test_pinned_pages_stay_and_a_tier_full_of_them_refuses(bench: Bench) -> None:
    pages, newcomers = strangers(CAPACITY_PAGES), strangers(2, first_token=500)
    bench.put(*pages)
    keys = [key for key, _ in pages]
    assert bench.tier.pin([*keys, newcomers[0][0]]) == [True] * CAPACITY_PAGES + [False]
    bench.tier.pin(keys[:1])
    assert bench.put(newcomers[0]) == [False]
    bench.tier.unpin(keys[:2])
    assert bench.put(*newcomers) == [True, False]
    assert bench.tier.exists(keys[:2]) == [True, False]
    bench.tier.unpin(keys)
    assert bench.put(*newcomers) == [True, True]


def test_removed_pages_are_gone_even_when_pinned(bench: Bench) -> None:
    pages = strangers(3)
    keys = [key for key, _ in pages]
    bench.put(*pages)
    bench.tier.pin(keys[:1])
    assert bench.tier.remove([keys[0], keys[1], strangers(1, first_token=500)[0][0]]) == 2
    assert bench.reads(keys) == [None, None, page_data(keys[2])]
    assert bench.put(*pages) == [True] * 3
    assert bench.reads(keys) == [page_data(key) for key in keys]


def test_clear_forgets_everything(bench: Bench) -> None:
    pages = strangers(5)
    bench.put(*pages)
    bench.tier.clear()
    assert list(bench.tier.scan()) == []
    assert bench.reads([key for key, _ in pages]) == [None] * 5
    assert bench.tier.stats().used_bytes == 0
    assert bench.put(*pages) == [True] * 5


def test_scan_shows_what_there_is(bench: Bench) -> None:
    pages = chain(3) + strangers(2, first_token=500)
    bench.put(*pages)
    assert dict(bench.tier.scan()) == dict(pages)


def test_announcing_tells_of_parents_first_and_is_bounded(bench: Bench) -> None:
    pages = chain(6)
    bench.put(*pages)
    bench.changes.clear()
    assert bench.tier.announce(100) == 6
    assert bench.changes == [PagesStored(bench.tier.tier, tuple(pages))]
    assert bench.tier.announce(2) == 2


@pytest.mark.parametrize(
    "other",
    [{"weights_id": "other weights"}, {"dtype": "int8", "head_dim": 128}, {"rank": 1}, {"format_version": 2}],
    ids=lambda change: next(iter(change)),
)
def test_a_page_of_another_layout_is_a_miss_and_an_alarm(bench: Bench, other: dict[str, object]) -> None:
    foreign_layout = replace(LAYOUT, **other)
    assert foreign_layout.page_bytes == LAYOUT.page_bytes
    foreign = chain(1, layout=foreign_layout)[0]
    assert bench.put(foreign) == [False]
    assert bench.reads([foreign[0]]) == [None]
    assert bench.tier.stats().alarms == {"fingerprint": 2}


def test_buffers_of_another_size_are_the_callers_error(bench: Bench) -> None:
    (key, meta), *_ = chain(1)
    short = memoryview(bytearray(LAYOUT.page_bytes - 1))
    with pytest.raises(ValueError, match="4095"):
        bench.tier.get([key], [short])
    with pytest.raises(ValueError, match="4095"):
        bench.tier.put([structs.replace(page((key, meta)), data=short)])
    with pytest.raises(ValueError, match="1 keys"):
        bench.tier.get([key], buffers(2))


def test_a_flipped_bit_is_a_miss_and_an_alarm_and_spoils_nothing_else(bench: Bench) -> None:
    pages = strangers(4)
    keys = [key for key, _ in pages]
    bench.put(*pages)
    bench.flip_a_bit_of(keys[2])
    assert bench.reads(keys) == [page_data(keys[0]), page_data(keys[1]), None, page_data(keys[3])]
    assert bench.tier.stats().alarms in ({"checksum": 1}, {"authentication": 1})
    assert bench.tier.exists(keys) == [True, True, False, True]
    assert bench.changes[-1] == PagesRemoved(bench.tier.tier, (keys[2],))
    assert bench.put(pages[2]) == [True]
    assert bench.reads(keys) == [page_data(key) for key in keys]


def test_the_same_tokens_in_another_namespace_are_a_miss(bench: Bench) -> None:
    mine, theirs, nobodys = chain(3, salt="mine"), chain(3, salt="theirs"), chain(3)
    bench.put(*mine)
    for others in (theirs, nobodys):
        assert bench.tier.exists([key for key, _ in others]) == [False] * 3
        assert bench.reads([key for key, _ in others]) == [None] * 3
    assert bench.tier.stats().alarms == {}
    bench.put(*theirs)
    assert bench.reads([key for key, _ in (*mine, *theirs)]) == [page_data(key) for key, _ in (*mine, *theirs)]


def test_a_forgotten_namespace_is_gone_and_no_other(bench: Bench) -> None:
    mine, theirs = chain(3, salt="mine"), chain(3, salt="theirs")
    bench.put(*mine, *theirs)
    assert bench.tier.forget(Namespace("mine")) == 3
    assert bench.tier.forget(Namespace("mine")) == 0
    assert bench.reads([key for key, _ in mine]) == [None] * 3
    assert bench.reads([key for key, _ in theirs]) == [page_data(key) for key, _ in theirs]
    assert bench.changes[-1] == PagesRemoved(bench.tier.tier, tuple(key for key, _ in mine))
    assert bench.put(*mine) == [True] * 3


below_the_device = pytest.mark.parametrize(  # whose pages are its engine's to keep
    "bench",
    [Tier.HOST, Tier.DISK, Tier.POOL, SHARED, ENCRYPTED],
    ids=["host", "disk", "pool", SHARED, ENCRYPTED],
    indirect=True,
)


@below_the_device
def test_a_page_ends_when_its_time_is_up(bench: Bench) -> None:
    brief, lasting = chain(2, salt="brief"), chain(1)
    assert bench.put(*brief, *lasting) == [True] * 3
    bench.clock.now_s += 59
    out = buffers(3)
    found = bench.tier.get([key for key, _ in brief + lasting], out)
    assert [answer.expires_at_s for answer in found] == [1_800_000_060] * 2 + [0]
    bench.clock.now_s += 2
    keys = [key for key, _ in brief]
    assert bench.reads([*keys, lasting[0][0]]) == [None, None, page_data(lasting[0][0])]
    assert bench.tier.stats().misses == {"expired": 2}
    assert bench.tier.stats().alarms == {}
    assert bench.tier.stats().used_bytes == LAYOUT.page_bytes
    assert bench.tier.exists([*keys, lasting[0][0]])[2]


@below_the_device
def test_a_pin_whose_owner_is_gone_ends(bench: Bench) -> None:
    pages, newcomers = strangers(CAPACITY_PAGES), strangers(4, first_token=50_000)
    bench.put(*pages)
    keys = [key for key, _ in pages]
    assert bench.tier.pin(keys, for_s=60) == [True] * CAPACITY_PAGES
    assert bench.tier.pin(keys[:2], for_s=600) == [True] * 2
    bench.tier.unpin(keys[:1])  # the pin that ends first
    bench.clock.now_s += 59
    assert bench.put(*newcomers) == [False] * 4
    bench.clock.now_s += 2
    assert bench.put(*newcomers) == [True] * 4
    assert bench.tier.exists(keys[:2]) == [True] * 2
    bench.tier.check()
    bench.clock.now_s += 600
    assert bench.tier.pin(keys[:1]) == [True]
    bench.tier.unpin(keys[:1])
    bench.tier.unpin(keys[:2])


@below_the_device
def test_a_page_brings_its_end_with_it(bench: Bench) -> None:
    (entry,) = chain(1)
    assert bench.tier.put([structs.replace(page(entry), expires_at_s=1_800_000_010)]) == [True]
    assert bench.reads([entry[0]]) == [page_data(entry[0])]
    bench.clock.now_s += 11
    assert bench.reads([entry[0]]) == [None]


@below_the_device
def test_a_namespace_keeps_within_its_quota_and_takes_from_itself_alone(bench: Bench) -> None:
    others = strangers(4)
    bench.put(*others)
    small = [chain(1, salt="small", first_token=100 * i)[0] for i in range(5)]
    for entry in small:
        assert bench.put(entry) == [True]
    assert bench.tier.exists([key for key, _ in small]) == [False] * 2 + [True] * 3
    assert bench.tier.exists([key for key, _ in others]) == [True] * 4
    assert bench.put(*chain(4, salt="small", first_token=5000)) == [True] * 3 + [False]
    bench.tier.check()
    held = [meta for _, meta in bench.tier.scan() if meta.salt == "small"]
    assert len(held) == 3


def test_readers_and_writers_at_once_see_whole_pages_or_none(bench: Bench) -> None:
    pages = chain(6) + strangers(10, first_token=500)
    wrong: list[PageKey] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            some = rng.sample(pages, rng.randint(1, 5))
            act = rng.random()
            if act < 0.45:
                bench.put(*some)
            elif act < 0.5:
                bench.tier.remove([some[0][0]])
            else:
                keys = [key for key, _ in some]
                wrong.extend(
                    key for key, read in zip(keys, bench.reads(keys), strict=True) if read not in (None, page_data(key))
                )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    stats = bench.tier.stats()
    assert stats.alarms == {}
    assert stats.hits > 0
    assert stats.used_bytes <= bench.tier.capacity_bytes
    told: dict[PageKey, object] = {}
    for change in bench.changes:
        if isinstance(change, PagesStored):
            told.update(change.pages)
        else:
            for key in change.keys:
                told.pop(key, None)
    assert told == dict(bench.tier.scan())
