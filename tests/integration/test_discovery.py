"""Instances come and go while the gateway runs: by file, by DNS and by Kubernetes, and streams do not notice.

DNS is a real server on UDP, its answers made by dnspython; the Kubernetes API server is a scripted one that speaks
lists, pages, watches, bookmarks and expired versions as the real one does (no cluster runs here).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import dns.message
import dns.rcode
import dns.rdatatype
import dns.rrset
import pytest
from aiohttp import web

from gateway.discovery.base import DiscoveryError, Make, Place
from gateway.discovery.kubernetes import KubernetesOptions, KubernetesSource, places_of
from gateway.discovery.names import NameOptions, NameSource
from gateway.instance import InstanceSpec
from tests.gateways import Client, gateway_for
from tests.scripted_engine import DONE, Script, ScriptedEngine, stream

Json = dict[str, Any]


class Told:
    """What a source told last."""

    def __init__(self) -> None:
        self.urls: dict[str, str] = {}
        self.times = 0
        self._changed = asyncio.Condition()

    def __call__(self, specs: Mapping[str, InstanceSpec]) -> None:
        self.urls, self.times = {name: spec.url for name, spec in specs.items()}, self.times + 1

    async def until(self, wanted: dict[str, str]) -> None:
        async with asyncio.timeout(10):
            while self.urls != wanted:  # noqa: ASYNC110 - the source knows nothing of who waits
                await asyncio.sleep(0.01)


def make(name: str, url: str) -> InstanceSpec:
    return InstanceSpec(name, url, cast("Any", None))


@asynccontextmanager
async def running(source: Any) -> AsyncIterator[Told]:
    told = Told()
    task = asyncio.create_task(source.run(told))
    try:
        yield told
    finally:
        task.cancel()
        await asyncio.wait({task})


# ---- files, through a whole gateway


def listed(*engines: ScriptedEngine, names: str = "abc") -> str:
    pairs = zip(names, engines, strict=False)
    return "\n".join(f'[[instances]]\nid = "{name}"\nurl = "{engine.url}"\n' for name, engine in pairs)


@asynccontextmanager
async def by_file(file: Path, home: Path, count: int) -> AsyncIterator[Client]:
    discovery = {"files": [str(file)], "period_s": 0.05}
    async with gateway_for([], home, ready_count=count, instances=[], discovery=discovery) as client:
        yield client


def urls(client: Client) -> dict[str, str]:
    return {name: instance.spec.url for name, instance in client.gateway.fleet.instances.items()}


async def models(client: Client) -> list[str]:
    async with client.session.get(f"{client.url}/v1/models") as response:
        return [model["id"] for model in (await response.json())["data"]]


async def test_a_file_adds_and_removes_and_no_stream_is_dropped(tmp_path: Path) -> None:
    file, gate = tmp_path / "instances.toml", asyncio.Event()
    async with ScriptedEngine() as one, ScriptedEngine() as other:
        one.script = Script(events=stream(["on ", "and ", "on"]), pause=lambda number: gate if number == 2 else None)
        file.write_text(listed(one))
        async with by_file(file, tmp_path / "home", 1) as client, client.chat(stream=True) as response:
            await response.content.readany()
            file.write_text(listed(other))  # the same name, another address
            await client.until(lambda: urls(client) == {"a": other.url})
            await client.gateway.fleet.until_ready(1)
            async with client.chat() as answered:
                assert answered.status == 200
            assert (len(one.asked), len(other.asked)) == (1, 1)
            file.write_text(listed(other, one))
            await client.until(lambda: urls(client) == {"a": other.url, "b": one.url})
            assert await models(client) == ["m"]
            file.write_text("")
            await client.until(lambda: not urls(client))
            async with client.chat() as refused:
                assert refused.status == 503  # nothing serves the model now; somebody may again
            assert await models(client) == []
            async with client.session.get(f"{client.url}/v1/models/m") as shown:
                assert shown.status == 404
            gate.set()
            assert (await response.read()).endswith(DONE)


async def test_a_file_that_is_wrong_or_gone_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "instances.toml"
    async with ScriptedEngine() as engine, ScriptedEngine() as other:
        file.write_text(listed(engine))
        async with by_file(file, tmp_path / "home", 1) as client:
            for wrong in ("[[instances]]\nid = 3\n", listed(engine, other, names="aa"), "nonsense =", None):
                if wrong is None:
                    file.unlink()
                else:
                    file.write_text(wrong)
                await asyncio.sleep(0.2)  # several looks at it
                assert urls(client) == {"a": engine.url}
                async with client.chat() as response:
                    assert response.status == 200
            file.write_text(listed(engine, other) + 'region = "eu"\n')
            await client.until(lambda: len(urls(client)) == 2, limit_s=40)
            assert client.gateway.fleet.regions == {"b": "eu"}  # by which its requests are priced


async def test_what_the_settings_name_is_nobody_elses(tmp_path: Path) -> None:
    file = tmp_path / "instances.toml"
    async with ScriptedEngine() as fixed, ScriptedEngine() as other, ScriptedEngine() as third:
        file.write_text(listed(other, third))
        instances = [{"id": "a", "url": fixed.url}]
        discovery = {"files": [str(file)], "period_s": 0.05}
        async with gateway_for([fixed], tmp_path / "home", instances=instances, discovery=discovery) as client:
            await client.until(lambda: urls(client) == {"a": fixed.url, "b": third.url})


# ---- DNS


class Zone(asyncio.DatagramProtocol):
    """A name server that knows what it is told. ``rcode``: what it answers instead."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        self.rcode: dns.rcode.Rcode | None = None
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, address: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        answer, (question,) = dns.message.make_response(query), query.question
        kind = dns.rdatatype.to_text(question.rdtype)
        if self.rcode is not None:
            answer.set_rcode(self.rcode)
        elif (found := self.records.get((question.name.to_text(), kind))) is not None:
            answer.answer.append(dns.rrset.from_text(question.name, 1, "IN", kind, *found))
        elif not any(name == question.name.to_text() for name, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        assert self._transport is not None
        self._transport.sendto(answer.to_wire(), address)


@asynccontextmanager
async def zone() -> AsyncIterator[tuple[Zone, str]]:
    loop = asyncio.get_running_loop()
    transport, served = await loop.create_datagram_endpoint(Zone, local_addr=("127.0.0.1", 0))
    try:
        yield served, f"127.0.0.1:{transport.get_extra_info('sockname')[1]}"
    finally:
        transport.close()


def named(server: str, *, port: int | None = 8000) -> NameSource:
    options = NameOptions("engines.test.", "e", port, period_s=0.05, timeout_s=1.0, servers=(server,))
    return NameSource(options, cast("Make", make))


async def test_every_address_of_a_name_is_an_instance() -> None:
    async with zone() as (served, server):
        served.records["engines.test.", "A"] = ["10.0.0.2", "10.0.0.1"]
        served.records["engines.test.", "AAAA"] = ["fd00::1"]
        async with running(named(server)) as told:
            await told.until({
                "e-10.0.0.1-8000": "http://10.0.0.1:8000", "e-10.0.0.2-8000": "http://10.0.0.2:8000",
                "e-fd00--1-8000": "http://[fd00::1]:8000",
            })  # fmt: skip
            del served.records["engines.test.", "AAAA"]
            served.records["engines.test.", "A"] = ["10.0.0.2"]
            await told.until({"e-10.0.0.2-8000": "http://10.0.0.2:8000"})
            served.records.clear()  # the name is no more
            await told.until({})


async def test_targets_of_a_service_tell_their_ports() -> None:
    async with zone() as (served, server):
        served.records["engines.test.", "SRV"] = ["0 5 8001 one.test.", "0 5 8002 two.test.", "0 0 0 ."]
        served.records["one.test.", "A"], served.records["two.test.", "A"] = ["10.0.0.1"], ["10.0.0.2"]
        async with running(named(server, port=None)) as told:
            await told.until({
                "e-10.0.0.1-8001": "http://10.0.0.1:8001", "e-10.0.0.2-8002": "http://10.0.0.2:8002",
            })  # fmt: skip
            served.records["engines.test.", "SRV"] = ["0 5 9001 one.test."]  # a port changed, another one went
            await told.until({"e-10.0.0.1-9001": "http://10.0.0.1:9001"})


async def test_a_name_server_that_fails_empties_nothing() -> None:
    async with zone() as (served, server):
        served.records["engines.test.", "A"] = ["10.0.0.1"]
        told, source = Told(), named(server)
        first = asyncio.create_task(source.run(told))
        await told.until({"e-10.0.0.1-8000": "http://10.0.0.1:8000"})
        served.rcode = dns.rcode.SERVFAIL
        with pytest.raises(DiscoveryError):
            await first
        assert told.urls == {"e-10.0.0.1-8000": "http://10.0.0.1:8000"}


# ---- Kubernetes


def piece(
    name: str, endpoints: list[Json], *, ports: list[Json] | None = None, version: str = "1", **more: Any
) -> Json:
    meta = {"name": name, "resourceVersion": version}
    return {"metadata": meta, "addressType": "IPv4", "endpoints": endpoints,
            "ports": ports if ports is not None else [{"name": "http", "port": 8000}], **more}  # fmt: skip


def pod(name: str, *addresses: str, **conditions: bool) -> Json:
    return {"addresses": list(addresses), "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


class ApiServer:
    """Lists by pages of two, watches from a version on, forgets old versions, and wants its token."""

    def __init__(self) -> None:
        self.slices: dict[str, Json] = {}
        self.log: list[tuple[int, Json]] = []
        self.version, self.oldest = 10, 0
        self.token = "t1"
        self.lists = self.watches = 0
        self._changed = asyncio.Condition()
        self._cut = asyncio.Event()

    async def change(self, kind: str, item: Json) -> None:
        """Let something happen; who watches is told."""
        self.version += 1
        item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self.version)}}
        if kind == "DELETED":
            self.slices.pop(item["metadata"]["name"], None)
        elif kind != "BOOKMARK":
            self.slices[item["metadata"]["name"]] = item
        async with self._changed:
            self.log.append((self.version, {"type": kind, "object": item}))
            self._changed.notify_all()

    async def until_watched(self, times: int) -> None:
        """Wait until so many watches have begun."""
        async with asyncio.timeout(10):
            while self.watches < times:  # noqa: ASYNC110 - the server's handler counts
                await asyncio.sleep(0.01)

    async def cut(self) -> None:
        """End every watch that runs."""
        self._cut.set()
        async with self._changed:
            self._changed.notify_all()
        await asyncio.sleep(0)
        self._cut = asyncio.Event()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        assert request.query["labelSelector"] == "kubernetes.io/service-name=vllm"
        if request.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.query.get("watch") == "1":
            return await self._watch(request)
        self.lists += 1
        names, start = sorted(self.slices), int(request.query.get("continue") or 0)
        page = [self.slices[name] for name in names[start : start + 2]]
        more = {"continue": str(start + 2)} if start + 2 < len(names) else {}
        return web.json_response({"items": page, "metadata": {"resourceVersion": str(self.version), **more}})

    async def _watch(self, request: web.Request) -> web.StreamResponse:
        self.watches += 1
        assert request.query["allowWatchBookmarks"] == "true"
        since, cut = int(request.query["resourceVersion"]), self._cut
        response = web.StreamResponse(headers={"content-type": "application/json"})
        await response.prepare(request)
        if since < self.oldest:
            expired = {"type": "ERROR", "object": {"code": 410, "reason": "Expired"}}
            await response.write(json.dumps(expired).encode() + b"\n")
            return response
        while True:
            for version, told in [entry for entry in self.log if entry[0] > since]:
                since = version
                await response.write(json.dumps(told).encode() + b"\n")
            async with self._changed:
                while not (cut.is_set() or (self.log and self.log[-1][0] > since)):
                    await self._changed.wait()
            if cut.is_set():
                return response


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[ApiServer, KubernetesSource, Path]]:
    api, token = ApiServer(), tmp_path / "token"
    token.write_text("t1\n")
    app = web.Application()
    app.add_routes([web.get("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices", api.handle)])
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    options = KubernetesOptions("vllm", "prod", "k", "http", api=url, token=token, ca=None, watch_s=30)
    try:
        yield api, KubernetesSource(options, cast("Make", make)), token
    finally:
        await api.cut()
        await runner.cleanup()


def at(**places: str) -> dict[str, str]:
    return {f"k-{name}": f"http://{address}:8000" for name, address in places.items()}


async def test_slices_are_listed_by_pages_and_followed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, source, _):
        for number in range(5):
            api.slices[f"s{number}"] = piece(f"s{number}", [pod(f"p{number}", f"10.0.0.{number}", ready=True)])
        async with running(source) as told:
            await told.until(at(p0="10.0.0.0", p1="10.0.0.1", p2="10.0.0.2", p3="10.0.0.3", p4="10.0.0.4"))
            assert api.lists == 3
            for number in range(2, 5):
                await api.change("DELETED", api.slices[f"s{number}"])
            await told.until(at(p0="10.0.0.0", p1="10.0.0.1"))
            await api.change("MODIFIED", piece("s0", [pod("p0", "10.0.9.9", ready=True)]))  # same pod, new address
            await told.until(at(p0="10.0.9.9", p1="10.0.0.1"))
            await api.change("ADDED", piece("s9", [pod("p9", "10.0.0.9")]))  # no condition told: it counts as ready
            await told.until(at(p0="10.0.9.9", p1="10.0.0.1", p9="10.0.0.9"))
            assert api.lists == 3


@pytest.mark.parametrize(
    "odd",
    [
        pod("p1", ready=True),  # B043: its address was emptied, not the endpoint deleted
        pod("p1", "", ready=True),
        pod("p1", "10.0.0.1", ready=False),
        pod("p1", "10.0.0.1", ready=True, terminating=True),
    ],
)
async def test_b043_an_endpoint_that_goes_in_an_odd_way_is_gone(odd: Json, tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, source, _):
        api.slices["s"] = piece("s", [pod("p1", "10.0.0.1", ready=True), pod("p2", "10.0.0.2", ready=True)])
        async with running(source) as told:
            await told.until(at(p1="10.0.0.1", p2="10.0.0.2"))
            await api.change("MODIFIED", piece("s", [odd, pod("p2", "10.0.0.2", ready=True)]))
            await told.until(at(p2="10.0.0.2"))


async def test_a_watch_goes_on_from_where_it_ended_and_an_expired_version_is_listed_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, source, _):
        api.slices["s"] = piece("s", [pod("p1", "10.0.0.1", ready=True)])
        async with running(source) as told:
            await told.until(at(p1="10.0.0.1"))
            await api.until_watched(1)
            await api.change("BOOKMARK", {"metadata": {}})
            await api.cut()
            await api.change("ADDED", piece("t", [pod("p2", "10.0.0.2", ready=True)]))
            await told.until(at(p1="10.0.0.1", p2="10.0.0.2"))
            assert (api.lists, api.watches) == (1, 2)
            # what happened meanwhile is forgotten by the server: only a list can tell
            await api.cut()
            del api.slices["s"]
            api.version += 5
            api.oldest, api.log = api.version, []
            await told.until(at(p2="10.0.0.2"))
            assert api.lists == 2


async def test_the_token_is_read_anew(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (api, source, token):
        api.slices["s"] = piece("s", [pod("p1", "10.0.0.1", ready=True)])
        async with running(source) as told:
            await told.until(at(p1="10.0.0.1"))
            await api.until_watched(1)
            api.token = "t2"
            token.write_text("t2")
            await api.cut()
            await api.change("ADDED", piece("t", [pod("p2", "10.0.0.2", ready=True)]))
            await told.until(at(p1="10.0.0.1", p2="10.0.0.2"))
        api.token = "t3"
        with pytest.raises(DiscoveryError, match="401"):
            await source.run(Told())


def test_ports_are_found_by_name_or_number_or_where_there_is_only_one() -> None:
    ports = [{"name": "http", "port": 8000}, {"name": "events", "port": 5557}]
    item = piece("s", [pod("p", "10.0.0.1")], ports=ports)

    def port(wanted: str | int | None, among: Json = item) -> list[int]:
        options = KubernetesOptions("vllm", "prod", "k", wanted)
        return [place.port for place in places_of([among], options).values()]

    assert port("http") == [8000]
    assert port(5557) == [5557]
    assert port("nothing") == port(None) == []
    assert port(None, piece("s", [pod("p", "10.0.0.1")])) == [8000]


def test_a_pod_of_two_families_is_one_instance() -> None:
    six = piece("a", [pod("p", "fd00::1")], addressType="IPv6")
    four = piece("b", [pod("p", "10.0.0.1")])
    options = KubernetesOptions("vllm", "prod", "k", "http")
    assert places_of([six, four], options) == places_of([four, six], options) == {"k-p": Place("10.0.0.1", 8000)}
    assert places_of([six], options)["k-p"].url == "http://[fd00::1]:8000"
