"""Keys in the console: made and revoked by our own forms, by admins only, and noted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gateway.access.database import SqliteAccess
from gateway.access.roles import Right
from gateway.access.store import AccessStore
from gateway.console.key_desk import KeyDesk
from tests.samples.console import console_app, visitor
from tracing.store import TraceStore

WORD = {"word": "word"}


@pytest.fixture
def traces(tmp_path: Path) -> Iterator[TraceStore]:
    store = TraceStore(tmp_path / "t.sqlite3")
    yield store
    store.close()


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[AccessStore]:
    store = AccessStore(SqliteAccess(tmp_path / "access.sqlite3"))
    yield store
    store.close()


@pytest.fixture
async def client(traces: TraceStore, keys: AccessStore) -> AsyncIterator[TestClient]:
    async with TestClient(TestServer(console_app(traces, keys=KeyDesk(keys, ("root",))))) as client:
        yield client


async def test_a_key_is_made_its_secret_shown_once_and_revoked(client: TestClient, keys: AccessStore) -> None:
    made = await (
        await client.post("/console/keys", data={**WORD, "id": "ci", "role": "viewer", "note": "<i>x"})
    ).text()
    secret = made.split('<pre tabindex="0">')[1].split("<")[0]
    assert secret.startswith("sk-kw-")
    (key,) = keys.keys()
    assert (key.id, [role.value for role in key.roles]) == ("ci", ["viewer"])
    listed = await (await client.get("/console/keys")).text()
    assert secret not in listed
    assert "&lt;i&gt;x" in listed
    assert "<code>root</code>" in listed
    answer = await client.post("/console/keys/ci/revoke", data=WORD)
    assert answer.status == 200  # the list, after a redirect
    assert keys.key("ci").revoked_ns is not None
    assert [entry.action for entry in keys.audit()] == ["key.revoke", "key.create"]
    assert keys.audit()[0].actor == "tester"


@pytest.mark.parametrize(
    ("form", "headers", "status"),
    [
        ({"id": "a", "role": "user"}, {}, 403),
        ({"word": "guess", "id": "a", "role": "user"}, {}, 403),
        ({**WORD, "id": "a", "role": "user"}, {"origin": "https://evil.example"}, 403),
        ({**WORD, "id": "a", "role": "user"}, {"sec-fetch-site": "cross-site"}, 403),
        ({**WORD, "id": "no such name!", "role": "user"}, {}, 400),
        ({**WORD, "id": "a"}, {}, 400),
        ({**WORD, "id": "a", "role": "nonsense"}, {}, 400),
        ({**WORD, "id": "a", "role": "user", "tenant": "nobody"}, {}, 400),
        ({**WORD, "id": "a", "note": "x" * 20_000}, {}, 413),
    ],
)
async def test_what_is_no_good_form_makes_no_key(
    client: TestClient, keys: AccessStore, form: dict[str, str], headers: dict[str, str], status: int
) -> None:
    answer = await client.post("/console/keys", data=form, headers=headers)
    assert answer.status == status
    assert keys.keys() == []


async def test_only_admins_come_near_keys_settings_and_engines(traces: TraceStore, keys: AccessStore) -> None:
    for who, own in ((visitor("a", Right.SEE_RUNS), "runs"), (visitor("a", Right.SEE_COSTS), "cost")):
        async with TestClient(TestServer(console_app(traces, who, keys=KeyDesk(keys)))) as client:
            for page in ("keys", "settings", "instances", "stores", "index"):
                assert (await client.get(f"/console/{page}")).status == 403, page
            assert (await client.post("/console/keys", data={**WORD, "id": "a", "role": "admin"})).status == 403
            assert (await client.get(f"/console/{own}")).status == 200
            other = "cost" if own == "runs" else "runs"
            assert (await client.get(f"/console/{other}")).status == 403
    assert keys.keys() == []


async def test_a_visitor_of_costs_is_led_to_them(traces: TraceStore) -> None:
    async with TestClient(TestServer(console_app(traces, visitor("a", Right.SEE_COSTS)))) as client:
        answer = await client.get("/console")
        assert answer.url.path == "/console/cost"
        for page in ("live?view=run&run=x", "prefixes", "breaks", "what-if?window=1h"):
            assert (await client.get(f"/console/{page}")).status == 403, page


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"word=word&id=a&role=user"),  # no boundary
        ("multipart/form-data; boundary=x", b'--x\r\nContent-Disposition: form-data; name="id"\r\n\r\na\r\n--x--\r\n'),
        ("application/json", b'{"id":"a"}'),
        ("application/x-www-form-urlencoded; charset=wizard", b"word=word&id=\xff&role=user"),
        ("application/x-www-form-urlencoded", b"&".join([b"role=user"] * 1000)),
        ("\xff/;;=", b"word=word"),
    ],
)
async def test_what_no_browser_sends_from_our_page_is_refused(
    client: TestClient, keys: AccessStore, kind: str, body: bytes
) -> None:
    answer = await client.post("/console/keys", data=body, headers={"content-type": kind})
    assert answer.status == 400
    assert keys.keys() == []
