"""Chromium without a window, driven by selenium through its chromedriver."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
QUIET = ("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--force-prefers-reduced-motion", "--no-proxy-server")
LAPTOP = (1366, 657)  # what a browser leaves of 1366 x 768
LONG = 60  # seconds that no test waits for in vain


class Browser:
    """One tab."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver
        self.resize(*LAPTOP)

    def resize(self, width: int, height: int) -> None:
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False})

    def theme(self, name: str) -> None:
        """ "light" or "dark"."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]})

    def __getitem__(self, name: str) -> WebElement:
        """The element with this id."""
        return self.driver.find_element(By.ID, name)

    def text(self, name: str) -> str:
        return str(self[name].text)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def module(self, script: str, *arguments: Any) -> Any:
        """The value of an async function body; `arguments` are its `args`."""
        code = (
            f"const done = arguments[arguments.length - 1]; const args = arguments; (async () => {{ {script} }})().then(done, (e) => done(String(e)))"
        )
        return self.driver.execute_async_script(code, *arguments)

    def until(self, value: Callable[[], T]) -> T:
        """Wait until it is true."""
        end = time.monotonic() + LONG
        while not (found := value()):
            assert time.monotonic() < end, self.driver.find_element(By.TAG_NAME, "body").text
            time.sleep(0.02)
        return found

    def pixels(self, name: str) -> str:
        """A canvas as it is painted, as a data URL."""
        return str(self.run("return document.getElementById(arguments[0]).toDataURL()", name))

    def complaints(self) -> list[str]:
        """What the page wrote to the console; answers 4xx are what some tests want."""
        return [entry["message"] for entry in self.driver.get_log("browser") if "Failed to load resource" not in entry["message"]]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """`folder`: a new profile is made there. The test is skipped, and says what to install, where there is no Chromium."""
    binary = next(filter(None, map(shutil.which, NAMES)), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip("there is no Chromium with chromedriver: run scripts/get-chromium, or as root: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in (*FLAGS, *QUIET, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    tab = webdriver.Chrome(options, Service(driver))
    try:
        tab.set_script_timeout(LONG)
        yield Browser(tab)
    finally:
        tab.quit()
