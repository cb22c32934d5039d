"""A real browser, headless, for tests of pages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")

needs_chromium = pytest.mark.skipif(
    BROWSER is None or DRIVER is None,
    reason="no Chromium or no chromedriver: `apt-get install chromium chromium-driver` (as root) brings both",
)


@contextmanager
def chromium(profile: Path) -> Iterator[WebDriver]:
    """Run Chromium on a profile of its own; it keeps what pages complain of."""
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER or ""
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
