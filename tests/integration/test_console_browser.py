"""The console in a real browser: numbers on the page, keyboard, phone width, dark and light, and a clean log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

from gateway.cli import main
from gateway.console.formats import count, money, share
from tests.samples.agent_runs import RunShape
from tests.samples.chromium import chromium, needs_chromium
from tests.samples.console_site import Site, billed_runs, console_site, in_flight
from tracing.detail import BreakKind, Comparison, PromptChange, StepDetail
from tracing.record import RequestRecord, RunLink

DAY_NS = 86_400 * 10**9
NOW_NS = 1_790_000_000 * 10**9
PAGES = (
    "/console",
    "/console?window=7d",
    "/console/runs",
    "/console/runs?status=failed&window=24h",
    "/console/runs/run-0002",
    "/console/runs/run-0003",
    "/console/runs/run-0002/diff?a=3&b=4",
    "/console/requests/0003-005",
    "/console/cost",
    "/console/cost?by=agent",
    "/console/breaks?window=7d",
    "/console/prefixes",
    "/console/what-if?run=run-0004",
    "/console/instances",
    "/console/stores",
    "/console/index",
    "/console/settings",
    "/console/keys",
)
HOSTILE = "<img src=x onerror=\"document.title='broken'\">"

pytestmark = [pytest.mark.browser, needs_chromium]


@pytest.fixture(scope="module")
def runs() -> list[list[RequestRecord]]:
    """Runs of three days, one of them hostile in everything that clients name."""
    half_ns = DAY_NS // 2
    shapes = [
        RunShape(run_id=f"run-{number:04x}", seed=number, steps=number + 4, start_ns=NOW_NS - (6 - number) * half_ns)
        for number in range(1, 6)
    ]
    found = billed_runs(shapes)
    found[2] = [replace(record, labels={"agent": HOSTILE, "step_name": HOSTILE}) for record in found[2]]
    return found


@pytest.fixture(scope="module")
def site(runs: list[list[RequestRecord]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with console_site(tmp_path_factory.mktemp("console"), runs, now_ns=NOW_NS) as site:
        broken, told = runs[1][3], runs[1][2]
        change = PromptChange(
            BreakKind.TIMESTAMP, "system", f"messages[0].{HOSTILE}", 12, 31, 12, 31, "aa", "bb",
            kept_chars=300, repeated_chars=9_000, total_chars=9_500, before=HOSTILE, after="2026-09-21",
        )  # fmt: skip
        site.traces.describe(
            StepDetail(broken.request_id, Comparison.CHANGED, previous_request_id=told.request_id, change=change)
        )
        assert site.traces.flush(30)
        yield site


@pytest.fixture(scope="module")
def address(site: Site) -> str:
    return site.url


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    with chromium(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def browser(driver: WebDriver) -> WebDriver:
    driver.get("about:blank")
    driver.get_log("browser")
    emulate(driver, 1360, 900, "light")
    return driver


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
    browser.get(f"{address}/console/runs")
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
    browser.get(f"{address}/console/runs")
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


def test_nothing_is_wider_than_a_phone_and_both_schemes_are_there(browser: WebDriver, address: str) -> None:
    """Every page at phone and desktop width: no sideways scrolling, nothing in the log, hostile text as text."""
    colours: dict[str, set[str]] = {"light": set(), "dark": set()}
    for scheme, width in (("light", 360), ("dark", 1360)):
        emulate(browser, width, 800, scheme)
        for page in PAGES:
            browser.get(address + page)
            browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
            wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert browser.execute_script(wide) == 0, (page, width)
            colours[scheme].add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
            assert not browser.title.startswith("broken"), page
            assert browser.find_elements(By.CSS_SELECTOR, "main img, main iframe") == [], page
            assert complaints(browser) == [], page
    assert len(colours["light"]) == len(colours["dark"]) == 1
    assert colours["light"] != colours["dark"]


CONTRAST = """
const parse = (text) => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, at) => sum + v * [0.2126, 0.7152, 0.0722][at], 0);
const ground = (element) => {
  for (let at = element; at; at = at.parentElement) {
    const colour = parse(getComputedStyle(at).backgroundColor);
    if (colour.length < 4 || colour[3] > 0.9) return colour;
  }
  return [255, 255, 255];
};
const poor = [];
for (const element of document.querySelectorAll('main *, header *')) {
  if (element.closest('svg, datalist, select, [aria-hidden]') || !element.checkVisibility()) continue;
  if (![...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim())) continue;
  const [a, b] = [light(parse(getComputedStyle(element).color)), light(ground(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) poor.push(`${element.tagName}.${element.className}: ${ratio.toFixed(2)}`);
}
const unnamed = [...document.querySelectorAll('svg[role=img]:not([aria-label]), a:not([href])')]
  .map((element) => element.outerHTML.slice(0, 80));
const fields = [...document.querySelectorAll('input:not([type=hidden]), select')]
  .filter((field) => !field.labels.length && !field.ariaLabel).map((field) => field.name);
return [[...new Set(poor)], unnamed, fields];
"""


def test_text_can_be_read_and_everything_has_a_name(browser: WebDriver, address: str) -> None:
    """Contrast of at least 4.5 to 1 for all text, a label for each field, a name for each picture."""
    for scheme in ("light", "dark"):
        emulate(browser, 1360, 900, scheme)
        for page in PAGES:
            browser.get(address + page)
            assert browser.execute_script(CONTRAST) == [[], [], []], (page, scheme)


def test_every_page_is_reached_and_walked_by_keyboard(browser: WebDriver, address: str) -> None:
    browser.get(f"{address}/console")
    browser.find_element(By.TAG_NAME, "body").send_keys(Keys.TAB)
    assert browser.switch_to.active_element.text == "Skip to content"
    browser.switch_to.active_element.send_keys(Keys.ENTER)
    assert browser.switch_to.active_element.get_attribute("id") == "main"
    for page in ("/console/breaks?window=7d", "/console/prefixes", "/console/what-if?run=run-0004", "/console/index"):
        browser.get(address + page)
        browser.find_element(By.TAG_NAME, "body").send_keys("jj")
        shown = "const e = document.activeElement; return e.matches('[data-nav]') && e.matches(':focus-visible')"
        assert browser.execute_script(shown) is True, page
        names = [link.text for link in browser.find_elements(By.CSS_SELECTOR, "header nav a")]
        assert names[:3] == ["Overview", "Runs", "Cost"]
    browser.get(f"{address}/console/breaks")
    browser.find_element(By.TAG_NAME, "body").send_keys("/")
    assert browser.switch_to.active_element.get_attribute("name") == "run"


def test_the_overview_moves_while_it_is_open(browser: WebDriver, site: Site, runs: list[list[RequestRecord]]) -> None:
    browser.get(f"{site.url}/console?window=1h")
    wait = WebDriverWait(browser, 20)
    wait.until(lambda shown: shown.find_element(By.CSS_SELECTOR, "[data-live-state]").is_displayed())
    assert "In flight\n0" in body(browser)
    site.underway.append(in_flight(runs[0], NOW_NS))
    wait.until(lambda shown: "In flight\n1" in body(shown))
    row = browser.find_element(By.CSS_SELECTOR, ".flights li").text
    assert "streaming" in row
    assert "engine-a" in row
    site.underway.clear()
    wait.until(lambda shown: "In flight\n0" in body(shown))
    assert len(browser.find_elements(By.CSS_SELECTOR, ".fleet tbody tr")) == 4
    assert complaints(browser) == []


def test_a_run_grows_while_it_is_open_and_what_is_unfolded_stays(
    browser: WebDriver, site: Site, runs: list[list[RequestRecord]]
) -> None:
    last = runs[4][-1]
    browser.get(f"{site.url}/console/runs/run-0005#step-2")
    wait = WebDriverWait(browser, 20)
    wait.until(lambda shown: shown.find_element(By.CSS_SELECTOR, "[data-live-state]").is_displayed())
    link = RunLink("run-0005", len(runs[4]) + 1, "tool_call_id", 0.99, last.request_id)
    step = replace(last, request_id="0005-live", link=link)
    site.traces.append(step)
    try:
        selector = f"#step-{len(runs[4]) + 1}"
        wait.until(lambda shown: shown.find_elements(By.CSS_SELECTOR, selector))
        steps = browser.find_elements(By.CSS_SELECTOR, "ol.steps > li")
        assert len(steps) == len(runs[4]) + 1
        assert browser.find_element(By.CSS_SELECTOR, "#step-2 details").get_attribute("open") == "true"
        total = sum(record.charge.amount_nano or 0 for record in [*runs[4], step])
        wait.until(lambda shown: str(money(total, "USD")) in body(shown))
        assert complaints(browser) == []
    finally:
        runs[4].append(step)


def test_a_long_run_is_paged_and_its_picture_leads_to_each_part(
    driver: WebDriver, browser: WebDriver, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """5,000 steps: what a page holds is bounded, however long the run; ``./bench console`` measures the times."""
    long = billed_runs([RunShape(run_id="run-long", steps=5_000, start_ns=NOW_NS - DAY_NS)])
    with console_site(tmp_path_factory.mktemp("long"), long, now_ns=NOW_NS) as site:
        browser.get(f"{site.url}/console/runs/run-long?page=49")
        total = sum(record.charge.amount_nano or 0 for record in long[0])
        assert str(money(total, "USD")) in body(browser)
        steps = browser.find_elements(By.CSS_SELECTOR, "ol.steps > li")
        assert [steps[0].get_attribute("id"), len(steps)] == ["step-2401", 50]
        assert browser.execute_script("return document.querySelectorAll('*').length") < 10_000
        columns = browser.find_elements(By.CSS_SELECTOR, ".whole-tokens a")
        assert len(columns) <= 160
        address = columns[-1].get_dom_attribute("href")
        browser.get(f"{site.url}/console/runs/run-long{address}")
        assert browser.find_elements(By.CSS_SELECTOR, "ol.steps > li")[-1].get_attribute("id") == "step-5000"
        browser.execute_script("window.scrollTo(0, document.body.scrollHeight)")
        assert complaints(browser) == []


def test_pages_agree_with_the_command_line_and_the_ledger(
    browser: WebDriver, site: Site, runs: list[list[RequestRecord]], capsys: pytest.CaptureFixture[str]
) -> None:
    places = ["--ledger", str(site.ledger), "--traces", str(site.traces_path)]
    assert main(["whatif", "run-0004", *places, "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["lines"]
    browser.get(f"{site.url}/console/what-if?run=run-0004")
    rows = browser.find_elements(By.CSS_SELECTOR, "table.whatif tbody tr")
    assert len(rows) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        assert line["title"] in row.text
        assert str(money(line["cost_nano"], "USD")) in row.text
    assert main(["report", "--ledger", str(site.ledger), "--by", "run", "--json"]) == 0
    billed = {group["run"]: group for group in json.loads(capsys.readouterr().out)["groups"]}
    for run in runs[:4]:
        name = run[0].link.run_id if run[0].link else ""
        browser.get(f"{site.url}/console/runs/{name}")
        assert str(money(billed[name]["amount_nano"], "USD")) in body(browser)
        assert count(billed[name]["prompt_tokens"]) in body(browser)
    assert main(["doctor", *places, "--since", "2026-09-01", "--limit", "1000", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    browser.get(f"{site.url}/console/breaks?window=7d")
    assert f"Lost tokens\n{count(told['lost_tokens'])}" in body(browser)
    assert f"Breaks\n{count(told['breaks'])}" in body(browser)
    assert HOSTILE in body(browser)


def test_the_page_of_costs_has_the_numbers_of_the_command_line(
    browser: WebDriver, site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    address, ledger = site.url, site.ledger
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
