"""Pages that are stored encrypted, in fp8 or both: right or a miss, and nothing of them to read for who has no key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import redis
import torch

from kvstore.at_rest import ALL, NONE, AtRest, Chosen
from kvstore.codec import checksum
from kvstore.encryption import KEY_BYTES, KeyRing
from kvstore.page import Namespace, PageKey, PageMeta, Tier
from kvstore.tiers.base import Found, Page, PageTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from tests.samples.pages import LAYOUT, PATIENCE, buffers, chain

LAYOUT_16 = replace(LAYOUT, dtype="bfloat16", head_dim=64)  # also of 4,096 bytes
OLD, NEW = bytes(range(KEY_BYTES)), bytes(range(1, KEY_BYTES + 1))
PAGES = chain(5, layout=LAYOUT_16, salt="a tenant's secret")
KEYS = [key for key, _ in PAGES]
ENCRYPTED = AtRest(KeyRing([OLD]))
FORMS = {
    "encrypted": ENCRYPTED,
    "fp8": AtRest(fp8=ALL),
    "both": AtRest(KeyRing([OLD]), fp8=ALL),
}


def data_of(key: PageKey) -> bytes:
    """Return the one right content of a page: numbers as caches hold them."""
    numbers = np.random.default_rng(list(key[16:24])).standard_normal(LAYOUT_16.page_bytes // 2)
    return torch.from_numpy(numbers).to(torch.bfloat16).view(torch.uint8).numpy().tobytes()


def page(entry: tuple[PageKey, PageMeta]) -> Page:
    data = bytearray(data_of(entry[0]))
    return Page(*entry, memoryview(data), checksum(data))


class Place:
    """A medium on which tiers are opened, one after another."""

    def __init__(self, kind: Tier, folder: Path, server: PoolServer) -> None:
        self.kind, self.folder, self.server = kind, folder, server
        self.client = redis.Redis.from_url(server.url)
        self.client.flushall()

    def open(self, at_rest: AtRest, pages: int = 16) -> PageTier:
        size = pages * LAYOUT_16.page_bytes
        if self.kind is Tier.DISK:
            disk = DiskOptions(read_s=PATIENCE, write_s=PATIENCE, at_rest=at_rest)
            return DiskTier(LAYOUT_16, self.folder, capacity_bytes=size, options=disk)
        pool = PoolOptions(read_s=PATIENCE, write_s=PATIENCE, at_rest=at_rest)
        return PoolTier(LAYOUT_16, self.server.url, capacity_bytes=size, options=pool)

    def raw(self) -> bytes:
        """Return everything that lies there."""
        if self.kind is Tier.DISK:
            return b"".join(path.read_bytes() for path in self.folder.rglob("*") if path.is_file())
        return b"".join(name + self.client.get(name) for name in self.client.scan_iter())

    def change(self, change: Callable[[bytearray], None]) -> None:
        """Damage what is stored of pages, and nothing of headers."""
        if self.kind is Tier.DISK:
            path = self.folder / "pages.slab"
            data = bytearray(path.read_bytes())
            slots = data[4096:]
            change(slots)
            path.write_bytes(data[:4096] + slots)
            return
        for name in list(self.client.scan_iter()):
            value = bytearray(self.client.get(name))
            body = value[-1500:]
            change(body)
            self.client.set(name, bytes(value[:-1500] + body))


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as started:
        yield started


@pytest.fixture(params=[Tier.DISK, Tier.POOL], ids=lambda tier: tier.label)
def place(request: pytest.FixtureRequest, tmp_path: Path, server: PoolServer) -> Iterator[Place]:
    there = Place(request.param, tmp_path / "disk", server)
    yield there
    there.client.close()


def reads(tier: PageTier, keys: list[PageKey]) -> list[tuple[bytes, Found] | None]:
    out = buffers(len(keys), layout=LAYOUT_16)
    found = tier.get(keys, out)
    return [None if each is None else (bytes(buffer), each) for buffer, each in zip(out, found, strict=True)]


def stored(place: Place, at_rest: AtRest) -> None:
    tier = place.open(at_rest)
    assert tier.put([page(entry) for entry in PAGES]) == [True] * 5
    tier.close()


@pytest.mark.parametrize("form", FORMS)
def test_pages_come_back_after_reopening_with_their_metas_and_checksums(place: Place, form: str) -> None:
    stored(place, FORMS[form])
    tier = place.open(FORMS[form])
    assert dict(tier.scan()) == dict(PAGES)
    for (key, meta), answer in zip(PAGES, reads(tier, KEYS), strict=True):
        assert answer is not None
        data, found = answer
        assert found == Found(checksum(data), meta)
        assert (data == data_of(key)) is (form == "encrypted")
        both = (data, data_of(key))
        wide, right = (torch.frombuffer(bytearray(each), dtype=torch.bfloat16).double() for each in both)
        largest = right.view(-1, 64).abs().amax(1, keepdim=True).expand(-1, 64).reshape(-1)
        assert torch.all((wide - right).abs() <= torch.maximum(right.abs() / 16, 2 * largest / 448 / 1024))
    assert tier.forget(Namespace("a tenant's secret")) == 5
    assert tier.stats().alarms == {}
    tier.check()
    tier.close()


@pytest.mark.parametrize("form", ["encrypted", "both"])
def test_nothing_can_be_read_without_the_key(place: Place, form: str) -> None:
    plain = [part for key, meta in PAGES for part in (data_of(key)[:16], data_of(key)[-16:], meta.token_ids)]
    secrets = [*plain, b"a tenant's secret"]
    stored(place, AtRest())
    assert all(secret in place.raw() for secret in secrets)
    place.client.flushall()
    place.folder = place.folder / "again"
    stored(place, FORMS[form])
    assert not any(secret in place.raw() for secret in secrets)


@pytest.mark.parametrize("form", FORMS)
def test_a_flipped_bit_is_a_miss_and_an_alarm(place: Place, form: str) -> None:
    stored(place, FORMS[form])

    def flip(stored_pages: bytearray) -> None:
        stored_pages[700] ^= 4

    place.change(flip)
    tier = place.open(FORMS[form])
    answers = reads(tier, KEYS)
    damaged = 1 if place.kind is Tier.DISK else 5
    assert answers.count(None) == damaged
    assert tier.stats().alarms == {"checksum" if form == "fp8" else "authentication": damaged}
    assert tier.exists(KEYS).count(False) == damaged
    tier.close()


def test_pages_change_keys_one_by_one(place: Place) -> None:
    stored(place, ENCRYPTED)
    rotated = place.open(AtRest(KeyRing([NEW, OLD])))
    assert None not in reads(rotated, KEYS)
    later = chain(1, layout=LAYOUT_16, first_token=9000)[0]
    assert rotated.put([page(later)]) == [True]
    rotated.close()
    new_only = place.open(AtRest(KeyRing([NEW])))
    assert reads(new_only, [*KEYS, later[0]])[:5] == [None] * 5
    assert reads(new_only, [later[0]])[0] is not None
    assert new_only.stats().alarms["unknown_key"] == 5
    new_only.close()


def test_a_page_under_a_key_that_is_not_here_is_left_to_those_who_have_it(server: PoolServer, tmp_path: Path) -> None:
    place = Place(Tier.POOL, tmp_path, server)
    stored(place, ENCRYPTED)
    for others in (AtRest(KeyRing([NEW])), AtRest()):
        tier = place.open(others)
        assert reads(tier, KEYS) == [None] * 5
        assert tier.stats().alarms == {"unknown_key": 5}
        tier.close()
    tier = place.open(ENCRYPTED)
    assert None not in reads(tier, KEYS)
    tier.close()
    place.client.close()


def test_what_lies_in_the_clear_and_should_not_is_not_believed(place: Place) -> None:
    stored(place, AtRest())
    tier = place.open(ENCRYPTED)
    assert reads(tier, KEYS) == [None] * 5
    assert tier.stats().alarms == {"in_clear": 5}
    assert tier.put([page(entry) for entry in PAGES]) == [True] * 5
    assert None not in reads(tier, KEYS)
    tier.close()


def test_each_namespace_has_its_own_form(place: Place) -> None:
    secret, small, plain = (chain(2, layout=LAYOUT_16, salt=salt) for salt in ("secret", "small", None))
    at_rest = AtRest(
        KeyRing([OLD]),
        encrypts=Chosen(namespaces=frozenset({Namespace("secret")})),
        fp8=Chosen(namespaces=frozenset({Namespace("small")})),
    )
    tier = place.open(at_rest)
    assert tier.put([page(entry) for entry in (*secret, *small, *plain)]) == [True] * 6
    tier.close()
    raw = place.raw()
    assert [data_of(key) in raw for key, _ in (*secret, *small, *plain)] == [False] * 4 + [True] * 2
    assert [meta.token_ids in raw for _, meta in plain] == [True] * 2
    tier = place.open(at_rest)
    answers = reads(tier, [key for key, _ in (*secret, *plain)])
    assert [answer and answer[0] for answer in answers] == [data_of(key) for key, _ in (*secret, *plain)]
    assert None not in reads(tier, [key for key, _ in small])
    tier.close()


def test_who_stores_no_fp8_does_not_take_it_for_pages(server: PoolServer, tmp_path: Path) -> None:
    place = Place(Tier.POOL, tmp_path, server)
    stored(place, FORMS["fp8"])
    tier = place.open(AtRest())
    assert reads(tier, KEYS) == [None] * 5
    assert (tier.stats().misses, tier.stats().alarms) == ({"form": 5}, {})
    tier.close()
    tier = place.open(FORMS["fp8"])
    assert None not in reads(tier, KEYS)
    tier.close()
    place.client.close()


def test_in_fp8_a_disk_holds_nearly_twice_the_pages(tmp_path: Path) -> None:
    wide = replace(LAYOUT_16, page_tokens=64)
    options = DiskOptions(at_rest=AtRest(fp8=ALL))
    tier = DiskTier(wide, tmp_path, capacity_bytes=9 * wide.page_bytes, options=options)
    assert tier.slots == 16
    assert (tmp_path / "pages.slab").stat().st_size - 4096 <= 9 * wide.page_bytes
    tier.close()


def test_a_page_that_has_no_narrow_form_is_not_stored(place: Place) -> None:
    tier = place.open(AtRest(fp8=Chosen(namespaces=frozenset({Namespace("a tenant's secret")}))))
    data = bytearray(data_of(KEYS[0]))
    data[-2:] = b"\xc0\x7f"  # not a number
    odd = Page(*PAGES[0], memoryview(data), checksum(data))
    assert tier.put([odd, page(PAGES[1])]) == [False, True]
    assert tier.stats().dropped == 1
    assert [answer is None for answer in reads(tier, KEYS[:2])] == [True, False]
    tier.check()
    tier.close()


def test_nothing_is_narrow_or_encrypted_unless_asked_for() -> None:
    assert DiskOptions().at_rest == PoolOptions().at_rest == AtRest(None, ALL, NONE)
    assert AtRest().is_plain
