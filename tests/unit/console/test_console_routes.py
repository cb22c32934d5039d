from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.console.run_routes import RUNS_PER_PAGE
from tests.samples.agent_runs import RunShape, agent_run, plain_record, put
from tests.samples.console import console_app, visitor
from tracing.record import RequestRecord
from tracing.store import TraceStore, TraceStoreOptions


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3", TraceStoreOptions(max_age_ns=None))
    yield store
    store.close()


@pytest.fixture
async def client(store: TraceStore) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(console_app(store))) as client:
        yield client


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("/console", 200),
        ("/console/", 200),
        ("/console?window=nonsense", 200),
        ("/console?form=csv", 200),
        ("/console/runs", 200),
        ("/console/runs?q=x&window=24h&status=failed&last=5&last_tenant=a&last_run=b", 200),
        ("/console/runs?last=99999999999999999999999&last_tenant=a&last_run=b&window=nonsense", 200),
        ("/console/runs?last=9999999999999999999&status=nonsense&hit_below=x&cost_above=1e999", 200),
        ("/console/runs?hit_below=50&cost_above=0.001&model=m&team=t&agent=a&form=json", 200),
        ("/console/runs?form=nonsense", 200),
        ("/console/runs/run-7f3a90c2", 200),
        ("/console/runs/run-7f3a90c2?page=nonsense", 200),
        ("/console/runs/run-7f3a90c2?page=999999", 200),
        ("/console/runs/run-7f3a90c2?step=7", 200),
        ("/console/runs/run-7f3a90c2/diff?a=2&b=3", 200),
        ("/console/runs/run-7f3a90c2/diff?a=2&b=300", 404),
        ("/console/runs/run-7f3a90c2/diff", 404),
        ("/console/runs/none/diff?a=1&b=2", 404),
        ("/console/runs/none", 404),
        ("/console/prefixes", 200),
        ("/console/prefixes?form=csv", 200),
        ("/console/what-if", 200),
        ("/console/what-if?run=none", 400),
        ("/console/what-if?window=7d&policy=nonsense&host=x&engine=nonsense", 400),
        ("/console/instances", 200),
        ("/console/instances?form=json", 200),
        ("/console/stores", 200),
        ("/console/index", 200),
        ("/console/settings", 200),
        ("/console/keys", 200),
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
    assert "default-src 'self'" in policy
    assert "object-src 'none'" in policy
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
    first = await (await client.get("/console/runs?window=")).text()
    address = first.split('<p class="pager"><a href="')[1].split('"')[0].replace("&amp;", "&")
    second = await (await client.get(address)).text()
    for number in range(RUNS_PER_PAGE + 7):
        places = [f"<code>run-n{number:03d}</code>" in html for html in (first, second)]
        assert places.count(True) == 1, number


async def test_a_tenant_sees_its_own_runs_and_requests_only(store: TraceStore) -> None:
    mine = agent_run(RunShape(run_id="run-mine", tenant="a", agent="my-agent"))
    theirs = agent_run(RunShape(run_id="run-theirs", tenant="b", agent="their-agent"))
    put(store, *mine, *theirs)
    async with TestClient(TestServer(console_app(store, visitor("a")))) as client:
        page = await (await client.get("/console/runs")).text()
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
