"""Pages of other origins, in a real browser too: those that the settings name read answers, others read nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from selenium.webdriver.support.wait import WebDriverWait

from gateway.errors import SettingsError
from gateway.settings import load_settings
from tests.gateways import gateway_for
from tests.samples.chromium import chromium, needs_chromium
from tests.scripted_engine import Asked, Script, ScriptedEngine, answer, stream

KEY = {"id": "page", "secret": "sk-page"}
PAGE = """<title>asking</title><script>
const headers = {"authorization": "Bearer sk-page", "content-type": "application/json"};
const ask = (more) => fetch(new URLSearchParams(location.search).get("at") + "/v1/chat/completions", {
  method: "POST", headers, body: JSON.stringify({model: "m", messages: [{role: "user", content: "hi"}], ...more})});
(async () => {
  const whole = await (await ask({})).json(), streamed = await ask({stream: true}), wrong = await ask({model: "none"});
  window.read = {whole: whole.object, run: streamed.headers.get("x-keepwarm-run"), stream: await streamed.text(),
                 wrong: (await wrong.json()).error.code};
})().then(() => document.title = "read", () => document.title = "nothing");
</script>"""


@asynccontextmanager
async def page() -> AsyncIterator[str]:
    """Serve the page, which asks the gateway that its address names; yield its origin."""

    async def shown(request: web.Request) -> web.Response:
        return web.Response(text=PAGE, content_type="text/html")

    app = web.Application()
    app.router.add_get("/", shown)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def read_by(address: str, profile: Path) -> Any:
    """Open the page in a browser; return what it could read."""
    with chromium(profile) as driver:
        driver.get(address)
        WebDriverWait(driver, 30).until(lambda driver: driver.title != "asking")
        return driver.execute_script("return window.read")


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("allows", ["none", "another", "its own", "any"])
async def test_a_browsers_page_reads_answers_where_its_origin_is_allowed(tmp_path: Path, allows: str) -> None:
    def script_for(asked: Asked) -> Script:
        return Script(events=stream(["a", "b"])) if asked.json.get("stream") else Script(body=answer("hello"))

    async with ScriptedEngine() as engine, page() as origin:
        engine.script_for = script_for
        origins = {"none": [], "another": ["https://else.example"], "its own": [origin], "any": ["*"]}[allows]
        async with gateway_for([engine], tmp_path, keys=[KEY], server={"allowed_origins": origins}) as client:
            read = await asyncio.to_thread(read_by, f"{origin}/?at={client.url}", tmp_path / "profile")
    if allows in ("none", "another"):
        assert read is None
        return
    assert (read["whole"], read["wrong"]) == ("chat.completion", "model_not_found")
    assert read["run"]
    assert read["stream"].endswith("data: [DONE]\n\n")


async def test_what_is_allowed_to_a_page_is_no_way_around_keys_and_methods(tmp_path: Path) -> None:
    origin = "https://chat.example"
    asks = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
    async with (
        ScriptedEngine() as engine,
        gateway_for([engine], tmp_path, keys=[KEY], server={"allowed_origins": [origin]}) as client,
        aiohttp.ClientSession(client.url) as session,
    ):
        async with session.options("/v1/messages", headers=asks) as response:
            assert response.status == 204
            assert response.headers["access-control-allow-origin"] == origin
            assert response.headers["access-control-allow-headers"] == "x-api-key"
            assert response.headers["vary"] == "Origin"
        for stranger in ({**asks, "origin": "https://chat.example.evil"}, {"origin": origin}, {}):
            async with session.options("/v1/messages", headers=stranger) as response:
                assert response.status == 405
                assert ("access-control-allow-origin" in response.headers) is (stranger.get("origin") == origin)
        body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
        async with session.post("/v1/chat/completions", json=body, headers={"origin": origin}) as response:
            assert (response.status, response.headers["access-control-allow-origin"]) == (401, origin)
        assert not engine.asked


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/", "https://", "null", "**", " *"])
def test_what_no_browser_calls_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match="allowed_origins"):
        load_settings(flags={"server": {"allowed_origins": [origin]}}, environment={})
