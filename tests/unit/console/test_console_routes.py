from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from gateway.console.routes import RUNS_PER_PAGE, routes
from tests.samples.agent_runs import RunShape, agent_run, plain_record
from tracing.record import RequestRecord
from tracing.store import TraceStore, TraceStoreOptions


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3", TraceStoreOptions(max_age_ns=None))
    yield store
    store.close()


@pytest.fixture
async def client(store: TraceStore) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(application(store))) as client:
        yield client


def application(store: TraceStore, tenant: str | None = None) -> web.Application:
    app = web.Application()
    app.add_routes(routes(store, tenant_of=lambda _request: tenant))
    return app


def put(store: TraceStore, *records: RequestRecord) -> None:
    for record in records:
        store.append(record)
    assert store.flush(30)


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/console", 200),
        ("/console/", 200),
        ("/console?q=x&window=24h&failed=1&before=5", 200),
        ("/console?before=99999999999999999999999&window=nonsense", 200),
        ("/console?before=9999999999999999999", 200),
        ("/console/runs/run-7f3a90c2", 200),
        ("/console/runs/run-7f3a90c2?page=nonsense", 200),
        ("/console/runs/run-7f3a90c2?page=999999", 200),
        ("/console/runs/none", 404),
        ("/console/requests/7f3a90c2-003", 200),
        ("/console/requests/none", 404),
        ("/console/nothing/here", 404),
        ("/console/static/nothing.css", 404),
        ("/console/static/..%2Fpages.py", 404),
        ("/console/runs/%00", 404),
        ("/console/static/console.css", 200),
    ],
)
async def test_every_answer_has_its_status_and_a_strict_policy(
    store: TraceStore, client: TestClient, address: str, status: int
) -> None:
    put(store, *agent_run())
    answer = await client.get(address)
    assert answer.status == status
    policy = answer.headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["X-Content-Type-Options"] == "nosniff"


async def test_files_are_kept_for_ever_under_their_digest_only(store: TraceStore, client: TestClient) -> None:
    page = await (await client.get("/console")).text()
    address = page.split('rel="stylesheet" href="')[1].split('"')[0]
    kept = await client.get(address)
    assert "immutable" in kept.headers["Cache-Control"]
    assert kept.content_type == "text/css"
    assert (await client.get("/console/static/console.css?v=other")).headers["Cache-Control"] == "no-cache"
    assert (await client.get("/console")).headers["Cache-Control"] == "no-store"


async def test_a_run_is_exported_as_its_records(store: TraceStore, client: TestClient) -> None:
    records = agent_run()
    put(store, *records)
    answer = await client.get("/console/runs/run-7f3a90c2/records.jsonl")
    lines = (await answer.read()).splitlines()
    assert [msgspec.json.decode(line, type=RequestRecord) for line in lines] == records


async def test_older_runs_are_one_link_away_and_none_is_left_out(store: TraceStore, client: TestClient) -> None:
    for number in range(RUNS_PER_PAGE + 7):
        put(store, *agent_run(RunShape(run_id=f"run-n{number:03d}", steps=1, start_ns=10**18 + number * 10**9)))
    first = await (await client.get("/console?window=")).text()
    address = first.split('<a href="/console?')[1].split('"')[0].replace("&amp;", "&")
    second = await (await client.get(f"/console?{address}")).text()
    for number in range(RUNS_PER_PAGE + 7):
        places = [f"<code>run-n{number:03d}</code>" in html for html in (first, second)]
        assert places.count(True) == 1, number


async def test_a_tenant_sees_its_own_runs_and_requests_only(store: TraceStore) -> None:
    mine = agent_run(RunShape(run_id="run-mine", tenant="a", agent="my-agent"))
    theirs = agent_run(RunShape(run_id="run-theirs", tenant="b", agent="their-agent"))
    put(store, *mine, *theirs)
    async with TestClient(TestServer(application(store, tenant="a"))) as client:
        page = await (await client.get("/console")).text()
        assert "my-agent" in page
        assert "their-agent" not in page
        for address in (
            "/console/runs/run-theirs",
            "/console/runs/run-theirs?tenant=b",
            "/console/runs/run-theirs/records.jsonl?tenant=b",
            f"/console/requests/{theirs[0].request_id}",
        ):
            assert (await client.get(address)).status == 404, address
        assert (await client.get("/console/runs/run-mine?tenant=b")).status == 200


async def test_one_name_in_two_tenants_asks_whose(store: TraceStore, client: TestClient) -> None:
    put(store, *agent_run(RunShape(run_id="nightly", tenant="default", steps=1)))
    put(store, plain_record("other", link=agent_run(RunShape(run_id="nightly", steps=1))[0].link,
                            identity=agent_run(RunShape(tenant="b"))[0].identity))  # fmt: skip
    page = await (await client.get("/console/runs/nightly")).text()
    assert "Several runs have this name." in page
    for tenant in ("default", "b"):
        assert f'href="/console/runs/nightly?tenant={tenant}"' in page
        assert (await client.get(f"/console/runs/nightly?tenant={tenant}")).status == 200
