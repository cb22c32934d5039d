"""The console in a real browser: numbers on the page, keyboard, phone width, dark and light, and a clean log."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from billing.ledger import Ledger
from billing.ledger_read import LedgerReader, RowFilter
from billing.reports import Report
from gateway.cli import main
from gateway.console.formats import count, money, share
from gateway.console.routes import routes
from tests.samples.agent_runs import RunShape, agent_run
from tracing.record import RequestRecord, Stamps
from tracing.store import TraceStore, TraceStoreOptions

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
DAY_NS = 86_400 * 10**9
HOSTILE = "<img src=x onerror=\"document.title='broken'\">"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        BROWSER is None or DRIVER is None,
        reason="no Chromium or no chromedriver: `apt-get install chromium chromium-driver` (as root) brings both",
    ),
]


@pytest.fixture(scope="module")
def runs() -> list[list[RequestRecord]]:
    shapes = [RunShape(run_id=f"run-{number:04x}", seed=number, steps=number + 4) for number in range(1, 6)]
    runs = [agent_run(replace(shape, start_ns=shape.start_ns + shape.seed * 10**12)) for shape in shapes]
    runs[2] = [replace(record, labels={"agent": HOSTILE, "step_name": HOSTILE}) for record in runs[2]]
    return runs


@pytest.fixture(scope="module")
def ledger(runs: list[list[RequestRecord]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs' rows, a day apart, so that there is a trend."""
    path = tmp_path_factory.mktemp("cost") / "ledger.sqlite3"
    with Ledger(path) as opened:
        for day, run in enumerate(runs):
            for record in run:
                opened.append(replace(record, stamps=later(record.stamps, day)))
    return path


def later(stamps: Stamps, days: int) -> Stamps:
    shift = days * DAY_NS
    names = ("arrived_ns", "routed_ns", "sent_ns", "first_token_ns", "last_token_ns", "closed_ns")
    values = (getattr(stamps, name) for name in names)
    return Stamps(*(None if value is None else value + shift for value in values))


@pytest.fixture(scope="module")
def address(runs: list[list[RequestRecord]], ledger: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    store = TraceStore(tmp_path_factory.mktemp("console") / "t.sqlite3", TraceStoreOptions(max_age_ns=None))
    for run in runs:
        for record in run:
            store.append(record)
    assert store.flush(30)
    loop = asyncio.new_event_loop()
    started: list[int] = []
    ready = threading.Event()

    def report_of(by: Sequence[str], where: RowFilter) -> Report:
        with LedgerReader(ledger) as reader:
            return reader.report(by, where)

    async def start() -> web.AppRunner:
        app = web.Application()
        now_ns = max(record.stamps.closed_ns for run in runs for record in run) + len(runs) * DAY_NS
        app.add_routes(routes(store, clock=lambda: now_ns, report_of=report_of))
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        started.append(runner.addresses[0][1])
        ready.set()
        return runner

    def serve() -> None:
        runner = loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())

    thread = threading.Thread(target=serve)
    thread.start()
    assert ready.wait(30)
    yield f"http://127.0.0.1:{started[0]}"
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    store.close()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
    profile = tmp_path_factory.mktemp("profile")
    flags = [
        "--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking",
        "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
    ]  # fmt: skip
    if os.geteuid() == 0:
        flags.append("--no-sandbox")  # Chromium's sandbox does not run as root
    for flag in flags:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()


@pytest.fixture
def browser(chromium: WebDriver) -> WebDriver:
    chromium.get("about:blank")
    chromium.get_log("browser")
    emulate(chromium, 1360, 900, "light")
    return chromium


def emulate(browser: WebDriver, width: int, height: int, scheme: str) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)


def complaints(browser: WebDriver) -> list[Any]:
    return [entry for entry in browser.get_log("browser") if entry["level"] != "DEBUG"]


def body(browser: WebDriver) -> str:
    return browser.find_element(By.TAG_NAME, "main").text


def test_the_list_shows_every_run_and_exact_totals(
    browser: WebDriver, address: str, runs: list[list[RequestRecord]]
) -> None:
    browser.get(f"{address}/console")
    rows = browser.find_elements(By.CSS_SELECTOR, "table.runs tbody tr")
    assert len(rows) == len(runs)
    records = [record for run in runs for record in run]
    text = body(browser)
    assert str(money(sum(record.charge.amount_nano for record in records), "USD")) in text
    assert str(money(sum(record.charge.saved_nano for record in records), "USD")) in text
    for row, run in zip(rows, reversed(runs), strict=True):
        prompt = sum(record.usage.prompt_tokens for record in run)
        assert run[0].link.run_id in row.text
        assert count(prompt) in row.text
        assert share(sum(record.usage.hit_tokens for record in run), prompt) in row.text
        assert str(money(sum(record.charge.amount_nano for record in run), "USD")) in row.text
    assert browser.title == "Runs · keepwarm"
    assert HOSTILE in text
    assert complaints(browser) == []


def test_a_run_opens_by_keyboard_and_shows_its_steps(
    browser: WebDriver, address: str, runs: list[list[RequestRecord]]
) -> None:
    browser.get(f"{address}/console")
    browser.find_element(By.TAG_NAME, "body").send_keys("j")
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    run = runs[-1]
    assert browser.current_url.endswith(f"/console/runs/{run[0].link.run_id}")
    steps = browser.find_elements(By.CSS_SELECTOR, "ol.steps > li")
    assert len(steps) == len(run)
    assert str(money(sum(record.charge.amount_nano for record in run), "USD")) in body(browser)
    browser.find_element(By.TAG_NAME, "body").send_keys("e")
    script = "return [...document.querySelectorAll('ol.steps > li')].map((step) => step.textContent)"
    for text, record in zip(browser.execute_script(script), run, strict=True):
        assert str(money(record.charge.amount_nano, "USD")) in text
        assert "Decision by expected-ttft" in text
        assert record.request_id in text
    assert browser.execute_script("return document.querySelectorAll('.steps details[open]').length") == len(run)
    bars = steps[-1].find_elements(By.CSS_SELECTOR, "summary .c-tokens rect")
    width = sum(bar.rect["width"] for bar in bars)
    track = steps[-1].find_element(By.CSS_SELECTOR, "summary .c-tokens .track").rect["width"]
    longest = max(record.usage.total_tokens for record in run)
    assert width / track == pytest.approx(run[-1].usage.total_tokens / longest, abs=0.05)
    assert complaints(browser) == []


def test_a_linked_step_is_unfolded_and_a_request_has_a_page(
    browser: WebDriver, address: str, runs: list[list[RequestRecord]]
) -> None:
    record = runs[1][4]
    browser.get(f"{address}/console/runs/{record.link.run_id}#step-5")
    assert browser.find_element(By.CSS_SELECTOR, "#step-5 details").get_attribute("open") == "true"
    browser.find_element(By.CSS_SELECTOR, "#step-5 .foot a[href^='/console/requests/']").click()
    assert browser.current_url == f"{address}/console/requests/{record.request_id}"
    assert str(money(record.charge.amount_nano, "USD")) in body(browser)
    browser.get(f"{address}/console/runs/none")
    assert "Nothing here." in body(browser)
    assert [entry for entry in complaints(browser) if "404" not in entry["message"]] == []


def test_nothing_is_wider_than_a_phone_and_both_schemes_are_there(
    browser: WebDriver, address: str, runs: list[list[RequestRecord]]
) -> None:
    pages = (
        "/console",
        "/console/cost",
        "/console/cost?by=agent",
        f"/console/runs/{runs[2][0].link.run_id}",
        f"/console/requests/{runs[2][5].request_id}",
    )
    colours: dict[str, set[str]] = {"light": set(), "dark": set()}
    for scheme, seen in colours.items():
        for width in (360, 820, 1360):
            emulate(browser, width, 800, scheme)
            for page in pages:
                browser.get(address + page)
                browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
                wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
                assert browser.execute_script(wide) == 0, (page, width)
                seen.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(colours["light"]) == len(colours["dark"]) == 1
    assert colours["light"] != colours["dark"]
    assert complaints(browser) == []


def test_the_page_of_costs_has_the_numbers_of_the_command_line(
    browser: WebDriver, address: str, ledger: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for width in (1360, 390):
        emulate(browser, width, 900, "light")
        browser.get(f"{address}/console/cost?by=agent&window=all")
        assert main(["report", "--ledger", str(ledger), "--by", "agent", "--json"]) == 0
        content = json.loads(capsys.readouterr().out)
        rows = browser.find_elements(By.CSS_SELECTOR, "table.costs tbody tr")
        assert len(rows) == len(content["groups"])
        for row, group in zip(rows, content["groups"], strict=True):
            assert group["agent"] in row.text
            for name in ("amount_nano", "saved_nano"):
                assert str(money(group[name], "USD")) in row.text
            assert count(group["prompt_tokens"]) in row.text
            assert share(group["hit_tokens"], group["prompt_tokens"]) in row.text
        assert str(money(content["totals"][0]["amount_nano"], "USD")) in body(browser)
    browser.find_element(By.CSS_SELECTOR, "select[name=window] option[value='30d']").click()
    browser.find_element(By.CSS_SELECTOR, ".cost-filters button").click()
    WebDriverWait(browser, 10).until(lambda shown: "window=30d" in shown.current_url)
    bars = browser.find_elements(By.CSS_SELECTOR, "svg.trend rect.c-cost")
    assert main(["report", "--ledger", str(ledger), "--by", "day", "--json"]) == 0
    days = json.loads(capsys.readouterr().out)["groups"]
    assert len(bars) == len(days) > 1
    heights, costs = [bar.rect["height"] for bar in bars], [day["amount_nano"] for day in days]
    assert heights.index(max(heights)) == costs.index(max(costs))
    title = browser.find_element(By.CSS_SELECTOR, "svg.trend title").get_attribute("textContent") or ""
    assert title.startswith(days[0]["day"])
    assert HOSTILE in body(browser)
    assert complaints(browser) == []


def test_the_browser_enforces_the_policy_and_the_log_shows_it(browser: WebDriver, address: str) -> None:
    browser.get(f"{address}/console")
    assert complaints(browser) == []
    script = (
        "const each = document.createElement('script'); each.textContent = 'window.ran = 1'; document.body.append(each)"
    )
    browser.execute_script(script)
    assert browser.execute_script("return window.ran") is None
    assert any("Content Security Policy" in entry["message"] for entry in complaints(browser))
