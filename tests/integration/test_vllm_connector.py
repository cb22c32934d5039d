"""The vLLM connector's halves around real tiers: LMDB and a slab on disk, a Valkey, torch tensors for the cache."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvstore.deadline import Allowance
from kvstore.page import PageLayout, Tier
from kvstore.plugins.vllm.messages import Removed, Stored
from kvstore.plugins.vllm.shared_lookup import Places, SharedLookup
from kvstore.tiers.base import PageTier
from kvstore.tiers.disk import DiskOptions, DiskTier
from kvstore.tiers.host import HostTier
from kvstore.tiers.pool import PoolTier
from kvstore.tiers.pool_server import PoolServer
from kvstore.tiers.pool_topology import PoolOptions
from kvstore.tiers.slab import SLAB_NAME
from kvstore.worth import FetchRate, WorthOptions
from tests.samples.paged_engine import (
    BLOCK,
    PAGE_BYTES,
    Medium,
    PagedEngine,
    Position,
    Request,
    block_content,
    layout,
)
from tests.samples.pages import PATIENCE

PATIENT = PoolOptions(read_s=PATIENCE, write_s=PATIENCE)
PROMPT = list(range(1000, 1000 + 10 * BLOCK + 3))


@pytest.fixture(scope="module")
def server() -> Iterator[PoolServer]:
    with PoolServer(max_bytes=64 << 20) as running:
        yield running


@pytest.fixture
def gates(engines: list[PagedEngine]) -> Iterator[Callable[[], threading.Event]]:
    """Gates, which open before the engines are closed."""
    made: list[threading.Event] = []

    def gate() -> threading.Event:
        made.append(threading.Event())
        return made[-1]

    yield gate
    for each in made:
        each.set()


@pytest.fixture(autouse=True)
def engines() -> Iterator[list[PagedEngine]]:
    running: list[PagedEngine] = []
    yield running
    for engine in running:
        engine.close()


def host(layout: PageLayout, pages: int = 16) -> HostTier:
    return HostTier(layout, capacity_bytes=pages * PAGE_BYTES)


def disk(layout: PageLayout, folder: Path) -> DiskTier:
    path = folder / f"rank-{layout.rank}"
    path.mkdir(exist_ok=True)
    return DiskTier(layout, path, capacity_bytes=64 * PAGE_BYTES, options=DiskOptions(read_s=PATIENCE))


def on_disk(folder: Path, engines: list[PagedEngine], **more: object) -> PagedEngine:
    def tiers(layout: PageLayout) -> list[PageTier]:
        return [host(layout), disk(layout, folder)]

    engines.append(PagedEngine(tiers, **more))  # type: ignore[arg-type]
    return engines[-1]


def on_pool(url: str, engines: list[PagedEngine], **more: object) -> PagedEngine:
    def tiers(layout: PageLayout) -> list[PageTier]:
        return [host(layout), PoolTier(layout, url, capacity_bytes=64 * PAGE_BYTES, options=PATIENT)]

    engines.append(PagedEngine(tiers, lookup=lambda layouts: in_pool(layouts, url), **more))  # type: ignore[arg-type]
    return engines[-1]


def in_pool(layouts: Sequence[PageLayout], url: str, **more: object) -> SharedLookup:
    def tiers(layout: PageLayout) -> list[PoolTier]:
        return [PoolTier(layout, url, capacity_bytes=PAGE_BYTES, options=PATIENT)]

    return SharedLookup(layouts, tiers, **more)  # type: ignore[arg-type]


def test_blocks_come_back_from_host_and_after_a_restart_from_disk(tmp_path: Path, engines: list[PagedEngine]) -> None:
    first = on_disk(tmp_path, engines)
    assert first.serve(Request("cold", PROMPT)).loaded == 0
    assert first.serve(Request("warm", PROMPT)).loaded == 10
    first.idle()
    engines.remove(first)
    first.close()
    again = on_disk(tmp_path, engines)
    served = again.serve(Request("restarted", PROMPT))
    assert (served.loaded, served.computed, served.failed) == (10, 0, 0)


def test_at_least_one_token_is_left_to_compute(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    engine.serve(Request("a", PROMPT[: 4 * BLOCK]))
    assert engine.serve(Request("b", PROMPT[: 4 * BLOCK])).loaded == 3
    assert engine.serve(Request("c", PROMPT[: 4 * BLOCK + 1])).loaded == 4


def test_another_salt_is_another_prompt(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    engine.serve(Request("red", PROMPT, cache_salt="red"))
    assert engine.serve(Request("blue", PROMPT, cache_salt="blue")).loaded == 0
    assert engine.serve(Request("none", PROMPT)).loaded == 0
    assert engine.serve(Request("red again", PROMPT, cache_salt="red")).loaded == 10


def test_every_block_is_saved_once_however_the_prompt_is_cut(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    engine.serve(Request("a", PROMPT), chunk=5)
    engine.idle()
    stored = [page[0] for change in engine.told if isinstance(change, Stored) for page in change.pages]
    assert sorted(stored) == sorted(2 * Request("a", PROMPT).block_hashes)  # host and disk
    assert engine.serve(Request("b", PROMPT)).loaded == 10


def test_what_was_only_guessed_is_not_saved(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    request = Request("a", PROMPT[: 2 * BLOCK])
    engine.scheduler.track(request)
    plan = engine.scheduler.plan({"a": 2 * BLOCK}, {"a": 1}, lambda _: [0, 1])
    assert [save.block_id for save in plan.saves] == [0]


def test_adapters_and_media_are_kept_out(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    engine.serve(Request("text", PROMPT))
    assert engine.serve(Request("adapter", PROMPT, lora_request=object())).loaded == 0
    assert engine.serve(Request("embedded", PROMPT, prompt_embeds=object())).loaded == 0
    image = [Medium(Position(3 * BLOCK + 1))]
    assert engine.serve(Request("image", PROMPT, mm_features=image)).loaded == 3
    other = list(range(5000, 5000 + 10 * BLOCK))
    engine.serve(Request("new image", other, mm_features=image))
    assert engine.serve(Request("the same as text", other)).loaded == 3


def test_two_engines_share_through_the_pool(server: PoolServer, engines: list[PagedEngine]) -> None:
    first, second = on_pool(server.url, engines, weights="shared"), on_pool(server.url, engines, weights="shared")
    first.serve(Request("a", PROMPT))
    first.idle()
    assert first.tiers_of(Request("a", PROMPT).block_hashes[0]) >= {Tier.HOST, Tier.POOL}
    request = Request("b", PROMPT)
    assert second.serve(request).loaded == 10
    assert second.serve(Request("other", PROMPT, cache_salt="other")).loaded == 0


def test_other_weights_share_nothing(server: PoolServer, tmp_path: Path, engines: list[PagedEngine]) -> None:
    first, second = on_pool(server.url, engines, weights="one"), on_pool(server.url, engines, weights="another")
    first.serve(Request("a", PROMPT))
    first.idle()
    assert second.serve(Request("b", PROMPT)).loaded == 0


def test_a_request_that_waited_long_asks_the_pool_again(server: PoolServer, engines: list[PagedEngine]) -> None:
    now_s = [0.0]
    engine = on_pool(server.url, engines, weights="patient")
    lookup = in_pool([layout(weights="patient")], server.url, clock=lambda: now_s[0])
    names = Request("a", PROMPT).block_hashes

    def ask() -> None:
        if lookup.is_due("a"):
            lookup.ask("a", names, {Tier.POOL})

    ask()
    assert _answer(lookup, "a") == {}
    engine.serve(Request("a", PROMPT))
    engine.idle()
    ask()
    assert _answer(lookup, "a") == {}  # a moment ago
    now_s[0] += 3.0
    ask()
    assert _answer(lookup, "a") == dict.fromkeys(names, Tier.POOL)
    lookup.forget("a")
    assert lookup.answer("a") == {}
    lookup.close()


def _answer(lookup: SharedLookup, request_id: str) -> Places:
    while (answer := lookup.answer(request_id)) is None:
        pass
    return answer


def test_a_pool_that_goes_away_costs_its_hits_alone(engines: list[PagedEngine]) -> None:
    with PoolServer(max_bytes=16 << 20) as server:
        first, second = on_pool(server.url, engines), on_pool(server.url, engines)
        first.serve(Request("a", PROMPT))
        first.idle()
        server.stop()
        assert second.serve(Request("b", PROMPT)).loaded == 0
        assert second.serve(Request("c", PROMPT)).loaded == 10  # its own memory has them now
        first.idle()
        second.idle()


@pytest.mark.parametrize("page", [0, 4, 9])
def test_a_flipped_bit_on_disk_is_computed_again(page: int, tmp_path: Path, engines: list[PagedEngine]) -> None:
    first = on_disk(tmp_path, engines)
    first.serve(Request("a", PROMPT))
    first.idle()
    engines.remove(first)
    first.close()
    name = Request("a", PROMPT).block_hashes[page]
    again = on_disk(tmp_path, engines)
    _flip_page(tmp_path / "rank-0" / SLAB_NAME, name)
    served = again.serve(Request("b", PROMPT))
    assert (served.loaded, served.failed) == (page, 10 - page)
    assert again.workers[0].failed_pages == 10 - page
    assert again.serve(Request("c", PROMPT)).loaded == 10  # it was stored again


def _forget(engine: PagedEngine, *tiers: Tier, rank: int = 0) -> None:
    for tier in engine.workers[rank]._store.tiers:
        if tier.tier in tiers:
            tier.clear()
    engine.step({}, [], Request("nobody", []))


def _flip_page(slab: Path, name: bytes) -> None:
    content = bytearray(slab.read_bytes())
    wanted = block_content(name, rank=0, layer=0).numpy().tobytes()
    place = bytes(content).index(wanted)
    content[place + 7] ^= 0x20
    slab.write_bytes(bytes(content))


def test_a_disk_that_hangs_is_a_block_that_failed_to_load(
    engines: list[PagedEngine], gates: Callable[[], threading.Event]
) -> None:
    gate = gates()

    class Hanging(HostTier):
        """Stands for a disk whose reads hang until the gate opens."""

        tier = Tier.DISK

        def _read(self, wanted):  # type: ignore[no-untyped-def]
            gate.wait()
            return super()._read(wanted)

    def tiers(layout: PageLayout) -> list[PageTier]:
        return [host(layout), Hanging(layout, capacity_bytes=64 * PAGE_BYTES)]

    now_s = [0.0]
    engine = PagedEngine(tiers, load_s=Allowance(0.05), clock=lambda: now_s[0])
    engines.append(engine)
    engine.serve(Request("a", PROMPT))
    engine.idle()
    _forget(engine, Tier.HOST)
    served = engine.serve(Request("b", PROMPT))
    assert (served.loaded, served.failed) == (0, 10)
    request = Request("c", PROMPT)
    for index, block_id in enumerate(served.block_ids[:10]):
        assert engine.holds(block_id, request.block_hashes[index])
    _forget(engine, Tier.HOST)
    assert engine.serve(Request("d", PROMPT)).failed == 0  # nothing is offered of it …
    _forget(engine, Tier.HOST)
    now_s[0] += 20.0
    assert engine.serve(Request("e", PROMPT)).failed == 0  # … until a read for nobody has come, however long that takes
    gate.set()  # what comes late is written nowhere
    engine.workers[0].close()
    engines.remove(engine)
    engine.scheduler.close()
    for index, block_id in enumerate(served.block_ids[:10]):
        assert engine.holds(block_id, request.block_hashes[index])


def test_a_disk_that_turned_slow_is_waited_for_as_long_as_computing_takes(
    engines: list[PagedEngine], gates: Callable[[], threading.Event]
) -> None:
    gate = gates()

    class Slow(HostTier):
        """Stands for a disk that takes its time."""

        tier = Tier.DISK

        def _read(self, wanted):  # type: ignore[no-untyped-def]
            gate.wait()
            return super()._read(wanted)

    def tiers(layout: PageLayout) -> list[PageTier]:
        return [host(layout), Slow(layout, capacity_bytes=64 * PAGE_BYTES)]

    engine = PagedEngine(tiers, worth=WorthOptions(prefill_tokens_per_s=1_000.0))  # a load may take a minute
    engines.append(engine)
    engine.serve(Request("a", PROMPT))
    engine.idle()
    _forget(engine, Tier.HOST)
    assert engine.serve(Request("b", PROMPT)).failed == 10  # with the gate closed
    gate.set()


def test_a_block_counts_once_every_rank_has_it(tmp_path: Path, engines: list[PagedEngine]) -> None:
    def tiers(layout: PageLayout) -> list[PageTier]:
        return [host(layout), disk(layout, tmp_path)]

    engine = PagedEngine(tiers, ranks=2)
    engines.append(engine)
    engine.serve(Request("a", PROMPT))
    engine.idle()
    assert engine.serve(Request("b", PROMPT)).loaded == 10
    _forget(engine, Tier.HOST, rank=1)
    assert engine.serve(Request("mixed", PROMPT)).loaded == 10  # one rank from memory, one from disk
    _forget(engine, Tier.HOST, Tier.DISK, rank=1)
    names = Request("a", PROMPT).block_hashes
    assert all(not engine.tiers_of(name) for name in names)
    assert engine.serve(Request("c", PROMPT)).loaded == 0


def test_what_is_stored_and_evicted_is_told_in_order(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    for number in range(4):
        engine.serve(Request(f"r{number}", list(range(number * 1000, number * 1000 + 8 * BLOCK))))
        engine.idle()  # what is still on its way to disk leaves the host tier no room
    held: dict[Tier, set[bytes]] = {Tier.HOST: set(), Tier.DISK: set()}
    for change in engine.told:
        if isinstance(change, Stored):
            names = {page[0] for page in change.pages}
            assert not names & held[change.tier]
            held[change.tier] |= names
        else:
            assert isinstance(change, Removed)
            assert set(change.hashes) <= held[change.tier]
            held[change.tier] -= set(change.hashes)
    assert (len(held[Tier.HOST]), len(held[Tier.DISK])) == (16, 32)
    assert not engine.scheduler.has_work


def test_a_reset_forgets_every_tier(tmp_path: Path, engines: list[PagedEngine]) -> None:
    engine = on_disk(tmp_path, engines)
    engine.serve(Request("a", PROMPT))
    engine.idle()
    engine.scheduler.clear()
    assert engine.scheduler.has_work
    engine.idle()
    assert engine.serve(Request("b", PROMPT)).loaded == 0


def test_the_engines_own_speed_is_learned_from_its_prompts(tmp_path: Path, engines: list[PagedEngine]) -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 0.5
        return now_s[0]

    engine = on_disk(tmp_path, engines, worth=WorthOptions(), clock=clock)
    assert engine.worth.prefill.tokens_per_s is None
    engine.serve(Request("a", PROMPT))
    assert engine.worth.prefill.tokens_per_s is not None
    assert 0 < engine.worth.prefill.tokens_per_s <= 2 * len(PROMPT)


def test_a_slow_pool_is_not_even_asked_until_it_is_fast_again(server: PoolServer, engines: list[PagedEngine]) -> None:
    first = on_pool(server.url, engines, weights="slow")
    first.serve(Request("a", PROMPT))
    first.idle()
    now_s = [0.0]
    worth = WorthOptions(prefill_tokens_per_s=1_000.0)
    second = on_pool(server.url, engines, weights="slow", worth=worth, clock=lambda: now_s[0])
    for _ in range(10):
        second.worth.fetched(Tier.POOL, 10 * PAGE_BYTES, 5.0, now_s=0.0)
    lookup = second.scheduler._lookup
    assert lookup is not None
    assert second.serve(Request("b", PROMPT[: 8 * BLOCK])).loaded == 0
    assert lookup.take_times() == []
    names = Request("c", PROMPT).block_hashes
    while not second.worth.pays_to_ask(Tier.POOL, 10, page_bytes=PAGE_BYTES, page_tokens=BLOCK):
        now_s[0] += 10.0  # longer than a refusal stands without a new reading
        second.scheduler.track(Request("c", PROMPT))
        second.step({}, [], Request("nobody", []))
        second.scheduler.finished("c")
    _forget(second, Tier.HOST)
    assert second.serve(Request("d", PROMPT)).loaded == len(names)


def test_a_slow_tier_is_left_alone_and_looked_at_again(tmp_path: Path, engines: list[PagedEngine]) -> None:
    first = on_disk(tmp_path, engines)
    first.serve(Request("a", PROMPT))
    first.idle()
    engines.remove(first)
    first.close()
    worth = WorthOptions(prefill_tokens_per_s=1_000.0, doubt_s=0.0)
    engine = on_disk(tmp_path, engines, worth=worth)
    for _ in range(20):  # what slow reads teach: 10 blocks take 40 ms to compute
        engine.worth.fetched(Tier.DISK, 10 * PAGE_BYTES, 5.0, now_s=0.0)
    assert engine.serve(Request("b", PROMPT)).loaded == 0
    before = engine.worth.rate(Tier.DISK)
    while engine.worth.rate(Tier.DISK) == before:
        engine.scheduler.offer(Request("c", PROMPT), 0)
        engine.step({}, [], Request("nobody", []))
    assert isinstance(engine.worth.rate(Tier.DISK), FetchRate)
    assert engine.worth.rate(Tier.DISK).seconds(10 * PAGE_BYTES) < before.seconds(10 * PAGE_BYTES)
