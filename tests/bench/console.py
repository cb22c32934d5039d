"""``./bench console [--steps N] [--json FILE]``: how soon the page of a long run opens, and how it scrolls.

A run of ``--steps`` steps (default 5,000) is stored; headless Chromium opens its first, middle and last page, at
desktop and at phone width, each several times, and scrolls it from top to bottom a third of the window a frame. *Open*
is from the click to the page's load event (navigation timing: server, transfer, parsing, layout); *frames* are the
times between two animation frames while it scrolls. *CPU* is what the page's main thread took, which other programs on
the machine do not change. Server times are of the handler's parts alone.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from gateway.console.pages import run_page
from gateway.console.run_views import STEPS_PER_PAGE, RunPart, pages_of
from tests.samples.agent_runs import RunShape
from tests.samples.console_site import billed_runs, console_site
from tracing.store import TraceStore

NOW_NS = 1_790_000_000 * 10**9
SCROLL = """
const done = arguments[0], frames = [];
const target = () => document.documentElement.scrollHeight - innerHeight;
let last = performance.now();
const tick = (now) => {
  frames.push(now - last);
  last = now;
  if (scrollY >= target() - 1 || frames.length > 2000) return done(frames.slice(1));
  scrollBy(0, innerHeight / 3);
  requestAnimationFrame(tick);
};
requestAnimationFrame((now) => { last = now; requestAnimationFrame(tick); });
"""
OPEN = "const t = performance.getEntriesByType('navigation')[0]; return [t.responseEnd, t.loadEventEnd]"


def main(argv: Sequence[str]) -> int:
    """Measure; print a table."""
    parser = argparse.ArgumentParser(prog="./bench console")
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        runs = billed_runs([RunShape(run_id="run-long", steps=args.steps, start_ns=NOW_NS)])
        with console_site(Path(folder), runs, now_ns=runs[0][-1].stamps.closed_ns) as site:
            found = {
                "steps": args.steps,
                "steps_per_page": STEPS_PER_PAGE,
                "server_ms": server(site.traces, args.repeats),
            }
            found["pages"] = browse(site.url, args.steps, args.repeats, Path(folder))
    print(render(found))
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def server(traces: TraceStore, repeats: int) -> dict[str, float]:
    """Return the median times of the page's parts: the outline, one page of records, the HTML."""
    times: dict[str, list[float]] = {"outline": [], "records": [], "html": []}
    for _ in range(repeats):
        begun = time.perf_counter()
        outline = traces.outline("run-long")
        assert outline is not None
        outlined = time.perf_counter()
        shown = traces.part("run-long", outline.summary.tenant, 0, STEPS_PER_PAGE)
        read = time.perf_counter()
        html = run_page(RunPart(outline, shown))
        for name, took in (
            ("outline", outlined - begun),
            ("records", read - outlined),
            ("html", time.perf_counter() - read),
        ):
            times[name].append(took)
    return {name: round(statistics.median(some) * 1e3, 1) for name, some in times.items()} | {"html_bytes": len(html)}


def browse(url: str, steps: int, repeats: int, folder: Path) -> list[dict[str, Any]]:
    """Open and scroll pages; return what was seen of each."""
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or shutil.which("google-chrome") or ""
    for flag in ("--headless", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder / 'profile'}"):
        options.add_argument(flag)
    if os.geteuid() == 0:
        options.add_argument("--no-sandbox")
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver") or ""))
    browser.set_script_timeout(120)
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    found = []
    try:
        for width, height in ((1360, 900), (390, 844)):
            metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            for page in sorted({1, pages_of(steps) // 2 or 1, pages_of(steps)}):
                opened, frames, cpu = [], list[float](), list[tuple[float, float]]()
                for _ in range(repeats):
                    browser.get(f"{url}/console/runs/run-long?page={page}")
                    opened.append(cast("list[float]", browser.execute_script(OPEN)))
                    loaded_ms = task_ms(browser)
                    seen = cast("list[float]", browser.execute_async_script(SCROLL))
                    cpu.append((loaded_ms, (task_ms(browser) - loaded_ms) / max(len(seen), 1)))
                    frames += seen
                loads = sorted(load for _, load in opened)
                found.append({
                    "width": width, "page": page, "open_ms": round(statistics.median(loads), 1),
                    "open_max_ms": round(loads[-1], 1),
                    "open_cpu_ms": round(statistics.median(load for load, _ in cpu), 1),
                    "frame_cpu_ms": round(statistics.median(frame for _, frame in cpu), 2),
                    "response_ms": round(statistics.median(response for response, _ in opened), 1),
                    "frames": len(frames), "frame_p50_ms": round(statistics.median(frames), 1),
                    "frame_max_ms": round(max(frames), 1),
                })  # fmt: skip
    finally:
        browser.quit()
    return found


def task_ms(browser: webdriver.Chrome) -> float:
    """Return the CPU time that the page's main thread has taken since it was opened."""
    metrics = browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return 1e3 * next(float(each["value"]) for each in metrics if each["name"] == "TaskDuration")


def render(found: dict[str, Any]) -> str:
    """Return a table."""
    lines = [f"{found['steps']:,} steps, {found['steps_per_page']} a page; server: {found['server_ms']}"]
    lines.append(
        f"{'width':>6}{'page':>6}{'open ms':>10}{'worst':>9}{'answer':>9}{'frames':>8}{'p50 ms':>9}{'worst ms':>10}"
    )
    lines += [
        f"{each['width']:>6}{each['page']:>6}{each['open_ms']:>10}{each['open_max_ms']:>9}{each['response_ms']:>9}"
        f"{each['frames']:>8}{each['frame_p50_ms']:>9}{each['frame_max_ms']:>10}{each['open_cpu_ms']:>10}"
        f"{each['frame_cpu_ms']:>11}"
        for each in found["pages"]
    ]
    return "\n".join(lines)
